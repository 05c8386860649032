"""Simulated engines whose KV really lies on a volume, in kvproof's own store: faults in storage strike real files.

test_storage_power.py runs the storage matrix on four of them. A block's payload is made of its key; nobody computes KV.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from harness.records import Cell, Role
from harness.running.runner import PREFILL
from harness.stack import AttachStack
from services.faults import LoadMode
from services.journal import EventName
from services.store import BlockStore, FailureReason, ReadFailure, Shard, block_keys, root_key
from tests.engines import ENGINES
from tests.fake_server import Behaviour, Client, reply
from tests.simulated_engine import SimulatedEngine
from tests.simulated_http import attached
from tests.simulated_requests import BLOCK_SIZE, Answer, Blocks, Harm, Request, Tokens, failure, right
from tests.ways_to_be_wrong import Wrong, harm

LAYOUT = "simulated"
ROOT = root_key("simulated", "", "", ())
PAYLOAD_BYTES = 40_960
READ_DEADLINE_S = 1.4
"""Longer than a slow read, and as short as that allows."""

Read = bytearray | ReadFailure


class StoringEngine(SimulatedEngine):
    """One service with a volume."""

    def __init__(
        self, service: str, kv_dir: Path, evidence_dir: Path, wrong: Wrong, cells: Iterable[Cell] = ()
    ) -> None:
        super().__init__(service, set(), evidence_dir, wrong, cells)
        self._volume = BlockStore(kv_dir, verify_checksum=wrong is not Wrong.LOADS_DAMAGED_BYTES)
        self._readers = ThreadPoolExecutor(32, "read")
        self._holds_blocks = False
        self._with_failed_reads: set[str] = set()

    def behaviour(self, path: str, body: dict[str, object], client: Client) -> Behaviour:
        if path == "/reset_prefix_cache" and self._holds_blocks:
            return reply({"success": False})
        return super().behaviour(path, body, client)

    def _saved(self, request: Request, keys: tuple[Tokens, ...]) -> Answer:
        names = block_names(request.prompt)[: len(keys)]
        for block, name in enumerate(names):
            try:
                self._publish(request, block, name)
            except OSError as error:
                self._write(EventName.SAVED, request, blocks=tuple(range(block)), keys=names[:block])
                unsaved = tuple(range(block, len(names)))
                self._write(EventName.SAVE_FAILED, request, blocks=unsaved, reason=str(error))
                return self._without_room(request, name)
        self._write(EventName.SAVED, request, blocks=tuple(range(len(names))), keys=names)
        return right(request)

    def _publish(self, request: Request, block: int, name: str) -> None:  # noqa: ARG002
        self._volume.publish(name, Shard(), LAYOUT, [payload(name)])

    def _without_room(self, request: Request, name: str) -> Answer:
        match self._wrong:
            case Wrong.PREFILL_FAILS_WITHOUT_ROOM:
                return failure(request)
            case Wrong.PREFILL_DIES_WITHOUT_ROOM:
                self._die()
            case Wrong.PUBLISHES_TORN_BLOCKS:
                entry = self._volume.index_path(name, Shard())
                entry.parent.mkdir(exist_ok=True)
                entry.touch()
        return right(request)

    def _found(self, request: Request, keys: tuple[Tokens, ...]) -> int:
        names = block_names(request.prompt)[: len(keys)]
        count = next((i for i, name in enumerate(names) if not self._volume.contains(name)), len(names))
        self._write(EventName.LOOKUP, request, blocks=tuple(range(len(self._cached(keys)), count)))
        return count

    def _read_blocks(self, request: Request, mode: LoadMode, blocks: Blocks, load_index: int) -> Harm:
        found = self._payloads(request, blocks)
        failed = tuple(block for block, read in found.items() if isinstance(read, ReadFailure))
        for block in failed:
            self._write(EventName.READ_FAILED, request, mode, (block,), found[block].reason)  # type: ignore[union-attr]
        planned = harm(self._wrong, request, blocks, load_index)
        sound = [(block, read) for block, read in found.items() if not isinstance(read, ReadFailure)]
        spoilt = tuple(block for block, read in sound if read != payload(block_names(request.prompt)[block]))
        if self._wrong is Wrong.LOADS_DAMAGED_BYTES and request.role != Role.RELOAD:
            spoilt, failed = (*spoilt, *failed), ()
        if failed:
            self._with_failed_reads.add(request.control.tag)
            self._holds_blocks = self._wrong is Wrong.HOLDS_BLOCKS
        return replace(
            planned,
            garbage=(*planned.garbage, *spoilt),
            failed=failed,
            reported=(*planned.reported, *failed),
            journaled=(*planned.journaled, *failed),
            digests=tuple(hashlib.sha256(read).hexdigest()[:16] for _, read in sound),
        )

    def _payloads(self, request: Request, blocks: Blocks) -> dict[int, Read]:
        deadline_s = time.monotonic() + READ_DEADLINE_S
        if self._wrong is Wrong.READS_WITHOUT_DEADLINE:
            deadline_s += 60
        names = block_names(request.prompt)
        reads = {b: self._readers.submit(self._volume.read, names[b], Shard(), LAYOUT, deadline_s) for b in blocks}
        return {block: result(read, deadline_s) for block, read in reads.items()}

    def _serve(self, request: Request) -> Answer:
        answer = super()._serve(request)
        if request.control.tag not in self._with_failed_reads:
            return answer
        if self._wrong is Wrong.KEEPS_LATE_BYTES:
            self._cache = dict.fromkeys(self._cache, False)
        return failure(request) if self._wrong is Wrong.FAILS_WITH_STORAGE else answer


def result(read: Future[Read], deadline_s: float) -> Read:
    try:
        return read.result(max(0.0, deadline_s - time.monotonic()) + 0.1)
    except FutureTimeout:
        return ReadFailure(FailureReason.TIMEOUT, "")


def block_names(prompt: Tokens) -> tuple[str, ...]:
    """The store's keys of a prompt's blocks; token ids here are longer than a store expects."""
    return block_keys(ROOT, [hash(token) & 0x7FFFFFFF for token in prompt], BLOCK_SIZE)


def payload(name: str) -> bytes:
    return (hashlib.sha256(name.encode()).digest() * (PAYLOAD_BYTES // 32))[:PAYLOAD_BYTES]


@contextmanager
def storing_stack(folder: Path, wrong: Wrong, cells: Iterable[Cell] = ()) -> Iterator[AttachStack]:
    """A producer and three consumers on one volume, all `wrong` in the same way, in threads of this process."""
    evidence_dir, kv_dir = folder / "evidence", folder / "kv"
    evidence_dir.mkdir()
    engines = [StoringEngine(service, kv_dir, evidence_dir, wrong, cells) for service in (PREFILL, *ENGINES)]
    with attached(engines, evidence_dir, kv_dir) as stack:
        yield stack
