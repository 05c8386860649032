"""What each kind of fault puts into the place of one block's file: a small function per kind.

`volume.py` calls `damage`; how the sound file comes back is the business of `volume_files.py`.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from harness.faults.storage_kinds import StorageKind
from harness.faults.volume_files import write
from services.store import FORMAT_VERSION, HEADER_BYTES, KEY_OFFSET_BYTES, VERSION_OFFSET_BYTES, sealed

KEY_BYTES = 32
VALUE_BYTES = 4
EXPONENT_BIT = 0x40
"""Of the top byte of a little-endian float: the top bit of its exponent, in float32, bfloat16 and float16. A value
below 2 becomes huge, so that a flip which nobody notices is likely to show in the tokens, unlike one in a mantissa."""


def damage(kind: StorageKind, place: Path, sound: Path, donor: Path) -> None:
    """Put what `kind` says into `place`, which is free; `sound` is the file that lay there, `donor` another block's."""
    match kind:
        case StorageKind.PAYLOAD_MISSING | StorageKind.INDEX_MISSING:
            return
        case StorageKind.DIRECTORY:
            place.mkdir()
        case StorageKind.DANGLING_LINK:
            place.symlink_to(f"{place.name}.nowhere")
        case StorageKind.FIFO:
            os.mkfifo(place)
        case StorageKind.UNREADABLE:
            write(place, sound.read_bytes(), mode=0o000)
        case StorageKind.OTHER_PROMPT:
            write(place, donor.read_bytes())
        case _:
            write(place, CONTENTS[kind](sound.read_bytes()))


# What is put into the place of the sound bytes `data`.


def truncated_empty(data: bytes) -> bytes:
    return data[:0]


def truncated_header(data: bytes) -> bytes:
    return data[: HEADER_BYTES // 2]


def truncated_middle(data: bytes) -> bytes:
    return data[: len(data) // 2]


def truncated_byte(data: bytes) -> bytes:
    return data[:-1]


def flipped_header(data: bytes) -> bytes:
    return _flipped(data, 0, 1)


def flipped_key(data: bytes) -> bytes:
    return _flipped(data, KEY_OFFSET_BYTES, 1)


def flipped_first(data: bytes) -> bytes:
    return _flipped(data, HEADER_BYTES + VALUE_BYTES - 1, EXPONENT_BIT)


def flipped_middle(data: bytes) -> bytes:
    values_before = (len(data) - HEADER_BYTES) // VALUE_BYTES // 2
    return _flipped(data, HEADER_BYTES + (values_before + 1) * VALUE_BYTES - 1, EXPONENT_BIT)


def flipped_last(data: bytes) -> bytes:
    return _flipped(data, len(data) - 1, EXPONENT_BIT)


def zeroed(data: bytes) -> bytes:
    return data[:HEADER_BYTES] + bytes(len(data) - HEADER_BYTES)


def other_model(data: bytes) -> bytes:
    key = data[KEY_OFFSET_BYTES : KEY_OFFSET_BYTES + KEY_BYTES]
    return _with_header(data, KEY_OFFSET_BYTES, hashlib.sha256(key).digest())


def older_format(data: bytes) -> bytes:
    return _with_header(data, VERSION_OFFSET_BYTES, struct.pack("<I", FORMAT_VERSION - 1))


CONTENTS: Mapping[StorageKind, Callable[[bytes], bytes]] = {
    StorageKind.TRUNCATED_EMPTY: truncated_empty,
    StorageKind.TRUNCATED_HEADER: truncated_header,
    StorageKind.TRUNCATED_MIDDLE: truncated_middle,
    StorageKind.TRUNCATED_BYTE: truncated_byte,
    StorageKind.FLIPPED_HEADER: flipped_header,
    StorageKind.FLIPPED_KEY: flipped_key,
    StorageKind.FLIPPED_FIRST: flipped_first,
    StorageKind.FLIPPED_MIDDLE: flipped_middle,
    StorageKind.FLIPPED_LAST: flipped_last,
    StorageKind.ZEROED: zeroed,
    StorageKind.OTHER_MODEL: other_model,
    StorageKind.OLDER_FORMAT: older_format,
}


def _flipped(data: bytes, offset_bytes: int, bit: int) -> bytes:
    return data[:offset_bytes] + bytes([data[offset_bytes] ^ bit]) + data[offset_bytes + 1 :]


def _with_header(data: bytes, offset_bytes: int, field: bytes) -> bytes:
    """`data` with another `field` in its header, and the header's own checksum right again."""
    header = data[:offset_bytes] + field + data[offset_bytes + len(field) : HEADER_BYTES]
    return sealed(header) + data[HEADER_BYTES:]
