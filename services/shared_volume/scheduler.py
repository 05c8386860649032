"""The scheduler side: decides what is offered, loaded and saved.

`SharedVolumeConnector` calls it in vLLM's engine-core process, from one thread. It sees vLLM's requests and scheduler
outputs, and imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from services.faults import DEFAULT_CONTROL, ControlError, LoadControl, LoadMode, parse_control
from services.journal import EventName, Journal
from services.shared_volume.fingerprint import engine_fingerprint
from services.shared_volume.jobs import LoadJob, SaveJob, tag
from services.store import BlockStore, block_keys, root_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass
class _RequestState:
    """What the scheduler side remembers of a request until vLLM finishes it."""

    control: LoadControl
    keys: tuple[str, ...]
    prompt_token_count: int
    block_ids: list[int] = field(default_factory=list)
    saved_block_count: int = 0
    matched_block_count: int = -1
    first_block: int = 0
    load: LoadJob | None = None
    failed_keys: set[str] = field(default_factory=set)


class SchedulerSide:
    """Decides what is offered, loaded and saved."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        store: BlockStore,
        journal: Journal,
        allow_faults: bool,
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        self._block_size = vllm_config.cache_config.block_size
        self._shard_count = vllm_config.parallel_config.tensor_parallel_size
        self._loads_allowed, self._saves_allowed = transfer.is_kv_consumer, transfer.is_kv_producer
        self._fingerprint = engine_fingerprint(vllm_config, kv_cache_config)
        self._store, self._journal, self._allow_faults = store, journal, allow_faults
        self._requests: dict[str, _RequestState] = {}
        self._planned: list[LoadJob] = []

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        state = self._state(request)
        if not self._loads_allowed or state.control.load is LoadMode.OFF:
            return 0, False
        state.first_block = num_computed_tokens // self._block_size
        count = self._found(state) - state.first_block
        return count * self._block_size, count > 0 and state.control.load is LoadMode.ASYNC

    def plan_load(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        state = self._state(request)
        if num_external_tokens <= 0:
            return
        first, end = state.first_block, state.first_block + num_external_tokens // self._block_size
        state.load = LoadJob(
            request.request_id,
            tag(state.control, request.request_id),
            state.control.load,
            first,
            state.keys[first:end],
            tuple(block_ids[first:end]),
            state.control.hold,
        )
        self._planned.append(state.load)

    def take_loads(self) -> tuple[LoadJob, ...]:
        """The loads planned since the last step."""
        loads, self._planned = tuple(self._planned), []
        return loads

    def saves(self, output: SchedulerOutput) -> tuple[SaveJob, ...]:
        """The saves of the blocks that this step will have computed."""
        return tuple(self._saves(output)) if self._saves_allowed else ()

    def note_failures(self, invalid_block_ids: Iterable[int]) -> None:
        invalid = set(invalid_block_ids)
        for state in self._requests.values():
            if state.load and invalid:
                state.failed_keys.update(
                    key
                    for key, block_id in zip(state.load.keys, state.load.block_ids, strict=True)
                    if block_id in invalid
                )

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def _state(self, request: Request) -> _RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = self._new_state(request)
        return state

    def _new_state(self, request: Request) -> _RequestState:
        token_ids = request.prompt_token_ids or []
        lora = request.lora_request
        root = root_key(
            self._fingerprint,
            request.cache_salt or "",
            f"{lora.lora_name}:{lora.lora_path}" if lora else "",
            tuple(f"{f.identifier}@{f.mm_position.offset}" for f in request.mm_features),
        )
        return _RequestState(self._control(request), block_keys(root, token_ids, self._block_size), len(token_ids))

    def _control(self, request: Request) -> LoadControl:
        """The request's control; a malformed one counts as none (the fault injector journals why)."""
        try:
            control = parse_control(request.kv_transfer_params)
        except ControlError:
            return DEFAULT_CONTROL
        if control.hold and not self._allow_faults:
            reason = "this engine was started without faults"
            self._journal.write(EventName.REJECTED, request=tag(control, request.request_id), reason=reason)
            return replace(control, hold=None)
        return control

    def _found(self, state: _RequestState) -> int:
        """The number of leading blocks that are local or in the index; journals when it changes."""
        limit = (state.prompt_token_count - 1) // self._block_size
        found = state.first_block
        while found < limit and self._offers(state, state.keys[found]):
            found += 1
        if found != state.matched_block_count:
            state.matched_block_count = found
            self._journal.write(
                EventName.LOOKUP, request=state.control.tag, blocks=tuple(range(state.first_block, found))
            )
        return max(found, state.first_block)

    def _offers(self, state: _RequestState, key: str) -> bool:
        return key not in state.failed_keys and self._store.contains(key, self._shard_count)

    def _saves(self, output: SchedulerOutput) -> Iterable[SaveJob]:
        for new in output.scheduled_new_reqs:
            state = self._requests[new.req_id]
            state.block_ids, state.saved_block_count = list(new.block_ids[0]), 0
            yield from self._save(new.req_id, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            state = self._requests[request_id]
            computed = cached.num_computed_tokens[index]
            if request_id in cached.resumed_req_ids:
                state.block_ids = []
            state.block_ids += (cached.new_block_ids[index] or ([],))[0]
            # A request that was rewound after a failed load computes, and saves, those blocks again.
            state.saved_block_count = min(state.saved_block_count, computed // self._block_size)
            yield from self._save(request_id, computed + output.num_scheduled_tokens[request_id])

    def _save(self, request_id: str, computed_token_count: int) -> Iterable[SaveJob]:
        state = self._requests[request_id]
        first = state.saved_block_count
        end = min(computed_token_count, state.prompt_token_count) // self._block_size
        if end > first:
            state.saved_block_count = end
            name, keys = tag(state.control, request_id), state.keys[first:end]
            yield SaveJob(request_id, name, first, keys, tuple(state.block_ids[first:end]), state.control.hold)
