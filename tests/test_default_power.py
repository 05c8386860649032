"""The default matrix, all layers of it, on honest simulated engines: green, and in seconds.

What each way to be wrong turns is tested where its matrix is: test_power.py, test_workloads_power.py and those of
storage and processes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.planning.plan import load_plan
from harness.records import Outcome
from harness.run_folder import RunFolder
from harness.running import phases
from tests.engines import ENGINES
from tests.power import Case, surprises, with_soon_given_up
from tests.simulated_processes import Failing, mortal_stack
from tests.small_disks import small_disk_at

DEFAULT = load_plan(Path(__file__).resolve().parents[1] / "harness" / "matrix" / "default.yaml", ENGINES)
BOUND_BY_MACHINE = ("*-read-only-*", "*-full-disk-*")
"""Root obeys no file modes, and a small disk may not be mounted by anybody else."""


def test_honest_engines_are_green_in_the_default_matrix(tmp_path: Path) -> None:
    cells = tuple(with_soon_given_up(cell) for cell in DEFAULT.cells)
    folder, small = RunFolder.create(tmp_path / "runs", "run"), tmp_path / "small"
    small.mkdir()
    with small_disk_at(small, "2m") as small_dir, mortal_stack(tmp_path, Failing.NOTHING, cells) as stack:
        stack.small_dir = small_dir
        invocation = phases.Invocation("default", "pytest")
        report = phases.run(replace(DEFAULT, cells=cells), stack, folder, invocation, phases.Watcher())
    assert surprises(report, Case(Failing.NOTHING, {}, 0, ""), BOUND_BY_MACHINE) == {}
    layers = {(cell.storage is not None, cell.process is not None) for cell in report.cells}
    assert layers == {(False, False), (True, False), (False, True)}
    broken = {cell.id for cell in report.cells if cell.storage or cell.process}
    ran = [v for v in report.verdicts if v.outcome is not Outcome.NOT_RUN]
    assert [v.cell_id for v in ran if v.cell_id in broken and not v.evidence.fault_fired] == []
