"""Every kind of storage fault on real files: what the store makes of it, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import math
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import HarnessError, LeverMissing
from harness.faults import held_files, small_disk
from harness.faults.storage_faults import StorageFaults
from harness.faults.storage_kinds import HELD, OF_WHOLE_VOLUME, REASONS, SLOW_READ_S, UNSAVED, StorageFault, StorageKind
from harness.faults.volume import OF_MODES, SHARD, Laid, Volume, saved_keys
from harness.faults.volume_files import ASIDE_SUFFIX, describe
from harness.records import VolumeFile
from harness.stack import AttachStack
from services.journal import Event, EventName
from services.store import HEADER_BYTES, BlockStore, ReadFailure, block_keys, root_key
from tests.small_disks import small_disk_at

LAYOUT = "test"
VALUE_COUNT = 64
BLOCK_COUNT = 4
PAYLOAD = struct.pack(f"<{VALUE_COUNT}f", *(0.5 + index / 1000 for index in range(VALUE_COUNT)))
FLIPPED = {StorageKind.FLIPPED_FIRST: 0, StorageKind.FLIPPED_MIDDLE: VALUE_COUNT // 2, StorageKind.FLIPPED_LAST: -1}

KEYS = {
    name: block_keys(root_key("model", salt, "", ()), range(BLOCK_COUNT), 1)
    for name, salt in (("victim", "one"), ("other", "two"))
}


def filled(root: Path, *prompts: str) -> BlockStore:
    store = BlockStore(root)
    for name in prompts or KEYS:
        for key in KEYS[name]:
            store.publish(key, SHARD, LAYOUT, [PAYLOAD])
    return store


def read(store: BlockStore, block: int) -> bytes | ReadFailure:
    found = store.read(KEYS["victim"][block], SHARD, LAYOUT, time.monotonic() + 10)
    return found if isinstance(found, ReadFailure) else bytes(found)


def reasons(store: BlockStore) -> list[str]:
    """Per block of the victim: why its read fails, or empty."""
    reads = (read(store, block) for block in range(BLOCK_COUNT))
    return [found.reason if isinstance(found, ReadFailure) else "" for found in reads]


@pytest.fixture
def small_dir(tmp_path: Path) -> Iterator[Path]:
    """A folder on a small disk."""
    (tmp_path / "small").mkdir()
    with small_disk_at(tmp_path / "small", "1m") as folder:
        if folder is None:
            pytest.skip("this user may not mount a small disk")
        yield folder


FILE_KINDS = [kind for kind in StorageKind if kind not in HELD | UNSAVED | OF_WHOLE_VOLUME | OF_MODES]
"""Kinds that put something else into the place of one file, and need no process that obeys modes."""


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_each_kind_breaks_its_block_and_no_other(kind: StorageKind, tmp_path: Path) -> None:
    store = filled(tmp_path)
    with Volume(tmp_path, KEYS).damaged(StorageFault(kind, "middle"), "victim", BLOCK_COUNT) as laid:
        damages = laid.damages()
        assert reasons(store) == ["", "", REASONS.get(kind, ""), ""]
        offered = [store.contains(key) for key in KEYS["victim"]]
    assert offered == [True, True, kind is not StorageKind.INDEX_MISSING, True]
    assert [damage.block for damage in damages] == [2]
    assert damages[0].before != damages[0].during


@pytest.mark.parametrize("kind", StorageKind)
@pytest.mark.parametrize("blocks", ["all", (0, 3)])
def test_everything_is_put_back(
    kind: StorageKind, blocks: str | tuple[int, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    root, small = tmp_path / "kv", None
    if kind is StorageKind.FULL_DISK:
        small = request.getfixturevalue("small_dir")
    store = filled(root)
    volume = Volume(root, KEYS, small, modes_bind_root=True)
    before = volume.listing()
    states = {path: (describe(path), path.lstat().st_ino) for path in root.rglob("*") if path.is_file()}
    with (
        contextlib.suppress(ZeroDivisionError),
        volume.damaged(StorageFault(kind, blocks), "victim", BLOCK_COUNT) as laid,
    ):
        laid.turn()
        damages = laid.damages()
        assert kind in HELD or volume.listing() != before
        raise ZeroDivisionError
    assert volume.listing() == before
    assert small is None or list(small.iterdir()) == []
    assert {path: (describe(path), path.lstat().st_ino) for path in root.rglob("*") if path.is_file()} == states
    assert [damage.after for damage in volume.seen_again(damages)] == [damage.before for damage in damages]
    assert [read(store, block) for block in range(BLOCK_COUNT)] == [PAYLOAD] * BLOCK_COUNT


@pytest.mark.parametrize("kind", FLIPPED)
def test_a_flipped_bit_makes_one_value_huge(kind: StorageKind, tmp_path: Path) -> None:
    filled(tmp_path)
    unchecked = BlockStore(tmp_path, verify_checksum=False)
    with Volume(tmp_path, KEYS).damaged(StorageFault(kind, "first"), "victim", BLOCK_COUNT):
        payload = read(unchecked, 0)
    assert isinstance(payload, bytes)
    values, sound = (list(struct.unpack(f"<{VALUE_COUNT}f", data)) for data in (payload, PAYLOAD))
    assert sum(a != b for a, b in zip(payload, PAYLOAD, strict=True)) == 1
    assert values[FLIPPED[kind]] > 1e30
    values[FLIPPED[kind]] = sound[FLIPPED[kind]]
    assert all(map(math.isclose, values, sound))


def test_where_truncated_files_end(tmp_path: Path) -> None:
    store = filled(tmp_path)
    place, volume = store.payload_path(KEYS["victim"][0], SHARD), Volume(tmp_path, KEYS)
    size_bytes, found = place.stat().st_size, {}
    for kind in StorageKind:
        if kind.startswith("truncated"):
            with volume.damaged(StorageFault(kind, "first"), "victim", BLOCK_COUNT):
                found[kind.removeprefix("truncated-")] = place.stat().st_size
    assert found == {"empty": 0, "header": HEADER_BYTES // 2, "middle": size_bytes // 2, "byte": size_bytes - 1}


def test_a_lone_prompt_lends_itself_another_block(tmp_path: Path) -> None:
    store = filled(tmp_path, "victim")
    volume = Volume(tmp_path, {"victim": KEYS["victim"]})
    with volume.damaged(StorageFault(StorageKind.OTHER_PROMPT), "victim", BLOCK_COUNT):
        assert reasons(store) == ["identity"] * BLOCK_COUNT


def test_what_a_killed_run_left_aside_is_put_back(tmp_path: Path) -> None:
    store = filled(tmp_path)
    place = store.payload_path(KEYS["victim"][1], SHARD)
    place.rename(place.with_name(place.name + ASIDE_SUFFIX))
    place.mkdir()
    StorageFaults(AttachStack({}, tmp_path, tmp_path), "prefill", {})
    assert read(store, 1) == PAYLOAD
    assert not list(tmp_path.rglob(f"*{ASIDE_SUFFIX}"))


@pytest.mark.parametrize("prompt_id", ["unknown", "short"])
def test_blocks_that_the_journal_does_not_place(prompt_id: str, tmp_path: Path) -> None:
    filled(tmp_path)
    volume = Volume(tmp_path, {**KEYS, "short": KEYS["victim"][:2]})
    with (
        pytest.raises(LeverMissing, match=f"of prompt {prompt_id}"),
        volume.damaged(StorageFault(StorageKind.ZEROED), prompt_id, BLOCK_COUNT),
    ):
        pass


def test_a_folder_that_is_not_the_engines(tmp_path: Path) -> None:
    with (
        pytest.raises(LeverMissing, match=r"is .* the folder that the engines write KV to"),
        Volume(tmp_path, KEYS).damaged(StorageFault(StorageKind.ZEROED), "victim", BLOCK_COUNT),
    ):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root writes files that belong to root")
def test_engines_that_run_as_root_read_everything(tmp_path: Path) -> None:
    filled(tmp_path)
    with (
        pytest.raises(LeverMissing, match="written by root"),
        Volume(tmp_path, KEYS).damaged(StorageFault(StorageKind.UNREADABLE), "victim", BLOCK_COUNT),
    ):
        pass


def test_what_the_system_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "blocks").write_text("in the way")
    with pytest.raises(HarnessError, match=r"blocks: cannot damage or restore KV files there \(File exists\)"):
        Volume(tmp_path, KEYS)


# Held files.


def in_thread(store: BlockStore, block: int, deadline_s: float = 10.0) -> tuple[threading.Thread, list[object]]:
    """A read that may wait, and where its result will be."""
    found: list[object] = []
    limit_s = time.monotonic() + deadline_s
    thread = threading.Thread(
        target=lambda: found.append(store.read(KEYS["victim"][block], SHARD, LAYOUT, limit_s)), daemon=True
    )
    thread.start()
    return thread, found


def until_awaited(laid: Laid) -> None:
    deadline_s = time.monotonic() + 10
    while not any(damage.held_s > 0 for damage in laid.damages()):
        assert time.monotonic() < deadline_s, "nobody waited"
        time.sleep(0.002)


def test_a_slow_read_waits_and_is_right(tmp_path: Path) -> None:
    store, began_s = filled(tmp_path), time.monotonic()
    with Volume(tmp_path, KEYS).damaged(StorageFault(StorageKind.SLOW_READ, "first"), "victim", BLOCK_COUNT) as laid:
        assert [damage.held_s for damage in laid.damages()] == [0.0]
        assert read(store, 0) == PAYLOAD
        assert time.monotonic() - began_s >= SLOW_READ_S
        assert [damage.held_s >= SLOW_READ_S for damage in laid.damages()] == [True]
        began_s = time.monotonic()
        assert read(store, 0) == PAYLOAD  # only the first waits
        assert time.monotonic() - began_s < SLOW_READ_S


def test_a_late_read_goes_on_at_its_turn(tmp_path: Path) -> None:
    store = filled(tmp_path)
    with Volume(tmp_path, KEYS).damaged(StorageFault(StorageKind.LATE_READ, "first"), "victim", BLOCK_COUNT) as laid:
        thread, found = in_thread(store, 0, deadline_s=0.1)
        until_awaited(laid)
        thread.join(0.3)
        assert found == []
        laid.turn()
        thread.join(10)
    (late,) = found
    assert isinstance(late, ReadFailure)
    assert late.reason == "timeout"


def test_an_endless_read_ends_with_the_fault(tmp_path: Path) -> None:
    store = filled(tmp_path)
    volume = Volume(tmp_path, KEYS)
    with volume.damaged(StorageFault(StorageKind.ENDLESS_READ, "first"), "victim", BLOCK_COUNT) as laid:
        threads = [in_thread(store, 0), in_thread(store, 0)]
        until_awaited(laid)
        threads[0][0].join(0.3)
        assert [found for _, found in threads] == [[], []]
        assert read(store, 1) == PAYLOAD
        assert laid.damages()[0].held_s > 0.2
    for thread, found in threads:
        thread.join(10)
        assert found == [bytearray(PAYLOAD)]


def test_a_file_that_nobody_opens_is_not_held(tmp_path: Path) -> None:
    filled(tmp_path)
    with Volume(tmp_path, KEYS).damaged(StorageFault(StorageKind.ENDLESS_READ), "victim", BLOCK_COUNT) as laid:
        time.sleep(0.05)
        assert [damage.held_s for damage in laid.damages()] == [0.0] * BLOCK_COUNT


def test_who_holds_files_is_not_killed_by_that(tmp_path: Path) -> None:
    """The kernel tells the holder by a signal, whose usual one ends a process that does not expect it."""
    store = filled(tmp_path)
    path = store.payload_path(KEYS["victim"][0], SHARD)
    code = (
        "import sys, threading; from pathlib import Path; from harness.faults.held_files import holding\n"
        "path = Path(sys.argv[1])\n"
        "with holding([path], 0.0):\n"
        "    thread = threading.Thread(target=path.read_bytes); thread.start(); thread.join(10)\n"
        "print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_a_file_system_without_leases(tmp_path: Path) -> None:
    """As root of a network file system; here: somebody else has the file open."""
    store = filled(tmp_path)
    path = store.payload_path(KEYS["victim"][0], SHARD)
    with (
        path.open("rb"),
        pytest.raises(LeverMissing, match="does not let files be held"),
        held_files.holding([path], 1),
    ):
        pass


def test_a_kernel_that_takes_leases_away_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_files, "LEASE_BREAK_TIME", tmp_path / "lease-break-time")
    (tmp_path / "lease-break-time").write_text("3\n")
    with pytest.raises(LeverMissing, match=r"is 3 s; files must be held for 20 s"), held_files.holding([], 1):
        pass


# Other volumes.


def test_an_emptied_volume_keeps_its_index_until_the_turn(tmp_path: Path) -> None:
    store = filled(tmp_path)
    with Volume(tmp_path, KEYS).damaged(StorageFault(StorageKind.EMPTIED), "victim", BLOCK_COUNT) as laid:
        assert [store.contains(key) for key in KEYS["victim"]] == [True] * BLOCK_COUNT
        assert reasons(store) == ["missing"] * BLOCK_COUNT
        assert any(damage.before == damage.during for damage in laid.damages())
        laid.turn()
        assert not any(store.contains(key) for keys in KEYS.values() for key in keys)
        assert reasons(store) == ["missing"] * BLOCK_COUNT
        assert all(damage.during == "nothing" for damage in laid.damages())
        assert len(laid.damages()) == 2 * BLOCK_COUNT
        # A producer that goes on beside it finds a volume to write to.
        assert store.publish(KEYS["victim"][0], SHARD, LAYOUT, [PAYLOAD])
    assert [store.contains(key) for key in KEYS["victim"]] == [True] * BLOCK_COUNT


BIG_PAYLOAD = bytes(41_000)


def save(store: BlockStore) -> list[str]:
    """Per block of a prompt: why it could not be saved, or empty; a save ends at the first that could not."""
    found = []
    for key in KEYS["victim"]:
        try:
            store.publish(key, SHARD, LAYOUT, [BIG_PAYLOAD[:20_000], BIG_PAYLOAD[20_000:]])
        except OSError as error:
            return [*found, str(error)]
        found.append("")
    return found


@pytest.mark.parametrize(("blocks", "saved_count"), [("first", 0), ("middle", 2), ("last", 3), ("all", 0), ((1,), 1)])
def test_a_full_disk_takes_the_blocks_before(
    blocks: str | tuple[int, ...], saved_count: int, small_dir: Path, tmp_path: Path
) -> None:
    root = tmp_path / "kv"
    store = BlockStore(root)
    for key in KEYS["victim"]:
        store.publish(key, SHARD, LAYOUT, [BIG_PAYLOAD])
    volume = Volume(root, KEYS, small_dir)
    with volume.damaged(StorageFault(StorageKind.FULL_DISK, blocks), "victim", BLOCK_COUNT) as laid:
        assert not any(store.contains(key) for key in KEYS["victim"])
        *saved, reason = save(store)
        assert (saved, reason[:10]) == ([""] * saved_count, "[Errno 28]")
        found = [store.contains(key) for key in KEYS["victim"]]
        assert found == [True] * saved_count + [False] * (BLOCK_COUNT - saved_count)
        loaded = [store.read(key, SHARD, LAYOUT, time.monotonic() + 10) for key in KEYS["victim"][:saved_count]]
        assert loaded == [bytearray(BIG_PAYLOAD)] * saved_count
        assert [(damage.block, damage.during) for damage in laid.damages()] == [(saved_count, "nothing")]
    assert list(small_dir.iterdir()) == []
    assert [store.contains(key) for key in KEYS["victim"]] == [True] * BLOCK_COUNT


@pytest.mark.parametrize(
    ("limit", "message"), [({"DISK_BYTES_MAX": 1000}, r"1000 at most are filled"), ({}, r"are needed for the KV")]
)
def test_disks_that_do_not_do(
    limit: dict[str, int], message: str, small_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in limit.items():
        monkeypatch.setattr(small_disk, name, value)
    with pytest.raises(LeverMissing, match=message), small_disk.small_disk(small_dir, 1 << 20, 1, 0o755):
        pass


def test_without_a_small_disk_nothing_is_filled(tmp_path: Path) -> None:
    filled(tmp_path)
    with (
        pytest.raises(LeverMissing, match="set KVPROOF_SMALL_DIR"),
        Volume(tmp_path, KEYS).damaged(StorageFault(StorageKind.FULL_DISK), "victim", BLOCK_COUNT),
    ):
        pass


def test_what_a_killed_run_left_on_the_small_disk_is_removed(small_dir: Path) -> None:
    (small_dir / "kvproof-left").mkdir()
    (small_dir / "other").mkdir()
    with small_disk.small_disk(small_dir, 4096, 1, 0o755) as folder:
        assert {path.name for path in small_dir.iterdir()} == {folder.name, "other"}


def bound_by_modes(code: str, *arguments: str) -> str:
    """What Python code prints, errors too, in a process that obeys file modes, also where root runs it."""
    drop = "from services.privileges import obey_file_modes; import os, sys; obey_file_modes((), ())\n"
    command = [sys.executable, "-c", f"{drop}os.execv(sys.executable, [sys.executable, '-c', *sys.argv[1:]])", code]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_a_read_only_volume_takes_nothing(tmp_path: Path) -> None:
    filled(tmp_path)
    code = (
        "import sys; from pathlib import Path; from services.store import BlockStore, Shard\n"
        "BlockStore(Path(sys.argv[1])).publish('ab' * 32, Shard(), 'layout', [b'payload'])"
    )
    volume = Volume(tmp_path, KEYS, modes_bind_root=True)
    with volume.damaged(StorageFault(StorageKind.READ_ONLY), "victim", BLOCK_COUNT):
        assert "PermissionError: [Errno 13]" in bound_by_modes(code, str(tmp_path))
        assert not list((tmp_path / "blocks").rglob("*"))
    assert bound_by_modes(code, str(tmp_path)) == ""


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    code = (
        "import sys; from pathlib import Path; from services.store import BlockStore, Shard\n"
        f"print(BlockStore(Path(sys.argv[1])).read('{KEYS['victim'][0]}', Shard(), '{LAYOUT}', float('inf')).reason)"
    )
    volume = Volume(tmp_path, KEYS, modes_bind_root=True)
    with volume.damaged(StorageFault(StorageKind.UNREADABLE, "first"), "victim", BLOCK_COUNT):
        assert bound_by_modes(code, str(tmp_path)) == "io\n"


def test_a_volume_that_a_killed_run_exchanged_is_put_back(tmp_path: Path) -> None:
    store = filled(tmp_path)
    before = Volume(tmp_path, KEYS).listing()
    (tmp_path / "index").rename(tmp_path / f"index{ASIDE_SUFFIX}")
    (tmp_path / "blocks").rename(tmp_path / f"blocks{ASIDE_SUFFIX}")
    (tmp_path / "blocks").symlink_to("nowhere")
    (tmp_path / "index" / "ab").mkdir(parents=True)
    (tmp_path / "index" / "ab" / "entry").touch()
    StorageFaults(AttachStack({}, tmp_path, tmp_path), "prefill", {})
    assert Volume(tmp_path, KEYS).listing() == before
    assert read(store, 1) == PAYLOAD


def test_the_listing_names_everything(tmp_path: Path) -> None:
    store = filled(tmp_path)
    volume, place = Volume(tmp_path, KEYS), store.payload_path(KEYS["victim"][0], SHARD)
    name = str(place.relative_to(tmp_path))
    assert VolumeFile(name, HEADER_BYTES + len(PAYLOAD)) in volume.listing()
    for kind, word in ((StorageKind.DIRECTORY, "a directory"), (StorageKind.FIFO, "a FIFO")):
        with volume.damaged(StorageFault(kind, "first"), "victim", BLOCK_COUNT):
            assert VolumeFile(f"{name} ({word})", 0) in volume.listing()


def test_keys_come_from_the_producers_journal() -> None:
    def saved(tag: str, blocks: tuple[int, ...], keys: tuple[str, ...]) -> Event:
        return Event(EventName.SAVED, "prefill", 1.0, tag, blocks=blocks, keys=keys)

    events = (
        saved("prefill.a", (0, 1), ("old", "one")),
        saved("prefill.b", (0,), ("other",)),
        saved("prefill.a", (2,), ("two",)),
        saved("prefill.a", (0,), ("zero",)),
        Event(EventName.SAVE_FAILED, "prefill", 1.0, "prefill.a", blocks=(3,)),
    )
    assert saved_keys(events, "prefill.a") == ("zero", "one", "two")
    assert saved_keys(events, "prefill.c") == ()
    assert saved_keys((saved("prefill.a", (0, 1), ()),), "prefill.a") == ()
    assert saved_keys((saved("prefill.a", (0, 2, 3), ("zero", "two", "three")),), "prefill.a") == ("zero",)
