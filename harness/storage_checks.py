"""What must hold in a cell whose fault is done to files on the KV volume; part of `checks.CHECKS`.

Each check is pure and gives no findings for other cells. The proof that a fault fired has two halves: the harness saw
the file change, and vLLM gave the block to a load. That the connector noticed is a claim: one that loads damaged bytes
without a word is what these cells look for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.oracles import shared_bad_block, shared_block_count
from harness.records import Finding, RequestRecord, Role
from harness.storage_kinds import REASONS, StorageFault
from services.faults import select
from services.journal import EventName

if TYPE_CHECKING:
    from harness.checks import Case

Blocks = tuple[int, ...]


def damage_done(case: Case) -> Iterator[Finding]:
    """Exactly the chosen blocks were damaged, and their files really changed."""
    if fault := case.cell.storage:
        damages = case.observation.volume.damages
        changed = tuple(damage.block for damage in damages if damage.before != damage.during)
        wanted = _chosen(case, fault)
        ok = changed == wanted != ()
        yield Finding("fault-fired", ok, expected=f"{fault.kind} {_words(wanted)}", got=_words(changed))


def kv_loaded_beside_damage(case: Case) -> Iterator[Finding]:
    """vLLM gave the victim's blocks to a load, and the load brought the sound ones; a miss ends what is offered."""
    if not (fault := case.cell.storage):
        return
    for record in case.records(Role.VICTIM):
        everything, bad = range(case.prompt(record).full_block_count), _chosen(case, fault)
        offered = tuple(everything)[: bad[0]] if fault.is_miss and bad else tuple(everything)
        found, planned, loaded = (
            _first(case, record, name) for name in (EventName.LOOKUP, EventName.PLANNED, EventName.LOADED)
        )
        sound = set(offered) - set(bad)
        looked_up = case.blocks(record, EventName.LOOKUP) != ()
        ok = looked_up and found == planned == offered and sound <= set(loaded)
        got = f"found {_words(found)}, planned {_words(planned)}, loaded {_words(loaded)}"
        yield Finding("kv-loaded", ok, request=record.tag, expected=f"blocks {_words(offered)}", got=got)


def damage_noticed(case: Case) -> Iterator[Finding]:
    """Each damaged block that was to be loaded was refused, for the right reason, and reported to vLLM."""
    if not (fault := case.cell.storage) or fault.is_miss:
        return
    for record in case.observation.requests:
        planned = {block for blocks in case.blocks(record, EventName.PLANNED) for block in blocks}
        wanted = tuple(sorted(planned & damaged_for(case, record)))
        reported = _all(case, record, EventName.REPORTED)
        refused = _refused(case, record)
        ok = refused == tuple((block, REASONS[fault.kind]) for block in wanted) and set(wanted) <= set(reported)
        got = f"refused {', '.join(f'{block} ({reason})' for block, reason in refused) or 'none'}; "
        expected = f"{_words(wanted)} ({REASONS[fault.kind]})" if wanted else "none"
        yield Finding("failure-reported", ok, "", record.tag, expected, f"{got}reported {_words(reported)}")


def reload_brought_everything(case: Case) -> Iterator[Finding]:
    """With the files put back and an empty prefix cache, every block was loaded again. An engine that holds blocks
    keeps its prefix cache and is not asked; that it holds them is a claim."""
    if case.cell.storage:
        reloads = case.records(Role.RELOAD)
        ok = len(reloads) == 1 or (reloads == () and not case.observation.settled)
        yield Finding("reload-sent", ok, expected="1", got=str(len(reloads)))
        for record in reloads:
            wanted = tuple(range(case.prompt(record).full_block_count))
            planned, loaded = (_first(case, record, name) for name in (EventName.PLANNED, EventName.LOADED))
            got = f"planned {_words(planned)}, loaded {_words(loaded)}"
            ok = planned == loaded == wanted
            yield Finding("kv-loaded", ok, request=record.tag, expected=f"blocks {_words(wanted)}", got=got)


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
    if fault is None or fault.is_miss or record.planned.role is Role.RELOAD:
        return frozenset()
    victim = case.prompt(case.records(Role.VICTIM)[0])
    return frozenset(_chosen(case, fault)) & set(
        range(shared_block_count(victim, case.prompt(record), case.block_size))
    )


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
    """How many reads of the victim met the damage; for a miss, how many of its blocks were not found."""
    fault = case.cell.storage
    if fault is None:
        return 0
    if fault.is_miss:
        return len(_chosen(case, fault))
    return sum(len(_refused(case, record)) for record in case.records(Role.VICTIM))


def _chosen(case: Case, fault: StorageFault) -> Blocks:
    victims = case.records(Role.VICTIM)
    return select(fault.blocks, case.prompt(victims[0]).full_block_count) if victims else ()


def _refused(case: Case, record: RequestRecord) -> tuple[tuple[int, str], ...]:
    """The blocks whose reads failed, each with the reason, in order."""
    events = case.observation.events
    failed = (e for e in events if e.name is EventName.READ_FAILED and e.request == record.tag)
    return tuple(sorted((block, event.reason) for event in failed for block in event.blocks))


def _first(case: Case, record: RequestRecord, name: EventName) -> Blocks:
    return next(iter(case.blocks(record, name)), ())


def _all(case: Case, record: RequestRecord, name: EventName) -> Blocks:
    return tuple(block for blocks in case.blocks(record, name) for block in blocks)


def _words(blocks: Blocks) -> str:
    return " ".join(map(str, blocks)) or "none"
