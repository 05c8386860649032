"""The storage matrix on simulated engines with a real volume: honest ones are green, wrong ones turn the right cells.

Everything between the files, the HTTP answers and the exit code is the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.planning.plan import load_plan, select_cells
from harness.records import Plan, Report
from harness.run_folder import RunFolder
from harness.running import client, phases, runner
from tests.engines import ENGINES
from tests.power import COLLATERAL, CRASHED, HUNG, LEAKED, POISONED, WRONG_OUTPUT, Case, surprises
from tests.simulated_storage import storing_stack
from tests.small_disks import small_disk_at
from tests.ways_to_be_wrong import OF_STORAGE, Wrong

STORAGE = load_plan(Path(__file__).resolve().parents[1] / "harness" / "matrix" / "storage.yaml", ENGINES)

BOUND_BY_MODES = ("*-unreadable-*", "*-read-only-*")
"""Done with file modes; these engines are threads of the tests, which root may run."""
DEADLINE_S = 3.0
"""Of cells in which an engine hangs."""


CASES = (
    Case(
        Wrong.LOADS_DAMAGED_BYTES,
        {"*-flipped-*": WRONG_OUTPUT, "*-payload-missing-*": WRONG_OUTPUT},
        1,
        "failure-reported",
        ("recompute-flipped-last-*", "fail-flipped-last-sync-*", "recompute-payload-missing-sync-first"),
    ),
    Case(Wrong.READS_WITHOUT_DEADLINE, {"*-endless-*": HUNG}, 1, "in-time", ("*-endless-read-sync-*",)),
    Case(
        Wrong.KEEPS_LATE_BYTES,
        {"*-late-*": POISONED},
        1,
        "canary-equals-oracle",
        ("*-late-read-sync-*",),
    ),
    Case(
        Wrong.FAILS_WITH_STORAGE,
        {"recompute-emptied-*": WRONG_OUTPUT},
        1,
        "victim-equals-oracle",
        ("*-emptied-sync",),
    ),
    Case(Wrong.HOLDS_BLOCKS, {"*-zeroed-*": LEAKED}, 1, "nothing-leaked", ("*-zeroed-sync-*",)),
    Case(
        Wrong.PUBLISHES_TORN_BLOCKS,
        {"fail-full-disk-*": WRONG_OUTPUT, "*-full-disk-*": POISONED},
        1,
        "torn-block-found",
        ("*-full-disk-*-middle", "*-full-disk-sync-last"),
    ),
    Case(
        Wrong.PREFILL_FAILS_WITHOUT_ROOM,
        {"*-full-disk-*": COLLATERAL},
        1,
        "save-answered",
        ("*-full-disk-sync-middle",),
    ),
    Case(
        Wrong.PREFILL_DIES_WITHOUT_ROOM,
        {"*-full-disk-*": CRASHED},
        1,
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


def surprises_here(report: Report, case: Case[Wrong], small_dir: Path | None) -> dict[str, str]:
    """Where no small disk can be mounted, the cells about one are skipped."""
    if small_dir is not None:
        return surprises(report, case, BOUND_BY_MODES)
    turns_nothing = all("full-disk" in pattern for pattern in case.verdicts)
    return surprises(report, replace(case, exit_code=0) if turns_nothing else case, (*BOUND_BY_MODES, "*-full-disk-*"))


def test_honest_engines_are_green_in_the_whole_matrix(tmp_path: Path, small_dir: Path | None) -> None:
    report = run(STORAGE, tmp_path, Wrong.NOTHING, small_dir)
    assert surprises_here(report, Case(Wrong.NOTHING, {}, 0, ""), small_dir) == {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.wrong)
def test_wrong_engines(
    case: Case[Wrong], tmp_path: Path, small_dir: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RESET_TIMEOUT_S", 0.2)
    monkeypatch.setattr(runner, "SETTLE_DEADLINE_S", 0.5)
    plan = select_cells(STORAGE, case.patterns)
    cells = (replace(cell, deadline_s=DEADLINE_S) if "endless" in cell.id else cell for cell in plan.cells)
    report = run(replace(plan, cells=tuple(cells)), tmp_path, case.wrong, small_dir)
    assert surprises_here(report, case, small_dir) == {}


def test_every_way_to_be_wrong_is_tested() -> None:
    assert {case.wrong for case in CASES} == OF_STORAGE
