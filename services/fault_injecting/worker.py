"""The worker side: lets the inner connector finish a load, then changes its bytes and the reports about it.

`FaultInjectingConnector` calls it in each worker process, from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from services.fault_injecting.loads import InjectedError, Load
from services.faults import LoadMode
from services.journal import EventName, Journal
from services.kv_blocks import KVBlocks

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


class WorkerSide:
    """See the module's first lines."""

    def __init__(self, inner: KVConnectorBase_V1, journal: Journal, block_count: int) -> None:
        self._inner, self._journal, self._block_count = inner, journal, block_count
        self._loading: dict[str, Load] = {}
        self._withheld: dict[int, bytearray] = {}
        self._held_back: list[tuple[float, Load]] = []
        self._to_finish_again: list[tuple[Load, tuple[int, ...]]] = []
        self._ended: list[Load] = []
        self._late: list[Load] = []
        self._inner_failed: set[int] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._blocks = KVBlocks(kv_caches, self._block_count)

    def before(self, loads: tuple[Load, ...]) -> None:
        """Keep the bytes of the blocks that the coming load must not change; raise where that is the fault."""
        for load in loads:
            for index in load.breakage.withheld:
                block_id = load.block_ids[index]
                self._withheld[block_id] = bytearray(b"".join(self._blocks.read(block_id)))
        for load in loads:
            if load.breakage.raises:
                self._fired(load, range(len(load.block_ids)))
                raise InjectedError(f"request {load.tag} asked for an exception in the load hook")

    def after_start(self, loads: tuple[Load, ...]) -> None:
        """Sync loads have ended; async ones go on until the inner connector says so."""
        self._inner_failed |= self._inner.get_block_ids_with_load_errors() or set()
        for load in loads:
            if load.mode is LoadMode.ASYNC:
                self._loading[load.request_id] = load
            else:
                time.sleep(load.breakage.delay_s)
                self._end(load)

    def finish(self, request_ids: Iterable[str]) -> set[str]:
        """The loads to report as finished now: of those that the inner connector reports and those held back,
        and those that a fault reports once too often."""
        self._inner_failed |= self._inner.get_block_ids_with_load_errors() or set()
        unknown = {request_id for request_id in request_ids if request_id not in self._loading}
        again, self._to_finish_again = self._to_finish_again, []
        finished = [load for load, _ in again]
        for load, fired in again:
            self._fired(load, fired)
        for load in self._due(request_ids):
            self._end(load)
            if load.breakage.extra_finishes >= 0:
                finished.append(load)
        for load in finished:
            self._journal.write(EventName.FINISHED, request=load.tag, mode=load.mode)
        return unknown | {load.request_id for load in finished}

    def take_reported(self) -> set[int]:
        """The block ids to report in this step: the inner connector's and the faults'."""
        self._inner_failed |= self._inner.get_block_ids_with_load_errors() or set()
        late, self._late = self._late, [load for load in self._ended if load.breakage.late]
        on_time = [load for load in self._ended if not load.breakage.late]
        reported = self._inner_failed.union(*(self._ids_to_report(load) for load in (*on_time, *late)))
        strays = reported.difference(*(self._report(load, reported) for load in (*self._ended, *late)))
        if strays:
            self._journal.write(EventName.REPORTED, block_ids=tuple(sorted(strays)), reason="of no load that ended now")
        self._ended, self._inner_failed = [], set()
        return reported

    def _due(self, request_ids: Iterable[str]) -> list[Load]:
        """The async loads that end now: those of `request_ids`, and earlier ones whose delay is over."""
        now_s = time.monotonic()
        ended = [self._loading.pop(request_id) for request_id in request_ids if request_id in self._loading]
        self._held_back += [(now_s + load.breakage.delay_s, load) for load in ended]
        due = [load for due_s, load in self._held_back if due_s <= now_s]
        self._held_back = [(due_s, load) for due_s, load in self._held_back if due_s > now_s]
        return due

    def _ids_to_report(self, load: Load) -> frozenset[int]:
        """The ids that the fault reports. Those that belong to nobody lie beyond the end of the cache."""
        unknown = range(self._block_count, self._block_count + load.breakage.unknown_count)
        return load.bad_block_ids.union(unknown)

    def _report(self, load: Load, reported: set[int]) -> tuple[int, ...]:
        """Journal what of `reported` is about this load; block ids without blocks are those of nobody."""
        blocks = load.logical(reported)
        block_ids = tuple(load.block_ids[block - load.first_block] for block in blocks)
        block_ids += tuple(sorted(self._ids_to_report(load) - load.bad_block_ids))
        if block_ids:
            self._journal.write(
                EventName.REPORTED, request=load.tag, mode=load.mode, blocks=blocks, block_ids=block_ids
            )
        return block_ids

    def _end(self, load: Load) -> None:
        """Journal what the inner connector did, then carry out the breakage."""
        failed = load.logical(self._inner_failed)
        if failed:
            self._journal.write(EventName.FAILED, request=load.tag, mode=load.mode, blocks=failed)
        loaded = [i for i in range(len(load.block_ids)) if load.first_block + i not in failed]
        self._journal.write(
            EventName.LOADED,
            request=load.tag,
            mode=load.mode,
            blocks=tuple(load.first_block + i for i in loaded),
            digests=tuple(self._blocks.digest(load.block_ids[i]) for i in loaded),
        )
        if load.breakage.fires:
            self._break(load)
        self._ended.append(load)

    def _break(self, load: Load) -> None:
        """Change the bytes; what fired are only blocks whose bytes differ afterwards, or, where the fault touches none,
        those that it reports; or all.

        A fault that also reports the load as finished once too often has fired when it does that.
        """
        touched = load.breakage.garbage or load.breakage.withheld
        before = {index: self._blocks.digest(load.block_ids[index]) for index in touched}
        for index in load.breakage.garbage:
            self._blocks.write_garbage(load.block_ids[index])
        for index in load.breakage.withheld:
            self._withhold(load.block_ids[index], before[index])
        changed = [i for i in touched if self._blocks.digest(load.block_ids[i]) != before[i]]
        fired = tuple(changed if touched else load.breakage.reported or range(len(load.block_ids)))
        if load.breakage.extra_finishes > 0:
            self._to_finish_again.append((load, fired))
        else:
            self._fired(load, fired)

    def _fired(self, load: Load, indices: Iterable[int]) -> None:
        self._journal.write(
            EventName.FAULT_FIRED,
            request=load.tag,
            mode=load.mode,
            blocks=tuple(load.first_block + i for i in indices),
            reason=load.kind,
            duration_s=load.breakage.delay_s,
        )

    def _withhold(self, block_id: int, loaded_digest: str) -> None:
        """Put back what was in the block before the load, or noise where that is, left over from an earlier
        request, exactly what was loaded: then the missing load would change nothing."""
        self._blocks.write(block_id, self._withheld.pop(block_id))
        if self._blocks.digest(block_id) == loaded_digest:
            self._blocks.write_garbage(block_id)
