"""How a run is driven, with simulated engines: second attempts, interruption and resumption, replay, the seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from harness.errors import HarnessError, StackError, UsageError
from harness.judging.known_issues import KnownIssue
from harness.planning.plan import load_plan, select_cells
from harness.records import Cell, Outcome, Plan, Report, RunInfo, Status, Verdict
from harness.report import write_reports
from harness.report.as_json import to_json
from harness.report.story import proved
from harness.report.view import again_words, rows, run_words
from harness.run_folder import RunFolder
from harness.running import phases
from harness.running.phases import Invocation
from harness.running.watcher import Watcher
from tests.engines import ENGINES
from tests.simulated_engine import simulated_stack
from tests.ways_to_be_wrong import Wrong

MATRIX = Path(__file__).resolve().parents[1] / "harness" / "matrix" / "example.yaml"
EXAMPLE = load_plan(MATRIX, ENGINES)
PLAN = select_cells(EXAMPLE, ("*-report-*-middle",))
RED = ("recompute-report-sync-middle", "recompute-report-async-middle")


class Recorder(Watcher):
    """Notes what it is told; `at_cell` is called with the number of cells that are done."""

    def __init__(self, at_cell: Callable[[int], None] = lambda _: None) -> None:
        self.done: list[str] = []
        self.again: list[str] = []
        self.statuses: dict[str, Status] = {}
        self.differences: list[str] = []
        self.infos: list[RunInfo] = []
        self._at_cell = at_cell

    def begins(self, info: RunInfo, _: Path) -> None:
        self.infos.append(info)

    def differs(self, differences: tuple[str, ...]) -> None:
        self.differences += differences

    def cell_done(self, cell: Cell, verdict: Verdict, *_: object) -> None:
        self.done.append(cell.id)
        self.statuses[cell.id] = verdict.status
        self._at_cell(len(self.done))

    def cell_done_again(self, cell: Cell, verdict: Verdict, *_: object) -> None:
        self.again.append(cell.id)
        self.statuses[f"{cell.id} again"] = verdict.status
        self._at_cell(len(self.done) + len(self.again))


def interrupt_after(count: int) -> Recorder:
    def at_cell(done_count: int) -> None:
        if done_count == count:
            raise KeyboardInterrupt

    return Recorder(at_cell)


def evidence_dir(tmp_path: Path) -> Path:
    tmp_path.mkdir(exist_ok=True)
    return tmp_path / f"evidence-{len(list(tmp_path.iterdir()))}"


def new_folder(tmp_path: Path) -> RunFolder:
    runs = tmp_path / "runs"
    return RunFolder.create(runs, f"run-{len(list(runs.iterdir())) if runs.exists() else 0}")


def run(
    tmp_path: Path, wrong: Wrong = Wrong.NOTHING, watcher: Watcher | None = None, plan: Plan = PLAN, **how: object
) -> Report:
    with simulated_stack(evidence_dir(tmp_path), wrong) as stack:
        invocation = Invocation("example", "pytest", **how)  # type: ignore[arg-type]
        return phases.run(plan, stack, new_folder(tmp_path), invocation, watcher or Recorder())


def resume(tmp_path: Path, folder: RunFolder, wrong: Wrong = Wrong.NOTHING, watcher: Watcher | None = None) -> Report:
    with simulated_stack(evidence_dir(tmp_path), wrong) as stack:
        return phases.resume(stack, folder, watcher or Recorder())


def interrupted(tmp_path: Path, after: int, wrong: Wrong = Wrong.NOTHING) -> tuple[RunFolder, Recorder]:
    watcher = interrupt_after(after)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, wrong, watcher)
    (path,) = (tmp_path / "runs").iterdir()
    return RunFolder.open(path), watcher


def told(report: Report) -> list[object]:
    """What report.json says of the cells, without times."""
    cells = json.loads(to_json(report))["cells"]
    for finding in (finding for cell in cells for finding in cell["findings"] if finding["check"] == "in-time"):
        finding["got"] = ""
    return [{key: cell[key] for key in cell if not key.endswith("_s")} for cell in cells]


def test_a_known_issue_is_known_while_the_run_goes_on(tmp_path: Path) -> None:
    issue = KnownIssue(RED[0], SpecifierSet("==0.32.*"), "any", Outcome.WRONG_OUTPUT, "https://example.org/1", "It is.")
    watcher = Recorder()
    with simulated_stack(evidence_dir(tmp_path), Wrong.GARBAGE_AFTER_RECOVERY) as stack:
        report = phases.run(PLAN, stack, new_folder(tmp_path), Invocation("example", "pytest"), watcher, (issue,))
    told = {name: status for name, status in watcher.statuses.items() if status is not Status.PASS}
    known, red = Status.KNOWN, Status.FAIL
    assert told == {RED[0]: known, f"{RED[0]} again": known, RED[1]: red, f"{RED[1]} again": red}
    assert {row.cell.id: row.verdict.status for row in rows(report) if row.cell.id in RED} == {
        RED[0]: known,
        RED[1]: red,
    }


# Once more, alone.


def test_a_cell_that_is_red_twice_has_both_results(tmp_path: Path) -> None:
    watcher = Recorder()
    report = run(tmp_path, Wrong.GARBAGE_AFTER_RECOVERY, watcher)
    assert sorted(watcher.again) == sorted(RED)
    red = [row for row in rows(report) if row.cell.id in RED]
    assert [row.attempts for row in red] == [(Outcome.WRONG_OUTPUT, Outcome.WRONG_OUTPUT)] * 2
    assert {again_words(row) for row in red} == {"again alone: wrong-output (the same)"}
    for name in RED:
        folder = Path(report.folder) / "cells" / name
        files = {"cell.json", "observation.json", "verdict.json", "journal.jsonl", "engine.log"}
        assert {path.name for path in (folder / "again").iterdir()} == files
        assert {path.name for path in folder.iterdir()} == {*files, "again"}
        first, second = (json.loads((f / "observation.json").read_text()) for f in (folder, folder / "again"))
        assert first["started_at_s"] < second["started_at_s"]


def test_what_is_green_again_alone_stays_red_and_is_called_flaky(tmp_path: Path) -> None:
    report = run(tmp_path, Wrong.GARBAGE_ONCE)
    assert report.exit_code == 1
    red = [row for row in rows(report) if row.verdict.status is Status.FAIL]
    assert {row.cell.id for row in red} == set(RED)
    assert {row.attempts for row in red} == {(Outcome.WRONG_OUTPUT, Outcome.RECOVERED)}
    assert {again_words(row) for row in red} == {"again alone: recovered (flaky: not red again alone)"}


def test_green_and_skipped_cells_run_once(tmp_path: Path) -> None:
    watcher = Recorder()
    report = run(tmp_path, Wrong.LOADS_SYNC, watcher)
    assert {row.verdict.status for row in rows(report)} == {Status.PASS, Status.SKIPPED}
    assert (watcher.again, report.again, "again" in dict(report.timing.phases)) == ([], (), False)


def test_where_all_but_controls_is_skipped_nothing_is_proved(tmp_path: Path) -> None:
    storage = load_plan(MATRIX.with_name("storage.yaml"), ENGINES)
    report = run(tmp_path, Wrong.NOTHING, plan=select_cells(storage, ("recompute-payload-missing-sync-middle",)))
    assert {(row.cell.control, row.verdict.status) for row in rows(report)} == {
        (True, Status.PASS),
        (False, Status.SKIPPED),
    }
    assert report.exit_code == 2
    assert "nothing but controls was run: every other cell was skipped" in run_words(report)
    assert "nothing but controls was run" in proved(report)


def test_cells_that_only_their_controls_make_doubtful_run_once(tmp_path: Path) -> None:
    report = run(tmp_path, Wrong.SILENT_INVISIBLE)
    doubtful = {row.cell.id for row in rows(report) if row.verdict.outcome is Outcome.UNPROVEN}
    missed = {row.cell.id for row in rows(report) if row.verdict.outcome is Outcome.MISSED}
    assert doubtful
    assert {attempt.verdict.cell_id for attempt in report.again} == missed


def test_an_engine_that_died_is_back_for_the_second_attempt(tmp_path: Path) -> None:
    report = run(tmp_path, Wrong.DIES)
    assert {row.attempts for row in rows(report) if row.again} == {(Outcome.CRASHED, Outcome.CRASHED)}
    assert all(attempt.observation.requests for attempt in report.again)


def test_second_attempts_are_one_at_a_time_after_everything_else(tmp_path: Path) -> None:
    report = run(tmp_path, Wrong.GARBAGE_AFTER_RECOVERY, plan=select_cells(EXAMPLE, ("*-report-*",)))
    spans = sorted((a.observation.started_at_s, a.observation.duration_s) for a in report.again)
    assert len(spans) > 4
    assert max(o.started_at_s + o.duration_s for o in report.observations) <= spans[0][0] + 0.01
    assert all(start + took <= after + 0.01 for (start, took), (after, _) in pairwise(spans))


def test_second_attempts_have_tags_of_their_own(tmp_path: Path) -> None:
    report = run(tmp_path, Wrong.GARBAGE_AFTER_RECOVERY)
    tags = [r.tag for o in (*report.observations, *(a.observation for a in report.again)) for r in o.requests]
    assert len(set(tags)) == len(tags)


def test_judging_again_keeps_both_results(tmp_path: Path) -> None:
    report = run(tmp_path, Wrong.GARBAGE_ONCE)
    assert phases.judge_again(RunFolder.open(Path(report.folder))) == report


# Interrupted and resumed.


@pytest.mark.parametrize("after", [1, len(PLAN.cells) - 1, len(PLAN.cells), len(PLAN.cells) + 1])
def test_a_resumed_run_has_the_same_report(tmp_path: Path, after: int) -> None:
    """Interrupted among the cells, after the last one, and among the second attempts."""
    whole = run(tmp_path / "whole", Wrong.GARBAGE_AFTER_RECOVERY)
    folder, first = interrupted(tmp_path / "parts", after, Wrong.GARBAGE_AFTER_RECOVERY)
    before = {seen.cell_id: seen for seen in folder.load_observations()}
    second = Recorder()
    report = resume(tmp_path / "parts", folder, Wrong.GARBAGE_AFTER_RECOVERY, second)
    assert told(report) == told(whole)
    assert (report.exit_code, report.info.run_id) == (whole.exit_code, "run-0")
    assert sorted(first.done + second.done) == sorted(cell.id for cell in PLAN.cells)
    assert sorted(first.again + second.again) == sorted(RED)
    assert all(seen == before[seen.cell_id] for seen in report.observations if seen.cell_id in before)
    assert json.loads(to_json(report))["resumed_count"] == 1


def test_oracles_are_measured_once(tmp_path: Path) -> None:
    folder, _ = interrupted(tmp_path, 2)
    before = folder.load_oracles()
    resume(tmp_path, folder)
    assert folder.load_oracles() == before


def test_an_interrupted_run_tells_what_it_has(tmp_path: Path) -> None:
    folder, watcher = interrupted(tmp_path, 3)
    report = phases.fail(folder, HarnessError("interrupted"))
    assert (report.exit_code, len(report.observations)) == (3, 3)
    by_id = {verdict.cell_id: verdict for verdict in report.verdicts}
    assert {by_id[name].status for name in watcher.done} <= {Status.PASS, Status.INCONCLUSIVE}
    ended = [verdict for verdict in report.verdicts if verdict.cell_id not in watcher.done]
    assert {(v.status, v.findings[0].detail) for v in ended} == {(Status.ERROR, "the run ended before this cell")}
    assert json.loads(to_json(report))["error"] == "interrupted"
    assert resume(tmp_path, folder).info.failure is None


def test_what_an_engine_shows_while_it_is_stopped_is_not_kept(tmp_path: Path) -> None:
    """A cell that is running at the interruption is run anew: its end is our doing."""
    folder, watcher = interrupted(tmp_path, 1)
    assert [seen.cell_id for seen in folder.load_observations()] == watcher.done


def test_time_spent_is_added_up(tmp_path: Path) -> None:
    folder, _ = interrupted(tmp_path, 3)
    before = folder.load_timing()
    report = resume(tmp_path, folder)
    after = dict(report.timing.phases)
    assert list(after) == ["start", "prefill", "oracles", "cells"]
    assert all(after[name] > spent_s or name == "oracles" for name, spent_s in before.phases)
    assert report.timing.duration_s > before.duration_s


def test_a_finished_run_is_not_started_again(tmp_path: Path) -> None:
    report = run(tmp_path)
    folder = RunFolder.open(Path(report.folder))
    watcher = Recorder()
    assert resume(tmp_path, folder, watcher=watcher) == report
    assert watcher.infos == []


def change_info(folder: RunFolder, **changes: object) -> None:
    folder.save_info(replace(folder.load_info(), **changes))  # type: ignore[arg-type]


def test_a_run_is_not_resumed_with_another_version(tmp_path: Path) -> None:
    folder, _ = interrupted(tmp_path, 2)
    versions = replace(folder.load_info().versions, vllm="0.31.0")
    change_info(folder, versions=versions)
    with pytest.raises(UsageError, match=r"(?s)cannot be finished here.*vllm was 0\.31\.0, is 0\.32\.0"):
        resume(tmp_path, folder)
    assert len(folder.load_observations()) == 2
    assert folder.load_info().versions == versions


def test_a_run_is_not_resumed_with_another_tokenizer(tmp_path: Path) -> None:
    folder, _ = interrupted(tmp_path, 2)
    first, *others = folder.load_prompts()
    folder.save_prompts((replace(first, token_ids=(1, *first.token_ids[1:])), *others))
    with pytest.raises(UsageError, match=f"prompt {first.id} has other tokens"):
        resume(tmp_path, folder)


# A run that fails at its start.


def test_a_run_whose_stack_breaks_at_the_start_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_folder(tmp_path)
    with simulated_stack(evidence_dir(tmp_path), Wrong.NOTHING) as stack:
        monkeypatch.setattr(phases, "START_DEADLINE_S", 0.1)
        stack._urls["decode-fail"] = "http://127.0.0.1:1"
        stack.start = lambda: None  # type: ignore[method-assign]
        with pytest.raises(StackError) as caught:
            phases.run(PLAN, stack, folder, Invocation("example", "pytest"), Recorder())
    report = phases.fail(folder, caught.value)
    write_reports(report, folder.path)
    written = json.loads((folder.path / "report.json").read_text())
    assert (written["exit_code"], written["outcome"], written["stack"]) == (3, "error", "attach")
    assert "decode-fail: still not ready" in written["error"]
    assert "decode-fail: still not ready" in (folder.path / "summary.md").read_text()
    assert {cell["status"] for cell in written["cells"]} == {"error"}
    assert phases.judge_again(RunFolder.open(folder.path)) == report


def test_a_run_with_blocks_that_are_not_there_ends_before_anything_is_sent(tmp_path: Path) -> None:
    red = next(cell for cell in PLAN.cells if cell.id == RED[0])
    fault = replace(red.fault, blocks=(99,))
    beyond = replace(red, requests=(replace(red.requests[0], fault=fault),))
    plan = replace(PLAN, cells=tuple(beyond if cell is red else cell for cell in PLAN.cells))
    with pytest.raises(UsageError, match=f"no block 99: .* @ cell {red.id}"):
        run(tmp_path, plan=plan)
    (journal,) = tmp_path.glob("evidence-*/prefill/journal.jsonl")
    assert "prefill." not in journal.read_text()


# Replay.


def test_a_replay_under_the_same_conditions_says_so(tmp_path: Path) -> None:
    original = RunFolder.open(Path(run(tmp_path).folder))
    plan = select_cells(original.load_plan(), (RED[0],))
    watcher = Recorder()
    report = run(tmp_path, watcher=watcher, plan=plan, original=original)
    assert (report.info.differences, watcher.differences) == ((), [])
    assert report.info.replay_of == str(original.path)
    assert {cell.id for cell in report.cells} == {RED[0], "recompute-none-sync", "recompute-silent-sync"}


def test_a_replay_says_loudly_what_differs(tmp_path: Path) -> None:
    original = RunFolder.open(Path(run(tmp_path).folder))
    change_info(original, versions=replace(original.load_info().versions, vllm="0.31.0"))
    watcher = Recorder()
    report = run(tmp_path, watcher=watcher, plan=select_cells(PLAN, (RED[0],)), original=original)
    assert watcher.differences == ["vllm was 0.31.0, is 0.32.0"]
    assert json.loads(to_json(report))["differences"] == watcher.differences


# The seed.


def test_a_seed_orders_the_cells_and_keeps_the_report_in_the_order_of_the_file(tmp_path: Path) -> None:
    plain, seeded, same = Recorder(), Recorder(), Recorder()
    for watcher, seed in ((plain, 0), (seeded, 7), (same, 7)):
        report = run(tmp_path, watcher=watcher, seed=seed)
        assert [cell.id for cell in report.cells] == [cell.id for cell in PLAN.cells]
        assert (report.exit_code, report.info.seed) == (0, seed)

    def of_engine(watcher: Recorder, policy: str) -> list[str]:
        return [name for name in watcher.done if name.startswith(policy)]

    assert of_engine(plain, "recompute-") == [c.id for c in PLAN.cells if c.id.startswith("recompute-")]
    assert of_engine(seeded, "recompute-") != of_engine(plain, "recompute-")
    assert of_engine(seeded, "recompute-") == of_engine(same, "recompute-")


def test_a_resumed_run_keeps_its_seed(tmp_path: Path) -> None:
    whole, first, second = Recorder(), interrupt_after(3), Recorder()
    run(tmp_path / "whole", watcher=whole, seed=7)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", watcher=first, seed=7)
    folder = RunFolder.open(tmp_path / "parts" / "runs" / "run-0")
    resume(tmp_path / "parts", folder, watcher=second)
    for policy in ("recompute-", "fail-"):
        expected = [name for name in whole.done if name.startswith(policy)]
        # The interruption may cost the place of the cell that was running.
        assert sorted(expected) == sorted(n for n in first.done + second.done if n.startswith(policy))
    assert second.infos[0].seed == 7


def test_a_seed_gives_every_prompt_other_tokens_of_the_same_count(tmp_path: Path) -> None:
    plain, salted = (RunFolder.open(Path(run(tmp_path, seed=seed).folder)).load_prompts() for seed in (0, 123))
    assert [p.full_block_count for p in plain] == [p.full_block_count for p in salted]
    assert all(len(a.token_ids) == len(b.token_ids) for a, b in zip(plain, salted, strict=True))
    assert all(a.token_ids[:32] != b.token_ids[:32] for a, b in zip(plain, salted, strict=True))
    assert all(a.token_ids[3:] == b.token_ids[3:] for a, b in zip(plain, salted, strict=True) if a.id != "sharer")
