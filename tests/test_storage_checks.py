"""Cells whose fault is done to files: an honest engine is green, and each thing that can be wrong breaks its check."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from harness.faults.storage_kinds import HELD, LONE, MISSES, REASONS, SAVE_ERRORS, SLOW_READ_S, UNSAVED, StorageKind
from harness.judging.judge import judge
from harness.records import (
    Cell,
    Evidence,
    Observation,
    OracleKey,
    OracleKind,
    Outcome,
    Role,
    Status,
    Verdict,
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
    change_events,
    event,
    observation,
    oracle_answer,
    oracle_runs,
    refused,
    without,
    wrong_answer,
)
from tests.storage_builders import storage_cell, storage_observation
from tests.verdicts import CANARY_TAG, RELOAD_TAG, VICTIM_TAG, Change, broken_checks, verdict_of

MISSING, FLIPPED, INDEX_MISSING = StorageKind.PAYLOAD_MISSING, StorageKind.FLIPPED_LAST, StorageKind.INDEX_MISSING
SLOW, ENDLESS, EMPTIED = StorageKind.SLOW_READ, StorageKind.ENDLESS_READ, StorageKind.EMPTIED
FULL, READ_ONLY = StorageKind.FULL_DISK, StorageKind.READ_ONLY
MIDDLE = BLOCK_COUNT // 2


GREEN = [
    pytest.param(
        storage_cell(kind, blocks, load=load, policy=policy, mix=mix), id=f"{policy}-{kind}-{load}-{blocks}-{mix}"
    )
    for policy in ("recompute", "fail")
    for load in (LoadMode.SYNC, LoadMode.ASYNC)
    for kind in (MISSING, FLIPPED, INDEX_MISSING)
    for blocks in ("first", "middle", "last", "all", (1, 5))
    for mix in (False, True)
]
GREEN += [
    pytest.param(storage_cell(kind, blocks, load=load, policy=policy), id=f"{policy}-{kind}-{load}-{blocks}")
    for policy in ("recompute", "fail")
    for load in (LoadMode.SYNC, LoadMode.ASYNC)
    for kind in StorageKind
    if kind in HELD | LONE
    for blocks in ("first", "middle", "last", "all")
]


@pytest.mark.parametrize("of", GREEN)
def test_an_honest_engine_passes(of: Cell) -> None:
    verdict = verdict_of(of, storage_observation(of))
    assert broken_checks(verdict) == set()
    assert (verdict.outcome, verdict.status) == (of.expected, Status.PASS)


@pytest.mark.parametrize("kind", REASONS)
def test_every_kind_has_its_reason(kind: StorageKind) -> None:
    of = storage_cell(kind)
    assert verdict_of(of, storage_observation(of)).outcome is Outcome.RECOVERED


def test_only_misses_and_what_is_just_slow_have_no_reason() -> None:
    assert set(StorageKind) - set(REASONS) == MISSES | {SLOW}
    assert set(SAVE_ERRORS) == UNSAVED < MISSES


@pytest.mark.parametrize(
    ("kind", "blocks", "counts"),
    [
        (MISSING, "all", Evidence(0, BLOCK_COUNT, BLOCK_COUNT, BLOCK_COUNT)),
        (MISSING, "middle", Evidence(BLOCK_COUNT - 1, 1, 1, 1)),
        (INDEX_MISSING, "middle", Evidence(MIDDLE, 0, 0, 1)),
        (SLOW, "middle", Evidence(BLOCK_COUNT, 0, 0, 1)),
        (FULL, "middle", Evidence(MIDDLE, 0, 0, 1)),
        (READ_ONLY, "all", Evidence(0, 0, 0, 1)),
    ],
)
def test_evidence_counts(kind: StorageKind, blocks: str, counts: Evidence) -> None:
    of = storage_cell(kind, blocks)
    assert verdict_of(of, storage_observation(of)).evidence == counts


def answers(role: Role, kind: OracleKind, blocks: int = 0) -> Change:
    """The role answers as another oracle of the victim's prompt."""
    return lambda seen: answer_with(seen, role, oracle_answer(OracleKey("victim", kind, blocks)))


def garbage(role: Role) -> Change:
    return lambda seen: answer_with(seen, role, wrong_answer(VICTIM))


def fails(role: Role) -> Change:
    return lambda seen: answer_with(seen, role, refused())


def drops(*names: EventName, tag: str = VICTIM_TAG) -> Change:
    return lambda seen: change_events(seen, lambda e: None if e.name in names and e.request == tag else e)


def changes(name: EventName, tag: str = VICTIM_TAG, **fields: object) -> Change:
    def change(e: Event) -> Event:
        return replace(e, **fields) if e.name is name and e.request == tag else e  # type: ignore[arg-type]

    return lambda seen: change_events(seen, change)


def adds(*events: Event) -> Change:
    return lambda seen: replace(seen, events=(*seen.events, *events))


def loads_damaged_bytes(seen: Observation) -> Observation:
    """A connector that checks nothing: the block is loaded and nobody hears of it."""
    seen = without(seen, EventName.READ_FAILED, EventName.FAILED, EventName.REPORTED)
    return changes(EventName.LOADED, blocks=tuple(range(BLOCK_COUNT)))(seen)


def digests(kind: str, blocks: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"{kind} {block}" for block in blocks)


def with_digests(of: Cell, seen: Observation, damaged: str) -> Verdict:
    """The verdict where journals have digests: the oracle's, and `damaged` for the victim's damaged block."""
    runs = tuple(
        replace(run, events=tuple(replace(e, digests=digests("sound", e.blocks)) for e in run.events))
        for run in oracle_runs((of,))
    )

    def told(e: Event) -> Event:
        if e.name is not EventName.LOADED:
            return e
        found = digests("sound", e.blocks)
        return replace(
            e, digests=tuple(damaged if d == f"sound {MIDDLE}" and e.request == VICTIM_TAG else d for d in found)
        )

    return judge((of,), PROMPTS, runs, [change_events(seen, told)], BLOCK_SIZE)[0]


def test_damaged_bytes_that_were_loaded_are_red_and_not_just_unproven() -> None:
    of = storage_cell(FLIPPED)
    verdict = with_digests(of, garbage(Role.VICTIM)(loads_damaged_bytes(storage_observation(of))), "damaged")
    assert verdict.outcome is Outcome.WRONG_OUTPUT


def test_other_bytes_in_a_sound_block_are_red() -> None:
    of = storage_cell(FLIPPED, "first")
    verdict = with_digests(of, storage_observation(of), "other")
    assert "same-bytes-loaded" in broken_checks(verdict)
    assert verdict.outcome is Outcome.WRONG_OUTPUT


def on_volume(**fields: object) -> Change:
    return lambda seen: replace(seen, volume=replace(seen.volume, **fields))  # type: ignore[arg-type]


def damage(**fields: object) -> Change:
    return lambda seen: replace(
        seen,
        volume=replace(seen.volume, damages=tuple(replace(d, **fields) for d in seen.volume.damages)),  # type: ignore[arg-type]
    )


def without_request(role: Role) -> Change:
    def change(seen: Observation) -> Observation:
        requests = tuple(record for record in seen.requests if record.planned.role is not role)
        return replace(drops(*EventName, tag=f"tag-{role}")(seen), requests=requests)

    return change


without_reload = without_request(Role.RELOAD)


def damage_one(**fields: object) -> Change:
    """The first damage only."""

    def change(seen: Observation) -> Observation:
        first, *others = seen.volume.damages
        damages = (replace(first, **fields), *others)  # type: ignore[arg-type]
        return replace(seen, volume=replace(seen.volume, damages=damages))

    return change


def saves(name: EventName, **fields: object) -> Change:
    """The producer's journal says something else about the save."""

    def change(seen: Observation) -> Observation:
        events = (replace(e, **fields) if e.name is name else e for e in seen.process.events)  # type: ignore[arg-type]
        return replace(seen, process=replace(seen.process, events=tuple(events)))

    return change


def answers_of_prefill(**fields: object) -> Change:
    return lambda seen: replace(seen, process=replace(seen.process, **fields))  # type: ignore[arg-type]


def prefill_dies(seen: Observation) -> Observation:
    return replace(seen, process=replace(seen.process, events=(*seen.process.events, event(ENGINE_EXITED, ""))))


def finds_one_more(seen: Observation) -> Observation:
    """The block whose save failed is found, and loaded."""
    for name in (EventName.LOOKUP, EventName.PLANNED, EventName.LOADED):
        seen = changes(name, blocks=tuple(range(MIDDLE + 1)))(seen)
    return seen


def finds_and_refuses_one_more(seen: Observation) -> Observation:
    return adds(*(event(name, VICTIM_TAG, (MIDDLE,)) for name in (EventName.FAILED, EventName.REPORTED)))(
        finds_one_more(seen)
    )


def canary_finds_all(seen: Observation) -> Observation:
    return adds(event(EventName.LOOKUP, CANARY_TAG, tuple(range(BLOCK_COUNT))))(seen)


def held(change: Change) -> Change:
    return lambda seen: replace(change(seen), settled=False)


@dataclass(frozen=True)
class Wrong:
    name: str
    change: Change
    outcome: Outcome
    broken: frozenset[str]
    kind: StorageKind = FLIPPED
    policy: str = "recompute"


def wrong(
    name: str, change: Change, outcome: Outcome, *broken: str, kind: StorageKind = FLIPPED, policy: str = "recompute"
) -> Wrong:
    return Wrong(name, change, outcome, frozenset(broken), kind, policy)


SAVED, SAVE_FAILED, ENGINE_EXITED = EventName.SAVED, EventName.SAVE_FAILED, EventName.ENGINE_EXITED
CUT, SILENT_503 = replace(refused(200), error="cut"), replace(refused(503), error="")
ALL_BUT_MIDDLE = tuple(block for block in range(BLOCK_COUNT) if block != MIDDLE)
NOT_ASKED = ("save-answered", "fault-fired")
COLLATERAL, CRASHED = Outcome.COLLATERAL, Outcome.CRASHED
LEAKED, UNPROVEN, UNREPORTED, POISONED, WRONG_OUTPUT = (
    Outcome.LEAKED,
    Outcome.UNPROVEN,
    Outcome.UNREPORTED,
    Outcome.POISONED,
    Outcome.WRONG_OUTPUT,
)
CASES = (
    wrong("nothing damaged", on_volume(damages=()), UNPROVEN, "fault-fired"),
    wrong("file did not change", damage(during="sound"), UNPROVEN, "fault-fired"),
    wrong("another block damaged", damage(block=0), UNPROVEN, "fault-fired"),
    wrong("nothing loaded", changes(EventName.LOADED, blocks=()), UNPROVEN, "kv-loaded"),
    wrong("a sound block not loaded", changes(EventName.LOADED, blocks=(0, 1, 2, 4, 5)), UNPROVEN, "kv-loaded"),
    wrong("less offered", changes(EventName.LOOKUP, blocks=(0, 1)), UNPROVEN, "kv-loaded"),
    wrong("a miss that was found", changes(EventName.LOOKUP, blocks=(0, 1)), UNPROVEN, "kv-loaded", kind=INDEX_MISSING),
    wrong("no lookup at all", drops(EventName.LOOKUP), UNPROVEN, "kv-loaded", kind=INDEX_MISSING),
    wrong("another block failed", adds(event(EventName.FAILED, VICTIM_TAG, (0,))), UNPROVEN, "nothing-else-failed"),
    wrong("another block reported", adds(event(EventName.REPORTED, VICTIM_TAG, (0,))), UNPROVEN, "nothing-else-failed"),
    wrong(
        "a miss reported",
        adds(event(EventName.REPORTED, VICTIM_TAG, (MIDDLE,))),
        UNPROVEN,
        "nothing-else-failed",
        kind=INDEX_MISSING,
    ),
    wrong("reload reports", adds(event(EventName.REPORTED, RELOAD_TAG, (MIDDLE,))), UNPROVEN, "nothing-else-failed"),
    wrong("a miss beyond which was found", finds_one_more, UNPROVEN, "kv-loaded", kind=INDEX_MISSING),
    wrong(
        "a slow block not loaded", changes(EventName.LOADED, blocks=ALL_BUT_MIDDLE), UNPROVEN, "kv-loaded", kind=SLOW
    ),
    wrong("nobody waited", damage(held_s=0.0), UNPROVEN, "fault-fired", kind=ENDLESS),
    wrong("waited too short", damage(held_s=SLOW_READ_S / 2), UNPROVEN, "fault-fired", kind=SLOW),
    wrong("a slow read fails", fails(Role.VICTIM), WRONG_OUTPUT, "victim-equals-oracle", kind=SLOW, policy="fail"),
    wrong(
        "a slow read reported",
        adds(event(EventName.REPORTED, VICTIM_TAG, (MIDDLE,))),
        UNPROVEN,
        "nothing-else-failed",
        kind=SLOW,
    ),
    wrong("an endless read unnoticed", loads_damaged_bytes, UNREPORTED, "failure-reported", kind=ENDLESS),
    wrong("volume emptied in part", damage_one(during="sound"), UNPROVEN, "fault-fired", kind=EMPTIED),
    wrong("disk not full", saves(SAVE_FAILED, blocks=()), UNPROVEN, "fault-fired", kind=FULL),
    wrong("disk full too late", saves(SAVED, blocks=tuple(range(MIDDLE + 1))), UNPROVEN, "fault-fired", kind=FULL),
    wrong("disk full too early", saves(SAVED, blocks=(0,)), UNPROVEN, "fault-fired", kind=FULL),
    wrong("another error", saves(SAVE_FAILED, reason="[Errno 5] I/O"), UNPROVEN, "fault-fired", kind=FULL),
    wrong("save not asked", answers_of_prefill(events=(), saves=()), COLLATERAL, *NOT_ASKED, kind=FULL),
    wrong("prefill fails", answers_of_prefill(saves=(refused(),)), COLLATERAL, "save-answered", kind=FULL),
    wrong("prefill answers in part", answers_of_prefill(saves=(CUT,)), COLLATERAL, "save-answered", kind=FULL),
    wrong("prefill says no more", answers_of_prefill(saves=(SILENT_503,)), COLLATERAL, "save-answered", kind=FULL),
    wrong("prefill dies", prefill_dies, CRASHED, "producer-alive", kind=READ_ONLY),
    wrong("torn block found", finds_one_more, POISONED, "torn-block-found", kind=FULL),
    wrong("torn block found and refused", finds_and_refuses_one_more, POISONED, "torn-block-found", kind=FULL),
    wrong(
        "reload reports what was not saved",
        adds(event(EventName.REPORTED, RELOAD_TAG, (MIDDLE,))),
        UNPROVEN,
        "nothing-else-failed",
        kind=FULL,
    ),
    wrong("torn block found by the canary", canary_finds_all, POISONED, "torn-block-found", kind=FULL),
    wrong(
        "torn block used",
        lambda seen: garbage(Role.VICTIM)(finds_one_more(seen)),
        WRONG_OUTPUT,
        "torn-block-found",
        "victim-equals-oracle",
        kind=FULL,
    ),
    wrong("a full disk fails the decode", fails(Role.VICTIM), WRONG_OUTPUT, "victim-equals-oracle", kind=FULL),
    wrong("canary missing", without_request(Role.CANARY), UNPROVEN, "requests-sent"),
    wrong("reload missing", without_reload, UNPROVEN, "reload-sent"),
    wrong("blocks held, so no reload", held(without_reload), LEAKED, "nothing-leaked"),
    wrong("blocks held after a reload", held(lambda seen: seen), LEAKED, "nothing-leaked"),
    wrong("reload loads less", changes(EventName.LOADED, RELOAD_TAG, blocks=(0,)), UNPROVEN, "kv-loaded"),
    wrong("damaged bytes unnoticed", loads_damaged_bytes, UNREPORTED, "failure-reported"),
    wrong(
        "damaged bytes used",
        lambda seen: garbage(Role.VICTIM)(loads_damaged_bytes(seen)),
        WRONG_OUTPUT,
        "failure-reported",
        "victim-equals-oracle",
    ),
    wrong("another reason", changes(EventName.READ_FAILED, reason="io"), UNREPORTED, "failure-reported"),
    wrong("refused, not reported", drops(EventName.REPORTED), UNREPORTED, "failure-reported"),
    wrong("reported, not refused", drops(EventName.READ_FAILED), UNREPORTED, "failure-reported"),
    wrong(
        "failed, but nothing was refused",
        drops(EventName.READ_FAILED),
        UNREPORTED,
        "failure-reported",
        policy="fail",
    ),
    wrong("victim wrong", garbage(Role.VICTIM), WRONG_OUTPUT, "victim-equals-oracle"),
    wrong("victim equals reuse", answers(Role.VICTIM, OracleKind.REUSE), WRONG_OUTPUT, "victim-equals-oracle"),
    wrong("victim fails", fails(Role.VICTIM), WRONG_OUTPUT, "victim-equals-oracle"),
    wrong("a miss fails", fails(Role.VICTIM), WRONG_OUTPUT, "victim-equals-oracle", kind=INDEX_MISSING, policy="fail"),
    wrong(
        "a miss equals reuse",
        answers(Role.VICTIM, OracleKind.REUSE),
        WRONG_OUTPUT,
        "victim-equals-oracle",
        kind=INDEX_MISSING,
    ),
    wrong("canary wrong", garbage(Role.CANARY), POISONED, "canary-equals-oracle"),
    wrong("canary fails", fails(Role.CANARY), POISONED, "canary-equals-oracle"),
    wrong(
        "canary fails without a bad read",
        drops(*EventName, tag=CANARY_TAG),
        POISONED,
        "canary-equals-oracle",
        policy="fail",
    ),
    wrong("reload wrong", garbage(Role.RELOAD), POISONED, "reload-equals-oracle"),
    wrong("reload recomputes", answers(Role.RELOAD, OracleKind.RECOMPUTE), POISONED, "reload-equals-oracle"),
    wrong("reload fails", fails(Role.RELOAD), POISONED, "reload-equals-oracle", policy="fail"),
    wrong("file not put back", damage(after="broken"), POISONED, "volume-unchanged"),
    wrong(
        "a file more",
        lambda seen: on_volume(after=(*seen.volume.after, VolumeFile("x", 1)))(seen),
        POISONED,
        "volume-unchanged",
    ),
    wrong("a file less", lambda seen: on_volume(after=seen.volume.after[1:])(seen), POISONED, "volume-unchanged"),
    wrong(
        "a file of another size",
        lambda seen: on_volume(after=(VolumeFile("blocks/0", 99), *seen.volume.after[1:]))(seen),
        POISONED,
        "volume-unchanged",
    ),
    wrong("no listing", on_volume(before=(), after=()), POISONED, "volume-unchanged"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_can_be_wrong(case: Wrong) -> None:
    of = storage_cell(case.kind, policy=case.policy)
    verdict = verdict_of(of, case.change(storage_observation(of)))
    assert (broken_checks(verdict), verdict.outcome) == (case.broken, case.outcome)


def test_policy_fail_may_use_a_canary_that_is_right() -> None:
    of = storage_cell(FLIPPED, policy="fail")
    seen = answers(Role.CANARY, OracleKind.RECOMPUTE)(storage_observation(of))
    assert verdict_of(of, seen).status is Status.PASS


@pytest.mark.parametrize("load", LoadMode.__members__.values())
def test_a_bystander_must_not_fail(load: LoadMode) -> None:
    if load is not LoadMode.OFF:
        of = storage_cell(FLIPPED, policy="fail", load=load, mix=True)
        assert verdict_of(of, fails(Role.BYSTANDER)(storage_observation(of))).outcome is Outcome.COLLATERAL


def test_a_control_in_storage_is_no_control() -> None:
    controls = (replace(storage_cell(MISSING), control=True), cell(FaultKind.SILENT, name="control-silent"))
    seen = [storage_observation(controls[0]), observation(controls[1])]
    verdict = judge(controls, PROMPTS, oracle_runs(controls), seen, BLOCK_SIZE)[0]
    assert "controls" in broken_checks(verdict)


@pytest.mark.parametrize("kept", [FaultKind.NONE, FaultKind.SILENT])
def test_cells_in_storage_need_both_controls(kept: FaultKind) -> None:
    of = storage_cell(FLIPPED)
    cells = (cell(kept, name="control"), of)
    verdict = judge(cells, PROMPTS, oracle_runs(cells), [observation(cells[0]), storage_observation(of)], BLOCK_SIZE)[1]
    assert (verdict.outcome, verdict.status) == (Outcome.UNPROVEN, Status.INCONCLUSIVE)
    assert broken_checks(verdict) == {"controls"}


def test_other_cells_have_no_findings_about_storage() -> None:
    verdict = verdict_of(cell(FaultKind.REPORT), observation(cell(FaultKind.REPORT)))
    assert not {"volume-unchanged", "reload-sent"} & {finding.check for finding in verdict.findings}
    assert observation(cell()).volume == VolumeRecord()
