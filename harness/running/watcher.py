"""Who is told about a run while it goes on.

`phases.py` and `session.py` call a Watcher; the terminal's are in report/progress.py.
"""

from __future__ import annotations

from pathlib import Path

from harness.records import Cell, RunInfo, Verdict


class Watcher:
    """Told about the run, in this order. Does nothing by itself."""

    def begins(self, info: RunInfo, folder: Path) -> None:
        """The run begins, or goes on after an interruption; its folder is there."""

    def differs(self, differences: tuple[str, ...]) -> None:
        """In what this run is not like the one that it repeats; nothing, if empty."""

    def waiting(self, text: str) -> None:
        """What is awaited now."""

    def phase_begun(self, name: str) -> None:
        """A phase begins; the last one, `stop`, has no end that is told."""

    def phase_done(self, name: str, duration_s: float) -> None:
        """A phase ended."""

    def cells_planned(self, cells: tuple[Cell, ...]) -> None:
        """The cells that will be run, before the first of them."""

    def cell_begun(self, cell: Cell) -> None:
        """A cell is run now; called from the thread that runs its engine's cells."""

    def cell_done(self, cell: Cell, verdict: Verdict, duration_s: float) -> None:
        """A cell was judged by itself, known issues included; controls can still turn it inconclusive at the end."""

    def cells_again(self, cells: tuple[Cell, ...]) -> None:
        """These were not green and are run once more, one at a time with nothing beside; their verdicts stay."""

    def cell_done_again(self, cell: Cell, verdict: Verdict, duration_s: float) -> None:
        """The second attempt of a cell was judged by itself."""
