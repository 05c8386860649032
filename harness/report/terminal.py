"""The report on a terminal or in a log: a table, why each cell is not green, counts, times, one last line.

Everything that is not ours reaches rich as Text or through `visible`, never as markup.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.records import Difference, Report, Status
from harness.report.view import (
    Row,
    answer_words,
    broken_words,
    cell_words,
    difference_words,
    evidence_folder,
    finding_words,
    not_judged,
    one_line,
    outcome_counts,
    repeat_command,
    rows,
    run_outcome,
    status_counts,
    text_diff,
    top_words,
    visible,
)

WIDE_COLUMNS = 130
STYLES = {
    Status.PASS: "green",
    Status.FAIL: "bold red",
    Status.KNOWN: "yellow",
    Status.FIXED: "cyan",
    Status.INCONCLUSIVE: "magenta",
    Status.ERROR: "bold red",
    Status.SKIPPED: "dim",
}
RUN_STYLES = {"pass": "bold green", "inconclusive": "bold magenta"}
DIFF_STYLES = {"-": "red", "+": "green", "@": "cyan"}


def print_report(report: Report, console: Console) -> None:
    """Print the whole report. Colour and box lines only where `console` is a terminal."""
    judged = rows(report)
    console.print(_table(judged, console))
    if console.width < WIDE_COLUMNS:
        print_line(console, Text("l/f/r: blocks loaded / failed in the connector / reported to vLLM", "dim"))
    for row in judged:
        if row.verdict.status is not Status.PASS:
            _print_row(report, row, console)
    _print_end(report, console)


def print_line(console: Console, text: Text) -> None:
    """One line, whatever its length."""
    # Soft wrap leaves breaking to the terminal: a command or path can be copied, a log line searched.
    console.print(text, soft_wrap=True)


def sign(status: Status) -> str:
    """A status as a word. Red states and fixed issues shout, so that they stand out where there is no colour."""
    return status.upper() if status in (Status.FAIL, Status.ERROR, Status.FIXED) else status.value


def _table(judged: Iterable[Row], console: Console) -> Table:
    wide = console.width >= WIDE_COLUMNS
    table = Table(box=SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for name in ("", "cell", *(("engine", "load", "fault", "expected") if wide else ()), "outcome"):
        table.add_column(name, overflow="fold")
    for name in ("loaded", "failed", "reported", "fired", "s") if wide else ("l/f/r", "fired", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in judged:
        table.add_row(*(_wide_cells(row) if wide else _narrow_cells(row)))
    return table


def _wide_cells(row: Row) -> list[Text]:
    cell, counts = row.cell, row.verdict.evidence
    words = (cell_words(cell), cell.engine, cell.load, broken_words(cell), cell.expected)
    numbers = (counts.loaded_blocks, counts.failed_blocks, counts.reported_blocks, counts.fault_fired)
    return [
        _sign_text(row),
        *(Text(visible(word)) for word in words),
        Text(row.verdict.outcome, STYLES[row.verdict.status]),
        *(Text(str(number)) for number in numbers),
        Text(f"{row.duration_s:.1f}"),
    ]


def _narrow_cells(row: Row) -> list[Text]:
    counts = row.verdict.evidence
    outcome = Text(row.verdict.outcome, STYLES[row.verdict.status])
    if not row.as_expected:
        outcome.append(f"\nnot {row.cell.expected}", "default")
    return [
        _sign_text(row),
        Text(visible(cell_words(row.cell))),
        outcome,
        Text(f"{counts.loaded_blocks}/{counts.failed_blocks}/{counts.reported_blocks}"),
        Text(str(counts.fault_fired)),
        Text(f"{row.duration_s:.1f}"),
    ]


def _sign_text(row: Row) -> Text:
    return Text(sign(row.verdict.status), STYLES[row.verdict.status])


def _print_row(report: Report, row: Row, console: Console) -> None:
    status = row.verdict.status
    title = f"\n{sign(status)} {visible(cell_words(row.cell))}: {row.verdict.outcome}, expected {row.cell.expected}"
    print_line(console, Text(title, STYLES[status]))
    for line in (*_why_lines(row), *_answer_lines(row)):
        print_line(console, Text(f"  {one_line(line)}"))
    for difference in row.differences:
        _print_difference(difference, console)
    if status is not Status.SKIPPED:
        print_line(console, Text(visible(f"  evidence: {evidence_folder(report, row.cell)}")))
        print_line(console, Text(visible(f"  repeat:   {repeat_command(report, row.cell)}")))


def _why_lines(row: Row) -> list[str]:
    lines = [f"why this cell: {row.cell.why}"] if row.cell.why else []
    if row.verdict.status is Status.FIXED:
        lines.append("this was a known issue and is green now: take it off the list of known issues")
    if row.verdict.link:
        lines.append(f"known issue: {row.verdict.link}")
    if row.not_run:
        lines.append(f"not run: {row.not_run}")
    return lines + [f"- {finding_words(finding)}" for finding in row.failed_findings]


def _answer_lines(row: Row) -> list[str]:
    """Requests that got no completion, whatever the judge made of that."""
    return [
        f"{record.planned.role} {record.tag}: {answer_words(record.completion)}"
        for record in row.requests
        if record.completion.status_code != 200 or record.completion.error
    ]


def _print_difference(difference: Difference, console: Console) -> None:
    print_line(console, Text(visible(f"  {difference_words(difference)}")))
    print_line(console, Text(f"    expected top: {top_words(difference.expected_top)}"))
    print_line(console, Text(f"    got top:      {top_words(difference.got_top)}"))
    for line in text_diff(difference):
        print_line(console, Text(f"    {line}", DIFF_STYLES.get(line[:1], "")))


def _print_end(report: Report, console: Console) -> None:
    missing = not_judged(report)
    if missing:
        print_line(console, Text(visible(f"\nnot judged: {', '.join(missing)}"), "magenta"))
    print_line(console, Text(f"\n{_counts(status_counts(report))}  ({_counts(outcome_counts(report))})"))
    timing = report.timing
    phases = ", ".join(f"{visible(name)} {seconds:.1f} s" for name, seconds in timing.phases)
    print_line(console, Text(f"time: {timing.duration_s:.1f} s in all: {phases}"))
    word = run_outcome(report)
    print_line(
        console,
        Text(
            f"{word.upper()}  exit code {report.exit_code}  {visible(report.folder)}", RUN_STYLES.get(word, "bold red")
        ),
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "no cell was judged"
