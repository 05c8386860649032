"""junit.xml: one test case per cell, for CI systems."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from harness.records import Report, Status
from harness.report.view import (
    Row,
    again_words,
    cell_words,
    difference_words,
    evidence_folder,
    finding_words,
    one_line,
    reason,
    repeat_command,
    rows,
    started_at,
    text_diff,
    visible,
)


def to_junit(report: Report) -> str:
    """The report as JUnit XML: fail is a failure; error and inconclusive are errors, told apart by their type;
    known issues and skipped cells are skipped."""
    suite = TestSuite("kvproof")
    suite.timestamp = started_at(report).removesuffix("+00:00")
    for name, value in _properties(report).items():
        suite.add_property(name, one_line(value))
    suite.add_testcases([*_failure(report), *(_case(report, row) for row in rows(report))])
    suite.time = round(report.timing.duration_s, 3)
    document = JUnitXml()
    document.add_testsuite(suite)
    file = io.BytesIO()
    document.write(file)
    return file.getvalue().decode() + "\n"


def _properties(report: Report) -> dict[str, str]:
    info = report.info
    run = {"run_id": info.run_id, "matrix": info.matrix, "stack": info.stack, "seed": str(info.seed)}
    return run | {name: str(value) for name, value in dataclasses.asdict(info.versions).items()}


def _failure(report: Report) -> Iterator[TestCase]:
    """The run itself, where it did not come to its end."""
    if report.info.failure:
        case = TestCase("the run", "kvproof", 0.0)
        case.result = [Error(one_line(report.info.failure.text.split("\n")[0]), "error")]
        case.result[0].text = visible(report.info.failure.text)
        yield case


def _case(report: Report, row: Row) -> TestCase:
    case = TestCase(
        one_line(cell_words(row.cell)), f"{one_line(row.cell.engine)}.{row.cell.load}", round(row.duration_s, 3)
    )
    result = _result(row)
    if result is not None:
        result.text = visible("\n".join(_details(report, row)))
        case.result = [result]
    return case


def _result(row: Row) -> Failure | Error | Skipped | None:
    message = one_line(reason(row))
    match row.verdict.status:
        case Status.FAIL:
            return Failure(message, row.verdict.outcome.value)
        case Status.ERROR | Status.INCONCLUSIVE as status:
            return Error(message, status.value)
        case Status.KNOWN:
            return Skipped(one_line(f"known issue {row.verdict.link}: {reason(row)}"), "known")
        case Status.SKIPPED:
            return Skipped(message, "skipped")
        case Status.PASS | Status.FIXED:
            return None


def _details(report: Report, row: Row) -> list[str]:
    lines = [f"{row.verdict.outcome}, expected {row.cell.expected}", row.cell.why]
    lines += [finding_words(finding) for finding in row.failed_findings]
    lines += [again_words(row)] if row.again else []
    for difference in row.differences:
        lines += [difference_words(difference), *text_diff(difference)]
    return [*lines, f"evidence: {evidence_folder(report, row.cell)}", f"repeat: {repeat_command(report, row.cell)}"]
