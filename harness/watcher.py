"""Who is told about a run while it goes on.

`phases.py` calls a Watcher; the terminal's are in report/progress.py.
"""

from __future__ import annotations

from harness.records import Cell, Verdict


class Watcher:
    """Told about the run, in this order. Does nothing by itself."""

    def waiting(self, text: str) -> None:
        """What is awaited now."""

    def phase_begun(self, name: str) -> None:
        """A phase begins."""

    def phase_done(self, name: str, duration_s: float) -> None:
        """A phase ended."""

    def cells_planned(self, cells: tuple[Cell, ...]) -> None:
        """The cells that will be run, before the first of them."""

    def cell_begun(self, cell: Cell) -> None:
        """A cell is run now; called from the thread that runs its engine's cells."""

    def cell_done(self, cell: Cell, verdict: Verdict, duration_s: float) -> None:
        """A cell was judged by itself; controls can still turn it inconclusive at the end."""
