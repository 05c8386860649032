"""Every format shows every status, says what to do next, and lets no text of a model out of its place."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from junitparser import JUnitXml
from markdown_it import MarkdownIt
from rich.console import Console

from harness.faults.storage_kinds import StorageFault, StorageKind
from harness.records import (
    Cell,
    Completion,
    Difference,
    EngineInfo,
    EngineState,
    Evidence,
    Failure,
    Finding,
    LoadMode,
    Observation,
    Outcome,
    PlannedRequest,
    ProcessRecord,
    Report,
    RequestRecord,
    Role,
    RunInfo,
    SecondAttempt,
    Status,
    Timing,
    TokenChoice,
    Verdict,
    Versions,
)
from harness.report import print_report, write_reports
from harness.report.as_html import (
    EVENTS_MAX,
    LOG_CHARACTERS_MAX,
    LOG_LINES_MAX,
    TOKENS_AFTER,
    TOKENS_BEFORE,
    WHOLE_CELLS_MAX,
    Settings,
    ends,
    log_line,
    settings,
    to_html,
    token_pairs,
)
from harness.report.as_json import schema, to_json
from harness.report.as_junit import to_junit
from harness.report.as_markdown import SUMMARY_CHARS_MAX, code, to_markdown
from harness.report.progress import LineProgress
from harness.report.view import broken_words, difference_words, fault_words, repeat_command, text_diff, visible
from services.faults import ALWAYS, NO_FAULT, Fault, FaultKind
from services.journal import Event, EventName
from tests import builders
from tests.report_builders import many_cells, run_report

EVIL = "<script>alert(1)</script> ]]> `a` ``b`` [bold]x[/bold] | \x1b[31m \x00 \u202e {{ 7 * 7 }}"
DROP_FIRST = Fault(FaultKind.DROP, "first")
HEALTHY = EngineState(True, 0, 0, 0.0, 0)
CASES = (
    ("pass", Status.PASS, Outcome.RECOVERED, DROP_FIRST),
    ("wrong", Status.FAIL, Outcome.WRONG_OUTPUT, DROP_FIRST),
    ("known", Status.KNOWN, Outcome.CRASHED, Fault(FaultKind.REPORT, "all", ALWAYS)),
    ("fixed", Status.FIXED, Outcome.RECOVERED, Fault(FaultKind.REPORT, (0, 2))),
    ("unsure", Status.INCONCLUSIVE, Outcome.UNPROVEN, Fault(FaultKind.SILENT, "last", 2)),
    ("broken", Status.ERROR, Outcome.NOT_RUN, Fault(FaultKind.DELAY, delay_s=1.5)),
    ("left-out", Status.SKIPPED, Outcome.NOT_RUN, NO_FAULT),
)


def cell_of(cell_id: str, fault: Fault = DROP_FIRST) -> Cell:
    victim = PlannedRequest(Role.VICTIM, "p", LoadMode.SYNC, fault)
    return Cell(
        cell_id, "decode-recompute", "recompute", LoadMode.SYNC, (victim,), Outcome.RECOVERED, f"why {cell_id} exists"
    )


def difference_of(text: str) -> Difference:
    return Difference(
        request="t-victim",
        oracle="partial(2)",
        index=1,
        expected_token_id=11,
        got_token_id=99,
        expected_top=(TokenChoice(11, -0.1), TokenChoice(12, -2.5)),
        got_top=(TokenChoice(99, -0.2),),
        expected_text="Paris is\nbig",
        got_text=f"Paris is\n{text}",
        near_tie=False,
        expected_token_ids=(10, 11, 12),
        got_token_ids=(10, 99),
    )


def verdict_of(cell_id: str, status: Status, outcome: Outcome, text: str = "small") -> Verdict:
    ok = status in (Status.PASS, Status.FIXED)
    findings = (
        Finding("fault-fired", True),
        Finding("victim-equals-oracle", ok, "token ids differ", "t-victim", "Paris", text),
    )
    return Verdict(
        cell_id,
        outcome,
        status,
        () if status is Status.SKIPPED else findings,
        Evidence(4, 1, 2, 3),
        (difference_of(text),) if status is Status.FAIL else (),
        "https://github.com/vllm-project/vllm/issues/1" if status in (Status.KNOWN, Status.FIXED) else "",
    )


def observation_of(cell: Cell, text: str = "small") -> Observation:
    completion = Completion(200, "", text, (10, 99), "stop", ttft_s=0.25, duration_s=0.5)
    events = (Event(EventName.REPORTED, "decode-recompute", 1.75, text, blocks=(0,), reason=text),)
    record = RequestRecord(cell.requests[0], "t-victim", 0.0, completion)
    return Observation(cell.id, (record,), HEALTHY, HEALTHY, True, events, (text, "last log line"), 1.5, 2.25)


def report_of(text: str = "small", exit_code: int = 1) -> Report:
    cells = tuple(cell_of(name, fault) for name, _, _, fault in CASES)
    versions = Versions("0.32.0", "2.13.0", "3.11.2", "SmolLM2", "SharedVolumeConnector")
    return Report(
        info=RunInfo(
            "20261130-154501",
            "harness/matrix/quick.yaml",
            "compose",
            "run",
            1_796_053_501.0,
            versions=versions,
            block_size=32,
        ),
        timing=Timing((("start", 30.5), ("oracles", 4.0), ("cells", 16.0)), 51.25),
        cells=(*cells, cell_of("never-judged")),
        observations=tuple(observation_of(cell, text) for cell in cells[:5]),
        verdicts=tuple(verdict_of(name, status, outcome, text) for name, status, outcome, _ in CASES),
        exit_code=exit_code,
        folder="runs/20261130-154501",
    )


def printed(report: Report, width: int = 80, *, terminal: bool = False) -> str:
    # An empty environment, because CI and NO_COLOR would otherwise decide here.
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, _environ={"TERM": "xterm"})
    print_report(report, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_all_formats_are_written(tmp_path: Path) -> None:
    files = write_reports(report_of(EVIL), tmp_path)
    assert {file.name for file in files} == {"report.json", "report.html", "junit.xml", "summary.md"}
    assert all(file.stat().st_size for file in files)


# report.json


def test_json_has_the_documented_fields() -> None:
    raw = json.loads(to_json(report_of()))
    assert " ".join(raw) == (
        "schema_version run_id outcome exit_code versions stack seed started_at duration_s startup_s cells_s error "
        "resumed_count replay_of differences counts cells"
    )
    assert " ".join(raw["cells"][0]) == (
        "id engine load fault expected outcome status attempts flaky group link findings duration_s ttft_s evidence"
    )
    assert raw["cells"][1]["evidence"] == {
        "loaded_blocks": 4,
        "failed_blocks": 1,
        "reported_blocks": 2,
        "fault_fired": 3,
    }
    assert datetime.fromisoformat(raw["started_at"]).timestamp() == 1_796_053_501
    assert (raw["duration_s"], raw["startup_s"], raw["cells_s"]) == (51.25, 30.5, 16.0)
    assert (raw["cells"][0]["ttft_s"], raw["cells"][5]["duration_s"]) == (0.25, 0)
    assert [cell["status"] for cell in raw["cells"]] == [status.value for _, status, _, _ in CASES]


def test_json_counts_outcomes() -> None:
    counts = json.loads(to_json(report_of()))["counts"]
    assert counts == Counter(outcome.value for _, _, outcome, _ in CASES)


@pytest.mark.parametrize(
    ("exit_code", "word"), [(0, "pass"), (1, "fail"), (2, "inconclusive"), (3, "error"), (130, "error")]
)
def test_the_outcome_of_a_run_is_its_exit_code_in_words(exit_code: int, word: str) -> None:
    report = report_of(exit_code=exit_code)
    assert json.loads(to_json(report))["outcome"] == word
    last = printed(report).splitlines()[-1]
    assert last == f"{word.upper()}  exit code {exit_code}  runs/20261130-154501"
    assert to_markdown(report).startswith(f"## kvproof: {word}\n")
    assert f'<span class="badge {word}">{word}</span>' in to_html(report)


SCHEMA_FILE = Path(__file__).resolve().parents[1] / "harness" / "report" / "report.schema.json"


def test_the_schema_in_the_repository_is_that_of_the_code() -> None:
    assert SCHEMA_FILE.read_text() == schema(), "run `make schema`"


def problems_of(raw: object) -> list[str]:
    validator = Draft202012Validator(json.loads(SCHEMA_FILE.read_text()), format_checker=FormatChecker())
    return [error.json_path for error in validator.iter_errors(raw)]


@pytest.mark.parametrize("text", ["small", EVIL, "\ud800"])
@pytest.mark.parametrize("exit_code", [0, 1, 2, 3])
def test_every_report_fits_the_schema(text: str, exit_code: int) -> None:
    assert problems_of(json.loads(to_json(report_of(text, exit_code)))) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("status", "green"), ("load", "later"), ("ttft_s", "0.1"), ("findings", [{"check": "x"}]), ("more", 1)],
)
def test_the_schema_refuses_what_is_no_report(field: str, value: object) -> None:
    raw = json.loads(to_json(report_of()))
    raw["cells"][2][field] = value
    assert [path.split("[2]")[0] for path in problems_of(raw)] == ["$.cells"]


def test_a_time_to_first_token_that_was_not_measured_is_null() -> None:
    report = report_of()
    record = report.observations[0].requests[0]
    plain = replace(record, completion=replace(record.completion, ttft_s=0.0))
    observations = (replace(report.observations[0], requests=(plain,)), *report.observations[1:])
    cells = json.loads(to_json(replace(report, observations=observations)))["cells"]
    assert [cell["ttft_s"] for cell in cells] == [None, 0.25, 0.25, 0.25, 0.25, None, None]


# terminal


def test_without_a_terminal_lines_are_plain() -> None:
    output = printed(report_of())
    assert "\x1b" not in output
    assert not re.search("[\u2500-\u257f]", output)


def test_on_a_terminal_there_is_colour() -> None:
    assert "\x1b[" in printed(report_of(), terminal=True)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_fits_into_80_columns_and_loses_nothing(terminal: bool) -> None:
    long_id = "decode-recompute.async.report-middle.two-sharers-and-a-bystander"
    cell = cell_of(long_id)
    verdict = verdict_of(long_id, Status.PASS, Outcome.RECOVERED)
    report = replace(report_of(), cells=(cell,), observations=(), verdicts=(verdict,))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed(report, terminal=terminal))
    table = plain.split("\nproved")[0].splitlines()
    assert max(map(len, table)) <= 80
    assert table[:2] == [f"pass {long_id}", "  recovered  l/f/r 4/1/2  fired 3  0.0 s"]


def test_ids_that_fit_stand_in_a_table() -> None:
    lines = [line.split() for line in printed(report_of()).splitlines()]
    assert lines[0] == ["cell", "outcome", "l/f/r", "fired", "s"]
    assert lines[2:4] == [["FAIL", "wrong", "wrong-output", "4/1/2", "3", "2.2"], ["expected", "recovered"]]


def test_a_wide_table_has_every_column() -> None:
    lines = [" ".join(line.split()) for line in printed(report_of(), width=160).splitlines()]
    assert lines[0] == "cell engine load fault expected outcome loaded failed reported fired s"
    assert lines[2] == "FAIL wrong decode-recompute sync drop first recovered wrong-output 4 1 2 3 2.2"


def test_a_red_cell_says_why_where_and_how_to_repeat_it() -> None:
    output = printed(report_of())
    block = output.split("FAIL wrong: ")[1].split("\n\n")[0].splitlines()
    assert block == [
        "wrong-output, expected recovered",
        "  why this cell: why wrong exists",
        "  fault: drop first, sync load on decode-recompute",
        "  - victim-equals-oracle [t-victim]: token ids differ (expected Paris, got small)",
        "  t-victim differs from partial(2) at token 1: expected id 11, got id 99",
        "    expected top: 11 -0.1000  12 -2.5000",
        "    got top:      99 -0.2000",
        "    @@ -1,2 +1,2 @@",
        "     Paris is",
        "    -big",
        "    +small",
        "  evidence: runs/20261130-154501/cells/wrong",
        "  repeat:   python harness/run_matrix.py run --replay runs/20261130-154501 --cell wrong",
    ]


def test_green_cells_are_not_explained_and_all_others_are() -> None:
    output = printed(report_of())
    assert "why pass exists" not in output
    assert all(f"why {name} exists" in output for name, status, _, _ in CASES if status is not Status.PASS)
    assert "known issue: https://github.com/vllm-project/vllm/issues/1" in output
    assert "FIXED" in output
    assert "take it off the list of known issues" in output
    assert "not judged: never-judged" in output


def test_every_format_tells_the_group_of_a_cell() -> None:
    report = report_of()
    cells = tuple(replace(cell, group="robustness") if cell.id == "wrong" else cell for cell in report.cells)
    report = replace(report, cells=cells)
    assert "wrong (robustness)" in printed(report, 200)
    assert "FAIL wrong (robustness): wrong-output" in printed(report)
    assert "- `wrong (robustness)` **wrong-output**" in to_markdown(report)
    assert 'name="wrong (robustness)"' in to_junit(report)
    assert "<b>wrong (robustness)</b>" in to_html(report)
    assert [cell["group"] for cell in json.loads(to_json(report))["cells"] if cell["id"] == "wrong"] == ["robustness"]


def test_a_request_without_an_answer_and_a_broken_harness_are_shown() -> None:
    report = report_of()
    record = report.observations[1].requests[0]
    lost = replace(record, completion=Completion(0, "connection reset", timed_out=True))
    observation = replace(report.observations[1], requests=(lost,), error="the engine went away")
    output = printed(replace(report, observations=(observation,)))
    assert "  victim t-victim: no answer, past its deadline, connection reset\n" in output
    assert "  not run: the engine went away\n" in output


def test_the_worst_is_explained_last() -> None:
    titles = re.findall(r"^(\w+) \S+: \S+, expected", printed(report_of()), re.MULTILINE)
    assert titles == ["skipped", "FIXED", "known", "inconclusive", "ERROR", "FAIL"]


def test_what_was_proved_and_which_issues_are_known() -> None:
    output = printed(report_of())
    assert "proved for vLLM 0.32.0, SharedVolumeConnector, SmolLM2, compose:\n" in output
    assert "  decode-recompute, sync: 2 recovered\n" in output
    assert "known issue https://github.com/vllm-project/vllm/issues/1: crashed in known\n" in output
    assert "  nothing: no cell is green\n" in printed(replace(report_of(), verdicts=report_of().verdicts[1:3]))


def test_quiet_leaves_the_reds_and_the_last_lines() -> None:
    console = Console(file=io.StringIO(), width=80, _environ={})
    print_report(report_of(), console, quiet=True)
    assert isinstance(console.file, io.StringIO)
    quiet = console.file.getvalue()
    assert re.findall(r"^(\w+) \S+: \S+, expected", quiet, re.MULTILINE) == ["ERROR", "FAIL"]
    assert quiet.splitlines()[-5:] == ["not judged: never-judged", "", *printed(report_of()).splitlines()[-3:]]
    assert "proved" not in quiet
    assert "l/f/r" not in quiet


def test_counts_and_times_end_the_report() -> None:
    lines = printed(report_of()).splitlines()[-3:]
    assert lines[0] == (
        "1 pass, 1 fail, 1 known, 1 fixed, 1 inconclusive, 1 error, 1 skipped"
        "  (2 recovered, 2 not-run, 1 wrong-output, 1 crashed, 1 unproven)"
    )
    assert lines[1] == "time: 51.2 s in all: start 30.5 s, oracles 4.0 s, cells 16.0 s"


def test_model_text_is_neither_markup_nor_a_terminal_code() -> None:
    output = printed(report_of(EVIL))
    assert "[bold]x[/bold] | \\x1b[31m \\x00 \\u202e" in output
    assert not set(output) & {"\x1b", "\x00", "\u202e"}


def test_an_empty_run_is_reported() -> None:
    report = replace(report_of(exit_code=3), verdicts=(), observations=())
    assert "no cell was judged" in printed(report)
    assert to_html(report)
    assert JUnitXml.fromstring(to_junit(report).encode())
    assert "0 of 8 cells judged" in to_markdown(report)


def test_progress_is_one_line_each() -> None:
    console = Console(file=io.StringIO(), width=40, _environ={})
    progress = LineProgress(console)
    progress.waiting("waiting for prefill (20 s)")
    progress.phase_done("start", 30.0)
    cell = cell_of("a.long.cell.id.[red]")
    progress.cells_planned((cell,) * 18)
    for _ in range(2):
        progress.cell_done(cell, verdict_of(cell.id, Status.FAIL, Outcome.HUNG), 1.25)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == (
        "waiting for prefill (20 s)\nstart  30.0 s\n"
        "[ 1/18] FAIL a.long.cell.id.[red]  hung  1.2 s\n[ 2/18] FAIL a.long.cell.id.[red]  hung  1.2 s\n"
    )


# report.html


VOID_TAGS = ("meta", "br", "input")
OPTIONAL_END_TAGS = ("td", "th", "tr", "li", "dt", "dd", "option")
"""HTML closes these by itself."""


class Outline(HTMLParser):
    """Tags and attributes of a page, and whether tags close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in (*VOID_TAGS, *OPTIONAL_END_TAGS):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_is_one_closed_well_formed_page() -> None:
    page = to_html(report_of(EVIL))
    outline = Outline(page)
    assert page.startswith("<!doctype html>")
    assert outline.open == []
    assert not {"link", "img", "iframe", "base", "object", "embed"} & set(outline.tags)
    assert not [name for name, _ in outline.attributes if name.startswith("on") or name in ("src", "style", "action")]
    assert outline.tags.count("details") >= len(CASES)


def test_the_page_allows_nothing_but_its_own_style_and_script() -> None:
    page = to_html(report_of(EVIL))
    (allowed,) = [
        value for name, value in Outline(page).attributes if name == "content" and "default-src" in str(value)
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in str(allowed).split(";"))
    inside = {tag: re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("style", "script")}
    assert rules["default-src"] == "'none'"
    assert (rules["base-uri"], rules["form-action"]) == ("'none'", "'none'")
    for tag, (text,) in inside.items():
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"


def test_html_escapes_model_text_and_evaluates_none_of_it() -> None:
    page = to_html(report_of(EVIL + "</script></style>"))
    assert page.count("<script") == page.count("</script") == page.count("<style") == page.count("</style") == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt; ]]&gt;" in page
    assert "{{ 7 * 7 }}" in page
    assert not set(page) & {"\x1b", "\x00", "\u202e"}


@pytest.mark.parametrize("field", ["id", "why", "group", "engine", "policy", "report"])
def test_html_escapes_what_a_matrix_file_says(field: str) -> None:
    evil = '"><script>alert(1)</script>'
    cell = replace(cell_of("odd"), **{field: evil})  # type: ignore[arg-type]
    verdict = verdict_of(cell.id, Status.FAIL, Outcome.WRONG_OUTPUT)
    page = to_html(replace(report_of(), cells=(cell,), verdicts=(verdict,), observations=(observation_of(cell),)))
    assert page.count("<script") == 1
    assert "&#34;&gt;&lt;script&gt;" in page
    assert Outline(page).open == []


def test_html_links_only_to_web_addresses_and_its_own_files() -> None:
    verdict = replace(verdict_of("known", Status.KNOWN, Outcome.CRASHED), link="javascript:alert(1)")
    page = to_html(replace(report_of(), verdicts=(verdict,)))
    assert "<dd>javascript:alert(1)" in page
    links = {str(value) for name, value in Outline(page).attributes if name == "href"}
    assert all(link.startswith(("#", "cells/known/")) for link in links)
    assert "https://github.com/vllm-project/vllm/issues/1" in {
        value for name, value in Outline(to_html(report_of())).attributes if name == "href"
    }


def test_the_files_of_a_cell_with_an_odd_name_are_found_beside_the_report() -> None:
    cell = cell_of("a b#%?é")
    verdict = verdict_of(cell.id, Status.PASS, Outcome.RECOVERED)
    report = replace(report_of(), cells=(cell,), verdicts=(verdict,), observations=(observation_of(cell),))
    links = [str(value) for name, value in Outline(to_html(report)).attributes if name == "href"]
    assert [unquote(link) for link in links if link.startswith("cells/")] == [
        f"cells/{cell.id}/{name}" for name in ("observation.json", "journal.jsonl", "engine.log", "verdict.json")
    ]


def test_html_opens_the_first_red_cell_and_points_at_each_from_the_matrix() -> None:
    page = to_html(report_of())
    assert re.findall(r'data-id="(cell-[\w-]+)" .* open>', page) == ["cell-wrong"]
    anchors = re.findall(r'id="(cell-[\w-]+)">', page)
    assert anchors == [f"cell-{name}" for name, *_ in CASES]
    tiles = re.findall(r'<a class="tile \w+" href="#(cell-[\w-]+)"', page)
    assert sorted(tiles) == sorted(anchors)


def test_html_tells_what_is_not_green_and_why_before_the_cells_the_worst_first() -> None:
    section = to_html(report_of()).split('<section id="open"')[1].split("</section>")[0]
    assert re.findall(r"#cell-([\w-]+)", section) == ["wrong", "broken", "unsure", "known", "fixed"]
    assert "victim-equals-oracle [t-victim]: token ids differ (expected Paris, got small)" in section


def test_a_green_run_has_nothing_that_is_not_green() -> None:
    report = report_of()
    assert '<section id="open"' not in to_html(replace(report, verdicts=report.verdicts[:1]))


def test_tokens_stand_side_by_side_with_the_first_difference_marked() -> None:
    pairs = token_pairs(difference_of("x"))
    assert [(pair.expected, pair.got, pair.first) for pair in pairs] == [
        ("10", "10", False),
        ("11", "99", True),
        ("12", "", False),
    ]
    assert [pair.equal for pair in pairs] == [True, False, False]
    page = to_html(report_of())
    assert "<span class=first>11<br>99<br>▲ first</span>" in page
    assert "<pre>Paris is\n<mark>big</mark></pre>" in page
    assert "<pre>Paris is\n<mark>small</mark></pre>" in page


def test_of_long_completions_the_surroundings_of_the_first_difference_are_shown() -> None:
    same = tuple(range(100))
    long = replace(difference_of("x"), index=100, expected_token_ids=(*same, 1, *same), got_token_ids=(*same, 2, *same))
    indices = [pair.index for pair in token_pairs(long)]
    assert indices == list(range(100 - TOKENS_BEFORE, 100 + TOKENS_AFTER))


def test_without_token_lists_the_differing_pair_is_shown() -> None:
    bare = replace(difference_of("x"), expected_token_ids=(), got_token_ids=())
    (pair,) = token_pairs(bare)
    assert (pair.index, pair.expected, pair.got, pair.first) == (1, "11", "99", True)


def test_both_lists_of_likely_tokens_are_shown_with_probabilities() -> None:
    page = to_html(report_of())
    assert '<td class=chosen>11<td class=number>90.48 %<td class="number soft">-0.1000<td>' in page
    assert "<td class=chosen>99<td class=number>81.87 %" in page
    assert "<td>12<td class=number>8.21 %" in page


def test_html_tells_what_a_producer_that_was_struck_answered() -> None:
    report = report_of()
    struck = ProcessRecord(saves=(Completion(0, "connection reset"), Completion(200, finish_reason="length")))
    seen = replace(report.observations[0], process=struck)
    page = to_html(replace(report, observations=(seen, *report.observations[1:])))
    assert "<dt>saves<dd>no answer, connection reset; then HTTP 200, length\n" in page
    assert page.count("<dt>saves") == 1


def test_settings_in_which_engines_differ_are_kept_apart() -> None:
    versions = Versions("0.32.0", "", "", "", "")
    one = EngineInfo(versions, {"DTYPE": "float32", "POLICY": "fail"}, ("serve",))
    other = EngineInfo(versions, {"DTYPE": "float32"}, ("serve",))
    assert settings({"a": one, "b": other}) == Settings(
        (("DTYPE", "float32"),), (("POLICY", ("fail", "")),), ("a", "b")
    )


def test_long_log_lines_are_cut() -> None:
    assert log_line("x" * 1000) == "x" * LOG_CHARACTERS_MAX + "…"
    assert log_line("a\tb") == "a\\tb"


def test_of_many_red_cells_the_first_are_shown_whole_and_the_file_stays_small() -> None:
    cells = many_cells(200)
    log_lines = ("a line of the log",) * LOG_LINES_MAX
    page = to_html(run_report(cells, {cell.id: f"something else {cell.id}" for cell in cells}, log_lines))
    red = page.count('<details class="cell fail"')
    assert red > 2 * WHOLE_CELLS_MAX
    assert page.count("<summary>Engine log") == page.count("<summary>Journal") == WHOLE_CELLS_MAX
    not_green = page.count('<details class="cell inconclusive"') + red
    assert page.count("In short: ") == not_green - WHOLE_CELLS_MAX
    assert len(page.encode()) < 2_000_000


def test_of_a_long_journal_both_ends_are_shown() -> None:
    report = report_of()
    (event,) = report.observations[0].events
    events = tuple(replace(event, time_s=event.time_s + second) for second in range(EVENTS_MAX + 1))
    assert ends(events[:-1]) == (events[:-1], ())
    assert ends(events) == (events[: EVENTS_MAX // 2], events[-(EVENTS_MAX // 2) :])
    long = tuple(replace(seen, events=events) for seen in report.observations)
    journal = to_html(replace(report, observations=long)).split('<pre class="journal">')[1].split("</pre>")[0]
    assert len(journal.strip().splitlines()) == EVENTS_MAX + 1
    assert f"\n{'…'}\n" in journal


# junit.xml


def test_junit_maps_every_status() -> None:
    (suite,) = JUnitXml.fromstring(to_junit(report_of()).encode())
    results = {case.name: [(type(r).__name__, r.type) for r in case.result] for case in suite}
    assert results == {
        "pass": [],
        "wrong": [("Failure", "wrong-output")],
        "known": [("Skipped", "known")],
        "fixed": [],
        "unsure": [("Error", "inconclusive")],
        "broken": [("Error", "error")],
        "left-out": [("Skipped", "skipped")],
    }
    assert (suite.tests, suite.failures, suite.errors, suite.skipped, suite.time) == (7, 1, 2, 2, 51.25)
    assert {p.name: p.value for p in suite.properties()}["vllm"] == "0.32.0"


def test_junit_says_why_and_how_to_repeat() -> None:
    case = ElementTree.fromstring(to_junit(report_of())).find(".//testcase[@name='wrong']")
    assert case is not None
    assert (case.get("classname"), case.get("time")) == ("decode-recompute.sync", "2.25")
    failure = case.find("failure")
    assert failure is not None
    assert failure.get("message", "").startswith("victim-equals-oracle [t-victim]: token ids differ")
    assert "-big\n+small\nevidence: runs/20261130-154501/cells/wrong\nrepeat: python" in (failure.text or "")


def test_junit_escapes_model_text() -> None:
    xml = to_junit(report_of(EVIL))
    assert "<script" not in xml
    assert "]]>" not in xml
    failure = ElementTree.fromstring(xml).find(".//failure")
    assert failure is not None
    assert "<script>alert(1)</script> ]]> `a`" in (failure.text or "")


# summary.md


def test_markdown_names_what_is_not_green() -> None:
    summary = to_markdown(report_of())
    assert "7 of 8 cells judged: 1 pass, 1 fail, 1 known, 1 fixed, 1 inconclusive, 1 error, 1 skipped" in summary
    assert (
        "### Failed\n\n- `wrong` **wrong-output** "
        "`victim-equals-oracle [t-victim]: token ids differ (expected Paris, got small)`\n"
        "  repeat: `python harness/run_matrix.py run --replay runs/20261130-154501 --cell wrong`\n"
    ) in summary
    assert "- `known` **crashed** <https://github.com/vllm-project/vllm/issues/1> `victim" in summary
    assert "### Not judged\n\n- `never-judged`\n" in summary
    assert "vllm `0.32.0`" in summary
    assert "51.2 s in all" in summary
    assert "`pass`" not in summary


def test_markdown_keeps_model_text_in_code_spans() -> None:
    page = MarkdownIt("commonmark").render(to_markdown(report_of(EVIL)))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; ]]&gt; `a` ``b`` [bold]x" in page


@pytest.mark.parametrize("text", ["plain", "`", "``", "a ``` b", "`a`", " ", "", "a\nb", "\x00", "\\`", "<b>&amp;"])
def test_a_code_span_holds_any_text(text: str) -> None:
    page = MarkdownIt("commonmark").render(f"- {code(text)} end")
    inside = re.fullmatch(r"<ul>\n<li><code>(.*)</code> end</li>\n</ul>\n", page)
    assert inside is not None
    shown = text.replace("\n", "\\n").replace("\x00", "\\x00")
    escaped = shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert inside[1].strip() == escaped.strip()


def test_markdown_stays_short_enough_for_a_comment() -> None:
    names = tuple(f"cell-{index}-{'`' * 150}" for index in range(500))
    report = replace(
        report_of(),
        cells=tuple(map(cell_of, names)),
        verdicts=tuple(verdict_of(name, Status.FAIL, Outcome.HUNG, EVIL * 50) for name in names),
    )
    summary = to_markdown(report)
    assert len(summary) < SUMMARY_CHARS_MAX
    assert "There is more; see report.html." in summary
    assert "vllm `0.32.0`" in summary
    assert "<script" not in MarkdownIt("commonmark").render(summary)


# the command that repeats a cell


def repeated(**info: object) -> str:
    report = report_of()
    return repeat_command(replace(report, info=replace(report.info, **info)), report.cells[1])  # type: ignore[arg-type]


def test_a_cell_is_repeated_from_the_run_folder_which_knows_the_rest() -> None:
    changed = {"stack_options": ("--stack", "compose"), "variables": (("KV_VERIFY_CHECKSUM", "false"),)}
    assert repeated(**changed) == "python harness/run_matrix.py run --replay runs/20261130-154501 --cell wrong"


def test_a_cell_of_make_up_is_repeated_by_make_up() -> None:
    assert repeated(variables=(("DTYPE", "bfloat16"),), in_compose=True, stack_options=("--stack", "compose")) == (
        "DTYPE=bfloat16 make up MATRIX=harness/matrix/quick.yaml ONLY=wrong"
    )


@pytest.mark.parametrize("write", [printed, to_html, to_junit])
def test_of_a_skipped_cell_no_difference_is_shown(write: Callable[[Report], str]) -> None:
    report = report_of()
    skipped = replace(report.verdicts[-1], differences=(difference_of("UNWANTED"),))
    assert "UNWANTED" in write(replace(report, verdicts=(replace(skipped, status=Status.FAIL),)))
    assert "UNWANTED" not in write(replace(report, verdicts=(skipped,)))


# words


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (NO_FAULT, "none"),
        (DROP_FIRST, "drop first"),
        (Fault(FaultKind.REPORT, (0, 2), ALWAYS), "report 0,2 always"),
        (Fault(FaultKind.SILENT, "last", 2), "silent last 2 times"),
        (Fault(FaultKind.DELAY, delay_s=1.5), "delay 1.5 s"),
        (Fault(FaultKind.PENDING, delay_s=0.25, times=ALWAYS), "pending 0.25 s always"),
        (Fault(FaultKind.HANG), "hang"),
        (Fault(FaultKind.RAISE, times=ALWAYS), "raise always"),
        (Fault(FaultKind.REPORT_LATE, "first"), "report_late first"),
    ],
)
def test_fault_words(fault: Fault, words: str) -> None:
    assert fault_words(fault) == words


def test_what_a_cell_breaks_in_words() -> None:
    assert broken_words(builders.cell(FaultKind.REPORT, "first")) == "report first"
    middle, two = (StorageFault(StorageKind.ZEROED, blocks) for blocks in ("middle", (0, 2)))
    assert broken_words(replace(builders.cell(), storage=middle)) == "zeroed middle"
    assert broken_words(replace(builders.cell(), storage=two)) == "zeroed 0,2"


def test_a_completion_that_ended_early_is_said_to_have_ended() -> None:
    assert difference_words(replace(difference_of("x"), got_token_id=-1, near_tie=True)) == (
        "t-victim differs from partial(2) at token 1: expected id 11, got the end, a near-tie"
    )


def test_equal_texts_have_no_diff() -> None:
    assert text_diff(replace(difference_of("big"), got_text="Paris is\nbig")) == ()


def test_visible_escapes_what_does_not_print() -> None:
    assert visible("é\n\t\x9b\ud800\U000e0001 日") == "é\n\\t\\x9b\\ud800\\U000e0001 日"


# Second attempts, and runs that did not come to their end.


def test_every_format_shows_both_attempts() -> None:
    report = report_of()
    (wrong,) = (verdict for verdict in report.verdicts if verdict.cell_id == "wrong")
    again = replace(wrong, outcome=Outcome.RECOVERED, status=Status.PASS)
    report = replace(report, again=(SecondAttempt(observation_of(report.cells[1]), again),))
    words = "again alone: recovered (flaky: not red again alone)"
    assert f"  {words}\n" in printed(report)
    assert words in to_markdown(report)
    assert words in to_junit(report)
    assert f"<dt>once more<dd>{words}" in to_html(report)
    (cell,) = (cell for cell in json.loads(to_json(report))["cells"] if cell["id"] == "wrong")
    assert (cell["outcome"], cell["attempts"], cell["flaky"]) == ("wrong-output", ["wrong-output", "recovered"], True)
    assert problems_of(json.loads(to_json(report))) == []


def test_every_format_shows_why_a_run_did_not_come_to_its_end() -> None:
    report = report_of(exit_code=3)
    report = replace(report, info=replace(report.info, failure=Failure("prefill ended\nits last `line`: <b>", 3)))
    assert "not finished: prefill ended\nits last `line`: <b>\n" in printed(report)
    assert "\n    prefill ended\n    its last `line`: <b>\n" in to_markdown(report)
    assert 'tests="8"' in to_junit(report)
    assert '<error message="prefill ended" type="error">' in to_junit(report)
    assert "<pre>prefill ended\nits last `line`: &lt;b&gt;</pre>" in to_html(report)
    assert json.loads(to_json(report))["error"] == "prefill ended\nits last `line`: <b>"


def test_every_format_shows_under_which_conditions_it_ran() -> None:
    report = report_of()
    info = replace(report.info, seed=7, resumed_at_s=(1.0,), replay_of="runs/r0", differences=("vllm was 1, is 2",))
    report = replace(report, info=info)
    for text in (printed(report), to_markdown(report), to_html(report)):
        assert "seed 7: " in text
        assert "interrupted and resumed, times: 1" in text
        assert "repeats cells of runs/r0, under other conditions" in text
        assert "not as there: vllm was 1, is 2" in text
    raw = json.loads(to_json(report))
    assert (raw["seed"], raw["resumed_count"], raw["replay_of"]) == (7, 1, "runs/r0")
