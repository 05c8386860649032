"""Faults of processes between matrix file and cell: kinds, ids, what is expected, mistakes, and the shipped matrix."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.faults.process_kinds import OF_PREFILL, ProcessFault, ProcessKind
from harness.judging.oracles import acceptable, needed
from harness.planning.plan import load_plan
from harness.records import OracleKey, OracleKind, Outcome, Role
from services.faults import NO_FAULT, FaultKind, HoldPoint, LoadMode
from tests.builders import BLOCK_COUNT, BLOCK_SIZE, PROMPTS, request
from tests.engines import ENGINES
from tests.process_builders import process_cell

PROCESS = load_plan(Path(__file__).parents[1] / "harness" / "matrix" / "process.yaml", ENGINES)
HEAD = "schema: 1\nname: small\nprompts:\n  harbour: {text: Boats.}\n  library: {text: Books.}\ncells:\n"


def matrix(tmp_path: Path, entry: str, workload: str = "{victim: harbour}") -> Path:
    path = tmp_path / "matrix.yaml"
    path.write_text(f"{HEAD}  - {{why: Because., workload: {workload}, {entry}}}\n")
    return path


def test_a_kind_tells_its_layer(tmp_path: Path) -> None:
    entry = "engine: decode-fail, load: async, fault: {kind: [report, prefill-killed-saving], blocks: [first, 2]}"
    plan = load_plan(matrix(tmp_path, entry), ENGINES)
    found = {cell.id: (cell.fault.kind, cell.process, cell.expected) for cell in plan.cells}
    assert len(found) == 4
    assert found["fail-report-async-first"] == (FaultKind.REPORT, None, Outcome.FAILED_CLEANLY)
    struck = ProcessFault(ProcessKind.PREFILL_KILLED_SAVING, (2,))
    assert found["fail-prefill-killed-saving-async-blocks-2"] == (FaultKind.NONE, struck, Outcome.LOADED)
    assert not any(cell.control or cell.storage for cell in plan.cells)
    assert {r.fault for cell in plan.cells if cell.process for r in cell.requests} == {NO_FAULT}


@pytest.mark.parametrize("engine", ["decode-recompute", "decode-fail"])
@pytest.mark.parametrize("kind", ProcessKind)
def test_what_is_expected_does_not_depend_on_the_policy(engine: str, kind: ProcessKind, tmp_path: Path) -> None:
    (cell,) = load_plan(matrix(tmp_path, f"engine: {engine}, load: sync, fault: {{kind: {kind}}}"), ENGINES).cells
    assert cell.process == ProcessFault(kind, "middle")
    assert cell.expected is (Outcome.LOADED if kind.startswith("prefill") else Outcome.FAILED_CLEANLY)


@pytest.mark.parametrize(
    ("fault", "workload", "message"),
    [
        ("{kind: prefill-killed}", "{victim: harbour}", r"did you mean prefill-killed-saving\?"),
        ("{kind: decode-killed-loading, times: 2}", "{victim: harbour}", r"times means nothing for kind decode-killed"),
        (
            "{kind: decode-killed-loading, blocks: all}",
            "{victim: harbour}",
            r"a process is struck at one block, not at 'all' @ cells.0.fault.blocks",
        ),
        (
            "{kind: prefill-paused-saving, blocks: [[0, 2]]}",
            "{victim: harbour}",
            r"a process is struck at one block, not at \(0, 2\)",
        ),
        (
            "{kind: prefill-paused-saving}",
            "{kind: group, victim: harbour, sharers: [library], bystanders: [library]}",
            r"only bystanders beside a process that is struck @ cells.0.workload",
        ),
        (
            "{kind: prefill-paused-saving}",
            "{kind: twin, victim: harbour}",
            r"only bystanders beside a process that is struck",
        ),
        (
            "{kind: prefill-paused-saving}",
            "{victim: harbour, gives_up: loading}",
            r"only bystanders beside a process that is struck",
        ),
        (
            "{kind: [decode-paused-loading, prefill-paused-saving]}",
            "{kind: group, victim: harbour, bystanders: [library]}",
            r"bystanders would be struck with their engine @ cells.0.workload.bystanders",
        ),
    ],
)
def test_mistakes(fault: str, workload: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        load_plan(matrix(tmp_path, f"engine: decode-fail, load: sync, fault: {fault}", workload), ENGINES)


def test_one_block_in_a_list_is_a_block(tmp_path: Path) -> None:
    entry = "engine: decode-fail, load: sync, fault: {kind: prefill-paused-saving, blocks: [[1], 2]}"
    assert len(load_plan(matrix(tmp_path, entry), ENGINES).cells) == 2


# Where an engine stops.


@pytest.mark.parametrize("kind", ProcessKind)
def test_an_engine_stops_at_one_block(kind: ProcessKind) -> None:
    hold = ProcessFault(kind, "last").hold(5)
    assert hold is not None
    assert hold.block == 4
    assert (hold.point is HoldPoint.LOAD) == (kind not in OF_PREFILL)
    assert ProcessFault(kind, (7,)).hold(5) is None


# What a request must equal.


@pytest.mark.parametrize(
    ("blocks", "key"),
    [
        ("first", OracleKey("victim", OracleKind.RECOMPUTE)),
        ("middle", OracleKey("victim", OracleKind.PARTIAL, BLOCK_COUNT // 2)),
        ("last", OracleKey("victim", OracleKind.PARTIAL, BLOCK_COUNT - 1)),
    ],
)
def test_after_an_interrupted_save_the_victim_has_what_was_published(blocks: str, key: OracleKey) -> None:
    of = process_cell(ProcessKind.PREFILL_KILLED_SAVING, blocks)
    assert acceptable(of, of.requests[0], PROMPTS, BLOCK_SIZE) == (key,)
    assert key in needed((of,), PROMPTS, BLOCK_SIZE)


def test_nothing_is_asked_of_a_load_that_was_interrupted() -> None:
    of = process_cell(ProcessKind.DECODE_KILLED_LOADING)
    assert acceptable(of, of.requests[0], PROMPTS, BLOCK_SIZE) == ()
    reuse, recompute = OracleKey("victim", OracleKind.REUSE), OracleKey("victim", OracleKind.RECOMPUTE)
    assert acceptable(of, request(Role.CANARY), PROMPTS, BLOCK_SIZE) == (reuse, recompute)


# The shipped matrix.


def test_process_has_every_kind_in_both_load_modes_and_policies() -> None:
    struck = [cell for cell in PROCESS.cells if cell.process]
    assert {cell.process.kind for cell in struck if cell.process} == set(ProcessKind)
    axes = Counter((cell.policy, cell.load) for cell in struck)
    assert set(axes) == {(policy, load) for policy in ("recompute", "fail") for load in (LoadMode.SYNC, LoadMode.ASYNC)}
    assert all(cell.why and cell.report for cell in struck)


def test_process_has_both_controls_for_every_engine_and_load() -> None:
    pairs = {(cell.engine, cell.load) for cell in PROCESS.cells}
    controls = {(cell.engine, cell.load, cell.fault.kind) for cell in PROCESS.cells if cell.control}
    assert controls == {(*pair, kind) for pair in pairs for kind in (FaultKind.NONE, FaultKind.SILENT)}


def test_prompts_that_are_saved_anew_belong_to_no_other_cell() -> None:
    """Their files are not there while that happens, and engines run side by side."""
    saved_anew = {c.requests[0].prompt_id for c in PROCESS.cells if c.process and c.process.is_of_prefill}
    others = {r.prompt_id for c in PROCESS.cells if not c.process or not c.process.is_of_prefill for r in c.requests}
    assert not saved_anew & others
    assert not any(spec.share_with for spec in PROCESS.prompts)


def test_engines_that_are_killed_come_last() -> None:
    kills = [cell.process is not None and cell.process.kills for cell in PROCESS.cells]
    assert kills == sorted(kills)
