"""FaultInjectingConnector: wraps any KV connector and breaks loads at the boundary between it and vLLM.

The scheduler side learns from each request what to break and which block ids vLLM gave to the load; the
worker side lets the inner connector load, changes the bytes of the chosen blocks, and adds their ids to what
the inner connector reports. Everything else goes to the inner connector untouched. Every decode engine runs
behind it, the baseline too (with `allow_faults` false), so that a fault is the only difference between them.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from services.faults import (
    DEFAULT_CONTROL,
    NO_FAULT,
    Breakage,
    ControlError,
    FaultKind,
    LoadControl,
    LoadMode,
    breakage,
    parse_control,
)
from services.journal import EventName, Journal
from services.kv_blocks import KVBlocks
from services.vllm_compat import forward_to_inner

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvproof.fault_injecting")


@dataclass(frozen=True)
class FaultInjectingConfig:
    """`kv_connector_extra_config` of this connector. `inner` is a kv-transfer config of its own
    (`kv_connector`, and where needed `kv_connector_module_path` and `kv_connector_extra_config`)."""

    evidence_dir: str
    service: str
    allow_faults: bool
    inner: Mapping[str, Any]

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> FaultInjectingConfig:
        """Raises ValueError naming unknown and missing keys."""
        known = {f.name for f in fields(cls)}
        if set(raw) != known:
            raise ValueError(
                f"FaultInjectingConnector: unknown keys {sorted(set(raw) - known)}, missing keys "
                f"{sorted(known - set(raw))} in kv_connector_extra_config"
            )
        return cls(**raw)


class InjectedError(RuntimeError):
    """The load hook raised because a request asked for it."""


@dataclass(frozen=True)
class Load:
    """One load that vLLM gave blocks to: `block_ids[i]` is logical block `first_block + i` of the prompt."""

    request_id: str
    tag: str
    mode: LoadMode
    first_block: int
    block_ids: tuple[int, ...]
    kind: FaultKind
    breakage: Breakage

    def logical(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        """The logical blocks that these physical ids are in this load, in order."""
        wanted = set(block_ids)
        return tuple(self.first_block + i for i, block_id in enumerate(self.block_ids) if block_id in wanted)

    @property
    def bad_block_ids(self) -> frozenset[int]:
        """The ids of its own blocks that the fault reports."""
        return frozenset(self.block_ids[index] for index in self.breakage.reported)


@dataclass
class FaultInjectingMetadata(KVConnectorMetadata):
    """The inner connector's metadata, and the loads that start in this step."""

    inner: KVConnectorMetadata
    loads: tuple[Load, ...] = ()


@forward_to_inner
class FaultInjectingConnector(KVConnectorBase_V1):
    """See the module's first lines. Methods of the base class that are not here go to `inner`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        config = FaultInjectingConfig.parse(self._kv_transfer_config.kv_connector_extra_config)
        inner_config = inner_vllm_config(vllm_config, config.inner)
        self.inner: KVConnectorBase_V1 = inner_class(inner_config)(inner_config, role, kv_cache_config)
        journal = Journal(Path(config.evidence_dir), config.service)
        block_size = vllm_config.cache_config.block_size
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = _SchedulerSide(self.inner, journal, block_size, config.allow_faults)
        else:
            self._worker = _WorkerSide(self.inner, journal, kv_cache_config.num_blocks)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """What the inner connector requires."""
        inner = inner_vllm_config(vllm_config, vllm_config.kv_transfer_config.kv_connector_extra_config["inner"])
        layout: str | None = inner_class(inner).get_required_kvcache_layout(inner)
        return layout

    # Scheduler side.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What the inner connector offers, cut to the request's `offer_blocks`; nothing with load `off`."""
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note which block ids the load goes to, and decide what will happen to them."""
        self.inner.update_state_after_alloc(request, blocks, num_external_tokens)
        self._scheduler.plan_load(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> FaultInjectingMetadata:
        return FaultInjectingMetadata(self.inner.build_connector_meta(scheduler_output), self._scheduler.take_loads())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Tell the inner connector what its workers reported, except for failures that it is not to know of."""
        self.inner.update_connector_output(self._scheduler.without_untold(connector_output))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.forget(request)
        answer: tuple[bool, dict[str, Any] | None] = self.inner.request_finished(request, block_ids)
        return answer

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)
        self.inner.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, FaultInjectingMetadata)
        self.inner.handle_preemptions(kv_connector_metadata.inner)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, FaultInjectingMetadata)
        super().bind_connector_metadata(connector_metadata)
        self.inner.bind_connector_metadata(connector_metadata.inner)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.inner.clear_connector_metadata()

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Let the inner connector load, then break this step's sync loads. Raises InjectedError for the fault
        `raise`; the inner connector then loads nothing in this step.

        A connector that loads layer by layer during the forward pass is not covered: it would load over
        what was broken here.
        """
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, FaultInjectingMetadata)
        self._worker.before(metadata.loads)
        self.inner.start_load_kv(forward_context, **kwargs)
        self._worker.after_start(metadata.loads)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The inner connector's, with broken or delayed loads; what vLLM up to 0.26 calls."""
        sending, receiving = self.inner.get_finished(finished_req_ids)
        return sending, self._worker.finish(receiving or ()) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As `get_finished`, for the versions that ask for all results in one snapshot."""
        results = self.inner.get_transfer_results(finished_req_ids)
        return replace(results, finished_recving=self._worker.finish(results.finished_recving))

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_reported()


class _SchedulerSide:
    """Knows the requests: what each one asks to be broken, and which blocks its loads go to."""

    def __init__(self, inner: KVConnectorBase_V1, journal: Journal, block_size: int, allow_faults: bool) -> None:
        self._inner, self._journal = inner, journal
        self._block_size, self._allow_faults = block_size, allow_faults
        self._controls: dict[str, LoadControl] = {}
        self._offers: dict[str, tuple[int, int, LoadMode]] = {}
        self._load_counts: dict[str, int] = {}
        self._untold: dict[str, frozenset[int]] = {}
        self._planned: list[Load] = []

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        control = self._control(request)
        if control.load is LoadMode.OFF:
            return 0, False
        offered, is_async = self._inner.get_num_new_matched_tokens(request, num_computed_tokens)
        if offered is None:
            return None, is_async
        if offered > 0:
            offered = min(offered, max(0, control.offer_blocks * self._block_size - num_computed_tokens))
            is_async = is_async and offered > 0
        self._note_offer(request, num_computed_tokens, offered, LoadMode.ASYNC if is_async else LoadMode.SYNC)
        return offered, is_async

    def plan_load(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        if num_external_tokens <= 0:
            return
        control = self._control(request)
        first, _, mode = self._offers[request.request_id]
        end = first + -(-num_external_tokens // self._block_size)
        earlier = self._load_counts.get(request.request_id, 0)
        self._load_counts[request.request_id] = earlier + 1
        load = Load(
            request.request_id,
            _tag(control, request),
            mode,
            first,
            tuple(block_ids[first:end]),
            control.fault.kind,
            breakage(control.fault, end - first, earlier),
        )
        self._planned.append(load)
        self._untold[request.request_id] = load.bad_block_ids if load.breakage.untold else frozenset()
        self._journal.write(
            EventName.PLANNED,
            request=load.tag,
            mode=mode,
            blocks=load.logical(load.block_ids),
            block_ids=load.block_ids,
        )

    def take_loads(self) -> tuple[Load, ...]:
        loads, self._planned = tuple(self._planned), []
        return loads

    def without_untold(self, output: KVConnectorOutput) -> KVConnectorOutput:
        hidden = frozenset().union(*self._untold.values())
        if hidden.isdisjoint(output.invalid_block_ids or ()):
            return output
        return replace(output, invalid_block_ids=output.invalid_block_ids - hidden)

    def forget(self, request: Request) -> None:
        self._journal.write(EventName.RELEASED, request=_tag(self._control(request), request))
        for known in (self._controls, self._offers, self._load_counts, self._untold):
            known.pop(request.request_id, None)

    def _control(self, request: Request) -> LoadControl:
        control = self._controls.get(request.request_id)
        if control is None:
            control = self._controls[request.request_id] = self._read_control(request)
        return control

    def _read_control(self, request: Request) -> LoadControl:
        try:
            control = parse_control(request.kv_transfer_params)
        except ControlError as error:
            self._journal.write(EventName.REJECTED, request=request.request_id, reason=str(error))
            return DEFAULT_CONTROL
        if control.fault != NO_FAULT and not self._allow_faults:
            self._journal.write(
                EventName.REJECTED, request=_tag(control, request), reason="this engine was started without faults"
            )
            return replace(control, fault=NO_FAULT)
        return control

    def _note_offer(self, request: Request, num_computed_tokens: int, offered: int, mode: LoadMode) -> None:
        """vLLM may ask again in every step until there is room; an answer is journaled when it changes."""
        first = num_computed_tokens // self._block_size
        offer = (first, offered, mode)
        if self._offers.get(request.request_id) != offer:
            self._offers[request.request_id] = offer
            blocks = tuple(range(first, first + offered // self._block_size))
            self._journal.write(
                EventName.OFFERED, request=_tag(self._control(request), request), mode=mode, blocks=blocks
            )


class _WorkerSide:
    """Breaks loads: lets the inner connector finish one, then changes the bytes and the reports."""

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
        """Change the bytes; what fired are only blocks whose bytes differ afterwards (all, where none was touched).

        A fault that also reports the load as finished once too often has fired when it does that.
        """
        touched = load.breakage.garbage or load.breakage.withheld
        before = {index: self._blocks.digest(load.block_ids[index]) for index in touched}
        for index in load.breakage.garbage:
            self._blocks.write_garbage(load.block_ids[index])
        for index in load.breakage.withheld:
            self._withhold(load.block_ids[index], before[index])
        changed = [i for i in touched if self._blocks.digest(load.block_ids[i]) != before[i]]
        fired = tuple(changed if touched else range(len(load.block_ids)))
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


def inner_class(inner_config: VllmConfig) -> type[KVConnectorBase_V1]:
    """The connector class that an inner config names."""
    found: type[KVConnectorBase_V1] = KVConnectorFactory.get_connector_class(inner_config.kv_transfer_config)
    return found


def inner_vllm_config(vllm_config: VllmConfig, inner: Mapping[str, Any]) -> VllmConfig:
    """The engine's config as the inner connector sees it: role, policy and engine id are the outer ones."""
    outer = vllm_config.kv_transfer_config
    config = copy.copy(vllm_config)
    config.kv_transfer_config = KVTransferConfig(
        **{
            "engine_id": outer.engine_id,
            "kv_role": outer.kv_role,
            "kv_load_failure_policy": outer.kv_load_failure_policy,
            **inner,
        }
    )
    return config


def _tag(control: LoadControl, request: Request) -> str:
    return control.tag or request.request_id
