"""The words of the command line: arguments and environment -> what was asked for.

`run_matrix.py` calls `parse` and hands the result to `commands.py`. Nothing is done or looked up here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import shtab
from pydantic import TypeAdapter

from harness.cli.help_texts import (
    COMPARE_MORE,
    COMPLETION_MORE,
    DOCTOR_MORE,
    EXIT_CODES,
    JUDGE_MORE,
    LIST_MORE,
    RUN_MORE,
)
from harness.errors import UsageError
from harness.planning.seed import SEED_MAX

COMMANDS = ("run", "list", "judge", "compare", "doctor", "completion")
PROGRAM = "run_matrix.py"
SHELLS = ("bash", "zsh")
STACKS = (PROCESSES, COMPOSE, ATTACH) = ("processes", "compose", "attach")
RUNS_FOLDER = "runs"
MATRIX_WORDS = ("--matrix", "--only", "--seed")


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
    """`stack` empty: that of the stored run, or processes. `kv_dir` None: the stack's own choice. `url` and
    `evidence_dir` are for `attach`; `url`: (service, base URL). `replay`, `resume`: a stored run, whose matrix and seed
    count then; `cell`: what of it is repeated, empty for all."""

    matrix: str
    only: tuple[str, ...]
    stack: str
    runs: Path
    kv_dir: Path | None
    url: tuple[tuple[str, str], ...]
    evidence_dir: Path | None
    seed: int
    replay: Path | None
    cell: tuple[str, ...]
    resume: Path | None

    def stack_words(self) -> tuple[str, ...]:
        """The words of the command line that choose this stack."""
        folders = (("--kv-dir", self.kv_dir), ("--evidence-dir", self.evidence_dir))
        return (
            *(() if self.stack in ("", PROCESSES) else ("--stack", self.stack)),
            *(word for name, url in self.url for word in ("--url", f"{name}={url}")),
            *(word for option, folder in folders if folder for word in (option, str(folder))),
        )


@dataclass(frozen=True)
class JudgeOptions(OutputOptions):
    """`run`: a run folder."""

    run: Path


@dataclass(frozen=True)
class CompareOptions:
    """`before`, `after`: run folders. `html`: a file to write as well."""

    before: Path
    after: Path
    markdown: bool
    html: Path | None


@dataclass(frozen=True)
class DoctorOptions:
    """`stack`: the one that must be able to run here; folders as in RunOptions."""

    stack: str
    runs: Path
    kv_dir: Path | None


@dataclass(frozen=True)
class CompletionOptions:
    """`shell`: one of SHELLS."""

    shell: str


Options = RunOptions | ListOptions | JudgeOptions | CompareOptions | DoctorOptions | CompletionOptions


class Parser(argparse.ArgumentParser):
    """argparse, with the exit code that this project gives to bad arguments."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(UsageError.exit_code, f"{self.prog}: {message}\n")


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Options:
    """What was asked for; `run` where no command is named. Ends the process for --help (0) and mistakes (64)."""
    named = arguments and arguments[0] in (*COMMANDS, "-h", "--help")
    parser = make_parser(environ)
    given = vars(parser.parse_args([*arguments] if named else ["run", *arguments]))
    kind: type[Options] = given.pop("options")
    if given.get("only") == []:
        given["only"] = [cell_id for cell_id in environ.get("KVPROOF_ONLY", "").split(",") if cell_id]
    options = TypeAdapter(kind).validate_python(given)
    if isinstance(options, RunOptions):
        problem = _stored_run_problem(options, arguments) or _stack_problem(options)
        if problem:
            parser.error(problem)
    return options


def with_stack_of(options: RunOptions, stored: Sequence[str]) -> RunOptions:
    """The options, where the words that chose a stored run's stack fill what they leave open."""
    then = parse(("run", *stored), {})
    if not isinstance(then, RunOptions):
        raise TypeError("`run` gives RunOptions")
    return replace(
        options,
        stack=options.stack or then.stack or PROCESSES,
        kv_dir=options.kv_dir or then.kv_dir,
        url=options.url or then.url,
        evidence_dir=options.evidence_dir or then.evidence_dir,
    )


def _stored_run_problem(options: RunOptions, arguments: Sequence[str]) -> str:
    if options.cell and not options.replay:
        return "--cell names a cell of a stored run: --replay RUN --cell ID; cells of a matrix are chosen with --only"
    given = [word.partition("=")[0] for word in arguments]
    own = next((name for name in given if name in MATRIX_WORDS), "")
    if own and (options.replay or options.resume):
        return f"{own} cannot be given beside --replay or --resume: the stored run has its own"
    if "--runs" in given and options.resume:
        return "--runs cannot be given beside --resume: a run is finished in its own folder"
    return ""


def _stack_problem(options: RunOptions) -> str:
    """Words that would have no effect. A stored run may have its own stack."""
    for_attach = [name for name, value in (("--url", options.url), ("--evidence-dir", options.evidence_dir)) if value]
    if for_attach and options.stack != ATTACH and not ((options.replay or options.resume) and options.stack == ""):
        return f"{for_attach[0]} is for services that run elsewhere: --stack {ATTACH}"
    if options.kv_dir and options.stack == COMPOSE:
        return f"--kv-dir has no effect with --stack {COMPOSE}: the KV lies in the project's own volume"
    names = [name for name, _ in options.url]
    twice = next((name for name in names if names.count(name) > 1), "")
    return f"--url names {twice} twice; a service has one address" if twice else ""


def make_parser(environ: Mapping[str, str]) -> Parser:
    """The parser of all commands; variables of `environ` are defaults. One that is set but empty counts as not set,
    as in compose.yaml."""
    parser = Parser(
        prog=PROGRAM,
        description="Breaks KV loads of a disaggregated vLLM deployment on purpose and judges what it answers.",
        epilog=f"{PROGRAM} COMMAND --help says more. {EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, options: type[Options], what: str, more: str) -> Parser:
        raw = argparse.RawDescriptionHelpFormatter
        added = commands.add_parser(
            name, help=what, description=what, epilog=more, formatter_class=raw, allow_abbrev=False
        )
        added.set_defaults(options=options)
        return added

    run = command("run", RunOptions, "run a matrix and report (default)", RUN_MORE)
    _add_matrix_options(run, environ)
    _add_stack_options(run, environ, "")
    _add_attach_options(run)
    _add_stored_run_options(run)
    _add_output_options(run)
    _add_matrix_options(command("list", ListOptions, "print the cells of a matrix", LIST_MORE), environ)
    judge = command("judge", JudgeOptions, "judge a stored run again, without engines", JUDGE_MORE)
    _add_run(judge, "run", "RUN")
    _add_output_options(judge)
    _add_compare_options(command("compare", CompareOptions, "what two stored runs do not share", COMPARE_MORE))
    doctor = command("doctor", DoctorOptions, "is this machine able to run it, and if not, what to do", DOCTOR_MORE)
    _add_stack_options(doctor, environ, PROCESSES)
    completion = command("completion", CompletionOptions, "print a shell's completion script", COMPLETION_MORE)
    completion.add_argument("shell", choices=SHELLS)
    return parser


def _add_run(parser: argparse.ArgumentParser, name: str, metavar: str) -> None:
    action = parser.add_argument(name, type=Path, metavar=metavar, help="a run folder, such as runs/20261130-154501")
    action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]


def _add_compare_options(parser: argparse.ArgumentParser) -> None:
    _add_run(parser, "before", "RUN_A")
    _add_run(parser, "after", "RUN_B")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, for a pull request comment")
    html = parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained HTML file as well")
    html.complete = shtab.FILE  # type: ignore[attr-defined]


def _add_folder(parser: argparse.ArgumentParser, name: str, help_text: str, default: Path | None = None) -> None:
    action = parser.add_argument(name, type=Path, metavar="DIR", default=default, help=help_text)
    action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="print only what is red, the counts and the outcome")
    parser.add_argument("--json", action="store_true", help="print report.json on stdout, everything else on stderr")


def _add_stored_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seed",
        type=_seed,
        default=0,
        metavar="N",
        help=f"1 to {SEED_MAX}: shuffle the cells and put the number into every prompt, so that its KV has other keys; "
        "0: the order of the file, and prompts as written (default)",
    )
    stored = parser.add_mutually_exclusive_group()
    replay = stored.add_argument(
        "--replay",
        type=Path,
        metavar="RUN",
        help="repeat cells of a stored run as they were: its matrix, seed, stack and engine settings; what differs "
        "all the same is told",
    )
    resume = stored.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="finish a run that was interrupted, in its own folder; its versions and settings must be there",
    )
    replay.complete = resume.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    parser.add_argument(
        "--cell",
        action="append",
        default=[],
        metavar="ID",
        help="--replay: this cell, and the controls it needs; repeat for more; without it all cells",
    )


def _add_stack_options(parser: argparse.ArgumentParser, environ: Mapping[str, str], default: str) -> None:
    parser.add_argument(
        "--stack",
        choices=STACKS,
        default=default,
        help="processes: start the engines of compose.yaml here as plain processes (default); compose: use the "
        "running Compose project; attach: use services that run elsewhere",
    )
    runs = Path(environ.get("KVPROOF_RUNS_DIR") or RUNS_FOLDER)
    default_runs = f"default: KVPROOF_RUNS_DIR, else {RUNS_FOLDER}"
    _add_folder(parser, "--runs", f"where run folders go, of a few MB each ({default_runs})", runs)
    _add_folder(
        parser,
        "--kv-dir",
        "the shared KV folder; processes: default a temporary one; attach: as it is mounted here; not for compose",
    )


def _add_attach_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        type=_url,
        metavar="NAME=URL",
        help="attach: a service, e.g. prefill=http://127.0.0.1:8100; repeat",
    )
    _add_folder(parser, "--evidence-dir", "attach: where the services write their journals, as it is mounted here")


def _add_matrix_options(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    matrix = parser.add_argument(
        "--matrix",
        metavar="FILE",
        default=environ.get("KVPROOF_MATRIX") or "example",
        help="a matrix file, or the name of one in harness/matrix (default: KVPROOF_MATRIX, else example)",
    )
    matrix.complete = shtab.FILE  # type: ignore[attr-defined]
    parser.add_argument(
        "--only",
        action="append",
        metavar="GLOB",
        default=[],
        help="only cells whose id matches, and the controls they need; repeat for more (default: KVPROOF_ONLY, globs "
        "separated by commas, else all)",
    )


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > SEED_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {SEED_MAX}")
    return int(text)


def _url(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not name or not equals or "://" not in url:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL, such as prefill=http://127.0.0.1:8100")
    return name, url
