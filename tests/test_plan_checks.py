"""What is found out about a plan once its prompts are tokenised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness import phases
from harness.errors import UsageError
from harness.plan import load_plan, select_cells
from harness.plan_checks import check_blocks
from harness.process_kinds import ProcessKind
from harness.records import Cell, PlannedRequest, Role
from harness.storage import RunFolder
from harness.storage_kinds import StorageKind
from harness.watcher import Watcher
from services.faults import Fault, FaultKind
from tests.builders import BLOCK_COUNT, PROMPTS, cell
from tests.process_builders import process_cell
from tests.simulated_engine import simulated_stack
from tests.storage_builders import storage_cell
from tests.ways_to_be_wrong import Wrong

LAST, BEYOND = BLOCK_COUNT - 1, BLOCK_COUNT
EXAMPLE = Path(__file__).resolve().parents[1] / "harness" / "matrix" / "example.yaml"


@pytest.mark.parametrize("blocks", ["first", "middle", "last", "all", (0,), (LAST,), (0, LAST), ()])
def test_blocks_that_the_prompt_has(blocks: str | tuple[int, ...]) -> None:
    check_blocks((cell(FaultKind.REPORT, blocks, mix=True), storage_cell(StorageKind.ZEROED, blocks)), PROMPTS)


@pytest.mark.parametrize(
    "of",
    [
        cell(FaultKind.REPORT, (BEYOND,), name="named"),
        cell(FaultKind.SILENT, (0, BEYOND), mix=True, name="named"),
        replace(storage_cell(StorageKind.ZEROED, (BEYOND,)), id="named"),
        replace(process_cell(ProcessKind.PREFILL_KILLED_SAVING, (BEYOND,)), id="named"),
    ],
    ids=["alone", "among others", "in storage", "of a process"],
)
def test_blocks_beyond_the_prompt_are_refused(of: Cell) -> None:
    with pytest.raises(UsageError) as caught:
        check_blocks((cell(), of), PROMPTS)
    assert str(caught.value).splitlines() == [
        "faults on blocks that no load has:",
        "  there is no block 7: prompt victim has 7, counted from 0 @ cell named",
    ]


def test_every_cell_with_such_blocks_is_named() -> None:
    cells = [cell(FaultKind.REPORT, blocks, name=f"cell-{blocks[0]}") for blocks in ((7, 99), (8,))]
    with pytest.raises(UsageError) as caught:
        check_blocks(cells, PROMPTS)
    assert str(caught.value).splitlines()[1:] == [
        "  there is no block 7, 99: prompt victim has 7, counted from 0 @ cell cell-7",
        "  there is no block 8: prompt victim has 7, counted from 0 @ cell cell-8",
    ]


def test_only_victims_are_asked() -> None:
    of = cell(FaultKind.REPORT, "first", mix=True)
    beside = replace(of.requests[2], fault=Fault(FaultKind.NONE, (BEYOND,)))
    assert beside.role is Role.BYSTANDER
    check_blocks((replace(of, requests=(*of.requests[:2], beside)),), PROMPTS)


def test_a_run_with_such_blocks_ends_before_anything_is_sent(tmp_path: Path) -> None:
    plan = select_cells(load_plan(EXAMPLE), ("recompute-report-sync-first",))
    cells = tuple(
        replace(c, requests=(with_blocks(c, (99,)),)) if c.fault.kind is FaultKind.REPORT else c for c in plan.cells
    )
    with simulated_stack(tmp_path / "evidence", Wrong.NOTHING) as stack:
        folder = RunFolder.create(tmp_path / "runs", "run")
        with pytest.raises(UsageError, match=r"no block 99: .* @ cell recompute-report-sync-first"):
            phases.run(replace(plan, cells=cells), stack, folder, phases.Invocation("example", "pytest"), Watcher())
        journal = tmp_path / "evidence" / "prefill" / "journal.jsonl"
        assert "prefill." not in journal.read_text()


def with_blocks(of: Cell, blocks: tuple[int, ...]) -> PlannedRequest:
    return replace(of.requests[0], fault=replace(of.requests[0].fault, blocks=blocks))
