"""One load as the fault injector's two sides see it: the scheduler side plans it, the worker side breaks it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.faults import Breakage, FaultKind, LoadMode


class InjectedError(RuntimeError):
    """The load hook raised because a request asked for it."""


@dataclass(frozen=True)
class Load:
    """One load that vLLM gave blocks to: `block_ids[i]` is logical block `first_block + i` of the prompt."""

    request_id: str
    tag: str
    mode: LoadMode
    first_block: int
    block_ids: tuple[int, ...]
    kind: FaultKind
    breakage: Breakage

    def logical(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        """The logical blocks that these physical ids are in this load, in order."""
        wanted = set(block_ids)
        return tuple(self.first_block + i for i, block_id in enumerate(self.block_ids) if block_id in wanted)

    @property
    def bad_block_ids(self) -> frozenset[int]:
        """The ids of its own blocks that the fault reports."""
        return frozenset(self.block_ids[index] for index in self.breakage.reported)
