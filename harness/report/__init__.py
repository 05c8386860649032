"""Verdicts, told: on the terminal, and as report.json, report.html, junit.xml and summary.md in the run folder.

Called by the command line once a run is judged. Nothing here decides: outcome, status and exit code are the judge's.
"""

from harness.report.files import write_reports
from harness.report.terminal import print_cell_done, print_report, print_step

__all__ = ["print_cell_done", "print_report", "print_step", "write_reports"]
