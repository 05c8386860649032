"""The power tests themselves can fail: whatever is not as a case has it is told."""

from __future__ import annotations

from dataclasses import replace

from harness.records import Report
from tests.power import SKIPPED, WRONG_OUTPUT, Case, surprises
from tests.report_builders import cells, run_report
from tests.ways_to_be_wrong import Wrong

RED = "recompute-report-sync-middle"
CELLS = tuple(cell for cell in cells() if "mix" not in cell.id)


def case(**expected: object) -> Case[Wrong]:
    usual = Case(Wrong.GARBAGE_AFTER_RECOVERY, {RED: WRONG_OUTPUT}, 1, "victim-equals-oracle")
    return replace(usual, **expected)  # type: ignore[arg-type]


def red() -> Report:
    return run_report(CELLS, {RED: "nonsense"})


def test_what_is_as_expected_is_no_surprise() -> None:
    assert surprises(run_report(CELLS), case(verdicts={}, exit_code=0)) == {}
    assert surprises(red(), case()) == {}


def test_a_cell_that_did_not_turn_is_one() -> None:
    assert surprises(run_report(CELLS), case(exit_code=0)).keys() == {RED}


def test_a_cell_that_turned_is_one() -> None:
    assert surprises(red(), case(verdicts={})).keys() == {RED}


def test_a_cell_that_turned_for_another_reason_is_one() -> None:
    assert surprises(red(), case(finding="in-time")).keys() == {RED}


def test_another_exit_code_is_one() -> None:
    assert surprises(red(), case(exit_code=2)) == {"exit code": "1"}


def test_a_skipped_cell_is_one_unless_it_may_be_skipped() -> None:
    whole = run_report(CELLS)
    outcome, status = SKIPPED
    verdicts = (replace(whole.verdicts[0], outcome=outcome, status=status), *whole.verdicts[1:])
    skipped, green = replace(whole, verdicts=verdicts), case(verdicts={}, exit_code=0)
    assert surprises(skipped, green).keys() == {verdicts[0].cell_id}
    assert surprises(skipped, green, (verdicts[0].cell_id,)) == {}
