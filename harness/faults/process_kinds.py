"""Faults done to processes, as plain values: which engine is struck, where in its work, and how.

The matrix file names them, `process_faults.py` carries them out, the judge holds them against the journals. Pure.
An engine is struck where it stops for that (services.faults.Hold), never after some time.

What is asked of everybody: a block is published when it is whole, and not before. A prompt whose save was interrupted
is therefore a shorter prefix and no failure, also under policy `fail`; whoever asks meanwhile need not wait for the
producer. A load that was interrupted costs its own request and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from services.faults import BlockSelector, Hold, HoldPoint, select


class ProcessKind(StrEnum):
    """What happens to which process, in the middle of moving one block of the victim's prompt."""

    PREFILL_KILLED_SAVING = "prefill-killed-saving"
    """The producer is killed when half of the block's payload is written; the decode asks while it is gone."""
    PREFILL_KILLED_PUBLISHING = "prefill-killed-publishing"
    """The producer is killed when the payload is in its place and the index entry is not."""
    PREFILL_PAUSED_SAVING = "prefill-paused-saving"
    """The producer is stopped when half of the payload is written, and goes on when the decode has its answer."""
    DECODE_KILLED_LOADING = "decode-killed-loading"
    """The decode is killed when the blocks before this one are loaded, and started again."""
    DECODE_PAUSED_LOADING = "decode-paused-loading"
    """The decode is stopped there, and goes on when the client has given up."""


OF_PREFILL = frozenset(
    {ProcessKind.PREFILL_KILLED_SAVING, ProcessKind.PREFILL_KILLED_PUBLISHING, ProcessKind.PREFILL_PAUSED_SAVING}
)
"""Kinds in which the victim's prompt is saved anew and the save is disturbed; in the others it is a load."""

KILLED = frozenset(
    {ProcessKind.PREFILL_KILLED_SAVING, ProcessKind.PREFILL_KILLED_PUBLISHING, ProcessKind.DECODE_KILLED_LOADING}
)
"""Kinds in which the engine does not live on; in the others it is paused."""

POINTS = {
    ProcessKind.PREFILL_KILLED_SAVING: HoldPoint.PAYLOAD,
    ProcessKind.PREFILL_KILLED_PUBLISHING: HoldPoint.INDEX,
    ProcessKind.PREFILL_PAUSED_SAVING: HoldPoint.PAYLOAD,
    ProcessKind.DECODE_KILLED_LOADING: HoldPoint.LOAD,
    ProcessKind.DECODE_PAUSED_LOADING: HoldPoint.LOAD,
}

KILLED_HOLD_S = 30.0
"""How long an engine that is to be killed waits for it; it never waits so long."""
PAUSED_HOLD_S = 5.0
"""How long an engine that is to be paused waits for it, its pause included."""


@dataclass(frozen=True)
class ProcessFault:
    """Which process is struck, and at which block of the victim's prompt; `blocks` selects one."""

    kind: ProcessKind
    blocks: BlockSelector = "middle"

    @property
    def is_of_prefill(self) -> bool:
        return self.kind in OF_PREFILL

    @property
    def kills(self) -> bool:
        return self.kind in KILLED

    @property
    def point(self) -> HoldPoint:
        return POINTS[self.kind]

    def chosen(self, block_count: int) -> tuple[int, ...]:
        """The block of a prompt that can load `block_count`; none where the prompt is too short for it."""
        return select(self.blocks, block_count)[:1]

    def hold(self, block_count: int) -> Hold | None:
        """The stop at which the process is struck; None where the prompt is too short for it."""
        wait_s = KILLED_HOLD_S if self.kills else PAUSED_HOLD_S
        return next((Hold(block, self.point, wait_s) for block in self.chosen(block_count)), None)


def save_tag(cell_id: str) -> str:
    """The tag of the request whose save is disturbed."""
    return f"{cell_id}.save"
