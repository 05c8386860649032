"""summary.md: short enough for a pull request comment."""

from __future__ import annotations

import dataclasses
import re
from itertools import accumulate

from harness.records import Report, Status
from harness.report.view import (
    Row,
    again_words,
    cell_words,
    not_judged,
    one_line,
    outcome_counts,
    phase_s,
    reason,
    repeat_command,
    rows,
    run_outcome,
    run_words,
    status_counts,
    web_address,
)

SUMMARY_CHARS_MAX = 60_000
BODY_CHARS_MAX = 45_000
SPAN_CHARS_MAX = 300
SECTIONS = {
    "Failed": (Status.FAIL,),
    "Harness errors": (Status.ERROR,),
    "Inconclusive": (Status.INCONCLUSIVE,),
    "Known issues": (Status.KNOWN,),
    "Fixed: take these off the list of known issues": (Status.FIXED,),
    "Skipped": (Status.SKIPPED,),
}


def to_markdown(report: Report) -> str:
    """The summary, shorter than SUMMARY_CHARS_MAX. Everything that is not ours stands in code spans."""
    judged = rows(report)
    lines = [f"## kvproof: {run_outcome(report)}", "", _counts(report), ""]
    if report.info.failure:
        lines += ["The run did not come to its end:", "", block(report.info.failure.text), ""]
    for title, statuses in SECTIONS.items():
        lines += _section(report, title, [row for row in judged if row.verdict.status in statuses])
    if not_judged(report):
        lines += ["### Not judged", "", *(f"- {code(cell_id)}" for cell_id in not_judged(report)), ""]
    return "\n".join([*_cut(lines), *_about(report), ""])


def code(text: str) -> str:
    """`text` as a code span of one line, whatever backticks it holds, cut to SPAN_CHARS_MAX."""
    line = one_line(text)
    if len(line) > SPAN_CHARS_MAX:
        line = f"{line[:SPAN_CHARS_MAX]}…"
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    # Without the spaces a backtick at either end would join the fence, and an empty span would be none.
    return f"{fence} {line} {fence}" if "`" in line or not line.strip() else f"{fence}{line}{fence}"


def block(text: str) -> str:
    """`text` as an indented code block, line by line."""
    return "\n".join(f"    {one_line(line)}" for line in text.split("\n"))


def _link(text: str) -> str:
    return f"<{text}>" if web_address(text) else code(text)


def _counts(report: Report) -> str:
    by_status = ", ".join(f"{count} {status}" for status, count in status_counts(report).items())
    by_outcome = ", ".join(f"{count} {outcome}" for outcome, count in outcome_counts(report).items())
    return f"{len(report.verdicts)} of {len(report.cells)} cells judged: {by_status} ({by_outcome})."


def _section(report: Report, title: str, section: list[Row]) -> list[str]:
    if not section:
        return []
    return [f"### {title}", "", *(_entry(report, row) for row in section), ""]


def _entry(report: Report, row: Row) -> str:
    link = f" {_link(row.verdict.link)}" if row.verdict.link else ""
    why = "" if row.verdict.status is Status.FIXED else f" {code(reason(row))}"
    why += f" {again_words(row)}" if row.again else ""
    repeat = f"\n  repeat: {code(repeat_command(report, row.cell))}" if row.verdict.status is Status.FAIL else ""
    return f"- {code(cell_words(row.cell))} **{row.verdict.outcome}**{link}{why}{repeat}"


def _cut(lines: list[str]) -> list[str]:
    """As many whole lines as fit, because a line never ends inside a code span."""
    ends = accumulate(len(line) + 1 for line in lines)
    fitting = sum(end <= BODY_CHARS_MAX for end in ends)
    return lines if fitting == len(lines) else [*lines[:fitting], "", "There is more; see report.html.", ""]


def _about(report: Report) -> list[str]:
    versions = (f"{name} {code(str(value))}" for name, value in dataclasses.asdict(report.info.versions).items())
    timing = report.timing
    return [
        f"{timing.duration_s:.1f} s in all, {phase_s(report, 'start'):.1f} s until the engines were ready, "
        f"{phase_s(report, 'cells'):.1f} s in cells. Run {code(report.info.run_id)} on {code(report.info.stack)}, "
        f"matrix {code(report.info.matrix)}.",
        "",
        *(f"- {code(line)}" for line in run_words(report)),
        "",
        ", ".join(versions),
    ]
