"""What the findings of cells with a struck process say, word for word; as test_findings.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.faults.process_kinds import ProcessKind
from harness.records import Finding, Observation, ProcessRecord, Role, Verdict, VolumeRecord
from services.journal import EventName
from tests.builders import answer_with, event, refused, without
from tests.process_builders import FILES, LEFT, process_cell, process_observation
from tests.verdicts import lines, told, verdict_of

CHECKS = {
    "engine-alive",
    "fault-fired",
    "kv-loaded",
    "nothing-unpublished",
    "producer-serves",
    "published-whole",
    "victim-got-nothing",
    "volume-unchanged",
}
SAVING, PAUSED = ProcessKind.PREFILL_KILLED_SAVING, ProcessKind.PREFILL_PAUSED_SAVING
KILLED, GIVEN_UP = ProcessKind.DECODE_KILLED_LOADING, ProcessKind.DECODE_PAUSED_LOADING

HONEST = {
    SAVING: """
engine-alive: expected 0 exits, healthy; got 0 exits, healthy
producer-serves: expected HTTP 200
published-whole: expected 0 1 2; got 0 1 2
nothing-unpublished of tag-victim
volume-unchanged: expected 14 files; got 14 files
fault-fired: expected held, engine_exited, engine_ready; payload of block 3; \
got held (payload of block 3), engine_exited, engine_ready
fault-fired: payloads on the volume when the producer was struck: expected 0 1 2; got 0 1 2
kv-loaded of tag-victim: expected blocks 0 1 2; got found 0 1 2, planned 0 1 2, loaded 0 1 2
kv-loaded of tag-reload: expected blocks 0 1 2 3 4 5 6; got planned 0 1 2 3 4 5 6, loaded 0 1 2 3 4 5 6
""",
    PAUSED: """
engine-alive: expected 0 exits, healthy; got 0 exits, healthy
producer-serves: expected HTTP 200
published-whole: expected 0 1 2; got 0 1 2
nothing-unpublished of tag-victim
volume-unchanged: expected 14 files; got 14 files
fault-fired: expected held, engine_paused, engine_resumed; payload of block 3; \
got held (payload of block 3), engine_paused, engine_resumed, saved
fault-fired: payloads on the volume when the producer was struck: expected 0 1 2; got 0 1 2
kv-loaded of tag-victim: expected blocks 0 1 2; got found 0 1 2, planned 0 1 2, loaded 0 1 2
kv-loaded of tag-reload: expected blocks 0 1 2 3 4 5 6; got planned 0 1 2 3 4 5 6, loaded 0 1 2 3 4 5 6
""",
    KILLED: """
engine-alive: expected at most 1 exits, healthy; got 1 exits, healthy
volume-unchanged: expected 14 files; got 14 files
fault-fired: expected held, engine_exited, engine_ready; load of block 3; \
got held (load of block 3), engine_exited, engine_ready
kv-loaded of tag-victim: expected blocks 0 1 2 3 4 5 6; \
got found 0 1 2 3 4 5 6, planned 0 1 2 3 4 5 6, loaded none
kv-loaded of tag-canary: expected blocks 0 1 2 3 4 5 6; got planned 0 1 2 3 4 5 6, loaded 0 1 2 3 4 5 6
kv-loaded of tag-reload: expected blocks 0 1 2 3 4 5 6; got planned 0 1 2 3 4 5 6, loaded 0 1 2 3 4 5 6
victim-got-nothing of tag-victim: expected a broken connection, no text; got HTTP 0: Connection reset by peer; text ''
""",
    GIVEN_UP: """
engine-alive: expected 0 exits, healthy; got 0 exits, healthy
volume-unchanged: expected 14 files; got 14 files
fault-fired: expected held, engine_paused, engine_resumed; load of block 3; \
got held (load of block 3), engine_paused, engine_resumed, loaded
kv-loaded of tag-victim: expected blocks 0 1 2 3 4 5 6; \
got found 0 1 2 3 4 5 6, planned 0 1 2 3 4 5 6, loaded 0 1 2 3 4 5 6
kv-loaded of tag-reload: expected blocks 0 1 2 3 4 5 6; got planned 0 1 2 3 4 5 6, loaded 0 1 2 3 4 5 6
victim-got-nothing of tag-victim: expected nothing until the client gives up; \
got HTTP 0: no complete answer within 6 s; text ''
""",
}

BROKEN_SAVE = """
producer-serves: HTTP 500: InternalServerError: KV load failed: expected HTTP 200 (broken)
published-whole: index entries on the volume when the producer was struck: expected 0 1 2; got 6 (broken)
nothing-unpublished of tag-victim: blocks 0 1 2 were found or loaded, and not published (broken)
volume-unchanged: not as before: blocks/0, blocks/3.tmp, index/6.tmp: expected 14 files; got 13 files (broken)
fault-fired: payloads on the volume when the producer was struck: expected 0 1 2; got none (broken)
kv-loaded of tag-victim: expected blocks 6; got found 0 1 2, planned 0 1 2, loaded 0 1 2 (broken)
"""

NOTHING_HAPPENED = """
producer-serves: no save was asked for: expected HTTP 200 (broken)
fault-fired: expected held, engine_exited, engine_ready; payload of block 3; got nothing (broken)
"""

BROKEN_DECODE = """
volume-unchanged: not as before: blocks/0: expected 14 files; got 14 files (broken)
fault-fired: expected held, engine_exited, engine_ready; no such block; got nothing (broken)
"""


def of_process(verdict: Verdict, *, only_broken: bool = False) -> tuple[Finding, ...]:
    """What is said of the process and its files; not that no request carried a fault."""
    found = (f for f in verdict.findings if f.check in CHECKS and not (only_broken and f.ok))
    return tuple(f for f in found if f.expected != "nothing")


def broken_save() -> Observation:
    """Other files lay on the volume than should have, and more are left; the producer refuses the save after that."""
    seen = process_observation(process_cell(SAVING))
    last = seen.volume.damages[-1]
    damages = tuple(replace(damage, during="") for damage in seen.volume.damages[:-1])
    files = (*FILES[1:], LEFT, replace(LEFT, name="index/6.tmp"))
    return replace(
        seen,
        volume=VolumeRecord((*damages, replace(last, during="sound")), FILES, files),
        process=replace(seen.process, saves=(*seen.process.saves[:1], refused())),
    )


@pytest.mark.parametrize("kind", HONEST)
def test_of_honest_engines(kind: ProcessKind) -> None:
    of = process_cell(kind)
    assert told(of_process(verdict_of(of, process_observation(of)))) == lines(HONEST[kind])


def test_of_a_save_that_went_wrong_in_many_ways() -> None:
    of = process_cell(SAVING)
    assert told(of_process(verdict_of(of, broken_save()), only_broken=True)) == lines(BROKEN_SAVE)


def test_of_a_producer_that_was_never_asked() -> None:
    of = process_cell(SAVING)
    seen = replace(process_observation(of), process=ProcessRecord())
    said = told(of_process(verdict_of(of, seen), only_broken=True))
    assert said == lines(NOTHING_HAPPENED)


def test_of_a_cell_without_its_victim() -> None:
    of = process_cell(KILLED)
    seen = without(process_observation(of), EventName.HELD, EventName.ENGINE_EXITED, EventName.ENGINE_READY)
    first, *others = seen.volume.damages
    seen = replace(
        seen,
        requests=tuple(record for record in seen.requests if record.planned.role is not Role.VICTIM),
        volume=replace(seen.volume, damages=(replace(first, after="other bytes"), *others)),
    )
    assert told(of_process(verdict_of(of, seen), only_broken=True)) == lines(BROKEN_DECODE)


def test_of_an_engine_that_died_more_often_than_it_was_killed() -> None:
    of = process_cell(KILLED)
    seen = process_observation(of)
    again = event(EventName.ENGINE_EXITED, "", reason="exit code 1")
    seen = replace(seen, events=(*seen.events, again), after=replace(seen.after, restart_count=2))
    (finding,) = (f for f in verdict_of(of, seen).findings if f.check == "engine-alive")
    assert (finding.ok, finding.detail) == (False, "signal SIGKILL; exit code 1")


def test_of_a_victim_that_got_text() -> None:
    of = process_cell(KILLED)
    seen = answer_with(process_observation(of), Role.VICTIM, replace(refused(200), error="", text="half a"))
    (finding,) = (f for f in verdict_of(of, seen).findings if f.check == "victim-got-nothing")
    assert (finding.ok, finding.got) == (False, "HTTP 200: no error; text 'half a'")


def test_of_a_process_that_did_something_else_first_when_it_went_on() -> None:
    of = process_cell(PAUSED)
    seen = process_observation(of)
    *before, saved = seen.process.events
    exited = event(EventName.ENGINE_EXITED, "")
    seen = replace(seen, process=replace(seen.process, events=(*before, exited, saved)))
    (finding, *_) = (f for f in verdict_of(of, seen).findings if f.check == "fault-fired" and not f.ok)
    assert finding.got == "held (payload of block 3), engine_paused, engine_resumed, engine_exited, saved"
