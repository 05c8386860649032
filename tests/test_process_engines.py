"""Faults of processes on real vLLM engines on the CPU: some of each kind, and what the journals say of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from matrix_run import MatrixRun, matrix_run

from harness.faults.process_kinds import save_tag
from harness.run_folder import RunFolder
from services.journal import EventName, journal_path, read_events

pytestmark = pytest.mark.engine

STRUCK = (
    "recompute-prefill-paused-saving-async-middle-group",
    "recompute-decode-paused-loading-async-middle",
    "recompute-decode-killed-loading-async-middle",
    "recompute-prefill-killed-saving-async-last",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> MatrixRun:
    only = [word for cell in STRUCK for word in ("--only", cell)]
    with matrix_run(tmp_path_factory.mktemp("process") / "runs", "--matrix", "process", *only) as run:
        run.finish()
    return run


def test_engines_that_are_killed_or_paused_in_the_middle_of_a_block(run: MatrixRun) -> None:
    assert run.process.returncode == 0, run.output
    cells = run.cells()
    assert {*STRUCK} < {*cells}
    assert {str(cell["status"]) for cell in cells.values()} == {"pass"}
    fired = {name: cell["evidence"]["fault_fired"] for name, cell in cells.items()}  # type: ignore[index]
    assert {name for name in STRUCK if fired[name] == 1} == {*STRUCK}


def test_a_save_that_was_cut_off_left_the_blocks_before_it(run: MatrixRun) -> None:
    name = STRUCK[-1]
    seen = RunFolder.open(run.folder).load_observation(name)
    (torn,) = (file.name for file in seen.volume.after if file.name.endswith(".tmp"))
    (last,) = {damage.block for damage in seen.volume.damages if Path(damage.file).name in torn}
    there = {damage.block for damage in seen.volume.damages if damage.during != "nothing"}
    assert there == {*range(last)}
    assert {damage.after != "nothing" for damage in seen.volume.damages} == {True}


def test_each_engine_died_as_often_as_it_was_killed(run: MatrixRun) -> None:
    journals = {
        service: read_events(journal_path(run.folder / "evidence", service))[0]
        for service in ("prefill", "decode-recompute", "decode-baseline")
    }
    exits = {
        service: [event.reason for event in events if event.name is EventName.ENGINE_EXITED]
        for service, events in journals.items()
    }
    killed = "signal SIGKILL"
    # The last one is the end of the run.
    assert (exits["prefill"][:-1], exits["decode-recompute"][:-1], exits["decode-baseline"][:-1]) == (
        [killed],
        [killed],
        [],
    )
    held = {event.request for event in journals["prefill"] if event.name is EventName.HELD}
    assert held == {save_tag(STRUCK[0]), save_tag(STRUCK[-1])}
