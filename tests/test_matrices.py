"""The matrices that ship: what they cover, and that their cells can prove something."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.planning.controls import controls_of
from harness.planning.plan import load_plan
from harness.records import Cell, Plan
from services.faults import FaultKind, LoadMode
from tests.engines import ENGINES

FOLDER = Path(__file__).parents[1] / "harness" / "matrix"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "known_issues")


def plan_of(name: str) -> Plan:
    return load_plan(FOLDER / f"{name}.yaml", ENGINES)


def layer(cell: Cell) -> str:
    return "storage" if cell.storage else "process" if cell.process else "boundary"


def breaks(cell: Cell) -> bool:
    return layer(cell) != "boundary" or cell.fault.kind is not FaultKind.NONE


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_says_why_and_has_its_controls(name: str) -> None:
    cells = plan_of(name).cells
    for cell in cells:
        kinds = {control.fault.kind for control in controls_of(cell, cells)}
        assert cell.why, cell.id
        assert kinds >= {FaultKind.NONE, FaultKind.SILENT}, cell.id


@pytest.mark.parametrize(("name", "count"), [("default", 80), ("full", 150)])
def test_all_layers_modes_and_policies(name: str, count: int) -> None:
    cells = plan_of(name).cells
    assert len(cells) >= count
    assert {(layer(cell), cell.load, cell.policy) for cell in cells if breaks(cell)} >= {
        (where, load, policy)
        for where in ("boundary", "storage", "process")
        for load in (LoadMode.SYNC, LoadMode.ASYNC)
        for policy in ("recompute", "fail")
    }


def test_the_larger_matrix_has_what_the_smaller_ones_have() -> None:
    ids = {name: {cell.id for cell in plan_of(name).cells} for name in NAMES}
    assert ids["smoke"] < ids["default"] < ids["full"]
    # Many requests with nothing broken: about kvproof itself, and not about the engines.
    assert all(ids[name] <= ids["full"] for name in NAMES if name != "quiet")


def test_smoke_has_both_layers_that_cost_no_restart() -> None:
    cells = plan_of("smoke").cells
    assert {layer(cell) for cell in cells} == {"boundary", "storage"}
    assert len(cells) <= 24
