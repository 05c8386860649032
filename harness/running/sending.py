"""Sends the requests of a cell, each at its moment, and has clients leave at theirs; no opinion.

The runner calls it. A moment is an event: something in the engine's journal, requests that it has, an answer. One that
does not come within CUE_DEADLINE_S seconds is not waited for any longer; the judge sees that it was missed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_fixed

from harness.records import Cell, Moment, PlannedRequest, RequestRecord, Role
from harness.running.completions import Departure
from services.journal import Event, EventName

CUE_DEADLINE_S = 5.0
CUE_POLL_S = 0.002


@dataclass(frozen=True)
class Cues:
    """What tells the moments: the engine's journal since the cell began, and how many requests it has, be they running
    or in its queue: it serves them in the order in which they came."""

    events: Callable[[], tuple[Event, ...]]
    request_count: Callable[[], int]


Send = Callable[[PlannedRequest, int, Departure], RequestRecord]
"""Sends the request with this index in the cell and waits for its answer."""


def send_all(cell: Cell, send: Send, cues: Cues) -> tuple[RequestRecord, ...]:
    """Every planned request, in the order of the cell."""
    with ThreadPoolExecutor(len(cell.requests)) as pool:
        sending = _Sending(cell, send, pool)
        for moment in Moment:
            if sending.is_due_at(moment):
                wait_until(lambda at=moment: sending.has_come(at, cues), CUE_DEADLINE_S, CUE_POLL_S)  # type: ignore[misc]
                sending.act(moment)
        return sending.records()


def wait_until(holds: Callable[[], bool], deadline_s: float, poll_s: float) -> bool:
    """Whether it held before the deadline."""
    attempts = Retrying(
        retry=retry_if_result(lambda held: not held), stop=stop_after_delay(deadline_s), wait=wait_fixed(poll_s)
    )
    try:
        return attempts(holds)
    except RetryError:
        return False


class _Sending:
    """The requests of one cell: which are out, and what came back."""

    def __init__(self, cell: Cell, send: Send, pool: ThreadPoolExecutor) -> None:
        self._cell, self._send, self._pool = cell, send, pool
        self._departures = [Departure() for _ in cell.requests]
        self._sent: dict[int, Future[RequestRecord]] = {}

    def is_due_at(self, moment: Moment) -> bool:
        return any(moment in (request.sent, request.gives_up) for request in self._cell.requests)

    def has_come(self, moment: Moment, cues: Cues) -> bool:
        """Whether it is that moment. No later one comes once the victims have their answers."""
        victims = self._of_role(Role.VICTIM)
        match moment:
            case Moment.AHEAD:
                return True
            case Moment.START:
                return self._are_done(self._sent) or cues.request_count() >= len(self._sent)
            case Moment.LOADING:
                # A lookup that is pending has no blocks yet; every other fault fires later.
                began = _count(cues, EventName.PLANNED) + _count(cues, EventName.FAULT_FIRED)
                return began > 0 or self._are_done(victims)
            case Moment.REPAIR:
                return _count(cues, EventName.REPORTED) > 0 or self._are_done(victims)
            case Moment.GONE:
                return self._are_done(victims)

    def act(self, moment: Moment) -> None:
        """Send what is to be sent now, then have the clients leave whose moment it is."""
        for index, request in enumerate(self._cell.requests):
            if request.sent is moment:
                self._sent[index] = self._pool.submit(self._send, request, index, self._departures[index])
        for index, request in enumerate(self._cell.requests):
            if request.gives_up is moment:
                self._departures[index].leave()

    def records(self) -> tuple[RequestRecord, ...]:
        return tuple(self._sent[index].result() for index in range(len(self._cell.requests)))

    def _of_role(self, role: Role) -> list[int]:
        return [index for index, request in enumerate(self._cell.requests) if request.role is role]

    def _are_done(self, indices: Sequence[int] | dict[int, Future[RequestRecord]]) -> bool:
        return all(self._sent[index].done() for index in indices)


def _count(cues: Cues, name: EventName) -> int:
    """Of how many requests the journal has such an event."""
    return len({event.request for event in cues.events() if event.name is name and event.request})
