"""Each boundary fault, step by step as vLLM calls the connector, around an inner connector that loads at once."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.faults import ALWAYS, Fault, FaultKind, LoadControl, LoadMode, to_params
from services.journal import Event, EventName, Journal, journal_path, read_events

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own
    pytest.importorskip("vllm")
    from services.fault_injecting import FaultInjectingConnector, FaultInjectingMetadata
    from services.fault_injecting.loads import InjectedError
    from services.fault_injecting.scheduler import SchedulerSide
    from services.fault_injecting.worker import WorkerSide

BLOCK_SIZE = 4
BLOCK_COUNT = 12
BLOCK_IDS = [5, 6, 7]
WAIT_S = 20.0
"""For what must come."""
ASYNC, SYNC = LoadMode.ASYNC, LoadMode.SYNC


@dataclass
class Inner:
    """Offers three blocks each time it is asked, and loads by writing the block's id; async ends in the same step."""

    mode: LoadMode
    cache: torch.Tensor
    told: list[set[int]] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    to_load: list[int] = field(default_factory=list)
    lookup_count: int = 0

    def get_num_new_matched_tokens(self, *_: object) -> tuple[int, bool]:
        self.lookup_count += 1
        return len(BLOCK_IDS) * BLOCK_SIZE, self.mode is ASYNC

    def update_state_after_alloc(self, request: SimpleNamespace, *_: object) -> None:
        self.finished = {request.request_id} if self.mode is ASYNC else set()
        self.to_load = BLOCK_IDS

    def update_connector_output(self, output: Output) -> None:
        self.told.append(set(output.invalid_block_ids))

    def build_connector_meta(self, *_: object) -> object:
        return object()

    def bind_connector_metadata(self, *_: object) -> None:
        pass

    def start_load_kv(self, *_: object) -> None:
        for block_id in self.to_load:
            self.cache[block_id] = block_id
        self.to_load = []

    def get_finished(self, *_: object) -> tuple[None, set[str]]:
        finished, self.finished = self.finished, set()
        return None, finished

    def get_transfer_results(self, ids: set[str]) -> Results:
        return Results(self.get_finished(ids)[1])

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def request_finished(self, *_: object) -> tuple[bool, None]:
        return False, None


@dataclass(frozen=True)
class Results:
    """As vLLM's KVConnectorTransferResults."""

    finished_recving: set[str]


@dataclass(frozen=True)
class Output:
    """As vLLM's KVConnectorOutput."""

    invalid_block_ids: set[int]
    finished_recving: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Step:
    """What vLLM is told at the end of one step."""

    finished: frozenset[str] = frozenset()
    reported: frozenset[int] = frozenset()


NOTHING = Step()
FINISHED = Step(frozenset({"request"}))


def by_get_finished(connector: FaultInjectingConnector) -> set[str]:
    return connector.get_finished(set())[1] or set()


def by_get_transfer_results(connector: FaultInjectingConnector) -> set[str]:
    return set(connector.get_transfer_results(set()).finished_recving)


class Bench:
    """One request with a fault, and both sides of the connector around one inner connector."""

    def __init__(self, evidence_dir: Path, fault: Fault, mode: LoadMode, asked: Callable[..., set[str]]) -> None:
        self.cache = torch.zeros(BLOCK_COUNT, 2, 3)
        self.inner = Inner(mode, self.cache)
        self._evidence_dir, self._asked = evidence_dir, asked
        journal = Journal(evidence_dir, "decode")
        connector = FaultInjectingConnector.__new__(FaultInjectingConnector)
        connector.inner = self.inner
        connector._connector_metadata = None
        connector._scheduler = SchedulerSide(self.inner, journal, BLOCK_SIZE, True)
        connector._worker = WorkerSide(self.inner, journal, BLOCK_COUNT)
        connector._worker.register({"layer": self.cache})
        self.connector = connector
        params = to_params(LoadControl("tag", mode, fault=fault))
        self.request = SimpleNamespace(request_id="request", kv_transfer_params=params)

    def plan(self) -> None:
        """As vLLM's scheduler does when it gives blocks to a load."""
        offered, _ = self.connector.get_num_new_matched_tokens(self.request, 0)
        blocks = SimpleNamespace(get_block_ids=lambda: (BLOCK_IDS,))
        self.connector.update_state_after_alloc(self.request, blocks, offered)

    def step(self) -> Step:
        """As vLLM's model runner does, and then its scheduler with what it is told."""
        metadata = self.connector.build_connector_meta(SimpleNamespace())
        assert isinstance(metadata, FaultInjectingMetadata)
        self.connector.bind_connector_metadata(metadata)
        self.connector.start_load_kv(SimpleNamespace())
        finished = self._asked(self.connector)
        reported = self.connector.get_block_ids_with_load_errors()
        self.connector.update_connector_output(Output(reported))
        return Step(frozenset(finished), frozenset(reported))

    def steps(self, count: int) -> list[Step]:
        self.plan()
        return [self.step() for _ in range(count)]

    def events(self, name: EventName) -> list[Event]:
        return [e for e in read_events(journal_path(self._evidence_dir, "decode"))[0] if e.name is name]

    def fired(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(e.reason, e.blocks) for e in self.events(EventName.FAULT_FIRED)]

    def is_garbage(self, block_id: int) -> bool:
        return not bool((self.cache[block_id] == block_id).all())


@pytest.fixture(params=[by_get_finished, by_get_transfer_results])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Bench]:
    def make(kind: FaultKind, mode: LoadMode, blocks: object = "first", times: int = 1, delay_s: float = 0.0) -> Bench:
        return Bench(tmp_path, Fault(kind, blocks, times, delay_s), mode, request.param)

    return make


def reported(*block_ids: int, finished: bool = False) -> Step:
    return Step(frozenset({"request"} if finished else ()), frozenset(block_ids))


@pytest.mark.parametrize(
    ("kind", "mode", "steps"),
    [
        (FaultKind.NONE, SYNC, [NOTHING, NOTHING]),
        (FaultKind.NONE, ASYNC, [FINISHED, NOTHING]),
        (FaultKind.REPORT, SYNC, [reported(5), NOTHING]),
        (FaultKind.REPORT, ASYNC, [reported(5, finished=True), NOTHING]),
        (FaultKind.REOFFER, ASYNC, [reported(5, finished=True), NOTHING]),
        (FaultKind.REPORT_LATE, SYNC, [NOTHING, reported(5), NOTHING]),
        (FaultKind.REPORT_LATE, ASYNC, [FINISHED, reported(5), NOTHING]),
        (FaultKind.REPORT_STALE, SYNC, [NOTHING, reported(5), NOTHING]),
        (FaultKind.REPORT_STALE, ASYNC, [FINISHED, reported(5), NOTHING]),
        (FaultKind.HANG, ASYNC, [NOTHING, NOTHING]),
        (FaultKind.FINISH_MISSING, ASYNC, [reported(5), NOTHING]),
        (FaultKind.FINISH_TWICE, ASYNC, [FINISHED, FINISHED, NOTHING]),
        (FaultKind.FINISH_SYNC, SYNC, [reported(5, finished=True), NOTHING]),
        (FaultKind.UNKNOWN_BLOCK, SYNC, [reported(BLOCK_COUNT), NOTHING]),
        (FaultKind.UNKNOWN_BLOCK, ASYNC, [reported(BLOCK_COUNT, finished=True), NOTHING]),
    ],
)
def test_what_vllm_is_told_step_by_step(
    bench: Callable[..., Bench], kind: FaultKind, mode: LoadMode, steps: list[Step]
) -> None:
    assert bench(kind, mode).steps(len(steps)) == steps


GARBAGE_KINDS = [
    (FaultKind.REPORT, SYNC),
    (FaultKind.REOFFER, ASYNC),
    (FaultKind.REPORT_LATE, SYNC),
    (FaultKind.REPORT_LATE, ASYNC),
    (FaultKind.FINISH_MISSING, ASYNC),
    (FaultKind.FINISH_SYNC, SYNC),
]


@pytest.mark.parametrize(("kind", "mode"), GARBAGE_KINDS)
def test_reported_blocks_hold_garbage_and_that_is_what_fired(
    bench: Callable[..., Bench], kind: FaultKind, mode: LoadMode
) -> None:
    broken = bench(kind, mode, (0, 2))
    broken.steps(2)
    assert [broken.is_garbage(block_id) for block_id in BLOCK_IDS] == [True, False, True]
    assert broken.fired() == [(kind, (0, 2))]
    assert [event.blocks for event in broken.events(EventName.LOADED)] == [(0, 1, 2)]
    assert [(e.blocks, e.block_ids) for e in broken.events(EventName.REPORTED)] == [((0, 2), (5, 7))]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        (FaultKind.HANG, ASYNC),
        (FaultKind.FINISH_TWICE, ASYNC),
        (FaultKind.UNKNOWN_BLOCK, SYNC),
        (FaultKind.UNKNOWN_BLOCK, ASYNC),
    ],
)
def test_other_kinds_leave_the_bytes_alone(bench: Callable[..., Bench], kind: FaultKind, mode: LoadMode) -> None:
    broken = bench(kind, mode)
    broken.steps(2)
    assert not any(map(broken.is_garbage, BLOCK_IDS))
    assert broken.fired() == [(kind, (0, 1, 2))]


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_a_stale_report_is_about_some_blocks_and_they_are_right(bench: Callable[..., Bench], mode: LoadMode) -> None:
    broken = bench(FaultKind.REPORT_STALE, mode, (0, 2))
    broken.steps(2)
    assert not any(map(broken.is_garbage, BLOCK_IDS))
    assert broken.fired() == [(FaultKind.REPORT_STALE, (0, 2))]
    assert [(e.blocks, e.block_ids) for e in broken.events(EventName.REPORTED)] == [((0, 2), (5, 7))]


def test_a_second_finished_report_fires_only_when_it_is_made(bench: Callable[..., Bench]) -> None:
    broken = bench(FaultKind.FINISH_TWICE, ASYNC)
    broken.steps(1)
    assert broken.fired() == []
    broken.step()
    assert len(broken.events(EventName.FINISHED)) == 2


def test_an_id_of_nobody_is_journaled_without_a_block(bench: Callable[..., Bench]) -> None:
    broken = bench(FaultKind.UNKNOWN_BLOCK, SYNC)
    broken.steps(2)
    assert [(e.blocks, e.block_ids) for e in broken.events(EventName.REPORTED)] == [((), (BLOCK_COUNT,))]


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_the_load_hook_raises_before_anything_is_loaded(bench: Callable[..., Bench], mode: LoadMode) -> None:
    broken = bench(FaultKind.RAISE, mode)
    with pytest.raises(InjectedError, match=re.escape("request tag asked for")):
        broken.steps(1)
    assert not broken.cache.any()
    assert broken.fired() == [(FaultKind.RAISE, (0, 1, 2))]


@pytest.mark.parametrize(("kind", "told"), [(FaultKind.REPORT, [{5}, {5}]), (FaultKind.REOFFER, [set(), set()])])
def test_the_inner_connector_learns_of_failures_except_of_those_to_be_offered_again(
    bench: Callable[..., Bench], kind: FaultKind, told: list[set[int]]
) -> None:
    broken = bench(kind, ASYNC, times=ALWAYS)
    assert broken.steps(1) + broken.steps(1) == [reported(5, finished=True)] * 2
    assert broken.inner.told == told


def test_other_requests_failures_are_told(bench: Callable[..., Bench]) -> None:
    broken = bench(FaultKind.REOFFER, ASYNC)
    broken.steps(1)
    broken.connector.update_connector_output(Output({5, 9}))
    assert broken.inner.told[-1] == {9}
    broken.connector.request_finished(broken.request, BLOCK_IDS)
    broken.connector.update_connector_output(Output({5, 9}))
    assert broken.inner.told[-1] == {5, 9}


def lookup(broken: Bench) -> tuple[int | None, bool]:
    return broken.connector.get_num_new_matched_tokens(broken.request, 0)


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
@pytest.mark.parametrize("kind", [FaultKind.PENDING, FaultKind.UNANSWERED])
def test_a_pending_lookup_has_no_answer_and_asks_nobody(
    bench: Callable[..., Bench], kind: FaultKind, mode: LoadMode
) -> None:
    broken = bench(kind, mode, delay_s=WAIT_S)
    assert [lookup(broken) for _ in range(3)] == [(None, False)] * 3
    assert broken.inner.lookup_count == 1
    assert broken.fired() == [(kind, (0, 1, 2))]
    assert broken.events(EventName.OFFERED) == []


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_once_its_time_is_over_a_lookup_offers_what_there_is(bench: Callable[..., Bench], mode: LoadMode) -> None:
    broken = bench(FaultKind.PENDING, mode, delay_s=0.05)
    began_s = time.monotonic()
    while lookup(broken) == (None, False):
        assert time.monotonic() < began_s + WAIT_S
    assert time.monotonic() - began_s >= 0.05
    assert lookup(broken) == (len(BLOCK_IDS) * BLOCK_SIZE, mode is ASYNC)
    assert broken.steps(2) == [FINISHED if mode is ASYNC else NOTHING, NOTHING]
    assert [event.blocks for event in broken.events(EventName.LOADED)] == [(0, 1, 2)]
    assert broken.fired() == [(FaultKind.PENDING, (0, 1, 2))]


def test_the_lookup_of_a_later_load_is_pending_as_often_as_asked_for(bench: Callable[..., Bench]) -> None:
    broken = bench(FaultKind.PENDING, ASYNC, times=2, delay_s=0.01)
    for _ in range(3):
        while lookup(broken) == (None, False):
            pass
        broken.steps(1)
    assert broken.fired() == [(FaultKind.PENDING, (0, 1, 2))] * 2
