"""Known issues change what a verdict means and nothing else, and a list with mistakes is refused with all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from harness.errors import UsageError
from harness.judging.judge import exit_code
from harness.judging.known_issues import KnownIssue, load_known_issues, with_known_issues
from harness.records import EngineInfo, Evidence, Outcome, RunInfo, Status, Verdict, Versions
from services.faults import FaultKind
from tests.builders import cell
from tests.engines import ENGINES

LINK = "https://github.com/vllm-project/vllm/issues/1"
ISSUE = KnownIssue("recompute-*", SpecifierSet(">=0.30,<0.33"), "any", Outcome.CRASHED, LINK, "It dies.")
CELL = cell(FaultKind.REPORT)
SHIPPED = Path(__file__).parents[1] / "harness" / "matrix" / "known_issues.yaml"


def info(version: str = "0.32.0", runner: str | None = "0") -> RunInfo:
    """A run on one engine; `runner` is its VLLM_USE_V2_MODEL_RUNNER, None: it does not describe itself."""
    versions = Versions(version, "2.13.0", "3.11.2", "model", "connector")
    engine = EngineInfo(versions, {"VLLM_USE_V2_MODEL_RUNNER": runner or ""}, ())
    engines = {CELL.engine: engine} if runner else {}
    return RunInfo("run", "matrix", "processes", "", 0.0, versions=versions, engines=engines, block_size=32)


def verdict(outcome: Outcome = Outcome.CRASHED, status: Status = Status.FAIL) -> Verdict:
    return Verdict(CELL.id, outcome, status, (), Evidence())


def applied(given: Verdict, *issues: KnownIssue, run: RunInfo | None = None) -> Verdict:
    (found,) = with_known_issues((given,), (CELL,), issues, run or info())
    return found


def test_red_with_the_known_outcome_is_known_and_keeps_its_outcome() -> None:
    found = applied(verdict(), ISSUE)
    assert found == replace(verdict(), status=Status.KNOWN, link=LINK)
    assert exit_code([found]) == 0


def test_green_with_an_issue_is_fixed() -> None:
    found = applied(verdict(Outcome.RECOVERED, Status.PASS), ISSUE)
    assert found == replace(verdict(Outcome.RECOVERED, Status.FIXED), link=LINK)
    assert exit_code([found]) == 0


def test_red_with_another_outcome_still_fails() -> None:
    worse = verdict(Outcome.WRONG_OUTPUT)
    assert applied(worse, ISSUE) == worse
    assert exit_code([applied(worse, ISSUE)]) == 1


def test_the_issue_with_the_outcome_counts_where_a_cell_has_several() -> None:
    other = replace(ISSUE, outcome=Outcome.HUNG, link=f"{LINK}2")
    assert applied(verdict(Outcome.HUNG), ISSUE, other).link == f"{LINK}2"


@pytest.mark.parametrize("status", [Status.INCONCLUSIVE, Status.ERROR, Status.SKIPPED])
def test_what_was_not_judged_stays_so(status: Status) -> None:
    given = verdict(Outcome.UNPROVEN, status)
    assert applied(given, ISSUE) == given


def test_the_cell_must_match() -> None:
    assert applied(verdict(), replace(ISSUE, cell="fail-*")).status is Status.FAIL


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.29.1", Status.FAIL),
        ("0.30.0", Status.KNOWN),
        ("0.32.0+cpu", Status.KNOWN),
        ("0.33.0rc1", Status.FAIL),
        ("0.32.1rc1", Status.KNOWN),
        ("0.33.0", Status.FAIL),
        ("unknown", Status.FAIL),
        ("", Status.FAIL),
    ],
)
def test_the_version_must_be_in_the_range(version: str, status: Status) -> None:
    assert applied(verdict(), ISSUE, run=info(version)).status is status


@pytest.mark.parametrize(
    ("wanted", "runner", "status"),
    [
        ("V1", "0", Status.KNOWN),
        ("V1", "1", Status.FAIL),
        ("V2", "1", Status.KNOWN),
        ("V2", "0", Status.FAIL),
        ("V1", "", Status.FAIL),
        ("V1", None, Status.FAIL),
        ("any", "1", Status.KNOWN),
        ("any", None, Status.KNOWN),
    ],
)
def test_the_runner_must_be_the_engines(wanted: str, runner: str | None, status: Status) -> None:
    assert applied(verdict(), replace(ISSUE, runner=wanted), run=info(runner=runner)).status is status


# The file.

HEAD = "schema: 1\nissues:\n"
ENTRY = {
    "cell": "recompute-*",
    "vllm": "'>=0.30,<0.33'",
    "runner": "any",
    "outcome": "crashed",
    "link": LINK,
    "why": "It dies.",
}


def entry(**changes: str) -> str:
    fields = {key: value for key, value in {**ENTRY, **changes}.items() if value}
    return "  - {" + ", ".join(f"{key}: {value}" for key, value in fields.items()) + "}\n"


def loaded(tmp_path: Path, text: str) -> tuple[KnownIssue, ...]:
    path = tmp_path / "issues.yaml"
    path.write_text(text, encoding="utf-8")
    return load_known_issues(path)


def test_a_file_becomes_issues_in_order(tmp_path: Path) -> None:
    issues = loaded(tmp_path, HEAD + entry() + entry(outcome="hung", runner="V2", vllm="'==0.32.*'"))
    assert issues == (
        ISSUE,
        replace(ISSUE, outcome=Outcome.HUNG, runner="V2", versions=SpecifierSet("==0.32.*")),
    )


def test_every_mistake_is_listed(tmp_path: Path) -> None:
    text = HEAD + entry(vllm="newer", outcome="loaded", runner="V3") + entry(link="vllm#1", why="", cel="x")
    with pytest.raises(UsageError) as caught:
        loaded(tmp_path, text)
    first, *lines = str(caught.value).splitlines()
    assert first.endswith("issues.yaml: 6 problems")
    for part in (
        "'newer' is no range @ issues.0.vllm (line 3; valid: such as '>=0.26,<0.33' or '==0.32.*')",
        "unknown value 'loaded' @ issues.0.outcome (line 3; ",
        "unknown value 'V3' @ issues.0.runner (line 3; valid: V1, V2, any)",
        "'vllm#1' does not fit @ issues.1.link (line 4; an https address, such as ",
        "unknown key cel @ issues.1.cel (line 4; did you mean cell?",
        "why is missing @ issues.1.why (line 4)",
    ):
        assert any(line.strip().startswith(part) for line in lines), (part, lines)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("schema: 2\nissues: []\n", "@ schema"),
        ("schema: 1\n", "issues is missing @ issues"),
        ("schema: 1\nissues: {}\n", "@ issues"),
        ("[]\n", "is not a mapping @ top of the file"),
        ("schema: 1\nschema: 1\nissues: []\n", "schema is given twice"),
        ("{", "is not a list of known issues:"),
    ],
)
def test_a_file_that_is_no_list_of_issues(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        loaded(tmp_path, text)
    assert problem in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the list of known issues"):
        load_known_issues(tmp_path / "gone.yaml")


def test_the_shipped_list_is_in_order_and_names_cells_that_there_are() -> None:
    import fnmatch

    from harness.planning.plan import load_plan

    matrices = [path for path in SHIPPED.parent.glob("*.yaml") if path != SHIPPED]
    cell_ids = [cell.id for path in matrices for cell in load_plan(path, ENGINES).cells]
    assert [issue.cell for issue in load_known_issues(SHIPPED) if not fnmatch.filter(cell_ids, issue.cell)] == []
