"""What a supervisor's journal says about the life of its engine: how often it ended, what it does now."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass
from pathlib import Path

from harness.running.journals import read_journal
from services.journal import Event, EventName


@dataclass(frozen=True)
class EngineLife:
    """`state` is the last of ENGINE_STARTED, ENGINE_READY and ENGINE_EXITED, or None where no supervisor wrote;
    `pid` and `was_ready` belong to the engine started last. Times are Unix seconds, 0 for never."""

    exit_count: int = 0
    state: EventName | None = None
    pid: int = 0
    was_ready: bool = False
    ready_at_s: float = 0.0
    exited_at_s: float = 0.0
    exit_reason: str = ""

    @property
    def is_running(self) -> bool:
        return self.state in (EventName.ENGINE_STARTED, EventName.ENGINE_READY)

    def gave_up_since(self, time_s: float) -> bool:
        """Whether an engine ended before it was ready, with no ready one since `time_s`: the supervisor then
        ends, too; after a ready one it would start another engine."""
        ended = self.state is EventName.ENGINE_EXITED and self.exited_at_s >= time_s
        return ended and not self.was_ready and self.ready_at_s < time_s


def advance(life: EngineLife, event: Event) -> EngineLife:
    """The life after one more event of the service's journal."""
    now = dataclasses.replace(life, state=event.name)
    match event.name:
        case EventName.ENGINE_STARTED:
            return dataclasses.replace(now, pid=event.pid, was_ready=False)
        case EventName.ENGINE_READY:
            return dataclasses.replace(now, was_ready=True, ready_at_s=event.time_s)
        case EventName.ENGINE_EXITED:
            count = life.exit_count + 1
            return dataclasses.replace(now, exit_count=count, exited_at_s=event.time_s, exit_reason=event.reason)
        case _:
            return life


class LifeReader:
    """Follows one journal; each call reads only what is new, and raises HarnessError where that is damaged. Safe for
    several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset_bytes = 0
        self._life = EngineLife()
        self._lock = threading.Lock()

    def read(self) -> EngineLife:
        with self._lock:
            events, self._offset_bytes = read_journal(self._path, self._offset_bytes)
            for event in events:
                self._life = advance(self._life, event)
            return self._life
