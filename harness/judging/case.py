"""One cell with everything that it is judged by, and words that all checks have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.records import Cell, Observation, OracleKey, OracleRun, Prompt, RequestRecord, Role
from services.faults import FaultKind
from services.journal import EventName

FAIL_POLICY = "fail"

AFTERWARDS = (Role.CANARY, Role.RELOAD)
"""Requests that the runner adds to a plan."""

Blocks = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One cell with everything that it is judged by."""

    cell: Cell
    observation: Observation
    prompts: Mapping[str, Prompt]
    oracles: Mapping[OracleKey, Sequence[OracleRun]]
    block_size: int
    noise_band: float

    def records(self, *roles: Role) -> tuple[RequestRecord, ...]:
        return tuple(record for record in self.observation.requests if record.planned.role in roles)

    def blocks(self, record: RequestRecord, name: EventName) -> tuple[Blocks, ...]:
        """The blocks of each event of that name that the journal has for the request."""
        return tuple(e.blocks for e in self.observation.events if e.name is name and e.request == record.tag)

    def first(self, record: RequestRecord, name: EventName) -> Blocks:
        """The blocks of the first event of that name; empty without one."""
        return next(iter(self.blocks(record, name)), ())

    def prompt(self, record: RequestRecord) -> Prompt:
        return self.prompts[record.planned.prompt_id]

    def is_silent(self, record: RequestRecord) -> bool:
        return record.planned.fault.kind is FaultKind.SILENT


def counted(lists: Iterable[Blocks]) -> Counter[int]:
    return Counter(block for blocks in lists for block in blocks)


def named(blocks: Blocks) -> str:
    return " ".join(map(str, blocks)) or "none"


def listed(lists: Sequence[Blocks]) -> str:
    return "; ".join(map(named, lists)) or "none"
