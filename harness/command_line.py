"""The words of the command line: arguments and environment -> what was asked for.

`run_matrix.py` calls `parse` and hands the result to `commands.py`. Nothing is done or looked up here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pydantic import TypeAdapter

from harness.errors import UsageError

COMMANDS = ("run", "list", "judge")
STACKS = ("processes", "compose", "attach")
RUNS_FOLDER = "runs"
EXIT_CODES = """\
exit codes: 0 all well (known issues included), 1 a cell failed, 2 inconclusive, 3 the harness or its stack broke,
64 bad arguments or a bad matrix file"""


@dataclass(frozen=True)
class ListOptions:
    """`matrix`: a file, or the name of one in harness/matrix. `only`: globs of cell ids; empty: all."""

    matrix: str
    only: tuple[str, ...]


@dataclass(frozen=True)
class OutputOptions:
    """`quiet`: only what is red and the last lines. `json`: the report as JSON on stdout, everything else on stderr."""

    quiet: bool
    json: bool


@dataclass(frozen=True)
class RunOptions(OutputOptions):
    """`kv_dir` None: the stack's own choice. `url` and `evidence_dir` are for `attach`; `url`: (service, base URL)."""

    matrix: str
    only: tuple[str, ...]
    stack: str
    runs: Path
    kv_dir: Path | None
    url: tuple[tuple[str, str], ...]
    evidence_dir: Path | None

    def stack_words(self) -> tuple[str, ...]:
        """The words of the command line that choose this stack."""
        folders = (("--kv-dir", self.kv_dir), ("--evidence-dir", self.evidence_dir))
        return (
            *(() if self.stack == STACKS[0] else ("--stack", self.stack)),
            *(word for name, url in self.url for word in ("--url", f"{name}={url}")),
            *(word for option, folder in folders if folder for word in (option, str(folder))),
        )


@dataclass(frozen=True)
class JudgeOptions(OutputOptions):
    """`run`: a run folder."""

    run: Path


Options = RunOptions | ListOptions | JudgeOptions


class Parser(argparse.ArgumentParser):
    """argparse, with the exit code that this project gives to bad arguments."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(UsageError.exit_code, f"{self.prog}: {message}\n")


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Options:
    """What was asked for; `run` where no command is named. Ends the process for --help (0) and mistakes (64)."""
    named = arguments and arguments[0] in (*COMMANDS, "-h", "--help")
    given = vars(make_parser(environ).parse_args([*arguments] if named else ["run", *arguments]))
    kind: type[Options] = given.pop("options")
    return TypeAdapter(kind).validate_python(given)


def make_parser(environ: Mapping[str, str]) -> Parser:
    """The parser of all commands; variables of `environ` are defaults. One that is set but empty counts as not set,
    as in compose.yaml."""
    parser = Parser(
        prog="run_matrix.py",
        description="Breaks KV loads of a disaggregated vLLM deployment on purpose and judges what it answers.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    run_parser = commands.add_parser("run", help="run a matrix and report (default)", epilog=EXIT_CODES)
    run_parser.set_defaults(options=RunOptions)
    _add_matrix_options(run_parser, environ)
    _add_stack_options(run_parser, environ)
    _add_output_options(run_parser)
    list_parser = commands.add_parser("list", help="print the cells of a matrix")
    list_parser.set_defaults(options=ListOptions)
    _add_matrix_options(list_parser, environ)
    judge_parser = commands.add_parser("judge", help="judge a stored run again", epilog=EXIT_CODES)
    judge_parser.set_defaults(options=JudgeOptions)
    judge_parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, such as runs/20261130-154501")
    _add_output_options(judge_parser)
    return parser


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="print only what is red, the counts and the outcome")
    parser.add_argument("--json", action="store_true", help="print report.json on stdout, everything else on stderr")


def _add_stack_options(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    parser.add_argument(
        "--stack",
        choices=STACKS,
        default=STACKS[0],
        help="processes: start the engines of compose.yaml here as plain processes (default); compose: use the "
        "running Compose project; attach: use services that run elsewhere",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        metavar="DIR",
        default=Path(environ.get("KVPROOF_RUNS_DIR") or RUNS_FOLDER),
        help="where run folders go (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-dir",
        type=Path,
        metavar="DIR",
        help="the shared KV folder; processes: default a temporary one; attach: as mounted here",
    )
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        type=_url,
        metavar="NAME=URL",
        help="attach: a service, e.g. prefill=http://127.0.0.1:8100; repeat",
    )
    parser.add_argument(
        "--evidence-dir", type=Path, metavar="DIR", help="attach: where the services write their journals"
    )


def _add_matrix_options(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    only = environ.get("KVPROOF_ONLY")
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
        default=only.split(",") if only else [],
        help="only cells whose id matches, and the controls they need; repeat for more",
    )


def _url(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not name or not equals or "://" not in url:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL, such as prefill=http://127.0.0.1:8100")
    return name, url
