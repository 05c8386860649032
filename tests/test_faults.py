"""Faults: controls survive the way through a request, bad ones are named, and each kind breaks what it should."""

from __future__ import annotations

import json
from contextlib import suppress
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.faults import (
    ALL_BLOCKS,
    ALWAYS,
    ASYNC_KINDS,
    DEFAULT_CONTROL,
    HOLD_S_MAX,
    LOOKUP_KINDS,
    NO_BREAKAGE,
    PARAMS_KEY,
    SELECTOR_NAMES,
    SYNC_KINDS,
    WHOLE_LOAD_KINDS,
    BlockSelector,
    Breakage,
    ControlError,
    Fault,
    FaultKind,
    Hold,
    HoldPoint,
    LoadControl,
    LoadMode,
    breakage,
    lookup_delay_s,
    parse_control,
    select,
    to_params,
)

NOT_OF_LOADS = {FaultKind.NONE, *LOOKUP_KINDS}
"""Kinds that leave the load itself alone."""

FAULTS = st.builds(
    Fault,
    kind=st.sampled_from(FaultKind),
    blocks=st.sampled_from(SELECTOR_NAMES) | st.lists(st.integers(0, 1000), max_size=5).map(tuple),
    times=st.integers(0, 1000) | st.just(ALWAYS),
    delay_s=st.floats(0, allow_infinity=False),
)
CONTROLS = st.builds(
    LoadControl,
    tag=st.text(),
    load=st.sampled_from(LoadMode),
    offer_blocks=st.integers(0, 1000) | st.just(ALL_BLOCKS),
    fault=FAULTS,
    hold=st.none() | st.builds(Hold, st.integers(0, 1000), st.sampled_from(HoldPoint), st.floats(0, HOLD_S_MAX)),
)


@given(control=CONTROLS)
def test_parse_is_the_inverse_of_to_params(control: LoadControl) -> None:
    params = to_params(control)
    assert parse_control(params) == control
    assert parse_control(json.loads(json.dumps(params))) == control


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {PARAMS_KEY: None}, {PARAMS_KEY: {}}])
def test_without_a_control_the_default_holds(params: dict[str, object] | None) -> None:
    assert parse_control(params) == DEFAULT_CONTROL


def test_fields_left_out_have_their_defaults() -> None:
    parsed = parse_control({PARAMS_KEY: {"load": "async", "fault": {"kind": "drop"}}})
    assert parsed == LoadControl(load=LoadMode.ASYNC, fault=Fault(FaultKind.DROP))


NOT_A_COUNT = (-1, True, 1.0, "1", "some", None, [1])
NOT_A_MAPPING = ("drop", 1, ["kind"])
HOLD = {"block": 1, "point": "load", "wait_s": 1}
BAD_CONTROLS = [
    *(("kvproof", raw) for raw in NOT_A_MAPPING),
    ("kvproof", {"lode": "sync"}),
    ("kvproof", {1: "sync"}),
    *(("tag", {"tag": raw}) for raw in (None, 1, ["a"])),
    *(("load", {"load": raw}) for raw in ("Sync", "", None, True, ["sync"])),
    *(("offer_blocks", {"offer_blocks": raw}) for raw in (*NOT_A_COUNT, "always")),
    *(("fault", {"fault": raw}) for raw in (*NOT_A_MAPPING, None)),
    ("fault", {"fault": {"block": "all"}}),
    *(("hold", {"hold": raw}) for raw in (*NOT_A_MAPPING, None, {}, {"block": 1, "point": "load"}, {**HOLD, "x": 1})),
    *(("hold.block", {"hold": {**HOLD, "block": raw}}) for raw in (*NOT_A_COUNT, "first")),
    *(("hold.point", {"hold": {**HOLD, "point": raw}}) for raw in ("Load", "", None, 1)),
    *(("hold.wait_s", {"hold": {**HOLD, "wait_s": raw}}) for raw in (-0.1, True, "1", None, 60.1, float("nan"))),
]
BAD_FAULTS = [
    *(("fault.kind", {"kind": raw}) for raw in ("explode", "", None, 1, ["drop"])),
    *(("fault.blocks", {"blocks": raw}) for raw in ("second", "", None, 0, {"0": 1})),
    *(("fault.blocks", {"blocks": raw}) for raw in ([-1], [True], [0, "1"], [0.0], [None])),
    *(("fault.times", {"times": raw}) for raw in (*NOT_A_COUNT, "all")),
    *(("fault.delay_s", {"delay_s": raw}) for raw in (-0.1, True, "1", None, [1.0])),
    *(("fault.delay_s", {"delay_s": raw}) for raw in (float("nan"), float("inf"), 10**400)),
]


@pytest.mark.parametrize(("field", "raw"), BAD_CONTROLS + [(field, {"fault": raw}) for field, raw in BAD_FAULTS])
def test_a_bad_control_is_an_error_that_names_the_field(field: str, raw: object) -> None:
    with pytest.raises(ControlError) as caught:
        parse_control({PARAMS_KEY: raw})
    assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize("raw", [{"kind": "drop", "lode": 1}, {"blocks": "all", "lode": 1}])
def test_an_unknown_key_is_named_with_the_known_ones(raw: object) -> None:
    with pytest.raises(ControlError, match=r"unknown key lode; known are blocks, delay_s, kind, times"):
        parse_control({PARAMS_KEY: {"fault": raw}})


@given(raw=st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=3), st.lists))
def test_no_other_error_leaves_the_parser(raw: object) -> None:
    fields = [{field: raw} for field in ("tag", "load", "offer_blocks", "fault", "hold")]
    fault_fields = [{"fault": {field: raw}} for field in ("kind", "blocks", "times", "delay_s")]
    hold_fields = [{"hold": {**HOLD, field: raw}} for field in HOLD]
    for control in (raw, *fields, *fault_fields, *hold_fields):
        with suppress(ControlError):
            parse_control({PARAMS_KEY: control})


@pytest.mark.parametrize(
    ("blocks", "loaded_block_count", "expected"),
    [
        ("first", 1, (0,)),
        ("first", 5, (0,)),
        ("middle", 1, (0,)),
        ("middle", 4, (2,)),
        ("middle", 5, (2,)),
        ("last", 1, (0,)),
        ("last", 5, (4,)),
        ("all", 1, (0,)),
        ("all", 3, (0, 1, 2)),
        ((), 3, ()),
        ((2, 0), 3, (2, 0)),
        ((2, 3, 4), 3, (2,)),
        ((7,), 3, ()),
        *((blocks, 0, ()) for blocks in (*SELECTOR_NAMES, (0,))),
    ],
)
def test_select(blocks: BlockSelector, loaded_block_count: int, expected: tuple[int, ...]) -> None:
    assert select(blocks, loaded_block_count) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (FaultKind.NONE, NO_BREAKAGE),
        (FaultKind.REPORT, Breakage(garbage=(1, 2), reported=(1, 2))),
        (FaultKind.DROP, Breakage(withheld=(1, 2), reported=(1, 2))),
        (FaultKind.SILENT, Breakage(garbage=(1, 2))),
        (FaultKind.DELAY, Breakage(delay_s=0.5)),
        (FaultKind.PENDING, NO_BREAKAGE),
        (FaultKind.UNANSWERED, NO_BREAKAGE),
        (FaultKind.HANG, Breakage(extra_finishes=-1)),
        (FaultKind.RAISE, Breakage(raises=True)),
        (FaultKind.REOFFER, Breakage(garbage=(1, 2), reported=(1, 2), untold=True)),
        (FaultKind.REPORT_LATE, Breakage(garbage=(1, 2), reported=(1, 2), late=True)),
        (FaultKind.REPORT_STALE, Breakage(reported=(1, 2), late=True)),
        (FaultKind.FINISH_MISSING, Breakage(garbage=(1, 2), reported=(1, 2), extra_finishes=-1)),
        (FaultKind.FINISH_TWICE, Breakage(extra_finishes=1)),
        (FaultKind.FINISH_SYNC, Breakage(garbage=(1, 2), reported=(1, 2), extra_finishes=1)),
        (FaultKind.UNKNOWN_BLOCK, Breakage(unknown_count=1)),
    ],
)
def test_breakage_of_each_kind(kind: FaultKind, expected: Breakage) -> None:
    found = breakage(Fault(kind, (1, 2), delay_s=0.5), loaded_block_count=4, earlier_load_count=0)
    assert found == expected
    assert found.fires == (kind not in NOT_OF_LOADS)


@pytest.mark.parametrize("kind", sorted(set(FaultKind) - NOT_OF_LOADS))
@pytest.mark.parametrize(
    ("times", "fired"),
    [(0, [False, False, False]), (1, [True, False, False]), (2, [True, True, False]), (ALWAYS, [True, True, True])],
)
def test_a_fault_fires_for_the_first_loads_only(kind: FaultKind, times: int, fired: list[bool]) -> None:
    fault = Fault(kind, times=times, delay_s=1.0)
    assert [breakage(fault, 3, earlier_load_count).fires for earlier_load_count in range(3)] == fired


def test_no_kind_is_both_for_sync_and_for_async_loads_only() -> None:
    assert not ASYNC_KINDS & SYNC_KINDS


@pytest.mark.parametrize("kind", sorted(set(FaultKind) - WHOLE_LOAD_KINDS))
def test_a_fault_without_a_loaded_block_does_not_fire(kind: FaultKind) -> None:
    assert not breakage(Fault(kind), 0, 0).fires
    assert not breakage(Fault(kind, (5,)), 5, 0).fires


@pytest.mark.parametrize("kind", sorted(WHOLE_LOAD_KINDS - NOT_OF_LOADS))
def test_a_fault_of_a_whole_load_strikes_whatever_blocks_are_named(kind: FaultKind) -> None:
    assert breakage(Fault(kind, (5,), delay_s=1.0), 5, 0).fires
    assert not breakage(Fault(kind, delay_s=1.0), 0, 0).fires


def test_a_delay_of_nothing_does_not_fire() -> None:
    assert not breakage(Fault(FaultKind.DELAY), 3, 0).fires


@pytest.mark.parametrize(("times", "delays_s"), [(1, [0.5, 0, 0]), (2, [0.5, 0.5, 0]), (ALWAYS, [0.5, 0.5, 0.5])])
def test_the_lookups_of_as_many_loads_as_are_to_be_broken_take_their_time(times: int, delays_s: list[float]) -> None:
    fault = Fault(FaultKind.PENDING, times=times, delay_s=0.5)
    assert [lookup_delay_s(fault, earlier) for earlier in range(3)] == delays_s


@pytest.mark.parametrize("kind", sorted(set(FaultKind) - LOOKUP_KINDS))
def test_lookups_of_other_kinds_are_answered_at_once(kind: FaultKind) -> None:
    assert lookup_delay_s(Fault(kind, delay_s=0.5), 0) == 0


def test_a_lookup_that_is_not_answered_waits_for_ever() -> None:
    assert lookup_delay_s(Fault(FaultKind.UNANSWERED), 0) == inf
