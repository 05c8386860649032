"""A run on the terminal while it goes on: a line for everything that has happened and, on a terminal, what goes on now.

The command line opens `watching` around a run. Lines stay; the display below them is drawn again four times a second
and is gone at the end, however the run ends.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harness.planning.seed import seed_words
from harness.records import Cell, RunInfo, Status, Verdict
from harness.report.terminal import STYLES, print_line, sign
from harness.report.view import visible
from harness.running.watcher import Watcher

Group = tuple[str, str]
"""Engine and load mode."""


@contextmanager
def watching(console: Console, *, quiet: bool) -> Iterator[Watcher]:
    """A watcher that prints on `console` as suits it: nothing, lines, or lines and a display of what goes on."""
    # A variable can make rich colour a file, too; a display is for eyes only.
    if quiet:
        yield Watcher()
    elif console.is_interactive and console.file.isatty():
        display = LiveProgress(console)
        with Live(
            get_renderable=display.render, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        ):
            yield display
    else:
        yield LineProgress(console)


class LineProgress(Watcher):
    """Plain lines, each complete when it is printed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._cell_count = 0
        self._done_count = 0

    def begins(self, info: RunInfo, folder: Path) -> None:
        print_line(self._console, Text(f"{visible(str(folder))}  {seed_words(info.seed)}"))

    def differs(self, differences: tuple[str, ...]) -> None:
        for difference in differences:
            print_line(self._console, Text(f"NOT AS IN THE RUN THAT IS REPEATED: {visible(difference)}", "bold yellow"))

    def waiting(self, text: str) -> None:
        print_line(self._console, Text(visible(text), "dim"))

    def phase_done(self, name: str, duration_s: float) -> None:
        print_line(self._console, Text(f"{visible(name)}  {duration_s:.1f} s", "dim"))

    def cells_planned(self, cells: tuple[Cell, ...]) -> None:
        self._cell_count, self._done_count = len(cells), 0

    def cells_again(self, cells: tuple[Cell, ...]) -> None:
        self.cells_planned(cells)
        print_line(self._console, Text(f"{len(cells)} not green: once more, alone", "dim"))

    def cell_done_again(self, cell: Cell, verdict: Verdict, duration_s: float) -> None:
        self.cell_done(cell, verdict, duration_s)

    def cell_done(self, cell: Cell, verdict: Verdict, duration_s: float) -> None:
        self._done_count += 1
        line = Text(f"[{self._done_count:>{len(str(self._cell_count))}}/{self._cell_count}] ")
        line.append(sign(verdict.status), STYLES[verdict.status])
        line.append(f" {visible(cell.id)}  {verdict.outcome}  {duration_s:.1f} s")
        print_line(self._console, line)


class LiveProgress(LineProgress):
    """Lines, and `render`: the phase, what is awaited, and a table of the cells by engine and load mode.

    Told by the threads of the engines, drawn by a thread of its own.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._lock = threading.Lock()
        self._phase, self._phase_began_s = "", time.monotonic()
        self._awaited, self._counts = "", False
        self._planned: Counter[Group] = Counter()
        self._found: Counter[tuple[Group, Status]] = Counter()
        self._running: dict[str, tuple[Cell, float]] = {}

    def waiting(self, text: str) -> None:
        with self._lock:
            self._awaited = text

    def phase_begun(self, name: str) -> None:
        with self._lock:
            self._phase, self._phase_began_s, self._awaited = name, time.monotonic(), ""
            self._counts = False

    def cells_planned(self, cells: tuple[Cell, ...]) -> None:
        super().cells_planned(cells)
        with self._lock:
            self._planned, self._found = Counter(map(_group, cells)), Counter()
            self._counts = True

    def cell_begun(self, cell: Cell) -> None:
        with self._lock:
            self._running[cell.id] = (cell, time.monotonic())

    def cell_done(self, cell: Cell, verdict: Verdict, duration_s: float) -> None:
        with self._lock:
            self._running.pop(cell.id, None)
            self._found[_group(cell), verdict.status] += 1
            self._awaited = ""
        super().cell_done(cell, verdict, duration_s)

    def render(self) -> RenderableType:
        """What goes on now."""
        with self._lock:
            table = Table.grid()
            table.add_column(no_wrap=True, overflow="ellipsis")
            if self._planned:
                table.add_row(self._groups())
            table.add_row(Text(self._headline(), "bold"))
            return Padding(table, (1, 0, 0, 0))

    def _headline(self) -> str:
        cells = f" {self._found.total()} of {self._planned.total()}" if self._counts else ""
        awaited = f": {visible(self._awaited)}" if self._awaited else ""
        return f"{visible(self._phase)}{cells}  {time.monotonic() - self._phase_began_s:.0f} s{awaited}"

    def _groups(self) -> Table:
        statuses = [status for status in Status if any(found is status for _, found in self._found)]
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("engine", "load"):
            table.add_column(name, no_wrap=True)
        for name in ("done", *statuses):
            table.add_column(name, justify="right", no_wrap=True)
        # The only column that may be cut: its cells are named again, whole, when they are done.
        table.add_column("now")
        for group, cell_count in self._planned.items():
            counts = [self._found[group, status] for status in statuses]
            table.add_row(
                *map(visible, group),
                f"{sum(counts)}/{cell_count}",
                *(Text(str(count or ""), STYLES[status]) for count, status in zip(counts, statuses, strict=True)),
                Text(self._now(group), "dim", no_wrap=True, overflow="ellipsis"),
            )
        return table

    def _now(self, group: Group) -> str:
        now_s = time.monotonic()
        running = ((cell, began_s) for cell, began_s in self._running.values() if _group(cell) == group)
        return ", ".join(f"{now_s - began_s:.0f} s {visible(cell.id)}" for cell, began_s in running)


def _group(cell: Cell) -> Group:
    return cell.engine, cell.load.value
