"""What recovery costs: how long a request takes that reuses, recomputes, or recovers, by where its first bad block is.

Called by the reports. Pure, and only from what this run measured: its oracles, and cells whose victim ran alone with
a load that failed once. Times of one workload (prompt and answer length) are comparable; nothing is extrapolated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from harness.records import (
    Cell,
    Completion,
    Observation,
    OracleKind,
    OracleRun,
    Outcome,
    Report,
    RequestRecord,
)
from services.faults import FaultKind
from services.journal import EventName

COSTED_KINDS = frozenset({FaultKind.NONE, FaultKind.REPORT, FaultKind.DROP})
"""Boundary faults that take no time by themselves."""

FAILURES = frozenset({EventName.READ_FAILED, EventName.FAILED, EventName.REPORTED})


class Measure(StrEnum):
    """What was timed."""

    TTFT = "time to first token"
    """Streamed requests only."""
    WHOLE = "whole request"
    """From sent to answered, streamed or not."""


class Series(StrEnum):
    """What a request did."""

    ORACLE = "oracle, good blocks loaded"
    """Oracles, on engines without faults: reuse, partial, recompute. What a perfect recovery costs."""
    SOUND_SYNC = "no fault, sync"
    SOUND_ASYNC = "no fault, async"
    RECOVERED_SYNC = "recovered, sync"
    RECOVERED_ASYNC = "recovered, async"


@dataclass(frozen=True)
class Workload:
    """Requests whose times can be compared. `oracle_engine`: where the oracles of these cells were measured."""

    oracle_engine: str
    prompt_token_count: int
    block_count: int
    max_tokens: int


@dataclass(frozen=True)
class Sample:
    """One measured request. `good_blocks`: leading blocks that were loaded and sound; the workload's block count
    where all were. `cell_id`: empty for an oracle."""

    workload: Workload
    series: Series
    good_blocks: int
    ttft_s: float
    duration_s: float
    cell_id: str = ""


@dataclass(frozen=True)
class Line:
    """All samples of one series at one place, in one measure. Times in seconds, sorted."""

    series: Series
    good_blocks: int
    times_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return median(self.times_s)


@dataclass(frozen=True)
class CostTable:
    """One workload in one measure."""

    workload: Workload
    measure: Measure
    lines: tuple[Line, ...]

    @property
    def reuse_s(self) -> float:
        """What reuse takes: the median of the oracle that loads every block; 0 where it was not measured."""
        return self._oracle_s(self.workload.block_count)

    @property
    def recompute_s(self) -> float:
        """What recompute takes, likewise."""
        return self._oracle_s(0)

    @property
    def spread(self) -> float:
        """How far apart repeated measurements of the same thing were, at most: 0.2 is 20 %; 0 where none was."""
        return max((line.times_s[-1] / line.times_s[0] - 1 for line in self.lines if len(line.times_s) > 1), default=0)

    def _oracle_s(self, good_blocks: int) -> float:
        at = (line for line in self.lines if line.series is Series.ORACLE and line.good_blocks == good_blocks)
        return next((line.median_s for line in at), 0.0)


def costs(report: Report) -> tuple[CostTable, ...]:
    """One table for each workload in which something recovered, and for each measure that was taken of it."""
    samples = (*_oracle_samples(report), *_cell_samples(report))
    workloads = dict.fromkeys(sample.workload for sample in samples if _recovered(sample))
    tables = (_table(samples, workload, measure) for workload in workloads for measure in Measure)
    return tuple(table for table in tables if any(line.series in RECOVERED for line in table.lines))


RECOVERED = (Series.RECOVERED_SYNC, Series.RECOVERED_ASYNC)


def _recovered(sample: Sample) -> bool:
    return sample.series in RECOVERED


def _table(samples: Iterable[Sample], workload: Workload, measure: Measure) -> CostTable:
    taken: Callable[[Sample], float] = {
        Measure.TTFT: lambda sample: sample.ttft_s,
        Measure.WHOLE: lambda sample: sample.duration_s,
    }[measure]
    times: dict[tuple[Series, int], list[float]] = {}
    for sample in samples:
        if sample.workload == workload and taken(sample) > 0:
            times.setdefault((sample.series, sample.good_blocks), []).append(taken(sample))
    order = list(Series)
    keys = sorted(times, key=lambda key: (order.index(key[0]), key[1]))
    return CostTable(workload, measure, tuple(Line(*key, tuple(sorted(times[key]))) for key in keys))


def _oracle_samples(report: Report) -> Iterator[Sample]:
    for run in report.oracles:
        workload = _workload(run.completion, run.key.engine, run.key.max_tokens, report.info.block_size)
        if _answered(run.completion):
            yield _sample(workload, Series.ORACLE, _good_blocks(run, workload), run.completion)


def _good_blocks(run: OracleRun, workload: Workload) -> int:
    kinds = {OracleKind.REUSE: workload.block_count, OracleKind.RECOMPUTE: 0, OracleKind.PARTIAL: run.key.blocks}
    return kinds[run.key.kind]


def _cell_samples(report: Report) -> Iterator[Sample]:
    observations = {observation.cell_id: observation for observation in report.observations}
    cells = {cell.id: cell for cell in report.cells}
    for verdict in report.verdicts:
        cell, observation = cells[verdict.cell_id], observations.get(verdict.cell_id)
        if observation and observation.requests and _is_costed(cell, verdict.outcome):
            yield from _victim_sample(cell, observation, verdict.outcome, report.info.block_size)


def _is_costed(cell: Cell, outcome: Outcome) -> bool:
    """A victim alone that stays to the end, with a fault that struck once and took no time, or with none."""
    victim = cell.requests[0]
    plain = len(cell.requests) == 1 and not victim.gives_up and not victim.chat and not cell.process
    once = cell.fault.times == 1 and cell.fault.kind in COSTED_KINDS
    broken = cell.storage is not None or cell.fault.kind is not FaultKind.NONE
    return plain and once and outcome is (Outcome.RECOVERED if broken else Outcome.LOADED)


def _victim_sample(cell: Cell, observation: Observation, outcome: Outcome, block_size: int) -> Iterator[Sample]:
    victim = observation.requests[0]
    workload = _workload(victim.completion, cell.oracle_engine, cell.max_tokens, block_size)
    bad = _first_bad_block(observation, victim) if outcome is Outcome.RECOVERED else workload.block_count
    series = Series(f"{'recovered' if outcome is Outcome.RECOVERED else 'no fault'}, {cell.load}")
    if bad is not None and _answered(victim.completion):
        yield _sample(workload, series, bad, victim.completion, cell.id)


def _first_bad_block(observation: Observation, victim: RequestRecord) -> int | None:
    """As the connectors wrote it down; None where they named none."""
    events = (event for event in observation.events if event.request == victim.tag and event.name in FAILURES)
    return min((block for event in events for block in event.blocks), default=None)


def _answered(completion: Completion) -> bool:
    return completion.status_code == 200 and not completion.error and completion.prompt_token_count > 0


def _workload(completion: Completion, engine: str, max_tokens: int, block_size: int) -> Workload:
    # The last token of a prompt is always computed, so that there is something to sample from.
    return Workload(
        engine, completion.prompt_token_count, (completion.prompt_token_count - 1) // block_size, max_tokens
    )


def _sample(workload: Workload, series: Series, good: int, completion: Completion, cell_id: str = "") -> Sample:
    return Sample(workload, series, good, completion.ttft_s, completion.duration_s, cell_id)
