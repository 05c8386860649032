"""Which oracle a request must equal, for every role, fault and load mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.faults.process_kinds import ProcessKind
from harness.faults.storage_kinds import StorageKind
from harness.judging.oracles import (
    acceptable,
    essential,
    first_bad_block,
    needed,
    oracle_block_count,
    oracle_name,
    shared_bad_block,
    shared_block_count,
)
from harness.records import Cell, OracleKey, OracleKind, Role
from services.faults import BlockSelector, Fault, FaultKind, LoadMode
from tests.builders import (
    BLOCK_COUNT,
    BLOCK_SIZE,
    BYSTANDER,
    PROMPTS,
    SHARED_COUNT,
    SHARER,
    VICTIM,
    cell,
    request,
)
from tests.process_builders import process_cell
from tests.storage_builders import storage_cell

ASYNC, SYNC = LoadMode.ASYNC, LoadMode.SYNC
REPORT, DROP, SILENT, DELAY, NONE = (
    FaultKind.REPORT,
    FaultKind.DROP,
    FaultKind.SILENT,
    FaultKind.DELAY,
    FaultKind.NONE,
)


def names(of: Cell, role: Role) -> list[str]:
    """The acceptable oracles of the request with that role."""
    keys = acceptable(of, request(role, of.load, of.fault if role is Role.VICTIM else Fault()), PROMPTS, BLOCK_SIZE)
    return [oracle_name(key) for key in keys]


@pytest.mark.parametrize("load", [SYNC, ASYNC])
@pytest.mark.parametrize("kind", [REPORT, DROP])
@pytest.mark.parametrize(
    ("blocks", "wanted"),
    [
        ("first", "recompute"),
        ("middle", "partial(3)"),
        ("last", "partial(6)"),
        ("all", "recompute"),
        ((5, 2), "partial(2)"),
        ((2, 99), "partial(2)"),
        ((99,), "reuse"),
    ],
)
def test_victim_equals_the_oracle_of_its_first_bad_block(
    kind: FaultKind, load: LoadMode, blocks: str, wanted: str
) -> None:
    assert names(cell(kind, blocks, load=load), Role.VICTIM) == [wanted]


@pytest.mark.parametrize("kind", [NONE, DELAY])
def test_a_victim_whose_blocks_are_good_equals_reuse(kind: FaultKind) -> None:
    of = cell(kind, "first")
    assert names(of, Role.VICTIM) == ["reuse"]
    assert first_bad_block(of, VICTIM) is None


def test_a_silent_victim_must_miss_both_whole_oracles() -> None:
    assert names(cell(SILENT, "middle"), Role.VICTIM) == ["reuse", "recompute"]


def test_each_victim_has_its_own_fault() -> None:
    of = cell(REPORT, "first")
    other = request(Role.VICTIM, SYNC, Fault(REPORT, "last"))
    assert [oracle_name(key) for key in acceptable(of, other, PROMPTS, BLOCK_SIZE)] == ["partial(6)"]


@pytest.mark.parametrize("kind", [REPORT, DROP])
@pytest.mark.parametrize(
    ("blocks", "wanted"),
    [
        ("first", ["recompute", "reuse"]),
        ("middle", ["partial(3)", "reuse", "recompute"]),
        ((SHARED_COUNT - 1,), ["partial(3)", "reuse", "recompute"]),
        ((SHARED_COUNT,), ["reuse", "recompute"]),
        ("last", ["reuse", "recompute"]),
        ("all", ["recompute", "reuse"]),
    ],
)
def test_a_sync_sharer_may_meet_the_bad_block_or_not(kind: FaultKind, blocks: str, wanted: list[str]) -> None:
    assert names(cell(kind, blocks), Role.SHARER) == wanted


@pytest.mark.parametrize("kind", [NONE, DELAY, REPORT, SILENT])
def test_an_async_sharer_loads_a_copy_of_its_own(kind: FaultKind) -> None:
    assert names(cell(kind, "first", load=ASYNC), Role.SHARER) == ["reuse", "recompute"]


@pytest.mark.parametrize("kind", [NONE, DELAY])
def test_a_sharer_of_good_blocks_equals_reuse_or_recompute(kind: FaultKind) -> None:
    assert names(cell(kind, "first"), Role.SHARER) == ["reuse", "recompute"]


def test_nothing_is_asked_of_who_runs_on_silently_wrong_kv() -> None:
    assert names(cell(SILENT, "first"), Role.SHARER) == []
    assert names(cell(SILENT, "first"), Role.CANARY) == []
    assert names(cell(SILENT, "last"), Role.SHARER) == ["reuse", "recompute"]


@pytest.mark.parametrize("kind", list(FaultKind))
@pytest.mark.parametrize("load", [SYNC, ASYNC])
def test_a_bystander_equals_reuse(kind: FaultKind, load: LoadMode) -> None:
    assert names(cell(kind, "first", load=load), Role.BYSTANDER) == ["reuse"]


@pytest.mark.parametrize("role", [Role.VICTIM, Role.BYSTANDER, Role.SHARER])
def test_a_request_that_loads_nothing_equals_recompute(role: Role) -> None:
    assert names(cell(load=LoadMode.OFF), role) == ["recompute"]


@pytest.mark.parametrize(
    ("kind", "blocks", "wanted"),
    [
        (NONE, "all", ["reuse", "recompute"]),
        (DELAY, "all", ["reuse", "recompute"]),
        (REPORT, "first", ["recompute", "reuse"]),
        (DROP, "middle", ["partial(3)", "reuse", "recompute"]),
    ],
)
def test_a_canary_may_find_what_the_victim_left(kind: FaultKind, blocks: str, wanted: list[str]) -> None:
    assert names(cell(kind, blocks), Role.CANARY) == wanted


def test_the_victim_need_not_come_first() -> None:
    of = cell(REPORT, "middle", mix=True)
    turned = replace(of, requests=of.requests[::-1])
    assert names(turned, Role.SHARER) == ["partial(3)", "reuse", "recompute"]
    assert names(turned, Role.CANARY) == ["partial(3)", "reuse", "recompute"]


def test_a_canary_with_another_prompt_knows_nothing_of_the_victim() -> None:
    other = request(Role.CANARY, prompt_id="bystander")
    keys = acceptable(cell(REPORT, "middle"), other, PROMPTS, BLOCK_SIZE)
    assert [(key.prompt_id, oracle_name(key)) for key in keys] == [("bystander", "reuse"), ("bystander", "recompute")]


def test_shared_blocks_are_whole_leading_and_loadable() -> None:
    assert shared_block_count(VICTIM, SHARER, BLOCK_SIZE) == SHARED_COUNT
    assert shared_block_count(SHARER, VICTIM, BLOCK_SIZE) == SHARED_COUNT
    assert shared_block_count(VICTIM, BYSTANDER, BLOCK_SIZE) == 0
    assert shared_block_count(VICTIM, VICTIM, BLOCK_SIZE) == BLOCK_COUNT
    assert shared_block_count(VICTIM, replace(VICTIM, full_block_count=2), BLOCK_SIZE) == 2
    assert shared_block_count(replace(VICTIM, full_block_count=2), VICTIM, BLOCK_SIZE) == 2
    shorter = replace(VICTIM, token_ids=VICTIM.token_ids[: 3 * BLOCK_SIZE])
    assert shared_block_count(VICTIM, shorter, BLOCK_SIZE) == 3
    half = VICTIM.token_ids[: 2 * BLOCK_SIZE + 2] + BYSTANDER.token_ids[2 * BLOCK_SIZE + 2 :]
    assert shared_block_count(VICTIM, replace(VICTIM, token_ids=half), BLOCK_SIZE) == 2
    later = BYSTANDER.token_ids[:BLOCK_SIZE] + VICTIM.token_ids[BLOCK_SIZE:]
    assert shared_block_count(VICTIM, replace(VICTIM, token_ids=later), BLOCK_SIZE) == 0


@pytest.mark.parametrize(("blocks", "first"), [("middle", 3), ((5, 2), 2), ((99,), None), ((), None)])
def test_the_first_bad_block_of_damaged_files(blocks: BlockSelector, first: int | None) -> None:
    assert first_bad_block(storage_cell(StorageKind.ZEROED, blocks), VICTIM) == first


@pytest.mark.parametrize("kind", [ProcessKind.DECODE_KILLED_LOADING, ProcessKind.DECODE_PAUSED_LOADING])
def test_an_engine_that_is_struck_while_it_loads_spoils_no_block(kind: ProcessKind) -> None:
    assert first_bad_block(process_cell(kind, "middle"), VICTIM) is None


def test_files_that_are_only_slow_spoil_no_block() -> None:
    assert first_bad_block(storage_cell(StorageKind.SLOW_READ, "middle"), VICTIM) is None


def test_shared_bad_block_is_one_that_the_sharer_has() -> None:
    sharer = request(Role.SHARER)
    assert shared_bad_block(cell(REPORT, "middle"), sharer, PROMPTS, BLOCK_SIZE) == 3
    assert shared_bad_block(cell(REPORT, "last"), sharer, PROMPTS, BLOCK_SIZE) is None
    assert shared_bad_block(cell(REPORT, "middle", load=ASYNC), sharer, PROMPTS, BLOCK_SIZE) is None
    assert shared_bad_block(cell(NONE), sharer, PROMPTS, BLOCK_SIZE) is None


def test_needed_has_what_each_request_may_equal_and_each_key_once() -> None:
    mix = cell(REPORT, "middle", mix=True)
    keys = needed((cell(NONE), cell(REPORT, "last"), mix, mix), PROMPTS, BLOCK_SIZE)
    assert [f"{key.prompt_id} {oracle_name(key)}" for key in keys] == [
        "victim reuse",
        "victim recompute",
        "victim partial(6)",
        "victim partial(3)",
        "sharer reuse",
        "sharer partial(3)",
        "bystander reuse",
        "sharer recompute",
    ]
    assert len(set(keys)) == len(keys)


def test_only_what_a_sharer_may_equal_besides_is_not_essential() -> None:
    for of in (cell(NONE), cell(REPORT, "first", mix=True), cell(SILENT, mix=True), cell(REPORT, load=ASYNC)):
        assert set(essential(of, PROMPTS, BLOCK_SIZE)) == set(needed((of,), PROMPTS, BLOCK_SIZE)) - spare_keys(of)
        assert len(set(essential(of, PROMPTS, BLOCK_SIZE))) == len(essential(of, PROMPTS, BLOCK_SIZE))


def spare_keys(of: Cell) -> set[OracleKey]:
    """A sharer's recompute, unless the path of its KV may make it just that: here where the first block is bad."""
    first_is_bad = first_bad_block(of, VICTIM) == 0 and of.fault.kind is REPORT
    is_spare = any(r.role is Role.SHARER for r in of.requests) and not first_is_bad
    return {OracleKey("sharer", OracleKind.RECOMPUTE)} if is_spare else set()


def test_oracles_are_measured_with_the_max_tokens_and_on_the_engine_that_the_cell_names() -> None:
    for of in (cell(NONE), cell(REPORT, "middle"), cell(SILENT)):
        keys = needed((replace(of, max_tokens=3, oracle_engine="bare"),), PROMPTS, BLOCK_SIZE)
        assert {(key.max_tokens, key.engine) for key in keys} == {(3, "bare")}


@pytest.mark.parametrize(
    ("key", "blocks", "name"),
    [
        (OracleKey("victim", OracleKind.REUSE), BLOCK_COUNT, "reuse"),
        (OracleKey("victim", OracleKind.RECOMPUTE), 0, "recompute"),
        (OracleKey("victim", OracleKind.PARTIAL, 3), 3, "partial(3)"),
    ],
)
def test_an_oracle_loads_as_many_blocks_as_it_says(key: OracleKey, blocks: int, name: str) -> None:
    assert oracle_block_count(key, VICTIM) == blocks
    assert oracle_name(key) == name
