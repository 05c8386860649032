"""What must hold in a cell whose fault is done to files on the KV volume; part of `checks.CHECKS`.

Each check is pure and gives no findings for other cells. The proof that a fault fired has two halves: the harness saw
the file change, and vLLM gave the block to a load. That the connector noticed is a claim: one that loads damaged bytes
without a word is what these cells look for.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.faults.storage_kinds import HELD, REASONS, SAVE_ERRORS, SLOW_READ_S, UNSAVED, StorageFault, StorageKind
from harness.judging.case import Blocks, Case, named
from harness.judging.oracles import shared_bad_block, shared_block_count, victim_of
from harness.records import Damage, Finding, Prompt, RequestRecord, Role
from services.journal import EventName


def damage_done(case: Case) -> Iterator[Finding]:
    """Exactly the chosen blocks were at fault: their files really changed, and who opened a held one had to wait."""
    if fault := case.cell.storage:
        damages = case.observation.volume.damages
        untouched = {damage.block for damage in damages if not _is_done(fault, damage)}
        done = tuple(sorted({damage.block for damage in damages} - untouched))
        wanted = _chosen(case, fault)
        yield Finding("fault-fired", done == wanted != (), expected=f"{fault.kind} {named(wanted)}", got=named(done))


def save_failed(case: Case) -> Iterator[Finding]:
    """The producer saved the blocks before the chosen one, and none from there on, for the reason of the fault."""
    fault = case.cell.storage
    if fault is None or fault.kind not in UNSAVED:
        return
    for record in case.records(Role.VICTIM):
        everything, bad = range(case.prompt(record).full_block_count), _chosen(case, fault)
        saved, (unsaved, reasons) = _saved(case), _unsaved(case)
        right = bool(reasons) and all(reason.startswith(tuple(_errors(fault))) for reason in reasons)
        ok = right and bad != () and saved == tuple(everything)[: bad[0]] and unsaved[:1] == bad
        got = f"saved {named(saved)}, not {named(unsaved)} ({'; '.join(reasons) or 'no reason'})"
        expected = f"not {named(bad)} and what follows ({' or '.join(_errors(fault))})"
        yield Finding("fault-fired", ok, request=record.tag, expected=expected, got=got)


def save_answered(case: Case) -> Iterator[Finding]:
    """A prompt that could not be saved was computed all the same, and answered."""
    if case.cell.storage and case.cell.storage.kind in UNSAVED:
        saves = case.observation.process.saves
        answers = [f"HTTP {save.status_code} {save.error}".strip() for save in saves]
        ok = len(saves) > 0 and all(save.status_code == 200 and not save.error for save in saves)
        yield Finding("save-answered", ok, expected="HTTP 200", got="; ".join(answers) or "not asked")


def producer_alive(case: Case) -> Iterator[Finding]:
    """The producer lived through saves that failed."""
    if case.cell.storage and case.cell.storage.kind in UNSAVED:
        count = sum(event.name is EventName.ENGINE_EXITED for event in case.observation.process.events)
        yield Finding("producer-alive", count == 0, expected="0 exits", got=f"{count} exits")


def kv_loaded_beside_damage(case: Case) -> Iterator[Finding]:
    """vLLM gave the victim's blocks to a load, and the load brought the sound ones; a miss ends what is offered."""
    if not (fault := case.cell.storage):
        return
    for record in case.records(Role.VICTIM):
        offered = _offered(case, fault, record)
        found, planned, loaded = (
            case.first(record, name) for name in (EventName.LOOKUP, EventName.PLANNED, EventName.LOADED)
        )
        sound = set(offered) - (set(_chosen(case, fault)) if fault.fails else set())
        # What was found too much of a torn save is a finding of its own.
        found_right = found[: len(offered)] == offered if fault.kind in UNSAVED else found == offered
        looked_up = case.blocks(record, EventName.LOOKUP) != ()
        ok = looked_up and found_right and planned == found and sound <= set(loaded)
        got = f"found {named(found)}, planned {named(planned)}, loaded {named(loaded)}"
        yield Finding("kv-loaded", ok, request=record.tag, expected=f"blocks {named(offered)}", got=got)


def torn_block_not_found(case: Case) -> Iterator[Finding]:
    """Of a save that failed nothing is found but the blocks that were saved whole before."""
    fault = case.cell.storage
    if fault is None or fault.kind not in UNSAVED:
        return
    for record in case.records(Role.VICTIM, Role.CANARY):
        offered = _offered(case, fault, record)
        found = tuple(sorted({block for blocks in case.blocks(record, EventName.LOOKUP) for block in blocks}))
        ok = set(found) <= set(offered)
        yield Finding("torn-block-found", ok, "", record.tag, f"at most {named(offered)}", named(found))


def damage_noticed(case: Case) -> Iterator[Finding]:
    """Each damaged block that was to be loaded was refused, for the right reason, and reported to vLLM."""
    if not (fault := case.cell.storage) or not fault.fails:
        return
    for record in case.observation.requests:
        planned = {block for blocks in case.blocks(record, EventName.PLANNED) for block in blocks}
        wanted = tuple(sorted(planned & damaged_for(case, record)))
        reported = _all(case, record, EventName.REPORTED)
        refused = _refused(case, record)
        ok = refused == tuple((block, REASONS[fault.kind]) for block in wanted) and set(wanted) <= set(reported)
        got = f"refused {', '.join(f'{block} ({reason})' for block, reason in refused) or 'none'}; "
        expected = f"{named(wanted)} ({REASONS[fault.kind]})" if wanted else "none"
        yield Finding("failure-reported", ok, "", record.tag, expected, f"{got}reported {named(reported)}")


def volume_unchanged(case: Case) -> Iterator[Finding]:
    """The volume is as it was: the same files of the same sizes, and the damaged ones byte for byte."""
    if case.cell.storage:
        volume = case.observation.volume
        before, after = set(volume.before), set(volume.after)
        changed = sorted({file.name for file in before ^ after})
        changed += [damage.file for damage in volume.damages if damage.after != damage.before]
        detail = "" if not changed else f"not as before: {', '.join(changed)}"
        ok = not changed and before != set()
        yield Finding("volume-unchanged", ok, detail, expected=f"{len(before)} files", got=f"{len(after)} files")


def damaged_for(case: Case, record: RequestRecord) -> frozenset[int]:
    """The blocks of the request's prompt whose reads must fail; none once the files were put back."""
    fault = case.cell.storage
    if fault is None or not fault.fails or record.planned.role is Role.RELOAD:
        return frozenset()
    if fault.kind is StorageKind.LATE_READ and record.planned.role is not Role.VICTIM:
        return frozenset()
    shared = shared_block_count(_damaged_prompt(case), case.prompt(record), case.block_size)
    return frozenset(block for block in _chosen(case, fault) if block < shared)


def torn_for(case: Case, record: RequestRecord) -> frozenset[int]:
    """The blocks of the request's prompt that could not be saved: if one is found and its load fails, that is for
    `torn_block_not_found` to say."""
    fault = case.cell.storage
    if fault is None or fault.kind not in UNSAVED or record.planned.role is Role.RELOAD:
        return frozenset()
    return frozenset(range(case.prompt(record).full_block_count)) - set(_offered(case, fault, record))


def may_fail(case: Case, record: RequestRecord) -> bool:
    """Whether policy `fail` allows this request an error: it loaded a damaged block, or shares one that was."""
    if not damaged_for(case, record):
        return False
    match record.planned.role:
        case Role.VICTIM:
            return True
        case Role.SHARER:
            return shared_bad_block(case.cell, record.planned, case.prompts, case.block_size) is not None
        case _:
            return _refused(case, record) != ()


def fired_count(case: Case) -> int:
    """How many reads of the victim met the damage, or waited; for a miss, how many of its blocks were at fault."""
    fault = case.cell.storage
    if fault is None:
        return 0
    if not fault.fails:
        return len(_chosen(case, fault))
    return sum(len(_refused(case, record)) for record in case.records(Role.VICTIM))


def _chosen(case: Case, fault: StorageFault) -> Blocks:
    return fault.chosen(_damaged_prompt(case).full_block_count)


def _damaged_prompt(case: Case) -> Prompt:
    return case.prompts[victim_of(case.cell).prompt_id]


def _offered(case: Case, fault: StorageFault, record: RequestRecord) -> Blocks:
    """The blocks that a lookup must find."""
    everything, bad = tuple(range(case.prompt(record).full_block_count)), _chosen(case, fault)
    return everything[: bad[0]] if fault.is_miss and bad else everything


def _is_done(fault: StorageFault, damage: Damage) -> bool:
    """Whether the file changed, and kept its first reader as long as it was to."""
    kept = damage.held_s > 0 and (fault.kind is not StorageKind.SLOW_READ or damage.held_s >= SLOW_READ_S)
    return damage.before != damage.during and (kept or fault.kind not in HELD)


def _saved(case: Case) -> Blocks:
    events = (e for e in case.observation.process.events if e.name is EventName.SAVED)
    return tuple(sorted(block for event in events for block in event.blocks))


def _unsaved(case: Case) -> tuple[Blocks, tuple[str, ...]]:
    """The blocks that could not be saved, and why."""
    events = [e for e in case.observation.process.events if e.name is EventName.SAVE_FAILED]
    return tuple(block for event in events for block in event.blocks), tuple(event.reason for event in events)


def _errors(fault: StorageFault) -> list[str]:
    """How the journal's reasons begin: as Python words an OSError."""
    return [f"[Errno {number}]" for number in SAVE_ERRORS[fault.kind]]


def _refused(case: Case, record: RequestRecord) -> tuple[tuple[int, str], ...]:
    """The blocks whose reads failed, each with the reason, in order."""
    events = case.observation.events
    failed = (e for e in events if e.name is EventName.READ_FAILED and e.request == record.tag)
    return tuple(sorted((block, event.reason) for event in failed for block in event.blocks))


def _all(case: Case, record: RequestRecord, name: EventName) -> Blocks:
    return tuple(block for blocks in case.blocks(record, name) for block in blocks)
