"""A run from its start to its report; a run that was interrupted; a stored run judged again.

`commands.py` calls `run` or `resume` on a stack, `fail` when that raised, and `judge_again` on a stored run; each gives
a Report. Everything observed is saved before it is judged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from harness.errors import HarnessError, UsageError
from harness.judging.judge import cell_judge, exit_code, judge, only_controls_ran
from harness.judging.known_issues import KnownIssue, with_known_issues
from harness.planning.plan_checks import check_blocks, check_prompts
from harness.planning.workload import build_prompts
from harness.records import Cell, Failure, Plan, Prompt, Report, RunInfo, SecondAttempt, Verdict, Versions
from harness.run_folder import RunFolder
from harness.running.conditions import differences, dtype_of, prompt_differences
from harness.running.consistency import check_engines, check_stored
from harness.running.runner import PREFILL, Runner
from harness.running.session import Clock, Session, again_left, cells_left, observe
from harness.running.watcher import Watcher
from harness.stack import Stack

START_DEADLINE_S = 600.0
"""How long all engines together may take to start; a model may have to be fetched."""
CELL_FAILED, INCONCLUSIVE = 1, 2

Prompts = Mapping[str, Prompt]
Accept = Callable[[RunInfo, Prompts], RunInfo]
"""Called once the engines are ready, with what is known then; gives what is stored, or raises UsageError."""


@dataclass(frozen=True)
class Invocation:
    """How the run was asked for: the matrix as it was named, the whole command, the options that chose the stack, the
    seed, and the stored run whose cells are repeated."""

    matrix: str
    command: str
    stack_options: tuple[str, ...] = ()
    seed: int = 0
    original: RunFolder | None = None


def run(
    plan: Plan,
    stack: Stack,
    folder: RunFolder,
    invocation: Invocation,
    watcher: Watcher,
    known_issues: tuple[KnownIssue, ...] = (),
) -> Report:
    """Run `plan` on `stack`, which is started and stopped here. Raises HarnessError when the stack breaks."""
    original = invocation.original

    def accept(now: RunInfo, prompts: Prompts) -> RunInfo:
        if original is None:
            return now
        different = _differences(original, now, prompts)
        watcher.differs(different)
        return replace(now, differences=different)

    folder.save_plan(plan)
    info = RunInfo(
        run_id=folder.path.name,
        matrix=invocation.matrix,
        stack=stack.name,
        command=invocation.command,
        started_at_s=time.time(),
        seed=invocation.seed,
        replay_of=str(original.path) if original else "",
        stack_options=invocation.stack_options,
        in_compose=stack.in_compose,
    )
    _on_engines(plan, info, stack, folder, watcher, accept, known_issues)
    return judge_again(folder, known_issues)


def resume(stack: Stack, folder: RunFolder, watcher: Watcher, known_issues: tuple[KnownIssue, ...] = ()) -> Report:
    """Finish the run in `folder`; what it has observed stays as it is. `stack` is not started for a finished one.

    Raises UsageError when stack, versions, settings or prompts are not those of its beginning, and HarnessError when
    the stack breaks.
    """
    plan, before = folder.load_plan(), folder.load_info()

    def accept(now: RunInfo, prompts: Prompts) -> RunInfo:
        if before.block_size and (different := _differences(folder, now, prompts)):
            told = "\n  ".join(different)
            raise UsageError(
                f"{folder.path} cannot be finished here, because what it has observed would not fit:\n  {told}\n"
                "restore these, or start a new run"
            )
        return now

    info = replace(before, failure=None)
    if _is_finished(plan, info, folder):
        folder.save_info(info)
    else:
        resumed = replace(info, resumed_at_s=(*info.resumed_at_s, time.time()))
        _on_engines(plan, resumed, stack, folder, watcher, accept, known_issues)
    return judge_again(folder, known_issues)


def fail(folder: RunFolder, error: HarnessError, known_issues: tuple[KnownIssue, ...] = ()) -> Report:
    """Store why a run did not come to its end, and report what it has observed. Raises `error` where nothing could be
    stored yet."""
    if not folder.has_info():
        raise error
    folder.save_info(replace(folder.load_info(), failure=Failure(str(error), error.exit_code)))
    return judge_again(folder, known_issues)


def judge_again(folder: RunFolder, known_issues: tuple[KnownIssue, ...] = ()) -> Report:
    """Judge a stored run from its observations alone; known issues change statuses only.

    Of a run that did not come to its end, cells without an observation are errors. Raises UsageError when the folder
    is damaged.
    """
    plan, info, observations = folder.load_plan(), folder.load_info(), folder.load_observations()
    prompts, oracles = (folder.load_prompts(), folder.load_oracles()) if observations else ((), ())
    twice = folder.load_observations(again=True)
    check_stored(folder.path, plan, info, {prompt.id for prompt in prompts}, (*observations, *twice))
    by_id, dtype = {prompt.id: prompt for prompt in prompts}, dtype_of(info)
    judged = judge(plan.cells, by_id, oracles, observations, info.block_size, dtype)
    verdicts = with_known_issues(judged, plan.cells, known_issues, info)
    for verdict in verdicts:
        folder.save_verdict(verdict)
    judge_alone = cell_judge(by_id, oracles, info.block_size, dtype)
    cells = {cell.id: cell for cell in plan.cells}
    again = tuple(SecondAttempt(seen, judge_alone(cells[seen.cell_id], seen)) for seen in twice)
    for attempt in again:
        folder.save_verdict(attempt.verdict, again=True)
    return Report(
        info,
        folder.load_timing(),
        plan.cells,
        observations,
        verdicts,
        exit_code_of(info, plan.cells, verdicts),
        str(folder.path),
        prompts,
        oracles,
        again,
    )


def exit_code_of(info: RunInfo, cells: tuple[Cell, ...], verdicts: tuple[Verdict, ...]) -> int:
    """The judge's, or that of what ended the run too early; a failed cell is worse. A run in which every cell that is
    no control was skipped is inconclusive."""
    code = exit_code(verdicts) or (INCONCLUSIVE if only_controls_ran(cells, verdicts) else 0)
    # A stored file may have been edited: who did not finish is not well.
    return info.failure.exit_code or HarnessError.exit_code if info.failure and code != CELL_FAILED else code


def _on_engines(
    plan: Plan,
    info: RunInfo,
    stack: Stack,
    folder: RunFolder,
    watcher: Watcher,
    accept: Accept,
    known_issues: tuple[KnownIssue, ...],
) -> None:
    """Start the stack, do what is left to do, and stop it; what is not known before is stored once it is."""
    if not info.block_size:
        folder.save_info(info)
    watcher.begins(info, folder.path)
    clock = Clock(watcher, folder)
    with stack, _kept_evidence(stack, folder, watcher):
        try:
            with clock.phase("start"):
                stack.wait_ready(stack.services, START_DEADLINE_S, watcher.waiting)
        finally:
            if not info.block_size:
                folder.save_info(_with_engines(info, stack))
        now = _complete(_with_engines(info, stack), stack)
        prompts = build_prompts(plan.prompts, stack.client(PREFILL), now.block_size, info.seed)
        check_blocks(plan.cells, prompts)
        check_prompts(plan.cells, prompts, now.block_size)
        now = accept(now, prompts)
        folder.save_info(now)
        folder.save_prompts(tuple(prompts.values()))
        session = Session(plan, now, prompts, folder, known_issues)
        observe(session, Runner(stack, prompts, watcher.waiting), clock, watcher)


def _is_finished(plan: Plan, info: RunInfo, folder: RunFolder) -> bool:
    return folder.has_oracles() and not cells_left(plan, info.seed, folder) and not again_left(folder)


@contextmanager
def _kept_evidence(stack: Stack, folder: RunFolder, watcher: Watcher) -> Iterator[None]:
    """However the run ends, its folder has the engines' logs and journals; containers take theirs with them."""
    try:
        yield
    finally:
        watcher.phase_begun("stop")
        folder.save_evidence(stack.evidence_dir, stack.services)


def _with_engines(info: RunInfo, stack: Stack) -> RunInfo:
    """With what the engines have said of themselves, which they do before they are ready."""
    found = {service: stack.engine_info(service) for service in stack.services}
    engines = {service: engine for service, engine in found.items() if engine}
    versions = engines[PREFILL].versions if PREFILL in engines else Versions()
    return replace(info, engines=engines, versions=versions, variables=stack.changed_variables(engines))


def _complete(info: RunInfo, stack: Stack) -> RunInfo:
    """With what ready engines answer. Services that others started may not have said what they are; then what vLLM's
    server tells has to do. Raises StackError where engines contradict what they said, or each other."""
    client = stack.client(PREFILL)
    check_engines(info, stack)
    if PREFILL not in info.engines:
        info = replace(info, versions=Versions(vllm=client.version(), model=client.model_name()))
    return replace(info, block_size=client.block_size())


def _differences(original: RunFolder, now: RunInfo, prompts: Prompts) -> tuple[str, ...]:
    before = {prompt.id: prompt for prompt in original.load_prompts()}
    return (*differences(original.load_info(), now), *prompt_differences(before, prompts))
