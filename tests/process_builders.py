"""What honest engines show of a cell whose fault is done to a process; as builders.py."""

from __future__ import annotations

from dataclasses import replace

from harness.faults.process_kinds import ProcessFault, ProcessKind, save_tag
from harness.judging.oracles import acceptable
from harness.records import (
    Cell,
    Completion,
    Damage,
    Observation,
    Outcome,
    PlannedRequest,
    ProcessRecord,
    RequestRecord,
    Role,
    VolumeFile,
    VolumeRecord,
)
from services.faults import BlockSelector, LoadMode
from services.journal import Event, EventName
from tests.builders import (
    BLOCK_COUNT,
    BLOCK_SIZE,
    IDLE,
    PROMPTS,
    VICTIM,
    cell,
    completion,
    event,
    oracle_answer,
    quiet,
    request,
    tag_of,
)

BLOCKS = tuple(range(BLOCK_COUNT))
PAYLOADS, ENTRIES = [f"blocks/{block}" for block in BLOCKS], [f"index/{block}" for block in BLOCKS]
FILES = tuple(VolumeFile(name, 100) for name in (*PAYLOADS, *ENTRIES))
LEFT = VolumeFile("blocks/3.tmp", 50)
RESET = Completion(status_code=0, error="Connection reset by peer", broken_off=True)
SAVED = completion((1,), VICTIM)
GIVEN_UP = Completion(status_code=0, error="no complete answer within 6 s", timed_out=True)


def process_cell(
    kind: ProcessKind,
    blocks: BlockSelector = "middle",
    *,
    load: LoadMode = LoadMode.SYNC,
    policy: str = "recompute",
    bystander: bool = False,
) -> Cell:
    fault = ProcessFault(kind, blocks)
    plain = cell(load=load, policy=policy, name=f"{policy}-{kind}-{load}")
    return replace(
        plain,
        requests=(*plain.requests, *([request(Role.BYSTANDER, load)] if bystander else [])),
        process=fault,
        control=False,
        expected=Outcome.LOADED if fault.is_of_prefill else Outcome.FAILED_CLEANLY,
    )


def struck_block(of: Cell) -> int:
    assert of.process
    return of.process.chosen(BLOCK_COUNT)[0]


def process_observation(of: Cell) -> Observation:
    """The canary finds everything local, except in an engine that has just been started; the reload loads all."""
    assert of.process
    victim = of.requests[0]
    planned = (*of.requests, request(Role.CANARY, victim.load), request(Role.RELOAD, victim.load, prompt_id="victim"))
    records = tuple(RequestRecord(p, tag_of(p), 0.0, _answer(of, p)) for p in planned)
    seen = quiet(of, records, (e for record in records for e in _events(of, record)))
    ended = of.process.kills and not of.process.is_of_prefill
    volume = VolumeRecord(_damages(of, of.process), FILES, (*FILES, *_left(of.process)))
    return replace(
        seen,
        after=replace(IDLE, restart_count=int(ended)),
        volume=volume,
        process=_of_producer(of, of.process) if of.process.is_of_prefill else ProcessRecord(),
    )


def _left(fault: ProcessFault) -> tuple[VolumeFile, ...]:
    return (LEFT,) if fault.kind is ProcessKind.PREFILL_KILLED_SAVING else ()


def _damages(of: Cell, fault: ProcessFault) -> tuple[Damage, ...]:
    if not fault.is_of_prefill:
        return tuple(Damage(i % BLOCK_COUNT, f.name, "sound", "", "sound") for i, f in enumerate(FILES))
    entry_count = struck_block(of)
    payload_count = entry_count + (fault.kind is ProcessKind.PREFILL_KILLED_PUBLISHING)
    there = [*PAYLOADS[:payload_count], *ENTRIES[:entry_count]]
    return tuple(
        Damage(i % BLOCK_COUNT, f.name, "sound", "sound" if f.name in there else "nothing", "sound")
        for i, f in enumerate(FILES)
    )


def _of_producer(of: Cell, fault: ProcessFault) -> ProcessRecord:
    tag = save_tag(of.id)
    saved = event(EventName.SAVED, tag, BLOCKS, service="prefill")
    if fault.kills:
        again = replace(saved, request=f"{tag}-again")
        return ProcessRecord((*_strike(of, fault, tag), again), (RESET, SAVED))
    return ProcessRecord((*_strike(of, fault, tag), saved), (SAVED,))


def _strike(of: Cell, fault: ProcessFault, tag: str) -> tuple[Event, ...]:
    held = event(EventName.HELD, tag, (struck_block(of),), reason=fault.point)
    killed = (EventName.ENGINE_EXITED, EventName.ENGINE_STARTED, EventName.ENGINE_READY)
    names = killed if fault.kills else (EventName.ENGINE_PAUSED, EventName.ENGINE_RESUMED)
    reasons = {EventName.ENGINE_EXITED: "signal SIGKILL"}
    return (held, *(event(name, "", reason=reasons.get(name, "")) for name in names))


def _answer(of: Cell, planned: PlannedRequest) -> Completion:
    assert of.process
    if planned.role is Role.VICTIM and not of.process.is_of_prefill:
        return RESET if of.process.kills else GIVEN_UP
    return oracle_answer(acceptable(of, planned, PROMPTS, BLOCK_SIZE)[0])


def _events(of: Cell, record: RequestRecord) -> tuple[Event, ...]:
    assert of.process
    role, tag, mode, fault = record.planned.role, record.tag, record.planned.load, of.process
    if role is Role.CANARY and fault.kind is not ProcessKind.DECODE_KILLED_LOADING:
        return ()
    is_short = role is Role.VICTIM and fault.is_of_prefill
    blocks = BLOCKS[: struck_block(of)] if is_short else BLOCKS
    lookup = event(EventName.LOOKUP, tag, blocks)
    if not blocks:
        return (lookup,)
    begun = (lookup, event(EventName.PLANNED, tag, blocks, mode=mode))
    ended = (event(EventName.LOADED, tag, blocks, mode=mode),)
    if role is Role.VICTIM and not fault.is_of_prefill:
        return (*begun, *_strike(of, fault, tag), *(() if fault.kills else ended))
    return (*begun, *ended)
