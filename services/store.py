"""Blocks of KV on the shared volume: their keys, their files, and reads that say why they failed.

Called by the shared volume connector (publish, contains, read) and by the harness, which damages the files.
Under `root`, one block of one shard is two files:

    blocks/<2 hex>/<key>.<rank>-of-<count>   header, then the payload
    index/<2 hex>/<key>.<rank>-of-<count>    empty; exists once the payload is complete and durable

Lookups read only the index. A payload that is damaged or gone after it was published is therefore a load that
fails, with a reason, and never a quiet miss. The store holds no state: threads, processes and hosts may share one
`root`.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import xxhash

FORMAT_VERSION = 1
"""Part of every header and of every fingerprint: blocks of another format are misses."""

CHUNK_BYTES = 1 << 20
"""Bytes per read; small enough that a chunk is still in the CPU's cache when its checksum is taken."""

_MAGIC = b"KVPROOF\n"
_KEY = re.compile(r"[0-9a-f]{64}")

# magic, format version, key, shard rank, shard count, layout digest, payload length, payload xxh3_128
_FIELDS = struct.Struct("<8sI32sII16sQ16s")
_HEADER_CHECKSUM_BYTES = 8
HEADER_BYTES = _FIELDS.size + _HEADER_CHECKSUM_BYTES
VERSION_OFFSET_BYTES = len(_MAGIC)
KEY_OFFSET_BYTES = VERSION_OFFSET_BYTES + struct.calcsize("<I")
"""Where format version (4 bytes, little-endian) and key (32 bytes) lie in a file."""

TEMPORARY_SUFFIX = ".tmp"
"""Of a file that is being written, or whose writer died; nobody reads it."""

# A FIFO would block a plain open, and a link could lead out of the volume.
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class FailureReason(StrEnum):
    """Why a block could not be read."""

    MISSING = "missing"
    """There is no payload file."""
    SHORT = "short"
    """The file ends before the header or the payload does."""
    CHECKSUM = "checksum"
    """The payload is not what was written."""
    HEADER = "header"
    """The header is damaged or of another format, or does not describe the file (bytes follow the payload)."""
    IDENTITY = "identity"
    """A sound block, but of another key, shard or layout."""
    IO = "io"
    """The operating system refused, or the path is not a regular file."""
    TIMEOUT = "timeout"
    """The deadline passed before the last chunk was asked for."""


@dataclass(frozen=True)
class ReadFailure:
    """A block that could not be read. `detail` is for people: path and what was found."""

    reason: FailureReason
    detail: str


@dataclass(frozen=True)
class Shard:
    """The tensor-parallel rank whose share of a block a payload holds. Raises ValueError unless
    0 <= rank < count."""

    rank: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            raise ValueError(f"shard rank {self.rank} is not in 0..{self.count - 1}")


class BlockStore:
    """The blocks under `root`. Methods raise ValueError for a key that is not 64 lowercase hex characters.

    `verify_checksum=False` skips the payload checksum in `read` and nothing else; it exists so that a testbed
    can show that it notices a connector which does not check.
    """

    def __init__(self, root: Path, *, verify_checksum: bool = True) -> None:
        """Creates `root/blocks` and `root/index`. Raises OSError when it cannot."""
        self._blocks = root / "blocks"
        self._index = root / "index"
        self._verify_checksum = verify_checksum
        self._blocks.mkdir(parents=True, exist_ok=True)
        self._index.mkdir(parents=True, exist_ok=True)

    def payload_path(self, key: str, shard: Shard) -> Path:
        return self._blocks / _file_name(key, shard)

    def index_path(self, key: str, shard: Shard) -> Path:
        return self._index / _file_name(key, shard)

    def contains(self, key: str, shard_count: int = 1) -> bool:
        """Whether every shard of the block is published. Looks at the index only; an index that cannot be
        reached holds nothing."""
        shards = (Shard(rank, shard_count) for rank in range(shard_count))
        return all(os.path.isfile(self.index_path(key, shard)) for shard in shards)

    def publish(
        self,
        key: str,
        shard: Shard,
        layout: str,
        payload: Iterable[bytes | memoryview],
        before_index: Callable[[], None] = lambda: None,
    ) -> bool:
        """Write one shard of a block, then its index entry; False, with nothing written, where both exist.

        `layout` describes the byte layout of the payload; `payload` yields C-contiguous pieces, in order,
        and is gone through once; `before_index` is called when nothing but the index entry is missing. Of several
        writers at once the last one's block stays, whole. The payload is durable before its index entry exists,
        so a writer that dies, or a power cut, costs at most a miss.
        Raises OSError (such as a full disk); then there is no temporary file and, where there was none before,
        no index entry.
        """
        path, index_path = self.payload_path(key, shard), self.index_path(key, shard)
        if os.path.isfile(index_path) and os.path.isfile(path):
            return False
        _make_directory(path.parent)
        _make_directory(index_path.parent)
        with _replacement(path) as fd:
            _write_block(fd, key, shard, layout, payload)
        before_index()
        # The entry is empty, so creating it is atomic.
        os.close(os.open(index_path, _CREATE_FLAGS, 0o644))
        return True

    def read(self, key: str, shard: Shard, layout: str, deadline_s: float) -> bytearray | ReadFailure:
        """The payload of one shard, or why there is none. Reads the payload file only, never the index.

        `deadline_s`: the `time.monotonic()` instant after which no further chunk is asked for, so that reads
        that wait for a thread can share one. A call that the file system itself does not answer cannot be
        interrupted from here; the caller has to wait in another thread.
        """
        path = self.payload_path(key, shard)
        try:
            with _opened(path) as fd:
                return self._read_payload(fd, key, shard, layout, deadline_s)
        except _RefusedError as refusal:
            return ReadFailure(refusal.reason, f"{path}: {refusal}")
        except FileNotFoundError:
            return ReadFailure(FailureReason.MISSING, f"{path}: no such file")
        except OSError as error:
            return ReadFailure(FailureReason.IO, f"{path}: {error.strerror or error}")

    def _read_payload(self, fd: int, key: str, shard: Shard, layout: str, deadline_s: float) -> bytearray:
        file_bytes = os.fstat(fd).st_size
        header = bytearray(min(HEADER_BYTES, file_bytes))
        for _ in _chunks(fd, header, deadline_s):
            pass
        payload_bytes, checksum = _check_header(header, key, shard, layout)
        _check_size(file_bytes, payload_bytes)
        payload = bytearray(payload_bytes)
        digest = xxhash.xxh3_128()
        for chunk in _chunks(fd, payload, deadline_s):
            if self._verify_checksum:
                digest.update(chunk)
        if self._verify_checksum and digest.digest() != checksum:
            raise _RefusedError(FailureReason.CHECKSUM, "the payload does not have the checksum in its header")
        return payload


def root_key(fingerprint: str, cache_salt: str, lora: str, multimodal: tuple[str, ...]) -> str:
    """The key that a prompt's first block has as its parent: everything that KV depends on besides the tokens.
    `lora` is empty without an adapter; `multimodal` identifies the inputs, in the order of the prompt."""
    return _sha256(b"root", *map(_text, (fingerprint, cache_salt, lora, *multimodal)))


def block_keys(root: str, token_ids: Sequence[int], block_size: int) -> tuple[str, ...]:
    """One key per whole block of `block_size` tokens; each covers its block and everything before it.
    Raises ValueError for a block size below 1 or a malformed `root`."""
    if block_size < 1:
        raise ValueError(f"block size {block_size} is not at least 1")
    keys = []
    parent = _key_bytes(root)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = struct.pack(f"<{block_size}q", *token_ids[start : start + block_size])
        keys.append(_sha256(b"block", parent, block))
        parent = bytes.fromhex(keys[-1])
    return tuple(keys)


def fingerprint(parts: Mapping[str, str]) -> str:
    """One sha256 hex digest for named facts about model and engine, and for this module's format version."""
    items = (text for name in sorted(parts) for text in (name, parts[name]))
    return _sha256(b"fingerprint", str(FORMAT_VERSION).encode(), *map(_text, items))


def hash_files(paths: Iterable[Path]) -> str:
    """One xxh3_128 hex digest for the names (without directories) and contents of files, in any order.
    Raises OSError for a file that cannot be read."""
    total = xxhash.xxh3_128()
    for path in sorted(paths, key=lambda path: (path.name, path)):
        total.update(_frame(os.fsencode(path.name)))
        with path.open("rb", buffering=0) as file:
            total.update(hashlib.file_digest(file, xxhash.xxh3_128).digest())
    return total.hexdigest()


def sealed(header: bytes) -> bytes:
    """A whole header whose checksum fits the fields at its start; what follows the fields is left out."""
    fields = header[: _FIELDS.size]
    return fields + xxhash.xxh3_64_digest(fields)


class _RefusedError(Exception):
    """A block file was opened but must not be used."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def _file_name(key: str, shard: Shard) -> str:
    _key_bytes(key)
    return f"{key[:2]}/{key}.{shard.rank}-of-{shard.count}"


def _key_bytes(key: str) -> bytes:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not a key: 64 lowercase hex characters")
    return bytes.fromhex(key)


def _text(text: str) -> bytes:
    # Salts come from requests, and JSON can carry lone surrogates.
    return text.encode("utf-8", "surrogatepass")


def _frame(part: bytes) -> bytes:
    """`part` behind its length, so that no two sequences of parts join to the same bytes."""
    return struct.pack("<Q", len(part)) + part


def _sha256(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(map(_frame, parts))).hexdigest()


def _pack_header(key: str, shard: Shard, layout: str, payload_bytes: int, checksum: bytes) -> bytes:
    fields = _FIELDS.pack(
        _MAGIC,
        FORMAT_VERSION,
        _key_bytes(key),
        shard.rank,
        shard.count,
        xxhash.xxh3_128_digest(_text(layout)),
        payload_bytes,
        checksum,
    )
    return sealed(fields)


def _check_header(header: bytearray, key: str, shard: Shard, layout: str) -> tuple[int, bytes]:
    """The payload's length and checksum. Raises _RefusedError for a header that is not that of this block."""
    if len(header) < HEADER_BYTES:
        raise _RefusedError(FailureReason.SHORT, f"{len(header)} bytes where the header has {HEADER_BYTES}")
    fields, header_checksum = header[: _FIELDS.size], header[_FIELDS.size :]
    if xxhash.xxh3_64_digest(fields) != header_checksum:
        raise _RefusedError(FailureReason.HEADER, "the header does not have its own checksum")
    magic, version, *identity, payload_bytes, checksum = _FIELDS.unpack(fields)
    if (magic, version) != (_MAGIC, FORMAT_VERSION):
        raise _RefusedError(FailureReason.HEADER, f"format {magic!r} {version}, not {_MAGIC!r} {FORMAT_VERSION}")
    wanted = (_key_bytes(key), shard.rank, shard.count, xxhash.xxh3_128_digest(_text(layout)))
    names = ("key", "shard rank", "shard count", "layout")
    other = [name for name, found, want in zip(names, identity, wanted, strict=True) if found != want]
    if other:
        raise _RefusedError(FailureReason.IDENTITY, f"a block with another {', '.join(other)}")
    return payload_bytes, checksum


def _check_size(file_bytes: int, payload_bytes: int) -> None:
    expected_bytes = HEADER_BYTES + payload_bytes
    if file_bytes < expected_bytes:
        raise _RefusedError(FailureReason.SHORT, f"{file_bytes} bytes of {expected_bytes}")
    if file_bytes > expected_bytes:
        raise _RefusedError(FailureReason.HEADER, f"{file_bytes} bytes where the header says {expected_bytes}")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of a regular file, without following a link or waiting for the writer of a FIFO."""
    try:
        fd = os.open(path, _READ_FLAGS)
    except BlockingIOError:
        # Another server of the volume has a lease on this file and has just been asked to give it up. Only regular
        # files have leases.
        fd = os.open(path, _READ_FLAGS & ~os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _RefusedError(FailureReason.IO, "not a regular file")
        yield fd
    finally:
        os.close(fd)


def _chunks(fd: int, buffer: bytearray, deadline_s: float) -> Iterator[memoryview]:
    """Fill `buffer` from `fd`, yielding each part as it arrives."""
    rest = memoryview(buffer)
    while rest:
        if time.monotonic() >= deadline_s:
            raise _RefusedError(FailureReason.TIMEOUT, f"the deadline passed with {len(rest)} bytes to go")
        count = os.readv(fd, [rest[:CHUNK_BYTES]])
        if count == 0:
            raise _RefusedError(FailureReason.SHORT, f"the file ended {len(rest)} bytes early")
        yield rest[:count]
        rest = rest[count:]


@contextmanager
def _replacement(path: Path) -> Iterator[int]:
    """A descriptor of a new file that is made durable and takes the place of `path` when the body succeeds."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    fd = os.open(temporary, _CREATE_FLAGS | os.O_EXCL, 0o644)
    try:
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _write_block(fd: int, key: str, shard: Shard, layout: str, payload: Iterable[bytes | memoryview]) -> None:
    """The header goes last, into the gap left for it: it holds what is known only after the payload."""
    digest = xxhash.xxh3_128()
    offset = HEADER_BYTES
    for piece in payload:
        digest.update(piece)
        _write_all(fd, piece, offset)
        offset += memoryview(piece).nbytes
    _write_all(fd, _pack_header(key, shard, layout, offset - HEADER_BYTES, digest.digest()), 0)


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    rest = memoryview(data)
    while rest.nbytes:
        rest = rest.cast("B")
        count = os.pwrite(fd, rest, offset)
        rest, offset = rest[count:], offset + count


def _make_directory(directory: Path) -> None:
    """Create `directory` durably unless it exists."""
    if not directory.is_dir():
        directory.mkdir(exist_ok=True)
        _sync_directory(directory.parent)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
