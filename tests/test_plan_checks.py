"""What is found out about a plan once its prompts are tokenised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.errors import UsageError
from harness.faults.process_kinds import ProcessKind
from harness.faults.storage_kinds import StorageKind
from harness.planning.plan_checks import check_blocks, check_prompts
from harness.records import Cell, Role
from services.faults import Fault, FaultKind
from tests.builders import BLOCK_COUNT, BLOCK_SIZE, PROMPTS, cell
from tests.process_builders import process_cell
from tests.storage_builders import storage_cell

LAST, BEYOND = BLOCK_COUNT - 1, BLOCK_COUNT


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


def saving_anew(prompt_id: str) -> Cell:
    of = process_cell(ProcessKind.PREFILL_PAUSED_SAVING)
    return replace(of, requests=(replace(of.requests[0], prompt_id=prompt_id),))


def test_a_prompt_that_is_saved_anew_is_no_other_cells() -> None:
    check_prompts((saving_anew("bystander"), saving_anew("bystander"), cell()), PROMPTS, BLOCK_SIZE)
    for name, said in (("victim", "  victim"), ("sharer", "  sharer shares blocks with victim")):
        with pytest.raises(UsageError) as caught:
            check_prompts((saving_anew(name), cell()), PROMPTS, BLOCK_SIZE)
        assert str(caught.value).splitlines() == [
            "prompts whose files are removed and saved anew (faults of the producer), and that other cells load:",
            said,
            "give those cells a prompt of their own",
        ]


def test_nor_is_it_that_of_a_bystander() -> None:
    beside = process_cell(ProcessKind.PREFILL_PAUSED_SAVING, bystander=True)
    with pytest.raises(UsageError, match="bystander"):
        check_prompts((saving_anew("bystander"), beside), PROMPTS, BLOCK_SIZE)
    other = replace(process_cell(ProcessKind.DECODE_KILLED_LOADING), id="loads")
    with pytest.raises(UsageError, match="victim"):
        check_prompts((saving_anew("victim"), other), PROMPTS, BLOCK_SIZE)


def test_only_victims_are_asked() -> None:
    of = cell(FaultKind.REPORT, "first", mix=True)
    beside = replace(of.requests[2], fault=Fault(FaultKind.NONE, (BEYOND,)))
    assert beside.role is Role.BYSTANDER
    check_blocks((replace(of, requests=(*of.requests[:2], beside)),), PROMPTS)
