"""Verdicts: what a cell's observation, held against the oracles, says about the engine.

`phases.py` calls `judge` once the run is over, or on a saved run; `session.py` judges single cells meanwhile. Pure: no
clock, file or network. Every check always runs and leaves its findings; the first broken one, in the order of `CHECKS`,
names the outcome.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from harness.judging import process_checks, storage_checks
from harness.judging.answers import comparison
from harness.judging.case import FAIL_POLICY, Case
from harness.judging.checks import CHECKS
from harness.judging.comparison import UNKNOWN_DTYPE, failed_cleanly, noise_band
from harness.planning.controls import controls_of, load_modes, undisturbed
from harness.records import (
    Cell,
    Evidence,
    Finding,
    Observation,
    OracleKey,
    OracleRun,
    Outcome,
    Prompt,
    RequestRecord,
    Role,
    Status,
    Verdict,
)
from services.faults import BROKEN_KINDS, FaultKind
from services.journal import EventName

WRONG_ANSWERS = frozenset({Outcome.WRONG_OUTPUT, Outcome.POISONED, Outcome.COLLATERAL})
GREENS = frozenset({Outcome.LOADED, Outcome.RECOVERED, Outcome.FAILED_CLEANLY, Outcome.CAUGHT})


def judge(
    cells: Sequence[Cell],
    prompts: Mapping[str, Prompt],
    oracle_runs: Sequence[OracleRun],
    observations: Iterable[Observation],
    block_size: int,
    dtype: str = UNKNOWN_DTYPE,
) -> tuple[Verdict, ...]:
    """One verdict per cell, in the order of `cells`. A cell without an observation was not run.

    `block_size` is in tokens, `dtype` what the engines compute in, by vLLM's name. Raises KeyError for a cell whose
    prompt is not in `prompts`.
    """
    return _with_controls(cells, _by_themselves(cells, prompts, oracle_runs, observations, block_size, dtype))


def to_run_again(
    cells: Sequence[Cell],
    prompts: Mapping[str, Prompt],
    oracle_runs: Sequence[OracleRun],
    observations: Sequence[Observation],
    block_size: int,
    dtype: str = UNKNOWN_DTYPE,
) -> tuple[Cell, ...]:
    """The cells that were run and are neither green nor skipped, each by itself: what is wrong with the controls of
    others is not a reason."""
    verdicts = _by_themselves(cells, prompts, oracle_runs, observations, block_size, dtype)
    fine = {verdict.cell_id for verdict in verdicts if verdict.status in (Status.PASS, Status.SKIPPED)}
    again = {observation.cell_id for observation in observations} - fine
    return tuple(cell for cell in cells if cell.id in again)


def _by_themselves(
    cells: Sequence[Cell],
    prompts: Mapping[str, Prompt],
    oracle_runs: Sequence[OracleRun],
    observations: Iterable[Observation],
    block_size: int,
    dtype: str,
) -> tuple[Verdict, ...]:
    """The verdicts as long as nobody asks for the controls."""
    observed = {observation.cell_id: observation for observation in observations}
    judge_alone = cell_judge(prompts, oracle_runs, block_size, dtype)
    verdicts = tuple(
        judge_alone(cell, observed[cell.id])
        if cell.id in observed
        else _not_run(cell, Status.ERROR, Finding("observed", False, "the run ended before this cell"))
        for cell in cells
    )
    return _with_late_deaths(cells, verdicts, observed)


def cell_judge(
    prompts: Mapping[str, Prompt], oracle_runs: Sequence[OracleRun], block_size: int, dtype: str = UNKNOWN_DTYPE
) -> Callable[[Cell, Observation], Verdict]:
    """Judges one cell by itself, controls aside: what can be said while a run goes on."""
    oracles: defaultdict[OracleKey, list[OracleRun]] = defaultdict(list)
    for run in oracle_runs:
        oracles[run.key].append(run)
    band = noise_band(oracle_runs, dtype)
    return lambda cell, seen: _judge_cell(Case(cell, seen, prompts, dict(oracles), block_size, band))


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """1 a cell failed, 3 the harness broke, 2 inconclusive, 0 all well; the first of these that applies.

    A run in which no cell was judged proves nothing, so it is inconclusive.
    """
    found = {verdict.status for verdict in verdicts}
    codes = ((Status.FAIL, 1), (Status.ERROR, 3), (Status.INCONCLUSIVE, 2))
    return next((code for status, code in codes if status in found), 0 if found - {Status.SKIPPED} else 2)


def only_controls_ran(cells: Iterable[Cell], verdicts: Iterable[Verdict]) -> bool:
    """Whether other cells were asked for, and all of these were skipped: such a run proves nothing."""
    others = {cell.id for cell in cells if not cell.control}
    return others != set() and all(v.status is Status.SKIPPED for v in verdicts if v.cell_id in others)


def _judge_cell(case: Case) -> Verdict:
    seen = case.observation
    if seen.error:
        return _not_run(case.cell, Status.ERROR, Finding("observed", False, seen.error))
    if seen.skipped:
        return _not_run(case.cell, Status.SKIPPED, Finding("stack-suffices", False, seen.skipped))
    results = [(outcome, tuple(check(case))) for outcome, check in CHECKS]
    broken = [outcome for outcome, found in results if not all(finding.ok for finding in found)]
    outcome = _worst(broken) if broken else _green(case)
    findings = [finding for _, found in results for finding in found]
    if outcome in GREENS:
        expected = case.cell.expected
        findings.append(Finding("expected-outcome", outcome is expected, expected=expected, got=outcome))
    compared = (comparison(case, record).difference for record in case.observation.requests)
    differences = tuple(difference for difference in compared if difference)
    status = _status(outcome, case.cell.expected)
    return Verdict(case.cell.id, outcome, status, tuple(findings), _evidence(case), differences)


def _worst(broken: Sequence[Outcome]) -> Outcome:
    """The first; but a wrong answer, which nobody may notice, is worse than none, and than a load of another mode."""
    wrong = next((outcome for outcome in broken if outcome in WRONG_ANSWERS), broken[0])
    match broken[0]:
        case Outcome.NOT_RUN:
            # A connector that cannot load as asked is no finding; wrong answers are, however it loaded.
            return wrong
        case Outcome.HUNG if Outcome.UNPROVEN not in broken:
            return wrong
        case first:
            return first


def _not_run(cell: Cell, status: Status, finding: Finding) -> Verdict:
    return Verdict(cell.id, Outcome.NOT_RUN, status, (finding,), Evidence())


def _green(case: Case) -> Outcome:
    """The outcome of a cell in which no check is broken."""
    if case.cell.process:
        return process_checks.green(case.cell.process)
    if case.cell.fault.kind is FaultKind.SILENT:
        return Outcome.CAUGHT
    broken = [record for record in case.records(Role.VICTIM) if _is_broken(case, record)]
    if not broken:
        return Outcome.LOADED
    answered = [record for record in broken if not record.planned.gives_up]
    if not answered:
        return Outcome.FAILED_CLEANLY if case.cell.policy == FAIL_POLICY else Outcome.RECOVERED
    clean = all(failed_cleanly(record.completion, stream=record.planned.stream) for record in answered)
    return Outcome.FAILED_CLEANLY if clean else Outcome.RECOVERED


def _is_broken(case: Case, record: RequestRecord) -> bool:
    """Whether vLLM was to be told that blocks of this victim's load are bad."""
    if case.cell.storage:
        return case.cell.storage.fails
    return record.planned.fault.kind in BROKEN_KINDS


def _status(outcome: Outcome, expected: Outcome) -> Status:
    match outcome:
        case Outcome.NOT_RUN:
            return Status.SKIPPED
        case Outcome.UNPROVEN | Outcome.MISSED:
            return Status.INCONCLUSIVE
        case _:
            return Status.PASS if outcome is expected else Status.FAIL


def _evidence(case: Case) -> Evidence:
    def count(name: EventName) -> int:
        return sum(len(blocks) for record in case.records(Role.VICTIM) for blocks in case.blocks(record, name))

    fired = sum(len(case.blocks(record, EventName.FAULT_FIRED)) for record in case.records(Role.VICTIM))
    fired += storage_checks.fired_count(case) + process_checks.fired_count(case)
    return Evidence(count(EventName.LOADED), count(EventName.FAILED), count(EventName.REPORTED), fired)


def _with_late_deaths(
    cells: Sequence[Cell], verdicts: Sequence[Verdict], observed: Mapping[str, Observation]
) -> tuple[Verdict, ...]:
    """The verdicts, where an engine that was alive at the end of a cell but had died before its next one began."""
    died_after = _died_after(cells, observed)
    return tuple(
        replace(
            verdict,
            outcome=Outcome.CRASHED,
            status=Status.FAIL,
            findings=(*verdict.findings, Finding("engine-alive-afterwards", False, "it died before the next cell")),
        )
        if verdict.cell_id in died_after and verdict.outcome is not Outcome.NOT_RUN
        else verdict
        for verdict in verdicts
    )


def _died_after(cells: Sequence[Cell], observed: Mapping[str, Observation]) -> frozenset[str]:
    """Cells between whose end and the next start on the same engine the engine's exit count grew.

    The runner itself ends an engine, once, that does not come to rest, and a run that is resumed starts new ones.
    """
    ran = sorted((c for c in cells if c.id in observed), key=lambda cell: observed[cell.id].started_at_s)
    follows = [(one, next((c for c in ran[i:] if c.engine == one.engine), None)) for i, one in enumerate(ran, start=1)]
    return frozenset(
        one.id
        for one, other in follows
        if other
        and not observed[other.id].error
        and observed[other.id].session == observed[one.id].session
        and observed[other.id].before.restart_count
        > observed[one.id].after.restart_count + (not observed[one.id].settled)
    )


def _with_controls(cells: Sequence[Cell], verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """The verdicts, where cells that should back another one and do not pass leave nothing proven for it.

    A red verdict stays red, and a cell that was not run stays so; a control is not doubted on its own account.
    """
    by_id = {verdict.cell_id: verdict for verdict in verdicts}
    return tuple(_with_control(cell, by_id[cell.id], _doubts(cell, cells, by_id)) for cell in cells)


def _with_control(cell: Cell, verdict: Verdict, doubts: tuple[str, ...]) -> Verdict:
    if verdict.outcome is Outcome.NOT_RUN or not load_modes(cell):
        return verdict
    finding = Finding("controls", not doubts, "; ".join(doubts))
    doubted = replace(verdict, findings=(*verdict.findings, finding))
    if doubts and verdict.status is Status.PASS:
        return replace(doubted, outcome=Outcome.UNPROVEN, status=Status.INCONCLUSIVE)
    return doubted


def _doubts(cell: Cell, cells: Sequence[Cell], verdicts: Mapping[str, Verdict]) -> tuple[str, ...]:
    """What is wrong with the cells that back this one: its controls, and the same requests with nothing broken."""
    controls = controls_of(cell, cells)
    plain = (control for control in controls if not control.storage and not control.process)
    there = {(control.load, control.fault.kind) for control in plain}
    absent = [
        f"no {name} control for {cell.engine}, {load}"
        for load in load_modes(cell)
        for name, kind in (("no-fault", FaultKind.NONE), ("silent", FaultKind.SILENT))
        if (load, kind) not in there
    ]
    backing = dict.fromkeys(other.id for other in (*controls, *undisturbed(cell, cells)) if other.id != cell.id)
    broken = [f"{name} is {verdicts[name].outcome}" for name in backing if verdicts[name].status is not Status.PASS]
    return (*absent, *broken)
