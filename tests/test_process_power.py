"""The process matrix on simulated engines that can be killed and paused: honest ones pass, wrong ones turn their cells.

Everything between the signals, the files, the HTTP answers and the exit code is the product.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.planning.plan import load_plan, select_cells
from harness.records import Cell, Plan, Report
from harness.run_folder import RunFolder
from harness.running import client, phases, runner
from tests.engines import ENGINES
from tests.power import (
    CRASHED,
    HUNG,
    LEAKED,
    POISONED,
    SOON_S,
    UNPROVEN,
    WRONG_OUTPUT,
    Case,
    surprises,
    with_soon_given_up,
)
from tests.simulated_processes import Failing, mortal_stack

PROCESS = load_plan(Path(__file__).resolve().parents[1] / "harness" / "matrix" / "process.yaml", ENGINES)

SAVING, PUBLISHING, PAUSED = "*-prefill-killed-saving-*", "*-prefill-killed-publishing-*", "*-prefill-paused-*"
LOADING, GIVEN_UP = "*-decode-killed-*", "*-decode-paused-*"


CASES = (
    Case(
        Failing.NEVER_STOPS,
        {PAUSED: UNPROVEN, LOADING: UNPROVEN, SAVING: UNPROVEN, PUBLISHING: UNPROVEN},
        2,
        "fault-fired",
        ("fail-prefill-*-sync-*", "recompute-prefill-killed-saving-async-*", "fail-decode-killed-*"),
    ),
    Case(
        Failing.WORKS_WHILE_PAUSED,
        {PAUSED: UNPROVEN, GIVEN_UP: UNPROVEN},
        2,
        "fault-fired",
        ("fail-prefill-paused-*", "recompute-decode-paused-loading-sync-*"),
    ),
    Case(
        Failing.PUBLISHES_FIRST,
        {SAVING: POISONED, PAUSED: POISONED},
        1,
        "published-whole",
        ("fail-prefill-killed-saving-*", "recompute-prefill-paused-*"),
    ),
    Case(
        Failing.FINDS_PAYLOADS,
        {PUBLISHING: POISONED},
        1,
        "nothing-unpublished",
        ("fail-prefill-killed-*",),
    ),
    Case(
        Failing.WAITS_FOR_PRODUCER,
        {PAUSED: HUNG, SAVING: HUNG},
        1,
        "in-time",
        ("fail-prefill-paused-*", "fail-prefill-killed-saving-*"),
    ),
    Case(
        Failing.FAILS_ON_MISS,
        {"fail-prefill-*": WRONG_OUTPUT},
        1,
        "victim-equals-oracle",
        ("fail-prefill-paused-*", "recompute-prefill-killed-saving-sync-*"),
    ),
    Case(
        Failing.GARBAGE_AFTER_SAVE,
        {SAVING: WRONG_OUTPUT, PAUSED: WRONG_OUTPUT},
        1,
        "victim-equals-oracle",
        ("recompute-prefill-killed-saving-async-*", "fail-prefill-paused-*"),
    ),
    Case(
        Failing.STALE_AFTER_RESTART,
        {LOADING: POISONED},
        1,
        "canary-equals-oracle",
        ("recompute-decode-killed-*", "recompute-prefill-paused-*"),
    ),
    Case(Failing.SPOILS_FILES, {LOADING: POISONED}, 1, "volume-unchanged", ("fail-decode-killed-*",)),
    Case(Failing.ANSWERS_WHEN_KILLED, {LOADING: WRONG_OUTPUT}, 1, "victim-got-nothing", ("fail-decode-killed-*",)),
    Case(Failing.LEAKS_AFTER_PAUSE, {GIVEN_UP: LEAKED}, 1, "nothing-leaked", ("recompute-decode-paused-*-sync-*",)),
    Case(Failing.DIES_OF_PAUSE, {GIVEN_UP: CRASHED}, 1, "engine-alive", ("recompute-decode-paused-*-async-*",)),
    Case(Failing.DIES_OF_PAUSE, {PAUSED: CRASHED}, 1, "producer-serves", ("fail-prefill-paused-*",)),
    Case(Failing.NEVER_SAVES_AGAIN, {SAVING: POISONED}, 1, "volume-unchanged", ("fail-prefill-killed-saving-*",)),
    Case(Failing.REFUSES_AFTERWARDS, {SAVING: CRASHED}, 1, "producer-serves", ("fail-prefill-killed-saving-*",)),
)


def impatient(cell: Cell, failing: Failing) -> Cell:
    """With a client that gives up soon, where that is what is awaited."""
    waits = failing is Failing.WAITS_FOR_PRODUCER and cell.process is not None
    return replace(cell, deadline_s=SOON_S) if waits else with_soon_given_up(cell)


def run(plan: Plan, tmp_path: Path, failing: Failing) -> Report:
    folder = RunFolder.create(tmp_path / "runs", "run")
    cells = tuple(impatient(cell, failing) for cell in plan.cells)
    with mortal_stack(tmp_path, failing, cells) as stack:
        invocation = phases.Invocation("process", "pytest")
        return phases.run(replace(plan, cells=cells), stack, folder, invocation, phases.Watcher())


def test_honest_engines_are_green_in_the_whole_matrix(tmp_path: Path) -> None:
    report = run(PROCESS, tmp_path, Failing.NOTHING)
    assert surprises(report, Case(Failing.NOTHING, {}, 0, "", ())) == {}
    struck = {cell.id for cell in report.cells if cell.process}
    fired = {verdict.cell_id: verdict.evidence.fault_fired for verdict in report.verdicts if verdict.cell_id in struck}
    assert set(fired.values()) == {1}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.wrong}: {next(iter(case.verdicts))}")
def test_wrong_engines(case: Case[Failing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SETTLE_DEADLINE_S", 0.3)
    monkeypatch.setattr(client, "RESET_TIMEOUT_S", 0.3)
    assert surprises(run(select_cells(PROCESS, case.patterns), tmp_path, case.wrong), case) == {}


def test_every_way_to_be_wrong_is_tested() -> None:
    assert {case.wrong for case in CASES} == set(Failing) - {Failing.NOTHING}
