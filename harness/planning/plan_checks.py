"""Mistakes in a plan that only show once its prompts are tokenised. Pure; `phases.py` asks before anything is run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from harness.errors import UsageError
from harness.judging.oracles import shared_block_count
from harness.records import Cell, Prompt, Role
from services.faults import BlockSelector


def check_blocks(cells: Iterable[Cell], prompts: Mapping[str, Prompt]) -> None:
    """Every block that a fault names is one of the victim's prompt that can be loaded.

    Raises UsageError that lists every cell of which this is not so.
    """
    problems = [f"  {problem} @ cell {cell.id}" for cell in cells for problem in _problems(cell, prompts)]
    if problems:
        raise UsageError("\n".join(["faults on blocks that no load has:", *problems]))


def check_prompts(cells: Iterable[Cell], prompts: Mapping[str, Prompt], block_size: int) -> None:
    """A prompt that is saved anew for a cell shares no block with one that another cell loads meanwhile: its files are
    not there for a while, and engines run side by side.

    Raises UsageError that lists every such pair of prompts.
    """
    anew = dict.fromkeys(prompt_id for cell in cells if _saves_anew(cell) for prompt_id in _victims(cell))
    kept = dict.fromkeys(
        request.prompt_id
        for cell in cells
        for request in cell.requests
        if request.role is not Role.VICTIM or not _saves_anew(cell)
    )
    shared = [
        f"  {one} shares blocks with {other}" if one != other else f"  {one}"
        for one in anew
        for other in kept
        if shared_block_count(prompts[one], prompts[other], block_size)
    ]
    if shared:
        first = "prompts whose files are removed and saved anew (faults of the producer), and that other cells load:"
        raise UsageError("\n".join([first, *shared, "give those cells a prompt of their own"]))


def _saves_anew(cell: Cell) -> bool:
    return cell.process is not None and cell.process.is_of_prefill


def _victims(cell: Cell) -> Iterator[str]:
    return (request.prompt_id for request in cell.requests if request.role is Role.VICTIM)


def _problems(cell: Cell, prompts: Mapping[str, Prompt]) -> Iterator[str]:
    for request in cell.requests:
        if request.role is Role.VICTIM:
            blocks = (cell.storage or cell.process or request.fault).blocks
            prompt = prompts[request.prompt_id]
            beyond = _beyond(blocks, prompt.full_block_count)
            if beyond:
                named, count = ", ".join(map(str, beyond)), prompt.full_block_count
                yield f"there is no block {named}: prompt {prompt.id} has {count}, counted from 0"


def _beyond(blocks: BlockSelector, block_count: int) -> tuple[int, ...]:
    return tuple(index for index in blocks if isinstance(index, int) and index >= block_count)
