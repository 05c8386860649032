"""What doctor found, on the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.cli.machine import Check, State
from harness.report.terminal import print_line
from harness.report.view import visible

STYLES = {State.OK: "green", State.NOTE: "dim", State.PROBLEM: "bold red"}


def print_checks(checks: Mapping[str, Check], stack: str, console: Console) -> None:
    """One row for each check, then every problem's remedy, then what it means for `stack`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for name, check in checks.items():
        table.add_row(Text(check.state, STYLES[check.state]), name, Text(visible(check.found)))
    console.print(table)
    for state in (State.NOTE, State.PROBLEM):
        for name, check in checks.items():
            if check.state is state and check.remedy:
                print_line(console, Text(f"\n{name}: {visible(check.found)}\n  {visible(check.remedy)}", STYLES[state]))
    problems = [check for check in checks.values() if check.state is State.PROBLEM]
    word = f"{len(problems)} to mend before --stack {stack}" if problems else f"all fine for --stack {stack}"
    print_line(console, Text(f"\n{word}", STYLES[State.PROBLEM if problems else State.OK]))
