"""Mistakes in a plan that only show once its prompts are tokenised. Pure; `phases.py` asks before anything is run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from harness.errors import UsageError
from harness.records import Cell, Prompt, Role
from services.faults import BlockSelector


def check_blocks(cells: Iterable[Cell], prompts: Mapping[str, Prompt]) -> None:
    """Every block that a fault names is one of the victim's prompt that can be loaded.

    Raises UsageError that lists every cell of which this is not so.
    """
    problems = [f"  {problem} @ cell {cell.id}" for cell in cells for problem in _problems(cell, prompts)]
    if problems:
        raise UsageError("\n".join(["faults on blocks that no load has:", *problems]))


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
