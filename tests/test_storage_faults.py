"""Every kind of storage fault on real files: what the store makes of it, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import math
import os
import struct
import time
from pathlib import Path

import pytest

from harness.errors import HarnessError, LeverMissing
from harness.records import VolumeFile
from harness.storage_faults import ASIDE_SUFFIX, SHARD, Volume, describe, saved_keys
from harness.storage_kinds import REASONS, StorageFault, StorageKind
from services.journal import Event, EventName
from services.store import HEADER_BYTES, BlockStore, ReadFailure, block_keys, root_key

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


def as_unprivileged(kind: StorageKind) -> None:
    if kind is StorageKind.UNREADABLE and os.getuid() == 0:
        pytest.skip("root may read everything")


@pytest.mark.parametrize("kind", StorageKind)
def test_each_kind_breaks_its_block_and_no_other(kind: StorageKind, tmp_path: Path) -> None:
    as_unprivileged(kind)
    store = filled(tmp_path)
    with Volume(tmp_path, KEYS).damaged(StorageFault(kind, "middle"), "victim", BLOCK_COUNT) as damages:
        assert reasons(store) == ["", "", REASONS.get(kind, ""), ""]
        offered = [store.contains(key) for key in KEYS["victim"]]
    assert offered == [True, True, kind is not StorageKind.INDEX_MISSING, True]
    assert [damage.block for damage in damages] == [2]
    assert damages[0].before != damages[0].during


@pytest.mark.parametrize("kind", StorageKind)
@pytest.mark.parametrize("blocks", ["all", (0, 3)])
def test_everything_is_put_back(kind: StorageKind, blocks: str | tuple[int, ...], tmp_path: Path) -> None:
    as_unprivileged(kind)
    store = filled(tmp_path)
    volume = Volume(tmp_path, KEYS)
    before = volume.listing()
    states = {path: (describe(path), path.lstat().st_ino) for path in tmp_path.rglob("*") if path.is_file()}
    with (
        contextlib.suppress(ZeroDivisionError),
        volume.damaged(StorageFault(kind, blocks), "victim", BLOCK_COUNT) as damages,
    ):
        assert volume.listing() != before
        raise ZeroDivisionError
    assert volume.listing() == before
    assert {path: (describe(path), path.lstat().st_ino) for path in tmp_path.rglob("*") if path.is_file()} == states
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
    Volume(tmp_path, KEYS)
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
