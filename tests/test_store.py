"""The block store: what is read is what was written, and everything else is refused with a reason."""

from __future__ import annotations

import array
import hashlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import services.store
from services.store import (
    HEADER_BYTES,
    BlockStore,
    FailureReason,
    ReadFailure,
    Shard,
    block_keys,
    fingerprint,
    hash_files,
    root_key,
)

REPOSITORY = Path(services.store.__file__).parents[1]
LAYOUT = "2 layers, [3, 4], float16"
PAYLOAD = bytes(range(48))
ONE = Shard()
SECONDS = 30.0

_serial = itertools.count()


def new_key() -> str:
    return hashlib.sha256(str(next(_serial)).encode()).hexdigest()


KEY = new_key()


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    return BlockStore(tmp_path)


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> BlockStore:
    """One store for the many examples of a property; each example takes a new key."""
    return BlockStore(tmp_path_factory.mktemp("store"))


@pytest.fixture
def published(store: BlockStore) -> Path:
    """The payload file of KEY."""
    assert store.publish(KEY, ONE, LAYOUT, [PAYLOAD])
    return store.payload_path(KEY, ONE)


def payload(store: BlockStore, key: str = KEY, shard: Shard = ONE, layout: str = LAYOUT) -> bytes:
    result = store.read(key, shard, layout, time.monotonic() + SECONDS)
    assert isinstance(result, bytearray), result
    return bytes(result)


def reason(result: bytearray | ReadFailure) -> FailureReason:
    assert isinstance(result, ReadFailure), "damage was not noticed"
    assert result.detail
    return result.reason


def read_reason(store: BlockStore, key: str = KEY, shard: Shard = ONE, layout: str = LAYOUT) -> FailureReason:
    return reason(store.read(key, shard, layout, time.monotonic() + SECONDS))


def files_under(store_root: Path) -> set[Path]:
    return {path for path in store_root.rglob("*") if not path.is_dir()}


def child_command(code: str, *args: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, args)]


def run_child(code: str, *args: object) -> tuple[int, str]:
    """Exit status (negative: signal), and standard output."""
    done = subprocess.run(
        child_command(code, *args), cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode <= 0, done.stderr
    return done.returncode, done.stdout


# --- round trips


@settings(deadline=None)
@given(
    pieces=st.lists(st.binary(max_size=300), max_size=6),
    rank=st.integers(0, 3),
    extra=st.integers(1, 4),
    layout=st.text(),
)
def test_what_is_published_is_read(
    shared_store: BlockStore, pieces: list[bytes], rank: int, extra: int, layout: str
) -> None:
    key, shard = new_key(), Shard(rank, rank + extra)
    assert shared_store.publish(key, shard, layout, iter(pieces))
    assert payload(shared_store, key, shard, layout) == b"".join(pieces)


def test_payload_of_several_chunks(store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services.store, "CHUNK_BYTES", 7)
    store.publish(KEY, ONE, LAYOUT, [PAYLOAD])
    assert payload(store) == PAYLOAD


def test_views_that_are_not_bytes_are_written_as_their_bytes(store: BlockStore) -> None:
    numbers = array.array("f", range(12))
    grid = memoryview(numbers.tobytes()).cast("f", shape=[3, 4])
    store.publish(KEY, ONE, LAYOUT, [grid, memoryview(numbers), memoryview(b"")])
    assert payload(store) == numbers.tobytes() * 2


def test_before_the_index_entry_the_block_is_whole_and_nobody_has_it(store: BlockStore) -> None:
    seen: list[tuple[bytes, bool]] = []
    store.publish(KEY, ONE, LAYOUT, [PAYLOAD], before_index=lambda: seen.append((payload(store), store.contains(KEY))))
    assert seen == [(PAYLOAD, False)]
    store.publish(KEY, ONE, LAYOUT, [PAYLOAD], before_index=lambda: seen.append((b"", True)))
    assert len(seen) == 1


def test_second_publish_writes_nothing(store: BlockStore, published: Path) -> None:
    before = published.stat()
    assert not store.publish(KEY, ONE, LAYOUT, [b"other"])
    assert published.stat() == before


def test_publish_again_where_the_payload_is_gone(store: BlockStore, published: Path) -> None:
    published.unlink()
    assert store.publish(KEY, ONE, LAYOUT, [PAYLOAD])
    assert payload(store) == PAYLOAD


def test_contains_looks_at_the_index_only(store: BlockStore, published: Path) -> None:
    published.unlink()
    assert store.contains(KEY)
    store.index_path(KEY, ONE).unlink()
    assert not store.contains(KEY)


def test_contains_wants_every_shard(store: BlockStore) -> None:
    for rank in range(3):
        assert not store.contains(KEY, 3)
        store.publish(KEY, Shard(rank, 3), LAYOUT, [PAYLOAD])
    assert store.contains(KEY, 3)
    assert not store.contains(KEY)
    assert not store.contains(KEY, 2)


def test_names_come_from_keys_only(store: BlockStore) -> None:
    for bad in ("", "../" + KEY[3:], KEY.upper(), KEY + "\n", KEY[:-1], "/" + KEY):
        with pytest.raises(ValueError, match="not a key"):
            store.payload_path(bad, ONE)
        with pytest.raises(ValueError, match="not a key"):
            store.contains(bad)


@pytest.mark.parametrize(("rank", "count"), [(-1, 1), (1, 1), (0, 0)])
def test_shard_outside_its_count(rank: int, count: int) -> None:
    with pytest.raises(ValueError, match="shard rank"):
        Shard(rank, count)


@pytest.mark.parametrize("blocker", ["blocks", "index"])
def test_root_that_cannot_be_made(tmp_path: Path, blocker: str) -> None:
    (tmp_path / blocker).write_bytes(b"")
    with pytest.raises(OSError, match=blocker):
        BlockStore(tmp_path)


# --- damage


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Every single-bit flip and every full-byte flip, with its position."""
    for position in range(len(data)):
        for mask in (*(1 << bit for bit in range(8)), 0xFF):
            yield position, data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]


def test_every_flip_is_refused(store: BlockStore, published: Path) -> None:
    for position, damaged in flips(published.read_bytes()):
        published.write_bytes(damaged)
        expected = FailureReason.HEADER if position < HEADER_BYTES else FailureReason.CHECKSUM
        assert read_reason(store) == expected, position


def test_every_truncation_is_refused(store: BlockStore, published: Path) -> None:
    whole = published.read_bytes()
    for size in range(len(whole)):
        published.write_bytes(whole[:size])
        assert read_reason(store) == FailureReason.SHORT, size


@pytest.mark.parametrize("extra", [b"\0", b"x" * 5000])
def test_bytes_after_the_payload_are_refused(store: BlockStore, published: Path, extra: bytes) -> None:
    published.write_bytes(published.read_bytes() + extra)
    assert read_reason(store) == FailureReason.HEADER


def test_without_verification_only_payload_damage_passes(tmp_path: Path, published: Path) -> None:
    store = BlockStore(tmp_path, verify_checksum=False)
    for position, damaged in flips(published.read_bytes()):
        published.write_bytes(damaged)
        if position < HEADER_BYTES:
            assert read_reason(store) == FailureReason.HEADER
        else:
            assert payload(store) == damaged[HEADER_BYTES:]


def test_other_format_version_is_refused(store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services.store, "FORMAT_VERSION", 2)
    store.publish(KEY, ONE, LAYOUT, [PAYLOAD])
    monkeypatch.undo()
    assert read_reason(store) == FailureReason.HEADER


@pytest.mark.parametrize(
    ("key", "shard", "layout"),
    [(new_key(), ONE, LAYOUT), (KEY, Shard(1, 2), LAYOUT), (KEY, Shard(0, 2), LAYOUT), (KEY, ONE, LAYOUT + " ")],
    ids=["key", "rank", "count", "layout"],
)
def test_sound_block_of_another_identity_is_refused(store: BlockStore, key: str, shard: Shard, layout: str) -> None:
    store.publish(key, shard, layout, [PAYLOAD])
    path = store.payload_path(KEY, ONE)
    path.parent.mkdir(exist_ok=True)
    store.payload_path(key, shard).rename(path)
    assert read_reason(store) == FailureReason.IDENTITY


def test_missing(store: BlockStore) -> None:
    assert read_reason(store) == FailureReason.MISSING


def test_deadline(store: BlockStore, published: Path) -> None:
    assert published.is_file()
    assert reason(store.read(KEY, ONE, LAYOUT, time.monotonic())) == FailureReason.TIMEOUT


def test_deadline_between_chunks(store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,200,000 one-byte chunks take much longer than 0.05 s; the header takes much less."""
    monkeypatch.setattr(services.store, "CHUNK_BYTES", 1)
    store.publish(KEY, ONE, LAYOUT, [bytes(1_200_000)])
    result = store.read(KEY, ONE, LAYOUT, time.monotonic() + 0.05)
    assert reason(result) == FailureReason.TIMEOUT
    assert isinstance(result, ReadFailure)
    assert "bytes to go" in result.detail


@pytest.mark.parametrize("kind", ["fifo", "directory", "dangling link", "link to a good block", "parent is a file"])
def test_what_is_not_a_regular_file_is_refused(store: BlockStore, published: Path, kind: str) -> None:
    good = published.rename(published.with_name("good"))
    match kind:
        case "fifo":
            os.mkfifo(published)
        case "directory":
            published.mkdir()
        case "dangling link":
            published.symlink_to("nowhere")
        case "link to a good block":
            published.symlink_to(good)
        case "parent is a file":
            good.unlink()
            published.parent.rmdir()
            published.parent.write_bytes(b"")
    assert read_reason(store) == FailureReason.IO


READ_AS_NOBODY = """
import os, sys, time
from pathlib import Path
from services.store import BlockStore, Shard
os.chdir(sys.argv[1])  # reached while still privileged; below it only the file modes count
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
store = BlockStore(Path("."))
for key in sys.argv[2:4]:
    result = store.read(key, Shard(), sys.argv[4], time.monotonic() + 30.0)
    print(result.reason if hasattr(result, "reason") else len(result))
"""


def test_file_without_permission(store: BlockStore, tmp_path: Path, published: Path) -> None:
    tmp_path.chmod(0o755)
    published.chmod(0)
    readable = new_key()
    store.publish(readable, ONE, LAYOUT, [PAYLOAD])
    status, out = run_child(READ_AS_NOBODY, tmp_path, KEY, readable, LAYOUT)
    assert (status, out.split()) == (0, ["io", str(len(PAYLOAD))])


# --- writers

WRITE_SAME_KEYS = """
import sys
from pathlib import Path
from services.store import BlockStore, Shard
root, layout, mark, *keys = sys.argv[1:]
store = BlockStore(Path(root))
print("ready", flush=True)
sys.stdin.read()
for key in keys:
    store.publish(key, Shard(), layout, (mark.encode() * 1000 for _ in range(50)))
"""


def start_writer(root: Path, mark: str, keys: list[str]) -> subprocess.Popen[str]:
    """A process that says "ready" and publishes `keys` when its standard input is closed."""
    command = child_command(WRITE_SAME_KEYS, root, LAYOUT, mark, *keys)
    return subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_writers_at_once_leave_one_good_block(store: BlockStore, tmp_path: Path) -> None:
    keys = [new_key() for _ in range(20)]
    whole = {mark: mark.encode() * 50_000 for mark in "ab"}
    with ExitStack() as stack:
        writers = [stack.enter_context(start_writer(tmp_path, mark, keys)) for mark in whole]
        for writer in writers:
            assert writer.stdout
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            assert writer.stdin
            writer.stdin.close()
        for key in itertools.cycle(keys):  # a reader beside the writers never sees a published block that is bad
            if store.contains(key):
                assert payload(store, key) in whole.values()
            if all(writer.poll() is not None for writer in writers):
                break
    assert [writer.returncode for writer in writers] == [0, 0]
    assert all(payload(store, key) in whole.values() for key in keys)
    assert files_under(tmp_path) == {
        path for key in keys for path in (store.payload_path(key, ONE), store.index_path(key, ONE))
    }


KILLED_AT_CALL = """
import os, signal, sys
from pathlib import Path
from services.store import BlockStore, Shard
root, layout, key, fatal_call = *sys.argv[1:4], int(sys.argv[4])
call_count = 0

def counted(function):
    def wrapper(*args, **kwargs):
        global call_count
        call_count += 1
        if call_count == fatal_call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapper

store = BlockStore(Path(root))
for name in ("open", "close", "mkdir", "write", "pwrite", "fsync", "replace", "rename", "link", "unlink"):
    setattr(os, name, counted(getattr(os, name)))
store.publish(key, Shard(), layout, [bytes([piece]) * 100 for piece in range(3)])
print(call_count)
"""


def test_writer_killed_at_every_step(store: BlockStore, tmp_path: Path) -> None:
    whole = b"".join(bytes([piece]) * 100 for piece in range(3))
    outcomes = []
    for fatal_call in itertools.count(1):
        key = new_key()
        status, _ = run_child(KILLED_AT_CALL, tmp_path, LAYOUT, key, fatal_call)
        outcomes.append(store.contains(key))
        if store.contains(key):
            assert payload(store, key) == whole
        assert store.publish(key, ONE, LAYOUT, [whole]) is not outcomes[-1]
        assert payload(store, key) == whole
        if status == 0:
            break
        assert status == -9
    # Open, three pieces, header, fsync, rename, fsync of the directory and the index entry are steps at least.
    assert len(outcomes) > 9
    assert outcomes == sorted(outcomes)
    assert outcomes[-1]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from services.store import BlockStore, Shard
root, layout, key, bytes_max = *sys.argv[1:4], int(sys.argv[4])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, bytes_max))
try:
    BlockStore(Path(root)).publish(key, Shard(), layout, [bytes(1000)] * 3)
except OSError as error:
    print(error.errno)
"""


@pytest.mark.parametrize("bytes_max", [0, HEADER_BYTES, HEADER_BYTES + 1500, HEADER_BYTES + 2999])
def test_full_disk_publishes_nothing(store: BlockStore, tmp_path: Path, bytes_max: int) -> None:
    status, out = run_child(FULL_DISK, tmp_path, LAYOUT, KEY, bytes_max)
    assert status == 0
    assert out.strip().isdigit(), "the write did not fail"
    assert files_under(tmp_path) == set()
    assert not store.contains(KEY)
    assert store.publish(KEY, ONE, LAYOUT, [PAYLOAD])
    assert payload(store) == PAYLOAD


def test_full_disk_limit_that_is_just_enough(store: BlockStore, tmp_path: Path) -> None:
    assert run_child(FULL_DISK, tmp_path, LAYOUT, KEY, HEADER_BYTES + 3000) == (0, "")
    assert payload(store) == bytes(3000)


def test_payload_that_cannot_be_produced_publishes_nothing(store: BlockStore, tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield PAYLOAD
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.publish(KEY, ONE, LAYOUT, pieces())
    assert files_under(tmp_path) == set()


# --- keys

ROOT = root_key("model", "", "", ())
TOKENS = st.lists(st.integers(0, 2**31), min_size=1, max_size=40)


@given(token_ids=TOKENS, block_size=st.integers(1, 8), data=st.data())
def test_a_token_changes_its_key_and_all_later_ones(token_ids: list[int], block_size: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(token_ids) - 1))
    changed = [*token_ids]
    changed[position] += data.draw(st.integers(1, 5))
    before, after = block_keys(ROOT, token_ids, block_size), block_keys(ROOT, changed, block_size)
    block = position // block_size
    assert before[:block] == after[:block]
    assert not set(before[block:]) & set(after[block:])


@given(token_ids=TOKENS, more=TOKENS, block_size=st.integers(1, 8))
def test_a_longer_prompt_keeps_the_keys_of_its_prefix(token_ids: list[int], more: list[int], block_size: int) -> None:
    keys = block_keys(ROOT, token_ids, block_size)
    assert len(keys) == len(token_ids) // block_size
    assert len(set(keys)) == len(keys)
    assert block_keys(ROOT, tuple(token_ids + more), block_size)[: len(keys)] == keys


def test_keys_fit_the_store(store: BlockStore) -> None:
    assert not any(store.contains(key) for key in block_keys(ROOT, range(64), 16))


@pytest.mark.parametrize(("root", "block_size"), [("x", 16), (ROOT, 0)])
def test_block_keys_refuses(root: str, block_size: int) -> None:
    with pytest.raises(ValueError, match=r"not a key|block size"):
        block_keys(root, [1], block_size)


RootParts = tuple[str, str, str, tuple[str, ...]]
PARTS = st.text(alphabet="ab\0\ud800", max_size=3)
ROOT_PARTS = st.tuples(PARTS, PARTS, PARTS, st.lists(PARTS, max_size=3).map(tuple))


@given(one=ROOT_PARTS, other=ROOT_PARTS)
def test_root_keys_are_equal_only_for_equal_parts(one: RootParts, other: RootParts) -> None:
    assert (root_key(*one) == root_key(*other)) == (one == other)


def test_salts_that_are_not_valid_unicode_differ() -> None:
    assert len({root_key("model", salt, "", ()) for salt in ("\ud800", "\ud801", "?", "\ufffd", "")}) == 5


@pytest.mark.parametrize(
    "other",
    [
        ("model2", "", "", ()),
        ("model", "salt", "", ()),
        ("model", "", "salt", ()),
        ("model", "", "", ("salt",)),
        ("model", "", "", ("",)),
        ("", "model", "", ()),
    ],
)
def test_every_part_of_the_root_changes_every_key(other: RootParts) -> None:
    keys = block_keys(ROOT, range(64), 16)
    assert not set(keys) & set(block_keys(root_key(*other), range(64), 16))


FACTS = st.dictionaries(PARTS, PARTS, max_size=3)


@given(one=FACTS, other=FACTS)
def test_fingerprints_are_equal_only_for_equal_facts(one: dict[str, str], other: dict[str, str]) -> None:
    assert (fingerprint(one) == fingerprint(other)) == (one == other)
    assert fingerprint(one) == fingerprint(dict(reversed(one.items())))


def test_fingerprint_covers_the_format_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint({"model": "m"})
    monkeypatch.setattr(services.store, "FORMAT_VERSION", 2)
    assert fingerprint({"model": "m"}) != before


def write_files(directory: Path, contents: dict[str, bytes]) -> list[Path]:
    directory.mkdir()
    paths = [directory / name for name in contents]
    for path in paths:
        path.write_bytes(contents[path.name])
    return paths


def test_hash_files(tmp_path: Path) -> None:
    contents = {"config.json": b"{}", "a.safetensors": bytes(300_000), "b.safetensors": b""}
    paths = write_files(tmp_path / "one", contents)
    digest = hash_files(paths)
    assert digest == hash_files(reversed(paths))
    assert digest == hash_files(write_files(tmp_path / "moved", contents))
    others = {
        "content": {**contents, "a.safetensors": bytes(299_999) + b"\1"},
        "length": {**contents, "a.safetensors": bytes(300_001)},
        "absent": {name: contents[name] for name in ("config.json", "a.safetensors")},
        "renamed": {"config.json": b"{}", "a.safetensors": bytes(300_000), "c.safetensors": b""},
        "swapped": {**contents, "a.safetensors": b"", "b.safetensors": bytes(300_000)},
    }
    digests = {hash_files(write_files(tmp_path / name, other)) for name, other in others.items()}
    assert len(digests) == len(others)
    assert digest not in digests


def test_hash_files_of_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hash_files([tmp_path / "absent"])
