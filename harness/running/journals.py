"""Journals as the harness reads them: what is damaged in one is said to the user.

Called by the runner (events of a cell) and by the stacks (lives of engines).
"""

from __future__ import annotations

from pathlib import Path

from harness.errors import HarnessError
from services.journal import Event, JournalDamaged, read_events


def read_journal(path: Path, offset_bytes: int = 0) -> tuple[tuple[Event, ...], int]:
    """As services.journal.read_events. Raises HarnessError with file and line for a line that no journal wrote."""
    try:
        return read_events(path, offset_bytes)
    except JournalDamaged as damage:
        raise HarnessError(
            f"{damage}; only the engines' connectors and supervisors write there: does something else, "
            "such as another run with the same evidence folder?"
        ) from damage
