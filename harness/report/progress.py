"""A run on the terminal while it goes on: a line for each thing that is awaited, for each phase and for each cell."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from harness.records import Cell, Verdict
from harness.report.terminal import STYLES, print_line, sign
from harness.report.view import visible
from harness.watcher import Watcher


class LineProgress(Watcher):
    """Plain lines, each complete when it is printed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._cell_count = 0
        self._done_count = 0

    def waiting(self, text: str) -> None:
        print_line(self._console, Text(visible(text), "dim"))

    def phase_done(self, name: str, duration_s: float) -> None:
        print_line(self._console, Text(f"{visible(name)}  {duration_s:.1f} s", "dim"))

    def cells_planned(self, cells: tuple[Cell, ...]) -> None:
        self._cell_count = len(cells)

    def cell_done(self, cell: Cell, verdict: Verdict, duration_s: float) -> None:
        self._done_count += 1
        line = Text(f"[{self._done_count:>{len(str(self._cell_count))}}/{self._cell_count}] ")
        line.append(sign(verdict.status), STYLES[verdict.status])
        line.append(f" {visible(cell.id)}  {verdict.outcome}  {duration_s:.1f} s")
        print_line(self._console, line)
