"""What the judge makes of moments: requests that missed theirs, clients that gave up, preemption, short prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.judging.judge import judge
from harness.records import (
    Cell,
    Completion,
    Finding,
    Moment,
    Observation,
    OracleKey,
    OracleKind,
    Outcome,
    PlannedRequest,
    RequestRecord,
    Role,
    Status,
    Verdict,
)
from services.faults import FaultKind, LoadMode
from services.journal import EventName
from tests.builders import (
    BLOCK_SIZE,
    PROMPTS,
    VICTIM,
    cell,
    change_answer,
    change_request,
    observation,
    oracle_answer,
    oracle_runs,
    tag_of,
    without,
    wrong_answer,
)
from tests.verdicts import BYSTANDER_TAG, VICTIM_TAG, Change, broken_checks, verdict_of

REPORT = FaultKind.REPORT
GAVE_UP = Completion(200, error="the client gave up", broken_off=True, gave_up=True, duration_s=0.2)


def said(verdict: Verdict, check: str) -> str:
    """What the one finding of that check says."""
    return the_finding(verdict, check).detail


def of_whom(verdict: Verdict, check: str) -> str:
    """The request of which it says that."""
    return the_finding(verdict, check).request


def the_finding(verdict: Verdict, check: str) -> Finding:
    (finding,) = (finding for finding in verdict.findings if finding.check == check)
    return finding


def with_requests(of: Cell, change: Callable[[PlannedRequest], PlannedRequest]) -> Cell:
    return replace(of, requests=tuple(change(request) for request in of.requests))


# Late requests, and requests ahead.

LATE = with_requests(
    cell(REPORT, "first", mix=True), lambda r: replace(r, sent=Moment.REPAIR) if r.role is Role.SHARER else r
)
AHEAD = with_requests(cell(mix=True), lambda r: replace(r, sent=Moment.AHEAD) if r.role is Role.BYSTANDER else r)


def sent_at(role: Role, sent_s: float) -> Change:
    return lambda seen: change_request(seen, role, lambda record: replace(record, sent_s=sent_s))


def test_a_request_that_came_during_the_repair() -> None:
    verdict = verdict_of(LATE, sent_at(Role.SHARER, 0.1)(observation(LATE)))
    assert (verdict.status, said(verdict, "moment-met")) == (Status.PASS, "")


@pytest.mark.parametrize(
    "change",
    [
        sent_at(Role.SHARER, 0.6),
        sent_at(Role.SHARER, 0.5),
        lambda seen: without(sent_at(Role.SHARER, 0.1)(seen), EventName.REPORTED),
    ],
    ids=["after the answer", "with its end", "nothing was reported"],
)
def test_a_request_that_missed_the_repair_proves_nothing(change: Change) -> None:
    verdict = verdict_of(LATE, change(observation(LATE)))
    assert (verdict.outcome, verdict.status) == (Outcome.UNPROVEN, Status.INCONCLUSIVE)
    assert "moment-met" in broken_checks(verdict)
    assert said(verdict, "moment-met") == "there was no repair when it was sent"
    assert of_whom(verdict, "moment-met") == "tag-sharer"


def test_a_request_ahead_that_still_ran() -> None:
    verdict = verdict_of(AHEAD, sent_at(Role.VICTIM, 0.4)(observation(AHEAD)))
    assert (verdict.status, said(verdict, "moment-met")) == (Status.PASS, "")


@pytest.mark.parametrize("sent_s", [0.5, 0.6])
def test_a_request_ahead_that_had_ended_proves_nothing(sent_s: float) -> None:
    verdict = verdict_of(AHEAD, sent_at(Role.VICTIM, sent_s)(observation(AHEAD)))
    assert (verdict.outcome, broken_checks(verdict)) == (Outcome.UNPROVEN, {"moment-met"})
    assert said(verdict, "moment-met") == "it had ended before the victim was sent"
    assert of_whom(verdict, "moment-met") == BYSTANDER_TAG


# Clients that give up.


def given_up(of: Cell) -> Cell:
    return with_requests(of, lambda r: replace(r, gives_up=Moment.REPAIR) if r.role is Role.VICTIM else r)


def left(of: Cell) -> Observation:
    return change_request(observation(of), Role.VICTIM, lambda record: replace(record, completion=GAVE_UP))


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_nothing_is_asked_of_who_gave_up(policy: str) -> None:
    of = given_up(cell(REPORT, "first", policy=policy, mix=True))
    verdict = verdict_of(of, left(of))
    assert (broken_checks(verdict), verdict.outcome) == (set(), of.expected)
    assert said(verdict, "moment-met") == ""


@pytest.mark.parametrize("count", [1, 2])
def test_what_came_before_its_client_left_must_be_right(count: int) -> None:
    of = given_up(cell(REPORT, "first"))
    right = oracle_answer(OracleKey("victim", OracleKind.RECOMPUTE)).token_ids[:count]
    seen = change_answer(left(of), Role.VICTIM, token_ids=right)
    assert verdict_of(of, seen).status is Status.PASS
    wrong = change_answer(left(of), Role.VICTIM, token_ids=(*right[:-1], 7))
    verdict = verdict_of(of, wrong)
    assert (verdict.outcome, broken_checks(verdict)) == (Outcome.WRONG_OUTPUT, {"victim-equals-oracle"})


def test_who_gave_up_during_a_right_load() -> None:
    of = given_up(cell(FaultKind.DELAY))
    assert verdict_of(of, left(of)).outcome is Outcome.LOADED


@pytest.mark.parametrize(
    "answer",
    [oracle_answer(OracleKey("victim", OracleKind.RECOMPUTE)), replace(GAVE_UP, finish_reason="length")],
    ids=["stayed", "had it all"],
)
def test_who_had_the_whole_answer_did_not_give_up(answer: Completion) -> None:
    of = given_up(cell(REPORT, "first"))
    seen = change_request(observation(of), Role.VICTIM, lambda record: replace(record, completion=answer))
    verdict = verdict_of(of, seen)
    assert (verdict.outcome, broken_checks(verdict)) == (Outcome.UNPROVEN, {"moment-met"})
    assert said(verdict, "moment-met") == "its client had the whole answer before it left"
    assert of_whom(verdict, "moment-met") == VICTIM_TAG


@pytest.mark.parametrize(("role", "outcome"), [(Role.CANARY, Outcome.POISONED), (Role.SHARER, Outcome.COLLATERAL)])
def test_what_who_gave_up_leaves_behind_is_judged(role: Role, outcome: Outcome) -> None:
    of = given_up(cell(REPORT, "first", mix=True))
    seen = change_request(left(of), role, lambda r: replace(r, completion=wrong_answer(PROMPTS[r.planned.prompt_id])))
    assert verdict_of(of, seen).outcome is outcome


# Deadlines, preemption, chats, and prompts below a block.


def test_a_bystander_has_a_deadline_of_its_own() -> None:
    of = with_requests(cell(mix=True), lambda r: replace(r, deadline_s=3.0) if r.role is Role.BYSTANDER else r)
    verdict = verdict_of(of, change_answer(observation(of), Role.BYSTANDER, timed_out=True))
    found = next(f for f in verdict.findings if f.check == "in-time" and not f.ok)
    assert (verdict.outcome, found.expected) == (Outcome.HUNG, "within 3 s")


@pytest.mark.parametrize(("count", "outcome"), [(0, Outcome.UNPROVEN), (1, Outcome.RECOVERED)])
def test_a_cell_about_preemption_needs_one(count: int, outcome: Outcome) -> None:
    of = replace(cell(REPORT, "first"), preempts=True)
    seen = observation(of)
    seen = replace(
        seen, before=replace(seen.before, preemption_count=4), after=replace(seen.after, preemption_count=4 + count)
    )
    verdict = verdict_of(of, seen)
    (finding,) = (f for f in verdict.findings if f.check == "victim-preempted")
    assert (verdict.outcome, finding.expected, finding.got) == (outcome, "at least 1 preemption", str(count))


def test_a_prompt_below_a_block_that_is_meant_to_be() -> None:
    prompts = {**PROMPTS, "victim": replace(VICTIM, full_block_count=0, unstored=True)}
    of = cell()
    runs = [replace(run, events=()) for run in oracle_runs([of])]
    recomputed = oracle_answer(OracleKey("victim", OracleKind.REUSE))
    planned = of.requests[0]
    loads = observation(of)
    quiet = replace(loads, requests=(RequestRecord(planned, tag_of(planned), 0.0, recomputed),), events=())
    for seen, ok in ((quiet, True), (replace(quiet, events=loads.events), False)):
        (verdict,) = judge([of], prompts, runs, [seen], BLOCK_SIZE)
        assert ("kv-loaded" in broken_checks(verdict)) is not ok


def test_oracles_are_those_of_the_cells_own_oracle_engine() -> None:
    of = replace(cell(), oracle_engine="decode-tight", control=False)
    keys = {run.key.engine for run in oracle_runs([of])}
    assert keys == {"decode-tight"}
    (verdict,) = judge([of], PROMPTS, oracle_runs([cell()]), [observation(of)], BLOCK_SIZE)
    assert "oracle-stable" in broken_checks(verdict)


def test_async_sharers_and_late_ones_load_copies_of_their_own() -> None:
    of = with_requests(
        cell(REPORT, "first", load=LoadMode.ASYNC, mix=True),
        lambda r: replace(r, sent=Moment.REPAIR) if r.role is Role.SHARER else r,
    )
    seen = sent_at(Role.SHARER, 0.1)(observation(of))
    assert broken_checks(verdict_of(of, seen)) == set()
