"""The checks of a cell: what must hold before anything is claimed, what is claimed, and what a broken check means.

`harness/judge.py` runs them all, in the order of `CHECKS`. Each check is pure, takes a `Case` and gives findings,
which say what was expected and what was found; a check that has nothing to look at in a cell gives none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness import process_checks, storage_checks
from harness.comparison import Comparison, answer_problem, compare, failed_cleanly
from harness.oracles import (
    BROKEN_KINDS,
    REPORTED_KINDS,
    acceptable,
    essential,
    needed,
    oracle_block_count,
    oracle_name,
    recompute,
    reuse,
    shared_bad_block,
)
from harness.records import (
    Cell,
    Completion,
    Finding,
    Moment,
    Observation,
    OracleKey,
    OracleKind,
    OracleRun,
    Outcome,
    Prompt,
    RequestRecord,
    Role,
)
from services.faults import ALWAYS, WHOLE_LOAD_KINDS, Fault, FaultKind, LoadMode, select
from services.journal import Event, EventName

FAIL_POLICY = "fail"

SHOWN_CHARS = 40
CACHE_USAGE_TOLERANCE = 1e-6
"""Far below one block of any cache; the metric is a rounded float."""

AFTERWARDS = (Role.CANARY, Role.RELOAD)
"""Requests that the runner adds to a plan."""

Blocks = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One cell with everything that it is judged by."""

    cell: Cell
    observation: Observation
    prompts: Mapping[str, Prompt]
    oracles: Mapping[OracleKey, Sequence[OracleRun]]
    block_size: int
    noise_band: float

    def records(self, *roles: Role) -> tuple[RequestRecord, ...]:
        return tuple(record for record in self.observation.requests if record.planned.role in roles)

    def blocks(self, record: RequestRecord, name: EventName) -> tuple[Blocks, ...]:
        """The blocks of each event of that name that the journal has for the request."""
        return tuple(e.blocks for e in self.observation.events if e.name is name and e.request == record.tag)

    def prompt(self, record: RequestRecord) -> Prompt:
        return self.prompts[record.planned.prompt_id]

    def is_silent(self, record: RequestRecord) -> bool:
        return record.planned.fault.kind is FaultKind.SILENT


# Preconditions.


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
    """vLLM gave every block of the victim's prompt to a load, and the load brought every block, if it began."""
    for record in case.records(Role.VICTIM):
        if record.planned.load is not LoadMode.OFF and not case.cell.storage and not case.cell.process:
            wanted = tuple(range(case.prompt(record).full_block_count))
            planned = case.blocks(record, EventName.PLANNED)[:1]
            loaded = case.blocks(record, EventName.LOADED)[:1]
            began = record.planned.fault.kind is not FaultKind.RAISE
            whole = () if case.prompt(record).unstored else (wanted,)
            ok = () not in whole and planned == whole and (loaded == whole or not began)
            got = f"planned {_listed(planned)}, loaded {_listed(loaded)}"
            yield Finding("kv-loaded", ok, request=record.tag, expected=f"blocks {_listed((wanted,))}", got=got)


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
        wanted = _planned_breakage(fault, case.blocks(record, EventName.PLANNED))
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
        yield Finding("oracle-loaded", ok, _of_prompt(key), expected=_listed((wanted,)), got=_listed(loads))


def oracles_agree(case: Case) -> Iterator[Finding]:
    """Loaded KV says what computed KV says: reuse and recompute of a prompt begin alike and know its secret alike.

    Only this tells a store that gives every request the same wrong KV: all else compares loads with loads. Rounding
    may change a token, so the first token of each has to be among the other's leaders, no more.
    """
    for prompt_id in dict.fromkeys(request.prompt_id for request in case.cell.requests):
        loaded, computed = (case.oracles.get(key(case.cell, prompt_id), ())[:1] for key in (reuse, recompute))
        for a, b in zip(loaded, computed, strict=False):
            ok = _begin_alike(a.completion, b.completion) and _know_alike(a.completion, b.completion, case, prompt_id)
            got, expected = a.completion.text[:SHOWN_CHARS], b.completion.text[:SHOWN_CHARS]
            yield Finding("oracles-agree", ok, f"reuse and recompute of {prompt_id}", expected=expected, got=got)


# Facts about the engine.


def engine_alive(case: Case) -> Iterator[Finding]:
    """The engine lived through the cell, or came back once it was killed by the cell itself."""
    before, after, planned = case.observation.before, case.observation.after, process_checks.planned_exits(case)
    exits = after.restart_count - before.restart_count
    got = f"{exits} exits, {'healthy' if after.healthy else 'not healthy'}"
    ok = after.healthy and exits <= planned
    why = "; ".join(event.reason for event in case.observation.events if event.name is EventName.ENGINE_EXITED)
    yield Finding(
        "engine-alive", ok, "" if ok else why, expected=f"{'at most ' * planned}{planned} exits, healthy", got=got
    )


def in_time(case: Case) -> Iterator[Finding]:
    """Every request ended before its deadline."""
    for record in case.observation.requests:
        if process_checks.outlasts_its_client(case, record):
            continue
        got = f"{record.completion.duration_s:.1f} s"
        expected = f"within {record.planned.deadline_s or case.cell.deadline_s:g} s"
        yield Finding("in-time", not record.completion.timed_out, "", record.tag, expected, got)


# Claims.


def same_bytes_loaded(case: Case) -> Iterator[Finding]:
    """Every block that was loaded has the bytes that the reuse oracle got; exact on any hardware.

    Not asked of blocks whose files are damaged: that these are not loaded at all is a claim of its own.
    """
    for record in case.observation.requests:
        runs = case.oracles.get(reuse(case.cell, record.planned.prompt_id), ())
        wanted = _digests(event for run in runs for event in run.events)
        got = _digests(event for event in case.observation.events if event.request == record.tag)
        sound = wanted.keys() - storage_checks.damaged_for(case, record)
        other = tuple(block for block, digests in got.items() if block in sound and not digests <= wanted[block])
        detail = f"other bytes than the oracle got in blocks {_listed((other,))}" if other else ""
        yield Finding("same-bytes-loaded", not other, detail, record.tag)


def victim_equals_oracle(case: Case) -> Iterator[Finding]:
    """The victim of an honest fault has the right tokens, or under policy `fail` an error and nothing else.

    That an answer did not end before its deadline is no concern of this check and the next two."""
    for record in case.records(Role.VICTIM):
        if not case.is_silent(record):
            yield from _right_answer(case, record)


def others_equal_oracle(case: Case) -> Iterator[Finding]:
    """Requests beside the victim have the right tokens; who shares a bad block may fail with it."""
    for record in case.records(Role.SHARER, Role.BYSTANDER):
        yield from _right_answer(case, record)


def canary_equals_oracle(case: Case) -> Iterator[Finding]:
    """The same prompt afterwards is right: nothing bad stayed in a cache."""
    for record in case.records(*AFTERWARDS):
        yield from _right_answer(case, record)


def nothing_leaked(case: Case) -> Iterator[Finding]:
    """Queues are empty, and requests hold no more blocks than before."""
    before, after = case.observation.before, case.observation.after
    held = after.cache_usage > before.cache_usage + CACHE_USAGE_TOLERANCE
    ok = case.observation.settled and after.running_count == after.waiting_count == 0 and not held
    got = f"{after.running_count} running, {after.waiting_count} waiting, {after.cache_usage:.1%} of the blocks held"
    detail = "" if case.observation.settled else "the engine did not come to rest, or would not empty its prefix cache"
    expected = f"0 running, 0 waiting, {before.cache_usage:.1%} of the blocks held"
    yield Finding("nothing-leaked", ok, detail, expected=expected, got=got)


def failure_reported(case: Case) -> Iterator[Finding]:
    """vLLM was told of every block each time it was broken."""
    for record in case.observation.requests:
        if record.planned.fault.kind in REPORTED_KINDS:
            fired = case.blocks(record, EventName.FAULT_FIRED)
            reported = case.blocks(record, EventName.REPORTED)
            ok = not _counted(fired) - _counted(reported)
            yield Finding("failure-reported", ok, "", record.tag, _listed(fired), _listed(reported))


def control_caught(case: Case) -> Iterator[Finding]:
    """Wrong KV that nobody reported shows: a whole answer, with tokens that no oracle has."""
    for record in case.records(Role.VICTIM):
        if case.is_silent(record):
            found = comparison(case, record)
            ok = not found.ok and found.difference is not None and not record.completion.timed_out
            yield Finding("control-caught", ok, found.detail, record.tag, f"not {_wanted(case, record)}")


# One answer.


def _right_answer(case: Case, record: RequestRecord) -> Iterator[Finding]:
    keys = _keys(case, record)
    if not keys:
        return
    check = f"{record.planned.role}-equals-oracle"
    if _may_fail(case, record) and failed_cleanly(record.completion, stream=record.planned.stream):
        yield Finding(check, True, f"failed cleanly: HTTP {record.completion.status_code}", record.tag)
    else:
        found = comparison(case, record)
        yield Finding(check, found.ok, found.detail, record.tag, _wanted(case, record), record.completion.text)
    yield from _foreign_secrets(case, record)


def _foreign_secrets(case: Case, record: RequestRecord) -> Iterator[Finding]:
    """Another prompt's secret in an answer shows whose KV was read."""
    own = case.prompt(record)
    others = (prompt for prompt in case.prompts.values() if own.secret and prompt.secret not in ("", own.secret))
    for other in others:
        if other.secret in record.completion.text:
            detail = f"the answer has the secret of prompt {other.id}"
            yield Finding("foreign-secret", False, detail, record.tag, own.secret, other.secret)


def comparison(case: Case, record: RequestRecord) -> Comparison:
    runs = [(key, case.oracles.get(key, ())[:1]) for key in _keys(case, record)]
    oracles = [(oracle_name(key), run.completion) for key, first in runs for run in first]
    return compare(record.tag, record.completion, case.prompt(record), oracles, case.noise_band)


def _keys(case: Case, record: RequestRecord) -> tuple[OracleKey, ...]:
    """As `acceptable`; but a victim whose later load was left whole runs on loaded KV after all."""
    loads, broken = (case.blocks(record, name) for name in (EventName.PLANNED, EventName.FAULT_FIRED))
    if record.planned.fault.kind in BROKEN_KINDS and len(loads) > len(broken) > 0:
        return (reuse(case.cell, record.planned.prompt_id),)
    return acceptable(case.cell, record.planned, case.prompts, case.block_size)


def _wanted(case: Case, record: RequestRecord) -> str:
    return " or ".join(oracle_name(key) for key in _keys(case, record))


def _may_fail(case: Case, record: RequestRecord) -> bool:
    """Whether policy `fail` allows this request an error: its own load was bad, or it shares the bad block."""
    if case.cell.policy != FAIL_POLICY:
        return False
    if case.cell.storage:
        return storage_checks.may_fail(case, record)
    if record.planned.role is Role.SHARER:
        return shared_bad_block(case.cell, record.planned, case.prompts, case.block_size) is not None
    return record.planned.fault.kind in BROKEN_KINDS


# Events.


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
    return {r.tag: frozenset(_counted(case.blocks(r, EventName.FAULT_FIRED))) for r in honest}


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


def _digests(events: Iterable[Event]) -> dict[int, frozenset[str]]:
    """What was loaded into each logical block, over all loads; empty where a journal has no digests."""
    pairs = [
        (block, digest)
        for event in events
        if event.name is EventName.LOADED
        for block, digest in zip(event.blocks, event.digests, strict=False)
    ]
    return {block: frozenset(d for b, d in pairs if b == block) for block, _ in pairs}


def _counted(lists: Iterable[Blocks]) -> Counter[int]:
    return Counter(block for blocks in lists for block in blocks)


def _listed(lists: Sequence[Blocks]) -> str:
    return "; ".join(" ".join(map(str, blocks)) or "none" for blocks in lists) or "none"


def _fired_text(fired: Sequence[tuple[str, Blocks]]) -> str:
    return "; ".join(f"{kind} {_listed((blocks,))}" for kind, blocks in fired) or "nothing"


def _of_prompt(key: OracleKey) -> str:
    return f"{oracle_name(key)} of {key.prompt_id}"


Check = Callable[[Case], Iterator[Finding]]

CHECKS: tuple[tuple[Outcome, Check], ...] = (
    (Outcome.UNPROVEN, engine_ready),
    (Outcome.CRASHED, engine_alive),
    (Outcome.CRASHED, storage_checks.producer_alive),
    (Outcome.HUNG, in_time),
    (Outcome.CRASHED, process_checks.producer_serves),
    (Outcome.POISONED, process_checks.published_is_whole),
    (Outcome.POISONED, process_checks.nothing_unpublished_loaded),
    (Outcome.COLLATERAL, storage_checks.save_answered),
    (Outcome.POISONED, process_checks.volume_whole_again),
    (Outcome.NOT_RUN, load_mode),
    (Outcome.UNPROVEN, requests_sent),
    (Outcome.UNPROVEN, controls_accepted),
    (Outcome.UNPROVEN, one_worker),
    (Outcome.UNPROVEN, kv_loaded),
    (Outcome.UNPROVEN, moments_met),
    (Outcome.UNPROVEN, victim_preempted),
    (Outcome.UNPROVEN, fault_fired),
    (Outcome.UNPROVEN, storage_checks.damage_done),
    (Outcome.UNPROVEN, storage_checks.save_failed),
    (Outcome.UNPROVEN, storage_checks.kv_loaded_beside_damage),
    (Outcome.UNPROVEN, storage_checks.reload_brought_everything),
    (Outcome.UNPROVEN, process_checks.struck_as_planned),
    (Outcome.UNPROVEN, process_checks.kv_loaded_around),
    (Outcome.UNPROVEN, nothing_else_failed),
    (Outcome.UNPROVEN, oracles_stable),
    (Outcome.UNPROVEN, oracles_loaded),
    (Outcome.UNPROVEN, oracles_agree),
    (Outcome.WRONG_OUTPUT, same_bytes_loaded),
    (Outcome.WRONG_OUTPUT, victim_equals_oracle),
    (Outcome.WRONG_OUTPUT, process_checks.victim_got_nothing),
    (Outcome.POISONED, canary_equals_oracle),
    (Outcome.POISONED, storage_checks.torn_block_not_found),
    (Outcome.POISONED, storage_checks.volume_unchanged),
    (Outcome.COLLATERAL, others_equal_oracle),
    (Outcome.LEAKED, nothing_leaked),
    (Outcome.UNREPORTED, failure_reported),
    (Outcome.UNREPORTED, storage_checks.damage_noticed),
    (Outcome.MISSED, control_caught),
)
"""Each check, and the outcome of a cell in which it is the first that is broken.

What was seen of the engine comes first, because it stands whatever else was proven: an engine that died, and with it
every answer after that; then answers that never came, unless there is a proven wrong one (`judge.py`); then what has to
hold before anything is claimed; then the claims, the worst first: wrong text that a client took for an answer, wrong
text that will come to others, and what can be seen without reading text.
"""
