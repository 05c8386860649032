"""The journal: what several writers append is what a reader that follows along gets, once and whole."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import services.journal
from harness.errors import HarnessError
from harness.running.journals import read_journal
from services.journal import Event, EventName, Journal, JournalDamaged, from_json, journal_path, read_events, to_json

REPOSITORY = Path(services.journal.__file__).parents[1]
INDICES = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
WORDS = st.text(max_size=10)
EVENTS = st.builds(
    Event,
    name=st.sampled_from(EventName),
    service=st.text(min_size=1),
    time_s=st.floats(1.0, 1e12),
    request=WORDS,
    mode=WORDS,
    blocks=INDICES,
    block_ids=INDICES,
    digests=st.lists(WORDS, max_size=4).map(tuple),
    reason=WORDS,
    duration_s=st.floats(0, 1e6),
    pid=st.integers(0, 2**22),
    keys=st.lists(WORDS, max_size=4).map(tuple),
)


@given(event=EVENTS)
def test_an_event_survives_json(event: Event) -> None:
    line = json.dumps(to_json(event))
    assert "\n" not in line
    assert from_json(json.loads(line)) == event


def test_empty_fields_are_left_out() -> None:
    event = Event(EventName.LOOKUP, "prefill", 1.5, blocks=(0,))
    assert to_json(event) == {"name": "lookup", "service": "prefill", "time_s": 1.5, "blocks": (0,)}


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"name": "lookup"},
        {"service": "a", "time_s": 1.0},
        {"name": "no such event", "service": "a", "time_s": 1.0},
        {"name": "lookup", "service": "a", "time_s": 1.0, "colour": "red"},
        ["lookup", "a", 1.0],
        "lookup",
    ],
)
def test_what_no_journal_wrote_is_refused(raw: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        from_json(raw)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    began_s = time.time()
    journal = Journal(tmp_path / "evidence", "decode")
    journal.write(EventName.PLANNED, request="r\n1", mode="sync", blocks=(0, 1), block_ids=(7, 9))
    journal.write(EventName.LOADED, digests=("ab", "cd"), reason="é", duration_s=0.25, pid=4)
    (planned, loaded), _ = read_events(journal.path)
    assert began_s <= planned.time_s <= loaded.time_s <= time.time()
    assert planned == Event(EventName.PLANNED, "decode", planned.time_s, "r\n1", "sync", (0, 1), (7, 9))
    assert loaded == Event(
        EventName.LOADED, "decode", loaded.time_s, digests=("ab", "cd"), reason="é", duration_s=0.25, pid=4
    )


def test_each_service_has_its_own_file(tmp_path: Path) -> None:
    for service in ("prefill", "decode"):
        Journal(tmp_path, service).write(EventName.RELEASED)
    for service in ("prefill", "decode"):
        events, _ = read_events(journal_path(tmp_path, service))
        assert [event.service for event in events] == [service]


def test_a_new_journal_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for reason in ("first", "second"):
        Journal(tmp_path, "decode").write(EventName.ENGINE_EXITED, reason=reason)
    events, _ = read_events(journal_path(tmp_path, "decode"))
    assert [event.reason for event in events] == ["first", "second"]


def test_a_missing_journal_is_empty(tmp_path: Path) -> None:
    assert read_events(tmp_path / "absent", 12) == ((), 12)


def test_evidence_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "decode").write_bytes(b"")
    with pytest.raises(OSError, match="decode"):
        Journal(tmp_path, "decode")


def test_reading_goes_on_at_the_offset(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "decode")
    offset = 0
    for reason in ("one", "two"):
        journal.write(EventName.SAVE_FAILED, reason=reason)
        events, offset = read_events(journal.path, offset)
        assert [event.reason for event in events] == [reason]
    assert read_events(journal.path, offset) == ((), offset)


def test_a_partial_last_line_is_left_for_the_next_call(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "decode")
    journal.write(EventName.SAVED, request="first")
    journal.write(EventName.SAVED, request="second")
    whole = journal.path.read_bytes()
    first_line_bytes = whole.index(b"\n") + 1
    for size in range(len(whole) + 1):
        journal.path.write_bytes(whole[:size])
        events, offset = read_events(journal.path)
        assert offset == (0 if size < first_line_bytes else first_line_bytes if size < len(whole) else len(whole))
        journal.path.write_bytes(whole)
        rest, end = read_events(journal.path, offset)
        assert [event.request for event in events + rest] == ["first", "second"]
        assert end == len(whole)


GARBAGE = [b"garbage", b"", b"\xff\xfe", b"[]", b'{"name": "no such event"}', b"[" * 100_000]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda line: repr(line[:24]))
def test_a_line_that_is_garbage_is_named_by_file_and_line(garbage: bytes, tmp_path: Path) -> None:
    journal = Journal(tmp_path, "decode")
    journal.write(EventName.SAVED)
    offset = journal.path.stat().st_size
    journal.write(EventName.SAVED)
    with journal.path.open("ab") as file:
        file.write(garbage + b"\n")
    for begin in (0, offset):
        with pytest.raises(JournalDamaged, match=rf"{journal.path}, line 3: ") as raised:
            read_events(journal.path, begin)
        assert len(str(raised.value)) < 500
    with pytest.raises(HarnessError, match=rf"{journal.path}, line 3: .*; only the engines"):
        read_journal(journal.path)


APPEND = """
import sys
from pathlib import Path
from services.journal import EventName, Journal
journal = Journal(Path(sys.argv[1]), "decode")
print("ready", flush=True)
sys.stdin.read()
for index in range(int(sys.argv[3])):
    journal.write(EventName.LOADED, request=sys.argv[2], blocks=(index,), reason="x" * (index * 37 % 9000))
"""


def start_writer(evidence_dir: Path, request: str, event_count: int) -> subprocess.Popen[str]:
    """A process that says "ready" and writes its events when its standard input is closed."""
    command = [sys.executable, "-c", APPEND, str(evidence_dir), request, str(event_count)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_processes_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    requests, event_count = ("a", "b", "c"), 300
    path = journal_path(tmp_path, "decode")
    events: tuple[Event, ...] = ()
    offset = 0
    with ExitStack() as stack:
        writers = [stack.enter_context(start_writer(tmp_path, request, event_count)) for request in requests]
        for writer in writers:
            assert writer.stdout
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            assert writer.stdin
            writer.stdin.close()
        while any(writer.poll() is None for writer in writers):  # a reader beside the writers
            new, offset = read_events(path, offset)
            events += new
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    events += read_events(path, offset)[0]
    for request in requests:
        assert [event.blocks for event in events if event.request == request] == [(i,) for i in range(event_count)]
    assert len(events) == len(requests) * event_count
