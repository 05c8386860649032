"""Faults done to files on the KV volume, as plain values: their kinds, and what an honest connector makes of each.

The matrix file names them, `volume.py` carries them out, the judge holds them against the journal. Pure.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from services.faults import BlockSelector, select
from services.journal import EventName
from services.store import FailureReason


class StorageKind(StrEnum):
    """What is wrong with the files of a block, all of which were sound when they were saved."""

    PAYLOAD_MISSING = "payload-missing"
    """The payload is gone, its index entry is there: the block is found, and cannot be loaded."""
    INDEX_MISSING = "index-missing"
    """The payload is there, its index entry is gone: a block that nobody offers. Not a failure but a miss."""

    TRUNCATED_EMPTY = "truncated-empty"
    """The payload file has no bytes."""
    TRUNCATED_HEADER = "truncated-header"
    """It ends in the middle of its header."""
    TRUNCATED_MIDDLE = "truncated-middle"
    """It ends in the middle."""
    TRUNCATED_BYTE = "truncated-byte"
    """Its last byte is missing."""

    FLIPPED_HEADER = "flipped-header"
    """One bit of the header's first byte is wrong."""
    FLIPPED_KEY = "flipped-key"
    """One bit of the key in the header is wrong."""
    FLIPPED_FIRST = "flipped-first"
    """One bit of the payload's first value is wrong: the top one of its exponent, so that most values become huge."""
    FLIPPED_MIDDLE = "flipped-middle"
    """One bit of a value in the middle of the payload is wrong, the top one of its exponent: its token need not count,
    and so no token need change where nobody checks the payload."""
    FLIPPED_LAST = "flipped-last"
    """One bit of the payload's last value is wrong: the top one of its exponent, so that most values become huge."""
    ZEROED = "zeroed"
    """The header is right, the payload is zeros."""

    OTHER_PROMPT = "other-prompt"
    """A sound file, but that of another prompt's block (of another block of this prompt, where there is no other)."""
    OTHER_MODEL = "other-model"
    """A sound file with the right payload, but its key says that another model (its fingerprint) wrote it."""
    OLDER_FORMAT = "older-format"
    """A sound file, but of the format version before this one."""

    UNREADABLE = "unreadable"
    """The file has mode 000. Cannot be done to engines that keep root's right to read everything."""
    DIRECTORY = "directory"
    """A directory lies in the payload's place."""
    DANGLING_LINK = "dangling-link"
    """A symbolic link that leads nowhere lies there."""
    FIFO = "fifo"
    """A FIFO without a writer lies there: who just opens it waits for ever."""

    SLOW_READ = "slow-read"
    """Whoever opens the file waits for a while; the load is right, and in time. Not a failure."""
    LATE_READ = "late-read"
    """Whoever opens the file waits until the connector has given it up; then the read goes on."""
    ENDLESS_READ = "endless-read"
    """Whoever opens the file waits for as long as the fault lasts."""
    EMPTIED = "emptied"
    """Everything on the volume is gone between lookup and load, and stays so: the prompt's blocks were found once."""

    FULL_DISK = "full-disk"
    """The volume is empty and small, and full at the chosen block when the prompt is saved there. A miss."""
    READ_ONLY = "read-only"
    """The volume is empty, and the prompt cannot be saved there. A miss of all blocks."""


MISSES = frozenset({StorageKind.INDEX_MISSING, StorageKind.FULL_DISK, StorageKind.READ_ONLY})
"""Nothing fails; blocks are not found, from the first chosen one on."""

UNSAVED = frozenset({StorageKind.FULL_DISK, StorageKind.READ_ONLY})
"""The volume is exchanged for one that is at fault, and the victim's prompt is saved there, as far as that goes, before
the victim is sent."""

HELD = frozenset({StorageKind.SLOW_READ, StorageKind.LATE_READ, StorageKind.ENDLESS_READ})
"""Whoever opens the files has to wait."""

OF_WHOLE_VOLUME = frozenset({StorageKind.EMPTIED, StorageKind.READ_ONLY})
"""Kinds that strike every block; `blocks` says nothing to them."""

LONE = frozenset({StorageKind.LATE_READ, StorageKind.EMPTIED}) | UNSAVED
"""Kinds in which only the victim's part is exact: when other requests look or read is up to them."""

SLOW_READ_S = 1.0
"""How long a slow read waits; shorter than any sensible deadline of a store."""
LEASE_S_MIN = 20.0
"""The kernel must let a file be held this long."""


@dataclass(frozen=True)
class StorageFault:
    """Which blocks of the victim's prompt are damaged, and how; they stay so until the files are put back."""

    kind: StorageKind
    blocks: BlockSelector = "all"

    @property
    def is_miss(self) -> bool:
        """The block is not found; nothing fails, and fewer blocks are loaded."""
        return self.kind in MISSES

    @property
    def fails(self) -> bool:
        """Loads of the chosen blocks fail."""
        return self.kind in REASONS

    def chosen(self, block_count: int) -> tuple[int, ...]:
        """The blocks that are at fault, of a prompt that can load `block_count`."""
        if self.kind is StorageKind.READ_ONLY:
            return select("first", block_count)
        if self.kind is StorageKind.FULL_DISK:
            return select(self.blocks, block_count)[:1]
        return select("all" if self.kind in OF_WHOLE_VOLUME else self.blocks, block_count)


REASONS: Mapping[StorageKind, FailureReason] = {
    StorageKind.PAYLOAD_MISSING: FailureReason.MISSING,
    StorageKind.TRUNCATED_EMPTY: FailureReason.SHORT,
    StorageKind.TRUNCATED_HEADER: FailureReason.SHORT,
    StorageKind.TRUNCATED_MIDDLE: FailureReason.SHORT,
    StorageKind.TRUNCATED_BYTE: FailureReason.SHORT,
    StorageKind.FLIPPED_HEADER: FailureReason.HEADER,
    StorageKind.FLIPPED_KEY: FailureReason.HEADER,
    StorageKind.FLIPPED_FIRST: FailureReason.CHECKSUM,
    StorageKind.FLIPPED_MIDDLE: FailureReason.CHECKSUM,
    StorageKind.FLIPPED_LAST: FailureReason.CHECKSUM,
    StorageKind.ZEROED: FailureReason.CHECKSUM,
    StorageKind.OTHER_PROMPT: FailureReason.IDENTITY,
    StorageKind.OTHER_MODEL: FailureReason.IDENTITY,
    StorageKind.OLDER_FORMAT: FailureReason.HEADER,
    StorageKind.UNREADABLE: FailureReason.IO,
    StorageKind.DIRECTORY: FailureReason.IO,
    StorageKind.DANGLING_LINK: FailureReason.IO,
    StorageKind.FIFO: FailureReason.IO,
    StorageKind.LATE_READ: FailureReason.TIMEOUT,
    StorageKind.ENDLESS_READ: FailureReason.TIMEOUT,
    StorageKind.EMPTIED: FailureReason.MISSING,
}
"""Why a read of a damaged block fails; kinds that are a miss, or just slow, have none."""

SAVE_ERRORS: Mapping[StorageKind, tuple[int, ...]] = {
    StorageKind.FULL_DISK: (errno.ENOSPC,),
    StorageKind.READ_ONLY: (errno.EACCES, errno.EROFS, errno.EPERM),
}
"""Why a save fails there."""

TURNING_POINTS: Mapping[StorageKind, EventName] = {
    StorageKind.LATE_READ: EventName.READ_FAILED,
    StorageKind.EMPTIED: EventName.PLANNED,
}
"""The event of the victim's at which a fault that changes while it lasts does so."""
