"""What simulated engines share out and wait for: KV blocks, and each other's requests.

A real engine is slow enough for others to come while it repairs a load. A simulated one waits for those that the cell
is to send: for an event, never for some time.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from enum import StrEnum

from harness.records import Role
from tests.simulated_requests import Request

DEADLINE_S = 20.0
"""For what must come; nothing waits so long unless the simulation itself is wrong."""


class Pool:
    """The KV blocks of one engine, and who holds them: requests by their tags, the oldest first."""

    def __init__(self, block_count: int) -> None:
        self._block_count = block_count
        self._held: dict[str, int] = {}
        self._preempted: set[str] = set()
        self._changed = threading.Condition()
        self.preemption_count = 0

    @property
    def usage(self) -> float:
        return sum(self._held.values()) / self._block_count

    def has_room(self, block_count: int) -> bool:
        return sum(self._held.values()) + block_count <= self._block_count

    def take(self, tag: str, block_count: int) -> None:
        """Once there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.has_room(block_count), DEADLINE_S), f"no blocks for {tag}"
            self._held[tag] = block_count
            self._preempted.discard(tag)

    def grow(self, tag: str) -> None:
        """By one block; where there is none, the youngest of the others gives back all of its own."""
        with self._changed:
            if not self.has_room(1):
                youngest = [other for other in self._held if other != tag][-1]
                del self._held[youngest]
                self._preempted.add(youngest)
                self.preemption_count += 1
            self._held[tag] += 1
            self._changed.notify_all()

    def wait_until_preempted(self, tag: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: tag in self._preempted, DEADLINE_S), f"nobody preempts {tag}"

    def give_back(self, tag: str) -> None:
        with self._changed:
            self._held.pop(tag, None)
            self._changed.notify_all()

    def leak(self, tag: str) -> None:
        """Give back all blocks but one."""
        with self._changed:
            self._held[tag] = 1
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._held.clear()
            self._changed.notify_all()


class Step(StrEnum):
    """How far a request has come."""

    LOOKED = "looked"
    """Into the engine's own cache."""
    COMPUTING = "computing"
    """What was loaded is there, or is to be repaired."""
    PREEMPTED = "preempted"
    ENDED = "ended"


class Company:
    """The requests of cells, and how far each has come."""

    def __init__(self) -> None:
        self._steps: defaultdict[str, set[tuple[int, Step]]] = defaultdict(set)
        self._changed = threading.Condition()

    def note(self, request: Request, step: Step) -> None:
        if request.planned is None:
            return
        with self._changed:
            self._steps[request.attempt].add((request.index, step))
            self._changed.notify_all()

    def wait_for(self, request: Request, roles: Iterable[Role], step: Step) -> None:
        """Until the requests of these roles in the same cell have come so far."""
        if request.cell is None or request.planned is None:
            return
        indices = [index for index, planned in enumerate(request.cell.requests) if planned.role in roles]
        with self._changed:
            steps = self._steps[request.attempt]
            have_come = self._changed.wait_for(lambda: steps.issuperset((i, step) for i in indices), DEADLINE_S)
        assert have_come, f"{request.tag} waits for requests that never came so far: {step}"
