"""The four report files of a run folder."""

from __future__ import annotations

from pathlib import Path

from harness.records import Report
from harness.report.as_html import to_html
from harness.report.as_json import to_json
from harness.report.as_junit import to_junit
from harness.report.as_markdown import to_markdown
from harness.run_folder import write_text

JSON_NAME = "report.json"
WRITERS = {
    JSON_NAME: to_json,
    "report.html": to_html,
    "junit.xml": to_junit,
    "summary.md": to_markdown,
}


def write_reports(report: Report, folder: Path) -> tuple[Path, ...]:
    """Write every format into `folder` and return the files. Raises HarnessError when one cannot be written."""
    for name, write in WRITERS.items():
        write_text(folder / name, write(report))
    return tuple(folder / name for name in WRITERS)
