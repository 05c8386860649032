"""The storage matrix on simulated engines with a real volume: honest ones are green, wrong ones turn the right cells.

Everything between the files, the HTTP answers and the exit code is the product.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from harness import client, phases, runner
from harness.plan import load_plan, select_cells
from harness.records import Cell, Outcome, Plan, Report, Status, Verdict
from harness.storage import RunFolder
from tests.engines import ENGINES
from tests.simulated_storage import storing_stack
from tests.small_disks import small_disk_at
from tests.ways_to_be_wrong import OF_STORAGE, Wrong

STORAGE = load_plan(Path(__file__).resolve().parents[1] / "harness" / "matrix" / "storage.yaml", ENGINES)

Verdicts = tuple[Outcome, Status]

FAILED = {
    outcome: (outcome, Status.FAIL)
    for outcome in (
        Outcome.WRONG_OUTPUT,
        Outcome.UNREPORTED,
        Outcome.POISONED,
        Outcome.COLLATERAL,
        Outcome.CRASHED,
        Outcome.HUNG,
        Outcome.LEAKED,
    )
}
SKIPPED = (Outcome.NOT_RUN, Status.SKIPPED)
BOUND_BY_MODES = ("*-unreadable-*", "*-read-only-*")
"""Done with file modes; these engines are threads of the tests, which root may run."""
DEADLINE_S = 3.0
"""Of cells in which an engine hangs."""


@dataclass(frozen=True)
class Case:
    """`verdicts`: by glob of cell ids, the first that matches; every other cell passes. `finding`: a check that must be
    broken in each cell that does not pass. `patterns`: the cells, besides their controls."""

    wrong: Wrong
    verdicts: Mapping[str, Verdicts]
    finding: str
    patterns: tuple[str, ...]


CASES = (
    Case(
        Wrong.LOADS_DAMAGED_BYTES,
        {"*-flipped-*": FAILED[Outcome.WRONG_OUTPUT], "*-payload-missing-*": FAILED[Outcome.WRONG_OUTPUT]},
        "failure-reported",
        ("recompute-flipped-last-*", "fail-flipped-last-sync-*", "recompute-payload-missing-sync-first"),
    ),
    Case(Wrong.READS_WITHOUT_DEADLINE, {"*-endless-*": FAILED[Outcome.HUNG]}, "in-time", ("*-endless-read-sync-*",)),
    Case(
        Wrong.KEEPS_LATE_BYTES,
        {"*-late-*": FAILED[Outcome.POISONED]},
        "canary-equals-oracle",
        ("*-late-read-sync-*",),
    ),
    Case(
        Wrong.FAILS_WITH_STORAGE,
        {"recompute-emptied-*": FAILED[Outcome.WRONG_OUTPUT]},
        "victim-equals-oracle",
        ("*-emptied-sync",),
    ),
    Case(Wrong.HOLDS_BLOCKS, {"*-zeroed-*": FAILED[Outcome.LEAKED]}, "nothing-leaked", ("*-zeroed-sync-*",)),
    Case(
        Wrong.PUBLISHES_TORN_BLOCKS,
        {"fail-full-disk-*": FAILED[Outcome.WRONG_OUTPUT], "*-full-disk-*": FAILED[Outcome.POISONED]},
        "torn-block-found",
        ("*-full-disk-*-middle", "*-full-disk-sync-last"),
    ),
    Case(
        Wrong.PREFILL_FAILS_WITHOUT_ROOM,
        {"*-full-disk-*": FAILED[Outcome.COLLATERAL]},
        "save-answered",
        ("*-full-disk-sync-middle",),
    ),
    Case(
        Wrong.PREFILL_DIES_WITHOUT_ROOM,
        {"*-full-disk-*": FAILED[Outcome.CRASHED]},
        "producer-alive",
        ("*-full-disk-sync-middle",),
    ),
)


@pytest.fixture(scope="session")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A folder on a small disk, where this user may mount one."""
    with small_disk_at(tmp_path_factory.mktemp("small"), "2m") as folder:
        yield folder


def run(plan: Plan, tmp_path: Path, wrong: Wrong, small_dir: Path | None) -> Report:
    folder = RunFolder.create(tmp_path / "runs", "run")
    with storing_stack(tmp_path, wrong) as stack:
        stack.small_dir = small_dir
        return phases.run(plan, stack, folder, phases.Invocation("storage", "pytest"), phases.Watcher())


def check(report: Report, case: Case, small_dir: Path | None) -> None:
    """All cells at once, so that a failure shows the whole picture."""
    got = {verdict.cell_id: (verdict.outcome, verdict.status) for verdict in report.verdicts}
    assert got == {cell.id: expected(cell, case, small_dir, got[cell.id]) for cell in report.cells}
    turned = [verdict for verdict in report.verdicts if verdict.status not in (Status.PASS, Status.SKIPPED)]
    assert [v.cell_id for v in turned if case.finding not in broken(v)] == []


def expected(cell: Cell, case: Case, small_dir: Path | None, got: Verdicts) -> Verdicts:
    if cell.storage and (cell.storage.kind == "full-disk" and small_dir is None):
        return SKIPPED
    if any(fnmatch.fnmatch(cell.id, pattern) for pattern in BOUND_BY_MODES) and got == SKIPPED:
        return SKIPPED
    matching = (verdict for pattern, verdict in case.verdicts.items() if fnmatch.fnmatch(cell.id, pattern))
    return next(matching, (cell.expected, Status.PASS))


def broken(verdict: Verdict) -> set[str]:
    return {finding.check for finding in verdict.findings if not finding.ok}


def test_honest_engines_are_green_in_the_whole_matrix(tmp_path: Path, small_dir: Path | None) -> None:
    report = run(STORAGE, tmp_path, Wrong.NOTHING, small_dir)
    check(report, Case(Wrong.NOTHING, {}, "", ()), small_dir)
    assert report.exit_code == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.wrong)
def test_wrong_engines(case: Case, tmp_path: Path, small_dir: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RESET_TIMEOUT_S", 0.2)
    monkeypatch.setattr(runner, "SETTLE_DEADLINE_S", 0.5)
    plan = select_cells(STORAGE, case.patterns)
    cells = (replace(cell, deadline_s=DEADLINE_S) if "endless" in cell.id else cell for cell in plan.cells)
    check(run(replace(plan, cells=tuple(cells)), tmp_path, case.wrong, small_dir), case, small_dir)


def test_every_way_to_be_wrong_is_tested() -> None:
    assert {case.wrong for case in CASES} == OF_STORAGE
