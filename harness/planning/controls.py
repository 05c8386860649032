"""Which cells have to be as they should before another cell proves anything.

`plan.py` keeps them beside the cells that are chosen; the judge asks what became of them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from harness.records import Cell, PlannedRequest
from services.faults import NO_FAULT, LoadMode


def load_modes(cell: Cell) -> tuple[LoadMode, ...]:
    """The ways in which the cell and its requests load, once each."""
    modes = (cell.load, *(request.load for request in cell.requests))
    return tuple(mode for mode in dict.fromkeys(modes) if mode is not LoadMode.OFF)


def controls_of(cell: Cell, cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """The control cells of the cell's engine and load modes; the cell itself may be one of them."""
    modes = load_modes(cell)
    return tuple(other for other in cells if other.control and other.engine == cell.engine and other.load in modes)


def undisturbed(cell: Cell, cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """For a cell that breaks something while several requests run: the cells that send the same ones and break nothing.

    Requests that share steps are computed in other chunks than the oracles, which run alone: what that alone does to
    their answers must be known.
    """
    if len(cell.requests) < 2 or not _breaks(cell):
        return ()
    asked = (cell.engine, cell.max_tokens, _without_fault(cell))
    return tuple(
        other
        for other in cells
        if not _breaks(other) and (other.engine, other.max_tokens, _without_fault(other)) == asked
    )


def _breaks(cell: Cell) -> bool:
    return cell.fault != NO_FAULT or cell.storage is not None or cell.process is not None


def _without_fault(cell: Cell) -> tuple[PlannedRequest, ...]:
    return tuple(replace(request, fault=NO_FAULT) for request in cell.requests)
