"""What must hold in a cell whose fault is done to a process; part of `checks.CHECKS`.

Each check is pure and gives no findings for other cells. That the fault fired is proven by the struck service's own
journal, in which the order of the lines counts and not their times, and by what lay on the volume at that moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from harness.faults.process_kinds import ProcessFault, ProcessKind, save_tag
from harness.judging.case import Blocks, Case, named
from harness.records import NOTHING, Completion, Damage, Finding, Outcome, RequestRecord, Role, VolumeFile
from services.journal import Event, EventName
from services.store import TEMPORARY_SUFFIX

OF_ENGINE = (EventName.ENGINE_EXITED, EventName.ENGINE_PAUSED, EventName.ENGINE_RESUMED, EventName.ENGINE_READY)
KILLED = (EventName.HELD, EventName.ENGINE_EXITED, EventName.ENGINE_READY)
PAUSED = (EventName.HELD, EventName.ENGINE_PAUSED, EventName.ENGINE_RESUMED)
OF_MOVING = (EventName.SAVED, EventName.SAVE_FAILED, EventName.LOADED, EventName.READ_FAILED, EventName.FINISHED)
"""What a connector journals when it has moved, or failed to move, blocks of a request."""

INDEX_FOLDER = "index/"


def planned_exits(case: Case) -> int:
    """How often the cell itself may end its engine; that it did is shown by `struck_as_planned`."""
    fault = case.cell.process
    return int(fault is not None and fault.kills and not fault.is_of_prefill)


def outlasts_its_client(case: Case, record: RequestRecord) -> bool:
    """Whether the request's client has to give up, because its engine is paused for so long."""
    fault = case.cell.process
    return fault is not None and fault.kind is ProcessKind.DECODE_PAUSED_LOADING and record.planned.role is Role.VICTIM


def green(fault: ProcessFault) -> Outcome:
    """The outcome of a cell in which no check is broken."""
    return Outcome.LOADED if fault.is_of_prefill else Outcome.FAILED_CLEANLY


def fired_count(case: Case) -> int:
    fault = case.cell.process
    return int(fault is not None and _was_struck(case, fault))


def struck_as_planned(case: Case) -> Iterator[Finding]:
    """The engine stopped at the planned block, was struck there and nowhere else, and lives again."""
    if fault := case.cell.process:
        block = _block(case, fault)
        names = ", ".join(KILLED if fault.kills else PAUSED)
        where = f"{fault.point} of block {block}" if block is not None else "no such block"
        got = ", ".join(_named(event) for event in _story(case, fault)) or "nothing"
        yield Finding("fault-fired", _was_struck(case, fault), expected=f"{names}; {where}", got=got)
        if fault.is_of_prefill and block is not None:
            wanted = tuple(range(block + (fault.kind is ProcessKind.PREFILL_KILLED_PUBLISHING)))
            files = case.observation.volume.damages
            payloads = _there(file for file in files if not file.file.startswith(INDEX_FOLDER))
            detail = "payloads on the volume when the producer was struck"
            ok = payloads == wanted and files != ()
            yield Finding("fault-fired", ok, detail, expected=named(wanted), got=named(payloads))


def producer_serves(case: Case) -> Iterator[Finding]:
    """The producer lives on, or comes back, and saves the prompt after all."""
    if (fault := case.cell.process) and fault.is_of_prefill:
        saves = case.observation.process.saves
        problem = _refusal(saves[-1]) if saves else "no save was asked for"
        yield Finding("producer-serves", not problem, problem, expected="HTTP 200")


def published_is_whole(case: Case) -> Iterator[Finding]:
    """When the producer was struck, exactly the blocks before that one had an index entry: who asks finds no others."""
    fault = case.cell.process
    if fault and fault.is_of_prefill and _was_seen(case, fault):
        wanted, published = tuple(range(_block(case, fault) or 0)), _published(case)
        detail = "" if published == wanted else "index entries on the volume when the producer was struck"
        yield Finding("published-whole", published == wanted, detail, expected=named(wanted), got=named(published))


def kv_loaded_around(case: Case) -> Iterator[Finding]:
    """The victim got what was published, or its load was begun. Not that it got no more: that is a claim."""
    if not (fault := case.cell.process):
        return
    for record in case.records(Role.VICTIM):
        everything = tuple(range(case.prompt(record).full_block_count))
        wanted = _published(case) if fault.is_of_prefill else everything
        found, planned, loaded = (
            case.first(record, name) for name in (EventName.LOOKUP, EventName.PLANNED, EventName.LOADED)
        )
        ok = case.blocks(record, EventName.LOOKUP) != () and found == planned and found[: len(wanted)] == wanted
        if fault.is_of_prefill:
            ok = ok and loaded[: len(wanted)] == wanted
        got = f"found {named(found)}, planned {named(planned)}, loaded {named(loaded)}"
        yield Finding("kv-loaded", ok, "", record.tag, f"blocks {named(wanted)}", got)


def nothing_unpublished_loaded(case: Case) -> Iterator[Finding]:
    """Of an interrupted save no request got a block that was not published."""
    fault = case.cell.process
    if fault and fault.is_of_prefill and _was_seen(case, fault):
        published = set(_published(case))
        for record in case.records(Role.VICTIM):
            got = {block for name in (EventName.LOOKUP, EventName.LOADED) for block in case.first(record, name)}
            more = tuple(sorted(got - published))
            detail = f"blocks {named(more)} were found or loaded, and not published" if more else ""
            yield Finding("nothing-unpublished", not more, detail, record.tag)


def victim_got_nothing(case: Case) -> Iterator[Finding]:
    """The client of an engine that is killed or paused gets an error at once, or nothing; in no case text."""
    fault = case.cell.process
    if fault is None or fault.is_of_prefill:
        return
    for record in case.records(Role.VICTIM):
        answer = record.completion
        is_empty = not (answer.text or answer.token_ids or answer.finish_reason)
        ended = answer.broken_off if fault.kills else answer.timed_out
        expected = "a broken connection, no text" if fault.kills else "nothing until the client gives up"
        got = f"HTTP {answer.status_code}: {answer.error or 'no error'}; text {answer.text!r}"
        yield Finding("victim-got-nothing", is_empty and ended, "", record.tag, expected, got)


def volume_whole_again(case: Case) -> Iterator[Finding]:
    """Every file of the victim's blocks is there again, a decode changed none, and a killed writer left at most the one
    file that it was writing."""
    if not (fault := case.cell.process):
        return
    volume = case.observation.volume
    before, after = _whole(volume.before), _whole(volume.after)
    changed = {file.name for file in before ^ after}
    if not fault.is_of_prefill:
        changed |= {damage.file for damage in volume.damages if damage.after != damage.before}
    left = sorted(file.name for file in set(volume.after) - after - set(volume.before))
    allowed = fault.kind is ProcessKind.PREFILL_KILLED_SAVING
    ok = not changed and before != set() and len(left) <= allowed
    detail = f"not as before: {', '.join([*sorted(changed), *left])}" if not ok else ""
    yield Finding("volume-unchanged", ok, detail, expected=f"{len(before)} files", got=f"{len(after)} files")


def _was_seen(case: Case, fault: ProcessFault) -> bool:
    """Whether it is known what lay on the volume when the process was struck."""
    return _was_struck(case, fault) and case.observation.volume.damages != ()


def _was_struck(case: Case, fault: ProcessFault) -> bool:
    story, block = _story(case, fault), _block(case, fault)
    names = tuple(event.name for event in story)
    held = next((event for event in story if event.name is EventName.HELD), None)
    if held is None or (held.blocks, held.reason) != ((block,), fault.point):
        return False
    if fault.kills:
        return names == KILLED
    lines = [event.name for event in _events(case, fault)]
    is_still = names[:3] == PAUSED and lines[lines.index(EventName.ENGINE_PAUSED) + 1] is EventName.ENGINE_RESUMED
    return is_still and all(name in OF_MOVING for name in names[3:])


def _story(case: Case, fault: ProcessFault) -> tuple[Event, ...]:
    """What the struck service's journal has about the engine's life and the disturbed request, in order."""
    tags = {save_tag(case.cell.id)} if fault.is_of_prefill else {r.tag for r in case.records(Role.VICTIM)}
    return tuple(
        event
        for event in _events(case, fault)
        if event.name in (EventName.HELD, *OF_ENGINE) or (event.request in tags and event.name in OF_MOVING)
    )


def _events(case: Case, fault: ProcessFault) -> tuple[Event, ...]:
    return case.observation.process.events if fault.is_of_prefill else case.observation.events


def _block(case: Case, fault: ProcessFault) -> int | None:
    """The block at which the process is struck; None where the prompt is too short for it, or there is no victim."""
    victims = case.records(Role.VICTIM)
    count = case.prompt(victims[0]).full_block_count if victims else 0
    return next(iter(fault.chosen(count)), None)


def _published(case: Case) -> Blocks:
    return _there(damage for damage in case.observation.volume.damages if damage.file.startswith(INDEX_FOLDER))


def _there(damages: Iterable[Damage]) -> Blocks:
    """The blocks whose file lay on the volume when the process was struck."""
    return tuple(sorted(damage.block for damage in damages if damage.during not in ("", NOTHING)))


def _whole(files: Iterable[VolumeFile]) -> set[VolumeFile]:
    return {file for file in files if not file.name.endswith(TEMPORARY_SUFFIX)}


def _refusal(answer: Completion) -> str:
    return "" if answer.status_code == 200 and not answer.error else f"HTTP {answer.status_code}: {answer.error}"


def _named(event: Event) -> str:
    return (
        f"{event.name} ({event.reason} of block {named(event.blocks)})" if event.name is EventName.HELD else event.name
    )
