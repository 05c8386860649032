"""The words of the HTML report: what a run proves, what a cell is about, and where its evidence lies."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import pytest

from harness.faults.process_kinds import ProcessFault, ProcessKind
from harness.faults.storage_kinds import StorageFault, StorageKind
from harness.meanings import meanings
from harness.records import Finding, Moment, Outcome, Report, Status, TokenChoice
from harness.report import story
from harness.report.view import rows
from services.faults import FaultKind, LoadMode
from tests import builders
from tests.report_builders import cells, run_report

RED = "recompute-report-sync-middle"


def with_status(report: Report, status: Status, exit_code: int) -> Report:
    verdicts = tuple(replace(v, status=status) if v.cell_id == RED else v for v in report.verdicts)
    return replace(report, verdicts=verdicts, exit_code=exit_code)


def test_a_green_run_says_what_was_broken_loaded_and_caught() -> None:
    assert story.proved(run_report(cells())) == (
        "vLLM 0.32.0, smollm2, shared-volume: a KV load was broken 16 times and vLLM answered as it should; "
        "a sound load gave the right answer 4 times; silent corruption was caught 4 times."
    )


def test_a_fault_that_costs_no_answer_is_not_a_sound_load() -> None:
    assert "a fault that may only cost time cost no answer once; a sound load" in story.proved(
        run_report((*cells(), builders.cell(FaultKind.DELAY)))
    )


def test_a_red_run_says_how_many_cells_and_how() -> None:
    assert story.proved(run_report(cells(), {RED: "something else"})).endswith(
        "1 of 24 cells did not end as they must (1 wrong-output)."
    )


@pytest.mark.parametrize(
    ("status", "exit_code", "words"),
    [
        (Status.INCONCLUSIVE, 2, "nothing is proved yet, because 1 of 24 cells are inconclusive."),
        (Status.ERROR, 3, "the harness or its stack broke, in 1 of 24 cells; the run proves nothing."),
        (Status.KNOWN, 0, "caught 4 times. Known upstream and still red: 1 cell."),
    ],
)
def test_other_runs_say_what_they_do_not_prove(status: Status, exit_code: int, words: str) -> None:
    assert story.proved(with_status(run_report(cells()), status, exit_code)).endswith(words)


def test_known_red_cells_are_not_counted_as_right_answers() -> None:
    told = story.proved(with_status(run_report(cells()), Status.KNOWN, 0))
    assert "a KV load was broken 15 times" in told


def test_a_run_in_which_nothing_passed_proves_nothing() -> None:
    report = replace(run_report(cells()), verdicts=())
    assert story.proved(report).endswith(": nothing was proved, because no cell passed.")


@pytest.mark.parametrize("kind", [FaultKind, StorageKind, ProcessKind, Outcome, Moment])
def test_every_fault_outcome_and_moment_has_a_meaning(kind: type[StrEnum]) -> None:
    assert set(meanings(kind)) == {member.value for member in kind}


def test_a_meaning_is_the_docstring_on_one_line() -> None:
    assert (
        meanings(Outcome)["loaded"] == "No load failed: what the store had was used, and everything equals its oracle."
    )
    assert "\n" not in meanings(Outcome)["not-run"]


def test_cells_are_sorted_by_where_and_what_they_break() -> None:
    none, report = builders.cell(), builders.cell(FaultKind.REPORT, "middle")
    storage = replace(builders.cell(), storage=StorageFault(StorageKind.ZEROED, "first"))
    process = replace(builders.cell(), process=ProcessFault(ProcessKind.DECODE_KILLED_LOADING))
    all_four = (none, report, storage, process)
    assert [story.layer(cell) for cell in all_four] == ["no fault", "boundary", "storage", "process"]
    assert [story.kind(cell) for cell in all_four] == ["none", "report", "zeroed", "decode-killed-loading"]
    assert story.fault_meaning(process).startswith("The decode is killed when the blocks before this one are loaded")
    assert story.fault_meaning(storage) == "The header is right, the payload is zeros."
    assert story.fault_meaning(report).startswith("The blocks hold garbage and are reported")


def test_what_sets_a_workload_apart() -> None:
    plain, mix = builders.cell(), builders.cell(mix=True, stream=True)
    assert (story.workload(plain), story.workload(mix)) == ("", "3 requests, stream")
    assert story.request_words(plain.requests[0], builders.PROMPTS, 4) == (
        "victim: prompt victim, 29 tokens, 7 whole blocks of 4; load sync"
    )
    assert story.request_words(mix.requests[1], {}, 4) == "sharer: prompt sharer; load sync; streamed"


def test_what_is_not_plain_about_a_request_is_said() -> None:
    odd = replace(builders.cell().requests[0], chat=True, sent=Moment.REPAIR, gives_up=Moment.LOADING)
    assert story.request_words(odd, {}, 4) == (
        "victim: prompt victim; load sync; chat; "
        "sent at: repair (vLLM has been told that blocks of the victim's load are bad); "
        "its client leaves at: loading (vLLM has given blocks to the victim's load, or was told to ask for it later)"
    )
    assert story.workload(replace(builders.cell(), requests=(odd,), preempts=True)) == "chat, given up, preempted"


@pytest.mark.parametrize(
    ("blocks", "words"), [((), ""), ((3,), "3"), ((0, 1, 2), "0-2"), ((5, 0, 1, 7), "0-1,5,7"), ((4, 6), "4,6")]
)
def test_runs_of_blocks_are_shortened(blocks: tuple[int, ...], words: str) -> None:
    assert story.blocks_words(blocks) == words


def test_checks_that_hold_take_a_line_each_and_do_not_say_things_twice() -> None:
    findings = (
        Finding("in-time", True, "", "victim", "within 60 s", "0.1 s"),
        Finding("in-time", True, "", "canary", "within 60 s", "0.2 s"),
        Finding("load-mode", True, "", "victim", "sync", "sync"),
        Finding("controls", True),
        Finding("same-bytes", True, "of 7 blocks"),
    )
    assert story.held_words(findings) == (
        "in-time: victim (expected within 60 s, got 0.1 s); canary (expected within 60 s, got 0.2 s)",
        "load-mode: victim (sync)",
        "controls",
        "same-bytes: of 7 blocks",
    )


def test_checks_of_oracles_are_said_once() -> None:
    report = run_report(cells()[:4])
    told = story.oracle_checks(rows(report))
    assert [line.split(" (")[0] for line in told if line.startswith("oracle-stable")] == [
        "oracle-stable: reuse of victim",
        "oracle-stable: recompute of victim",
        "oracle-stable: partial(3) of victim",
    ]


@pytest.mark.parametrize(
    ("link", "address"),
    [
        ("vllm#7", "https://github.com/vllm-project/vllm/issues/7"),
        ("a-b/c.d#12", "https://github.com/a-b/c.d/issues/12"),
        ("https://example.org/1", "https://example.org/1"),
        ("javascript:alert(1)", ""),
        ("other#7", ""),
        ("", ""),
    ],
)
def test_where_a_report_is(link: str, address: str) -> None:
    assert story.address(link) == address


def test_a_text_about_a_cell_does_not_repeat_its_id() -> None:
    cell = builders.cell(name="long-id")
    assert story.local("long-id.0.victim is\nlate", cell) == "0.victim is\\nlate"


def test_evidence_of_a_cell_that_did_not_run_is_only_its_verdict() -> None:
    report = run_report(cells()[:1])
    (row,) = rows(report)
    (not_run,) = rows(replace(report, observations=()))
    assert len(story.evidence_links(row)) == 4
    assert story.evidence_links(not_run) == (("verdict.json", f"cells/{row.cell.id}/verdict.json"),)


@pytest.mark.parametrize(
    ("logprob", "percent"), [(0.0, 100), (-0.6931471805599453, 50), (float("-inf"), 0), (float("nan"), 0)]
)
def test_probabilities_are_percentages(logprob: float, percent: float) -> None:
    assert story.percent(TokenChoice(1, logprob)) == pytest.approx(percent)


@pytest.mark.parametrize(
    ("one", "other", "count"), [("abc", "abd", 2), ("ab", "abc", 2), ("", "x", 0), ("same", "same", 4)]
)
def test_how_much_two_texts_share(one: str, other: str, count: int) -> None:
    assert story.common_length(one, other) == count


def test_load_modes_are_words() -> None:
    assert story.request_words(builders.request(builders.Role.VICTIM, LoadMode.ASYNC), {}, 4).endswith("load async")


def test_of_a_damaged_file_the_readers_who_noticed_are_counted() -> None:
    damaged = replace(builders.cell(), storage=StorageFault(StorageKind.FLIPPED_LAST))
    assert [story.fired_words(damaged, count) for count in (0, 2)] == [
        "nobody noticed the damage",
        "the damage was noticed twice",
    ]
    assert story.fired_words(builders.cell(FaultKind.REPORT), 0) == "the fault fired never"
