"""What must hold before anything is claimed of a cell; part of `checks.CHECKS`.

Each check is pure, takes a `Case` and gives findings, which say what was expected and what was found; a check that has
nothing to look at in a cell gives none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from harness.judging import process_checks, storage_checks
from harness.judging.case import AFTERWARDS, Blocks, Case, counted, listed, named
from harness.judging.comparison import answer_problem
from harness.judging.oracles import essential, needed, oracle_block_count, oracle_name, recompute, reuse
from harness.records import Completion, Finding, Moment, OracleKey, OracleKind, RequestRecord, Role
from services.faults import (
    ALWAYS,
    BROKEN_KINDS,
    LOOKUP_KINDS,
    REPORTED_KINDS,
    WHOLE_LOAD_KINDS,
    Fault,
    FaultKind,
    LoadMode,
    select,
)
from services.journal import Event, EventName

SHOWN_CHARS = 40


def engine_ready(case: Case) -> Iterator[Finding]:
    """The engine was up and idle before the cell, so that what follows is the cell's own doing."""
    before = case.observation.before
    ok = before.healthy and before.running_count == before.waiting_count == 0
    got = f"healthy {before.healthy}, {before.running_count} running, {before.waiting_count} waiting"
    yield Finding("engine-ready", ok, expected="healthy, 0 running, 0 waiting", got=got)


def requests_sent(case: Case) -> Iterator[Finding]:
    """The cell ran as planned, with a victim, and a canary followed a failure; plans leave the canary to the runner."""
    sent = Counter(r.planned for r in case.observation.requests if r.planned.role not in AFTERWARDS)
    planned = Counter(request for request in case.cell.requests if request.role not in AFTERWARDS)
    victim_count, canary_count = len(case.records(Role.VICTIM)), len(case.records(Role.CANARY))
    is_broken = case.cell.fault.kind in BROKEN_KINDS or case.cell.storage or case.cell.process
    canary_missing = canary_count == 0 and bool(is_broken)
    ok = sent == planned and victim_count > 0 and not canary_missing
    got = f"{sent.total()} ({(sent & planned).total()} as planned, {victim_count} victims), {canary_count} canaries"
    yield Finding("requests-sent", ok, expected=f"{planned.total()} as planned", got=got)


def load_mode(case: Case) -> Iterator[Finding]:
    """Every load went the way that was asked for; some connectors know only one."""
    for record in case.observation.requests:
        asked = record.planned.load.value
        events = (e for e in case.observation.events if e.name is EventName.PLANNED and e.request == record.tag)
        modes = sorted({event.mode for event in events} - {asked})
        detail = "this connector does not load the way the cell asks for" if modes else ""
        yield Finding("load-mode", not modes, detail, record.tag, asked, ", ".join(modes) or asked)


def controls_accepted(case: Case) -> Iterator[Finding]:
    """The connector obeyed what the requests asked of it."""
    reasons = [event.reason for event in case.observation.events if event.name is EventName.REJECTED]
    yield Finding("control-accepted", not reasons, "; ".join(reasons))


def kv_loaded(case: Case) -> Iterator[Finding]:
    """vLLM gave every block of the victim's prompt to a load, and the load brought every block, if it began. Where the
    lookup is never answered there is no load."""
    for record in case.records(Role.VICTIM):
        if record.planned.load is not LoadMode.OFF and not case.cell.storage and not case.cell.process:
            wanted = tuple(range(case.prompt(record).full_block_count))
            planned = case.blocks(record, EventName.PLANNED)[:1]
            loaded = case.blocks(record, EventName.LOADED)[:1]
            began = record.planned.fault.kind is not FaultKind.RAISE
            has_no_load = case.prompt(record).unstored or record.planned.fault.kind is FaultKind.UNANSWERED
            whole = () if has_no_load else (wanted,)
            ok = () not in whole and planned == whole and (loaded == whole or not began)
            got = f"planned {listed(planned)}, loaded {listed(loaded)}"
            yield Finding("kv-loaded", ok, request=record.tag, expected=f"blocks {listed(whole)}", got=got)


def kv_loaded_again(case: Case) -> Iterator[Finding]:
    """After a fault in storage or of a process, everything came from the store again: once the prefix cache was
    cleared, and in an engine that was killed and came back. An engine that holds blocks keeps its prefix cache and is
    not asked; that it holds them is a claim."""
    if not (case.cell.storage or case.cell.process):
        return
    reloads = case.records(Role.RELOAD)
    was_asked = len(reloads) == 1 or (reloads == () and not case.observation.settled)
    yield Finding("reload-sent", was_asked, expected="1", got=str(len(reloads)))
    from_new_engine = case.records(Role.CANARY) if process_checks.planned_exits(case) else ()
    for record in (*from_new_engine, *reloads):
        everything = tuple(range(case.prompt(record).full_block_count))
        planned, loaded = (case.first(record, name) for name in (EventName.PLANNED, EventName.LOADED))
        got = f"planned {named(planned)}, loaded {named(loaded)}"
        ok = planned == loaded == everything
        yield Finding("kv-loaded", ok, request=record.tag, expected=f"blocks {named(everything)}", got=got)


def moments_met(case: Case) -> Iterator[Finding]:
    """Requests met the moment that the cell is about: those ahead still ran, those that are late came during the
    repair, and clients that give up left without a whole answer."""
    victims = case.records(Role.VICTIM)
    for record in case.observation.requests:
        match record.planned.sent:
            case Moment.AHEAD:
                ok = all(_ended_s(record) > victim.sent_s for victim in victims)
                yield Finding("moment-met", ok, "" if ok else "it had ended before the victim was sent", record.tag)
            case Moment.REPAIR:
                told = any(case.blocks(victim, EventName.REPORTED) for victim in victims)
                ok = told and all(record.sent_s < _ended_s(victim) for victim in victims)
                yield Finding("moment-met", ok, "" if ok else "there was no repair when it was sent", record.tag)
        if record.planned.gives_up:
            ok = record.completion.gave_up and not record.completion.finish_reason
            yield Finding("moment-met", ok, "" if ok else "its client had the whole answer before it left", record.tag)


def victim_preempted(case: Case) -> Iterator[Finding]:
    """Where the cell is about preemption, the engine ran out of blocks during it."""
    if case.cell.preempts:
        count = case.observation.after.preemption_count - case.observation.before.preemption_count
        yield Finding("victim-preempted", count > 0, expected="at least 1 preemption", got=str(count))


def one_worker(case: Case) -> Iterator[Finding]:
    """Each load that vLLM planned was journaled as loaded at most once.

    Events have no rank: what several workers of one engine (tensor parallelism) write about one load looks like
    several loads, and would be counted as such below.
    """
    for record in case.observation.requests:
        planned, loaded = (len(case.blocks(record, name)) for name in (EventName.PLANNED, EventName.LOADED))
        ok = loaded <= planned
        detail = "" if ok else "journals of several workers of one engine cannot be judged"
        yield Finding("one-worker", ok, detail, record.tag, f"at most {planned} loads", f"{loaded} loads")


def fault_fired(case: Case) -> Iterator[Finding]:
    """Each load broke exactly as planned, as many loads as planned, and nothing else broke."""
    events = [event for event in case.observation.events if event.name is EventName.FAULT_FIRED]
    for record in case.observation.requests:
        fault = record.planned.fault
        wanted = _planned_breakage(fault, _asked_for(case, record))
        fired = tuple((event.reason, event.blocks) for event in events if event.request == record.tag)
        least = _least_fired_count(fault)
        detail = f"fired {len(fired)} of {least} times" if len(fired) < least else ""
        ok = fired == wanted and not detail
        yield Finding("fault-fired", ok, detail, record.tag, _fired_text(wanted), _fired_text(fired))
    strays = {event.request for event in events} - {record.tag for record in case.observation.requests}
    if strays:
        yield Finding("fault-fired", False, f"a fault fired for unknown requests {', '.join(sorted(strays))}")


def nothing_else_failed(case: Case) -> Iterator[Finding]:
    """Every failed block is one that the fault broke: the store itself failed no load, nobody reported more."""
    failed = [e for e in case.observation.events if e.name is EventName.FAILED]
    reported = [e for e in case.observation.events if e.name is EventName.REPORTED]
    broken = {(tag, block) for tag, blocks in _broken_blocks(case).items() for block in blocks}
    damaged = {
        (record.tag, block)
        for record in case.observation.requests
        for block in storage_checks.damaged_for(case, record) | storage_checks.torn_for(case, record)
    }
    broken |= damaged
    extra = [f"{e.request} block {block}" for e in reported for block in e.blocks if (e.request, block) not in broken]
    extra += [f"{e.request} block {block}" for e in failed for block in e.blocks if (e.request, block) not in damaged]
    extra += [f"block id {block_id} of no load" for e in reported if not e.request for block_id in e.block_ids]
    yield Finding("nothing-else-failed", not extra, ", ".join(extra))


def _oracle_keys(case: Case) -> tuple[OracleKey, ...]:
    """The oracles that the cell is judged by: all that are essential, and others where they were measured."""
    essential_keys = essential(case.cell, case.prompts, case.block_size)
    keys = needed((case.cell,), case.prompts, case.block_size)
    return tuple(key for key in keys if key in essential_keys or key in case.oracles)


def oracles_stable(case: Case) -> Iterator[Finding]:
    """Reuse and recompute were measured twice, a partial at least once, always with the same answer."""
    for key in _oracle_keys(case):
        completions = [run.completion for run in case.oracles.get(key, ())]
        wanted = 1 if key.kind is OracleKind.PARTIAL else 2
        problems = [answer_problem(completion, case.prompts[key.prompt_id]) for completion in completions]
        answers = {(completion.token_ids, completion.finish_reason) for completion in completions}
        ok = len(completions) >= wanted and not any(problems) and len(answers) == 1
        got = f"{len(completions)} runs, {len(answers)} answers {'; '.join(filter(None, problems))}".strip()
        yield Finding("oracle-stable", ok, _of_prompt(key), expected=f"at least {wanted} runs, 1 answer", got=got)


def oracles_loaded(case: Case) -> Iterator[Finding]:
    """Each oracle run loaded the blocks that it stands for, and no others."""
    for key in _oracle_keys(case):
        wanted = tuple(range(oracle_block_count(key, case.prompts[key.prompt_id])))
        loads = [_loaded(run.events) for run in case.oracles.get(key, ())]
        ok = loads != [] and all(blocks == wanted for blocks in loads)
        yield Finding("oracle-loaded", ok, _of_prompt(key), expected=listed((wanted,)), got=listed(loads))


def oracles_agree(case: Case) -> Iterator[Finding]:
    """Loaded KV says what computed KV says: reuse and recompute of a prompt begin alike and know its secret alike.

    Only this tells a store that gives every request the same wrong KV: all else compares loads with loads. Rounding
    may change a token, so the first token of each has to be among the other's leaders, no more.
    """
    for prompt_id in dict.fromkeys(request.prompt_id for request in case.cell.requests):
        loaded, computed = (case.oracles.get(key(case.cell, prompt_id), ())[:1] for key in (reuse, recompute))
        for a, b in product(loaded, computed):
            ok = _begin_alike(a.completion, b.completion) and _know_alike(a.completion, b.completion, case, prompt_id)
            got, expected = a.completion.text[:SHOWN_CHARS], b.completion.text[:SHOWN_CHARS]
            yield Finding("oracles-agree", ok, f"reuse and recompute of {prompt_id}", expected=expected, got=got)


def _asked_for(case: Case, record: RequestRecord) -> tuple[Blocks, ...]:
    """The blocks of each load; a lookup without an answer has none yet, and asks for the whole prompt."""
    loads = case.blocks(record, EventName.PLANNED)
    is_unanswered = record.planned.fault.kind in LOOKUP_KINDS and not loads
    return (tuple(range(case.prompt(record).full_block_count)),) if is_unanswered else loads


def _planned_breakage(fault: Fault, loads: Sequence[Blocks]) -> tuple[tuple[str, Blocks], ...]:
    """What the journal must say about a fault: its kind, and the broken blocks of each load that it is to break."""
    if fault.kind is FaultKind.NONE:
        return ()
    selector = "all" if fault.kind in WHOLE_LOAD_KINDS else fault.blocks
    chosen = (tuple(blocks[i] for i in select(selector, len(blocks))) for blocks in loads[: fault.times])
    return tuple((fault.kind.value, blocks) for blocks in chosen)


def _least_fired_count(fault: Fault) -> int:
    """How many loads must be broken for the cell to show what it is about: all that it names."""
    if fault.kind is FaultKind.NONE:
        return 0
    return 1 if fault.times == ALWAYS else fault.times


def _broken_blocks(case: Case) -> dict[str, frozenset[int]]:
    """Per request, the blocks that a fault broke and was to report."""
    honest = [r for r in case.observation.requests if r.planned.fault.kind in REPORTED_KINDS]
    return {r.tag: frozenset(counted(case.blocks(r, EventName.FAULT_FIRED))) for r in honest}


def _ended_s(record: RequestRecord) -> float:
    """Seconds after the cell began."""
    return record.sent_s + record.completion.duration_s


def _loaded(events: Iterable[Event]) -> Blocks:
    return tuple(sorted(block for event in events if event.name is EventName.LOADED for block in event.blocks))


def _begin_alike(a: Completion, b: Completion) -> bool:
    if not a.token_ids or not b.token_ids or not a.top or not b.top:
        return a.token_ids[:1] == b.token_ids[:1]
    leaders_a, leaders_b = ({choice.token_id for choice in top} for top in (a.top[0], b.top[0]))
    return a.token_ids[0] in leaders_b and b.token_ids[0] in leaders_a


def _know_alike(a: Completion, b: Completion, case: Case, prompt_id: str) -> bool:
    secret = case.prompts[prompt_id].secret
    return (secret in a.text) == (secret in b.text)


def _fired_text(fired: Sequence[tuple[str, Blocks]]) -> str:
    return "; ".join(f"{kind} {listed((blocks,))}" for kind, blocks in fired) or "nothing"


def _of_prompt(key: OracleKey) -> str:
    return f"{oracle_name(key)} of {key.prompt_id}"
