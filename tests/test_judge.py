"""Each check of the judge has tests that break only it, from an observation of an honest engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from harness.judging.claims import CACHE_USAGE_TOLERANCE
from harness.judging.comparison import LOGPROB_ROUNDING, NO_TOKEN, NOISE_CEILING, NOISE_FLOOR, noise_band
from harness.judging.judge import cell_judge, exit_code, judge, only_controls_ran, to_run_again
from harness.records import (
    Cell,
    Completion,
    Difference,
    Evidence,
    Observation,
    OracleKey,
    OracleKind,
    OracleRun,
    Outcome,
    Role,
    Status,
    TokenChoice,
    Verdict,
)
from services.faults import ALWAYS, ASYNC_KINDS, SYNC_KINDS, FaultKind, LoadMode
from services.journal import Event, EventName
from tests.builders import (
    BLOCK_COUNT,
    BLOCK_SIZE,
    BYSTANDER,
    PROMPTS,
    SHARER,
    TOKEN_COUNT,
    VICTIM,
    answer_with,
    cell,
    change_answer,
    change_events,
    completion,
    event,
    observation,
    oracle_answer,
    oracle_runs,
    refused,
    request,
    without,
    wrong_answer,
)
from tests.verdicts import BYSTANDER_TAG, CANARY_TAG, VICTIM_TAG, Change, broken_checks, controls_of, judged

ASYNC, SYNC = LoadMode.ASYNC, LoadMode.SYNC
DELAY, DROP, NONE, REPORT, SILENT = (
    FaultKind.DELAY,
    FaultKind.DROP,
    FaultKind.NONE,
    FaultKind.REPORT,
    FaultKind.SILENT,
)
FINISH_MISSING, FINISH_TWICE, REPORT_LATE, UNKNOWN_BLOCK = (
    FaultKind.FINISH_MISSING,
    FaultKind.FINISH_TWICE,
    FaultKind.REPORT_LATE,
    FaultKind.UNKNOWN_BLOCK,
)
HANG, RAISE = FaultKind.HANG, FaultKind.RAISE
BLOCKS = tuple(range(BLOCK_COUNT))
FLOAT32 = "float32"
LOAD = (EventName.PLANNED, EventName.LOADED)

GREEN = [
    pytest.param(cell(kind, blocks, load=load, policy=policy, mix=mix), id=f"{policy}-{kind}-{load}-{blocks}-{mix}")
    for policy in ("recompute", "fail")
    for load in (SYNC, ASYNC)
    for kind, blocks in (
        (NONE, "all"),
        (DELAY, "all"),
        (DELAY, "first"),
        (SILENT, "first"),
        (REPORT, "first"),
        (REPORT, "middle"),
        (REPORT, "last"),
        (REPORT, "all"),
        (REPORT, (1, 5)),
        (DROP, "first"),
        (DROP, "last"),
    )
    for mix in (False, True)
]
NEWER_KINDS = sorted(set(FaultKind) - {NONE, DELAY, SILENT, REPORT, DROP})
GREEN += [
    pytest.param(cell(kind, load=load, policy=policy, mix=mix), id=f"{policy}-{kind}-{load}-{mix}")
    for policy in ("recompute", "fail")
    for kind in NEWER_KINDS
    for load in (SYNC, ASYNC)
    if kind not in (SYNC_KINDS if load is ASYNC else ASYNC_KINDS)
    for mix in (False, True)
]


class TestGreen:
    @pytest.mark.parametrize("of", GREEN)
    def test_an_honest_engine_passes(self, of: Cell) -> None:
        verdict, code = judged(of)
        assert broken_checks(verdict) == set()
        assert (verdict.cell_id, verdict.outcome, verdict.status, code) == (of.id, of.expected, Status.PASS, 0)

    @pytest.mark.parametrize("kind", [NONE, REPORT, DROP])
    @pytest.mark.parametrize("policy", ["recompute", "fail"])
    def test_streams_pass(self, policy: str, kind: FaultKind) -> None:
        of = cell(kind, policy=policy, mix=True, stream=True)
        verdict, code = judged(of)
        assert (verdict.outcome, verdict.status, code) == (of.expected, Status.PASS, 0)

    def test_every_check_leaves_its_findings(self) -> None:
        verdict, _ = judged(cell(REPORT, "middle", mix=True))
        assert {finding.check for finding in verdict.findings} == {
            "engine-ready",
            "engine-alive",
            "in-time",
            "load-mode",
            "requests-sent",
            "control-accepted",
            "one-worker",
            "kv-loaded",
            "fault-fired",
            "nothing-else-failed",
            "oracle-stable",
            "oracle-loaded",
            "oracles-agree",
            "same-bytes-loaded",
            "victim-equals-oracle",
            "canary-equals-oracle",
            "sharer-equals-oracle",
            "bystander-equals-oracle",
            "nothing-leaked",
            "failure-reported",
            "expected-outcome",
            "controls",
        }

    def test_evidence_counts_the_victims_events(self) -> None:
        verdict, _ = judged(cell(REPORT, (1, 5), mix=True))
        assert verdict.evidence == Evidence(loaded_blocks=BLOCK_COUNT, reported_blocks=2, fault_fired=1)

    def test_silent_control_shows_where_the_answer_left_the_oracle(self) -> None:
        verdict, _ = judged(cell(SILENT))
        (difference,) = verdict.differences
        assert (difference.oracle, difference.index, difference.near_tie) == ("reuse", 0, False)

    def test_cells_without_the_victims_load_need_none(self) -> None:
        verdict, _ = judged(replace(cell(load=LoadMode.OFF), control=False))
        assert (verdict.outcome, verdict.status) == (Outcome.LOADED, Status.PASS)
        assert "kv-loaded" not in {finding.check for finding in verdict.findings}


RECOMPUTED = oracle_answer(OracleKey("victim", OracleKind.RECOMPUTE))
REUSED = oracle_answer(OracleKey("victim", OracleKind.REUSE))


class TestLostLoads:
    """A load that hangs or raises is reported by nobody; all that counts is what becomes of the request."""

    CELLS = pytest.mark.parametrize(
        "of", [cell(HANG, load=ASYNC), cell(RAISE), cell(RAISE, load=ASYNC)], ids=lambda of: of.id
    )

    @CELLS
    def test_computed_after_all_is_recovered(self, of: Cell) -> None:
        verdict, code = judged(of, answer_with(observation(of), Role.VICTIM, RECOMPUTED))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.RECOVERED, set(), 0)

    @CELLS
    def test_a_second_load_that_is_whole_equals_reuse(self, of: Cell) -> None:
        first = observation(of)
        second = tuple(event(name, VICTIM_TAG, BLOCKS, mode=of.load) for name in LOAD)
        seen = replace(first, events=first.events + (second[:1] if of.fault.kind is RAISE else second))
        verdict, _ = judged(of, answer_with(seen, Role.VICTIM, REUSED))
        assert "victim-equals-oracle" not in broken_checks(verdict)

    @CELLS
    def test_the_answer_of_the_loaded_kv_is_wrong(self, of: Cell) -> None:
        verdict, code = judged(of, answer_with(observation(of), Role.VICTIM, REUSED))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.WRONG_OUTPUT, {"victim-equals-oracle"}, 1)

    @CELLS
    def test_an_error_is_no_recovery(self, of: Cell) -> None:
        verdict, code = judged(of, answer_with(observation(of), Role.VICTIM, refused()))
        assert (verdict.outcome, verdict.status, code) == (Outcome.WRONG_OUTPUT, Status.FAIL, 1)

    @CELLS
    def test_no_answer_before_the_deadline_is_hung(self, of: Cell) -> None:
        seen = replace(change_answer(observation(of), Role.VICTIM, timed_out=True, status_code=0), settled=False)
        verdict, code = judged(of, seen)
        assert (verdict.outcome, code) == (Outcome.HUNG, 1)
        assert broken_checks(verdict) == {"in-time", "nothing-leaked"}

    @CELLS
    def test_blocks_held_afterwards_are_leaked(self, of: Cell) -> None:
        seen = observation(of)
        verdict, code = judged(of, replace(seen, settled=False, after=replace(seen.after, cache_usage=0.1)))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.LEAKED, {"nothing-leaked"}, 1)

    @CELLS
    def test_a_dead_engine_is_crashed(self, of: Cell) -> None:
        seen = observation(of)
        verdict, code = judged(of, replace(seen, after=replace(seen.after, restart_count=1)))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.CRASHED, {"engine-alive"}, 1)

    @CELLS
    def test_without_the_canary_nothing_is_proven(self, of: Cell) -> None:
        verdict, code = judged(of, observation(of, canary=False))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.UNPROVEN, {"requests-sent"}, 2)

    def test_under_fail_an_answer_is_no_clean_failure(self) -> None:
        of = cell(HANG, load=ASYNC, policy="fail")
        verdict, code = judged(of, answer_with(observation(of), Role.VICTIM, RECOMPUTED))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.RECOVERED, {"expected-outcome"}, 1)

    def test_a_load_that_hangs_was_made(self) -> None:
        of = cell(HANG, load=ASYNC)
        verdict, _ = judged(of, without(observation(of), EventName.LOADED))
        assert (verdict.outcome, broken_checks(verdict)) == (Outcome.UNPROVEN, {"kv-loaded"})

    def test_a_load_that_raises_was_at_least_planned(self) -> None:
        of = cell(RAISE)
        verdict, _ = judged(of, without(observation(of), EventName.PLANNED))
        assert verdict.outcome is Outcome.UNPROVEN
        assert "kv-loaded" in broken_checks(verdict)


class TestPendingLookups:
    """The fault fires before there is a load."""

    @pytest.mark.parametrize("policy", ["recompute", "fail"])
    def test_an_answer_from_loaded_kv_is_right(self, policy: str) -> None:
        of = cell(FaultKind.PENDING, policy=policy)
        verdict, code = judged(of, observation(of))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.LOADED, set(), 0)

    def test_a_lookup_that_was_answered_at_once_proves_nothing(self) -> None:
        of = cell(FaultKind.PENDING)
        verdict, code = judged(of, without(observation(of), EventName.FAULT_FIRED))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.UNPROVEN, {"fault-fired"}, 2)

    def test_one_that_waits_for_longer_than_the_client_is_hung(self) -> None:
        of = cell(FaultKind.PENDING)
        waiting = without(observation(of), EventName.OFFERED, EventName.PLANNED, EventName.LOADED)
        verdict, code = judged(of, change_answer(waiting, Role.VICTIM, timed_out=True, status_code=0))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.HUNG, {"in-time", "kv-loaded"}, 1)


class TestUnansweredLookups:
    """Nothing is ever loaded: the engine computes the prompt in the end, or fails it, as the policy says."""

    @pytest.mark.parametrize(
        ("policy", "expected"), [("recompute", Outcome.RECOVERED), ("fail", Outcome.FAILED_CLEANLY)]
    )
    def test_a_request_that_goes_on_without_the_store_is_right(self, policy: str, expected: Outcome) -> None:
        of = cell(FaultKind.UNANSWERED, policy=policy)
        verdict, code = judged(of, observation(of))
        assert (verdict.outcome, broken_checks(verdict), code) == (expected, set(), 0)

    def test_the_answer_is_that_of_computed_kv(self) -> None:
        of = cell(FaultKind.UNANSWERED)
        verdict, code = judged(of, answer_with(observation(of), Role.VICTIM, REUSED))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.WRONG_OUTPUT, {"victim-equals-oracle"}, 1)

    def test_one_that_waits_for_ever_is_hung_and_the_fault_has_fired(self) -> None:
        of = cell(FaultKind.UNANSWERED)
        seen = change_answer(observation(of), Role.VICTIM, timed_out=True, status_code=0)
        verdict, code = judged(of, seen)
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.HUNG, {"in-time"}, 1)

    def test_what_was_loaded_all_the_same_proves_nothing(self) -> None:
        of, plain = cell(FaultKind.UNANSWERED), cell(NONE)
        seen = observation(of)
        seen = replace(seen, events=observation(plain).events + seen.events)
        verdict, code = judged(of, seen)
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.UNPROVEN, {"kv-loaded"}, 2)


class TestBreaches:
    """A connector that breaks its contract is no excuse for wrong tokens."""

    @pytest.mark.parametrize("of", [cell(FINISH_TWICE, load=ASYNC), cell(UNKNOWN_BLOCK)], ids=lambda of: of.id)
    def test_a_right_load_is_used(self, of: Cell) -> None:
        verdict, code = judged(of, answer_with(observation(of), Role.VICTIM, RECOMPUTED))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.WRONG_OUTPUT, {"victim-equals-oracle"}, 1)

    @pytest.mark.parametrize("of", [cell(REPORT_LATE), cell(FINISH_MISSING, load=ASYNC)], ids=lambda of: of.id)
    def test_a_report_that_never_came_is_unreported(self, of: Cell) -> None:
        verdict, code = judged(of, without(observation(of), EventName.REPORTED))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.UNREPORTED, {"failure-reported"}, 1)

    def test_a_late_report_does_not_excuse_the_first_token(self) -> None:
        of = cell(REPORT_LATE, "first")
        verdict, code = judged(of, answer_with(observation(of), Role.VICTIM, wrong_answer(VICTIM)))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.WRONG_OUTPUT, {"victim-equals-oracle"}, 1)

    def test_a_fault_that_did_not_fire_proves_nothing(self) -> None:
        of = cell(FINISH_TWICE, load=ASYNC)
        verdict, code = judged(of, without(observation(of), EventName.FAULT_FIRED))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.UNPROVEN, {"fault-fired"}, 2)


class TestSecondLoad:
    """An async load whose first block was bad may be tried again, and the second load may be whole."""

    @staticmethod
    def loaded_again(answer: Completion, *, break_again: bool = False, times: int = 1) -> tuple[Verdict, int]:
        of = cell(REPORT, "first", load=ASYNC, times=times)
        first = observation(of)
        again = {EventName.PLANNED, EventName.LOADED}
        if break_again:
            again |= {EventName.FAULT_FIRED, EventName.REPORTED}
        second = tuple(e for e in first.events if e.name in again)
        return judged(of, answer_with(replace(first, events=first.events + second), Role.VICTIM, answer))

    def test_equals_reuse(self) -> None:
        verdict, code = self.loaded_again(oracle_answer(OracleKey("victim", OracleKind.REUSE)))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.RECOVERED, set(), 0)
        assert verdict.evidence == Evidence(loaded_blocks=2 * BLOCK_COUNT, reported_blocks=1, fault_fired=1)

    def test_does_not_equal_recompute(self) -> None:
        verdict, code = self.loaded_again(oracle_answer(OracleKey("victim", OracleKind.RECOMPUTE)))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.WRONG_OUTPUT, {"victim-equals-oracle"}, 1)

    @pytest.mark.parametrize("times", [2, ALWAYS])
    def test_broken_too_equals_recompute(self, times: int) -> None:
        answer = oracle_answer(OracleKey("victim", OracleKind.RECOMPUTE))
        verdict, code = self.loaded_again(answer, break_again=True, times=times)
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.RECOVERED, set(), 0)

    def test_broken_more_often_than_planned_is_unproven(self) -> None:
        answer = oracle_answer(OracleKey("victim", OracleKind.RECOMPUTE))
        verdict, code = self.loaded_again(answer, break_again=True, times=1)
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.UNPROVEN, {"fault-fired"}, 2)

    def test_broken_less_often_than_planned_is_unproven(self) -> None:
        verdict, code = self.loaded_again(oracle_answer(OracleKey("victim", OracleKind.REUSE)), times=2)
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.UNPROVEN, {"fault-fired"}, 2)

    @pytest.mark.parametrize("times", [3, 4])
    def test_too_few_loads_for_what_is_planned_are_unproven(self, times: int) -> None:
        answer = oracle_answer(OracleKey("victim", OracleKind.RECOMPUTE))
        verdict, code = self.loaded_again(answer, break_again=True, times=times)
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.UNPROVEN, {"fault-fired"}, 2)
        (finding,) = (f for f in verdict.findings if not f.ok)
        assert finding.detail == f"fired 2 of {times} times"

    def test_one_load_of_a_fault_that_is_always_there_is_enough(self) -> None:
        of = cell(REPORT, "first", times=ALWAYS)
        verdict, code = judged(of)
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.RECOVERED, set(), 0)
        assert {f.detail for f in verdict.findings if f.check == "fault-fired"} == {""}

    def test_one_load_is_not_two(self) -> None:
        verdict, code = judged(cell(REPORT, "middle", mix=True, times=2))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.UNPROVEN, {"fault-fired"}, 2)

    def test_reported_only_once_of_twice_is_unreported(self) -> None:
        of = cell(REPORT, "first", load=ASYNC, times=2)
        first = observation(of)
        again = (EventName.PLANNED, EventName.LOADED, EventName.FAULT_FIRED)
        second = tuple(e for e in first.events if e.name in again)
        verdict, code = judged(of, replace(first, events=first.events + second))
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.UNREPORTED, {"failure-reported"}, 1)


@dataclass(frozen=True)
class Case:
    """A cell, what is wrong with its observation, and what the judge must say."""

    id: str
    cell: Cell
    change: Change
    outcome: Outcome
    checks: set[str]
    status: Status = Status.FAIL

    @property
    def exit_code(self) -> int:
        return {Status.FAIL: 1, Status.ERROR: 3, Status.INCONCLUSIVE: 2, Status.SKIPPED: 0}[self.status]


def state(name: str, **changes: object) -> Change:
    return lambda seen: replace(seen, **{name: replace(getattr(seen, name), **changes)})


def both(*changes: Change) -> Change:
    def change(seen: Observation) -> Observation:
        for each in changes:
            seen = each(seen)
        return seen

    return change


def answer(role: Role, completion: Completion) -> Change:
    return lambda seen: answer_with(seen, role, completion)


def fields(role: Role, **changes: object) -> Change:
    return lambda seen: change_answer(seen, role, **changes)


def drop_events(*names: EventName) -> Change:
    return lambda seen: without(seen, *names)


def add_event(name: EventName, tag: str, blocks: tuple[int, ...] = (), **fields: str) -> Change:
    return lambda seen: replace(seen, events=(*seen.events, event(name, tag, blocks, **fields)))  # type: ignore[arg-type]


def alter_events(name: EventName, **changes: object) -> Change:
    def alter(e: Event) -> Event:
        return replace(e, **changes) if e.name is name and e.request == VICTIM_TAG else e  # type: ignore[arg-type]

    return lambda seen: change_events(seen, alter)


def partial(blocks: int, prompt_id: str = "victim") -> Completion:
    return oracle_answer(OracleKey(prompt_id, OracleKind.PARTIAL, blocks))


def whole(kind: OracleKind, prompt_id: str = "victim") -> Completion:
    return oracle_answer(OracleKey(prompt_id, kind))


REUSE, RECOMPUTE = OracleKind.REUSE, OracleKind.RECOMPUTE
MIX = cell(REPORT, "middle", mix=True)
ASYNC_MIX = cell(REPORT, "middle", mix=True, load=ASYNC)
FIRST = cell(REPORT, "first")
FAIL = cell(REPORT, "middle", policy="fail", mix=True)
FAIL_STREAM = cell(REPORT, "middle", policy="fail", mix=True, stream=True)
LATE_FAIL = cell(REPORT, "last", policy="fail", mix=True)
SILENT_MIX = replace(cell(SILENT, "last", mix=True), control=False)
NO_FAULT_MIX = cell(NONE, mix=True)
LATE = cell(DELAY, mix=True)

WRONG = {"victim-equals-oracle"}
TIMED_OUT = {"in-time"}
NO_ANSWER = Completion(0, "no complete answer within 60 s", timed_out=True)

FACTS = [
    Case("restarted", MIX, state("after", restart_count=1), Outcome.CRASHED, {"engine-alive"}),
    Case("dead", MIX, state("after", healthy=False), Outcome.CRASHED, {"engine-alive"}),
    Case("restarted-silent", SILENT_MIX, state("after", restart_count=1), Outcome.CRASHED, {"engine-alive"}),
    Case("restarted-no-fault", NO_FAULT_MIX, state("after", restart_count=1), Outcome.CRASHED, {"engine-alive"}),
    Case(
        "crash-outranks-the-rest",
        MIX,
        both(state("after", restart_count=1), answer(Role.VICTIM, Completion(0, "connection reset"))),
        Outcome.CRASHED,
        {"engine-alive"} | WRONG,
    ),
    Case(
        "crash-stands-without-a-fired-fault",
        MIX,
        both(state("after", restart_count=1), drop_events(EventName.FAULT_FIRED, EventName.REPORTED)),
        Outcome.CRASHED,
        {"engine-alive", "fault-fired"},
    ),
    Case(
        "crash-outranks-hung",
        MIX,
        both(state("after", restart_count=1), fields(Role.VICTIM, timed_out=True)),
        Outcome.CRASHED,
        {"engine-alive"} | TIMED_OUT,
    ),
    Case("hung-victim", MIX, fields(Role.VICTIM, timed_out=True), Outcome.HUNG, TIMED_OUT),
    Case("hung-sharer", MIX, fields(Role.SHARER, timed_out=True), Outcome.HUNG, TIMED_OUT),
    Case("hung-bystander", MIX, fields(Role.BYSTANDER, timed_out=True), Outcome.HUNG, TIMED_OUT),
    Case("hung-canary", MIX, fields(Role.CANARY, timed_out=True), Outcome.HUNG, TIMED_OUT),
    Case("hung-under-fail", FAIL, fields(Role.VICTIM, timed_out=True), Outcome.HUNG, TIMED_OUT),
    Case("hung-without-a-token", MIX, answer(Role.VICTIM, NO_ANSWER), Outcome.HUNG, TIMED_OUT),
    Case(
        "hung-after-right-tokens",
        MIX,
        fields(Role.VICTIM, timed_out=True, token_ids=partial(3).token_ids[:2], finish_reason=""),
        Outcome.HUNG,
        TIMED_OUT,
    ),
    Case(
        "hung-after-a-right-answer-that-did-not-end",
        MIX,
        fields(Role.VICTIM, timed_out=True, finish_reason=""),
        Outcome.HUNG,
        TIMED_OUT,
    ),
    Case(
        "wrong-tokens-outrank-hung",
        MIX,
        answer(Role.VICTIM, replace(wrong_answer(VICTIM), timed_out=True, finish_reason="")),
        Outcome.WRONG_OUTPUT,
        TIMED_OUT | WRONG,
    ),
    Case(
        "more-tokens-than-the-oracle-outrank-hung",
        MIX,
        fields(Role.VICTIM, timed_out=True, token_ids=(*partial(3).token_ids, 7)),
        Outcome.WRONG_OUTPUT,
        TIMED_OUT | WRONG,
    ),
    Case(
        "poisoned-outranks-hung",
        MIX,
        both(answer(Role.VICTIM, NO_ANSWER), answer(Role.CANARY, wrong_answer(VICTIM))),
        Outcome.POISONED,
        TIMED_OUT | {"canary-equals-oracle"},
    ),
    Case(
        "poisoned-outranks-collateral-and-hung",
        MIX,
        both(
            answer(Role.VICTIM, NO_ANSWER),
            answer(Role.CANARY, wrong_answer(VICTIM)),
            answer(Role.BYSTANDER, wrong_answer(BYSTANDER)),
        ),
        Outcome.POISONED,
        TIMED_OUT | {"canary-equals-oracle", "bystander-equals-oracle"},
    ),
    Case(
        "collateral-outranks-hung",
        MIX,
        both(answer(Role.VICTIM, NO_ANSWER), answer(Role.BYSTANDER, wrong_answer(BYSTANDER))),
        Outcome.COLLATERAL,
        TIMED_OUT | {"bystander-equals-oracle"},
    ),
    Case(
        "hung-outranks-leaked",
        MIX,
        both(answer(Role.VICTIM, NO_ANSWER), state("after", cache_usage=0.5)),
        Outcome.HUNG,
        TIMED_OUT | {"nothing-leaked"},
    ),
    Case(
        "crash-outranks-poisoned-and-hung",
        MIX,
        both(
            state("after", restart_count=1),
            answer(Role.VICTIM, NO_ANSWER),
            answer(Role.CANARY, wrong_answer(VICTIM)),
        ),
        Outcome.CRASHED,
        TIMED_OUT | {"engine-alive", "canary-equals-oracle"},
    ),
    Case(
        "hung-outranks-what-is-not-proven",
        MIX,
        both(
            drop_events(EventName.FAULT_FIRED, EventName.REPORTED),
            answer(Role.VICTIM, NO_ANSWER),
            answer(Role.CANARY, wrong_answer(VICTIM)),
        ),
        Outcome.HUNG,
        TIMED_OUT | {"fault-fired", "canary-equals-oracle"},
    ),
    Case("hung-silent", SILENT_MIX, fields(Role.VICTIM, timed_out=True), Outcome.HUNG, TIMED_OUT | {"control-caught"}),
    Case(
        "hang-stands-without-a-fired-fault",
        MIX,
        both(fields(Role.VICTIM, timed_out=True), drop_events(EventName.FAULT_FIRED, EventName.REPORTED)),
        Outcome.HUNG,
        TIMED_OUT | {"fault-fired"},
    ),
]

INCONCLUSIVE = Status.INCONCLUSIVE
UNPROVEN = Outcome.UNPROVEN

PRECONDITIONS = [
    Case("dead-before", MIX, state("before", healthy=False), UNPROVEN, {"engine-ready"}, INCONCLUSIVE),
    Case(
        "dead-before-and-after",
        MIX,
        both(state("before", healthy=False), state("after", healthy=False)),
        UNPROVEN,
        {"engine-ready", "engine-alive"},
        INCONCLUSIVE,
    ),
    Case("busy-before", MIX, state("before", running_count=1), UNPROVEN, {"engine-ready"}, INCONCLUSIVE),
    Case("queue-before", MIX, state("before", waiting_count=1), UNPROVEN, {"engine-ready"}, INCONCLUSIVE),
    Case(
        "both-busy-before",
        MIX,
        state("before", running_count=1, waiting_count=1),
        UNPROVEN,
        {"engine-ready"},
        INCONCLUSIVE,
    ),
    Case(
        "bystander-not-sent",
        MIX,
        lambda seen: replace(seen, requests=tuple(r for r in seen.requests if r.planned.role is not Role.BYSTANDER)),
        UNPROVEN,
        {"requests-sent"},
        INCONCLUSIVE,
    ),
    Case(
        "request-sent-twice",
        NO_FAULT_MIX,
        lambda seen: replace(seen, requests=(*seen.requests, seen.requests[2])),
        UNPROVEN,
        {"requests-sent"},
        INCONCLUSIVE,
    ),
    Case(
        "no-canary",
        MIX,
        lambda seen: replace(seen, requests=seen.requests[:-1]),
        UNPROVEN,
        {"requests-sent"},
        INCONCLUSIVE,
    ),
    Case(
        "rejected",
        NO_FAULT_MIX,
        add_event(EventName.REJECTED, "cmpl-1", reason="faults are off"),
        UNPROVEN,
        {"control-accepted"},
        INCONCLUSIVE,
    ),
    Case(
        "two-workers",
        NO_FAULT_MIX,
        add_event(EventName.LOADED, VICTIM_TAG, BLOCKS),
        UNPROVEN,
        {"one-worker"},
        INCONCLUSIVE,
    ),
    Case(
        "two-workers-of-a-bystander",
        NO_FAULT_MIX,
        add_event(EventName.LOADED, BYSTANDER_TAG, BLOCKS),
        UNPROVEN,
        {"one-worker"},
        INCONCLUSIVE,
    ),
    Case(
        "nothing-loaded",
        NO_FAULT_MIX,
        drop_events(EventName.OFFERED, EventName.PLANNED, EventName.LOADED),
        UNPROVEN,
        {"kv-loaded"},
        INCONCLUSIVE,
    ),
    Case("planned-but-not-loaded", NO_FAULT_MIX, drop_events(EventName.LOADED), UNPROVEN, {"kv-loaded"}, INCONCLUSIVE),
    Case(
        "last-block-not-planned",
        NO_FAULT_MIX,
        alter_events(EventName.PLANNED, blocks=tuple(range(BLOCK_COUNT - 1))),
        UNPROVEN,
        {"kv-loaded"},
        INCONCLUSIVE,
    ),
    Case(
        "first-block-was-in-the-prefix-cache",
        NO_FAULT_MIX,
        alter_events(EventName.PLANNED, blocks=tuple(range(1, BLOCK_COUNT))),
        UNPROVEN,
        {"kv-loaded"},
        INCONCLUSIVE,
    ),
    Case(
        "last-block-not-loaded",
        NO_FAULT_MIX,
        alter_events(EventName.LOADED, blocks=tuple(range(BLOCK_COUNT - 1))),
        UNPROVEN,
        {"kv-loaded"},
        INCONCLUSIVE,
    ),
    Case(
        "nothing-loaded-under-delay",
        LATE,
        drop_events(EventName.LOADED),
        UNPROVEN,
        {"kv-loaded"},
        INCONCLUSIVE,
    ),
    Case(
        "not-fired",
        MIX,
        drop_events(EventName.FAULT_FIRED, EventName.REPORTED),
        UNPROVEN,
        {"fault-fired"},
        INCONCLUSIVE,
    ),
    Case("not-fired-silent", SILENT_MIX, drop_events(EventName.FAULT_FIRED), UNPROVEN, {"fault-fired"}, INCONCLUSIVE),
    Case("not-fired-delay", LATE, drop_events(EventName.FAULT_FIRED), UNPROVEN, {"fault-fired"}, INCONCLUSIVE),
    Case(
        "fired-on-the-wrong-block",
        MIX,
        both(alter_events(EventName.FAULT_FIRED, blocks=(4,)), alter_events(EventName.REPORTED, blocks=(4,))),
        UNPROVEN,
        {"fault-fired"},
        INCONCLUSIVE,
    ),
    Case(
        "fired-on-a-block-too-many",
        MIX,
        both(alter_events(EventName.FAULT_FIRED, blocks=(3, 4)), alter_events(EventName.REPORTED, blocks=(3, 4))),
        UNPROVEN,
        {"fault-fired"},
        INCONCLUSIVE,
    ),
    Case(
        "changed-no-bytes",
        SILENT_MIX,
        alter_events(EventName.FAULT_FIRED, blocks=()),
        UNPROVEN,
        {"fault-fired"},
        INCONCLUSIVE,
    ),
    Case(
        "another-kind-fired",
        MIX,
        alter_events(EventName.FAULT_FIRED, reason="drop"),
        UNPROVEN,
        {"fault-fired"},
        INCONCLUSIVE,
    ),
    Case(
        "fired-twice",
        SILENT_MIX,
        add_event(EventName.FAULT_FIRED, VICTIM_TAG, (6,), reason="silent"),
        UNPROVEN,
        {"fault-fired"},
        INCONCLUSIVE,
    ),
    Case(
        "fired-for-a-bystander",
        MIX,
        add_event(EventName.FAULT_FIRED, BYSTANDER_TAG, (3,), reason="report"),
        UNPROVEN,
        {"fault-fired"},
        INCONCLUSIVE,
    ),
    Case(
        "fired-without-a-fault",
        NO_FAULT_MIX,
        add_event(EventName.FAULT_FIRED, VICTIM_TAG, (3,), reason="report"),
        UNPROVEN,
        {"fault-fired"},
        INCONCLUSIVE,
    ),
    Case(
        "fired-for-a-stranger",
        NO_FAULT_MIX,
        add_event(EventName.FAULT_FIRED, "cmpl-1", (3,), reason="report"),
        UNPROVEN,
        {"fault-fired"},
        INCONCLUSIVE,
    ),
    Case(
        "selector-beyond-the-prompt",
        cell(REPORT, (99,)),
        drop_events(EventName.FAULT_FIRED, EventName.REPORTED),
        UNPROVEN,
        {"fault-fired"},
        INCONCLUSIVE,
    ),
    Case(
        "fault-without-a-load",
        cell(REPORT, "middle", load=LoadMode.OFF),
        lambda seen: seen,
        UNPROVEN,
        {"fault-fired"},
        INCONCLUSIVE,
    ),
    Case(
        "store-failed-a-block",
        MIX,
        add_event(EventName.FAILED, BYSTANDER_TAG, (2,)),
        UNPROVEN,
        {"nothing-else-failed"},
        INCONCLUSIVE,
    ),
    Case(
        "store-failed-a-broken-block",
        MIX,
        add_event(EventName.FAILED, VICTIM_TAG, (3,)),
        UNPROVEN,
        {"nothing-else-failed"},
        INCONCLUSIVE,
    ),
    Case(
        "reported-without-a-fault",
        NO_FAULT_MIX,
        add_event(EventName.REPORTED, VICTIM_TAG, (3,)),
        UNPROVEN,
        {"nothing-else-failed"},
        INCONCLUSIVE,
    ),
    Case(
        "reported-under-delay",
        LATE,
        add_event(EventName.REPORTED, VICTIM_TAG, (3,)),
        UNPROVEN,
        {"nothing-else-failed"},
        INCONCLUSIVE,
    ),
    Case(
        "silent-but-reported",
        SILENT_MIX,
        add_event(EventName.REPORTED, VICTIM_TAG, (6,)),
        UNPROVEN,
        {"nothing-else-failed"},
        INCONCLUSIVE,
    ),
    Case(
        "reported-a-good-block-too",
        MIX,
        alter_events(EventName.REPORTED, blocks=(1, 3)),
        UNPROVEN,
        {"nothing-else-failed"},
        INCONCLUSIVE,
    ),
    Case(
        "reported-for-a-bystander",
        MIX,
        add_event(EventName.REPORTED, BYSTANDER_TAG, (3,)),
        UNPROVEN,
        {"nothing-else-failed"},
        INCONCLUSIVE,
    ),
    Case(
        "unproven-outranks-wrong-output",
        MIX,
        both(drop_events(EventName.FAULT_FIRED, EventName.REPORTED), answer(Role.VICTIM, wrong_answer(VICTIM))),
        UNPROVEN,
        {"fault-fired"} | WRONG,
        INCONCLUSIVE,
    ),
]

OTHER_MODE = [
    Case(
        "loaded-sync-for-async",
        ASYNC_MIX,
        lambda seen: change_events(seen, lambda e: replace(e, mode="sync")),
        Outcome.NOT_RUN,
        {"load-mode"},
        Status.SKIPPED,
    ),
    Case(
        "loaded-async-for-sync",
        MIX,
        lambda seen: change_events(seen, lambda e: replace(e, mode="async")),
        Outcome.NOT_RUN,
        {"load-mode"},
        Status.SKIPPED,
    ),
    Case(
        "bystander-loaded-async-for-sync",
        MIX,
        lambda seen: change_events(seen, lambda e: replace(e, mode="async") if e.request == BYSTANDER_TAG else e),
        Outcome.NOT_RUN,
        {"load-mode"},
        Status.SKIPPED,
    ),
    Case(
        "skip-outranks-unproven",
        NO_FAULT_MIX,
        both(alter_events(EventName.PLANNED, mode="async"), drop_events(EventName.LOADED)),
        Outcome.NOT_RUN,
        {"load-mode", "kv-loaded"},
        Status.SKIPPED,
    ),
    Case(
        "crash-outranks-skip",
        MIX,
        both(alter_events(EventName.PLANNED, mode="async"), state("after", restart_count=1)),
        Outcome.CRASHED,
        {"load-mode", "engine-alive"},
    ),
]

WRONG_VICTIM = [
    Case(f"{name}-{kind}", of, change, Outcome.WRONG_OUTPUT, WRONG)
    for kind, of in (("none", NO_FAULT_MIX), ("report", MIX), ("async", ASYNC_MIX), ("delay", LATE), ("fail", FAIL))
    for name, change in (
        ("garbage", answer(Role.VICTIM, wrong_answer(VICTIM))),
        ("http-500-with-text", answer(Role.VICTIM, replace(refused(), text="partial"))),
        ("http-500-with-tokens", answer(Role.VICTIM, replace(refused(), token_ids=(1,)))),
        ("http-500-that-finished", answer(Role.VICTIM, replace(refused(), finish_reason="stop"))),
        ("http-400", answer(Role.VICTIM, refused(400))),
        ("http-499", answer(Role.VICTIM, refused(499))),
        ("http-600", answer(Role.VICTIM, refused(600))),
        ("no-answer", answer(Role.VICTIM, Completion(0, "connection reset"))),
        ("error-body-under-200", answer(Role.VICTIM, refused(200))),
        ("nothing-under-200", answer(Role.VICTIM, Completion(200))),
        ("right-tokens-and-an-error", answer(Role.VICTIM, replace(whole(RECOMPUTE), error="oops"))),
    )
]

CLAIMS = [
    *WRONG_VICTIM,
    Case("http-500-under-recompute", MIX, answer(Role.VICTIM, refused()), Outcome.WRONG_OUTPUT, WRONG),
    Case("http-500-without-a-fault", NO_FAULT_MIX, answer(Role.VICTIM, refused()), Outcome.WRONG_OUTPUT, WRONG),
    Case(
        "http-500-under-fail-without-a-fault",
        cell(NONE, mix=True, policy="fail"),
        answer(Role.VICTIM, refused()),
        Outcome.WRONG_OUTPUT,
        WRONG,
    ),
    Case(
        "http-500-under-fail-and-delay",
        cell(DELAY, policy="fail"),
        answer(Role.VICTIM, refused()),
        Outcome.WRONG_OUTPUT,
        WRONG,
    ),
    Case(
        "stream-error-under-recompute",
        cell(REPORT, stream=True),
        answer(Role.VICTIM, refused(200)),
        Outcome.WRONG_OUTPUT,
        WRONG,
    ),
    Case(
        "stream-error-after-text",
        FAIL_STREAM,
        answer(Role.VICTIM, replace(refused(200), text="a")),
        Outcome.WRONG_OUTPUT,
        WRONG,
    ),
    Case(
        "empty-stream-without-an-error", FAIL_STREAM, answer(Role.VICTIM, Completion(200)), Outcome.WRONG_OUTPUT, WRONG
    ),
    Case(
        "stream-broken-off",
        FAIL_STREAM,
        answer(Role.VICTIM, replace(refused(200), broken_off=True)),
        Outcome.WRONG_OUTPUT,
        WRONG,
    ),
    Case("stream-refused", FAIL_STREAM, answer(Role.VICTIM, refused(400)), Outcome.WRONG_OUTPUT, WRONG),
    Case("stream-reset", FAIL_STREAM, answer(Role.VICTIM, refused(0)), Outcome.WRONG_OUTPUT, WRONG),
    Case("reuse-for-partial", MIX, answer(Role.VICTIM, whole(REUSE)), Outcome.WRONG_OUTPUT, WRONG),
    Case("recompute-for-partial", MIX, answer(Role.VICTIM, whole(RECOMPUTE)), Outcome.WRONG_OUTPUT, WRONG),
    Case("reuse-for-recompute", FIRST, answer(Role.VICTIM, whole(REUSE)), Outcome.WRONG_OUTPUT, WRONG),
    Case("recompute-for-reuse", NO_FAULT_MIX, answer(Role.VICTIM, whole(RECOMPUTE)), Outcome.WRONG_OUTPUT, WRONG),
    Case("half-a-stream", MIX, fields(Role.VICTIM, finish_reason=""), Outcome.WRONG_OUTPUT, WRONG),
    Case("aborted", MIX, fields(Role.VICTIM, finish_reason="abort"), Outcome.WRONG_OUTPUT, WRONG),
    Case("other-finish-reason", MIX, fields(Role.VICTIM, finish_reason="stop"), Outcome.WRONG_OUTPUT, WRONG),
    Case("prompt-cut", MIX, fields(Role.VICTIM, prompt_token_count=28), Outcome.WRONG_OUTPUT, WRONG),
    Case(
        "a-token-missing",
        MIX,
        fields(Role.VICTIM, token_ids=partial(3).token_ids[:-1]),
        Outcome.WRONG_OUTPUT,
        WRONG,
    ),
    Case(
        "a-token-too-many",
        MIX,
        fields(Role.VICTIM, token_ids=(*partial(3).token_ids, 7)),
        Outcome.WRONG_OUTPUT,
        WRONG,
    ),
    Case(
        "foreign-secret",
        MIX,
        fields(Role.VICTIM, text="the word is pelican"),
        Outcome.WRONG_OUTPUT,
        {"foreign-secret"},
    ),
    Case(
        "swapped-answers",
        NO_FAULT_MIX,
        both(
            answer(Role.VICTIM, replace(whole(REUSE, "bystander"), text="pelican")),
            answer(Role.BYSTANDER, replace(whole(REUSE), text="saffron")),
        ),
        Outcome.WRONG_OUTPUT,
        WRONG | {"bystander-equals-oracle", "foreign-secret"},
    ),
    Case(
        "poisoned",
        MIX,
        answer(Role.CANARY, wrong_answer(VICTIM)),
        Outcome.POISONED,
        {"canary-equals-oracle"},
    ),
    Case(
        "canary-refused-under-fail",
        FAIL,
        answer(Role.CANARY, refused()),
        Outcome.POISONED,
        {"canary-equals-oracle"},
    ),
    Case(
        "canary-equals-another-partial",
        MIX,
        answer(Role.CANARY, partial(2)),
        Outcome.POISONED,
        {"canary-equals-oracle"},
    ),
    Case("canary-secret", MIX, fields(Role.CANARY, text="velvet"), Outcome.POISONED, {"foreign-secret"}),
    Case(
        "bystander-garbage",
        MIX,
        answer(Role.BYSTANDER, wrong_answer(BYSTANDER)),
        Outcome.COLLATERAL,
        {"bystander-equals-oracle"},
    ),
    Case(
        "bystander-garbage-beside-silent",
        SILENT_MIX,
        answer(Role.BYSTANDER, wrong_answer(BYSTANDER)),
        Outcome.COLLATERAL,
        {"bystander-equals-oracle"},
    ),
    Case(
        "bystander-recomputed",
        MIX,
        answer(Role.BYSTANDER, whole(RECOMPUTE, "bystander")),
        Outcome.COLLATERAL,
        {"bystander-equals-oracle"},
    ),
    Case(
        "bystander-failed-under-fail",
        FAIL,
        answer(Role.BYSTANDER, refused()),
        Outcome.COLLATERAL,
        {"bystander-equals-oracle"},
    ),
    Case(
        "sharer-garbage", MIX, answer(Role.SHARER, wrong_answer(SHARER)), Outcome.COLLATERAL, {"sharer-equals-oracle"}
    ),
    Case(
        "sharer-garbage-under-fail",
        FAIL,
        answer(Role.SHARER, wrong_answer(SHARER)),
        Outcome.COLLATERAL,
        {"sharer-equals-oracle"},
    ),
    Case(
        "sharer-failed-under-recompute",
        MIX,
        answer(Role.SHARER, refused()),
        Outcome.COLLATERAL,
        {"sharer-equals-oracle"},
    ),
    Case(
        "sharer-failed-though-async",
        cell(REPORT, "middle", policy="fail", mix=True, load=ASYNC),
        answer(Role.SHARER, refused()),
        Outcome.COLLATERAL,
        {"sharer-equals-oracle"},
    ),
    Case(
        "sharer-failed-for-a-block-of-the-victim-alone",
        LATE_FAIL,
        answer(Role.SHARER, refused()),
        Outcome.COLLATERAL,
        {"sharer-equals-oracle"},
    ),
    Case(
        "sharer-recomputed-though-async",
        ASYNC_MIX,
        answer(Role.SHARER, partial(3, "sharer")),
        Outcome.COLLATERAL,
        {"sharer-equals-oracle"},
    ),
    Case("sharer-secret", MIX, fields(Role.SHARER, text="saffron"), Outcome.COLLATERAL, {"foreign-secret"}),
    Case("unsettled", MIX, lambda seen: replace(seen, settled=False), Outcome.LEAKED, {"nothing-leaked"}),
    Case("still-running", MIX, state("after", running_count=1), Outcome.LEAKED, {"nothing-leaked"}),
    Case("still-waiting", MIX, state("after", waiting_count=1), Outcome.LEAKED, {"nothing-leaked"}),
    Case("both-queues", MIX, state("after", running_count=1, waiting_count=1), Outcome.LEAKED, {"nothing-leaked"}),
    Case("blocks-held", MIX, state("after", cache_usage=0.01), Outcome.LEAKED, {"nothing-leaked"}),
    Case("leaked-silent", SILENT_MIX, state("after", cache_usage=0.01), Outcome.LEAKED, {"nothing-leaked"}),
    Case("not-reported", MIX, drop_events(EventName.REPORTED), Outcome.UNREPORTED, {"failure-reported"}),
    Case("not-reported-under-fail", FAIL, drop_events(EventName.REPORTED), Outcome.UNREPORTED, {"failure-reported"}),
    Case(
        "not-all-reported",
        cell(DROP, "all"),
        alter_events(EventName.REPORTED, blocks=tuple(range(BLOCK_COUNT - 1))),
        Outcome.UNREPORTED,
        {"failure-reported"},
    ),
    Case(
        "wrong-output-outranks-poisoned",
        MIX,
        both(answer(Role.VICTIM, wrong_answer(VICTIM)), answer(Role.CANARY, wrong_answer(VICTIM))),
        Outcome.WRONG_OUTPUT,
        WRONG | {"canary-equals-oracle"},
    ),
    Case(
        "poisoned-outranks-collateral",
        MIX,
        both(answer(Role.BYSTANDER, wrong_answer(BYSTANDER)), answer(Role.CANARY, wrong_answer(VICTIM))),
        Outcome.POISONED,
        {"bystander-equals-oracle", "canary-equals-oracle"},
    ),
    Case(
        "collateral-outranks-leaked",
        MIX,
        both(answer(Role.BYSTANDER, wrong_answer(BYSTANDER)), state("after", cache_usage=0.5)),
        Outcome.COLLATERAL,
        {"bystander-equals-oracle", "nothing-leaked"},
    ),
    Case(
        "leaked-outranks-unreported",
        MIX,
        both(drop_events(EventName.REPORTED), state("after", cache_usage=0.5)),
        Outcome.LEAKED,
        {"failure-reported", "nothing-leaked"},
    ),
    Case(
        "recovered-under-fail",
        FAIL,
        answer(Role.VICTIM, partial(3)),
        Outcome.RECOVERED,
        {"expected-outcome"},
    ),
    Case(
        "expected-another-green",
        replace(NO_FAULT_MIX, expected=Outcome.RECOVERED),
        lambda seen: seen,
        Outcome.LOADED,
        {"expected-outcome"},
    ),
]

MISSED = [
    Case("silent-equals-reuse", SILENT_MIX, answer(Role.VICTIM, whole(REUSE)), Outcome.MISSED, {"control-caught"}),
    Case(
        "silent-equals-recompute", SILENT_MIX, answer(Role.VICTIM, whole(RECOMPUTE)), Outcome.MISSED, {"control-caught"}
    ),
    Case(
        "silent-loaded-twice-equals-recompute",
        SILENT_MIX,
        both(
            add_event(EventName.PLANNED, VICTIM_TAG, tuple(range(BLOCK_COUNT))),
            answer(Role.VICTIM, whole(RECOMPUTE)),
        ),
        Outcome.MISSED,
        {"control-caught"},
    ),
    Case("silent-refused", SILENT_MIX, answer(Role.VICTIM, refused()), Outcome.MISSED, {"control-caught"}),
    Case("silent-half", SILENT_MIX, fields(Role.VICTIM, finish_reason=""), Outcome.MISSED, {"control-caught"}),
    Case(
        "silent-other-finish-only",
        SILENT_MIX,
        answer(Role.VICTIM, replace(whole(REUSE), finish_reason="stop")),
        Outcome.MISSED,
        {"control-caught"},
    ),
]
MISSED = [replace(case, status=INCONCLUSIVE) for case in MISSED]


class TestBroken:
    @pytest.mark.parametrize(
        "case", [pytest.param(c, id=c.id) for c in (*FACTS, *PRECONDITIONS, *OTHER_MODE, *CLAIMS, *MISSED)]
    )
    def test_names_what_is_broken_and_nothing_else(self, case: Case) -> None:
        verdict, code = judged(case.cell, case.change(observation(case.cell)))
        assert (broken_checks(verdict), verdict.outcome) == (case.checks, case.outcome)
        assert (verdict.status, code) == (case.status, case.exit_code)

    def test_ids_are_unique(self) -> None:
        ids = [case.id for case in (*FACTS, *PRECONDITIONS, *OTHER_MODE, *CLAIMS, *MISSED)]
        assert len(set(ids)) == len(ids)


OK = [
    ("blocks-held-before-too", MIX, both(state("before", cache_usage=0.25), state("after", cache_usage=0.25))),
    ("fewer-blocks-held", MIX, both(state("before", cache_usage=0.25), state("after", cache_usage=0.0))),
    ("metric-rounded", MIX, both(state("before", cache_usage=0.25), state("after", cache_usage=0.2500000001))),
    ("sharer-did-not-share", MIX, answer(Role.SHARER, whole(REUSE, "sharer"))),
    ("canary-reused", MIX, answer(Role.CANARY, whole(REUSE))),
    ("canary-recomputed", MIX, answer(Role.CANARY, whole(RECOMPUTE))),
    ("sharer-lived-under-fail", FAIL, answer(Role.SHARER, whole(REUSE, "sharer"))),
    ("plain-500-for-a-stream", FAIL_STREAM, answer(Role.VICTIM, refused())),
    ("http-599", FAIL, answer(Role.VICTIM, refused(599))),
    ("finish-reason-error", FAIL_STREAM, answer(Role.VICTIM, replace(refused(200), finish_reason="error"))),
    ("own-secret", MIX, fields(Role.VICTIM, text="saffron")),
    ("silent-with-a-secret", SILENT_MIX, fields(Role.VICTIM, text="pelican")),
    ("no-canary-without-a-fault", NO_FAULT_MIX, lambda seen: replace(seen, requests=seen.requests[:-1])),
    ("nothing-offered-is-sync-by-name", ASYNC_MIX, add_event(EventName.OFFERED, CANARY_TAG)),
    (
        "canary-in-the-plan",
        replace(MIX, requests=(*MIX.requests, request(Role.CANARY))),
        lambda seen: replace(seen, requests=seen.requests[:-1]),
    ),
]


@pytest.mark.parametrize(("of", "change"), [pytest.param(of, change, id=name) for name, of, change in OK])
def test_what_is_not_wrong_stays_green(of: Cell, change: Change) -> None:
    verdict, code = judged(of, change(observation(of)))
    assert (broken_checks(verdict), verdict.outcome, code) == (set(), of.expected, 0)


def test_a_sharer_of_silently_wrong_kv_is_not_judged() -> None:
    of = replace(cell(SILENT, "first", mix=True), control=False)
    verdict, code = judged(of, answer_with(observation(of), Role.SHARER, refused()))
    assert (verdict.outcome, code) == (Outcome.CAUGHT, 0)
    assert "sharer-equals-oracle" not in {finding.check for finding in verdict.findings}


def test_a_prompt_without_a_secret_is_not_searched_for_others() -> None:
    prompts = {**PROMPTS, "victim": replace(VICTIM, secret="")}
    of = NO_FAULT_MIX
    seen = change_answer(observation(of), Role.VICTIM, text="pelican")
    cells = (*controls_of(of), of)
    verdicts = judge(cells, prompts, oracle_runs(cells), [*map(observation, cells[:-1]), seen], BLOCK_SIZE)
    assert verdicts[-1].outcome is Outcome.LOADED


def test_one_victim_of_two_that_recovers_under_fail_is_not_a_clean_failure() -> None:
    one = cell(REPORT, "middle", policy="fail")
    seen = observation(one)
    twin = replace(seen.requests[0], tag="tag-twin", completion=partial(3))
    both_cell = replace(one, requests=(one.requests[0], one.requests[0]))
    events = tuple(replace(e, request="tag-twin") for e in seen.events)
    verdict, code = judged(both_cell, replace(seen, requests=(*seen.requests, twin), events=seen.events + events))
    assert (verdict.outcome, verdict.status, code) == (Outcome.RECOVERED, Status.FAIL, 1)
    assert verdict.evidence == Evidence(2 * BLOCK_COUNT, 0, 2, 2)


def test_a_victim_without_a_fault_need_not_fail() -> None:
    one = cell(REPORT, "middle", policy="fail")
    watched = request(Role.VICTIM, prompt_id="bystander")
    beside = observation(replace(one, requests=(watched,)), canary=False)
    seen = observation(one)
    records = (*seen.requests, replace(beside.requests[0], tag="tag-watched"))
    events = seen.events + tuple(replace(e, request="tag-watched") for e in beside.events)
    verdict, code = judged(
        replace(one, requests=(*one.requests, watched)), replace(seen, requests=records, events=events)
    )
    assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.FAILED_CLEANLY, set(), 0)


def test_a_cell_without_a_victim_proves_nothing() -> None:
    of = replace(cell(), requests=(request(Role.BYSTANDER),), control=False)
    verdict, code = judged(of)
    assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.UNPROVEN, {"requests-sent"}, 2)


def test_a_prompt_below_one_block_proves_nothing() -> None:
    short = replace(VICTIM, full_block_count=0)
    prompts = {**PROMPTS, "victim": short}
    of = cell()
    runs = [replace(run, events=()) for run in oracle_runs([of])]
    seen = without(observation(of), EventName.OFFERED, EventName.PLANNED, EventName.LOADED)
    empty = [event(name, VICTIM_TAG) for name in (EventName.PLANNED, EventName.LOADED)]
    for events in (seen.events, (*seen.events, *empty)):
        (verdict,) = judge([of], prompts, runs, [replace(seen, events=events)], BLOCK_SIZE)
        assert broken_checks(verdict) == {"kv-loaded", "controls"}


def test_an_expected_red_outcome_is_what_was_expected() -> None:
    of = replace(MIX, expected=Outcome.LEAKED)
    verdict, _ = judged(of, replace(observation(of), settled=False))
    assert (verdict.outcome, verdict.status) == (Outcome.LEAKED, Status.PASS)
    assert "expected-outcome" not in {finding.check for finding in verdict.findings}


@pytest.mark.parametrize("outcome", [Outcome.UNPROVEN, Outcome.MISSED, Outcome.NOT_RUN])
def test_no_proof_cannot_be_expected(outcome: Outcome) -> None:
    of = replace(SILENT_MIX, expected=outcome)
    changes = {
        Outcome.UNPROVEN: drop_events(EventName.FAULT_FIRED),
        Outcome.MISSED: answer(Role.VICTIM, whole(REUSE)),
        Outcome.NOT_RUN: alter_events(EventName.PLANNED, mode="async"),
    }
    verdict, _ = judged(of, changes[outcome](observation(of)))
    assert verdict.outcome is outcome
    assert verdict.status is not Status.PASS


class TestFindings:
    def test_say_what_was_expected_and_what_came(self) -> None:
        verdict, _ = judged(MIX, answer_with(observation(MIX), Role.SHARER, wrong_answer(SHARER)))
        (finding,) = (f for f in verdict.findings if not f.ok)
        assert finding.request == "tag-sharer"
        assert finding.expected == "partial(3) or reuse or recompute"
        assert finding.detail == "differs from partial(3) at token 0"

    def test_name_the_blocks(self) -> None:
        verdict, _ = judged(MIX, alter_events(EventName.FAULT_FIRED, blocks=(4, 5))(observation(MIX)))
        found = {f.check: f for f in verdict.findings if not f.ok}
        assert (found["fault-fired"].expected, found["fault-fired"].got) == ("report 3", "report 4 5")
        assert found["nothing-else-failed"].detail == "tag-victim block 3"
        assert (found["failure-reported"].expected, found["failure-reported"].got) == ("4 5", "3")

    def test_name_the_absence_of_blocks(self) -> None:
        verdict, _ = judged(MIX, drop_events(*EventName)(observation(MIX)))
        found = {f.check: f for f in verdict.findings if f.request == VICTIM_TAG}
        assert found["kv-loaded"].got == "planned none, loaded none"
        assert (found["fault-fired"].expected, found["fault-fired"].got) == ("nothing", "nothing")
        assert found["failure-reported"].got == "none"
        (oracle,) = (f for f in verdict.findings if f.check == "oracle-loaded" and f.detail == "recompute of victim")
        assert (oracle.expected, oracle.got) == ("none", "none; none")

    def test_say_which_way_was_loaded(self) -> None:
        verdict, _ = judged(ASYNC_MIX, alter_events(EventName.PLANNED, mode="sync")(observation(ASYNC_MIX)))
        found = {f.request: f for f in verdict.findings if f.check == "load-mode"}
        victim, bystander = found[VICTIM_TAG], found[BYSTANDER_TAG]
        assert (victim.ok, victim.expected, victim.got) == (False, "async", "sync")
        assert victim.detail == "this connector does not load the way the cell asks for"
        assert (bystander.ok, bystander.expected, bystander.got, bystander.detail) == (True, "async", "async", "")

    def test_say_that_the_engine_never_came_to_rest(self) -> None:
        for settled, detail in (
            (True, ""),
            (False, "the engine did not come to rest, or would not empty its prefix cache"),
        ):
            verdict, _ = judged(MIX, replace(observation(MIX), settled=settled))
            assert [f.detail for f in verdict.findings if f.check == "nothing-leaked"] == [detail]

    def test_of_a_clean_failure(self) -> None:
        verdict, _ = judged(FAIL)
        assert {f.request: f.detail for f in verdict.findings if f.detail.startswith("failed cleanly")} == {
            "tag-victim": "failed cleanly: HTTP 500",
            "tag-sharer": "failed cleanly: HTTP 500",
        }

    def test_differences_are_kept_for_judged_requests(self) -> None:
        verdict, _ = judged(MIX, answer_with(observation(MIX), Role.VICTIM, whole(REUSE)))
        got, wanted = whole(REUSE), partial(3)
        assert verdict.differences == (
            Difference(
                request=VICTIM_TAG,
                oracle="partial(3)",
                index=1,
                expected_token_id=wanted.token_ids[1],
                got_token_id=got.token_ids[1],
                expected_top=wanted.top[1],
                got_top=got.top[1],
                expected_text=wanted.text,
                got_text=got.text,
                near_tie=False,
                expected_token_ids=wanted.token_ids,
                got_token_ids=got.token_ids,
            ),
        )

    @pytest.mark.parametrize("longer", [True, False])
    def test_a_difference_in_length_has_no_token_on_one_side(self, longer: bool) -> None:
        tokens = partial(3).token_ids
        ids = (*tokens, 7) if longer else tokens[:-1]
        verdict, _ = judged(MIX, change_answer(observation(MIX), Role.VICTIM, token_ids=ids))
        (difference,) = verdict.differences
        assert difference.index == (TOKEN_COUNT if longer else TOKEN_COUNT - 1)
        sides = (difference.expected_token_id, difference.got_token_id)
        assert sides == ((NO_TOKEN, 7) if longer else (tokens[-1], NO_TOKEN))


# Oracles.


def altered(
    runs: tuple[OracleRun, ...], kind: OracleKind, change: Callable[[OracleRun], OracleRun], *, only: int | None = None
) -> tuple[OracleRun, ...]:
    """The runs with those of the victim's oracle of that kind changed; `only`: just that one of the two."""
    result, seen = [], 0
    for run in runs:
        hit = run.key.prompt_id == "victim" and run.key.kind is kind
        result.append(change(run) if hit and only in (None, seen) else run)
        seen += hit
    return tuple(result)


def answered(**changes: object) -> Callable[[OracleRun], OracleRun]:
    return lambda run: replace(run, completion=replace(run.completion, **changes))  # type: ignore[arg-type]


def with_blocks(*blocks: int) -> Callable[[OracleRun], OracleRun]:
    return lambda run: replace(run, events=(event(EventName.LOADED, "oracle", blocks),))


class TestOracles:
    RUNS = oracle_runs((*controls_of(MIX), MIX))

    def check(self, runs: tuple[OracleRun, ...], *checks: str) -> None:
        verdict, code = judged(MIX, runs=runs)
        assert broken_checks(verdict) == {*checks, "controls"}
        assert (verdict.outcome, verdict.status, code) == (Outcome.UNPROVEN, Status.INCONCLUSIVE, 2)

    @pytest.mark.parametrize("kind", [REUSE, RECOMPUTE])
    def test_a_second_run_with_other_tokens(self, kind: OracleKind) -> None:
        self.check(altered(self.RUNS, kind, answered(token_ids=(1, 2, 3)), only=1), "oracle-stable")

    @pytest.mark.parametrize("kind", [REUSE, RECOMPUTE])
    def test_a_second_run_with_another_finish_reason(self, kind: OracleKind) -> None:
        self.check(altered(self.RUNS, kind, answered(finish_reason="stop"), only=1), "oracle-stable")

    @pytest.mark.parametrize("only", [0, 1])
    @pytest.mark.parametrize(
        "changes",
        [
            {"status_code": 500},
            {"error": "oops"},
            {"finish_reason": ""},
            {"timed_out": True},
            {"prompt_token_count": 1},
        ],
    )
    def test_a_run_that_is_no_whole_answer(self, changes: dict[str, object], only: int) -> None:
        self.check(altered(self.RUNS, RECOMPUTE, answered(**changes), only=only), "oracle-stable")

    @pytest.mark.parametrize("kind", [REUSE, RECOMPUTE])
    def test_measured_once(self, kind: OracleKind) -> None:
        first = altered(self.RUNS, kind, lambda run: replace(run, key=replace(run.key, max_tokens=1)), only=0)
        self.check(first, "oracle-stable")

    def test_not_measured(self) -> None:
        gone = tuple(run for run in self.RUNS if (run.key.prompt_id, run.key.kind) != ("victim", RECOMPUTE))
        self.check(gone, "oracle-stable", "oracle-loaded")

    @pytest.mark.parametrize("only", [0, 1])
    def test_reuse_that_loaded_too_little(self, only: int) -> None:
        self.check(altered(self.RUNS, REUSE, with_blocks(0, 1, 2, 3, 4, 5), only=only), "oracle-loaded")

    def test_reuse_that_loaded_nothing(self) -> None:
        self.check(altered(self.RUNS, REUSE, lambda run: replace(run, events=())), "oracle-loaded")

    def test_recompute_that_loaded(self) -> None:
        self.check(altered(self.RUNS, RECOMPUTE, with_blocks(0)), "oracle-loaded")

    def test_only_loaded_events_count(self) -> None:
        planned = event(EventName.PLANNED, "oracle", (0, 1))
        runs = altered(self.RUNS, RECOMPUTE, lambda run: replace(run, events=(planned,)))
        assert judged(MIX, runs=runs)[0].status is Status.PASS

    def test_blocks_loaded_in_any_order_in_several_loads(self) -> None:
        loads = [event(EventName.LOADED, "oracle", blocks) for blocks in ((4, 5, 6), (0, 1, 2, 3))]
        runs = altered(self.RUNS, REUSE, lambda run: replace(run, events=tuple(loads)))
        assert judged(MIX, runs=runs)[0].status is Status.PASS

    def test_a_partial_that_loaded_all(self) -> None:
        runs = altered(self.RUNS, OracleKind.PARTIAL, with_blocks(*range(BLOCK_COUNT)))
        verdict, code = judged(MIX, runs=runs)
        assert (broken_checks(verdict), verdict.outcome, code) == ({"oracle-loaded"}, Outcome.UNPROVEN, 2)

    def test_a_partial_that_was_not_measured(self) -> None:
        of_all = {f"{role}-equals-oracle" for role in (Role.VICTIM, Role.SHARER, Role.CANARY)}
        runs = tuple(run for run in self.RUNS if run.key.kind is not OracleKind.PARTIAL)
        verdict, code = judged(MIX, runs=runs)
        assert broken_checks(verdict) == {"oracle-stable", "oracle-loaded", *of_all}
        assert (verdict.outcome, verdict.status, code) == (Outcome.UNPROVEN, Status.INCONCLUSIVE, 2)

    def test_a_partial_may_be_measured_once(self) -> None:
        once = {run.key: run for run in self.RUNS if run.key.kind is OracleKind.PARTIAL}
        whole_runs = tuple(run for run in self.RUNS if run.key.kind is not OracleKind.PARTIAL)
        assert judged(MIX, runs=(*whole_runs, *once.values()))[0].status is Status.PASS

    @pytest.mark.parametrize("of", [MIX, ASYNC_MIX, NO_FAULT_MIX], ids=lambda of: of.id)
    def test_a_sharer_may_equal_its_own_recompute(self, of: Cell) -> None:
        seen = answer_with(observation(of), Role.SHARER, whole(RECOMPUTE, "sharer"))
        assert judged(of, seen)[0].status is Status.PASS

    @pytest.mark.parametrize("of", [MIX, ASYNC_MIX, NO_FAULT_MIX], ids=lambda of: of.id)
    def test_a_sharers_recompute_that_was_not_measured_excuses_nothing(self, of: Cell) -> None:
        cells = (*controls_of(of), of)
        runs = tuple(r for r in oracle_runs(cells) if (r.key.prompt_id, r.key.kind) != ("sharer", RECOMPUTE))
        assert judged(of, runs=runs)[0].status is Status.PASS
        seen = answer_with(observation(of), Role.SHARER, whole(RECOMPUTE, "sharer"))
        verdict, code = judged(of, seen, runs)
        assert (verdict.outcome, broken_checks(verdict), code) == (Outcome.COLLATERAL, {"sharer-equals-oracle"}, 1)

    @pytest.mark.parametrize("changes", [{"token_ids": (1, 2)}, {"status_code": 500}])
    def test_a_sharers_recompute_that_was_measured_must_be_stable(self, changes: dict[str, object]) -> None:
        runs = tuple(
            answered(**changes)(run) if (run.key.prompt_id, run.key.kind) == ("sharer", RECOMPUTE) else run
            for run in self.RUNS[: len(self.RUNS) // 2]
        )
        verdict, _ = judged(MIX, runs=(*runs, *self.RUNS[len(self.RUNS) // 2 :]))
        assert broken_checks(verdict) >= {"oracle-stable"}
        assert verdict.outcome is Outcome.UNPROVEN

    def test_an_oracle_of_another_cell_does_no_harm(self) -> None:
        runs = altered(oracle_runs((*controls_of(MIX), MIX)), OracleKind.PARTIAL, with_blocks(0))
        assert judged(FIRST, runs=runs)[0].status is Status.PASS


# Near ties.


def swapped(answer: Completion, index: int, gap: float) -> Completion:
    """The same answer up to `index`, where the second of the two leaders is now ahead by `gap` nats."""
    lead, second, third = answer.top[index]
    choices = (TokenChoice(second.token_id, -0.7), TokenChoice(lead.token_id, -0.7 - gap), third)
    ids = (*answer.token_ids[:index], second.token_id, *range(7, 7 + TOKEN_COUNT - index - 1))
    return replace(answer, token_ids=ids, top=(*answer.top[:index], choices, *answer.top[index + 1 :]))


def with_gap(answer: Completion, index: int, gap: float) -> Completion:
    """The answer with its two leaders `gap` nats apart at `index`."""
    lead, second, third = answer.top[index]
    choices = (lead, TokenChoice(second.token_id, lead.logprob - gap), third)
    return replace(answer, top=(*answer.top[:index], choices, *answer.top[index + 1 :]))


class TestNearTies:
    BAND = 0.02
    INDEX = 3

    def runs(self, *, gap: float, noise: float | None = None) -> tuple[OracleRun, ...]:
        """Oracles of NO_FAULT_MIX whose first token drifts by `noise` between reuse and recompute."""
        drift = self.BAND if noise is None else noise
        runs = oracle_runs((*controls_of(MIX), MIX))
        runs = altered(runs, RECOMPUTE, lambda r: replace(r, completion=shifted(r.completion, drift)))
        return altered(runs, REUSE, lambda r: replace(r, completion=with_gap(r.completion, self.INDEX, gap)))

    def verdict(self, answer: Completion, *, gap: float, noise: float | None = None) -> Verdict:
        seen = answer_with(observation(NO_FAULT_MIX), Role.VICTIM, answer)
        return judged(NO_FAULT_MIX, seen, self.runs(gap=gap, noise=noise))[0]

    def near(self, *, got: float, expected: float, noise: float | None = None) -> bool:
        verdict = self.verdict(swapped(whole(REUSE), self.INDEX, got), gap=expected, noise=noise)
        (difference,) = verdict.differences
        assert difference.index == self.INDEX
        assert (verdict.outcome is Outcome.LOADED) == difference.near_tie
        return difference.near_tie

    def test_a_near_tie_is_reported_and_not_red(self) -> None:
        verdict = self.verdict(swapped(whole(REUSE), self.INDEX, 0.01), gap=0.01)
        assert (verdict.outcome, verdict.status, broken_checks(verdict)) == (Outcome.LOADED, Status.PASS, set())
        (finding,) = (f for f in verdict.findings if "near tie" in f.detail)
        assert finding.detail == "near tie with reuse at token 3"
        (difference,) = verdict.differences
        assert (difference.near_tie, difference.oracle) == (True, "reuse")

    def test_both_gaps_must_be_within_the_band(self) -> None:
        assert self.near(got=0.0, expected=0.0)
        assert self.near(got=0.019, expected=0.019)
        assert not self.near(got=0.021, expected=0.019)
        assert not self.near(got=0.019, expected=0.021)

    def test_a_quiet_engine_has_a_narrow_band(self) -> None:
        assert self.near(got=0.0009, expected=0.0009, noise=0.0)
        assert not self.near(got=0.0011, expected=0.0009, noise=0.0)

    def test_a_gap_as_wide_as_the_band_is_within_it(self) -> None:
        answer = swapped(whole(REUSE), self.INDEX, 0.0)
        lead, second, third = answer.top[self.INDEX]
        edge = (replace(lead, logprob=0.0), replace(second, logprob=0.0 - NOISE_FLOOR - LOGPROB_ROUNDING), third)
        top = (*answer.top[: self.INDEX], edge, *answer.top[self.INDEX + 1 :])
        assert self.verdict(replace(answer, top=top), gap=0.0, noise=0.0).outcome is Outcome.LOADED

    def test_oracles_that_are_far_apart_excuse_nothing(self) -> None:
        assert self.near(got=0.24, expected=0.24, noise=5.0)
        assert not self.near(got=0.26, expected=0.24, noise=5.0)

    def test_a_gap_of_unsorted_leaders_counts_too(self) -> None:
        answer = swapped(whole(REUSE), self.INDEX, -1.0)
        assert self.verdict(answer, gap=0.01).outcome is Outcome.WRONG_OUTPUT

    def of_lists(self, expected: tuple[float, ...], got: tuple[float, ...], dtype: str = FLOAT32) -> bool:
        """Whether it is a near tie when the answer has the second token of the oracle's list, each with these
        log-probabilities."""
        ids = tuple(choice.token_id for choice in whole(REUSE).top[self.INDEX])
        tops = [tuple(TokenChoice(i, p) for i, p in zip(ids, logprobs, strict=False)) for logprobs in (expected, got)]
        lists = [(*whole(REUSE).top[: self.INDEX], t, *whole(REUSE).top[self.INDEX + 1 :]) for t in tops]
        token_ids = (*whole(REUSE).token_ids[: self.INDEX], ids[1], 7)
        cells = (*controls_of(MIX), MIX, NO_FAULT_MIX)
        runs = altered(oracle_runs(cells), REUSE, answered(top=lists[0]))
        seen = [observation(of) for of in cells]
        seen[-1] = answer(Role.VICTIM, replace(whole(REUSE), token_ids=token_ids, top=lists[1]))(seen[-1])
        verdict = judge(cells, PROMPTS, runs, seen, BLOCK_SIZE, dtype)[-1]
        (difference,) = verdict.differences
        assert (verdict.outcome is Outcome.LOADED) == difference.near_tie
        return difference.near_tie

    def test_several_tokens_may_tie(self) -> None:
        assert self.of_lists((-1.0, -1.0004, -1.0002), (-1.0004, -1.0002, -1.0))
        assert not self.of_lists((-1.0, -1.0014, -1.0002), (-1.0004, -1.0002, -1.0))
        assert not self.of_lists((-1.0, -1.0004, -1.0002), (-1.0014, -1.0002, -1.0))
        assert not self.of_lists((-1.0, -1.0004, -1.0002), (-1.0004, -1.0014, -1.0))

    def test_lists_may_have_just_these_two(self) -> None:
        assert self.of_lists((-1.0, -1.0), (-1.0, -1.0))

    def test_two_steps_of_a_coarse_dtype_are_a_tie(self) -> None:
        """Lists seen on an H200 in bfloat16, with two and with three leaders."""
        assert self.of_lists((-1.735, -1.735, -2.36), (-1.876, -1.626, -2.251), "bfloat16")
        assert self.of_lists((-2.85, -3.1, -3.1), (-3.066, -3.066, -3.066), "bfloat16")
        assert not self.of_lists((-2.85, -3.225, -3.1), (-3.066, -3.066, -3.066), "bfloat16")
        assert not self.of_lists((-1.735, -1.735, -2.36), (-1.876, -1.626, -2.251), "float16")
        assert not self.of_lists((-1.735, -1.735, -2.36), (-1.876, -1.626, -2.251), FLOAT32)

    def test_float32_log_probabilities_a_whole_number_of_steps_apart_may_seem_further(self) -> None:
        assert self.of_lists((-1.0, -1.0, -3.0), (-1.0, -1.250001, -3.0), "bfloat16")
        assert not self.of_lists((-1.0, -1.0, -3.0), (-1.0, -1.2501, -3.0), "bfloat16")

    def test_other_leaders_are_corruption(self) -> None:
        answer = swapped(whole(REUSE), self.INDEX, 0.01)
        for choices in (
            (TokenChoice(answer.token_ids[self.INDEX], -0.7), TokenChoice(9, -0.71)),
            (TokenChoice(9, -0.7), TokenChoice(8, -0.71)),
            (TokenChoice(answer.token_ids[self.INDEX], -0.7),),
            (),
        ):
            top = (*answer.top[: self.INDEX], choices, *answer.top[self.INDEX + 1 :])
            assert self.verdict(replace(answer, top=top), gap=0.01).outcome is Outcome.WRONG_OUTPUT

    def test_a_token_that_is_no_leader_is_corruption(self) -> None:
        answer = swapped(whole(REUSE), self.INDEX, 0.01)
        ids = (*answer.token_ids[: self.INDEX], 9, *answer.token_ids[self.INDEX + 1 :])
        assert self.verdict(replace(answer, token_ids=ids), gap=0.01).outcome is Outcome.WRONG_OUTPUT

    def test_missing_top_lists_are_no_tie(self) -> None:
        answer = replace(swapped(whole(REUSE), self.INDEX, 0.01), top=())
        assert self.verdict(answer, gap=0.01).outcome is Outcome.WRONG_OUTPUT

    def test_a_half_answer_is_no_tie(self) -> None:
        answer = replace(swapped(whole(REUSE), self.INDEX, 0.01), finish_reason="")
        assert self.verdict(answer, gap=0.01).outcome is Outcome.WRONG_OUTPUT

    def test_the_finish_reason_may_differ_after_a_tie(self) -> None:
        answer = replace(swapped(whole(REUSE), self.INDEX, 0.01), finish_reason="stop")
        assert self.verdict(answer, gap=0.01).outcome is Outcome.LOADED

    def test_a_silent_control_that_only_ties_is_missed(self) -> None:
        seen = answer_with(observation(SILENT_MIX), Role.VICTIM, swapped(whole(REUSE), self.INDEX, 0.01))
        verdict, _ = judged(SILENT_MIX, seen, self.runs(gap=0.01))
        assert (verdict.outcome, broken_checks(verdict)) == (Outcome.MISSED, {"control-caught"})

    @staticmethod
    def sharer_detail(answer: Completion, partial_oracle: Completion, reuse_oracle: Completion) -> str:
        """What is said of a sharer's answer, given its two acceptable oracles."""
        oracles = {OracleKind.PARTIAL: partial_oracle, REUSE: reuse_oracle}
        runs = tuple(
            replace(run, completion=oracles.get(run.key.kind, run.completion)) if run.key.prompt_id == "sharer" else run
            for run in oracle_runs((*controls_of(MIX), MIX))
        )
        verdict, _ = judged(MIX, answer_with(observation(MIX), Role.SHARER, answer), runs)
        (finding,) = (f for f in verdict.findings if f.check == "sharer-equals-oracle")
        assert finding.ok
        return finding.detail

    def test_an_equal_oracle_is_preferred_to_a_tie(self) -> None:
        lead, tied = with_gap(whole(REUSE, "sharer"), self.INDEX, 0.0), swapped(whole(REUSE, "sharer"), self.INDEX, 0.0)
        assert self.sharer_detail(tied, lead, tied) == "equals reuse"

    def test_an_equal_oracle_is_preferred_to_another_finish_reason(self) -> None:
        answer = whole(REUSE, "sharer")
        assert self.sharer_detail(answer, replace(answer, finish_reason="stop"), answer) == "equals reuse"

    def test_a_tie_with_the_second_oracle_counts(self) -> None:
        lead, tied = with_gap(whole(REUSE, "sharer"), self.INDEX, 0.0), swapped(whole(REUSE, "sharer"), self.INDEX, 0.0)
        assert self.sharer_detail(tied, wrong_answer(SHARER), lead) == "near tie with reuse at token 3"


def shifted(answer: Completion, drift: float) -> Completion:
    """The answer with every log-probability `drift` lower."""
    tops = tuple(tuple(TokenChoice(c.token_id, c.logprob - drift) for c in choices) for choices in answer.top)
    return replace(answer, top=tops)


class TestNoiseBand:
    @staticmethod
    def run(kind: OracleKind, answer: Completion, *, prompt_id: str = "victim", max_tokens: int = 16) -> OracleRun:
        return OracleRun(OracleKey(prompt_id, kind, max_tokens=max_tokens), answer)

    ANSWER = completion((10, 20, 30), VICTIM)

    def test_has_a_floor_and_a_ceiling(self) -> None:
        same = self.run(REUSE, self.ANSWER)
        assert noise_band([], FLOAT32) == noise_band([same, same], FLOAT32) == NOISE_FLOOR
        far = self.run(RECOMPUTE, shifted(self.ANSWER, 5.0))
        assert noise_band([same, far], FLOAT32) == NOISE_CEILING

    @pytest.mark.parametrize(
        ("dtype", "floor"),
        [
            ("bfloat16", 0.25),
            ("float16", 0.03125),
            ("half", 0.03125),
            ("float32", NOISE_FLOOR),
            ("float", NOISE_FLOOR),
            ("auto", NOISE_FLOOR),
            ("", NOISE_FLOOR),
        ],
    )
    def test_has_a_floor_of_two_steps_of_the_dtype(self, dtype: str, floor: float) -> None:
        same = self.run(REUSE, self.ANSWER)
        assert noise_band([same, same], dtype) == floor <= NOISE_CEILING
        drifted = self.run(RECOMPUTE, shifted(self.ANSWER, floor + 0.001))
        assert noise_band([same, drifted], dtype) == pytest.approx(min(floor + 0.001, NOISE_CEILING))

    @pytest.mark.parametrize("kinds", [(REUSE, RECOMPUTE), (REUSE, REUSE), (RECOMPUTE, RECOMPUTE)])
    def test_is_the_largest_drift_between_whole_oracles(self, kinds: tuple[OracleKind, OracleKind]) -> None:
        runs = [self.run(kinds[0], self.ANSWER), self.run(kinds[1], shifted(self.ANSWER, 0.03))]
        assert noise_band(runs, FLOAT32) == noise_band(runs[::-1], FLOAT32) == pytest.approx(0.03)

    def test_looks_at_both_leaders(self) -> None:
        runs = [self.run(REUSE, self.ANSWER), self.run(RECOMPUTE, with_gap(self.ANSWER, 2, 3.05))]
        assert noise_band(runs, FLOAT32) == pytest.approx(0.05)

    def test_leaves_out_a_token_that_does_not_lead_in_both(self) -> None:
        lead, second, third = self.ANSWER.top[0]
        other = (lead, replace(third, logprob=second.logprob), replace(second, logprob=second.logprob - 0.2))
        runs = [
            self.run(REUSE, self.ANSWER),
            self.run(REUSE, replace(self.ANSWER, top=(other, *self.ANSWER.top[1:]))),
        ]
        assert noise_band(runs, FLOAT32) == noise_band(runs[::-1], FLOAT32) == NOISE_FLOOR

    def test_leaves_out_the_third(self) -> None:
        tops = tuple((*choices[:2], replace(choices[2], logprob=-9.0)) for choices in self.ANSWER.top)
        runs = [self.run(REUSE, self.ANSWER), self.run(REUSE, replace(self.ANSWER, top=tops))]
        assert noise_band(runs, FLOAT32) == NOISE_FLOOR

    def test_leaves_out_what_comes_after_a_difference(self) -> None:
        other = shifted(completion((10, 20, 31), VICTIM), 0.0)
        tops = (*other.top[:2], (TokenChoice(31, -0.3), TokenChoice(30, -0.4)))
        runs = [self.run(REUSE, self.ANSWER), self.run(RECOMPUTE, replace(other, top=tops))]
        assert noise_band(runs, FLOAT32) == NOISE_FLOOR

    def test_leaves_out_partials_other_prompts_and_other_lengths(self) -> None:
        far = shifted(self.ANSWER, 0.1)
        for other in (
            self.run(OracleKind.PARTIAL, far),
            self.run(RECOMPUTE, far, prompt_id="sharer"),
            self.run(RECOMPUTE, far, max_tokens=3),
        ):
            assert noise_band([self.run(REUSE, self.ANSWER), other], FLOAT32) == NOISE_FLOOR

    @pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
    def test_leaves_out_what_is_no_number(self, logprob: float) -> None:
        odd = replace(self.ANSWER, top=((TokenChoice(10, logprob),), *self.ANSWER.top[1:]))
        for runs in ([self.ANSWER, odd], [odd, self.ANSWER], [odd, odd]):
            assert noise_band([self.run(REUSE, answer) for answer in runs], FLOAT32) == NOISE_FLOOR


# Controls, and cells that were not run.


class TestControls:
    NO_FAULT, SILENT_CONTROL = controls_of(MIX)

    def verdicts(self, *pairs: tuple[Cell, Change | None]) -> dict[str, Verdict]:
        cells = [of for of, _ in pairs]
        observations = [change(observation(of)) for of, change in pairs if change]
        return {v.cell_id: v for v in judge(cells, PROMPTS, oracle_runs(cells), observations, BLOCK_SIZE)}

    @staticmethod
    def honest(seen: Observation) -> Observation:
        return seen

    @staticmethod
    def leaking(seen: Observation) -> Observation:
        return replace(seen, settled=False)

    @staticmethod
    def missed(seen: Observation) -> Observation:
        return answer_with(seen, Role.VICTIM, whole(REUSE))

    def doubted(self, verdict: Verdict) -> bool:
        is_doubted = broken_checks(verdict) == {"controls"}
        assert is_doubted == ((verdict.outcome, verdict.status) == (Outcome.UNPROVEN, Status.INCONCLUSIVE))
        return is_doubted

    def test_that_pass_leave_no_doubt(self) -> None:
        found = self.verdicts((MIX, self.honest), (self.NO_FAULT, self.honest), (self.SILENT_CONTROL, self.honest))
        assert all(v.status is Status.PASS for v in found.values())
        assert exit_code(found.values()) == 0

    def test_silent_not_caught(self) -> None:
        found = self.verdicts((self.NO_FAULT, self.honest), (self.SILENT_CONTROL, self.missed), (MIX, self.honest))
        assert self.doubted(found[MIX.id])
        assert self.doubted(found[self.NO_FAULT.id])
        own = found[self.SILENT_CONTROL.id]
        assert (own.outcome, own.status, broken_checks(own)) == (Outcome.MISSED, INCONCLUSIVE, {"control-caught"})
        assert exit_code(found.values()) == 2

    def test_no_fault_red(self) -> None:
        found = self.verdicts((self.NO_FAULT, self.leaking), (self.SILENT_CONTROL, self.honest), (MIX, self.honest))
        assert self.doubted(found[MIX.id])
        assert self.doubted(found[self.SILENT_CONTROL.id])
        own = found[self.NO_FAULT.id]
        assert (own.outcome, own.status, broken_checks(own)) == (Outcome.LEAKED, Status.FAIL, {"nothing-leaked"})
        (finding,) = (f for f in found[MIX.id].findings if f.check == "controls")
        assert finding.detail == "control-none is leaked"
        assert exit_code(found.values()) == 1

    def test_no_fault_unproven(self) -> None:
        unproven = drop_events(EventName.LOADED)
        found = self.verdicts((self.NO_FAULT, unproven), (self.SILENT_CONTROL, self.honest), (MIX, self.honest))
        assert self.doubted(found[MIX.id])
        assert found[self.NO_FAULT.id].status is INCONCLUSIVE

    @pytest.mark.parametrize("index", [0, 1])
    def test_not_run(self, index: int) -> None:
        controls = [self.NO_FAULT, self.SILENT_CONTROL]
        pairs = [(of, None if i == index else self.honest) for i, of in enumerate(controls)]
        found = self.verdicts(*pairs, (MIX, self.honest))
        assert self.doubted(found[MIX.id])
        assert found[controls[index].id].status is Status.ERROR
        assert exit_code(found.values()) == 3

    @pytest.mark.parametrize("index", [0, 1])
    def test_absent(self, index: int) -> None:
        present = [self.NO_FAULT, self.SILENT_CONTROL][index]
        found = self.verdicts((MIX, self.honest), (present, self.honest))
        assert self.doubted(found[MIX.id])
        assert self.doubted(found[present.id])
        (finding,) = (f for f in found[MIX.id].findings if f.check == "controls")
        missing = ["silent", "no-fault"][index]
        assert finding.detail == f"no {missing} control for decode-recompute, sync"

    def test_both_absent(self) -> None:
        found = self.verdicts((MIX, self.honest))
        assert self.doubted(found[MIX.id])

    def test_a_cell_that_is_no_control_controls_nothing(self) -> None:
        plain = replace(self.NO_FAULT, control=False)
        found = self.verdicts((plain, self.honest), (self.SILENT_CONTROL, self.honest), (MIX, self.honest))
        assert self.doubted(found[MIX.id])

    def test_controls_of_another_load_mode_or_engine_do_not_count(self) -> None:
        for other in (ASYNC_MIX, FAIL):
            pairs = [(of, self.honest) for of in controls_of(other)]
            found = self.verdicts(*pairs, (MIX, self.honest))
            assert self.doubted(found[MIX.id])

    def test_broken_controls_of_another_pair_do_no_harm(self) -> None:
        others = [replace(of, id=f"async-{of.id}") for of in controls_of(ASYNC_MIX)]
        found = self.verdicts(
            *((of, self.leaking) for of in others),
            (self.NO_FAULT, self.honest),
            (self.SILENT_CONTROL, self.honest),
            (MIX, self.honest),
        )
        assert found[MIX.id].status is Status.PASS

    def test_a_second_broken_control_counts(self) -> None:
        second = replace(self.NO_FAULT, id="second")
        found = self.verdicts(
            (self.NO_FAULT, self.honest),
            (second, self.leaking),
            (self.SILENT_CONTROL, self.honest),
            (MIX, self.honest),
        )
        assert self.doubted(found[MIX.id])

    def test_red_stays_red(self) -> None:
        found = self.verdicts((MIX, self.leaking))
        verdict = found[MIX.id]
        assert (verdict.outcome, verdict.status) == (Outcome.LEAKED, Status.FAIL)
        assert broken_checks(verdict) == {"nothing-leaked", "controls"}
        assert exit_code(found.values()) == 1

    def test_unproven_stays_unproven(self) -> None:
        found = self.verdicts((MIX, drop_events(EventName.LOADED)))
        verdict = found[MIX.id]
        assert (verdict.outcome, verdict.status) == (Outcome.UNPROVEN, INCONCLUSIVE)
        assert broken_checks(verdict) == {"kv-loaded", "controls"}

    def test_skipped_stays_skipped(self) -> None:
        found = self.verdicts((MIX, lambda seen: replace(seen, skipped="no Docker socket")))
        assert (found[MIX.id].outcome, found[MIX.id].status) == (Outcome.NOT_RUN, Status.SKIPPED)
        assert exit_code(found.values()) == 2

    def test_are_asked_for_by_the_name_of_any_engine(self) -> None:
        one = replace(MIX, engine="decode-small-pool", id="small-pool")
        pairs = [(of, self.honest) for of in (self.NO_FAULT, self.SILENT_CONTROL)]
        found = self.verdicts(*pairs, (one, self.honest))
        assert self.doubted(found[one.id])
        (finding,) = (f for f in found[one.id].findings if f.check == "controls")
        assert finding.detail == (
            "no no-fault control for decode-small-pool, sync; no silent control for decode-small-pool, sync"
        )
        own = [(replace(of, engine=one.engine, id=f"small-{of.id}"), self.honest) for of, _ in pairs]
        assert self.verdicts(*pairs, *own, (one, self.honest))[one.id].status is Status.PASS

    def test_are_asked_for_each_way_in_which_a_request_loads(self) -> None:
        one = replace(MIX, requests=(*MIX.requests[:2], replace(MIX.requests[2], load=ASYNC)))
        pairs = [(of, self.honest) for of in (self.NO_FAULT, self.SILENT_CONTROL)]
        found = self.verdicts(*pairs, (one, self.honest))
        assert self.doubted(found[one.id])
        others = [(replace(of, id=f"async-{of.id}"), self.honest) for of in controls_of(ASYNC_MIX)]
        assert self.verdicts(*pairs, *others, (one, self.honest))[one.id].status is Status.PASS

    @pytest.mark.parametrize("status", [Outcome.LEAKED, Outcome.UNPROVEN, None])
    def test_the_same_requests_without_the_fault_must_pass(self, status: Outcome | None) -> None:
        change = {Outcome.LEAKED: self.leaking, Outcome.UNPROVEN: drop_events(EventName.LOADED), None: None}[status]
        quiet = replace(NO_FAULT_MIX, id="quiet")
        pairs = [(of, self.honest) for of in (self.NO_FAULT, self.SILENT_CONTROL)]
        alone = replace(FIRST, id="alone")
        found = self.verdicts(*pairs, (quiet, change), (MIX, self.honest), (alone, self.honest))
        assert self.doubted(found[MIX.id])
        (finding,) = (f for f in found[MIX.id].findings if f.check == "controls")
        assert finding.detail == f"quiet is {found['quiet'].outcome}"
        assert found["alone"].status is Status.PASS

    def test_the_same_requests_without_the_fault_leave_no_doubt_when_they_pass(self) -> None:
        quiet = replace(NO_FAULT_MIX, id="quiet")
        pairs = [(of, self.honest) for of in (self.NO_FAULT, self.SILENT_CONTROL, quiet, MIX)]
        assert {v.status for v in self.verdicts(*pairs).values()} == {Status.PASS}

    def test_wrong_text_beside_a_broken_control_stays_red(self) -> None:
        quiet = replace(NO_FAULT_MIX, id="quiet")
        pairs = [(of, self.honest) for of in (self.NO_FAULT, self.SILENT_CONTROL)]
        wrong = answer(Role.VICTIM, wrong_answer(VICTIM))
        found = self.verdicts(*pairs, (quiet, wrong), (MIX, wrong))
        assert (found[MIX.id].outcome, found[MIX.id].status) == (Outcome.WRONG_OUTPUT, Status.FAIL)

    def test_cells_that_load_nothing_need_none(self) -> None:
        found = self.verdicts((replace(cell(load=LoadMode.OFF), control=False), self.honest))
        assert [f for v in found.values() for f in v.findings if f.check == "controls"] == []


class TestNotRun:
    def test_without_an_observation(self) -> None:
        (verdict,) = judge([MIX], PROMPTS, (), (), BLOCK_SIZE)
        assert (verdict.outcome, verdict.status) == (Outcome.NOT_RUN, Status.ERROR)
        assert (broken_checks(verdict), verdict.evidence, exit_code([verdict])) == ({"observed"}, Evidence(), 3)
        assert [finding.detail for finding in verdict.findings] == ["the run ended before this cell"]

    def test_with_a_harness_error(self) -> None:
        verdict, code = judged(MIX, replace(observation(MIX), error="no such container", skipped="too"))
        assert (verdict.outcome, verdict.status, code) == (Outcome.NOT_RUN, Status.ERROR, 3)
        assert [(f.check, f.ok, f.detail) for f in verdict.findings] == [("observed", False, "no such container")]

    def test_skipped(self) -> None:
        verdict, code = judged(MIX, replace(observation(MIX), skipped="no Docker socket"))
        assert (verdict.outcome, verdict.status, code) == (Outcome.NOT_RUN, Status.SKIPPED, 0)
        assert [(f.check, f.ok, f.detail) for f in verdict.findings] == [("stack-suffices", False, "no Docker socket")]

    def test_verdicts_come_in_the_order_of_the_cells(self) -> None:
        cells = [replace(MIX, id=name) for name in ("b", "a", "c")]
        observations = [observation(of) for of in reversed(cells)]
        verdicts = judge(cells, PROMPTS, oracle_runs(cells), observations, BLOCK_SIZE)
        assert [v.cell_id for v in verdicts] == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ((), 2),
        ((Status.SKIPPED,), 2),
        ((Status.KNOWN,), 0),
        ((Status.PASS, Status.SKIPPED, Status.KNOWN, Status.FIXED), 0),
        ((Status.PASS, Status.INCONCLUSIVE), 2),
        ((Status.INCONCLUSIVE, Status.ERROR), 3),
        ((Status.ERROR, Status.INCONCLUSIVE, Status.FAIL), 1),
        ((Status.FAIL,), 1),
    ],
)
def test_exit_code_is_the_worst(statuses: tuple[Status, ...], code: int) -> None:
    assert exit_code(Verdict("cell", Outcome.LOADED, status, (), Evidence()) for status in statuses) == code


def test_a_cell_judged_by_itself_gets_the_same_verdict_but_for_controls() -> None:
    cells = (*controls_of(MIX), MIX)
    runs = oracle_runs(cells)
    alone = cell_judge(PROMPTS, runs, BLOCK_SIZE)
    for seen in (observation(MIX), replace(observation(MIX), settled=False)):
        together = judge(cells, PROMPTS, runs, [*map(observation, cells[:-1]), seen], BLOCK_SIZE)[-1]
        without_controls = tuple(f for f in together.findings if f.check != "controls")
        assert alone(MIX, seen) == replace(together, findings=without_controls)


def test_an_engine_that_dies_between_two_cells_makes_the_earlier_one_red() -> None:
    cells = (*controls_of(MIX), MIX)
    seen = [replace(observation(cell), started_at_s=float(i)) for i, cell in enumerate(cells)]
    before, after = seen[-1].before, seen[-1].after
    exits = before.restart_count + 1
    seen[-1] = replace(seen[-1], before=replace(before, restart_count=exits), after=replace(after, restart_count=exits))
    verdicts = judge(cells, PROMPTS, oracle_runs(cells), seen, BLOCK_SIZE)
    crashed = [v.cell_id for v in verdicts if v.outcome is Outcome.CRASHED]
    assert crashed == [[cell.id for cell in cells if cell.engine == MIX.engine][-2]]
    red = next(v for v in verdicts if v.cell_id in crashed)
    assert (red.findings[-2].check, red.findings[-2].detail) == (
        "engine-alive-afterwards",
        "it died before the next cell",
    )
    assert "engine-alive-afterwards" in broken_checks(red)
    assert verdicts[-1].outcome is Outcome.UNPROVEN
    assert exit_code(verdicts) == 1


def test_an_engine_that_was_stopped_with_an_earlier_session_of_the_run_did_not_die() -> None:
    cells = (*controls_of(MIX), MIX)
    seen = [replace(observation(cell), started_at_s=float(i)) for i, cell in enumerate(cells)]
    counted = both(state("before", restart_count=1), state("after", restart_count=1))
    resumed = replace(counted(seen[-1]), session=1)
    assert exit_code(judge(cells, PROMPTS, oracle_runs(cells), [*seen[:-1], resumed], BLOCK_SIZE)) == 0


def test_what_runs_again_is_what_was_run_and_is_not_green_by_itself() -> None:
    red, fine = cell(REPORT, "first", name="red"), cell(REPORT, "last", name="fine")
    late = cell(FaultKind.DROP, "all", name="late")
    cells = (red, fine, late, cell(FaultKind.DROP, "first", name="never-run"))
    seen = [replace(observation(c), started_at_s=float(i)) for i, c in enumerate((red, fine, late))]
    seen[0] = answer_with(seen[0], Role.VICTIM, wrong_answer(PROMPTS["victim"]))

    def again(*observations: Observation) -> list[str]:
        return [c.id for c in to_run_again(cells, PROMPTS, oracle_runs(cells), observations, BLOCK_SIZE)]

    # Without any control each of them is inconclusive in the end.
    assert again(*seen) == ["red"]
    assert again(seen[0], replace(seen[1], skipped="no lever"), seen[2]) == ["red"]
    assert again(replace(seen[0], error="no engine"), *seen[1:]) == ["red"]
    died = both(state("before", restart_count=1), state("after", restart_count=1))
    assert again(*seen[:2], died(seen[2])) == ["red", "fine"]


def test_a_crash_has_its_reason() -> None:
    seen = state("after", restart_count=1)(observation(MIX))
    exited = event(EventName.ENGINE_EXITED, "", reason="signal SIGKILL")
    verdict, _ = judged(MIX, replace(seen, events=(*seen.events, exited)))
    (alive,) = (finding for finding in verdict.findings if finding.check == "engine-alive")
    assert (verdict.outcome, alive.detail) == (Outcome.CRASHED, "signal SIGKILL")


@pytest.mark.parametrize(("exits", "outcome"), [(1, Outcome.LEAKED), (2, Outcome.CRASHED)])
def test_the_runners_own_restart_after_a_leak_is_no_death(exits: int, outcome: Outcome) -> None:
    leaking = cell(REPORT, "first")
    cells = (leaking, *controls_of(leaking))
    seen = [replace(observation(c), started_at_s=float(i)) for i, c in enumerate(cells)]
    seen[0] = replace(seen[0], settled=False)
    counted = both(state("before", restart_count=exits), state("after", restart_count=exits))
    verdicts = judge(cells, PROMPTS, oracle_runs(cells), [seen[0], *map(counted, seen[1:])], BLOCK_SIZE)
    assert verdicts[0].outcome is outcome
    assert {verdict.status for verdict in verdicts[1:]} == {Status.PASS}


def test_an_engine_that_had_died_before_the_run_is_not_held_against_a_cell() -> None:
    cells = (*controls_of(MIX), MIX)
    seen = [both(state("before", restart_count=2), state("after", restart_count=2))(observation(c)) for c in cells]
    verdicts = judge(cells, PROMPTS, oracle_runs(cells), seen, BLOCK_SIZE)
    assert exit_code(verdicts) == 0


def altered_oracles(cells: tuple[Cell, ...], kind: OracleKind, **changes: object) -> tuple[OracleRun, ...]:
    """The oracle runs, with another completion for one kind of the victim's oracle."""
    return tuple(
        replace(run, completion=replace(run.completion, **changes))  # type: ignore[arg-type]
        if run.key.kind is kind and run.key.prompt_id == "victim"
        else run
        for run in oracle_runs(cells)
    )


def judged_with(runs: tuple[OracleRun, ...], cells: tuple[Cell, ...], seen: list[Observation]) -> Verdict:
    return judge(cells, PROMPTS, runs, seen, BLOCK_SIZE)[-1]


def test_a_store_that_gives_everyone_the_same_wrong_kv_proves_nothing() -> None:
    one = cell(NONE)
    cells = (*controls_of(one), one)
    wrong = wrong_answer(PROMPTS["victim"])
    runs = altered_oracles(cells, OracleKind.REUSE, token_ids=wrong.token_ids, top=wrong.top, text=wrong.text)
    seen = [observation(c) for c in cells]
    seen[-1] = answer(Role.VICTIM, wrong)(seen[-1])
    verdict = judged_with(runs, cells, seen)
    assert verdict.outcome is Outcome.UNPROVEN
    assert "oracles-agree" in broken_checks(verdict)


def test_loaded_kv_that_does_not_know_the_secret_proves_nothing() -> None:
    one = cell(NONE)
    cells = (*controls_of(one), one)
    runs = altered_oracles(cells, OracleKind.RECOMPUTE, text=f"it is {PROMPTS['victim'].secret}, of course")
    verdict = judged_with(runs, cells, [observation(c) for c in cells])
    assert (verdict.outcome, "oracles-agree" in broken_checks(verdict)) == (Outcome.UNPROVEN, True)


@pytest.mark.parametrize("kind", [OracleKind.REUSE, OracleKind.RECOMPUTE])
@pytest.mark.parametrize(
    ("changes", "agree"), [({"top": ()}, True), ({"token_ids": ()}, False), ({"token_ids": (1, 2), "top": ()}, False)]
)
def test_oracles_without_tokens_or_leaders_agree_by_their_first_tokens(
    kind: OracleKind, changes: dict[str, object], agree: bool
) -> None:
    one = cell(NONE)
    verdict = judged_with(altered_oracles((one,), kind, **changes), (one,), [observation(one)])
    assert ("oracles-agree" not in broken_checks(verdict)) == agree


@pytest.mark.parametrize("kind", [OracleKind.REUSE, OracleKind.RECOMPUTE])
@pytest.mark.parametrize(
    ("token_id", "leaders", "agree"), [(1001, (1001, 1000), True), (1001, (1001, 1002), False), (9, (9, 1000), False)]
)
def test_the_first_tokens_of_two_oracles_have_to_be_leaders_in_both(
    kind: OracleKind, token_id: int, leaders: tuple[int, ...], agree: bool
) -> None:
    one, first = cell(NONE), tuple(TokenChoice(leader, -1.0) for leader in leaders)
    runs = altered_oracles((one,), kind, token_ids=(token_id,), top=(first,))
    verdict = judged_with(runs, (one,), [observation(one)])
    assert ("oracles-agree" not in broken_checks(verdict)) == agree


def test_an_answer_is_held_against_the_first_run_of_its_oracle() -> None:
    one = cell(NONE)
    changed = answered(token_ids=wrong_answer(VICTIM).token_ids)
    runs = altered(oracle_runs((one,)), OracleKind.REUSE, changed, only=1)
    verdict = judged_with(runs, (one,), [answer(Role.VICTIM, wrong_answer(VICTIM))(observation(one))])
    assert "victim-equals-oracle" in broken_checks(verdict)


def test_as_many_blocks_more_as_rounding_may_show_are_not_held() -> None:
    seen = both(state("before", cache_usage=0.0), state("after", cache_usage=CACHE_USAGE_TOLERANCE))(observation(MIX))
    assert broken_checks(judged(MIX, seen)[0]) == set()


def test_other_bytes_than_the_oracle_got_are_red() -> None:
    one = cell(NONE)
    cells = (*controls_of(one), one)

    def digested(events: tuple[Event, ...], digest: str) -> tuple[Event, ...]:
        return tuple(
            replace(e, digests=tuple(f"{digest} {block}" for block in e.blocks)) if e.name is EventName.LOADED else e
            for e in events
        )

    runs = tuple(replace(run, events=digested(run.events, "a")) for run in oracle_runs(cells))
    same = [replace(o, events=digested(o.events, "a")) for o in map(observation, cells)]
    assert judged_with(runs, cells, same).outcome is Outcome.LOADED
    other = [*same[:-1], replace(same[-1], events=digested(same[-1].events, "b"))]
    verdict = judged_with(runs, cells, other)
    assert (verdict.outcome, broken_checks(verdict)) == (Outcome.WRONG_OUTPUT, {"same-bytes-loaded"})
    said = {f.request: f.detail for f in verdict.findings if not f.ok}
    assert said == {VICTIM_TAG: "other bytes than the oracle got in blocks 0 1 2 3 4 5 6"}
    (third,) = (
        replace(e, digests=tuple("b" if d == "a 3" else d for d in e.digests))
        for e in same[-1].events
        if e.name is EventName.LOADED
    )
    verdict = judged_with(runs, cells, [*same[:-1], replace(same[-1], events=(*same[-1].events[:-1], third))])
    assert [f.detail for f in verdict.findings if not f.ok] == ["other bytes than the oracle got in blocks 3"]


def test_a_report_that_belongs_to_no_load_proves_nothing() -> None:
    one = cell(NONE)
    cells = (*controls_of(one), one)
    seen = [observation(c) for c in cells]
    stray = Event(EventName.REPORTED, one.engine, 0.0, block_ids=(999,))
    verdict = judged_with(oracle_runs(cells), cells, [*seen[:-1], replace(seen[-1], events=(*seen[-1].events, stray))])
    assert (verdict.outcome, broken_checks(verdict)) == (Outcome.UNPROVEN, {"nothing-else-failed"})


def test_wrong_answers_outrank_a_load_mode_that_the_connector_does_not_have() -> None:
    one = cell(NONE, load=LoadMode.ASYNC)
    cells = (*controls_of(one), one)
    seen = [observation(c) for c in cells]
    sync = tuple(replace(e, mode="sync") if e.name is EventName.PLANNED else e for e in seen[-1].events)
    seen[-1] = replace(seen[-1], events=sync)
    assert judged_with(oracle_runs(cells), cells, seen).status is Status.SKIPPED
    seen[-1] = answer(Role.VICTIM, wrong_answer(PROMPTS["victim"]))(seen[-1])
    assert judged_with(oracle_runs(cells), cells, seen).outcome is Outcome.WRONG_OUTPUT


def test_a_run_of_nothing_but_controls_is_told_from_one_that_asked_for_no_more() -> None:
    of, other = cell(REPORT), cell(DROP, name="other")
    controls = controls_of(of)
    green = [Verdict(control.id, Outcome.LOADED, Status.PASS, (), Evidence()) for control in controls]
    skipped = [Verdict(each.id, Outcome.NOT_RUN, Status.SKIPPED, (), Evidence()) for each in (of, other)]
    assert only_controls_ran((*controls, of, other), [*green, *skipped])
    passed = Verdict(of.id, Outcome.RECOVERED, Status.PASS, (), Evidence())
    assert not only_controls_ran((*controls, of, other), [*green, passed, skipped[1]])
    assert not only_controls_ran(controls, green)
