"""The worker side of the shared volume connector: loads that meet files which nobody answers for."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.faults.held_files import holding
from services.faults import LoadMode
from services.journal import EventName, Journal, read_events
from services.store import BlockStore, Shard, block_keys, root_key

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own
    pytest.importorskip("vllm")
    from services.shared_volume.jobs import LoadJob
    from services.shared_volume.worker import READER_THREADS, WorkerSide

BLOCK_COUNT = 32
READ_DEADLINE_S = 0.5
KEYS = block_keys(root_key("model", "", "", ()), range(BLOCK_COUNT), 1)
VALUES = (4, 3)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerSide]:
    """With a store in which block `i` of a prompt is full of `i`."""
    store = BlockStore(tmp_path / "kv")
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1))
    journal = Journal(tmp_path / "evidence", "decode")
    side = WorkerSide(config, SimpleNamespace(num_blocks=BLOCK_COUNT), store, journal, READ_DEADLINE_S)
    cache = torch.zeros(BLOCK_COUNT, *VALUES)
    side.register({"layer": cache})
    for index, key in enumerate(KEYS):
        store.publish(key, Shard(), side._blocks.layout, [torch.full(VALUES, float(index)).numpy().tobytes()])
    side.cache = cache
    yield side
    side.shutdown()


def job(tag: str, blocks: range, mode: LoadMode = LoadMode.ASYNC) -> LoadJob:
    return LoadJob(tag, tag, mode, blocks.start, KEYS[blocks.start : blocks.stop], tuple(blocks))


def held(tmp_path: Path, blocks: range) -> list[Path]:
    store = BlockStore(tmp_path / "kv")
    return [store.payload_path(KEYS[block], Shard()) for block in blocks]


def ended(worker: WorkerSide, deadline_s: float) -> dict[str, float]:
    """When each load was reported as finished, until `deadline_s` seconds have passed."""
    began_s, found = time.monotonic(), {}
    while time.monotonic() - began_s < deadline_s:
        for request_id in worker.take_finished():
            found[request_id] = time.monotonic() - began_s
        time.sleep(0.005)
    return found


@pytest.mark.parametrize("mode", [LoadMode.SYNC, LoadMode.ASYNC])
def test_a_read_that_never_ends_is_reported_at_the_deadline(mode: LoadMode, worker: WorkerSide, tmp_path: Path) -> None:
    blocks = range(1, 5)
    with holding(held(tmp_path, range(2, 3)), float("inf")):
        worker.start_loads((job("victim", blocks, mode),))
        if mode is LoadMode.ASYNC:
            found = ended(worker, 4 * READ_DEADLINE_S)
            assert found["victim"] >= READ_DEADLINE_S
        assert worker.take_failed_block_ids() == {2}
    assert [worker.cache[block].unique().tolist() for block in blocks] == [[1.0], [0.0], [3.0], [4.0]]
    (failure,) = (e for e in read_events(tmp_path / "evidence/decode/journal.jsonl")[0] if e.blocks == (2,))
    assert (failure.name, failure.reason) == (EventName.READ_FAILED, "timeout")


def test_a_read_that_comes_too_late_changes_nothing(worker: WorkerSide, tmp_path: Path) -> None:
    with holding(held(tmp_path, range(2, 3)), float("inf")) as files:
        worker.start_loads((job("victim", range(1, 4), LoadMode.SYNC),))
        assert worker.take_failed_block_ids() == {2}
        worker.cache[2] = 99.0  # the block has a new owner
        files.let_go()
        time.sleep(0.1)
    assert worker.cache[2].unique().tolist() == [99.0]


def test_reads_that_hang_hold_up_nobody_else(worker: WorkerSide, tmp_path: Path) -> None:
    """More of them than one load has threads."""
    bad = range(READER_THREADS + 4)
    with ExitStack() as held_files:
        held_files.enter_context(holding(held(tmp_path, bad), float("inf")))
        worker.start_loads((job("victim", bad), job("bystander", range(20, 28))))
        found = ended(worker, 6 * READ_DEADLINE_S)
    assert found["bystander"] < READ_DEADLINE_S <= found["victim"]
    assert worker.take_failed_block_ids() == set(bad)
    assert [worker.cache[block].unique().tolist() for block in range(20, 28)] == [[float(b)] for b in range(20, 28)]
