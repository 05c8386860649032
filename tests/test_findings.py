"""What the findings of whole cells say, word for word: this is what a reader of a report has to go by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.faults.storage_kinds import StorageKind
from harness.judging.judge import judge
from harness.records import (
    Cell,
    Completion,
    EngineState,
    Finding,
    Observation,
    ProcessRecord,
    Role,
    Verdict,
    VolumeFile,
)
from services.faults import FaultKind, LoadMode
from services.journal import EventName
from tests.builders import (
    BLOCK_SIZE,
    PROMPTS,
    answer_with,
    cell,
    change_answer,
    change_events,
    event,
    observation,
    oracle_runs,
    refused,
    wrong_answer,
)
from tests.storage_builders import storage_cell, storage_observation
from tests.verdicts import lines, told

MIX = cell(FaultKind.REPORT, "middle", mix=True, name="mix")
STORAGE = replace(storage_cell(StorageKind.FLIPPED_LAST, mix=True), id="storage")
SILENT = cell(FaultKind.SILENT)
UNSAVED = replace(storage_cell(StorageKind.FULL_DISK), id="unsaved")
READ_ONLY = replace(storage_cell(StorageKind.READ_ONLY), id="read-only")
UNSAVED_CHECKS = {"producer-alive", "save-answered", "fault-fired", "torn-block-found"}
STORAGE_CHECKS = {"fault-fired", "kv-loaded", "reload-sent", "volume-unchanged", "failure-reported"}

HONEST = """
engine-ready: expected healthy, 0 running, 0 waiting; got healthy True, 0 running, 0 waiting
engine-alive: expected 0 exits, healthy; got 0 exits, healthy
in-time of tag-victim: expected within 60 s; got 0.5 s
in-time of tag-sharer: expected within 60 s; got 0.5 s
in-time of tag-bystander: expected within 60 s; got 0.5 s
in-time of tag-canary: expected within 60 s; got 0.5 s
load-mode of tag-victim: expected sync; got sync
load-mode of tag-sharer: expected sync; got sync
load-mode of tag-bystander: expected sync; got sync
load-mode of tag-canary: expected sync; got sync
requests-sent: expected 3 as planned; got 3 (3 as planned, 1 victims), 1 canaries
control-accepted
one-worker of tag-victim: expected at most 1 loads; got 1 loads
one-worker of tag-sharer: expected at most 1 loads; got 1 loads
one-worker of tag-bystander: expected at most 1 loads; got 1 loads
one-worker of tag-canary: expected at most 0 loads; got 0 loads
kv-loaded of tag-victim: expected blocks 0 1 2 3 4 5 6; got planned 0 1 2 3 4 5 6, loaded 0 1 2 3 4 5 6
fault-fired of tag-victim: expected report 3; got report 3
fault-fired of tag-sharer: expected nothing; got nothing
fault-fired of tag-bystander: expected nothing; got nothing
fault-fired of tag-canary: expected nothing; got nothing
nothing-else-failed
oracle-stable: reuse of victim: expected at least 2 runs, 1 answer; got 2 runs, 1 answers
oracle-stable: recompute of victim: expected at least 2 runs, 1 answer; got 2 runs, 1 answers
oracle-stable: partial(3) of victim: expected at least 1 runs, 1 answer; got 2 runs, 1 answers
oracle-stable: reuse of sharer: expected at least 2 runs, 1 answer; got 2 runs, 1 answers
oracle-stable: partial(3) of sharer: expected at least 1 runs, 1 answer; got 2 runs, 1 answers
oracle-stable: reuse of bystander: expected at least 2 runs, 1 answer; got 2 runs, 1 answers
oracle-stable: recompute of sharer: expected at least 2 runs, 1 answer; got 2 runs, 1 answers
oracle-loaded: reuse of victim: expected 0 1 2 3 4 5 6; got 0 1 2 3 4 5 6; 0 1 2 3 4 5 6
oracle-loaded: recompute of victim: expected none; got none; none
oracle-loaded: partial(3) of victim: expected 0 1 2; got 0 1 2; 0 1 2
oracle-loaded: reuse of sharer: expected 0 1 2 3 4 5 6; got 0 1 2 3 4 5 6; 0 1 2 3 4 5 6
oracle-loaded: partial(3) of sharer: expected 0 1 2; got 0 1 2; 0 1 2
oracle-loaded: reuse of bystander: expected 0 1 2 3 4 5 6; got 0 1 2 3 4 5 6; 0 1 2 3 4 5 6
oracle-loaded: recompute of sharer: expected none; got none; none
oracles-agree: reuse and recompute of victim: expected answer (1000, 1105, 1110, 1115, 1120); \
got answer (1000, 1055, 1060, 1065, 1070)
oracles-agree: reuse and recompute of sharer: expected answer (2000, 2105, 2110, 2115, 2120); \
got answer (2000, 2055, 2060, 2065, 2070)
same-bytes-loaded of tag-victim
same-bytes-loaded of tag-sharer
same-bytes-loaded of tag-bystander
same-bytes-loaded of tag-canary
victim-equals-oracle of tag-victim: equals partial(3): expected partial(3); got answer (1000, 1305, 1310, 1315, 1320)
canary-equals-oracle of tag-canary: equals partial(3): expected partial(3) or reuse or recompute; \
got answer (1000, 1305, 1310, 1315, 1320)
sharer-equals-oracle of tag-sharer: equals partial(3): expected partial(3) or reuse or recompute; \
got answer (2000, 2305, 2310, 2315, 2320)
bystander-equals-oracle of tag-bystander: equals reuse: expected reuse; got answer (3000, 3055, 3060, 3065, 3070)
nothing-leaked: expected 0 running, 0 waiting, 0.0% of the blocks held; \
got 0 running, 0 waiting, 0.0% of the blocks held
failure-reported of tag-victim: expected 3; got 3
expected-outcome: expected recovered; got recovered
controls: no no-fault control for decode-recompute, sync; no silent control for decode-recompute, sync (broken)
"""

HONEST_IN_STORAGE = """
fault-fired of tag-victim: expected nothing; got nothing
fault-fired of tag-sharer: expected nothing; got nothing
fault-fired of tag-bystander: expected nothing; got nothing
fault-fired of tag-canary: expected nothing; got nothing
fault-fired of tag-reload: expected nothing; got nothing
fault-fired: expected flipped-last 3; got 3
kv-loaded of tag-victim: expected blocks 0 1 2 3 4 5 6; \
got found 0 1 2 3 4 5 6, planned 0 1 2 3 4 5 6, loaded 0 1 2 4 5 6
reload-sent: expected 1; got 1
kv-loaded of tag-reload: expected blocks 0 1 2 3 4 5 6; got planned 0 1 2 3 4 5 6, loaded 0 1 2 3 4 5 6
volume-unchanged: expected 7 files; got 7 files
failure-reported of tag-victim: expected 3 (checksum); got refused 3 (checksum); reported 3
failure-reported of tag-sharer: expected none; got refused none; reported none
failure-reported of tag-bystander: expected none; got refused none; reported none
failure-reported of tag-canary: expected none; got refused none; reported none
failure-reported of tag-reload: expected none; got refused none; reported none
"""

HONEST_WITHOUT_SAVE = """
producer-alive: expected 0 exits; got 0 exits
save-answered: expected HTTP 200; got HTTP 200
fault-fired: expected full-disk 3; got 3
fault-fired of tag-victim: expected not 3 and what follows ([Errno 28]); got saved 0 1 2, not 3 4 5 6 ([Errno 28] No.)
torn-block-found of tag-victim: expected at most 0 1 2; got 0 1 2
torn-block-found of tag-canary: expected at most 0 1 2; got none
"""

HONEST_READ_ONLY = """
producer-alive: expected 0 exits; got 0 exits
save-answered: expected HTTP 200; got HTTP 200
fault-fired: expected read-only 0; got 0
fault-fired of tag-victim: expected not 0 and what follows ([Errno 13] or [Errno 30] or [Errno 1]); \
got saved none, not 0 1 2 3 4 5 6 ([Errno 13] No.)
torn-block-found of tag-victim: expected at most none; got none
torn-block-found of tag-canary: expected at most none; got none
"""

BROKEN_WITHOUT_SAVE = """
producer-alive: expected 0 exits; got 1 exits (broken)
save-answered: expected HTTP 200; got HTTP 500 InternalServerError: KV load failed; HTTP 503 (broken)
fault-fired of tag-victim: expected not 3 and what follows ([Errno 28]); \
got saved 0, not 1 2 ([Errno 5] I/O; [Errno 28] No.) (broken)
torn-block-found of tag-victim: expected at most 0 1 2; got 0 1 2 3 (broken)
"""

NOT_SAVED_AT_ALL = """
save-answered: expected HTTP 200; got not asked (broken)
fault-fired of tag-victim: expected not 3 and what follows ([Errno 28]); got saved none, not none (no reason) (broken)
"""

BROKEN = """
engine-ready: expected healthy, 0 running, 0 waiting; got healthy False, 1 running, 2 waiting (broken)
engine-alive: expected 0 exits, healthy; got 2 exits, not healthy (broken)
in-time of tag-victim: expected within 60 s; got 60.0 s (broken)
load-mode of tag-bystander: this connector does not load the way the cell asks for: expected sync; \
got async (broken)
control-accepted: no such kind; faults are off (broken)
one-worker of tag-victim: journals of several workers of one engine cannot be judged: expected at most 1 loads; \
got 2 loads (broken)
fault-fired of tag-victim: fired 0 of 1 times: expected report 3; got nothing (broken)
fault-fired: a fault fired for unknown requests cmpl-1, cmpl-2 (broken)
nothing-else-failed: tag-victim block 3, tag-bystander block 5, tag-bystander block 4, tag-bystander block 5, \
block id 998 of no load, block id 999 of no load (broken)
canary-equals-oracle of tag-canary: the engine counted 7 prompt tokens, the prompt has 29: \
expected partial(3) or reuse or recompute; got answer (1, 2, 3, 4, 5) (broken)
bystander-equals-oracle of tag-bystander: HTTP 500: InternalServerError: KV load failed: expected reuse (broken)
sharer-equals-oracle of tag-sharer: differs from partial(3) at token 0: expected partial(3) or reuse or recompute; \
got pelican (broken)
foreign-secret of tag-sharer: the answer has the secret of prompt bystander: expected velvet; got pelican (broken)
nothing-leaked: the engine did not come to rest, or would not empty its prefix cache: \
expected 0 running, 0 waiting, 25.0% of the blocks held; got 3 running, 4 waiting, 50.0% of the blocks held (broken)
controls: no no-fault control for decode-recompute, sync; no silent control for decode-recompute, sync (broken)
"""

BROKEN_IN_STORAGE = """
fault-fired: expected flipped-last 3; got 5 (broken)
kv-loaded of tag-victim: expected blocks 0 1 2 3 4 5 6; \
got found 0 1 2 3 4 5 6, planned 0 1 2 3 4 5 6, loaded none (broken)
kv-loaded of tag-reload: expected blocks 0 1 2 3 4 5 6; got planned 0 1 2 3 4 5 6, loaded none (broken)
volume-unchanged: not as before: blocks/0, blocks/x, blocks/3: expected 7 files; got 7 files (broken)
failure-reported of tag-victim: expected 3 (checksum); got refused none; reported 3 (broken)
"""


def judged(of: Cell, seen: Observation) -> Verdict:
    return judge((of,), PROMPTS, oracle_runs((of,)), [seen], BLOCK_SIZE)[0]


def broken_everywhere() -> Observation:
    seen = observation(MIX)
    seen = answer_with(seen, Role.VICTIM, Completion(0, "no answer", duration_s=60.04, timed_out=True))
    seen = answer_with(seen, Role.SHARER, replace(wrong_answer(PROMPTS["sharer"]), text="pelican"))
    seen = answer_with(seen, Role.BYSTANDER, refused())
    seen = answer_with(seen, Role.CANARY, replace(wrong_answer(PROMPTS["victim"]), prompt_token_count=7))
    extra = (
        event(EventName.REJECTED, "cmpl-1", reason="no such kind"),
        event(EventName.REJECTED, "cmpl-2", reason="faults are off"),
        event(EventName.LOADED, "tag-victim", (0, 1)),
        event(EventName.FAULT_FIRED, "cmpl-2", (1,), reason="report"),
        event(EventName.FAULT_FIRED, "cmpl-1", (1,), reason="report"),
        event(EventName.PLANNED, "tag-bystander", (0,), mode=LoadMode.ASYNC),
        event(EventName.FAILED, "tag-bystander", (4, 5)),
        event(EventName.REPORTED, "tag-bystander", (5,)),
        replace(event(EventName.REPORTED, ""), block_ids=(998, 999)),
    )
    return replace(
        seen,
        before=EngineState(False, 1, 2, 0.25, 1),
        after=EngineState(False, 3, 4, 0.5, 3),
        settled=False,
        requests=tuple(r for r in seen.requests if r.planned.role is not Role.SHARER) + seen.requests[1:2],
        events=(*(e for e in seen.events if e.name is not EventName.FAULT_FIRED or e.request != "tag-victim"), *extra),
    )


def broken_in_storage() -> Observation:
    seen = storage_observation(STORAGE)
    kept = tuple(e for e in seen.events if e.name not in (EventName.LOADED, EventName.READ_FAILED))
    damages = tuple(replace(damage, block=5, after="broken") for damage in seen.volume.damages)
    volume = replace(seen.volume, damages=damages, after=(*seen.volume.after[1:], VolumeFile("blocks/x", 1)))
    return replace(seen, events=kept, volume=volume)


def test_of_an_honest_engine() -> None:
    assert told(judged(MIX, observation(MIX)).findings) == lines(HONEST)


def test_of_an_honest_engine_with_damaged_files() -> None:
    findings = judged(STORAGE, storage_observation(STORAGE)).findings
    assert told(tuple(f for f in findings if f.check in STORAGE_CHECKS)) == lines(HONEST_IN_STORAGE)


def test_of_two_damaged_files() -> None:
    of = storage_cell(StorageKind.FLIPPED_LAST, (1, 5))
    findings = judged(of, storage_observation(of)).findings
    refused = [f for f in findings if f.check == "failure-reported" and f.request == "tag-victim"]
    assert told(tuple(refused)) == [
        "failure-reported of tag-victim: expected 1 5 (checksum); got refused 1 (checksum), 5 (checksum); reported 1 5"
    ]


def test_of_an_engine_that_is_wrong_in_many_ways() -> None:
    findings = judged(MIX, broken_everywhere()).findings
    assert told(tuple(f for f in findings if not f.ok)) == lines(BROKEN)


def test_of_loads_both_ways_faults_that_fired_twice_and_a_request_that_was_not_sent() -> None:
    seen = observation(MIX)
    extra = (
        event(EventName.PLANNED, "tag-sharer", (4,), mode=LoadMode.ASYNC),
        event(EventName.PLANNED, "tag-sharer", (4,), mode=LoadMode.OFF),
        event(EventName.FAULT_FIRED, "tag-victim", (3,), reason="report"),
    )
    sent = tuple(record for record in seen.requests if record.planned.role is not Role.BYSTANDER)
    findings = judged(MIX, replace(seen, requests=sent, events=(*seen.events, *extra))).findings
    checks = {"load-mode", "fault-fired", "requests-sent"}
    assert told(tuple(f for f in findings if not f.ok and f.check in checks and "unknown" not in f.detail)) == [
        "load-mode of tag-sharer: this connector does not load the way the cell asks for: expected sync; "
        "got async, off (broken)",
        "requests-sent: expected 3 as planned; got 2 (2 as planned, 1 victims), 1 canaries (broken)",
        "fault-fired of tag-victim: expected report 3; got report 3; report 3 (broken)",
    ]


def test_of_a_lookup_that_came_late_and_found_less() -> None:
    of = cell(FaultKind.PENDING)
    seen = change_events(observation(of), lambda e: replace(e, blocks=e.blocks[:3]))
    (finding,) = (f for f in judged(of, seen).findings if (f.check, f.request) == ("fault-fired", "tag-victim"))
    assert told((finding,)) == ["fault-fired of tag-victim: expected pending 0 1 2; got pending 0 1 2"]


def test_of_an_answer_that_never_came() -> None:
    seen = answer_with(observation(MIX), Role.VICTIM, Completion(0, "no answer", timed_out=True))
    (finding,) = (f for f in judged(MIX, seen).findings if f.check == "victim-equals-oracle")
    assert (finding.ok, finding.detail) == (True, "no token came")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finish_reason": "stop"}, "finish reason stop, reuse has length"),
        ({"finish_reason": ""}, "the answer is not whole: finish reason missing"),
        ({"finish_reason": "error"}, "the answer is not whole: finish reason error"),
        ({"status_code": 500}, "HTTP 500: no error text"),
        ({"error": "cut"}, "HTTP 200: cut"),
        ({"timed_out": True}, "equals the beginning of reuse"),
    ],
)
def test_of_an_answer_that_is_not_as_it_should_be(changes: dict[str, object], words: str) -> None:
    of = cell()
    (finding,) = (
        f
        for f in judged(of, change_answer(observation(of), Role.VICTIM, **changes)).findings
        if f.check == "victim-equals-oracle"
    )
    assert finding.detail == words


def test_of_wrong_kv_that_shows() -> None:
    (finding,) = (f for f in judged(SILENT, observation(SILENT)).findings if f.check == "control-caught")
    assert finding.request == "tag-victim"
    assert (finding.detail, finding.expected) == ("differs from reuse at token 0", "not reuse or recompute")


def test_of_oracles_that_were_not_measured() -> None:
    of = cell()
    (finding,) = (
        f
        for f in judge((of,), PROMPTS, (), [observation(of)], BLOCK_SIZE)[0].findings
        if f.check == "victim-equals-oracle"
    )
    assert finding.detail == "its oracle was not measured"


def test_of_an_oracle_that_did_not_answer_in_time() -> None:
    of = cell()
    runs = [replace(run, completion=replace(run.completion, timed_out=True)) for run in oracle_runs((of,))]
    findings = judge((of,), PROMPTS, runs, [observation(of)], BLOCK_SIZE)[0].findings
    assert [f.got for f in findings if f.check == "oracle-stable"] == [
        "2 runs, 1 answers no answer before the deadline; no answer before the deadline"
    ] * 2


def test_of_prompts_that_could_not_be_saved() -> None:
    for of, words in ((UNSAVED, HONEST_WITHOUT_SAVE), (READ_ONLY, HONEST_READ_ONLY)):
        assert told(_of_save(judged(of, storage_observation(of)))) == lines(words)


def test_of_prompts_whose_save_went_wrong_in_many_ways() -> None:
    seen = storage_observation(UNSAVED)
    (failed, saved) = seen.process.events
    events = (
        replace(failed, blocks=(1,), reason="[Errno 5] I/O"),
        replace(failed, blocks=(2,)),
        replace(saved, blocks=(0,)),
        event(EventName.ENGINE_EXITED, ""),
    )
    answers = (refused(), replace(refused(503), error=""))
    seen = replace(seen, process=ProcessRecord(events, answers))
    seen = replace(seen, events=(*seen.events, event(EventName.LOOKUP, "tag-victim", (2, 3))))
    assert told(_of_save(judged(UNSAVED, seen), only_broken=True)) == lines(BROKEN_WITHOUT_SAVE)
    nothing = replace(storage_observation(UNSAVED), process=ProcessRecord())
    assert told(_of_save(judged(UNSAVED, nothing), only_broken=True)) == lines(NOT_SAVED_AT_ALL)


def test_of_damaged_files_that_nobody_noticed() -> None:
    findings = judged(STORAGE, broken_in_storage()).findings
    assert told(tuple(f for f in findings if not f.ok and f.check in STORAGE_CHECKS)) == lines(BROKEN_IN_STORAGE)


def _of_save(verdict: Verdict, *, only_broken: bool = False) -> tuple[Finding, ...]:
    """What is said of the save, and of what is found of it; not that no request carried a fault."""
    found = (f for f in verdict.findings if f.check in UNSAVED_CHECKS and not (only_broken and f.ok))
    return tuple(f for f in found if f.expected != "nothing")
