"""A cell's timeline: one lane per request, drawn from what the client saw and what the connectors wrote down.

Called by the HTML report, whose template turns the shapes into SVG. Pure: it only computes where things stand, in
units of the drawing. Labels that would overlap go to lower rows of their lane.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from harness.records import Observation, RequestRecord
from harness.report.story import blocks_words
from harness.report.view import one_line
from services.journal import Event, EventName

WIDTH = 1000
LEFT = 132
"""Where time begins; left of it stand the lanes' names."""
RIGHT = 92
"""Room for the labels of the last marks."""
BAR_HEIGHT = 12
BAR_TOP = 10
ROW_HEIGHT = 15
FIRST_ROW = 40
"""From the top of a lane to the baseline of its first row of labels."""
LANE_GAP = 8
AXIS_HEIGHT = 22
CHARACTER_WIDTH = 6.3
LABEL_GAP = 10
LABEL_INDENT = 4
SAME_PLACE = 5
"""Marks closer than this share one label."""
LABEL_CHARACTERS_MAX = 60
TICK_COUNT_MAX = 6
ENGINE_LANE = "engine"
PRODUCER_LANE = "producer"

STYLES = {
    EventName.LOADED: "good",
    EventName.FAULT_FIRED: "fault",
    EventName.REPORTED: "told",
    EventName.FAILED: "bad",
    EventName.READ_FAILED: "bad",
    EventName.SAVE_FAILED: "bad",
    EventName.REJECTED: "bad",
    EventName.ENGINE_EXITED: "bad",
    EventName.FINISHED: "done",
    EventName.RELEASED: "done",
}
"""Which sign an event gets; the others get that of a question asked (`ask`)."""

LOAD_ENDS = frozenset(
    {EventName.LOADED, EventName.FAILED, EventName.READ_FAILED, EventName.REPORTED, EventName.FINISHED}
)
WORDS = {EventName.LOOKUP: "found", EventName.FAULT_FIRED: "fault"}
"""Where the event's own name says less."""


@dataclass(frozen=True)
class Moment:
    """One thing that happened."""

    style: str
    x: int
    label: str
    time_s: float


@dataclass(frozen=True)
class Mark:
    """One or more moments of one style that stand together: their sign at `x` on the bar, and below it their label,
    whose left end is `label_x` and whose baseline is `label_y`."""

    style: str
    x: int
    label: str
    label_x: int
    label_y: int
    title: str


@dataclass(frozen=True)
class Span:
    """A stretch of a lane's bar: `request`, `load` or `answer`."""

    style: str
    x: int
    width: int
    title: str


@dataclass(frozen=True)
class Lane:
    """One request, or an engine."""

    name: str
    answer: str
    y: int
    height: int
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Tick:
    """A place on an axis, and what stands there."""

    at: float
    text: str


@dataclass(frozen=True)
class Timeline:
    """The whole drawing."""

    height: int
    lanes: tuple[Lane, ...]
    ticks: tuple[Tick, ...]
    duration_s: float


@dataclass(frozen=True)
class Scale:
    """Seconds after the cell began -> where that is in the drawing."""

    first_s: float
    last_s: float

    def x(self, time_s: float) -> int:
        share = (time_s - self.first_s) / (self.last_s - self.first_s)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT))


def timeline(observation: Observation) -> Timeline:
    """The drawing of a cell; without lanes where no request was sent."""
    if not observation.requests:
        return Timeline(0, (), (), 0.0)
    began_s = observation.started_at_s
    producer = observation.process.events
    times_s = [event.time_s - began_s for event in (*observation.events, *producer)]
    ends = [record.sent_s + record.completion.duration_s for record in observation.requests]
    # Attached engines have clocks of their own, which may be early.
    scale = Scale(min(0.0, *times_s, 0.0), max(*ends, *times_s, 0.001))
    tags = {record.tag for record in observation.requests}
    parts = [_request_lane(record, observation, scale) for record in observation.requests]
    of_engine = tuple(event for event in observation.events if event.request not in tags)
    for name, events in ((ENGINE_LANE, of_engine), (PRODUCER_LANE, producer)):
        if events:
            parts.append(Lane(name, "", 0, 0, (), _marks(_moments(events, began_s, scale))))
    lanes = tuple(_stacked(parts))
    height = lanes[-1].y + lanes[-1].height + AXIS_HEIGHT
    return Timeline(height, lanes, _ticks(scale), scale.last_s)


def _request_lane(record: RequestRecord, observation: Observation, scale: Scale) -> Lane:
    completion = record.completion
    events = [event for event in observation.events if event.request == record.tag]
    end_s = record.sent_s + completion.duration_s
    spans = [_span("request", record.sent_s, end_s, scale, "from sent to answered")]
    spans += _load_spans(events, observation.started_at_s, scale)
    moments = _moments(events, observation.started_at_s, scale)
    if completion.ttft_s:
        first_s = record.sent_s + completion.ttft_s
        spans.append(_span("answer", first_s, end_s, scale, "tokens arrive"))
        moments.append(Moment("token", scale.x(first_s), "first token", first_s))
    moments.append(Moment("done", scale.x(end_s), "end", end_s))
    return Lane(record.planned.role, _answer(record), 0, 0, tuple(spans), _marks(moments))


def _answer(record: RequestRecord) -> str:
    """How the request ended, short enough for the margin."""
    completion = record.completion
    if completion.gave_up:
        return "client left"
    if completion.timed_out:
        return "past its deadline"
    if completion.broken_off or not completion.status_code:
        return "broken off"
    return f"HTTP {completion.status_code}{', error' if completion.error else ''}"


def _load_spans(events: Sequence[Event], began_s: float, scale: Scale) -> list[Span]:
    """From each planned load to the next event that ends one."""
    spans = []
    for index, event in enumerate(events):
        ends = (later.time_s for later in events[index:] if later.name in LOAD_ENDS)
        end_s = next(ends, None) if event.name is EventName.PLANNED else None
        if end_s is not None:
            words = f"load of blocks {blocks_words(event.blocks)}"
            spans.append(_span("load", event.time_s - began_s, end_s - began_s, scale, words))
    return spans


def _span(style: str, first_s: float, last_s: float, scale: Scale, words: str) -> Span:
    x = scale.x(first_s)
    return Span(style, x, max(scale.x(last_s) - x, 2), f"{words}: {first_s:.3f} s to {last_s:.3f} s")


def _moments(events: Iterable[Event], began_s: float, scale: Scale) -> list[Moment]:
    return [
        Moment(
            STYLES.get(event.name, "ask"),
            scale.x(event.time_s - began_s),
            event_words(event),
            event.time_s - began_s,
        )
        for event in events
    ]


def event_words(event: Event) -> str:
    """An event in a few words: `loaded 0-6`, `fault report 3`, `read failed 3 checksum`."""
    name = WORDS.get(event.name, event.name.replace("_", " "))
    blocks = blocks_words(event.blocks)
    if event.name in (EventName.LOOKUP, EventName.OFFERED) and not blocks:
        blocks = "nothing"
    reason = "" if event.name in (EventName.ENGINE_STARTED, EventName.ENGINE_READY) else event.reason
    order = (reason, blocks) if event.name is EventName.FAULT_FIRED else (blocks, reason)
    return _cut(one_line(" ".join(part for part in (name, *order) if part)))


def _cut(text: str) -> str:
    return text if len(text) <= LABEL_CHARACTERS_MAX else f"{text[: LABEL_CHARACTERS_MAX - 1]}…"


def _marks(moments: Iterable[Moment]) -> tuple[Mark, ...]:
    """Each label in the highest row with room.

    From right to left: so the line from a sign down to its label passes no other label.
    """
    room_until: list[float] = []
    marks = []
    for group in reversed(_together(sorted(moments, key=lambda moment: moment.x))):
        text, first_x = _joined(group), group[0].x
        width = len(text) * CHARACTER_WIDTH
        x = max(min(first_x + LABEL_INDENT, WIDTH - width), LEFT)
        fits = (index for index, until in enumerate(room_until) if x + width + LABEL_GAP <= until)
        row = next(fits, len(room_until))
        room_until[: row + 1] = [min(x, first_x)] * (row + 1)
        label_y = FIRST_ROW + row * ROW_HEIGHT
        marks.append(Mark(group[0].style, first_x, text, round(x), label_y, _times(group)))
    return tuple(reversed(marks))


def _times(group: Sequence[Moment]) -> str:
    """When, exactly."""
    texts = dict.fromkeys(f"{moment.time_s:.3f}" for moment in group)
    return f"{', '.join(texts)} s"


def _together(moments: Sequence[Moment]) -> list[list[Moment]]:
    groups: list[list[Moment]] = []
    for moment in moments:
        if groups and groups[-1][0].style == moment.style and moment.x - groups[-1][0].x < SAME_PLACE:
            groups[-1].append(moment)
        else:
            groups.append([moment])
    return groups


def _joined(group: Sequence[Moment]) -> str:
    """`found 0-6`, `offered 0-6`, `planned 0-6` -> `found, offered, planned 0-6`."""
    parts = [moment.label.rsplit(" ", 1) if " " in moment.label else [moment.label, ""] for moment in group]
    told = []
    for tail, same in groupby(parts, key=lambda part: part[1]):
        names = ", ".join(part[0] for part in same)
        told.append(f"{names} {tail}".strip())
    return _cut(", ".join(told))


def _stacked(lanes: Iterable[Lane]) -> Iterable[Lane]:
    """The lanes below one another, each as high as its labels need."""
    y = 0
    for lane in lanes:
        height = max((mark.label_y for mark in lane.marks), default=FIRST_ROW - ROW_HEIGHT) + 5
        yield Lane(lane.name, lane.answer, y, height, lane.spans, lane.marks)
        y += height + LANE_GAP


def _ticks(scale: Scale) -> tuple[Tick, ...]:
    step_s = step(scale.last_s, TICK_COUNT_MAX)
    count = int(scale.last_s / step_s) + 1
    return tuple(Tick(scale.x(index * step_s), f"{index * step_s:g} s") for index in range(count))


def step(span: float, count_max: int) -> float:
    """The smallest of 1, 2, 5, 10 ... times a power of ten that divides `span` into at most `count_max` steps."""
    candidates = (base * 10.0**power for power in range(-4, 7) for base in (1, 2, 5))
    return next(candidate for candidate in candidates if span / candidate <= count_max)
