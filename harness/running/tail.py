"""What is appended to a journal or a log while somebody watches."""

from __future__ import annotations

from pathlib import Path

from harness.running.journals import read_journal
from services.journal import Event, EventName

LOG_BYTES_MAX = 64 * 1024


class Tail:
    """What is appended to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset_bytes = path.stat().st_size if path.exists() else 0

    def events(self) -> tuple[Event, ...]:
        """Of a journal."""
        return read_journal(self._path, self._offset_bytes)[0]

    def has(self, name: EventName) -> bool:
        return any(event.name is name for event in self.events())

    def lines(self) -> tuple[str, ...]:
        """Of a log: the last LOG_BYTES_MAX bytes."""
        if not self._path.exists():
            return ()
        with self._path.open("rb") as file:
            file.seek(max(self._offset_bytes, self._path.stat().st_size - LOG_BYTES_MAX))
            return tuple(file.read().decode(errors="replace").splitlines())
