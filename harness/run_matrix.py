"""The command line of kvproof: `python harness/run_matrix.py` or `python -m harness.run_matrix`."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    # Started as a file: the packages lie beside the folder of this file.
    sys.path[0] = str(ROOT)

from rich.console import Console

from harness.errors import HarnessError, UsageError
from harness.known_issues import load_known_issues
from harness.phases import Invocation, Watcher, judge_again, run
from harness.plan import load_plan, select_cells
from harness.records import Plan, Report, Verdict
from harness.report import print_cell_done, print_report, print_step, write_reports
from harness.report.view import visible
from harness.runner import BASELINE, PREFILL
from harness.stack import AttachStack, ComposeStack, ProcessStack, Stack
from harness.storage import RunFolder

COMPOSE_FILE = ROOT / "compose.yaml"
MATRIX_FOLDER = ROOT / "harness" / "matrix"
KNOWN_ISSUES_FILE = MATRIX_FOLDER / "known_issues.yaml"
COMMANDS = ("run", "list", "judge")
EXIT_CODES = """\
exit codes: 0 all well (known issues included), 1 a cell failed, 2 inconclusive, 3 the harness or its stack broke,
64 bad arguments or a bad matrix file"""


class Terminal(Watcher):
    """Prints what a run tells."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def waiting(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    def phase_done(self, name: str, duration_s: float) -> None:
        print_step(self._console, name, duration_s)

    def cell_done(self, index: int, cell_count: int, verdict: Verdict, duration_s: float) -> None:
        print_cell_done(self._console, index, cell_count, verdict, duration_s)


class Parser(argparse.ArgumentParser):
    """argparse, with the exit code that this project gives to bad arguments."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(UsageError.exit_code, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser(os.environ).parse_args(
        given if given and given[0] in (*COMMANDS, "-h", "--help") else ["run", *given]
    )
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    console = Console(highlight=False)
    try:
        code: int = options.command(options, console)
    except HarnessError as error:
        console.print(visible(str(error)), style="bold red", markup=False, soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started has been stopped", style="bold red")
        return HarnessError.exit_code
    except Exception:  # noqa: BLE001 - a defect of ours must not look like a red cell, whose exit code is Python's own
        console.print_exception()
        return HarnessError.exit_code
    return code


def _interrupt(signal_number: int, frame: object) -> NoReturn:  # noqa: ARG001
    raise KeyboardInterrupt


def _run(options: argparse.Namespace, console: Console) -> int:
    plan = _plan(options)
    known_issues = load_known_issues(KNOWN_ISSUES_FILE)
    folder = RunFolder.create_new(options.runs, datetime.now(UTC))
    stack = _stack(options, folder, (PREFILL, BASELINE, *(cell.engine for cell in plan.cells)))
    try:
        invocation = Invocation(options.matrix, shlex.join(sys.argv))
        report = run(plan, stack, folder, invocation, Terminal(console), known_issues)
    except KeyboardInterrupt:
        # Compose stops the harness when an engine ends; then that is what there is to say.
        if ended := stack.first_exit():
            raise HarnessError(ended) from None
        raise
    return _tell(report, folder, console)


def _list(options: argparse.Namespace, console: Console) -> int:
    for cell in _plan(options).cells:
        console.print(visible(f"{cell.id}  [{cell.expected}]  {cell.why}"), markup=False, soft_wrap=True)
    return 0


def _judge(options: argparse.Namespace, console: Console) -> int:
    folder = RunFolder.open(options.run)
    return _tell(judge_again(folder, load_known_issues(KNOWN_ISSUES_FILE)), folder, console)


def _tell(report: Report, folder: RunFolder, console: Console) -> int:
    write_reports(report, folder.path)
    print_report(report, console)
    return report.exit_code


def _plan(options: argparse.Namespace) -> Plan:
    plan = load_plan(_matrix_path(options.matrix))
    return select_cells(plan, tuple(options.only)) if options.only else plan


def _matrix_path(name: str) -> Path:
    """A file, or the name of one in harness/matrix."""
    return Path(name) if name.endswith((".yaml", ".yml")) else MATRIX_FOLDER / f"{name}.yaml"


def _stack(options: argparse.Namespace, folder: RunFolder, services: Sequence[str]) -> Stack:
    match options.stack:
        case "compose":
            return ComposeStack(os.environ)
        case "attach":
            return _attached(options, services)
        case _:
            return ProcessStack(COMPOSE_FILE, folder.path, options.kv_dir, os.environ, tuple(dict.fromkeys(services)))


def _attached(options: argparse.Namespace, services: Sequence[str]) -> Stack:
    if not options.url or not options.evidence_dir:
        raise UsageError("--stack attach needs --url NAME=URL for each service, and --evidence-dir FOLDER")
    urls = dict(pair.split("=", 1) for pair in options.url)
    missing = [service for service in dict.fromkeys(services) if service not in urls]
    if missing:
        raise UsageError(f"--stack attach: no --url for {', '.join(missing)}, which the chosen cells need")
    return AttachStack(urls, options.kv_dir, options.evidence_dir)


def _parser(environ: Mapping[str, str]) -> Parser:
    parser = Parser(
        prog="run_matrix.py",
        description="Breaks KV loads of a disaggregated vLLM deployment on purpose and judges what it answers.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    run_parser = commands.add_parser("run", help="run a matrix and report (default)", epilog=EXIT_CODES)
    run_parser.set_defaults(command=_run)
    _add_matrix_options(run_parser, environ)
    run_parser.add_argument(
        "--stack",
        choices=("processes", "compose", "attach"),
        default="processes",
        help="processes: start the engines of compose.yaml here as plain processes (default); compose: use the "
        "running Compose project; attach: use services that run elsewhere",
    )
    run_parser.add_argument(
        "--runs",
        type=Path,
        metavar="DIR",
        default=Path(environ.get("KVPROOF_RUNS_DIR", "runs")),
        help="where run folders go (default: %(default)s)",
    )
    run_parser.add_argument(
        "--kv-dir",
        type=Path,
        metavar="DIR",
        help="the shared KV folder; processes: default a temporary one; attach: as mounted here",
    )
    run_parser.add_argument(
        "--url",
        action="append",
        type=_url,
        metavar="NAME=URL",
        help="attach: a service, e.g. prefill=http://127.0.0.1:8100; repeat",
    )
    run_parser.add_argument(
        "--evidence-dir", type=Path, metavar="DIR", help="attach: where the services write their journals"
    )
    list_parser = commands.add_parser("list", help="print the cells of a matrix")
    list_parser.set_defaults(command=_list)
    _add_matrix_options(list_parser, environ)
    judge_parser = commands.add_parser("judge", help="judge a stored run again", epilog=EXIT_CODES)
    judge_parser.set_defaults(command=_judge)
    judge_parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, such as runs/20261130-154501")
    return parser


def _add_matrix_options(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    parser.add_argument(
        "--matrix",
        metavar="FILE",
        default=environ.get("KVPROOF_MATRIX") or "example",
        help="a matrix file, or the name of one in harness/matrix (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="GLOB",
        default=(environ.get("KVPROOF_ONLY") or "").split(",") if environ.get("KVPROOF_ONLY") else [],
        help="only cells whose id matches, and the controls they need; repeat for more",
    )


def _url(text: str) -> str:
    if "=" not in text or "://" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL, such as prefill=http://127.0.0.1:8100")
    return text


if __name__ == "__main__":
    sys.exit(main())
