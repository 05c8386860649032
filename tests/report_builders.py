"""Reports of made runs, judged by the real judge, for tests that need what a whole run shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from harness.judging.judge import exit_code, judge
from harness.records import Cell, Completion, Observation, Report, Role, RunInfo, Timing, Versions
from services.faults import FaultKind, LoadMode
from tests import builders

STEP_S = 0.013
"""Between two events of a made journal."""

STARTED_AT_S = 1_796_053_501.0


def cells() -> tuple[Cell, ...]:
    """The controls of both policies and load modes, and the faults that every connector can have."""
    return tuple(_cells())


def _cells() -> Iterator[Cell]:
    for policy, load in product(("recompute", "fail"), (LoadMode.SYNC, LoadMode.ASYNC)):
        for kind in (FaultKind.NONE, FaultKind.SILENT):
            yield builders.cell(kind, load=load, policy=policy)
        for blocks in ("first", "middle", "last"):
            name = f"{policy}-report-{load}-{blocks}"
            yield builders.cell(FaultKind.REPORT, blocks, load=load, policy=policy, name=name)
        mix = f"{policy}-report-{load}-middle-mix"
        yield builders.cell(FaultKind.REPORT, "middle", load=load, policy=policy, mix=True, stream=True, name=mix)


def many_cells(count: int) -> tuple[Cell, ...]:
    """As `cells`, again and again under new names."""
    rounds = -(-count // len(cells()))
    named = (replace(cell, id=f"{cell.id}-{index}") for index in range(rounds) for cell in cells())
    return tuple(named)[:count]


def run_report(of: tuple[Cell, ...], wrong: Mapping[str, str] | None = None, log_lines: tuple[str, ...] = ()) -> Report:
    """A run of these cells. `wrong`: cell ids, and the text with which their victim answers something else.
    `log_lines`: what each engine logged."""
    seen = tuple(_observed(cell, (wrong or {}).get(cell.id), log_lines) for cell in of)
    oracles = builders.oracle_runs(of)
    verdicts = judge(of, builders.PROMPTS, oracles, seen, builders.BLOCK_SIZE)
    return Report(
        info=RunInfo(
            run_id="20261130-154501",
            matrix="example",
            stack="processes",
            versions=Versions("0.32.0", "2.13.0", "3.11.2", "smollm2", "shared-volume"),
            engines={},
            command="harness/run_matrix.py",
            started_at_s=STARTED_AT_S,
            block_size=builders.BLOCK_SIZE,
        ),
        timing=Timing((("start", 30.5), ("oracles", 4.0), ("cells", 16.0)), 51.25),
        cells=of,
        observations=seen,
        verdicts=verdicts,
        exit_code=exit_code(verdicts),
        folder="runs/20261130-154501",
        prompts=tuple(builders.PROMPTS.values()),
        oracles=oracles,
    )


def _observed(cell: Cell, wrong_text: str | None, log_lines: tuple[str, ...]) -> Observation:
    seen = builders.observation(cell)
    if wrong_text is not None:
        seen = builders.answer_with(seen, Role.VICTIM, _wrong(cell, wrong_text))
    events = tuple(
        replace(event, time_s=STARTED_AT_S + STEP_S * (index + 1), service=cell.engine)
        for index, event in enumerate(seen.events)
    )
    records = tuple(
        replace(record, sent_s=STEP_S * index, completion=_streamed(record.completion, record.planned.stream))
        for index, record in enumerate(seen.requests)
    )
    return replace(seen, requests=records, events=events, started_at_s=STARTED_AT_S, log_lines=log_lines)


def _wrong(cell: Cell, text: str) -> Completion:
    return replace(builders.wrong_answer(builders.PROMPTS[cell.requests[0].prompt_id]), text=text)


def _streamed(completion: Completion, stream: bool) -> Completion:
    return replace(completion, ttft_s=completion.duration_s / 2) if stream and not completion.error else completion
