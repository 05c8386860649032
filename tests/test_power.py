"""The power of the whole harness: an honest engine is green, and each way to be wrong turns just the right cells.

Everything between the HTTP answers of four simulated engines and the exit code is the product.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.planning.plan import load_plan, select_cells
from harness.records import Outcome, Plan, Report, Status
from harness.run_folder import RunFolder
from harness.running import phases, runner
from harness.stack import AttachStack
from services.faults import FaultKind
from services.journal import EventName, Journal
from tests.engines import ENGINES
from tests.power import (
    COLLATERAL,
    CRASHED,
    HUNG,
    LEAKED,
    MISSED,
    POISONED,
    SKIPPED,
    UNPROVEN,
    UNREPORTED,
    WRONG_OUTPUT,
    Case,
    surprises,
)
from tests.simulated_engine import simulated_stack
from tests.ways_to_be_wrong import OF_COMPANY, OF_STORAGE, Wrong

MATRIX = Path(__file__).resolve().parents[1] / "harness" / "matrix" / "example.yaml"
EXAMPLE = load_plan(MATRIX, ENGINES)
QUIET = load_plan(MATRIX.with_name("quiet.yaml"), ENGINES)
QUIET_REQUEST_COUNT = 300

MIDDLE = ("*-report-*-middle",)
MIX = ("*-report-*-mix",)
USUAL = (*MIDDLE, *MIX, "*-stream")
"""With the controls: every workload and policy once."""

DEADLINE_S = 0.4
"""Of cells in which the engine hangs; a minute otherwise."""
SETTLE_DEADLINE_S = 0.2
"""For engines that never come to rest; ten seconds otherwise."""

FAILED_CLEANLY = (Outcome.FAILED_CLEANLY, Status.PASS)
UNEXPECTED_RECOVERY = (Outcome.RECOVERED, Status.FAIL)


CASES = (
    Case(
        Wrong.GARBAGE_AFTER_RECOVERY,
        {"recompute-report-*": WRONG_OUTPUT, "recompute-drop-*": WRONG_OUTPUT},
        1,
        "victim-equals-oracle",
        ("recompute-*",),
    ),
    Case(Wrong.GARBAGE_ONCE, {"recompute-report-*": WRONG_OUTPUT}, 1, "victim-equals-oracle", MIDDLE),
    Case(Wrong.ANSWERS_SWAPPED, {"*-mix": WRONG_OUTPUT}, 1, "foreign-secret", MIX),
    Case(Wrong.STALE_ANSWER, {"recompute-report-*": WRONG_OUTPUT}, 1, "victim-equals-oracle", MIDDLE),
    Case(Wrong.TOKEN_MISSING, {"recompute-report-*": WRONG_OUTPUT}, 1, "victim-equals-oracle", MIDDLE),
    Case(Wrong.FINISH_REASON, {"recompute-report-*": WRONG_OUTPUT}, 1, "victim-equals-oracle", MIDDLE),
    Case(Wrong.PROMPT_TOKEN_COUNT, {"recompute-report-*": WRONG_OUTPUT}, 1, "victim-equals-oracle", MIDDLE),
    Case(
        Wrong.ERROR_BODY_WITH_200,
        {"fail-report-*-stream": FAILED_CLEANLY, "*-report-*": WRONG_OUTPUT},
        1,
        "victim-equals-oracle",
    ),
    Case(Wrong.ERROR_INSTEAD_OF_RECOVERY, {"recompute-report-*": WRONG_OUTPUT}, 1, "victim-equals-oracle"),
    Case(Wrong.CONNECTION_RESET, {"*-report-*": WRONG_OUTPUT}, 1, "victim-equals-oracle"),
    Case(Wrong.LOADED_GARBAGE, {"*-none-*": WRONG_OUTPUT, "*": UNPROVEN}, 1, "victim-equals-oracle", MIDDLE),
    Case(Wrong.DELAYED_GARBAGE, {"*-delay-*": WRONG_OUTPUT}, 1, "victim-equals-oracle", ("*-delay-*",)),
    Case(Wrong.CANARY_ERROR, {"*-silent-*": UNPROVEN, "*": POISONED}, 1, "canary-equals-oracle", MIDDLE),
    Case(
        Wrong.SHARER_ERROR,
        {"fail-report-sync-*-mix": FAILED_CLEANLY, "*-mix": COLLATERAL},
        1,
        "sharer-equals-oracle",
        MIX,
    ),
    Case(Wrong.BYSTANDER_GARBAGE, {"*-mix": COLLATERAL}, 1, "bystander-equals-oracle", MIX),
    Case(Wrong.BYSTANDER_ERROR, {"*-mix": COLLATERAL}, 1, "bystander-equals-oracle", MIX),
    Case(Wrong.SHARER_GARBAGE, {"*-mix": COLLATERAL}, 1, "sharer-equals-oracle", MIX),
    Case(Wrong.POISONED_CACHE, {"*-report-*": POISONED}, 1, "canary-equals-oracle"),
    Case(Wrong.FAIL_GIVES_GARBAGE, {"fail-report-*": WRONG_OUTPUT}, 1, "victim-equals-oracle"),
    Case(Wrong.FAIL_GIVES_TEXT_THEN_ERROR, {"fail-report-*": WRONG_OUTPUT}, 1, "victim-equals-oracle"),
    Case(Wrong.FAIL_RECOVERS, {"fail-report-*": UNEXPECTED_RECOVERY}, 1, "expected-outcome"),
    Case(Wrong.FAIL_BLAMES_CLIENT, {"fail-report-*": WRONG_OUTPUT}, 1, "victim-equals-oracle"),
    Case(Wrong.FAIL_BREAKS_STREAM_OFF, {"fail-report-*-stream": WRONG_OUTPUT}, 1, "victim-equals-oracle"),
    Case(Wrong.FAIL_ENDS_STREAM_EMPTY, {"fail-report-*-stream": WRONG_OUTPUT}, 1, "victim-equals-oracle"),
    Case(Wrong.DIES, {"*-report-*": CRASHED}, 1, "engine-alive"),
    Case(Wrong.REPORTS_NOTHING, {"*-report-*": WRONG_OUTPUT}, 1, "failure-reported"),
    Case(Wrong.REPORT_NOT_JOURNALED, {"*-report-*": UNREPORTED}, 1, "failure-reported"),
    Case(Wrong.REPORTS_ANOTHER_BLOCK, {"*-report-*": UNPROVEN}, 2, "nothing-else-failed", MIDDLE),
    Case(Wrong.FIRES_ELSEWHERE, {"*-report-*": UNPROVEN}, 2, "fault-fired", MIDDLE),
    Case(Wrong.FIRES_NEVER, {"*-report-*": UNPROVEN}, 2, "fault-fired", MIDDLE),
    Case(Wrong.FIRES_TWICE, {"*-report-*": UNPROVEN}, 2, "fault-fired", MIDDLE),
    Case(Wrong.STORE_FAILS, {"*-report-*": UNPROVEN}, 2, "nothing-else-failed", MIDDLE),
    Case(Wrong.LOADS_NOTHING, {"*": UNPROVEN}, 2, "kv-loaded", MIDDLE),
    Case(Wrong.LOADS_ONE_BLOCK_LESS, {"*": UNPROVEN}, 2, "kv-loaded", MIDDLE),
    Case(Wrong.LOADS_SYNC, {"*-async": SKIPPED, "*-async-*": SKIPPED}, 0, "load-mode", MIDDLE),
    Case(Wrong.REJECTS_FAULTS, {"*": UNPROVEN}, 2, "control-accepted", MIDDLE),
    Case(Wrong.SILENT_INVISIBLE, {"*-silent-*": MISSED, "*": UNPROVEN}, 2, "control-caught", MIDDLE),
    Case(Wrong.SILENT_ERROR, {"*-silent-*": MISSED, "*": UNPROVEN}, 2, "control-caught", MIDDLE),
    Case(Wrong.ORACLE_UNSTABLE, {"*": UNPROVEN}, 2, "oracle-stable", MIDDLE),
    Case(Wrong.ORACLE_LOADS_NOTHING, {"*": UNPROVEN}, 2, "oracle-loaded", MIDDLE),
)


def run(plan: Plan, tmp_path: Path, wrong: Wrong = Wrong.NOTHING) -> Report:
    folder = RunFolder.create(tmp_path / "runs", "run")
    with simulated_stack(tmp_path / "evidence", wrong, plan.cells) as stack:
        return phases.run(plan, stack, folder, phases.Invocation("example", "pytest"), phases.Watcher())


def test_honest_engines_are_green_in_the_whole_example(tmp_path: Path) -> None:
    report = run(EXAMPLE, tmp_path)
    assert surprises(report, Case(Wrong.NOTHING, {}, 0, "")) == {}
    different = {verdict.cell_id for verdict in report.verdicts if verdict.differences}
    assert different == {cell.id for cell in report.cells if cell.expected is Outcome.CAUGHT}


def test_honest_engines_are_green_with_every_fault_of_the_robustness_matrix(tmp_path: Path) -> None:
    """Also where vLLM is red: what is asked of an engine can be done."""
    assert (
        surprises(
            run(load_plan(MATRIX.with_name("robustness.yaml"), ENGINES), tmp_path), Case(Wrong.NOTHING, {}, 0, "")
        )
        == {}
    )


def test_honest_engines_give_no_alarm_in_hundreds_of_quiet_requests(tmp_path: Path) -> None:
    report = run(QUIET, tmp_path)
    assert surprises(report, Case(Wrong.NOTHING, {}, 0, "")) == {}
    quiet = {cell.id for cell in report.cells if cell.expected is Outcome.LOADED}
    assert sum(len(seen.requests) for seen in report.observations if seen.cell_id in quiet) >= QUIET_REQUEST_COUNT
    assert {verdict.cell_id for verdict in report.verdicts if verdict.differences}.isdisjoint(quiet)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.wrong)
def test_wrong_engines(case: Case[Wrong], tmp_path: Path) -> None:
    assert surprises(run(select_cells(EXAMPLE, case.patterns or USUAL), tmp_path, case.wrong), case) == {}


@pytest.mark.parametrize("wrong", [Wrong.LEAKS_REQUEST, Wrong.LEAKS_BLOCKS])
def test_engines_that_never_come_to_rest(wrong: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SETTLE_DEADLINE_S", SETTLE_DEADLINE_S)
    case = Case(wrong, {"*-report-*": LEAKED}, 1, "nothing-leaked", MIDDLE)
    assert surprises(run(select_cells(EXAMPLE, case.patterns or USUAL), tmp_path, wrong), case) == {}


def test_an_engine_that_does_not_come_to_rest_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each leak with a cell after it, where the stack can; each leaks a second time when run again."""
    killed: list[str] = []

    def kill_engine(stack: AttachStack, service: str) -> None:
        killed.append(service)
        Journal(stack.evidence_dir, service).write(EventName.ENGINE_EXITED, reason="signal SIGKILL", pid=1)
        Journal(stack.evidence_dir, service).write(EventName.ENGINE_READY, pid=1)

    monkeypatch.setattr(runner, "SETTLE_DEADLINE_S", SETTLE_DEADLINE_S)
    monkeypatch.setattr(AttachStack, "kill_engine", kill_engine)
    case = Case(Wrong.LEAKS_BLOCKS, {"*-report-*": LEAKED}, 1, "nothing-leaked", ("recompute-report-sync-*",))
    report = run(select_cells(EXAMPLE, case.patterns or USUAL), tmp_path, case.wrong)
    leaked = [cell.engine for cell in report.cells if cell.fault.kind is FaultKind.REPORT]
    assert len(leaked) > 1
    assert killed == [*leaked, *leaked][:-1]
    assert surprises(report, case) == {}


def test_engines_that_hang(tmp_path: Path) -> None:
    case = Case(Wrong.HANGS, {"*-report-*": HUNG}, 1, "in-time", MIDDLE)
    plan = select_cells(EXAMPLE, case.patterns or USUAL)
    cells = (cell if cell.control else replace(cell, deadline_s=DEADLINE_S) for cell in plan.cells)
    assert surprises(run(replace(plan, cells=tuple(cells)), tmp_path, case.wrong), case) == {}


def test_streams_that_just_stop(tmp_path: Path) -> None:
    case = Case(Wrong.STREAM_WITHOUT_END, {"recompute-report-*": WRONG_OUTPUT}, 1, "victim-equals-oracle", MIDDLE)
    assert surprises(run(streamed(select_cells(EXAMPLE, case.patterns or USUAL)), tmp_path, case.wrong), case) == {}


def test_near_ties_stay_green_and_are_told(tmp_path: Path) -> None:
    case = Case(Wrong.NEAR_TIE, {}, 0, "")
    report = run(select_cells(EXAMPLE, USUAL), tmp_path, case.wrong)
    assert surprises(report, case) == {}
    ties = {verdict.cell_id for verdict in report.verdicts if any(d.near_tie for d in verdict.differences)}
    assert ties == {cell.id for cell in report.cells if cell.expected is Outcome.RECOVERED}


def streamed(plan: Plan) -> Plan:
    """The plan with every answer as a stream."""
    cells = (replace(cell, requests=tuple(replace(r, stream=True) for r in cell.requests)) for cell in plan.cells)
    return replace(plan, cells=tuple(cells))


def test_every_way_to_be_wrong_is_tested() -> None:
    apart = {Wrong.NOTHING, Wrong.NEAR_TIE, Wrong.HANGS, Wrong.STREAM_WITHOUT_END}
    apart |= {Wrong.LEAKS_REQUEST, Wrong.LEAKS_BLOCKS} | OF_STORAGE | OF_COMPANY
    assert {case.wrong for case in CASES} == set(Wrong) - apart
