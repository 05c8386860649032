"""Small factories for the records that tests need: prompts, cells, and what an honest engine would show of a cell.

Every oracle answers with tokens of its own, so that a test sees which one a request equals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from harness.judging.oracles import acceptable, needed, oracle_block_count, shared_bad_block
from harness.records import (
    Cell,
    Completion,
    EngineState,
    Observation,
    OracleKey,
    OracleKind,
    OracleRun,
    Outcome,
    PlannedRequest,
    Prompt,
    RequestRecord,
    Role,
    TokenChoice,
)
from services.faults import BROKEN_KINDS, NO_FAULT, REPORTED_KINDS, WHOLE_LOAD_KINDS, Fault, FaultKind, LoadMode, select
from services.journal import Event, EventName

BLOCK_SIZE = 4
BLOCK_COUNT = 7
SHARED_COUNT = 4
TOKEN_COUNT = 5
IDLE = EngineState(healthy=True, running_count=0, waiting_count=0, cache_usage=0.0, restart_count=0)

FIRST_ID = 1000
FIRST_LOGPROB = -0.1
GAP = 3.0


def prompt(name: str, first_token: int, *, secret: str = "", shared: tuple[int, ...] = ()) -> Prompt:
    """BLOCK_COUNT full blocks and one more token."""
    length = BLOCK_COUNT * BLOCK_SIZE + 1
    token_ids = shared + tuple(range(first_token, first_token + length - len(shared)))
    return Prompt(name, token_ids, f"text of {name}", BLOCK_COUNT, secret)


VICTIM = prompt("victim", 10, secret="saffron")
SHARER = prompt("sharer", 50, secret="velvet", shared=VICTIM.token_ids[: SHARED_COUNT * BLOCK_SIZE])
BYSTANDER = prompt("bystander", 90, secret="pelican")
PROMPTS: Mapping[str, Prompt] = {p.id: p for p in (VICTIM, SHARER, BYSTANDER)}


def request(
    role: Role, load: LoadMode = LoadMode.SYNC, fault: Fault = NO_FAULT, *, prompt_id: str = "", stream: bool = False
) -> PlannedRequest:
    """With the prompt of that role, unless another is named."""
    names = {Role.VICTIM: "victim", Role.SHARER: "sharer", Role.BYSTANDER: "bystander", Role.CANARY: "victim"}
    return PlannedRequest(role, prompt_id or names[role], load, fault, stream)


def cell(
    kind: FaultKind = FaultKind.NONE,
    blocks: str | tuple[int, ...] = "all",
    *,
    load: LoadMode = LoadMode.SYNC,
    policy: str = "recompute",
    mix: bool = False,
    stream: bool = False,
    times: int = 1,
    name: str = "",
) -> Cell:
    """A cell as a matrix file gives it: the victim alone, or with a sharer and a bystander."""
    fault = NO_FAULT if kind is FaultKind.NONE else Fault(kind, blocks, times, 0.2 if kind is FaultKind.DELAY else 0.0)
    beside = (Role.SHARER, Role.BYSTANDER) if mix else ()
    requests = (
        request(Role.VICTIM, load, fault, stream=stream),
        *(request(role, load, stream=stream) for role in beside),
    )
    return Cell(
        id=name or f"{policy}-{kind}-{load}",
        engine=f"decode-{policy}",
        policy=policy,
        load=load,
        requests=requests,
        expected=expected_outcome(kind, policy),
        why="a test",
        control=not mix and kind in (FaultKind.NONE, FaultKind.SILENT),
    )


def expected_outcome(kind: FaultKind, policy: str) -> Outcome:
    if kind in BROKEN_KINDS:
        return Outcome.FAILED_CLEANLY if policy == "fail" else Outcome.RECOVERED
    return Outcome.CAUGHT if kind is FaultKind.SILENT else Outcome.LOADED


def top(token_id: int) -> tuple[TokenChoice, ...]:
    """A top-3 list: the token, and its two successors far behind."""
    logprobs = (FIRST_LOGPROB, FIRST_LOGPROB - GAP, FIRST_LOGPROB - 2 * GAP)
    return tuple(TokenChoice(token_id + index, logprob) for index, logprob in enumerate(logprobs))


def completion(token_ids: Iterable[int], asked: Prompt, text: str = "") -> Completion:
    """A whole answer to `asked`."""
    ids = tuple(token_ids)
    return Completion(
        status_code=200,
        text=text or f"answer {ids}",
        token_ids=ids,
        finish_reason="length",
        top=tuple(top(token_id) for token_id in ids),
        prompt_token_count=len(asked.token_ids),
        duration_s=0.5,
    )


def oracle_answer(key: OracleKey, prompts: Mapping[str, Prompt] = PROMPTS) -> Completion:
    """What the oracle answers: same first token for all of a prompt, then tokens of its own."""
    number = {OracleKind.REUSE: 1, OracleKind.RECOMPUTE: 2, OracleKind.PARTIAL: 3 + key.blocks}[key.kind]
    first = FIRST_ID * (1 + list(prompts).index(key.prompt_id))
    ids = (first, *(first + 50 * number + 5 * index for index in range(1, TOKEN_COUNT)))
    return completion(ids, prompts[key.prompt_id])


def wrong_answer(asked: Prompt) -> Completion:
    """An answer that no oracle gives."""
    return completion(range(1, 1 + TOKEN_COUNT), asked)


def refused(status_code: int = 500) -> Completion:
    """What a request gets that fails cleanly."""
    return Completion(status_code=status_code, error="InternalServerError: KV load failed", duration_s=0.1)


def oracle_runs(cells: Iterable[Cell], prompts: Mapping[str, Prompt] = PROMPTS) -> tuple[OracleRun, ...]:
    """Every oracle twice."""
    return tuple(
        OracleRun(key, oracle_answer(key, prompts), loaded_by_oracle(key, prompts[key.prompt_id]))
        for _ in range(2)
        for key in needed(cells, prompts, BLOCK_SIZE)
    )


def loaded_by_oracle(key: OracleKey, asked: Prompt) -> tuple[Event, ...]:
    blocks = tuple(range(oracle_block_count(key, asked)))
    return (event(EventName.LOADED, "oracle", blocks, service="decode-baseline"),) if blocks else ()


def event(
    name: EventName,
    tag: str,
    blocks: tuple[int, ...] = (),
    *,
    mode: LoadMode = LoadMode.SYNC,
    reason: str = "",
    service: str = "decode-recompute",
) -> Event:
    return Event(name, service, 0.0, tag, mode.value, blocks, reason=reason)


def observation(of: Cell, *, canary: bool = True) -> Observation:
    """What an honest engine and an honest connector show of a cell."""
    planned = of.requests
    if canary and of.fault.kind is not FaultKind.SILENT:
        planned += (request(Role.CANARY, of.load, stream=of.requests[0].stream),)
    records = tuple(RequestRecord(p, tag_of(p), 0.0, _answer(of, p)) for p in planned)
    return quiet(of, records, (e for record in records for e in _events(of, record)))


def quiet(of: Cell, records: tuple[RequestRecord, ...], events: Iterable[Event]) -> Observation:
    """These requests and events on an engine that was idle before and is again."""
    return Observation(
        cell_id=of.id,
        requests=records,
        before=IDLE,
        after=IDLE,
        settled=True,
        events=tuple(events),
        log_lines=(),
        started_at_s=0.0,
        duration_s=1.0,
    )


def tag_of(planned: PlannedRequest) -> str:
    return f"tag-{planned.role}"


def change_request(seen: Observation, role: Role, change: Callable[[RequestRecord], RequestRecord]) -> Observation:
    """The observation with the record of that role changed."""
    requests = tuple(change(r) if r.planned.role is role else r for r in seen.requests)
    return replace(seen, requests=requests)


def answer_with(seen: Observation, role: Role, answer: Completion) -> Observation:
    """The observation with another completion for that role."""
    return change_request(seen, role, lambda record: replace(record, completion=answer))


def change_answer(seen: Observation, role: Role, **changes: object) -> Observation:
    """The observation with some fields of that role's completion changed."""
    return change_request(
        seen,
        role,
        lambda record: replace(record, completion=replace(record.completion, **changes)),  # type: ignore[arg-type]
    )


def change_events(seen: Observation, change: Callable[[Event], Event | None]) -> Observation:
    """The observation with each event changed, or left out where `change` gives None."""
    changed = (change(e) for e in seen.events)
    return replace(seen, events=tuple(e for e in changed if e is not None))


def without(seen: Observation, *names: EventName) -> Observation:
    return change_events(seen, lambda e: None if e.name in names else e)


def _answer(of: Cell, planned: PlannedRequest) -> Completion:
    asked = PROMPTS[planned.prompt_id]
    keys = acceptable(of, planned, PROMPTS, BLOCK_SIZE)
    spoiled = planned.fault.kind is FaultKind.SILENT or not keys
    if spoiled:
        return wrong_answer(asked)
    if of.policy == "fail" and _is_hit(of, planned):
        return refused(200) if planned.stream else refused()
    return oracle_answer(keys[0])


def _is_hit(of: Cell, planned: PlannedRequest) -> bool:
    broken = of.fault.kind in BROKEN_KINDS
    if planned.role is Role.SHARER:
        return broken and shared_bad_block(of, planned, PROMPTS, BLOCK_SIZE) is not None
    return broken and planned.role is Role.VICTIM


def _events(of: Cell, record: RequestRecord) -> tuple[Event, ...]:
    """The journal of one request: the canary finds everything in the prefix cache, a sync sharer its first blocks."""
    if record.planned.role is Role.CANARY or record.planned.load is LoadMode.OFF:
        return ()
    first = SHARED_COUNT if record.planned.role is Role.SHARER and of.load is LoadMode.SYNC else 0
    blocks = tuple(range(first, BLOCK_COUNT))
    mode, fault = record.planned.load, record.planned.fault
    loaded = (
        event(EventName.OFFERED, record.tag, blocks, mode=mode),
        event(EventName.PLANNED, record.tag, blocks, mode=mode),
        event(EventName.LOADED, record.tag, blocks, mode=mode),
    )
    chosen = blocks if fault.kind in WHOLE_LOAD_KINDS else select(fault.blocks, len(blocks))
    fired = (event(EventName.FAULT_FIRED, record.tag, chosen, mode=mode, reason=fault.kind.value),)
    reported = (event(EventName.REPORTED, record.tag, chosen, mode=mode),)
    match fault.kind:
        case FaultKind.NONE:
            return loaded
        case FaultKind.RAISE:
            return loaded[:-1] + fired
        case FaultKind.UNANSWERED:
            return fired
        case kind if kind in REPORTED_KINDS:
            return loaded + fired + reported
        case _:
            return loaded + fired
