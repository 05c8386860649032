"""report.html: one file that opens anywhere, without network or script."""

from __future__ import annotations

import dataclasses
from itertools import zip_longest
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from harness.records import Difference, Report, Status
from harness.report import view
from harness.report.view import Row

TEMPLATE_NAME = "report.template.html"
LOG_LINES_MAX = 60
SIGNS = {
    Status.PASS: "✓",
    Status.FAIL: "✗",
    Status.KNOWN: "k",
    Status.FIXED: "f",
    Status.INCONCLUSIVE: "?",
    Status.ERROR: "!",
    Status.SKIPPED: "-",
}


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The picture of a run: faults downwards, (engine, load mode) across, judged cells where they meet."""

    columns: tuple[tuple[str, str], ...]
    lines: tuple[tuple[str, tuple[tuple[Row, ...], ...]], ...]


@dataclasses.dataclass(frozen=True)
class TokenPair:
    """One position of two completions side by side; empty where one has ended."""

    index: int
    expected: str
    got: str
    first: bool

    @property
    def equal(self) -> bool:
        return self.expected == self.got


def to_html(report: Report) -> str:
    """The whole report as HTML; everything from outside is escaped by the template engine."""
    judged = view.rows(report)
    return (
        _environment()
        .get_template(TEMPLATE_NAME)
        .render(
            report=report,
            rows=judged,
            anchors={row.cell.id: f"cell-{index}" for index, row in enumerate(judged)},
            matrix=matrix(judged),
            observations={observation.cell_id: observation for observation in report.observations},
            versions=dataclasses.asdict(report.info.versions),
            signs=SIGNS,
            log_lines_max=LOG_LINES_MAX,
            token_pairs=token_pairs,
            view=view,
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = view.visible
    return environment


def matrix(judged: tuple[Row, ...]) -> Matrix:
    """Rows and columns in the order in which the cells name them."""
    columns = tuple(dict.fromkeys(_column(row) for row in judged))
    faults = dict.fromkeys(view.broken_words(row.cell) for row in judged)
    return Matrix(columns, tuple((fault, _line(judged, fault, columns)) for fault in faults))


def _column(row: Row) -> tuple[str, str]:
    return row.cell.engine, row.cell.load.value


def _line(judged: tuple[Row, ...], fault: str, columns: tuple[tuple[str, str], ...]) -> tuple[tuple[Row, ...], ...]:
    line = [row for row in judged if view.broken_words(row.cell) == fault]
    return tuple(tuple(row for row in line if _column(row) == column) for column in columns)


def token_pairs(difference: Difference) -> tuple[TokenPair, ...]:
    """Both completions by position; only the differing one where the whole lists were not recorded."""
    expected = difference.expected_token_ids
    got = difference.got_token_ids
    if not expected and not got:
        first = TokenPair(difference.index, str(difference.expected_token_id), str(difference.got_token_id), True)
        return (first,)
    return tuple(
        TokenPair(index, str(left), str(right), index == difference.index)
        for index, (left, right) in enumerate(zip_longest(expected, got, fillvalue=""))
    )
