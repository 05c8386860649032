"""The workloads on simulated engines: requests that meet in a repair, clients that leave, full pools, chats.

An honest stack is green in every cell, also where vLLM is red; each way to be wrong turns just the cells about it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.planning.plan import load_plan, select_cells
from harness.records import Cell, Plan, Report, Role
from harness.run_folder import RunFolder
from harness.running import client, phases, runner
from services.faults import FaultKind, LoadMode
from tests.engines import ENGINES
from tests.power import (
    COLLATERAL,
    CRASHED,
    HUNG,
    LEAKED,
    POISONED,
    UNPROVEN,
    WRONG_OUTPUT,
    Case,
    surprises,
)
from tests.simulated_engine import simulated_stack
from tests.ways_to_be_wrong import OF_COMPANY, Wrong

WORKLOADS = load_plan(Path(__file__).resolve().parents[1] / "harness" / "matrix" / "workloads.yaml", ENGINES)

SETTLE_DEADLINE_S = 0.3
"""For engines that never come to rest; ten seconds otherwise."""
DEADLINE_S = 1.0
"""Of requests that starve; a minute otherwise."""
PARKED_S = 1.0
"""How late parked loads are; four seconds otherwise."""
BYSTANDER_DEADLINE_S = 0.4
"""Of the bystander of parked loads; three seconds otherwise."""

CHATS = ("*-chat*",)
DEPARTURES = ("*-given-up",)
PREEMPTIONS = ("*-preempted",)
TWINS = ("*-twin", "*-twin-given-up")

CASES = (
    Case(
        Wrong.REPAIR_IS_SHARED,
        {
            "*-report-sync-all-twin*": COLLATERAL,
            "*-report-sync-all-late*": COLLATERAL,
            "*-report-sync-blocks-*-group": COLLATERAL,
        },
        1,
        "sharer-equals-oracle",
        (*TWINS, "*-late*", "chunked-*-group"),
    ),
    Case(Wrong.GIVEN_UP_REPAIR_STAYS, {"*-sync-all-*given-up": POISONED}, 1, "canary-equals-oracle", DEPARTURES),
    Case(
        Wrong.PREEMPTED_RESUMES_ON_BAD,
        {"tight-report-sync-*-preempted": WRONG_OUTPUT},
        1,
        "victim-equals-oracle",
        PREEMPTIONS,
    ),
    Case(Wrong.DEPARTURE_KILLS, {"*-given-up": CRASHED}, 1, "engine-alive", ("recompute-*-given-up", "tight-*-twin-*")),
    Case(Wrong.DEPARTURE_LEAKS, {"*-given-up": LEAKED}, 1, "nothing-leaked", ("fail-*-given-up", "tight-*-given-up")),
    Case(Wrong.DEPARTURE_ENDS_SHARER, {"*-twin-given-up": COLLATERAL}, 1, "sharer-equals-oracle", TWINS),
    Case(
        Wrong.LATE_WRITES_HIT_OTHERS,
        {"tight-delay-*-given-up": COLLATERAL},
        1,
        "bystander-equals-oracle",
        ("tight-*-given-up",),
    ),
    Case(
        Wrong.PARKED_LOADS_BLOCK,
        {"*-all-parked": HUNG},
        1,
        "in-time",
        ("*-all-parked", "*-full-pool"),
    ),
    Case(Wrong.PARKED_LOADS_BLOCK, {"*-unhindered": HUNG}, 1, "in-time", ("*-pending-*",)),
    Case(Wrong.PENDING_IS_FINAL, {"*-pending-*": HUNG}, 1, "in-time", ("recompute-pending-*",)),
    Case(
        Wrong.FULL_POOL_IS_FINAL,
        {"*-full-pool": HUNG, "*-preempted": HUNG},
        1,
        "in-time",
        ("*-full-pool", "tight-report-sync-*-preempted"),
    ),
    Case(Wrong.PREEMPTS_NOBODY, {"*-preempted": UNPROVEN}, 2, "victim-preempted", PREEMPTIONS),
    Case(Wrong.PREEMPTION_SPOILS_OTHERS, {"*-preempted": COLLATERAL}, 1, "bystander-equals-oracle", PREEMPTIONS),
    Case(
        Wrong.LOADS_FROM_NOWHERE,
        {"*": UNPROVEN},
        2,
        "kv-loaded",
        ("*-below-a-block", "recompute-report-*-border", "fail-*-chat"),
    ),
    Case(Wrong.LOADS_LAST_TOKEN, {"*": UNPROVEN}, 2, "kv-loaded", ("*-border*",)),
    Case(Wrong.CHAT_GARBAGE, {"recompute-*-chat*": WRONG_OUTPUT}, 1, "victim-equals-oracle", CHATS),
    Case(Wrong.CHAT_TOKEN_MISSING, {"recompute-*-chat*": WRONG_OUTPUT}, 1, "victim-equals-oracle", CHATS),
    Case(Wrong.CHAT_FAILS_WITH_TEXT, {"fail-*-chat*": WRONG_OUTPUT}, 1, "victim-equals-oracle", CHATS),
)


def run(plan: Plan, tmp_path: Path, wrong: Wrong) -> Report:
    folder = RunFolder.create(tmp_path / "runs", "run")
    with simulated_stack(tmp_path / "evidence", wrong, plan.cells) as stack:
        return phases.run(plan, stack, folder, phases.Invocation("workloads", "pytest"), phases.Watcher())


def impatient(cell: Cell, wrong: Wrong) -> Cell:
    """Where a way to be wrong shows by a deadline, one that is soon over."""
    match wrong:
        case Wrong.FULL_POOL_IS_FINAL if cell.id.endswith(("-full-pool", "-preempted")):
            return replace(cell, deadline_s=DEADLINE_S)
        case Wrong.PENDING_IS_FINAL if cell.fault.kind is FaultKind.PENDING:
            return replace(cell, deadline_s=2 * BYSTANDER_DEADLINE_S)
        case Wrong.PARKED_LOADS_BLOCK if cell.id.endswith(("-all-parked", "-unhindered")):
            requests = (
                replace(request, deadline_s=BYSTANDER_DEADLINE_S)
                if request.role is Role.BYSTANDER
                else replace(request, fault=replace(request.fault, delay_s=PARKED_S))
                for request in cell.requests
            )
            return replace(cell, requests=tuple(requests))
        case _:
            return cell


def test_honest_engines_are_green_in_all_workloads(tmp_path: Path) -> None:
    report = run(WORKLOADS, tmp_path, Wrong.NOTHING)
    assert surprises(report, Case(Wrong.NOTHING, {}, 0, "")) == {}
    asked = {request.planned for seen in report.observations for request in seen.requests}
    left = [record for seen in report.observations for record in seen.requests if record.completion.gave_up]
    preempted = [seen for seen in report.observations if seen.after.preemption_count > seen.before.preemption_count]
    assert {request.load for request in asked} == set(LoadMode)
    assert len(left) == sum(request.gives_up is not None for cell in report.cells for request in cell.requests)
    assert len(preempted) == sum(cell.preempts for cell in report.cells)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.wrong)
def test_wrong_engines(case: Case[Wrong], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SETTLE_DEADLINE_S", SETTLE_DEADLINE_S)
    monkeypatch.setattr(client, "RESET_TIMEOUT_S", SETTLE_DEADLINE_S)
    plan = select_cells(WORKLOADS, case.patterns)
    cells = tuple(impatient(cell, case.wrong) for cell in plan.cells)
    assert surprises(run(replace(plan, cells=cells), tmp_path, case.wrong), case) == {}


def test_every_way_to_be_wrong_in_company_is_tested() -> None:
    assert {case.wrong for case in CASES} == OF_COMPANY
