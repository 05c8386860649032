"""Faults done to files on the KV volume, as plain values: their kinds, and what an honest connector makes of each.

The matrix file names them, `storage_faults.py` carries them out, the judge holds them against the journal. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from services.faults import BlockSelector
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
    """One bit of the payload's first value is wrong: the top one of its exponent."""
    FLIPPED_MIDDLE = "flipped-middle"
    """The same of a value in the middle."""
    FLIPPED_LAST = "flipped-last"
    """The same of the last value."""
    ZEROED = "zeroed"
    """The header is right, the payload is zeros."""

    OTHER_PROMPT = "other-prompt"
    """A sound file, but that of another prompt's block (of another block of this prompt, where there is no other)."""
    OTHER_MODEL = "other-model"
    """A sound file with the right payload, but its key says that another model (its fingerprint) wrote it."""
    OLDER_FORMAT = "older-format"
    """A sound file, but of the format version before this one."""

    UNREADABLE = "unreadable"
    """The file has mode 000. Cannot be done to engines that run as root, which may read everything."""
    DIRECTORY = "directory"
    """A directory lies in the payload's place."""
    DANGLING_LINK = "dangling-link"
    """A symbolic link that leads nowhere lies there."""
    FIFO = "fifo"
    """A FIFO without a writer lies there: who just opens it waits for ever."""


@dataclass(frozen=True)
class StorageFault:
    """Which blocks of the victim's prompt are damaged, and how; they stay so until the files are put back."""

    kind: StorageKind
    blocks: BlockSelector = "all"

    @property
    def is_miss(self) -> bool:
        """The block is not found; nothing fails, and fewer blocks are loaded."""
        return self.kind is StorageKind.INDEX_MISSING


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
}
"""Why a read of a damaged block fails; kinds that are a miss have none."""
