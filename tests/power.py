"""What simulated engines have to make of a matrix: which cells turn, into what, and by which check."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Generic, TypeVar

from harness.faults.process_kinds import ProcessKind
from harness.records import Cell, Outcome, Report, Status, Verdict

SOON_S = 2.0

Verdicts = tuple[Outcome, Status]

WRONG_OUTPUT, CRASHED, HUNG, POISONED, COLLATERAL, LEAKED, UNREPORTED = (
    (outcome, Status.FAIL)
    for outcome in (
        Outcome.WRONG_OUTPUT,
        Outcome.CRASHED,
        Outcome.HUNG,
        Outcome.POISONED,
        Outcome.COLLATERAL,
        Outcome.LEAKED,
        Outcome.UNREPORTED,
    )
)
UNPROVEN = (Outcome.UNPROVEN, Status.INCONCLUSIVE)
MISSED = (Outcome.MISSED, Status.INCONCLUSIVE)
SKIPPED = (Outcome.NOT_RUN, Status.SKIPPED)


Wrong = TypeVar("Wrong", bound=StrEnum)


@dataclass(frozen=True)
class Case(Generic[Wrong]):
    """`verdicts`: by glob of cell ids, the first that matches; every other cell passes. `finding`: a check that must
    be broken in each cell that does not pass, unless its controls are all that is wrong with it. `patterns`: the cells
    to run, besides their controls."""

    wrong: Wrong
    verdicts: Mapping[str, Verdicts]
    exit_code: int
    finding: str
    patterns: tuple[str, ...] = ()


def surprises(report: Report, case: Case[Wrong], may_be_skipped: tuple[str, ...] = ()) -> dict[str, str]:
    """By cell, what is not as the case has it; empty where everything is. `may_be_skipped`: globs of cells that this
    machine may be unable to run."""
    cells = {cell.id: cell for cell in report.cells}
    found = {v.cell_id: surprise(cells[v.cell_id], v, case, may_be_skipped) for v in report.verdicts}
    found["exit code"] = "" if report.exit_code == case.exit_code else str(report.exit_code)
    return {name: text for name, text in found.items() if text}


def surprise(cell: Cell, verdict: Verdict, case: Case[Wrong], may_be_skipped: tuple[str, ...]) -> str:
    got, wanted = (verdict.outcome, verdict.status), expected(cell, case)
    if got == SKIPPED and any(fnmatch.fnmatch(cell.id, pattern) for pattern in may_be_skipped):
        return ""
    text = f"{verdict.outcome} {verdict.status} by {', '.join(sorted(broken(verdict))) or 'nothing'}"
    if got != wanted:
        return f"{text}, not {' '.join(wanted)}"
    by_itself = verdict.status is not Status.PASS and broken(verdict) != {"controls"}
    return f"{text}, not by {case.finding}" if by_itself and case.finding not in broken(verdict) else ""


def expected(cell: Cell, case: Case[Wrong]) -> Verdicts:
    matching = (verdict for pattern, verdict in case.verdicts.items() if fnmatch.fnmatch(cell.id, pattern))
    return next(matching, (cell.expected, Status.PASS))


def broken(verdict: Verdict) -> set[str]:
    return {finding.check for finding in verdict.findings if not finding.ok}


def with_soon_given_up(cell: Cell) -> Cell:
    """Where the engine is paused until its client gives up, with a client that does so soon."""
    is_awaited = cell.process is not None and cell.process.kind is ProcessKind.DECODE_PAUSED_LOADING
    return replace(cell, deadline_s=SOON_S) if is_awaited else cell
