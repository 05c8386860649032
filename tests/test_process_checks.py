"""Cells whose fault is done to a process: honest engines pass, and each thing that can be wrong breaks its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from harness.faults.process_kinds import ProcessKind, save_tag
from harness.judging.judge import judge
from harness.records import (
    Completion,
    Evidence,
    Observation,
    OracleKey,
    OracleKind,
    Outcome,
    ProcessRecord,
    Role,
    Status,
    VolumeFile,
    VolumeRecord,
)
from services.faults import FaultKind, LoadMode
from services.journal import Event, EventName
from tests.builders import (
    BLOCK_COUNT,
    BLOCK_SIZE,
    PROMPTS,
    VICTIM,
    answer_with,
    cell,
    change_answer,
    change_events,
    event,
    observation,
    oracle_answer,
    oracle_runs,
    refused,
    wrong_answer,
)
from tests.process_builders import FILES, LEFT, RESET, SAVED, process_cell, process_observation
from tests.verdicts import CANARY_TAG, RELOAD_TAG, VICTIM_TAG, Change, broken_checks, verdict_of

SAVING, PUBLISHING, PAUSED, KILLED, GIVEN_UP = (
    ProcessKind.PREFILL_KILLED_SAVING,
    ProcessKind.PREFILL_KILLED_PUBLISHING,
    ProcessKind.PREFILL_PAUSED_SAVING,
    ProcessKind.DECODE_KILLED_LOADING,
    ProcessKind.DECODE_PAUSED_LOADING,
)
MIDDLE = BLOCK_COUNT // 2
UNPROVEN, POISONED, WRONG_OUTPUT, CRASHED, HUNG, LEAKED, COLLATERAL = (
    Outcome.UNPROVEN,
    Outcome.POISONED,
    Outcome.WRONG_OUTPUT,
    Outcome.CRASHED,
    Outcome.HUNG,
    Outcome.LEAKED,
    Outcome.COLLATERAL,
)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("load", [LoadMode.SYNC, LoadMode.ASYNC])
@pytest.mark.parametrize("kind", ProcessKind)
@pytest.mark.parametrize("blocks", ["first", "middle", "last", (1,)])
def test_honest_engines_pass(policy: str, load: LoadMode, kind: ProcessKind, blocks: str) -> None:
    of = process_cell(kind, blocks, load=load, policy=policy, bystander=kind in (SAVING, PUBLISHING, PAUSED))
    verdict = verdict_of(of, process_observation(of))
    assert broken_checks(verdict) == set()
    assert (verdict.outcome, verdict.status) == (of.expected, Status.PASS)


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        (SAVING, Evidence(MIDDLE, 0, 0, 1)),
        (PAUSED, Evidence(MIDDLE, 0, 0, 1)),
        (KILLED, Evidence(0, 0, 0, 1)),
        (GIVEN_UP, Evidence(BLOCK_COUNT, 0, 0, 1)),
    ],
)
def test_evidence_counts(kind: ProcessKind, counts: Evidence) -> None:
    of = process_cell(kind)
    assert verdict_of(of, process_observation(of)).evidence == counts


# Changes.


def garbage(role: Role) -> Change:
    return lambda seen: answer_with(seen, role, wrong_answer(VICTIM))


def answers(role: Role, kind: OracleKind, blocks: int = 0) -> Change:
    """The role answers as another oracle of the victim's prompt."""
    return lambda seen: answer_with(seen, role, oracle_answer(OracleKey("victim", kind, blocks)))


def gets(role: Role, answer: Completion) -> Change:
    return lambda seen: answer_with(seen, role, answer)


def answer(role: Role, **fields: object) -> Change:
    return lambda seen: change_answer(seen, role, **fields)


def both_journals(change: Callable[[Event], Event | None]) -> Change:
    def changed(seen: Observation) -> Observation:
        of_producer = tuple(e for e in map(change, seen.process.events) if e is not None)
        return replace(change_events(seen, change), process=replace(seen.process, events=of_producer))

    return changed


def drops(*names: EventName, tag: str | None = None) -> Change:
    return both_journals(lambda e: None if e.name in names and tag in (None, e.request) else e)


def changes(name: EventName, tag: str | None = None, **fields: object) -> Change:
    def change(e: Event) -> Event:
        return replace(e, **fields) if e.name is name and tag in (None, e.request) else e  # type: ignore[arg-type]

    return both_journals(change)


def inserts(new: EventName, tag: str, before: EventName) -> Change:
    """A line more in both journals, before the first of a name."""

    def into(events: tuple[Event, ...]) -> tuple[Event, ...]:
        at = next((i for i, e in enumerate(events) if e.name is before), len(events))
        return (*events[:at], event(new, tag, (0,)), *events[at:])

    return lambda seen: replace(
        seen, events=into(seen.events), process=replace(seen.process, events=into(seen.process.events))
    )


def at_strike(there: Callable[[int, bool], bool]) -> Change:
    """What lay on the volume when the process was struck, by block, payload (False) or index entry (True)."""

    def changed(seen: Observation) -> Observation:
        damages = tuple(
            replace(d, during="sound" if there(d.block, d.file.startswith("index/")) else "nothing")
            for d in seen.volume.damages
        )
        return replace(seen, volume=replace(seen.volume, damages=damages))

    return changed


def volume(**fields: object) -> Change:
    return lambda seen: replace(seen, volume=replace(seen.volume, **fields))  # type: ignore[arg-type]


def a_file_changed(seen: Observation) -> Observation:
    first, *others = seen.volume.damages
    return volume(damages=(replace(first, after="other bytes"), *others))(seen)


def saves(*given: Completion) -> Change:
    return lambda seen: replace(seen, process=replace(seen.process, saves=given))


def without(role: Role) -> Change:
    def changed(seen: Observation) -> Observation:
        requests = tuple(record for record in seen.requests if record.planned.role is not role)
        return replace(drops(*EventName, tag=f"tag-{role}")(seen), requests=requests)

    return changed


def after(**fields: object) -> Change:
    return lambda seen: replace(seen, after=replace(seen.after, **fields))  # type: ignore[arg-type]


def gets_more(seen: Observation) -> Observation:
    """A block that is not published is found, and loaded."""
    for name in (EventName.LOOKUP, EventName.PLANNED, EventName.LOADED):
        seen = changes(name, VICTIM_TAG, blocks=tuple(range(MIDDLE + 1)))(seen)
    return seen


def finds_more(seen: Observation) -> Observation:
    """An index entry for the struck block, too: it is looked up, planned, and its load fails."""
    found = tuple(range(MIDDLE + 1))
    for name in (EventName.LOOKUP, EventName.PLANNED):
        seen = changes(name, VICTIM_TAG, blocks=found)(seen)
    return at_strike(lambda block, is_index: block < MIDDLE + is_index)(seen)


@dataclass(frozen=True)
class Wrong:
    name: str
    kind: ProcessKind
    change: Change
    outcome: Outcome
    broken: frozenset[str]
    policy: str = "recompute"


def wrong(
    name: str, kind: ProcessKind, change: Change, outcome: Outcome, *broken: str, policy: str = "recompute"
) -> Wrong:
    return Wrong(name, kind, change, outcome, frozenset(broken), policy)


CASES = (
    # The fault did not fire as planned.
    *(wrong("never stopped", kind, drops(EventName.HELD), UNPROVEN, "fault-fired") for kind in ProcessKind),
    *(
        wrong("another block", kind, changes(EventName.HELD, blocks=(0,)), UNPROVEN, "fault-fired")
        for kind in ProcessKind
    ),
    *(
        wrong("another point", kind, changes(EventName.HELD, reason="elsewhere"), UNPROVEN, "fault-fired")
        for kind in ProcessKind
    ),
    *(wrong("not killed", kind, drops(EventName.ENGINE_EXITED), UNPROVEN, "fault-fired") for kind in (SAVING, KILLED)),
    *(
        wrong("died first", kind, inserts(EventName.ENGINE_EXITED, "", EventName.HELD), UNPROVEN, "fault-fired")
        for kind in (SAVING, KILLED)
    ),
    *(wrong("not back", kind, drops(EventName.ENGINE_READY), UNPROVEN, "fault-fired") for kind in (SAVING, KILLED)),
    *(
        wrong("not paused", kind, drops(EventName.ENGINE_PAUSED), UNPROVEN, "fault-fired")
        for kind in (PAUSED, GIVEN_UP)
    ),
    *(
        wrong("not resumed", kind, drops(EventName.ENGINE_RESUMED), UNPROVEN, "fault-fired")
        for kind in (PAUSED, GIVEN_UP)
    ),
    *(
        wrong("busy while paused", kind, inserts(EventName.OFFERED, "x", EventName.ENGINE_RESUMED), UNPROVEN, *broken)
        for kind, broken in ((PAUSED, ["fault-fired"]), (GIVEN_UP, ["fault-fired"]))
    ),
    wrong(
        "saved before it was killed",
        SAVING,
        inserts(EventName.SAVED, save_tag(process_cell(SAVING).id), EventName.ENGINE_EXITED),
        UNPROVEN,
        "fault-fired",
    ),
    wrong(
        "loaded before it was killed",
        KILLED,
        inserts(EventName.LOADED, VICTIM_TAG, EventName.ENGINE_EXITED),
        UNPROVEN,
        "fault-fired",
    ),
    wrong(
        "went on before it was paused",
        PAUSED,
        inserts(EventName.SAVED, save_tag(process_cell(PAUSED).id), EventName.ENGINE_PAUSED),
        UNPROVEN,
        "fault-fired",
    ),
    wrong(
        "paused twice", GIVEN_UP, inserts(EventName.ENGINE_PAUSED, "", EventName.ENGINE_PAUSED), UNPROVEN, "fault-fired"
    ),
    wrong(
        "another engine life",
        PAUSED,
        lambda seen: replace(seen, process=replace(seen.process, events=(*seen.process.events, event_of_exit()))),
        UNPROVEN,
        "fault-fired",
    ),
    wrong("payload too early", SAVING, at_strike(lambda b, i: b < MIDDLE + (not i)), UNPROVEN, "fault-fired"),
    wrong("payload too late", PUBLISHING, at_strike(lambda b, _: b < MIDDLE), UNPROVEN, "fault-fired"),
    wrong("files not seen", SAVING, volume(damages=()), UNPROVEN, "fault-fired"),
    # Nothing was loaded, or something else.
    wrong("no lookup", SAVING, drops(EventName.LOOKUP, tag=VICTIM_TAG), UNPROVEN, "kv-loaded"),
    wrong("found less", SAVING, changes(EventName.LOOKUP, VICTIM_TAG, blocks=(0,)), UNPROVEN, "kv-loaded"),
    wrong("planned less", PAUSED, changes(EventName.PLANNED, VICTIM_TAG, blocks=(0,)), UNPROVEN, "kv-loaded"),
    wrong("loaded less", PAUSED, changes(EventName.LOADED, VICTIM_TAG, blocks=(0,)), UNPROVEN, "kv-loaded"),
    wrong("never planned", KILLED, drops(EventName.PLANNED, tag=VICTIM_TAG), UNPROVEN, "kv-loaded"),
    wrong("decode found less", GIVEN_UP, changes(EventName.LOOKUP, VICTIM_TAG, blocks=(0,)), UNPROVEN, "kv-loaded"),
    wrong("canary loads less", KILLED, changes(EventName.LOADED, CANARY_TAG, blocks=(0,)), UNPROVEN, "kv-loaded"),
    wrong("reload loads less", SAVING, changes(EventName.LOADED, RELOAD_TAG, blocks=(0,)), UNPROVEN, "kv-loaded"),
    wrong("reload plans less", GIVEN_UP, changes(EventName.PLANNED, RELOAD_TAG, blocks=(0,)), UNPROVEN, "kv-loaded"),
    wrong("no reload", KILLED, without(Role.RELOAD), UNPROVEN, "reload-sent"),
    wrong("no canary", PAUSED, without(Role.CANARY), UNPROVEN, "requests-sent"),
    # Claims.
    wrong(
        "index before payload",
        SAVING,
        finds_more,
        POISONED,
        "published-whole",
        "kv-loaded",
    ),
    wrong(
        "published late",
        SAVING,
        at_strike(lambda b, i: b < MIDDLE - i),
        POISONED,
        "published-whole",
        "nothing-unpublished",
    ),
    wrong("an unpublished block", PUBLISHING, gets_more, POISONED, "nothing-unpublished"),
    wrong(
        "an unpublished block, and wrong text",
        PUBLISHING,
        lambda seen: garbage(Role.VICTIM)(gets_more(seen)),
        POISONED,
        "nothing-unpublished",
        "victim-equals-oracle",
    ),
    wrong(
        "an unpublished block that fails",
        PAUSED,
        lambda seen: changes(EventName.LOADED, VICTIM_TAG, blocks=tuple(range(MIDDLE)))(gets_more(seen)),
        POISONED,
        "nothing-unpublished",
    ),
    wrong("victim wrong", SAVING, garbage(Role.VICTIM), WRONG_OUTPUT, "victim-equals-oracle"),
    wrong(
        "victim equals reuse",
        PAUSED,
        answers(Role.VICTIM, OracleKind.REUSE),
        WRONG_OUTPUT,
        "victim-equals-oracle",
    ),
    wrong("victim fails", PUBLISHING, gets(Role.VICTIM, refused()), WRONG_OUTPUT, "victim-equals-oracle"),
    wrong(
        "victim fails under fail",
        SAVING,
        gets(Role.VICTIM, refused()),
        WRONG_OUTPUT,
        "victim-equals-oracle",
        policy="fail",
    ),
    wrong(
        "victim waits for the producer",
        PAUSED,
        answer(Role.VICTIM, timed_out=True),
        HUNG,
        "in-time",
    ),
    wrong("bystander wrong", PAUSED, garbage(Role.BYSTANDER), COLLATERAL, "bystander-equals-oracle"),
    wrong("text from a dead engine", KILLED, answer(Role.VICTIM, text="a"), WRONG_OUTPUT, "victim-got-nothing"),
    wrong("tokens from a dead engine", KILLED, answer(Role.VICTIM, token_ids=(1,)), WRONG_OUTPUT, "victim-got-nothing"),
    wrong(
        "an end from a dead engine",
        KILLED,
        answer(Role.VICTIM, finish_reason="stop"),
        WRONG_OUTPUT,
        "victim-got-nothing",
    ),
    wrong(
        "an answer from a dead engine",
        KILLED,
        answer(Role.VICTIM, broken_off=False),
        WRONG_OUTPUT,
        "victim-got-nothing",
    ),
    wrong(
        "an answer from a paused engine",
        GIVEN_UP,
        answer(Role.VICTIM, timed_out=False),
        WRONG_OUTPUT,
        "victim-got-nothing",
    ),
    wrong("a dead engine is waited for", KILLED, answer(Role.VICTIM, timed_out=True), HUNG, "in-time"),
    wrong("not alive afterwards", KILLED, after(healthy=False), CRASHED, "engine-alive"),
    wrong("died twice", KILLED, after(restart_count=2), CRASHED, "engine-alive"),
    wrong("died of a pause", GIVEN_UP, after(restart_count=1), CRASHED, "engine-alive"),
    wrong("decode died with the producer", SAVING, after(restart_count=1), CRASHED, "engine-alive"),
    wrong("the save fails again", SAVING, saves(RESET, refused()), CRASHED, "producer-serves"),
    wrong("the save ends in an error", SAVING, saves(RESET, replace(SAVED, error="x")), CRASHED, "producer-serves"),
    wrong("the paused save fails", PAUSED, saves(RESET), CRASHED, "producer-serves"),
    wrong("no save", PAUSED, saves(), CRASHED, "producer-serves"),
    wrong("canary wrong", KILLED, garbage(Role.CANARY), POISONED, "canary-equals-oracle"),
    wrong("canary hangs", GIVEN_UP, answer(Role.CANARY, timed_out=True), HUNG, "in-time"),
    wrong("canary fails", GIVEN_UP, gets(Role.CANARY, refused()), POISONED, "canary-equals-oracle", policy="fail"),
    wrong("reload wrong", SAVING, garbage(Role.RELOAD), POISONED, "reload-equals-oracle"),
    wrong("a file missing", SAVING, volume(after=FILES[1:]), POISONED, "volume-unchanged"),
    wrong("a file missing after a load", KILLED, volume(after=FILES[1:]), POISONED, "volume-unchanged"),
    wrong(
        "a file of another size",
        PAUSED,
        volume(after=(replace(FILES[0], size_bytes=1), *FILES[1:])),
        POISONED,
        "volume-unchanged",
    ),
    wrong("a file changed by a load", KILLED, a_file_changed, POISONED, "volume-unchanged"),
    wrong(
        "two unfinished files",
        SAVING,
        volume(after=(*FILES, LEFT, VolumeFile("b.tmp", 1))),
        POISONED,
        "volume-unchanged",
    ),
    wrong("an unfinished file of a pause", PAUSED, volume(after=(*FILES, LEFT)), POISONED, "volume-unchanged"),
    wrong("an unfinished file of a load", KILLED, volume(after=(*FILES, LEFT)), POISONED, "volume-unchanged"),
    wrong("no files at all", GIVEN_UP, volume(before=(), after=()), POISONED, "volume-unchanged"),
    wrong("a request is left", GIVEN_UP, after(running_count=1), LEAKED, "nothing-leaked"),
    wrong("blocks are left", GIVEN_UP, after(cache_usage=0.1), LEAKED, "nothing-leaked"),
)


def event_of_exit() -> Event:
    return event(EventName.ENGINE_EXITED, "")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}: {case.name}")
def test_what_can_be_wrong(case: Wrong) -> None:
    of = process_cell(case.kind, policy=case.policy, bystander=case.kind in (SAVING, PUBLISHING, PAUSED))
    verdict = verdict_of(of, case.change(process_observation(of)))
    assert (broken_checks(verdict), verdict.outcome) == (case.broken, case.outcome)


def test_a_load_that_fails_is_no_part_of_an_interrupted_save() -> None:
    of = process_cell(PAUSED, policy="fail")
    failed = event(EventName.FAILED, VICTIM_TAG, (0,))
    seen = process_observation(of)
    assert broken_checks(verdict_of(of, replace(seen, events=(*seen.events, failed)))) == {"nothing-else-failed"}


def test_an_unfinished_file_of_before_may_go_or_stay() -> None:
    of = process_cell(PAUSED)
    for after_it in (FILES, (*FILES, LEFT)):
        seen = volume(before=(*FILES, LEFT), after=after_it)(process_observation(of))
        assert verdict_of(of, seen).status is Status.PASS


def test_a_prompt_that_is_too_short_proves_nothing() -> None:
    of = process_cell(SAVING, (BLOCK_COUNT,))
    at_first = process_cell(SAVING, "first")
    seen = replace(process_observation(at_first), cell_id=of.id)
    verdict = verdict_of(of, seen)
    assert verdict.status is not Status.PASS
    assert "fault-fired" in broken_checks(verdict)


def test_other_cells_have_no_findings_about_processes() -> None:
    verdict = verdict_of(cell(FaultKind.REPORT), observation(cell(FaultKind.REPORT)))
    own = {"producer-serves", "published-whole", "victim-got-nothing", "volume-unchanged", "reload-sent"}
    assert not own & {finding.check for finding in verdict.findings}
    seen = observation(cell())
    assert (seen.volume, seen.process) == (VolumeRecord(), ProcessRecord())


def test_a_control_that_strikes_a_process_is_no_control() -> None:
    controls = (replace(process_cell(PAUSED), control=True), cell(FaultKind.SILENT, name="control-silent"))
    seen = [process_observation(controls[0]), observation(controls[1])]
    verdict = judge(controls, PROMPTS, oracle_runs(controls), seen, BLOCK_SIZE)[0]
    assert "controls" in broken_checks(verdict)
