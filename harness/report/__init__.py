"""Verdicts, told: on the terminal, and as report.json, report.html, junit.xml and summary.md in the run folder.

Called by the command line once a run is judged. Nothing here decides: outcome, status and exit code are the judge's.
"""

from harness.report.files import JSON_NAME, write_reports
from harness.report.progress import watching
from harness.report.terminal import print_report

__all__ = ["JSON_NAME", "print_report", "watching", "write_reports"]
