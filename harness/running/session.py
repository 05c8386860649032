"""The phases of a run on running engines: prefill, oracles, cells, and once more, alone, what is not green.

phases.py calls `observe` for each session of a run; what an earlier session has saved is not done again. Everything is
saved as soon as it is known, and who watches is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from harness.judging.judge import cell_judge, to_run_again
from harness.judging.known_issues import KnownIssue, with_known_issues
from harness.judging.oracles import needed
from harness.planning.plan import engines_of
from harness.planning.seed import in_order
from harness.records import (
    Cell,
    Observation,
    OracleKey,
    OracleKind,
    OracleRun,
    Plan,
    Prompt,
    RunInfo,
    Timing,
    Verdict,
)
from harness.run_folder import RunFolder
from harness.running.conditions import dtype_of
from harness.running.lanes import by_engine, side_by_side
from harness.running.runner import Runner
from harness.running.watcher import Watcher

REPEATED_ORACLES = (OracleKind.REUSE, OracleKind.RECOMPUTE)
"""Measured twice: an oracle that does not agree with itself proves nothing."""


class Clock:
    """Times the phases of a run and saves what was spent, on top of what earlier sessions spent."""

    def __init__(self, watcher: Watcher, folder: RunFolder) -> None:
        self._watcher, self._folder = watcher, folder
        self._began_s = time.monotonic()
        self._earlier = folder.load_timing()
        self._spent_s = dict(self._earlier.phases)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began_s = time.monotonic()
        self._watcher.phase_begun(name)
        try:
            yield
            self._watcher.phase_done(name, time.monotonic() - began_s)
        finally:
            now_s = time.monotonic()
            self._spent_s[name] = self._spent_s.get(name, 0.0) + now_s - began_s
            duration_s = self._earlier.duration_s + now_s - self._began_s
            self._folder.save_timing(Timing(tuple(self._spent_s.items()), duration_s))


@dataclass(frozen=True)
class Session:
    """One start of the stack, and what is known once its engines are ready."""

    plan: Plan
    info: RunInfo
    prompts: Mapping[str, Prompt]
    folder: RunFolder
    known_issues: tuple[KnownIssue, ...] = ()


def observe(session: Session, runner: Runner, clock: Clock, watcher: Watcher) -> None:
    """Do what is not done yet. Raises HarnessError when a prompt cannot be saved or an oracle not be measured."""
    plan, folder, block_size = session.plan, session.folder, session.info.block_size
    with clock.phase("prefill"):
        _prefill(runner, plan, session.prompts)
    if not folder.has_oracles():
        with clock.phase("oracles"):
            folder.save_oracles(_measure(runner, needed(runner.runnable(plan.cells), session.prompts, block_size)))
    with clock.phase("cells"):
        left = cells_left(plan, session.info.seed, folder)
        watcher.cells_planned(left)
        _run_cells(session, runner, by_engine(left, lambda cell: cell.engine), watcher.cell_begun, watcher.cell_done)
    if red := again_left(folder):
        with clock.phase("again"):
            watcher.cells_again(red)
            _run_cells(session, runner, (red,), watcher.cell_begun, watcher.cell_done_again, again=True)


def cells_left(plan: Plan, seed: int, folder: RunFolder) -> tuple[Cell, ...]:
    """The cells that were not run yet, in the order of the seed."""
    done = {observation.cell_id for observation in folder.load_observations()}
    return tuple(cell for cell in in_order(plan.cells, seed) if cell.id not in done)


def again_left(folder: RunFolder) -> tuple[Cell, ...]:
    """Once all cells were run: those that are not green and have not had their second attempt."""
    done = {observation.cell_id for observation in folder.load_observations(again=True)}
    prompts, info = {prompt.id: prompt for prompt in folder.load_prompts()}, folder.load_info()
    observations, oracles = folder.load_observations(), folder.load_oracles()
    cells = folder.load_plan().cells
    red = to_run_again(cells, prompts, oracles, observations, info.block_size, dtype_of(info))
    return tuple(cell for cell in red if cell.id not in done)


def _run_cells(
    session: Session,
    runner: Runner,
    lanes: tuple[Sequence[Cell], ...],
    begun: Callable[[Cell], None],
    done: Callable[[Cell, Verdict, float], None],
    *,
    again: bool = False,
) -> None:
    """Run the cells, save each as it ends, and tell what it is by itself, known issues included."""
    folder, info = session.folder, session.info
    judge_alone = cell_judge(session.prompts, folder.load_oracles(), info.block_size, dtype_of(info))

    def run(cell: Cell) -> Observation:
        begun(cell)
        return replace(runner.run(cell), session=len(info.resumed_at_s))

    with closing(side_by_side(lanes, run)) as ended:
        for cell, observation in ended:
            folder.save_observation(cell, observation, again=again)
            (verdict,) = with_known_issues([judge_alone(cell, observation)], [cell], session.known_issues, info)
            done(cell, verdict, observation.duration_s)


def _prefill(runner: Runner, plan: Plan, prompts: Mapping[str, Prompt]) -> None:
    """Save every prompt's KV; the decode engines warm up on the first one meanwhile."""
    first, *others = sorted(prompts.values(), key=lambda prompt: len(prompt.token_ids))
    runner.prefill(first)
    services = engines_of(runner.runnable(plan.cells))
    with ThreadPoolExecutor(max(len(services), 1)) as pool:
        warm_ups = [pool.submit(runner.warm_up, service, first) for service in services]
        for prompt in others:
            runner.prefill(prompt)
        for warm_up in warm_ups:
            warm_up.result()


def _measure(runner: Runner, keys: tuple[OracleKey, ...]) -> tuple[OracleRun, ...]:
    """The oracles in the order of `keys`, those of each engine beside those of the others."""
    repeated = [(key, index) for key in keys for index in range(1 + (key.kind in REPEATED_ORACLES))]
    lanes = by_engine(repeated, lambda run: run[0].engine)
    with closing(side_by_side(lanes, lambda run: runner.oracle(*run))) as ended:
        measured = dict(ended)
    return tuple(measured[run] for run in repeated)
