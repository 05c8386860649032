"""Which cells have to be as they should before another cell proves anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.faults.storage_kinds import StorageKind
from harness.planning.controls import controls_of, load_modes, undisturbed
from harness.records import Cell, Role
from services.faults import FaultKind, LoadMode
from tests.builders import cell, request
from tests.storage_builders import storage_cell

ASYNC, SYNC, OFF = LoadMode.ASYNC, LoadMode.SYNC, LoadMode.OFF
MIX = cell(FaultKind.REPORT, "middle", mix=True, name="mix")
QUIET = cell(FaultKind.NONE, mix=True, name="quiet")


def test_load_modes_are_those_of_the_cell_and_of_its_requests() -> None:
    beside = replace(MIX, requests=(*MIX.requests[:2], replace(MIX.requests[2], load=ASYNC)))
    assert load_modes(MIX) == (SYNC,)
    assert load_modes(beside) == (SYNC, ASYNC)
    assert load_modes(replace(beside, load=OFF)) == (SYNC, ASYNC)
    assert load_modes(cell(load=OFF)) == ()


def test_controls_are_of_the_same_engine_and_load_mode() -> None:
    none, silent = cell(name="none"), cell(FaultKind.SILENT, name="silent")
    others = (
        replace(none, engine="decode-fail"),
        replace(none, load=ASYNC),
        replace(none, control=False),
    )
    assert controls_of(MIX, (none, *others, MIX, silent)) == (none, silent)
    beside = replace(MIX, requests=(*MIX.requests, request(Role.BYSTANDER, ASYNC)))
    assert controls_of(beside, (none, *others, silent)) == (none, others[1], silent)


def test_a_control_is_among_its_own_controls() -> None:
    none = cell(name="none")
    assert controls_of(none, (none, MIX)) == (none,)


@pytest.mark.parametrize(
    "broken", [MIX, storage_cell(StorageKind.ZEROED, mix=True), cell(FaultKind.SILENT, mix=True)], ids=lambda of: of.id
)
def test_the_same_requests_without_the_fault_back_a_cell(broken: Cell) -> None:
    assert undisturbed(broken, (broken, QUIET)) == (QUIET,)


def test_two_requests_are_enough_to_be_backed_and_one_is_not() -> None:
    for count, backed in ((2, True), (1, False)):
        broken, quiet = (replace(of, requests=of.requests[:count]) for of in (MIX, QUIET))
        assert undisturbed(broken, (broken, quiet)) == ((quiet,) if backed else ())


@pytest.mark.parametrize(
    "other",
    [
        MIX,
        replace(MIX, id="another fault"),
        storage_cell(StorageKind.ZEROED, mix=True),
        cell(name="alone"),
        replace(QUIET, engine="decode-fail"),
        replace(QUIET, max_tokens=3),
        replace(QUIET, requests=QUIET.requests[::-1]),
        cell(mix=True, load=ASYNC),
        cell(mix=True, stream=True),
    ],
    ids=lambda of: f"{of.id} {of.engine} {of.max_tokens} {of.requests[0].role}",
)
def test_other_requests_or_another_fault_do_not(other: Cell) -> None:
    assert undisturbed(MIX, (other,)) == ()


def test_a_lone_request_and_a_cell_that_breaks_nothing_need_no_such_cell() -> None:
    assert undisturbed(cell(FaultKind.REPORT), (cell(name="none"),)) == ()
    assert undisturbed(QUIET, (replace(QUIET, id="the same again"),)) == ()
