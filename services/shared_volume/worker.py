"""The worker side: moves bytes between the volume and the KV cache of one worker.

`SharedVolumeConnector` calls it in each worker process, from one thread; loads run in threads of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from services.faults import HoldPoint, LoadMode
from services.journal import EventName, Journal
from services.kv_blocks import KVBlocks
from services.shared_volume.jobs import LoadJob, SaveJob
from services.store import BlockStore, FailureReason, ReadFailure, Shard

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.kvproof.shared_volume")

LOADER_THREADS = 4
"""Async loads in progress at a time."""
READER_THREADS = 8
"""Block files read at a time, by one load."""


class WorkerSide:
    """See the module's first lines."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        store: BlockStore,
        journal: Journal,
        read_deadline_s: float,
    ) -> None:
        parallel = vllm_config.parallel_config
        self._shard = Shard(parallel.rank % parallel.tensor_parallel_size, parallel.tensor_parallel_size)
        self._block_count = kv_cache_config.num_blocks
        self._store, self._journal, self._read_deadline_s = store, journal, read_deadline_s
        self._loaders = ThreadPoolExecutor(LOADER_THREADS, "kv-load")
        self._lock = threading.Lock()
        self._ended: list[tuple[str, set[int]]] = []
        self._failed_block_ids: set[int] = set()
        self._step_failed = False

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._blocks = KVBlocks(kv_caches, self._block_count)

    def start_loads(self, loads: tuple[LoadJob, ...]) -> None:
        self._step_failed = False
        for job in loads:
            if job.mode is LoadMode.ASYNC:
                self._loaders.submit(self._load_in_thread, job, _DeviceOrder.after_now(self._blocks))
            else:
                failed = self._load(job)
                self._failed_block_ids |= failed
                self._step_failed |= bool(failed)

    def save(self, saves: tuple[SaveJob, ...]) -> None:
        for job in saves:
            if self._step_failed:
                self._journal_save(EventName.SAVE_FAILED, job, 0, len(job.keys), "a load failed in this step")
            else:
                self._save(job)

    def take_finished(self) -> set[str]:
        """Requests whose async load ended; moves their failed blocks to this step's report."""
        with self._lock:
            ended, self._ended = self._ended, []
        for _, failed in ended:
            self._failed_block_ids |= failed
        return {request_id for request_id, _ in ended}

    def take_failed_block_ids(self) -> set[int]:
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def shutdown(self) -> None:
        self._loaders.shutdown(wait=False, cancel_futures=True)

    def _load_in_thread(self, job: LoadJob, order: _DeviceOrder) -> None:
        """Whatever happens, the load ends: a request whose load is never reported waits for ever."""
        failed = set(job.block_ids)
        try:
            with order:
                failed = self._load(job)
        except Exception:
            logger.exception("Load of %s failed; all its blocks are reported", job.tag)
        finally:
            with self._lock:
                self._ended.append((job.request_id, failed))

    def _load(self, job: LoadJob) -> set[int]:
        """Read the job's blocks into the KV cache; the ids of those that could not be read."""
        deadline_s = time.monotonic() + self._read_deadline_s
        failed = set()
        with _readers() as readers:
            reads = [
                readers.submit(self._store.read, key, self._shard, self._blocks.layout, deadline_s) for key in job.keys
            ]
            for index, read in enumerate(reads):
                payload = _result(read, deadline_s)
                if isinstance(payload, ReadFailure):
                    failed.add(job.block_ids[index])
                    self._journal_read_failure(job, index, payload)
                else:
                    self._hold_load(job, index, reads)
                    self._blocks.write(job.block_ids[index], payload)
        return failed

    def _save(self, job: SaveJob) -> None:
        for index, (key, block_id) in enumerate(zip(job.keys, job.block_ids, strict=True)):
            try:
                self._publish(job, index, key, block_id)
            except OSError as error:
                logger.warning("KV of %s not saved: %s", job.tag, error)
                self._journal_save(EventName.SAVE_FAILED, job, index, len(job.keys), str(error))
                self._journal_save(EventName.SAVED, job, 0, index, "")
                return
        self._journal_save(EventName.SAVED, job, 0, len(job.keys), "")

    def _publish(self, job: SaveJob, index: int, key: str, block_id: int) -> None:
        parts = self._parts(job, index, block_id)
        held = partial(self._hold, job, index, HoldPoint.INDEX)
        self._store.publish(key, self._shard, self._blocks.layout, parts, before_index=held)

    def _parts(self, job: SaveJob, index: int, block_id: int) -> Iterator[memoryview]:
        """The bytes of a block, copied only when asked for: a block that is in the store already is not."""
        parts = self._blocks.read(block_id)
        yield from parts[: len(parts) // 2]
        self._hold(job, index, HoldPoint.PAYLOAD)
        yield from parts[len(parts) // 2 :]

    def _hold_load(self, job: LoadJob, index: int, reads: Sequence[Future[bytearray | ReadFailure]]) -> None:
        """Not before everything has been read: the stop may outlast the reads' deadline."""
        if job.hold:
            wait(reads)
            self._hold(job, index, HoldPoint.LOAD)

    def _hold(self, job: LoadJob | SaveJob, index: int, point: HoldPoint) -> None:
        """Stop where the request asks for it."""
        hold, block = job.hold, job.first_block + index
        if hold and (hold.point, hold.block) == (point, block):
            self._journal.write(EventName.HELD, request=job.tag, blocks=(block,), reason=point, duration_s=hold.wait_s)
            time.sleep(hold.wait_s)

    def _journal_save(self, name: EventName, job: SaveJob, first: int, end: int, reason: str) -> None:
        if end > first:
            blocks = tuple(range(job.first_block + first, job.first_block + end))
            self._journal.write(
                name,
                request=job.tag,
                blocks=blocks,
                block_ids=job.block_ids[first:end],
                reason=reason,
                keys=job.keys[first:end] if name is EventName.SAVED else (),
            )

    def _journal_read_failure(self, job: LoadJob, index: int, failure: ReadFailure) -> None:
        logger.warning("KV block %d of %s: %s", job.first_block + index, job.tag, failure.detail)
        self._journal.write(
            EventName.READ_FAILED,
            request=job.tag,
            mode=job.mode,
            blocks=(job.first_block + index,),
            block_ids=(job.block_ids[index],),
            reason=failure.reason,
        )


class _DeviceOrder:
    """Runs a thread's copies on their own stream, after what the engine had queued; nothing on the CPU."""

    def __init__(self, device: torch.device, ready: torch.cuda.Event | None) -> None:
        self._device, self._ready = device, ready

    @classmethod
    def after_now(cls, blocks: KVBlocks) -> _DeviceOrder:
        device = blocks.layers[0].tensor.device
        if device.type != "cuda":
            return cls(device, None)
        ready = torch.cuda.Event()
        ready.record()
        return cls(device, ready)

    def __enter__(self) -> None:
        if self._ready is not None:
            torch.cuda.set_device(self._device)
            self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_event(self._ready)
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._ready is not None:
            self._context.__exit__(*error)
            self._stream.synchronize()


@contextmanager
def _readers() -> Iterator[ThreadPoolExecutor]:
    """Threads for one load: reads that hang take none from anybody else, and are not waited for at the end."""
    pool = ThreadPoolExecutor(READER_THREADS, "kv-read")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _result(read: Future[bytearray | ReadFailure], deadline_s: float) -> bytearray | ReadFailure:
    """A read's result, or TIMEOUT when the file system itself hangs (its thread is then lost, not the load)."""
    try:
        return read.result(timeout=max(0.0, deadline_s - time.monotonic()) + 0.1)
    except FutureTimeout:
        return ReadFailure(FailureReason.TIMEOUT, "the read did not return before its deadline")
