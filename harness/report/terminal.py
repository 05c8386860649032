"""The report on a terminal or in a log: a table, why each cell is not green, what was proved, one last line.

Everything that is not ours reaches rich as Text or through `visible`, never as markup. What may have to be copied
(ids, paths, commands) is never broken or cut.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.records import Difference, Report, Status
from harness.report.view import (
    Row,
    again_words,
    answer_words,
    broken_words,
    cell_words,
    difference_words,
    evidence_folder,
    finding_words,
    known_issues,
    not_judged,
    one_line,
    outcome_counts,
    proved,
    repeat_command,
    rows,
    run_outcome,
    run_words,
    status_counts,
    text_diff,
    top_words,
    visible,
)

WIDE_COLUMNS = (
    *("", "cell", "engine", "load", "fault", "expected", "outcome"),
    *(">loaded", ">failed", ">reported", ">fired", ">s"),
)
NARROW_COLUMNS = ("", "cell", "outcome", ">l/f/r", ">fired", ">s")
LEGEND = (
    "l/f/r: blocks loaded / failed in the connector / reported to vLLM",
    "fired: faults carried out, or damage noticed",
)
"""Of the narrow columns."""
"""Of the table of cells; numbers (>) stand on the right."""
ANY_WIDTH = 100_000
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
EXPLAINED = (Status.SKIPPED, Status.FIXED, Status.KNOWN, Status.INCONCLUSIVE, Status.ERROR, Status.FAIL)
"""In this order: the worst stands last, where the reader looks first."""
REDS = (Status.ERROR, Status.FAIL)


def print_report(report: Report, console: Console, *, quiet: bool = False) -> None:
    """Print the whole report, or with `quiet` only what is red and the last lines. Colour only where `console` is
    a terminal."""
    judged = rows(report)
    if not quiet:
        _print_cells(judged, console)
    for status in REDS if quiet else EXPLAINED:
        for row in judged:
            if row.verdict.status is status:
                _print_row(report, row, console)
    if not quiet:
        _print_proved(report, console)
    _print_end(report, console)


def print_line(console: Console, text: Text) -> None:
    """One line, whatever its length."""
    # Soft wrap leaves breaking to the terminal: a command or path can be copied, a log line searched.
    console.print(text, soft_wrap=True)


def sign(status: Status) -> str:
    """A status as a word. Red states and fixed issues shout, so that they stand out where there is no colour."""
    return status.upper() if status in (Status.FAIL, Status.ERROR, Status.FIXED) else status.value


def _print_cells(judged: tuple[Row, ...], console: Console) -> None:
    """The widest table that fits; where ids are too long for any, two lines for each cell."""
    wide = _table(WIDE_COLUMNS, map(_wide_cells, judged))
    narrow = _table(NARROW_COLUMNS, map(_narrow_cells, judged))
    fitting = next((table for table in (wide, narrow) if _width(console, table) <= console.width), None)
    if fitting:
        console.print(fitting)
    else:
        for row in judged:
            _print_cell(row, console)
    if fitting is not wide:
        for line in LEGEND:
            print_line(console, Text(line, "dim"))


def _table(columns: Iterable[str], lines: Iterable[list[Text]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def _width(console: Console, table: Table) -> int:
    """How wide a table is where there is room."""
    return console.measure(table, options=console.options.update(width=ANY_WIDTH)).maximum


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
    outcome = Text(row.verdict.outcome, STYLES[row.verdict.status])
    if not row.as_expected:
        outcome.append(f"\nexpected {row.cell.expected}", "default")
    return [
        _sign_text(row),
        Text(visible(cell_words(row.cell))),
        outcome,
        Text(_block_counts(row)),
        Text(str(row.verdict.evidence.fault_fired)),
        Text(f"{row.duration_s:.1f}"),
    ]


def _print_cell(row: Row, console: Console) -> None:
    print_line(console, Text.assemble(_sign_text(row), f" {visible(cell_words(row.cell))}"))
    outcome = row.verdict.outcome if row.as_expected else f"{row.verdict.outcome}, expected {row.cell.expected}"
    numbers = f"l/f/r {_block_counts(row)}  fired {row.verdict.evidence.fault_fired}  {row.duration_s:.1f} s"
    print_line(console, Text.assemble("  ", (outcome, STYLES[row.verdict.status]), f"  {numbers}"))


def _block_counts(row: Row) -> str:
    counts = row.verdict.evidence
    return f"{counts.loaded_blocks}/{counts.failed_blocks}/{counts.reported_blocks}"


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
    lines.append(f"fault: {broken_words(row.cell)}, {row.cell.load} load on {row.cell.engine}")
    if row.verdict.status is Status.FIXED:
        lines.append("this was a known issue and is green now: take it off the list of known issues")
    if row.verdict.link:
        lines.append(f"known issue: {row.verdict.link}")
    if row.not_run:
        lines.append(f"not run: {row.not_run}")
    lines += [f"- {finding_words(finding)}" for finding in row.failed_findings]
    return [*lines, again_words(row)] if row.again else lines


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


def _print_proved(report: Report, console: Console) -> None:
    versions = report.info.versions
    of_what = ", ".join(filter(None, (f"vLLM {versions.vllm}", versions.connector, versions.model, report.info.stack)))
    print_line(console, Text(visible(f"\nproved for {of_what}:"), "bold"))
    for group, words in proved(report) or (("nothing", "no cell is green"),):
        print_line(console, Text(visible(f"  {group}: {words}")))
    for link, words in known_issues(report):
        print_line(console, Text(visible(f"known issue {link}: {words}"), STYLES[Status.KNOWN]))


def _print_end(report: Report, console: Console) -> None:
    missing = not_judged(report)
    if missing:
        print_line(console, Text(visible(f"\nnot judged: {', '.join(missing)}"), "magenta"))
    print_line(console, Text(f"\n{_counts(status_counts(report))}  ({_counts(outcome_counts(report))})"))
    for line in run_words(report):
        print_line(console, Text(visible(line)))
    timing = report.timing
    phases = ", ".join(f"{visible(name)} {seconds:.1f} s" for name, seconds in timing.phases)
    print_line(console, Text(f"time: {timing.duration_s:.1f} s in all: {phases}"))
    if report.info.failure:
        print_line(console, Text(f"not finished: {visible(report.info.failure.text)}", "bold red"))
    word = run_outcome(report)
    last = f"{word.upper()}  exit code {report.exit_code}  {visible(report.folder)}"
    print_line(console, Text(last, RUN_STYLES.get(word, "bold red")))


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "no cell was judged"
