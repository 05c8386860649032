"""What --help says below the options of each command; `command_line.py` shows it."""

from __future__ import annotations

EXIT_CODES = """\
Exit codes:
  0 all well (known issues included), 1 a cell failed, 2 inconclusive, 3 the harness or its stack broke,
  64 bad arguments, matrix file or engine settings"""
RUN_MORE = f"""\
Examples:
  run_matrix.py                                   the example matrix on engines that are started here: 3 minutes
  run_matrix.py run --only 'recompute-report-*'   some cells, and the controls they need
  run_matrix.py run --matrix storage --quiet      the files of KV blocks are damaged; print only what is red
  run_matrix.py run --json > report.json          for scripts
  run_matrix.py run --seed 7                      another order of the cells, other KV keys
  run_matrix.py run --replay runs/20261130-154501 --cell recompute-report-sync-middle
  run_matrix.py run --resume runs/20261130-154501
  KV_VERIFY_CHECKSUM=false run_matrix.py run --matrix storage

Durations are in seconds (s), sizes in blocks of BLOCK_SIZE tokens. compose.yaml lists the variables that change the
engines.

{EXIT_CODES}"""
LIST_MORE = """\
Examples:
  run_matrix.py list --matrix storage
  run_matrix.py list --only '*-async-*'"""
JUDGE_MORE = f"""\
Reports and verdicts in the folder are written again.

Example:
  run_matrix.py judge runs/20261130-154501 --json

{EXIT_CODES}"""
COMPARE_MORE = """\
Both runs are taken as they were judged; judge them again first if kvproof itself has changed in between. Times are
in seconds; how their noise is estimated stands below the table.

Examples:
  run_matrix.py compare runs/20261130-154501 runs/20261201-154501
  run_matrix.py compare runs/A runs/B --markdown --html comparison.html

Exit codes:
  0 nothing got worse, 1 a cell got worse or a new cell is red (cost never counts), 3 FILE cannot be written,
  64 bad arguments"""
DOCTOR_MORE = """\
Examples:
  run_matrix.py doctor
  run_matrix.py doctor --stack compose

Exit codes:
  0 all fine for the chosen stack, 3 something is missing, 64 bad arguments"""
COMPLETION_MORE = """\
Examples, for `harness/run_matrix.py ...` with the virtual environment active:
  source <(harness/run_matrix.py completion bash)
  eval "$(harness/run_matrix.py completion zsh)\""""
