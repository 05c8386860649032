"""What an honest engine behind an honest connector shows of a cell whose fault is done to files; as builders.py."""

from __future__ import annotations

from dataclasses import replace

from harness.faults.process_kinds import save_tag
from harness.faults.storage_kinds import (
    HELD,
    LONE,
    REASONS,
    SAVE_ERRORS,
    SLOW_READ_S,
    UNSAVED,
    StorageFault,
    StorageKind,
)
from harness.judging.oracles import acceptable, recompute, shared_bad_block, shared_block_count
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
    PROMPTS,
    SHARED_COUNT,
    VICTIM,
    cell,
    event,
    oracle_answer,
    quiet,
    refused,
    request,
    tag_of,
)

FILES = tuple(VolumeFile(f"blocks/{block}", 100) for block in range(BLOCK_COUNT))


def storage_cell(
    kind: StorageKind,
    blocks: BlockSelector = "middle",
    *,
    load: LoadMode = LoadMode.SYNC,
    policy: str = "recompute",
    mix: bool = False,
) -> Cell:
    fault = StorageFault(kind, blocks)
    repaired = Outcome.FAILED_CLEANLY if policy == "fail" else Outcome.RECOVERED
    assert not mix or kind not in LONE
    return replace(
        cell(load=load, policy=policy, mix=mix, name=f"{policy}-{kind}-{load}"),
        storage=fault,
        control=False,
        expected=repaired if fault.fails else Outcome.LOADED,
    )


def storage_observation(of: Cell) -> Observation:
    """The canary finds everything local, or under policy `fail` loads the damaged block again; the reload loads all."""
    victim = of.requests[0]
    planned = (*of.requests, request(Role.CANARY, victim.load), request(Role.RELOAD, victim.load, prompt_id="victim"))
    records = tuple(RequestRecord(p, tag_of(p), 0.0, _answer(of, p)) for p in planned)
    assert of.storage
    held_s = SLOW_READ_S if of.storage.kind in HELD else 0.0
    damages = tuple(Damage(b, f"blocks/{b}", "sound", "broken", "sound", held_s) for b in chosen(of))
    seen = quiet(of, records, (e for record in records for e in _events(of, record)))
    return replace(seen, volume=VolumeRecord(damages, FILES, FILES), process=_save(of))


def chosen(of: Cell) -> tuple[int, ...]:
    assert of.storage
    return of.storage.chosen(BLOCK_COUNT)


def _save(of: Cell) -> ProcessRecord:
    """What the producer answers and journals where the prompt is saved in the cell."""
    assert of.storage
    if of.storage.kind not in UNSAVED:
        return ProcessRecord()
    bad, tag = chosen(of)[0], save_tag(of.id)
    reason = str(OSError(SAVE_ERRORS[of.storage.kind][0], "No."))
    saved, unsaved = tuple(range(bad)), tuple(range(bad, BLOCK_COUNT))
    events = [
        event(EventName.SAVE_FAILED, tag, unsaved, reason=reason),
        *([event(EventName.SAVED, tag, saved)] if saved else []),
    ]
    return ProcessRecord(tuple(events), (oracle_answer(recompute(of, "victim")),))


def _answer(of: Cell, planned: PlannedRequest) -> Completion:
    return refused() if _fails(of, planned) else oracle_answer(acceptable(of, planned, PROMPTS, BLOCK_SIZE)[0])


def _fails(of: Cell, planned: PlannedRequest) -> bool:
    assert of.storage
    if of.policy != "fail" or not of.storage.fails:
        return False
    if planned.role is Role.SHARER:
        return shared_bad_block(of, planned, PROMPTS, BLOCK_SIZE) is not None
    return planned.role is Role.VICTIM or (planned.role is Role.CANARY and of.storage.kind not in LONE)


def _events(of: Cell, record: RequestRecord) -> tuple[Event, ...]:
    assert of.storage
    role, tag, mode = record.planned.role, record.tag, record.planned.load
    if role is Role.CANARY and of.policy != "fail":
        return ()
    kind, shared = of.storage.kind, shared_block_count(VICTIM, PROMPTS[record.planned.prompt_id], BLOCK_SIZE)
    is_over = role is Role.RELOAD or (role is Role.CANARY and kind is StorageKind.LATE_READ)
    damaged = () if is_over else tuple(block for block in chosen(of) if block < shared)
    local = SHARED_COUNT if role is Role.SHARER and mode is LoadMode.SYNC else 0
    end = damaged[0] if of.storage.is_miss and damaged else BLOCK_COUNT
    blocks = () if role is Role.CANARY and kind is StorageKind.EMPTIED else tuple(range(local, end))
    bad = tuple(block for block in damaged if block in blocks) if of.storage.fails else ()
    lookup = event(EventName.LOOKUP, tag, blocks)
    if not blocks:
        return (lookup,)
    return (
        lookup,
        event(EventName.PLANNED, tag, blocks, mode=mode),
        *(event(EventName.READ_FAILED, tag, (b,), mode=mode, reason=REASONS[kind]) for b in bad),
        *([event(EventName.FAILED, tag, bad, mode=mode)] if bad else []),
        event(EventName.LOADED, tag, tuple(block for block in blocks if block not in bad), mode=mode),
        *([event(EventName.REPORTED, tag, bad, mode=mode)] if bad else []),
    )
