"""What each command does: puts a plan, a stack, a run folder and a report together.

`run_matrix.py` calls `execute` with the options that `command_line.py` made; the exit code is the judge's.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import shtab
from rich.console import Console

from harness.cli.command_line import (
    CompareOptions,
    CompletionOptions,
    DoctorOptions,
    JudgeOptions,
    ListOptions,
    Options,
    OutputOptions,
    RunOptions,
    make_parser,
    with_stack_of,
)
from harness.cli.doctor import examine
from harness.cli.machine import State
from harness.errors import HarnessError, UsageError
from harness.judging.known_issues import KnownIssue, load_known_issues
from harness.planning.plan import (
    KNOWN_ISSUES_FILE,
    MATRIX_FOLDER,
    engines_of,
    load_plan,
    select_cells,
    shipped_matrices,
)
from harness.records import Plan, Report
from harness.report import JSON_NAME, print_report, watching, write_reports
from harness.report.compare import compare, stored
from harness.report.compare_formats import print_comparison, to_html, to_markdown
from harness.report.console import OutputConsole, print_raw
from harness.report.doctor_table import print_checks
from harness.report.view import visible
from harness.run_folder import RunFolder, write_text
from harness.running.conditions import settings
from harness.running.phases import Invocation, fail, judge_again, resume, run
from harness.running.runner import PREFILL
from harness.running.watcher import Watcher
from harness.stack import COMPOSE_FILE, AttachStack, ComposeStack, ProcessStack, Stack, cell_engines, read_engines

ROOT = Path(__file__).resolve().parents[2]


def execute(options: Options) -> int:
    """Do what was asked for; the exit code. Raises HarnessError when it cannot be done."""
    match options:
        case RunOptions():
            return _run(options)
        case ListOptions():
            return _list(options)
        case JudgeOptions():
            return _judge(options)
        case CompareOptions():
            return _compare(options)
        case DoctorOptions():
            return _doctor(options)
        case CompletionOptions():
            return _completion(options)


def _run(options: RunOptions) -> int:
    if options.resume:
        return _resume(options, RunFolder.open(options.resume))
    original = RunFolder.open(options.replay) if options.replay else None
    plan = select_cells(original.load_plan(), options.cell) if original else _plan(options)
    info = original.load_info() if original else None
    chosen = with_stack_of(options, info.stack_options) if info else options
    folder = RunFolder.create_new(options.runs, datetime.now(UTC))
    invocation = Invocation(
        info.matrix if info else options.matrix,
        shlex.join(sys.argv),
        chosen.stack_words(),
        info.seed if info else options.seed,
        original,
    )
    try:
        stack = _stack(chosen, folder, (PREFILL, *engines_of(plan.cells)), settings(info) if info else {})
    except UsageError:
        folder.discard_unused()
        raise
    return _finish(lambda watcher, known: run(plan, stack, folder, invocation, watcher, known), stack, folder, options)


def _resume(options: RunOptions, folder: RunFolder) -> int:
    info = folder.load_info()
    chosen = with_stack_of(options, info.stack_options)
    stack = _stack(chosen, folder, (PREFILL, *engines_of(folder.load_plan().cells)), settings(info))
    return _finish(lambda watcher, known: resume(stack, folder, watcher, known), stack, folder, options)


Doing = Callable[[Watcher, tuple[KnownIssue, ...]], Report]


def _finish(doing: Doing, stack: Stack, folder: RunFolder, options: RunOptions) -> int:
    """Run, and report; also what there is of a run that breaks, unless nothing has begun."""
    console, known_issues = _console(options), load_known_issues(KNOWN_ISSUES_FILE)
    try:
        with watching(console, quiet=options.quiet) as watcher:
            report = doing(watcher, known_issues)
    except (HarnessError, KeyboardInterrupt) as error:
        problem = error if isinstance(error, HarnessError) else _interruption(stack, folder)
        if isinstance(problem, UsageError) and (options.resume or folder.discard_unused()):
            raise
        return _tell_failure(fail(folder, problem, known_issues), problem, folder, options)
    except Exception as error:
        # A defect of ours, whose traceback is shown: what was observed until then is kept all the same.
        defect = HarnessError(f"a defect of kvproof: {type(error).__name__}: {error}")
        write_reports(fail(folder, defect, known_issues), folder.path)
        raise
    return _tell(report, folder, options, console)


def _tell_failure(report: Report, problem: HarnessError, folder: RunFolder, options: RunOptions) -> int:
    """The whole table would hide what has to be said; it is in the report."""
    write_reports(report, folder.path)
    text = visible(f"{problem}\nreport: {folder.path}")
    _console(options).print(text, style="bold red", markup=False, soft_wrap=True)
    if options.json:
        print_raw((folder.path / JSON_NAME).read_text("utf-8"))
    return report.exit_code


def _interruption(stack: Stack, folder: RunFolder) -> HarnessError:
    # Compose stops the harness when an engine ends; then that is what there is to say.
    if ended := stack.first_exit():
        return HarnessError(ended)
    rest = shlex.join(("python", "harness/run_matrix.py", "run", "--resume", str(folder.path)))
    return HarnessError(f"interrupted; everything that was started has been stopped; to do the rest: {rest}")


def _list(options: ListOptions) -> int:
    console = OutputConsole()
    for cell in _plan(options).cells:
        console.print(visible(f"{cell.id}  [{cell.expected}]  {cell.why}"), markup=False, soft_wrap=True)
    return 0


def _judge(options: JudgeOptions) -> int:
    folder = RunFolder.open(options.run)
    report = judge_again(folder, load_known_issues(KNOWN_ISSUES_FILE))
    return _tell(report, folder, options, _console(options))


def _compare(options: CompareOptions) -> int:
    folders = (options.before, options.after)
    if options.html and any(options.html.resolve().is_relative_to(folder.resolve()) for folder in folders):
        raise UsageError(f"--html {options.html} lies in a folder that is compared; name a file outside of both")
    comparison = compare(*(stored(RunFolder.open(path)) for path in folders))
    if options.markdown:
        print_raw(to_markdown(comparison))
    else:
        print_comparison(comparison, OutputConsole())
    if options.html:
        write_text(options.html, to_html(comparison))
    return 1 if comparison.worse else 0


def _doctor(options: DoctorOptions) -> int:
    checks = examine(ROOT, os.environ, options.stack, options.runs, options.kv_dir)
    print_checks(checks, options.stack, OutputConsole())
    return HarnessError.exit_code if State.PROBLEM in (check.state for check in checks.values()) else 0


def _completion(options: CompletionOptions) -> int:
    print_raw(shtab.complete(make_parser({}), options.shell) + "\n")
    return 0


def _console(options: OutputOptions) -> Console:
    return OutputConsole(stderr=options.json)


def _tell(report: Report, folder: RunFolder, options: OutputOptions, console: Console) -> int:
    write_reports(report, folder.path)
    print_report(report, console, quiet=options.quiet)
    if options.json:
        print_raw((folder.path / JSON_NAME).read_text("utf-8"))
    return report.exit_code


def _plan(options: RunOptions | ListOptions) -> Plan:
    plan = load_plan(_matrix_path(options.matrix), cell_engines(read_engines(COMPOSE_FILE, os.environ)))
    return select_cells(plan, options.only) if options.only else plan


def _matrix_path(name: str) -> Path:
    """A file, or the name of one in harness/matrix."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name not in shipped_matrices():
        raise UsageError(
            f"--matrix {name}: no such matrix; those that ship are {', '.join(shipped_matrices())}, and the path of "
            "another ends in .yaml"
        )
    return MATRIX_FOLDER / f"{name}.yaml"


def _stack(
    options: RunOptions, folder: RunFolder, services: tuple[str, ...], given: Mapping[str, Mapping[str, str]]
) -> Stack:
    """`given`: settings by service that count before those of this environment, where the engines are started here."""
    match options.stack:
        case "compose":
            return ComposeStack(COMPOSE_FILE, os.environ, services)
        case "attach":
            return _attached(options, services)
        case _:
            return ProcessStack(COMPOSE_FILE, folder.path, options.kv_dir, os.environ, services, given)


def _attached(options: RunOptions, services: tuple[str, ...]) -> Stack:
    if not options.url or not options.evidence_dir:
        raise UsageError("--stack attach needs --url NAME=URL for each service, and --evidence-dir FOLDER")
    urls = dict(options.url)
    known = [engine.service for engine in read_engines(COMPOSE_FILE, os.environ)]
    unknown = [name for name in urls if name not in known]
    if unknown:
        raise UsageError(f"--url: no service is called {', '.join(unknown)}; the services are {', '.join(known)}")
    missing = [service for service in services if service not in urls]
    if missing:
        raise UsageError(f"--stack attach: no --url for {', '.join(missing)}, which the chosen cells need")
    return AttachStack(urls, options.kv_dir, options.evidence_dir)
