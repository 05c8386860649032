"""Two runs compared: what is worse, what else changed, what cost more than noise explains; and how it is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from harness.planning.plan import load_plan, select_cells
from harness.records import Completion, EngineInfo, OracleKey, OracleKind, OracleRun, Outcome, Report, Status, Versions
from harness.report.compare import CellChange, Kind, RunComparison, Setting, compare, stored
from harness.report.compare_formats import print_comparison, to_html, to_markdown
from harness.report.compare_view import headline
from harness.run_folder import RunFolder
from harness.run_matrix import main
from harness.running import phases
from tests.engines import ENGINES
from tests.simulated_engine import simulated_stack
from tests.test_report import EVIL, cell_of, observation_of, report_of, verdict_of
from tests.ways_to_be_wrong import Wrong

MATRIX = Path(__file__).resolve().parents[1] / "harness" / "matrix" / "example.yaml"

State = tuple[Status, Outcome] | None
GREEN: State = (Status.PASS, Outcome.RECOVERED)
WRONG: State = (Status.FAIL, Outcome.WRONG_OUTPUT)
CRASHED: State = (Status.FAIL, Outcome.CRASHED)
KNOWN: State = (Status.KNOWN, Outcome.CRASHED)
FIXED: State = (Status.FIXED, Outcome.RECOVERED)
SKIPPED: State = (Status.SKIPPED, Outcome.NOT_RUN)
UNPROVEN: State = (Status.INCONCLUSIVE, Outcome.UNPROVEN)


def run_of(oracles: tuple[OracleRun, ...] = (), text: str = "small", **states: State) -> Report:
    """A run with these cells; None: not judged."""
    cells = tuple(map(cell_of, states))
    verdicts = tuple(verdict_of(name, *state, text) for name, state in states.items() if state)
    observations = tuple(observation_of(cell, text) for cell in cells if states[cell.id])
    return replace(report_of(), cells=cells, verdicts=verdicts, observations=observations, oracles=oracles)


def oracle(kind: OracleKind, prompt: str, ttft_s: float) -> OracleRun:
    return OracleRun(OracleKey(prompt, kind), Completion(200, ttft_s=ttft_s, duration_s=ttft_s))


def only_change(before: State, after: State) -> CellChange:
    (change,) = compare(run_of(a=before, same=GREEN), run_of(a=after, same=GREEN)).changes
    return change


# Cells.


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (GREEN, WRONG, Kind.WORSE),
        (GREEN, KNOWN, Kind.WORSE),
        (GREEN, SKIPPED, Kind.WORSE),
        (GREEN, UNPROVEN, Kind.WORSE),
        (GREEN, None, Kind.WORSE),
        (KNOWN, WRONG, Kind.WORSE),
        (UNPROVEN, WRONG, Kind.WORSE),
        (WRONG, GREEN, Kind.BETTER),
        (KNOWN, FIXED, Kind.BETTER),
        (None, GREEN, Kind.BETTER),
        (WRONG, CRASHED, Kind.OTHER),
        (GREEN, FIXED, Kind.OTHER),
        (GREEN, (Status.PASS, Outcome.LOADED), Kind.OTHER),
    ],
)
def test_a_cell_that_changed(before: State, after: State, kind: Kind) -> None:
    change = only_change(before, after)
    assert (change.cell_id, change.kind, change.worse) == ("a", kind, kind is Kind.WORSE)


def test_what_a_change_was() -> None:
    change = only_change(GREEN, WRONG)
    assert (change.before, change.after) == ("pass recovered", "fail wrong-output")


def test_cells_that_did_not_change_are_counted() -> None:
    run = run_of(a=GREEN, b=WRONG, c=None)
    comparison = compare(run, run)
    assert (comparison.changes, comparison.same_count, comparison.worse) == ((), 3, False)


@pytest.mark.parametrize(("state", "worse"), [(GREEN, False), (WRONG, True), (KNOWN, False), (None, False)])
def test_a_new_cell_is_worse_only_if_it_is_red(state: State, worse: bool) -> None:
    comparison = compare(run_of(old=GREEN), run_of(old=GREEN, new=state))
    assert [(c.cell_id, c.kind, c.worse) for c in comparison.changes] == [("new", Kind.APPEARED, worse)]
    assert (comparison.same_count, comparison.worse) == (1, worse)


def test_a_cell_that_vanished_is_told_and_not_worse() -> None:
    comparison = compare(run_of(old=GREEN, gone=GREEN), run_of(old=GREEN))
    assert comparison.changes == (CellChange("gone", Kind.VANISHED, "pass recovered", "", (), False),)
    assert not comparison.worse


def test_the_same_id_for_another_cell_is_told() -> None:
    before, after = run_of(a=GREEN), run_of(a=GREEN)
    other = replace(after.cells[0], max_tokens=99, why="other words")
    after = replace(after, cells=(other,))
    (change,) = compare(before, after).changes
    assert (change.kind, change.redefined, change.worse) == (Kind.OTHER, ("max_tokens",), False)


# Versions and settings.


def engines_of(**settings: dict[str, str]) -> Report:
    run = run_of(a=GREEN)
    versions = Versions("0.32.0", "2.13", "3.11", "m", settings.get("p", {}).get("KV_CONNECTOR", "c"))
    engines = {name: EngineInfo(versions, values, ()) for name, values in settings.items()}
    return replace(run, info=replace(run.info, versions=versions, engines=engines))


def settings_between(before: Report, after: Report) -> tuple[Setting, ...]:
    return compare(before, after).settings


def test_settings_that_differ_stand_side_by_side() -> None:
    before = engines_of(p={"DTYPE": "float32", "SAME": "1", "KVPROOF_PORT": "1"}, q={"DTYPE": "float32", "SAME": "1"})
    after = engines_of(p={"DTYPE": "float16", "SAME": "1", "KVPROOF_PORT": "2"}, q={"DTYPE": "float16", "SAME": "1"})
    assert settings_between(before, after) == (Setting("DTYPE", "float32", "float16"),)
    assert settings_between(before, before) == ()


def test_a_setting_of_one_engine_names_it() -> None:
    usual = {"p": {"TOKENS": "512"}, "q": {"TOKENS": "512"}, "r": {"TOKENS": "512"}}
    other = {**usual, "q": {"TOKENS": "64"}}
    assert settings_between(engines_of(**usual), engines_of(**other)) == (Setting("TOKENS of q", "", "64"),)


def test_settings_of_an_engine_that_only_one_run_has_are_not_compared() -> None:
    one, two = {"p": {"A": "1"}}, {"p": {"A": "1"}, "q": {"A": "2", "B": "3"}}
    assert settings_between(engines_of(**one), engines_of(**two)) == ()


def test_versions_and_the_stack_are_compared() -> None:
    before = run_of(a=GREEN)
    info = replace(before.info, stack="processes", seed=7, versions=replace(before.info.versions, vllm="0.33"))
    after = replace(before, info=info)
    assert settings_between(before, after) == (
        Setting("vllm", "0.32.0", "0.33"),
        Setting("stack", "compose", "processes"),
        Setting("seed", "0", "7"),
    )


# Cost.


def oracles_of(factor: float, repeat: float = 1.0) -> tuple[OracleRun, ...]:
    """Reuse oracles of four prompts, each measured twice, the second time `repeat` times as slow."""
    times = [(f"p{n}", 0.1 * n * factor) for n in range(1, 5)]
    return tuple(
        oracle(OracleKind.REUSE, prompt, seconds * again) for prompt, seconds in times for again in (1.0, repeat)
    )


@pytest.mark.parametrize(
    ("factor", "repeat", "changed"), [(2.0, 1.0, True), (0.5, 1.0, True), (1.0, 1.0, False), (1.1, 1.3, False)]
)
def test_cost_changes_only_beyond_the_noise_of_repeated_oracles(factor: float, repeat: float, changed: bool) -> None:
    comparison = compare(run_of(oracles_of(1.0), a=GREEN), run_of(oracles_of(factor, repeat), a=GREEN))
    cost = comparison.costs[0]
    assert (cost.kind, cost.pair_count) == ("reuse oracle, first token", 4)
    assert comparison.repeat_noise == pytest.approx(repeat)
    assert comparison.repeat_count == 8
    assert cost.ratio == pytest.approx(factor * (1 + repeat) / 2)
    assert cost.changed is changed
    assert not comparison.worse


def test_ratios_that_scatter_are_noise() -> None:
    prompts = ("p1", "p2", "p3", "p4")
    before = tuple(oracle(OracleKind.RECOMPUTE, prompt, 1.0) for prompt in prompts)
    after = tuple(oracle(OracleKind.RECOMPUTE, p, s) for p, s in zip(prompts, (0.5, 1.5, 1.6, 4.0), strict=True))
    (cost, *_) = compare(run_of(before, a=GREEN), run_of(after, a=GREEN)).costs
    assert cost.ratio > 1.5
    assert not cost.changed


def test_two_measurements_are_too_few() -> None:
    slow = compare(run_of(oracles_of(1.0)[:4], a=GREEN), run_of(oracles_of(9.0)[:4], a=GREEN))
    assert (slow.costs[0].pair_count, slow.costs[0].changed) == (2, False)
    assert "too few" in to_markdown(slow)


def test_cells_are_compared_by_kind_and_red_ones_not_at_all() -> None:
    states: dict[str, State] = {"a": GREEN, "b": GREEN, "c": GREEN}
    (cost,) = compare(run_of(**states, d=WRONG), run_of(**states, d=WRONG)).costs
    assert (cost.kind, cost.pair_count, cost.ratio) == ("recovered sync cells, whole answer", 3, 1.0)


# Formats.


def printed(comparison: RunComparison) -> str:
    console = Console(width=80, _environ={})
    with console.capture() as captured:
        print_comparison(comparison, console)
    return captured.get()


def test_the_terminal_names_what_is_worse_first_and_how_to_repeat_it() -> None:
    long_id = "decode-recompute.async.report-middle.two-sharers-and-a-bystander-" + "x" * 40
    text = printed(compare(run_of(**{"b": WRONG, long_id: GREEN}), run_of(**{"b": GREEN, long_id: WRONG})))
    lines = text.splitlines()
    at = lines.index("cells that differ")
    assert lines[at + 2].split() == ["worse", long_id, "pass", "recovered", "fail", "wrong-output"]
    assert lines[at + 3].split() == ["better", "b", "fail", "wrong-output", "pass", "recovered"]
    assert f"  {long_id}: victim-equals-oracle [t-victim]: token ids differ (expected Paris, got small)" in lines
    assert any(line.startswith("  repeat:   python harness/run_matrix.py run") for line in lines)
    assert lines[-1] == "1 cell got worse; 1 better, 0 as before"


def test_the_headline() -> None:
    assert headline(compare(run_of(a=GREEN), run_of(a=GREEN))) == "nothing got worse; 1 as before"
    before = run_of(a=GREEN, b=GREEN, c=GREEN, d=WRONG, e=WRONG)
    after = run_of(a=WRONG, b=CRASHED, d=GREEN, e=CRASHED, f=GREEN, g=WRONG)
    words = "3 cells got worse; 1 better, 1 different, 1 appeared, 1 vanished, 0 as before"
    assert headline(compare(before, after)) == words


@pytest.mark.parametrize("write", [printed, to_markdown, to_html])
def test_every_format_tells_how_noise_is_estimated(write: Callable[[RunComparison], str]) -> None:
    text = write(compare(run_of(oracles_of(1.0), a=GREEN), run_of(oracles_of(1.0, 1.25), a=GREEN)))
    assert "8 oracles that were measured twice within a run (the largest: 1.25)" in text
    assert "Cost does not decide the exit code." in text


def evil() -> RunComparison:
    comparison = compare(run_of(a=GREEN), run_of(text=EVIL, a=WRONG))
    return replace(comparison, settings=(Setting(f"{EVIL}|x", EVIL, ""),))


def test_markdown_keeps_foreign_text_in_code_spans() -> None:
    page = MarkdownIt("commonmark").enable("table").render(to_markdown(evil()))
    assert "<script" not in page
    assert page.count("<table>") == 3
    assert all(row.count("<td") == 3 for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL) if "|x" in row)


def test_html_is_one_escaped_file() -> None:
    page = to_html(evil())
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)=|url\(|@import|https?://(?!github)", page)
    assert not set(page) & {"\x1b", "\x00", "\u202e"}
    assert '<tr class="bad"><td>worse</td><td>a</td>' in page


# The command, on stored runs of simulated engines.


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An honest one, and one whose engines answer garbage after a recovery."""
    plan = select_cells(load_plan(MATRIX, ENGINES), ("recompute-report-sync-middle", "recompute-none-sync-group"))
    folders = []
    for wrong in (Wrong.NOTHING, Wrong.GARBAGE_AFTER_RECOVERY):
        place = tmp_path_factory.mktemp(str(wrong))
        with simulated_stack(place / "evidence", wrong) as stack:
            folder = RunFolder.create(place, "run")
            phases.run(plan, stack, folder, phases.Invocation("example", "test"), phases.Watcher())
        folders.append(folder.path)
    return folders[0], folders[1]


def test_exactly_the_cells_that_differ_are_named(runs: tuple[Path, Path]) -> None:
    comparison = compare(*(stored(RunFolder.open(path)) for path in runs))
    assert {change.cell_id: change.kind for change in comparison.changes} == {"recompute-report-sync-middle": "worse"}
    assert comparison.same_count == len(comparison.after.cells) - 1


def test_the_exit_code_says_whether_something_got_worse(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = map(str, runs)
    before = {path: path.read_bytes() for run in runs for path in run.rglob("*") if path.is_file()}
    html = tmp_path / "there" / "comparison.html"
    assert main(["compare", good, bad, "--html", str(html)]) == 1
    assert html.read_text().startswith("<!doctype html>")
    assert "1 cell got worse" in capsys.readouterr().out
    assert main(["compare", bad, good, "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("## kvproof: nothing got worse; 1 better")
    assert main(["compare", good, good]) == 0
    assert before == {path: path.read_bytes() for run in runs for path in run.rglob("*") if path.is_file()}


def test_a_folder_that_is_no_whole_run(runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert main(["compare", str(runs[0]), str(tmp_path)]) == 64
    (tmp_path / "run.json").write_bytes((runs[0] / "run.json").read_bytes())
    assert main(["compare", str(runs[0]), str(tmp_path)]) == 64
