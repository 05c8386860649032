"""A save or load that stops in the middle of a block because its request asks for it: where, and what is there then."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.faults import Hold, HoldPoint, LoadControl, LoadMode, to_params
from services.journal import Event, EventName, Journal, journal_path, read_events
from services.store import TEMPORARY_SUFFIX, BlockStore, Shard, block_keys, root_key
from tests.matrix_run import eventually

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own
    pytest.importorskip("vllm")
    from services.shared_volume.jobs import LoadJob, SaveJob
    from services.shared_volume.scheduler import SchedulerSide
    from services.shared_volume.worker import WorkerSide

BLOCK_COUNT = 4
KEYS = block_keys(root_key("model", "", "", ()), range(BLOCK_COUNT), 1)
BLOCK_IDS = (0, 1, 2, 3)
WAIT_S = 0.4
DEADLINE_S = 20


class Bench:
    """A worker with a small KV cache, on a volume of its own."""

    def __init__(self, root: Path) -> None:
        self.store = BlockStore(root / "kv")
        self.root = root
        config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1))
        journal = Journal(root / "evidence", "service")
        cache_config = SimpleNamespace(num_blocks=BLOCK_COUNT)
        self.worker = WorkerSide(config, cache_config, self.store, journal, 0.1)  # type: ignore[arg-type]
        self.cache = {f"layer{i}": torch.arange(BLOCK_COUNT * 8.0).reshape(BLOCK_COUNT, 8) for i in range(2)}
        self.worker.register(self.cache)

    def save(self, hold: Hold | None) -> None:
        self.worker.save((SaveJob("id", "tag", 0, KEYS, BLOCK_IDS, hold),))

    def load(self, hold: Hold | None, mode: LoadMode = LoadMode.SYNC) -> None:
        self.worker.start_loads((LoadJob("id", "tag", mode, 0, KEYS, BLOCK_IDS, hold),))

    def events(self) -> list[Event]:
        return list(read_events(journal_path(self.root / "evidence", "service"))[0])

    def names(self) -> list[EventName]:
        return [event.name for event in self.events()]

    def payloads(self) -> list[bool]:
        return [self.store.payload_path(key, Shard()).is_file() for key in KEYS]

    def entries(self) -> list[bool]:
        return [self.store.index_path(key, Shard()).is_file() for key in KEYS]

    def unfinished(self) -> list[Path]:
        return list((self.root / "kv").rglob(f"*{TEMPORARY_SUFFIX}"))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@contextmanager
def stopped(bench: Bench, work: Callable[[Hold], None], point: HoldPoint, block: int) -> Iterator[None]:
    """Inside the body the work stands still where it was asked to."""
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work, Hold(block, point, WAIT_S))
        eventually(lambda: EventName.HELD in bench.names(), DEADLINE_S)
        yield
        working.result(DEADLINE_S)


def held(bench: Bench) -> Event:
    (event,) = (event for event in bench.events() if event.name is EventName.HELD)
    return event


@pytest.mark.parametrize("block", [0, 2, 3])
def test_a_save_stops_in_the_middle_of_a_payload(bench: Bench, block: int) -> None:
    with stopped(bench, bench.save, HoldPoint.PAYLOAD, block):
        assert bench.payloads() == bench.entries() == [index < block for index in range(BLOCK_COUNT)]
        (unfinished,) = bench.unfinished()
        assert KEYS[block] in unfinished.name
        assert unfinished.stat().st_size > 0
        assert EventName.SAVED not in bench.names()
    assert (held(bench).blocks, held(bench).reason, held(bench).request) == ((block,), "payload", "tag")
    assert bench.entries() == bench.payloads() == [True] * BLOCK_COUNT
    assert bench.unfinished() == []
    assert bench.names() == [EventName.HELD, EventName.SAVED]


@pytest.mark.parametrize("block", [0, 2, 3])
def test_a_save_stops_before_an_index_entry(bench: Bench, block: int) -> None:
    with stopped(bench, bench.save, HoldPoint.INDEX, block):
        assert bench.payloads() == [index <= block for index in range(BLOCK_COUNT)]
        assert bench.entries() == [index < block for index in range(BLOCK_COUNT)]
        assert bench.unfinished() == []
    assert bench.entries() == [True] * BLOCK_COUNT


@pytest.mark.parametrize("mode", [LoadMode.SYNC, LoadMode.ASYNC])
@pytest.mark.parametrize("block", [0, 2, 3])
def test_a_load_stops_before_a_block_and_outlasts_its_read_deadline(bench: Bench, block: int, mode: LoadMode) -> None:
    bench.save(None)
    sound = bench.cache["layer0"].clone()
    for tensor in bench.cache.values():
        tensor.zero_()
    with stopped(bench, lambda hold: bench.load(hold, mode), HoldPoint.LOAD, block):
        assert torch.equal(bench.cache["layer0"][:block], sound[:block])
        assert not bench.cache["layer0"][block:].any()
    if mode is LoadMode.ASYNC:
        eventually(lambda: bench.worker.take_finished() == {"id"}, DEADLINE_S)
    assert torch.equal(bench.cache["layer0"], sound)
    assert bench.worker.take_failed_block_ids() == set()


def test_without_a_hold_nothing_stops(bench: Bench) -> None:
    bench.save(None)
    bench.load(None)
    assert bench.names() == [EventName.SAVED]


@pytest.mark.parametrize("hold", [Hold(9, HoldPoint.PAYLOAD, 60), Hold(0, HoldPoint.LOAD, 60)])
def test_a_stop_elsewhere_is_none(bench: Bench, hold: Hold) -> None:
    bench.save(hold)
    assert bench.names() == [EventName.SAVED]


def test_a_block_that_is_there_already_is_not_written_again(bench: Bench) -> None:
    bench.save(None)
    bench.save(Hold(0, HoldPoint.PAYLOAD, 60))
    assert EventName.HELD not in bench.names()


# Who may ask for it.


def controls(tmp_path: Path, *, allow_faults: bool) -> tuple[LoadControl, list[Event]]:
    """What a scheduler side makes of a request with a hold, and what it journals."""
    side = SchedulerSide.__new__(SchedulerSide)
    side._journal, side._allow_faults = Journal(tmp_path, "service"), allow_faults
    params = to_params(LoadControl(tag="tag", hold=Hold(1, HoldPoint.INDEX, 2.0)))
    request = SimpleNamespace(request_id="id", kv_transfer_params=params)
    return side._control(request), list(read_events(journal_path(tmp_path, "service"))[0])  # type: ignore[arg-type]


def test_an_engine_with_faults_obeys(tmp_path: Path) -> None:
    control, events = controls(tmp_path, allow_faults=True)
    assert (control.hold, events) == (Hold(1, HoldPoint.INDEX, 2.0), [])


def test_an_engine_without_faults_refuses_and_says_so(tmp_path: Path) -> None:
    control, (event,) = controls(tmp_path, allow_faults=False)
    assert control == LoadControl(tag="tag")
    assert (event.name, event.request) == (EventName.REJECTED, "tag")
    assert "started without faults" in event.reason


def test_a_stop_does_not_keep_other_loads(bench: Bench) -> None:
    """It takes one of several threads."""
    bench.save(None)
    seen: set[str] = set()

    def other_has_finished() -> bool:
        seen.update(bench.worker.take_finished())
        return "other" in seen

    with stopped(bench, lambda hold: bench.load(hold, LoadMode.ASYNC), HoldPoint.LOAD, 0):
        bench.worker.start_loads((LoadJob("other", "other", LoadMode.ASYNC, 0, KEYS[:1], (3,)),))
        eventually(other_has_finished, DEADLINE_S)
        assert seen == {"other"}
