"""One entry of a matrix file -> its cells: one per combination of the entry's axes.

`plan.py` calls `expand` for every entry whose words are right. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from harness.faults.process_kinds import ProcessFault, ProcessKind
from harness.faults.storage_kinds import StorageFault, StorageKind
from harness.planning.matrix_checks import fault_keys
from harness.planning.matrix_words import AnyKind, CellsEntry, FaultEntry, WorkloadEntry
from harness.records import Cell, Engine, Moment, Outcome, PlannedRequest, Role
from services.faults import ALWAYS, BREACH_KINDS, BROKEN_KINDS, NO_FAULT, BlockSelector, Fault, FaultKind, LoadMode

ROBUSTNESS = "robustness"
"""The group of cells in which the connector breaks its contract on purpose."""

AnyFault = Fault | StorageFault | ProcessFault

Engines = Mapping[str, Engine]
"""By service."""


def expand(entry: CellsEntry, engines: Engines) -> Iterator[Cell]:
    """The cells of an entry, in the order of its axes; the faults are the innermost."""
    workload = entry.workload
    for engine, load, victim, stream, api, (fault, words) in itertools.product(
        [engines[name] for name in entry.engine],
        map(LoadMode, entry.load),
        workload.victim,
        workload.stream,
        workload.api,
        _faults(entry.fault),
    ):
        shape = _Shape(victim, load, stream, api == "chat")
        yield Cell(
            id=_cell_id(entry, engine, shape, fault, words),
            engine=engine.service,
            policy=engine.policy,
            load=load,
            requests=_requests(workload, shape, fault),
            expected=Outcome(entry.expect) if entry.expect else expected_outcome(fault, engine.policy),
            why=" ".join(entry.why.split()),
            max_tokens=entry.max_tokens,
            deadline_s=entry.deadline_s,
            control=_is_control(entry, fault.kind) if entry.control is None else entry.control,
            report=entry.report,
            group=ROBUSTNESS if fault.kind in BREACH_KINDS else "",
            storage=fault if isinstance(fault, StorageFault) else None,
            process=fault if isinstance(fault, ProcessFault) else None,
            oracle_engine=engine.oracle_engine,
            preempts=workload.preempts,
        )


@dataclass(frozen=True)
class _Shape:
    """One combination of the axes that a cell's requests have in common."""

    victim: str
    load: LoadMode
    stream: bool
    chat: bool


def _faults(entry: FaultEntry) -> Iterator[tuple[AnyFault, tuple[str, ...]]]:
    """Every fault of an entry, with the words that tell it from others of its kind in a cell id."""
    for kind in entry.kind:
        used = fault_keys(kind)
        axes = (
            (entry.blocks if "blocks" in used else None) or (None,),
            (entry.times if "times" in used else None) or (None,),
            (entry.delay_s if "delay_s" in used else None) or (None,),
        )
        for blocks, times, delay_s in itertools.product(*axes):
            fault = _fault(kind, blocks, times or NO_FAULT.times, delay_s or 0.0)
            yield fault, _fault_words(blocks, times, delay_s if len(axes[-1]) > 1 else None)


def plain_fault(kind: AnyKind) -> AnyFault:
    """A fault of which a file says nothing but its kind."""
    return _fault(kind, None, NO_FAULT.times, NO_FAULT.delay_s)


def _fault(kind: AnyKind, blocks: BlockSelector | None, times: int, delay_s: float) -> AnyFault:
    """`blocks` None: what is usual for the kind."""
    match kind:
        case ProcessKind():
            return ProcessFault(kind, blocks) if blocks is not None else ProcessFault(kind)
        case StorageKind():
            return StorageFault(kind, blocks) if blocks is not None else StorageFault(kind)
        case _:
            return Fault(kind, NO_FAULT.blocks if blocks is None else blocks, times, delay_s)


def _fault_words(blocks: BlockSelector | None, times: int | None, delay_s: float | None) -> tuple[str, ...]:
    """For what the file names: `middle`, `blocks-0-2`, `always`, `3-times`, `500ms`."""
    words = []
    if blocks is not None:
        words.append(blocks if isinstance(blocks, str) else "-".join(["blocks", *map(str, blocks)]))
    if times is not None:
        words.append("always" if times == ALWAYS else f"{times}-times")
    if delay_s is not None:
        words.append(f"{round(delay_s * 1000)}ms")
    return tuple(words)


def _cell_id(entry: CellsEntry, engine: Engine, shape: _Shape, fault: AnyFault, words: Iterable[str]) -> str:
    """`policy-kind-load`, then only what tells the cell from its neighbours."""
    workload = entry.workload
    return "-".join(
        [
            engine.service.removeprefix("decode-"),
            fault.kind,
            shape.load,
            *words,
            *([workload.kind] if workload.kind != "single" else []),
            *([shape.victim] if len(workload.victim) > 1 else []),
            *(["chat"] if shape.chat else []),
            *(["stream"] if shape.stream else []),
            *(["given-up"] if workload.gives_up else []),
            *([entry.name] if entry.name else []),
        ]
    )


def _requests(workload: WorkloadEntry, shape: _Shape, fault: AnyFault) -> tuple[PlannedRequest, ...]:
    """In the order in which they are sent. A fault in storage, or of a process, is no request's; requests ahead
    load nothing, so that they are sure to run."""
    own = fault if isinstance(fault, Fault) else NO_FAULT
    given_up = Moment(workload.gives_up) if workload.gives_up else None
    # Only of a stream the client has something in hand that it can close.
    victim = PlannedRequest(
        Role.VICTIM, shape.victim, shape.load, own, shape.stream or given_up is not None, Moment.START, given_up
    )
    whole = replace(victim, fault=NO_FAULT, stream=shape.stream, gives_up=None)

    def others(role: Role, sent: Moment, prompt_ids: Iterable[str]) -> Iterator[PlannedRequest]:
        return (replace(whole, role=role, prompt_id=prompt_id, sent=sent) for prompt_id in prompt_ids)

    beside = others(Role.BYSTANDER, Moment.LOADING, workload.bystanders)
    planned = (
        *(replace(r, load=LoadMode.OFF) for r in others(Role.BYSTANDER, Moment.AHEAD, workload.ahead)),
        victim,
        *(replace(victim, prompt_id=prompt_id) for prompt_id in workload.fellows),
        *others(Role.SHARER, Moment.LOADING, (shape.victim,) if workload.kind == "twin" else workload.sharers),
        *(replace(request, deadline_s=workload.bystander_deadline_s) for request in beside),
        *others(Role.SHARER, Moment.REPAIR, workload.late),
        *others(Role.BYSTANDER, Moment.GONE, workload.then),
    )
    return tuple(replace(request, chat=shape.chat) for request in planned)


def expected_outcome(fault: AnyFault, policy: str) -> Outcome:
    """What vLLM promises, also where a connector breaks its contract: a load that is broken is repaired or fails, as
    the policy says, and one that is right is used, whatever else is reported."""
    if isinstance(fault, ProcessFault):
        return Outcome.LOADED if fault.is_of_prefill else Outcome.FAILED_CLEANLY
    if isinstance(fault, StorageFault):
        return _repaired(policy) if fault.fails else Outcome.LOADED
    if fault.kind is FaultKind.SILENT:
        return Outcome.CAUGHT
    return _repaired(policy) if fault.kind in BROKEN_KINDS else Outcome.LOADED


def _repaired(policy: str) -> Outcome:
    return Outcome.FAILED_CLEANLY if policy == "fail" else Outcome.RECOVERED


def _is_control(entry: CellsEntry, kind: AnyKind) -> bool:
    """By default a lone victim without a fault, or with a silent one, is a control."""
    return entry.workload.kind == "single" and kind in (FaultKind.NONE, FaultKind.SILENT)
