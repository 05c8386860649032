"""A matrix file becomes the right cells, and one with mistakes is refused with all of them at once."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.planning.matrix_file import FILE_BYTES_MAX
from harness.planning.matrix_words import KINDS
from harness.planning.plan import load_plan, select_cells
from harness.records import Cell, Moment, Outcome, Plan, PlannedRequest, PromptSpec, Role
from services.faults import ALWAYS, BREACH_KINDS, LOOKUP_KINDS, Fault, FaultKind, LoadMode
from tests.engines import ENGINES

MATRICES = Path(__file__).parents[1] / "harness" / "matrix"
EXAMPLE = MATRICES / "example.yaml"
ROBUSTNESS_KINDS = BREACH_KINDS | {FaultKind.UNANSWERED, FaultKind.HANG, FaultKind.RAISE, FaultKind.REOFFER}

HEAD = """
schema: 1
name: small
prompts:
  harbour:
    text: >-
      The secret word is saffron.

      A story of boats.

      The secret word is
    secret: saffron
    token_count: 231
  ferry: {text: A ferry., share_with: harbour, shared_blocks: 4}
  library: {text: Forty thousand books.}
cells:
"""


def plan_of(tmp_path: Path, text: str) -> Plan:
    path = tmp_path / "matrix.yaml"
    path.write_text(text, encoding="utf-8")
    return load_plan(path, ENGINES)


def cells_of(tmp_path: Path, entry: str) -> tuple[Cell, ...]:
    """The cells of one entry, written as a flow mapping without its `why`."""
    return plan_of(tmp_path, f"{HEAD}  - {{why: Because., {entry}}}\n").cells


def problems_of(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        plan_of(tmp_path, text)
    assert caught.value.exit_code == 64
    first, *lines = str(caught.value).splitlines()
    assert first.endswith(f"matrix.yaml: {len(lines)} problem{'s' if len(lines) > 1 else ''}")
    return [line.strip() for line in lines]


def ids(plan: Plan) -> list[str]:
    return [cell.id for cell in plan.cells]


# Expansion.


def test_lists_are_axes_and_their_product_the_cells(tmp_path: Path) -> None:
    cells = cells_of(
        tmp_path,
        "engine: [decode-recompute, decode-fail], load: [sync, async], "
        "fault: {kind: report, blocks: [first, 2, [0, 3]]}, workload: {victim: harbour}",
    )
    blocks = ("first", "blocks-2", "blocks-0-3")
    assert [cell.id for cell in cells] == [
        f"{policy}-report-{load}-{block}"
        for policy, load, block in product(("recompute", "fail"), ("sync", "async"), blocks)
    ]
    assert [cell.fault.blocks for cell in cells[:3]] == ["first", (2,), (0, 3)]
    assert {(cell.engine, cell.policy) for cell in cells} == {
        ("decode-recompute", "recompute"),
        ("decode-fail", "fail"),
    }


def test_a_whole_cell(tmp_path: Path) -> None:
    (cell,) = cells_of(
        tmp_path,
        "report: vllm#19329, engine: decode-fail, load: async, max_tokens: 9, deadline_s: 5, name: twice, "
        "fault: {kind: drop, times: 2}, workload: {kind: mix, victim: harbour, sharers: ferry, bystanders: library}",
    )
    fault = Fault(FaultKind.DROP, "all", 2)
    assert cell == Cell(
        id="fail-drop-async-2-times-mix-twice",
        engine="decode-fail",
        policy="fail",
        load=LoadMode.ASYNC,
        requests=(
            PlannedRequest(Role.VICTIM, "harbour", LoadMode.ASYNC, fault),
            PlannedRequest(Role.SHARER, "ferry", LoadMode.ASYNC, sent=Moment.LOADING),
            PlannedRequest(Role.BYSTANDER, "library", LoadMode.ASYNC, sent=Moment.LOADING),
        ),
        expected=Outcome.FAILED_CLEANLY,
        why="Because.",
        max_tokens=9,
        deadline_s=5.0,
        report="vllm#19329",
    )
    assert cell.fault == fault


@pytest.mark.parametrize(
    ("engine", "fault", "expected", "control"),
    [
        ("decode-recompute", "{kind: none}", Outcome.LOADED, True),
        ("decode-baseline", "{kind: none}", Outcome.LOADED, True),
        ("decode-fail", "{kind: silent}", Outcome.CAUGHT, True),
        ("decode-recompute", "{kind: report}", Outcome.RECOVERED, False),
        ("decode-recompute", "{kind: drop}", Outcome.RECOVERED, False),
        ("decode-fail", "{kind: report}", Outcome.FAILED_CLEANLY, False),
        ("decode-fail", "{kind: drop}", Outcome.FAILED_CLEANLY, False),
        ("decode-fail", "{kind: delay, delay_s: 1}", Outcome.LOADED, False),
        ("decode-fail", "{kind: pending, delay_s: 1}", Outcome.LOADED, False),
        ("decode-recompute", "{kind: raise}", Outcome.RECOVERED, False),
        ("decode-fail", "{kind: raise}", Outcome.FAILED_CLEANLY, False),
        ("decode-recompute", "{kind: report_late}", Outcome.RECOVERED, False),
        ("decode-fail", "{kind: report_late}", Outcome.FAILED_CLEANLY, False),
        ("decode-recompute", "{kind: finish_sync}", Outcome.RECOVERED, False),
        ("decode-fail", "{kind: finish_sync}", Outcome.FAILED_CLEANLY, False),
        ("decode-fail", "{kind: unknown_block}", Outcome.LOADED, False),
    ],
)
def test_what_is_expected_follows_from_fault_and_policy(
    tmp_path: Path, engine: str, fault: str, expected: Outcome, control: bool
) -> None:
    (cell,) = cells_of(tmp_path, f"engine: {engine}, load: sync, fault: {fault}, workload: {{victim: harbour}}")
    assert (cell.expected, cell.control) == (expected, control)


def test_expect_and_control_can_be_said(tmp_path: Path) -> None:
    entry = "engine: decode-fail, load: sync, workload: {victim: harbour}, expect: failed-cleanly, control: false"
    (cell,) = cells_of(tmp_path, entry)
    assert (cell.expected, cell.control) == (Outcome.FAILED_CLEANLY, False)


@pytest.mark.parametrize(
    ("kind", "recompute", "fail"),
    [
        ("hang", Outcome.RECOVERED, Outcome.FAILED_CLEANLY),
        ("reoffer", Outcome.RECOVERED, Outcome.FAILED_CLEANLY),
        ("finish_missing", Outcome.RECOVERED, Outcome.FAILED_CLEANLY),
        ("finish_twice", Outcome.LOADED, Outcome.LOADED),
    ],
)
def test_what_is_expected_of_async_loads(tmp_path: Path, kind: str, recompute: Outcome, fail: Outcome) -> None:
    entry = (
        f"engine: [decode-recompute, decode-fail], load: async, fault: {{kind: {kind}}}, workload: {{victim: ferry}}"
    )
    assert [cell.expected for cell in cells_of(tmp_path, entry)] == [recompute, fail]


def test_cells_in_which_the_connector_breaks_its_contract_are_a_group(tmp_path: Path) -> None:
    entry = "engine: decode-fail, load: sync, workload: {victim: ferry}, fault: {kind: [report, raise, report_late]}"
    assert [cell.group for cell in cells_of(tmp_path, entry)] == ["", "", "robustness"]


@pytest.mark.parametrize(
    ("load", "kind", "other"),
    [
        *(("sync", kind, "async") for kind in ("hang", "reoffer", "finish_missing", "finish_twice")),
        ("async", "finish_sync", "sync"),
    ],
)
def test_kinds_of_one_load_mode_are_refused_in_the_other(tmp_path: Path, load: str, kind: str, other: str) -> None:
    text = (
        f"{HEAD}  - {{why: Because., engine: decode-fail, load: {load}, fault: {{kind: {kind}}}, "
        "workload: {victim: ferry}}\n"
    )
    (problem,) = problems_of(tmp_path, text)
    assert problem.startswith(f"{kind} cannot happen to a load that is {load} @ cells.0.load")
    assert f"valid with load {other} only" in problem


def test_only_a_lone_victim_is_a_control_by_default(tmp_path: Path) -> None:
    entry = "engine: decode-fail, load: sync, workload: {kind: group, victim: harbour, bystanders: library}"
    (cell,) = cells_of(tmp_path, entry)
    assert (cell.id, cell.control) == ("fail-none-sync-group", False)


def test_each_kind_takes_the_axes_that_mean_something_for_it(tmp_path: Path) -> None:
    cells = cells_of(
        tmp_path,
        "engine: decode-recompute, load: sync, workload: {victim: harbour}, "
        "fault: {kind: [none, report, delay], blocks: [first, last], times: always, delay_s: [0.5, 2]}",
    )
    assert [(cell.id, cell.fault) for cell in cells] == [
        ("recompute-none-sync", Fault()),
        ("recompute-report-sync-first-always", Fault(FaultKind.REPORT, "first", ALWAYS)),
        ("recompute-report-sync-last-always", Fault(FaultKind.REPORT, "last", ALWAYS)),
        ("recompute-delay-sync-always-500ms", Fault(FaultKind.DELAY, "all", ALWAYS, 0.5)),
        ("recompute-delay-sync-always-2000ms", Fault(FaultKind.DELAY, "all", ALWAYS, 2.0)),
    ]


def test_victims_and_streams_are_axes(tmp_path: Path) -> None:
    entry = "engine: decode-fail, load: sync, workload: {victim: [harbour, library], stream: [false, true]}"
    assert [(cell.id, cell.requests[0].prompt_id, cell.requests[0].stream) for cell in cells_of(tmp_path, entry)] == [
        ("fail-none-sync-harbour", "harbour", False),
        ("fail-none-sync-harbour-stream", "harbour", True),
        ("fail-none-sync-library", "library", False),
        ("fail-none-sync-library-stream", "library", True),
    ]


def test_a_group_sends_the_victim_first_then_sharers_then_bystanders(tmp_path: Path) -> None:
    entry = "engine: decode-fail, load: sync, workload: {kind: group, bystanders: [library, ferry], victim: harbour}"
    (cell,) = cells_of(tmp_path, entry)
    assert [(request.role, request.prompt_id) for request in cell.requests] == [
        (Role.VICTIM, "harbour"),
        (Role.BYSTANDER, "library"),
        (Role.BYSTANDER, "ferry"),
    ]


def test_prompts_are_those_used_and_those_whose_blocks_they_share(tmp_path: Path) -> None:
    text = f"{HEAD}  - {{why: Because., engine: decode-fail, load: sync, workload: {{victim: ferry}}}}"
    assert [spec.id for spec in plan_of(tmp_path, text).prompts] == ["harbour", "ferry"]


def test_a_prompt_keeps_its_paragraphs_and_repeats_its_text(tmp_path: Path) -> None:
    text = HEAD.replace("{text: Forty thousand books.}", '{text: "Bob", repeat: {text: "Hi ", count: 3}}')
    entry = "  - {why: Because., engine: decode-fail, load: sync, workload: {victim: [harbour, library]}}"
    assert plan_of(tmp_path, text + entry).prompts == (
        PromptSpec("harbour", "The secret word is saffron.\nA story of boats.\nThe secret word is", 231, "saffron"),
        PromptSpec("library", "Hi Hi Hi Bob"),
    )


def roles_and_moments(tmp_path: Path, entry: str) -> list[tuple[Role, str, Moment, Moment | None]]:
    (cell,) = cells_of(tmp_path, f"engine: decode-chunked, load: sync, fault: {{kind: report}}, workload: {entry}")
    return [(r.role, r.prompt_id, r.sent, r.gives_up) for r in cell.requests]


def test_a_twin_is_the_victims_prompt_again(tmp_path: Path) -> None:
    assert roles_and_moments(tmp_path, "{kind: twin, victim: harbour, gives_up: repair}") == [
        (Role.VICTIM, "harbour", Moment.START, Moment.REPAIR),
        (Role.SHARER, "harbour", Moment.LOADING, None),
    ]


def test_requests_are_in_the_order_in_which_they_are_sent(tmp_path: Path) -> None:
    entry = "{kind: group, victim: harbour, fellows: ferry, ahead: [library, ferry], late: ferry, bystanders: library}"
    assert roles_and_moments(tmp_path, entry.replace("}", ", then: library}")) == [
        (Role.BYSTANDER, "library", Moment.AHEAD, None),
        (Role.BYSTANDER, "ferry", Moment.AHEAD, None),
        (Role.VICTIM, "harbour", Moment.START, None),
        (Role.VICTIM, "ferry", Moment.START, None),
        (Role.BYSTANDER, "library", Moment.LOADING, None),
        (Role.SHARER, "ferry", Moment.REPAIR, None),
        (Role.BYSTANDER, "library", Moment.GONE, None),
    ]


def test_only_the_victims_are_broken_and_requests_ahead_load_nothing(tmp_path: Path) -> None:
    entry = "{kind: group, victim: harbour, fellows: ferry, ahead: library, bystanders: library}"
    (cell,) = cells_of(tmp_path, f"engine: decode-tight, load: sync, fault: {{kind: report}}, workload: {entry}")
    broken = [(request.fault.kind, request.load) for request in cell.requests]
    assert broken == [
        (FaultKind.NONE, LoadMode.OFF),
        (FaultKind.REPORT, LoadMode.SYNC),
        (FaultKind.REPORT, LoadMode.SYNC),
        (FaultKind.NONE, LoadMode.SYNC),
    ]


def test_who_gives_up_is_streamed_to_and_nobody_else(tmp_path: Path) -> None:
    (cell,) = cells_of(
        tmp_path,
        "engine: decode-chunked, load: sync, fault: {kind: report}, "
        "workload: {kind: twin, victim: harbour, gives_up: loading}",
    )
    assert cell.id == "chunked-report-sync-twin-given-up"
    assert [request.stream for request in cell.requests] == [True, False]


def test_bystanders_with_a_deadline_of_their_own(tmp_path: Path) -> None:
    entry = "{kind: group, victim: harbour, sharers: ferry, bystanders: library, bystander_deadline_s: 2}"
    (cell,) = cells_of(tmp_path, f"engine: decode-tight, load: sync, deadline_s: 9, workload: {entry}")
    assert [request.deadline_s for request in cell.requests] == [0, 0, 2]


def test_engines_with_other_settings_are_their_own_oracles(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, "engine: [decode-fail, decode-tight], load: sync, workload: {victim: harbour}")
    assert [(cell.engine, cell.oracle_engine, cell.policy) for cell in cells] == [
        ("decode-fail", "decode-baseline", "fail"),
        ("decode-tight", "decode-tight", "recompute"),
    ]


def test_the_chat_api(tmp_path: Path) -> None:
    head = HEAD.replace("  library: {text", "  library: {chat: true, text")
    entry = "  - {why: B., engine: decode-fail, load: sync, workload: {victim: library, api: [completions, chat]}}"
    plan = plan_of(tmp_path, head + entry)
    assert ids(plan) == ["fail-none-sync", "fail-none-sync-chat"]
    assert [cell.requests[0].chat for cell in plan.cells] == [False, True]


# Mistakes.

MANY_MISTAKES = """
schema: 1
name: small
promts: {}
prompts:
  Harbour: {text: Boats.}
  harbour: {text: The word is saffron., secret: saffron, token_count: many}
  bakery: {text: Bread., secret: thunder}
  library: {text: Books., share_with: harbor, shared_blocks: 2}
  ferry: {text: A ferry., shared_blocks: 2}
  ferry: {text: A ferry., share_with: library, shared_blocks: 2, bloks: 1}
cells:
  - engine: [decode-recompute, decode-recompte]
    load: off
    fault: {kind: reprot, blocks: [first, center], times: 0, delay_s: fast}
    workload: {victim: harbour}
  - why: Because.
    report: 19329
    engine: decode-fail
    load: sync
    fault: none
    workload: {kind: pair, victim: []}
    expect: fine
    max_tokens: true
  - why: Because.
    report: the first one
    engine: decode-fail
    load: sync
    workload: {victim: harbour}
  - why: Because.
    engine: decode-baseline
    load: sync
    fault: {kind: report, delay_s: 1}
    workload: {kind: mix, victim: harbur, sharers: [ferry, library], bystanders: bakery}
  - 7
"""


@pytest.fixture
def many(tmp_path: Path) -> list[str]:
    return problems_of(tmp_path, MANY_MISTAKES)


@pytest.mark.parametrize(
    "problem",
    [
        "unknown key promts @ promts (line 4; did you mean prompts? valid: schema, name, include, prompts, cells)",
        "'Harbour' cannot be a prompt's id @ prompts.Harbour (line 6; lower-case letters, digits and single dashes)",
        "input should be a valid integer, not 'many' @ prompts.harbour.token_count (line 7)",
        "the text says 'thunder' 0 times @ prompts.bakery.secret (line 8; once is right)",
        "no other prompt 'harbor' @ prompts.library.share_with (line 9; did you mean harbour? "
        "valid: Harbour, harbour, bakery, ferry)",
        "ferry is given twice @ prompts.ferry (line 11)",
        "unknown key bloks @ prompts.ferry.bloks (line 11; valid: text, repeat, token_count, secret, share_with, "
        "shared_blocks, chat, unstored)",
        "why is missing @ cells.0.why (line 13)",
        "unknown value 'decode-recompte' @ cells.0.engine.1 (line 13; did you mean decode-recompute? "
        "valid: decode-baseline, decode-recompute, decode-fail, decode-chunked, decode-tight)",
        "unknown value 'off' @ cells.0.load (line 14; valid: sync, async)",
        f"unknown value 'reprot' @ cells.0.fault.kind (line 15; did you mean report? valid: {', '.join(KINDS)})",
        "'center' names no blocks @ cells.0.fault.blocks.1 (line 15; valid: first, middle, last, all, "
        "a block index counted from 0, or [[0, 2]] for blocks 0 and 2 together)",
        "input should be greater than or equal to 1, not 0 @ cells.0.fault.times (line 15)",
        "input should be a valid number, not 'fast' @ cells.0.fault.delay_s (line 15)",
        "input should be a valid string, not 19329 @ cells.1.report (line 18)",
        "'none' is not a mapping @ cells.1.fault (line 21; valid keys: kind, blocks, times, delay_s)",
        "unknown value 'pair' @ cells.1.workload.kind (line 22; valid: single, mix, twin, late, group)",
        "victim is empty @ cells.1.workload.victim (line 22)",
        "unknown value 'fine' @ cells.1.expect (line 23; valid: loaded, recovered, failed-cleanly, caught)",
        "input should be a valid integer, not True @ cells.1.max_tokens (line 24)",
        "'the first one' does not fit @ cells.2.report (line 26; such as vllm#19329 or owner/repository#7)",
        "decode-baseline obeys no faults @ cells.3.engine (line 31; valid with kind none only)",
        "delay_s means nothing for kind report @ cells.3.fault.delay_s (line 33; it belongs to delay, pending)",
        "mix with 2 sharers and 1 bystanders @ cells.3.workload (line 34; one of each, or kind group)",
        "unknown prompt 'harbur' @ cells.3.workload.victim (line 34; did you mean harbour? "
        "valid: Harbour, harbour, bakery, library, ferry)",
        "7 is not a mapping @ cells.4 (line 35; valid keys: why, name, report, engine, load, fault, workload, "
        "expect, max_tokens, deadline_s, control)",
    ],
    ids=lambda problem: re.split("[@(]", problem)[1].strip(),
)
def test_every_mistake_is_listed_with_path_line_and_choices(many: list[str], problem: str) -> None:
    assert problem in many


def test_mistakes_come_in_the_order_of_the_file(many: list[str]) -> None:
    lines = [int(match.group(1)) for problem in many if (match := re.search(r"\(line (\d+)", problem))]
    assert len(lines) == len(many) == 26
    assert lines == sorted(lines)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("workload: {victim: harbour, bystanders: library}", "single is a victim alone @ cells.0.workload"),
        ("workload: {kind: group, victim: harbour}", "a group of one @ cells.0.workload"),
        (
            "workload: {kind: mix, victim: harbour, sharers: library, bystanders: ferry}",
            "library shares no blocks with harbour @ cells.0.workload.sharers (line 17; "
            "give library share_with: harbour)",
        ),
        (
            "workload: {victim: harbour}, fault: {kind: delay}",
            "delay_s is missing @ cells.0.fault.delay_s (line 17; seconds, for kind delay and pending)",
        ),
        (
            "workload: {victim: harbour}, fault: {kind: pending}",
            "delay_s is missing @ cells.0.fault.delay_s (line 17; seconds, for kind delay and pending)",
        ),
        (
            "workload: {victim: harbour}, fault: {kind: delay, delay_s: 1, blocks: all}",
            "blocks means nothing for kind delay @ cells.0.fault.blocks (line 17; it belongs to report, drop, silent",
        ),
        ("workload: {victim: [harbour, harbour]}", "a second cell fail-none-sync-harbour @ cells.0 (line 17; give"),
    ],
)
def test_parts_that_do_not_fit_together(tmp_path: Path, entry: str, problem: str) -> None:
    text = f"{HEAD}  - {{why: Because., engine: decode-fail, load: sync, {entry}}}"
    assert any(line.startswith(problem) for line in problems_of(tmp_path, text))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "{text: Forty thousand books.}",
            "{text: A saffron bun.}",
            "'saffron' is also in library @ prompts.harbour.secret",
        ),
        (
            "{text: Forty thousand books.}",
            "{text: Books., share_with: ferry, shared_blocks: 1}",
            "ferry itself begins with the blocks of another prompt @ prompts.library.share_with (line 15; name harbour",
        ),
        ("\n\n      A story of boats.", "", "the secret is not in the first of at least three paragraphs"),
        (", shared_blocks: 4", "", "share_with and shared_blocks need each other @ prompts.ferry"),
        ("schema: 1", "schema: 2", "unknown value 2 @ schema (line 2; valid: 1)"),
        ("name: small\n", "", "name is missing @ name"),
        ("library: {", "7: {", "input should be a valid string, not 7 @ prompts"),
    ],
)
def test_prompts_that_do_not_fit_together(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in HEAD
    entry = "  - {why: Because., engine: decode-fail, load: sync, workload: {victim: harbour}}"
    (line,) = problems_of(tmp_path, HEAD.replace(old, new) + entry)
    assert line.startswith(problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("schema: 0x" + "f" * 5000, "this number is too large @ line 1, column 9"),
        ("schema: " + "9" * 5000, "this is no int @ line 1, column 9"),
        ("schema: 1\nname: !!timestamp abc", "this is no timestamp @ line 2, column 7"),
        ("schema: 1\nname: !!bool abc", "this is no bool @ line 2, column 7"),
        ("schema: !!int ''", "this is no int @ line 1, column 9"),
        ("a: " + "[" * 3000, "lists or mappings are nested too deeply"),
        ("caf\u00e9".encode("latin-1"), "byte 3 is not UTF-8; save it as UTF-8"),
        (b"#" * (FILE_BYTES_MAX + 1), f"it has more than {FILE_BYTES_MAX} bytes"),
    ],
)
def test_files_that_are_no_yaml_of_ours(tmp_path: Path, text: str | bytes, problem: str) -> None:
    file = tmp_path / "matrix.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=re.escape(f"matrix.yaml is not a matrix file: {problem}")):
        load_plan(file, ENGINES)


def test_a_date_is_a_text_like_any_other(tmp_path: Path) -> None:
    entry = "  - {why: 2026-12-01, engine: decode-fail, load: sync, workload: {victim: harbour}}\n"
    assert [cell.why for cell in plan_of(tmp_path, HEAD + entry).cells] == ["2026-12-01"]


def test_a_key_of_two_lines_stays_on_one(tmp_path: Path) -> None:
    (line,) = problems_of(tmp_path, '"a\\n  b": 1' + HEAD + "  []")
    assert line.startswith("unknown key a\\n  b @ a\\n  b (line 1;")


def test_a_name_that_no_file_can_have_is_no_matrix(tmp_path: Path) -> None:
    (line,) = problems_of(tmp_path, f"schema: 1\nname: n\ninclude: [{{matrix: {'a' * 300}}}]")
    assert line.startswith("no matrix 'aaa")
    assert "known_issues" not in line


def test_values_that_are_there_twice_are_told_once(tmp_path: Path) -> None:
    entry = "  - {why: Because., engine: decode-fail, load: [sync, sync, sync], workload: {victim: harbour}}\n"
    (line,) = problems_of(tmp_path, HEAD + entry)
    assert "or an axis has a value twice" in line


def test_two_entries_with_the_same_ids_need_a_name(tmp_path: Path) -> None:
    entry = "  - {why: Because., engine: decode-fail, load: sync, workload: {victim: harbour}}\n"
    assert problems_of(tmp_path, HEAD + entry + entry) == [
        "a second cell fail-none-sync @ cells.1 (line 18; "
        "give the entry a name of its own, which ends the ids of its cells; or an axis has a value twice)"
    ]
    assert ids(plan_of(tmp_path, HEAD + entry + entry.replace("why", "name: again, why"))) == [
        "fail-none-sync",
        "fail-none-sync-again",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("schema: 1\ncells: [\n", "@ line 3, column 1"),
        ("schema: 1\ncells: &a [*a]\n", "aliases (*name) are not supported @ line 2"),
        ("schema: !!python/object:os.system {}\n", "@ line 1, column 9"),
        ("name: \x00", "not a matrix file"),
    ],
)
def test_broken_yaml_says_where(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        plan_of(tmp_path, text)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the matrix file .*gone.yaml: No such file"):
        load_plan(tmp_path / "gone.yaml", ENGINES)


@pytest.mark.parametrize("text", ["", "7", "- a\n"])
def test_a_file_without_a_mapping(tmp_path: Path, text: str) -> None:
    (line,) = problems_of(tmp_path, text)
    assert line.endswith(
        "is not a mapping @ top of the file (line 1; valid keys: schema, name, include, prompts, cells)"
    )


@pytest.mark.parametrize(
    ("workload", "says"),
    [
        ("{kind: twin, victim: harbour, sharers: ferry}", "twin is the victim's prompt twice"),
        ("{kind: late, victim: harbour}", "late is a victim, and one request during its repair"),
        ("{kind: late, victim: harbour, late: ferry, then: library}", "late is a victim, and one request"),
        ("{victim: harbour, ahead: library}", "single is a victim alone"),
        ("{kind: group, victim: harbour, sharers: ferry, bystander_deadline_s: 1}", "there are no bystanders"),
        ("{kind: group, victim: harbour, then: librari}", "unknown prompt 'librari' @ cells.0.workload.then"),
        ("{victim: harbour, api: chat}", "prompt harbour is no chat @ cells.0.workload.api"),
    ],
)
def test_workloads_that_make_no_sense(tmp_path: Path, workload: str, says: str) -> None:
    text = f"{HEAD}  - {{why: B., engine: decode-fail, load: sync, workload: {workload}}}"
    (problem,) = problems_of(tmp_path, text)
    assert problem.startswith(says)


def test_a_chat_prompt_has_no_token_count(tmp_path: Path) -> None:
    head = HEAD.replace("  library: {text", "  library: {chat: true, token_count: 99, text")
    (problem,) = problems_of(
        tmp_path, head + "  - {why: B., engine: decode-fail, load: sync, workload: {victim: library}}"
    )
    assert problem.startswith("a chat prompt has neither token_count nor share_with @ prompts.library")


# Selection.


@pytest.fixture(scope="module")
def example() -> Plan:
    return load_plan(EXAMPLE, ENGINES)


def test_no_pattern_selects_everything(example: Plan) -> None:
    assert select_cells(example, ()) == example


def test_selected_cells_bring_the_controls_of_their_engine_and_load(example: Plan) -> None:
    plan = select_cells(example, ("recompute-report-sync-f*", "fail-report-async-all"))
    assert ids(plan) == [
        "recompute-none-sync",
        "fail-none-async",
        "recompute-silent-sync",
        "fail-silent-async",
        "recompute-report-sync-first",
        "fail-report-async-all",
    ]
    assert [spec.id for spec in plan.prompts] == ["harbour", "bakery"]


def test_selected_cells_bring_the_same_requests_without_the_fault(example: Plan) -> None:
    plan = select_cells(example, ("recompute-drop-async-all-group",))
    assert ids(plan) == [
        "recompute-none-async",
        "recompute-silent-async",
        "recompute-none-async-group",
        "recompute-drop-async-all-group",
    ]


def test_every_pattern_must_match(example: Plan) -> None:
    with pytest.raises(UsageError) as caught:
        select_cells(example, ("recompute-report-sync-midle", "fail-*", "zzz"))
    assert str(caught.value).splitlines() == [
        "no cell of example matches 'recompute-report-sync-midle'; the nearest are recompute-report-sync-middle, "
        "recompute-report-async-middle, recompute-report-sync-middle-mix",
        "no cell of example matches 'zzz'; the nearest are recompute-none-sync, recompute-none-async, fail-none-sync",
    ]


# The shipped matrices.


@pytest.fixture(scope="module")
def robustness() -> Plan:
    return load_plan(MATRICES / "robustness.yaml", ENGINES)


@pytest.fixture(scope="module")
def quiet() -> Plan:
    return load_plan(MATRICES / "quiet.yaml", ENGINES)


def test_example_has_every_axis(example: Plan) -> None:
    assert len(example.cells) >= 24
    assert len(set(ids(example))) == len(example.cells)
    assert all(re.fullmatch(r"[a-z0-9-]+", cell.id) for cell in example.cells)
    assert all(cell.why for cell in example.cells)
    assert {
        f"recompute-report-{load}-{block}"
        for load, block in product(("sync", "async"), ("first", "middle", "last", "all"))
    } <= set(ids(example))
    assert {cell.fault.kind for cell in example.cells} == set(FaultKind) - ROBUSTNESS_KINDS - LOOKUP_KINDS


def test_robustness_has_the_other_kinds(robustness: Plan) -> None:
    kinds = {cell.fault.kind for cell in robustness.cells}
    assert kinds == {FaultKind.NONE, FaultKind.SILENT, *ROBUSTNESS_KINDS}
    assert {cell.fault.kind for cell in robustness.cells if cell.group} == BREACH_KINDS


@pytest.mark.parametrize("matrix", ["example", "robustness", "quiet"])
def test_each_matrix_has_both_controls_for_every_engine_and_load(matrix: str, request: pytest.FixtureRequest) -> None:
    example: Plan = request.getfixturevalue(matrix)
    pairs = {(cell.engine, cell.load) for cell in example.cells}
    controls = {(cell.engine, cell.load, cell.fault.kind) for cell in example.cells if cell.control}
    assert controls == {(*pair, kind) for pair in pairs for kind in (FaultKind.NONE, FaultKind.SILENT)}


def test_example_has_the_flow_of_vllms_example(example: Plan) -> None:
    cell = next(cell for cell in example.cells if cell.id == "recompute-drop-sync-all-group")
    texts = {spec.id: spec.text for spec in example.prompts}
    assert [texts[request.prompt_id] for request in cell.requests] == [
        "Hi " * 1000 + "Hello, my name is",
        "Hi " * 1000 + "The capital of France is",
        "Hey " * 500 + "Your name is",
        "Hey " * 500 + "The capital of China is",
    ]
    assert cell.max_tokens == 10
    assert [request.fault.kind for request in cell.requests] == [FaultKind.DROP, *[FaultKind.NONE] * 3]
