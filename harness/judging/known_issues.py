"""Known issues: red cells that someone upstream knows of; they change what a red verdict means, never the verdict.

`commands.py` loads the file before a run. `session.py` applies it to each verdict that is told while the run goes on,
`phases.judge_again` when all are judged. A file with mistakes is refused as a whole, with every mistake at once, as a
matrix file is.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from harness.errors import UsageError
from harness.planning.matrix_file import Problem, checked, parse, report
from harness.planning.matrix_words import Entry
from harness.records import Cell, Outcome, RunInfo, Status, Verdict

RUNNER_SETTING = "VLLM_USE_V2_MODEL_RUNNER"
RUNNERS = {"0": "V1", "1": "V2"}
"""Which model runner an engine's RUNNER_SETTING stands for."""
ANY_RUNNER = "any"

RedOutcome = Literal["wrong-output", "crashed", "hung", "poisoned", "collateral", "leaked", "unreported"]


def _as_specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        example = "such as '>=0.26,<0.33' or '==0.32.*'"
        raise PydanticCustomError("choice", "{value} is no range", {"value": repr(text), "choices": example}) from None
    return text


class IssueEntry(Entry):
    """One entry of `issues`, a red cell that is known upstream: it is reported as `known` and does not fail the run.
    Once it is green it is `fixed`, and its entry should go. The outcome in the report stays what it was."""

    cell: str = Field(min_length=1)
    """A glob of cell ids."""
    vllm: Annotated[str, Field(min_length=1), AfterValidator(_as_specifier)]
    """The versions that have it, as pip writes ranges."""
    runner: Literal["V1", "V2", "any"]
    """The model runner: VLLM_USE_V2_MODEL_RUNNER of the engine."""
    outcome: RedOutcome
    """The red outcome; red with another one still fails the run."""
    link: str = Field(pattern=r"^https://[^\s]+$")
    """Where it is known."""
    why: str = Field(min_length=1)
    """One sentence: what happens."""


class IssuesFile(Entry):
    """The top of the file; its issues are checked one by one, so that all their mistakes are found."""

    schema_version: Literal[1] = Field(alias="schema")
    issues: list[object]


@dataclass(frozen=True)
class KnownIssue:
    """As IssueEntry: where `cell` (a glob) is red with `outcome`, on which vLLM and model runner, and who knows."""

    cell: str
    versions: SpecifierSet
    runner: str
    outcome: Outcome
    link: str
    why: str


def load_known_issues(path: Path) -> tuple[KnownIssue, ...]:
    """The issues in the order of the file. Raises UsageError that lists every problem of the file."""
    what = "list of known issues"
    document = parse(path, what)
    problems = [Problem(f"{at[-1]} is given twice", at) for at in document.repeated]
    checked(IssuesFile, document.root, (), problems)
    raw = document.root.get("issues") if isinstance(document.root, dict) else None
    entries = [checked(IssueEntry, each, ("issues", i), problems) for i, each in enumerate(_listed(raw))]
    if problems:
        raise UsageError(report(path, document, problems))
    return tuple(_issue(entry) for entry in entries if entry)


def with_known_issues(
    verdicts: Sequence[Verdict], cells: Sequence[Cell], issues: Sequence[KnownIssue], info: RunInfo
) -> tuple[Verdict, ...]:
    """The verdicts, where a failed cell with a known outcome is `known`, and a passed one that has an issue `fixed`.

    Outcome and findings stay as they are; other statuses too, and so does red with another outcome than the known.
    """
    by_id = {cell.id: cell for cell in cells}
    return tuple(_with_issues(verdict, _issues_of(by_id[verdict.cell_id], issues, info)) for verdict in verdicts)


def _with_issues(verdict: Verdict, issues: Sequence[KnownIssue]) -> Verdict:
    if verdict.status is Status.PASS and issues:
        return replace(verdict, status=Status.FIXED, link=issues[0].link)
    known = [issue for issue in issues if issue.outcome is verdict.outcome]
    if verdict.status is Status.FAIL and known:
        return replace(verdict, status=Status.KNOWN, link=known[0].link)
    return verdict


def _issues_of(cell: Cell, issues: Sequence[KnownIssue], info: RunInfo) -> tuple[KnownIssue, ...]:
    """The issues that the cell has with the engine that it ran on."""
    engine = info.engines.get(cell.engine)
    version = (engine.versions if engine else info.versions).vllm
    runner = RUNNERS.get(engine.settings.get(RUNNER_SETTING, ""), "") if engine else ""
    return tuple(
        issue
        for issue in issues
        if fnmatch.fnmatchcase(cell.id, issue.cell)
        and issue.runner in (ANY_RUNNER, runner)
        and _is_in(version, issue.versions)
    )


def _is_in(version: str, versions: SpecifierSet) -> bool:
    """Release candidates and local builds count; what is no version is in no range."""
    try:
        return versions.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _listed(raw: object) -> list[object]:
    return raw if isinstance(raw, list) else []


def _issue(entry: IssueEntry) -> KnownIssue:
    why = " ".join(entry.why.split())
    return KnownIssue(entry.cell, SpecifierSet(entry.vllm), entry.runner, Outcome(entry.outcome), entry.link, why)
