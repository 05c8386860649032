"""Damages files on the KV volume, and puts them back: one small function per kind of storage fault.

The runner calls `Volume`. What lies in a file's place is always replaced by a rename within its directory: the file
may belong to another user, whose directories the harness's group may write to. The sound file itself is moved
aside and back, so it keeps its owner, mode and bytes; a run that was killed in between leaves it beside its place,
and the next `Volume` puts it back.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import xxhash

from harness.errors import HarnessError, LeverMissing
from harness.records import Damage, VolumeFile
from harness.storage_kinds import StorageFault, StorageKind
from services.faults import select
from services.journal import Event, EventName
from services.store import (
    FORMAT_VERSION,
    HEADER_BYTES,
    KEY_OFFSET_BYTES,
    VERSION_OFFSET_BYTES,
    BlockStore,
    Shard,
    sealed,
)

ASIDE_SUFFIX = ".kvproof-aside"
SHARD = Shard()
"""Engines with tensor parallelism have more; none of the product's has."""

KEY_BYTES = 32
VALUE_BYTES = 4
EXPONENT_BIT = 0x40
"""Of the top byte of a little-endian float: the top bit of its exponent, in float32, bfloat16 and float16. A value
below 2 becomes huge, so that a flip which nobody notices is likely to show in the tokens, unlike one in a mantissa."""


class Volume:
    """The blocks of the prompts on a KV folder. `keys`: by prompt, the store's key of each of its blocks, in order."""

    def __init__(self, kv_dir: Path, keys: Mapping[str, Sequence[str]]) -> None:
        """Puts back what a run that was killed left aside. Raises HarnessError when the folder cannot be used."""
        self._root, self._keys = kv_dir, keys
        with told(kv_dir):
            self._store = BlockStore(kv_dir)
            for aside in kv_dir.rglob(f"*{ASIDE_SUFFIX}"):
                _put_back(aside, aside.with_name(aside.name.removesuffix(ASIDE_SUFFIX)))

    def listing(self) -> tuple[VolumeFile, ...]:
        """Everything on the volume except directories that only hold files, by name."""
        with told(self._root):
            paths = (Path(at, name) for at, folders, names in os.walk(self._root) for name in (*folders, *names))
            found = ((str(path.relative_to(self._root)), path.lstat()) for path in paths)
            return tuple(sorted((VolumeFile(*_entry(name, status)) for name, status in found), key=lambda f: f.name))

    @contextmanager
    def damaged(self, fault: StorageFault, prompt_id: str, block_count: int) -> Iterator[tuple[Damage, ...]]:
        """Damage blocks of a prompt that can load `block_count` of them; the files are put back when the body ends.

        Yields what was done. Raises LeverMissing when this volume does not allow it, HarnessError when the system
        refuses.
        """
        keys = self._keys.get(prompt_id, ())
        if len(keys) < block_count:
            raise LeverMissing(
                f"the producer's journal does not say where the {block_count} blocks of prompt {prompt_id} lie; "
                "faults in storage need kvproof's own connector"
            )
        chosen = {block: keys[block] for block in select(fault.blocks, block_count)}
        places = {block: self._place(fault.kind, key) for block, key in chosen.items()}
        self._check(fault.kind, places.values())
        before = {block: self._describe(place) for block, place in places.items()}
        with ExitStack() as replaced:
            for block, place in places.items():
                replaced.enter_context(_replaced(fault.kind, place, self._donor(chosen[block], keys)))
            yield tuple(
                Damage(block, str(place.relative_to(self._root)), before[block], self._describe(place))
                for block, place in places.items()
            )

    def seen_again(self, damages: Iterable[Damage]) -> tuple[Damage, ...]:
        """The damages with how their files are now."""
        return tuple(replace(damage, after=self._describe(self._root / damage.file)) for damage in damages)

    def _place(self, kind: StorageKind, key: str) -> Path:
        path_of = self._store.index_path if kind is StorageKind.INDEX_MISSING else self._store.payload_path
        return path_of(key, SHARD)

    def _describe(self, place: Path) -> str:
        with told(place):
            return describe(place)

    def _check(self, kind: StorageKind, places: Iterable[Path]) -> None:
        for place in places:
            if not place.is_file():
                raise LeverMissing(f"{place}: no such file; is {self._root} the folder that the engines write KV to?")
            if kind is StorageKind.UNREADABLE and place.stat().st_uid == 0:
                raise LeverMissing(f"{place} was written by root: its engines may read files of any mode")

    def _donor(self, key: str, own: Sequence[str]) -> Path:
        """A block of another prompt; where there is none, another block of the same prompt."""
        others = [other for keys in self._keys.values() for other in keys if other not in own]
        return self._store.payload_path(next(other for other in (*others, *own) if other != key), SHARD)


def saved_keys(events: Iterable[Event], tag: str) -> tuple[str, ...]:
    """The keys that a producer's journal has for the leading blocks of the request `tag`."""
    saved = (event for event in events if event.name is EventName.SAVED and event.request == tag)
    keys = {block: key for event in saved for block, key in zip(event.blocks, event.keys, strict=False)}
    return tuple(keys[block] for block in itertools.takewhile(keys.__contains__, itertools.count()))


def describe(path: Path) -> str:
    """What lies at a path, in words that change when it does."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return "nothing"
    if not stat.S_ISREG(status.st_mode):
        return _kind_word(status.st_mode)
    mode = f"mode {stat.S_IMODE(status.st_mode):03o}"
    try:
        with path.open("rb") as file:
            return f"{status.st_size} bytes, {mode}, xxh3 {hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()}"
    except PermissionError:
        return f"{status.st_size} bytes, {mode}"


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


def _damage(kind: StorageKind, place: Path, sound: Path, donor: Path) -> None:
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
            _write(place, sound.read_bytes(), mode=0o000)
        case StorageKind.OTHER_PROMPT:
            _write(place, donor.read_bytes())
        case _:
            _write(place, CONTENTS[kind](sound.read_bytes()))


# Files.


@contextmanager
def told(root: Path) -> Iterator[None]:
    """What the system refuses is said to the user, with the path."""
    try:
        yield
    except OSError as error:
        where = error.filename or root
        raise HarnessError(
            f"{where}: cannot damage or restore KV files there ({error.strerror}); "
            f"let this user's group write to the directories of {root}"
        ) from error


@contextmanager
def _replaced(kind: StorageKind, place: Path, donor: Path) -> Iterator[None]:
    """Damage in the place of a file; the file is put back whatever happens."""
    aside = _aside(place)
    with told(place):
        os.rename(place, aside)
    try:
        with told(place):
            _damage(kind, place, aside, _aside(donor) if _aside(donor).exists() else donor)
        yield
    finally:
        with told(place):
            _put_back(aside, place)


def _aside(place: Path) -> Path:
    return place.with_name(place.name + ASIDE_SUFFIX)


def _put_back(aside: Path, place: Path) -> None:
    if stat.S_ISDIR(_mode(place)):
        place.rmdir()
    os.replace(aside, place)


def _write(place: Path, data: bytes, mode: int = 0o644) -> None:
    handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, place)
    except BaseException:
        os.unlink(temporary)
        raise


def _flipped(data: bytes, offset_bytes: int, bit: int) -> bytes:
    return data[:offset_bytes] + bytes([data[offset_bytes] ^ bit]) + data[offset_bytes + 1 :]


def _with_header(data: bytes, offset_bytes: int, field: bytes) -> bytes:
    """`data` with another `field` in its header, and the header's own checksum right again."""
    header = data[:offset_bytes] + field + data[offset_bytes + len(field) : HEADER_BYTES]
    return sealed(header) + data[HEADER_BYTES:]


def _mode(path: Path) -> int:
    """Of what lies at the path; 0 where nothing does."""
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_mode
    return 0


def _kind_word(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISLNK, "a link"), (stat.S_ISFIFO, "a FIFO"))
    return next((word for is_kind, word in kinds if is_kind(mode)), "something that is no file")


def _entry(name: str, status: os.stat_result) -> tuple[str, int]:
    """Name and size; what is no regular file has its kind in its name and no size."""
    regular = stat.S_ISREG(status.st_mode)
    return (name, status.st_size) if regular else (f"{name} ({_kind_word(status.st_mode)})", 0)
