"""Requests of a cell are sent, and given up, at their moments: here a journal is a list, and answers come when told."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

import pytest

from harness.records import Completion, Moment, PlannedRequest, RequestRecord, Role
from harness.running import sending
from harness.running.completions import Departure
from harness.running.sending import Cues, send_all
from services.faults import LoadMode
from services.journal import Event, EventName
from tests.builders import cell

WAIT_S = 10.0

VICTIM = PlannedRequest(Role.VICTIM, "victim", LoadMode.SYNC)
OTHER = PlannedRequest(Role.SHARER, "sharer", LoadMode.SYNC)


@dataclass
class Stage:
    """What the engine shows. `answers[i]` lets the request with index i come back."""

    events: list[Event] = field(default_factory=list)
    request_count: int = 0
    order: list[int] = field(default_factory=list)
    sent: dict[int, threading.Event] = field(default_factory=lambda: {i: threading.Event() for i in range(4)})
    answers: dict[int, threading.Event] = field(default_factory=lambda: {i: threading.Event() for i in range(4)})
    left: list[int] = field(default_factory=list)
    has_left: threading.Event = field(default_factory=threading.Event)

    def write(self, name: EventName) -> None:
        self.events.append(Event(name, "decode-recompute", 0.0, request="victim"))

    def send(self, planned: PlannedRequest, index: int, departure: Departure) -> RequestRecord:
        self.order.append(index)
        self.sent[index].set()
        with departure.closing(lambda: self._leave(index)):
            assert self.answers[index].wait(WAIT_S)
        return RequestRecord(planned, str(index), 0.0, Completion(200))

    def _leave(self, index: int) -> None:
        self.left.append(index)
        self.has_left.set()
        self.answers[index].set()


class Sending(threading.Thread):
    """`send_all` in a thread of its own."""

    def __init__(self, stage: Stage, *requests: PlannedRequest) -> None:
        super().__init__(daemon=True)
        self._stage, self._requests = stage, requests
        self.records: tuple[RequestRecord, ...] = ()

    def run(self) -> None:
        cues = Cues(lambda: tuple(self._stage.events), lambda: self._stage.request_count)
        self.records = send_all(replace(cell(), requests=self._requests), self._stage.send, cues)

    def finish(self) -> None:
        for answer in self._stage.answers.values():
            answer.set()
        self.join(WAIT_S)
        assert not self.is_alive()
        assert [record.planned for record in self.records] == list(self._requests)


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.mark.parametrize(
    ("moment", "name"),
    [
        (Moment.LOADING, EventName.PLANNED),
        (Moment.LOADING, EventName.FAULT_FIRED),
        (Moment.REPAIR, EventName.REPORTED),
    ],
)
def test_a_request_waits_for_its_event(stage: Stage, moment: Moment, name: EventName) -> None:
    running = Sending(stage, VICTIM, replace(OTHER, sent=moment))
    running.start()
    assert stage.sent[0].wait(WAIT_S)
    stage.write(EventName.OFFERED)
    assert not stage.sent[1].wait(0.05)
    stage.write(name)
    assert stage.sent[1].wait(WAIT_S)
    running.finish()


def test_the_engine_has_the_requests_ahead_before_the_victim_is_sent(stage: Stage) -> None:
    running = Sending(stage, replace(OTHER, sent=Moment.AHEAD), replace(OTHER, sent=Moment.AHEAD), VICTIM)
    running.start()
    assert stage.sent[0].wait(WAIT_S)
    assert stage.sent[1].wait(WAIT_S)
    stage.request_count = 1
    assert not stage.sent[2].wait(0.05)
    stage.request_count = 2
    assert stage.sent[2].wait(WAIT_S)
    running.finish()


def test_a_request_is_sent_once_the_victim_is_gone(stage: Stage) -> None:
    running = Sending(stage, VICTIM, replace(OTHER, sent=Moment.GONE))
    running.start()
    assert stage.sent[0].wait(WAIT_S)
    assert not stage.sent[1].wait(0.05)
    stage.answers[0].set()
    assert stage.sent[1].wait(WAIT_S)
    running.finish()


def test_a_client_leaves_at_its_moment_after_who_is_sent_then(stage: Stage) -> None:
    running = Sending(stage, replace(VICTIM, gives_up=Moment.REPAIR), replace(OTHER, sent=Moment.REPAIR))
    running.start()
    assert stage.sent[0].wait(WAIT_S)
    assert stage.left == []
    stage.write(EventName.REPORTED)
    assert stage.sent[1].wait(WAIT_S)
    assert stage.has_left.wait(WAIT_S)
    running.finish()
    assert (stage.order, stage.left) == ([0, 1], [0])


def test_a_moment_that_does_not_come_before_the_answer_is_not_waited_for(stage: Stage) -> None:
    stage.answers[0].set()
    running = Sending(stage, VICTIM, replace(OTHER, sent=Moment.REPAIR))
    running.start()
    assert stage.sent[1].wait(WAIT_S / 5)
    running.finish()


def test_a_moment_that_never_comes_has_a_deadline(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "CUE_DEADLINE_S", 0.05)
    running = Sending(stage, VICTIM, replace(OTHER, sent=Moment.LOADING))
    running.start()
    assert stage.sent[1].wait(WAIT_S)
    running.finish()


def test_who_leaves_before_the_connection_is_there_leaves_as_soon_as_it_is() -> None:
    departure, closed = Departure(), threading.Event()
    departure.leave()
    with departure.closing(closed.set):
        assert closed.is_set()


def test_who_leaves_after_the_answer_closes_nothing() -> None:
    departure, closed = Departure(), threading.Event()
    with departure.closing(closed.set):
        pass
    departure.leave()
    assert not closed.is_set()
