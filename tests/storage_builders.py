"""What an honest engine behind an honest connector shows of a cell whose fault is done to files; as builders.py."""

from __future__ import annotations

from dataclasses import replace

from harness.oracles import acceptable, shared_bad_block, shared_block_count
from harness.records import (
    Cell,
    Completion,
    Damage,
    Observation,
    Outcome,
    PlannedRequest,
    RequestRecord,
    Role,
    VolumeFile,
    VolumeRecord,
)
from harness.storage_kinds import REASONS, StorageFault, StorageKind
from services.faults import BlockSelector, LoadMode, select
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
    return replace(
        cell(load=load, policy=policy, mix=mix, name=f"{policy}-{kind}-{load}"),
        storage=fault,
        control=False,
        expected=Outcome.LOADED if fault.is_miss else repaired,
    )


def storage_observation(of: Cell) -> Observation:
    """The canary finds everything local, or under policy `fail` loads the damaged block again; the reload loads all."""
    victim = of.requests[0]
    planned = (*of.requests, request(Role.CANARY, victim.load), request(Role.RELOAD, victim.load, prompt_id="victim"))
    records = tuple(RequestRecord(p, tag_of(p), 0.0, _answer(of, p)) for p in planned)
    damages = tuple(Damage(b, f"blocks/{b}", "sound", "broken", "sound") for b in chosen(of))
    seen = quiet(of, records, (e for record in records for e in _events(of, record)))
    return replace(seen, volume=VolumeRecord(damages, FILES, FILES))


def chosen(of: Cell) -> tuple[int, ...]:
    assert of.storage
    return select(of.storage.blocks, BLOCK_COUNT)


def _answer(of: Cell, planned: PlannedRequest) -> Completion:
    return refused() if _fails(of, planned) else oracle_answer(acceptable(of, planned, PROMPTS, BLOCK_SIZE)[0])


def _fails(of: Cell, planned: PlannedRequest) -> bool:
    assert of.storage
    if of.policy != "fail" or of.storage.is_miss:
        return False
    if planned.role is Role.SHARER:
        return shared_bad_block(of, planned, PROMPTS, BLOCK_SIZE) is not None
    return planned.role in (Role.VICTIM, Role.CANARY)


def _events(of: Cell, record: RequestRecord) -> tuple[Event, ...]:
    assert of.storage
    role, tag, mode = record.planned.role, record.tag, record.planned.load
    if role is Role.CANARY and of.policy != "fail":
        return ()
    shared = shared_block_count(VICTIM, PROMPTS[record.planned.prompt_id], BLOCK_SIZE)
    damaged = () if role is Role.RELOAD else tuple(block for block in chosen(of) if block < shared)
    local = SHARED_COUNT if role is Role.SHARER and mode is LoadMode.SYNC else 0
    end = damaged[0] if of.storage.is_miss and damaged else BLOCK_COUNT
    blocks = tuple(range(local, end))
    bad = () if of.storage.is_miss else tuple(block for block in damaged if block in blocks)
    lookup = event(EventName.LOOKUP, tag, blocks)
    if not blocks:
        return (lookup,)
    return (
        lookup,
        event(EventName.PLANNED, tag, blocks, mode=mode),
        *(event(EventName.READ_FAILED, tag, (b,), mode=mode, reason=REASONS[of.storage.kind]) for b in bad),
        *([event(EventName.FAILED, tag, bad, mode=mode)] if bad else []),
        event(EventName.LOADED, tag, tuple(block for block in blocks if block not in bad), mode=mode),
        *([event(EventName.REPORTED, tag, bad, mode=mode)] if bad else []),
    )
