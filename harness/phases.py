"""The phases of a run, one after the other: start, prefill, oracles, cells, verdicts.

`commands.py` calls `run` on a stack and `judge_again` on a stored run; both end in a Report. Everything observed
is saved before it is judged.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, Queue

from harness.comparison import UNKNOWN_DTYPE
from harness.judge import cell_judge, exit_code, judge
from harness.known_issues import KnownIssue, with_known_issues
from harness.oracles import needed
from harness.plan_checks import check_blocks
from harness.records import (
    Cell,
    Observation,
    OracleKey,
    OracleKind,
    OracleRun,
    Plan,
    Prompt,
    Report,
    RunInfo,
    Timing,
    Versions,
)
from harness.runner import PREFILL, Runner
from harness.stack import Stack
from harness.storage import RunFolder
from harness.watcher import Watcher
from harness.workload import build_prompts

START_DEADLINE_S = 600.0
"""How long all engines together may take to start; a model may have to be fetched."""

QUEUE_POLL_S = 0.2
"""How long a thread of cells that broke may go unnoticed."""

REPEATED_ORACLES = (OracleKind.REUSE, OracleKind.RECOMPUTE)
"""Measured twice: an oracle that does not agree with itself proves nothing."""


@dataclass(frozen=True)
class Invocation:
    """How the run was asked for: the matrix as it was named, the whole command, the options that chose the stack."""

    matrix: str
    command: str
    stack_options: tuple[str, ...] = ()


class Clock:
    """Times the phases of one run."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._began_s = time.monotonic()
        self.phases: list[tuple[str, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began_s = time.monotonic()
        self._watcher.phase_begun(name)
        yield
        self.phases.append((name, time.monotonic() - began_s))
        self._watcher.phase_done(*self.phases[-1])

    def timing(self) -> Timing:
        startup_s = dict(self.phases).get("start", 0.0)
        return Timing(startup_s, tuple(self.phases), time.monotonic() - self._began_s)


def run(
    plan: Plan,
    stack: Stack,
    folder: RunFolder,
    invocation: Invocation,
    watcher: Watcher,
    known_issues: tuple[KnownIssue, ...] = (),
) -> Report:
    """Run `plan` on `stack`, which is started and stopped here. Raises HarnessError when the stack breaks."""
    clock = Clock(watcher)
    with stack, _kept_evidence(stack, folder):
        with clock.phase("start"):
            stack.wait_ready(stack.services, START_DEADLINE_S, watcher.waiting)
        info = _describe(stack, folder, invocation)
        prompts = _prompts(plan, stack, info.block_size)
        check_blocks(plan.cells, prompts)
        folder.save_info(info)
        folder.save_plan(plan)
        folder.save_prompts(tuple(prompts.values()))
        try:
            _observe(plan, Runner(stack, prompts, watcher.waiting), prompts, info, folder, clock, watcher)
        finally:
            folder.save_timing(clock.timing())
    return judge_again(folder, known_issues)


@contextmanager
def _kept_evidence(stack: Stack, folder: RunFolder) -> Iterator[None]:
    """However the run ends, its folder has the engines' logs and journals; containers take theirs with them."""
    try:
        yield
    finally:
        folder.save_evidence(stack.evidence_dir)


def _observe(
    plan: Plan,
    runner: Runner,
    prompts: Mapping[str, Prompt],
    info: RunInfo,
    folder: RunFolder,
    clock: Clock,
    watcher: Watcher,
) -> None:
    with clock.phase("prefill"):
        _prefill(runner, plan, prompts)
    with clock.phase("oracles"):
        oracles = _measure(runner, needed(runner.runnable(plan.cells), prompts, info.block_size))
        folder.save_oracles(oracles)
    judge_alone = cell_judge(prompts, oracles, info.block_size, dtype_of(info))
    with clock.phase("cells"):
        watcher.cells_planned(plan.cells)
        for cell, observation in _side_by_side(runner, plan.cells, folder, watcher):
            watcher.cell_done(cell, judge_alone(cell, observation), observation.duration_s)


def _side_by_side(
    runner: Runner, cells: tuple[Cell, ...], folder: RunFolder, watcher: Watcher
) -> Iterator[tuple[Cell, Observation]]:
    """Run the cells, one at a time per engine and in order, the engines side by side; yield each as it ends."""
    of_engine: dict[str, list[Cell]] = {}
    for cell in cells:
        of_engine.setdefault(cell.engine, []).append(cell)
    ended: Queue[tuple[Cell, Observation]] = Queue()
    stopping = threading.Event()

    def run_engine(own: list[Cell]) -> None:
        for cell in own:
            if stopping.is_set():
                return
            watcher.cell_begun(cell)
            observation = runner.run(cell)
            folder.save_observation(cell, observation)
            ended.put((cell, observation))

    pool = ThreadPoolExecutor(len(of_engine))
    running = [pool.submit(run_engine, own) for own in of_engine.values()]
    try:
        while not all(future.done() for future in running) or not ended.empty():
            with contextlib.suppress(Empty):
                yield ended.get(timeout=QUEUE_POLL_S)
        for future in running:
            future.result()
    finally:
        # After Ctrl-C the engines are stopped next, which ends the requests that are still out.
        stopping.set()
        pool.shutdown(wait=False)


def judge_again(folder: RunFolder, known_issues: tuple[KnownIssue, ...] = ()) -> Report:
    """Judge a stored run from its observations alone; known issues change statuses only.

    Raises UsageError when the folder is not a whole run.
    """
    plan, info = folder.load_plan(), folder.load_info()
    prompts, oracles = folder.load_prompts(), folder.load_oracles()
    observations = folder.load_observations()
    by_id = {prompt.id: prompt for prompt in prompts}
    judged = judge(plan.cells, by_id, oracles, observations, info.block_size, dtype_of(info))
    verdicts = with_known_issues(judged, plan.cells, known_issues, info)
    for verdict in verdicts:
        folder.save_verdict(verdict)
    return Report(
        info,
        folder.load_timing(),
        plan.cells,
        observations,
        verdicts,
        exit_code(verdicts),
        str(folder.path),
        prompts,
        oracles,
    )


def _describe(stack: Stack, folder: RunFolder, invocation: Invocation) -> RunInfo:
    client = stack.client(PREFILL)
    found = {service: stack.engine_info(service) for service in stack.services}
    engines = {service: engine for service, engine in found.items() if engine}
    # Services that others started may not say what they are; then what vLLM's server tells has to do.
    unknown = Versions(vllm=client.version(), torch="", python="", model=client.model_name(), connector="")
    return RunInfo(
        run_id=folder.path.name,
        matrix=invocation.matrix,
        stack=stack.name,
        versions=engines[PREFILL].versions if PREFILL in engines else unknown,
        engines=engines,
        command=invocation.command,
        started_at_s=time.time(),
        block_size=client.block_size(),
        stack_options=invocation.stack_options,
        variables=stack.changed_variables(engines),
        in_compose=stack.in_compose,
    )


def dtype_of(info: RunInfo) -> str:
    """What the oracles were computed in; the engines of a stack have it in common."""
    return info.engines[PREFILL].settings.get("DTYPE", UNKNOWN_DTYPE) if PREFILL in info.engines else UNKNOWN_DTYPE


def _prompts(plan: Plan, stack: Stack, block_size: int) -> Mapping[str, Prompt]:
    return build_prompts(plan.prompts, stack.client(PREFILL), block_size)


def _prefill(runner: Runner, plan: Plan, prompts: Mapping[str, Prompt]) -> None:
    """Save every prompt's KV; the decode engines warm up on the first one meanwhile."""
    first, *others = sorted(prompts.values(), key=lambda prompt: len(prompt.token_ids))
    runner.prefill(first)
    used = (service for cell in runner.runnable(plan.cells) for service in (cell.oracle_engine, cell.engine))
    services = tuple(dict.fromkeys(used))
    with ThreadPoolExecutor(max(len(services), 1)) as pool:
        warm_ups = [pool.submit(runner.warm_up, service, first) for service in services]
        for prompt in others:
            runner.prefill(prompt)
        for warm_up in warm_ups:
            warm_up.result()


def _measure(runner: Runner, keys: tuple[OracleKey, ...]) -> tuple[OracleRun, ...]:
    return tuple(
        runner.oracle(key, run_index) for key in keys for run_index in range(1 + (key.kind in REPEATED_ORACLES))
    )
