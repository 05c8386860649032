"""How tests judge one cell: beside controls that are as they should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from harness.judging.judge import exit_code, judge
from harness.records import Cell, Finding, Observation, OracleRun, Verdict
from services.faults import FaultKind
from tests.builders import BLOCK_SIZE, PROMPTS, cell, observation, oracle_runs

Change = Callable[[Observation], Observation]
"""One thing that is wrong with what was seen."""

VICTIM_TAG, BYSTANDER_TAG, CANARY_TAG, RELOAD_TAG = "tag-victim", "tag-bystander", "tag-canary", "tag-reload"


def controls_of(of: Cell) -> tuple[Cell, ...]:
    """The two control cells of a cell's engine and load mode."""
    names = {kind: f"control-{kind}" for kind in (FaultKind.NONE, FaultKind.SILENT)}
    controls = (cell(kind, load=of.load, policy=of.policy, name=name) for kind, name in names.items())
    return tuple(replace(control, engine=of.engine) for control in controls)


def judged(of: Cell, seen: Observation | None = None, runs: tuple[OracleRun, ...] | None = None) -> tuple[Verdict, int]:
    """The verdict, and the exit code of the cell and its controls. `seen`, `runs`: without them what honest engines
    show."""
    cells = (*controls_of(of), of)
    observations = [observation(each) for each in cells[:-1]] + [seen or observation(of)]
    measured = oracle_runs(cells) if runs is None else runs
    verdicts = judge(cells, PROMPTS, measured, observations, BLOCK_SIZE)
    return verdicts[-1], exit_code(verdicts)


def verdict_of(of: Cell, seen: Observation) -> Verdict:
    return judged(of, seen)[0]


def broken_checks(verdict: Verdict) -> set[str]:
    return {finding.check for finding in verdict.findings if not finding.ok}


def told(findings: tuple[Finding, ...]) -> list[str]:
    """What a reader of a report gets of each."""
    return [said(finding) for finding in findings]


def said(finding: Finding) -> str:
    who = f" of {finding.request}" if finding.request else ""
    asked = "; ".join(f"{name} {text}" for name, text in (("expected", finding.expected), ("got", finding.got)) if text)
    words = ": ".join(filter(None, (f"{finding.check}{who}", finding.detail, asked)))
    return words if finding.ok else f"{words} (broken)"


def lines(text: str) -> list[str]:
    return text.strip().split("\n")
