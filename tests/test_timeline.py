"""What a timeline shows, and that nothing in it hides something else."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from harness.records import Completion, Observation, ProcessRecord, RequestRecord, Role
from harness.report.timeline import CHARACTER_WIDTH, LEFT, SAME_PLACE, WIDTH, Lane, event_words, step, timeline
from services.faults import FaultKind, LoadMode
from services.journal import Event, EventName
from tests import builders

TAG = "t"


def event(name: EventName, time_s: float, blocks: tuple[int, ...] = (), reason: str = "", tag: str = TAG) -> Event:
    return Event(name, "decode-recompute", 100 + time_s, tag, "sync", blocks, reason=reason)


def observation(*events: Event, completion: Completion | None = None) -> Observation:
    """One request, sent at 0 s and answered at 1 s."""
    cell = builders.cell(FaultKind.REPORT, "middle")
    answer = completion or Completion(200, duration_s=1.0)
    record = RequestRecord(builders.request(Role.VICTIM, LoadMode.SYNC), TAG, 0.0, answer)
    return replace(builders.quiet(cell, (record,), events), started_at_s=100.0)


def labels(lane: Lane) -> list[str]:
    return [mark.label for mark in lane.marks]


def test_a_request_is_a_lane_with_what_happened_in_order() -> None:
    found = timeline(
        observation(
            event(EventName.LOOKUP, 0.1, (0, 1, 2)),
            event(EventName.PLANNED, 0.1, (0, 1, 2)),
            event(EventName.LOADED, 0.3, (0, 1, 2)),
            event(EventName.FAULT_FIRED, 0.4, (1,), "report"),
            event(EventName.REPORTED, 0.5, (1,)),
            event(EventName.RELEASED, 0.9),
            completion=Completion(200, duration_s=1.0, ttft_s=0.7),
        )
    )
    (lane,) = found.lanes
    assert (lane.name, lane.answer, found.duration_s) == ("victim", "HTTP 200", 1.0)
    assert labels(lane) == [
        "found, planned 0-2",
        "loaded 0-2",
        "fault report 1",
        "reported 1",
        "first token",
        "released",
        "end",
    ]
    assert [mark.style for mark in lane.marks] == ["ask", "good", "fault", "told", "token", "done", "done"]
    assert [mark.title for mark in lane.marks][:2] == ["0.100 s", "0.300 s"]
    xs = [mark.x for mark in lane.marks]
    assert xs == sorted(xs)


def test_bars_are_the_request_its_load_and_its_answer() -> None:
    found = timeline(
        observation(
            event(EventName.PLANNED, 0.25, (0, 1)),
            event(EventName.LOADED, 0.5, (0, 1)),
            completion=Completion(200, duration_s=1.0, ttft_s=0.75),
        )
    )
    spans = {span.style: span for span in found.lanes[0].spans}
    whole = spans["request"].width
    assert spans["request"].x == LEFT
    assert spans["load"].x == LEFT + round(whole / 4)
    assert spans["load"].width == pytest.approx(whole / 4, abs=1)
    assert spans["answer"].width == pytest.approx(whole / 4, abs=1)
    assert spans["load"].title == "load of blocks 0-1: 0.250 s to 0.500 s"


def test_a_load_that_does_not_end_has_no_bar() -> None:
    found = timeline(observation(event(EventName.PLANNED, 0.25, (0, 1))))
    assert [span.style for span in found.lanes[0].spans] == ["request"]


def test_events_of_nobody_are_in_a_lane_of_the_engine() -> None:
    found = timeline(
        observation(
            event(EventName.ENGINE_EXITED, 0.5, reason="exit code 1", tag=""), event(EventName.LOADED, 0.1, (0,))
        )
    )
    assert [lane.name for lane in found.lanes] == ["victim", "engine"]
    assert [(mark.label, mark.style) for mark in found.lanes[1].marks] == [("engine exited exit code 1", "bad")]


def test_a_producer_that_was_struck_has_a_lane_of_its_own() -> None:
    struck = ProcessRecord(events=(event(EventName.SAVED, 1.5, (0, 1), tag="prefill.p"),))
    found = timeline(replace(observation(event(EventName.LOADED, 0.1, (0,))), process=struck))
    assert [lane.name for lane in found.lanes] == ["victim", "producer"]
    assert labels(found.lanes[1]) == ["saved 0-1"]
    assert found.duration_s == 1.5


@pytest.mark.parametrize(
    ("completion", "words"),
    [
        (Completion(200, duration_s=1.0), "HTTP 200"),
        (Completion(500, "no", duration_s=1.0), "HTTP 500, error"),
        (Completion(200, duration_s=1.0, gave_up=True), "client left"),
        (Completion(0, "reset", duration_s=1.0), "broken off"),
        (Completion(200, "half", duration_s=1.0, broken_off=True), "broken off"),
        (Completion(0, "late", duration_s=1.0, timed_out=True), "past its deadline"),
    ],
)
def test_the_margin_says_how_a_request_ended(completion: Completion, words: str) -> None:
    assert timeline(observation(completion=completion)).lanes[0].answer == words


def test_no_label_overlaps_another_or_the_line_of_another() -> None:
    times_s = (0.0, 0.001, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3, 0.31, 0.32, 0.6, 0.9)
    names = (EventName.LOOKUP, EventName.LOADED, EventName.REPORTED, EventName.FAULT_FIRED)
    events = (event(names[index % 4], time_s, (0, 1, 2)) for index, time_s in enumerate(times_s))
    marks = timeline(observation(*events)).lanes[0].marks
    for one in marks:
        for other in marks:
            starts, ends = one.label_x, one.label_x + len(one.label) * CHARACTER_WIDTH
            if one.label_y == other.label_y and one is not other:
                assert ends <= other.label_x or other.label_x < starts
            if one.label_y < other.label_y:
                assert not starts <= other.x < ends


def test_labels_stay_inside_the_drawing() -> None:
    late = event(EventName.READ_FAILED, 0.999, tuple(range(0, 60, 2)), "checksum")
    marks = timeline(observation(late)).lanes[0].marks
    assert all(mark.label_x >= LEFT and mark.label_x + len(mark.label) * CHARACTER_WIDTH <= WIDTH for mark in marks)


def test_marks_close_together_share_a_sign_only_where_they_are_of_one_kind() -> None:
    near_s = SAME_PLACE / 2 / WIDTH
    same = timeline(observation(event(EventName.LOOKUP, 0.5, (0,)), event(EventName.OFFERED, 0.5 + near_s, (0, 1))))
    assert labels(same.lanes[0])[0] == "found 0, offered 0-1"
    other = timeline(observation(event(EventName.LOOKUP, 0.5, (0,)), event(EventName.LOADED, 0.5 + near_s, (0,))))
    assert labels(other.lanes[0])[:2] == ["found 0", "loaded 0"]


def test_an_early_clock_of_an_engine_stretches_the_axis() -> None:
    found = timeline(observation(event(EventName.LOADED, -0.5, (0,))))
    assert found.lanes[0].marks[0].x == LEFT
    assert found.ticks[0].at > LEFT


def test_a_cell_without_requests_has_no_timeline() -> None:
    nothing = replace(observation(), requests=())
    assert timeline(nothing).lanes == ()


def test_lanes_stand_below_one_another() -> None:
    seen = builders.observation(builders.cell(FaultKind.REPORT, "middle", mix=True))
    lanes = timeline(seen).lanes
    assert [lane.name for lane in lanes] == ["victim", "sharer", "bystander", "canary"]
    assert all(one.y + one.height <= other.y for one, other in pairwise(lanes))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (event(EventName.LOOKUP, 0), "found nothing"),
        (event(EventName.OFFERED, 0, (0, 1)), "offered 0-1"),
        (event(EventName.READ_FAILED, 0, (3,), "checksum"), "read failed 3 checksum"),
        (event(EventName.ENGINE_STARTED, 0, reason="python -m vllm ..."), "engine started"),
        (event(EventName.REJECTED, 0, reason="a\nb"), "rejected a\\nb"),
        (event(EventName.REJECTED, 0, reason="x" * 100), "rejected " + "x" * 50 + "…"),
    ],
)
def test_events_in_words(given: Event, words: str) -> None:
    assert event_words(given) == words


@pytest.mark.parametrize(("span", "count", "wanted"), [(1.0, 6, 0.2), (0.65, 6, 0.2), (60, 6, 10), (0.001, 6, 0.0002)])
def test_ticks_have_round_steps(span: float, count: int, wanted: float) -> None:
    assert step(span, count) == pytest.approx(wanted)
