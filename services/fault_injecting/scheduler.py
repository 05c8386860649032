"""The scheduler side: knows the requests, what each one asks to be broken, and which blocks its loads go to.

`FaultInjectingConnector` calls it in vLLM's engine-core process, from one thread. It imports nothing of vLLM.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from services.fault_injecting.loads import Load
from services.faults import (
    DEFAULT_CONTROL,
    NO_FAULT,
    ControlError,
    LoadControl,
    LoadMode,
    breakage,
    lookup_delay_s,
    parse_control,
)
from services.journal import EventName, Journal

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class SchedulerSide:
    """See the module's first lines."""

    def __init__(self, inner: KVConnectorBase_V1, journal: Journal, block_size: int, allow_faults: bool) -> None:
        self._inner, self._journal = inner, journal
        self._block_size, self._allow_faults = block_size, allow_faults
        self._controls: dict[str, LoadControl] = {}
        self._offers: dict[str, tuple[int, LoadMode, tuple[int, ...]]] = {}
        self._load_counts: dict[str, int] = {}
        self._pending_until_s: dict[str, float] = {}
        self._untold: dict[str, frozenset[int]] = {}
        self._planned: list[Load] = []

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        control = self._control(request)
        if control.load is LoadMode.OFF:
            return 0, False
        if time.monotonic() < self._pending_until_s.get(request.request_id, 0.0):
            return None, False
        offered, is_async = self._inner.get_num_new_matched_tokens(request, num_computed_tokens)
        if offered is None:
            return None, is_async
        if offered > 0:
            offered = min(offered, max(0, control.offer_blocks * self._block_size - num_computed_tokens))
            is_async = is_async and offered > 0
        mode = LoadMode.ASYNC if is_async else LoadMode.SYNC
        first = num_computed_tokens // self._block_size
        blocks = tuple(range(first, first + offered // self._block_size))
        if self._begins_to_pend(request, mode, blocks):
            return None, False
        self._note_offer(request, first, mode, blocks)
        return offered, is_async

    def plan_load(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        if num_external_tokens <= 0:
            return
        control = self._control(request)
        first, mode, _ = self._offers[request.request_id]
        end = first + -(-num_external_tokens // self._block_size)
        earlier = self._load_counts.get(request.request_id, 0)
        self._load_counts[request.request_id] = earlier + 1
        self._pending_until_s.pop(request.request_id, None)
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
        for known in (self._controls, self._offers, self._load_counts, self._untold, self._pending_until_s):
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

    def _begins_to_pend(self, request: Request, mode: LoadMode, blocks: tuple[int, ...]) -> bool:
        """Whether this lookup, the first of its load, is to be answered "not yet"; from now on for its time."""
        control, earlier = self._control(request), self._load_counts.get(request.request_id, 0)
        delay_s = lookup_delay_s(control.fault, earlier)
        if not blocks or delay_s == 0 or request.request_id in self._pending_until_s:
            return False
        self._pending_until_s[request.request_id] = time.monotonic() + delay_s
        self._journal.write(
            EventName.FAULT_FIRED,
            request=_tag(control, request),
            mode=mode,
            blocks=blocks,
            reason=control.fault.kind,
            duration_s=control.fault.delay_s,
        )
        return True

    def _note_offer(self, request: Request, first: int, mode: LoadMode, blocks: tuple[int, ...]) -> None:
        """vLLM may ask again in every step until there is room; an answer is journaled when it changes."""
        offer = (first, mode, blocks)
        if self._offers.get(request.request_id) != offer:
            self._offers[request.request_id] = offer
            self._journal.write(
                EventName.OFFERED, request=_tag(self._control(request), request), mode=mode, blocks=blocks
            )


def _tag(control: LoadControl, request: Request) -> str:
    return control.tag or request.request_id
