"""Lays faults on the KV volume, and takes them away again: damaged files, files that are held, another volume.

`storage_faults.py` calls it; what a kind does to one file is in `file_damage.py`, how files are held in
`held_files.py`, what a full disk is in `small_disk.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from harness.errors import LeverMissing
from harness.faults.file_damage import damage
from harness.faults.held_files import holding
from harness.faults.small_disk import small_disk
from harness.faults.storage_kinds import HELD, SLOW_READ_S, StorageFault, StorageKind
from harness.faults.volume_files import aside_of, describe, listing, replaced, told, write
from harness.records import Damage, VolumeFile
from services.journal import Event, EventName
from services.store import BlockStore, Shard

SHARD = Shard()
"""Engines with tensor parallelism have more; none of the product's has."""

OF_MODES = frozenset({StorageKind.UNREADABLE, StorageKind.READ_ONLY})
"""Kinds that are done with file modes, which root need not obey."""

WRITE_BITS = 0o222


@dataclass(frozen=True)
class Laid:
    """A fault that lies on the volume. `damages`: what it has done so far. `turn`: to be called at the kind's turning
    point, if it has one."""

    damages: Callable[[], tuple[Damage, ...]]
    turn: Callable[[], None] = lambda: None


class Volume:
    """The blocks of the prompts on a KV folder. `keys`: by prompt, the store's key of each of its blocks, in order.
    `small_dir`: a folder on a small disk that may be filled, if there is one. `modes_bind_root`: the engines obey file
    modes even if they run as root."""

    def __init__(
        self,
        kv_dir: Path,
        keys: Mapping[str, Sequence[str]],
        small_dir: Path | None = None,
        *,
        modes_bind_root: bool = False,
    ) -> None:
        """Raises HarnessError when the folder cannot be used."""
        self._root, self._keys = kv_dir, keys
        self._small_dir, self._modes_bind_root = small_dir, modes_bind_root
        with told(kv_dir):
            self._store = BlockStore(kv_dir)

    def listing(self) -> tuple[VolumeFile, ...]:
        """Everything on the volume, by name."""
        return listing(self._root)

    @contextmanager
    def damaged(self, fault: StorageFault, prompt_id: str, block_count: int) -> Iterator[Laid]:
        """Lay a fault on a prompt that can load `block_count` blocks; it is taken away when the body ends.

        Raises LeverMissing when this volume does not allow it, HarnessError when the system refuses.
        """
        keys = self._keys_of(prompt_id, block_count)
        chosen = {block: keys[block] for block in fault.chosen(block_count)}
        files = _Files(self._root, tuple(self._places(fault.kind, chosen)))
        self._check(fault.kind, files)
        with self._lay(fault, files, keys) as laid:
            yield laid

    def seen_again(self, damages: Iterable[Damage]) -> tuple[Damage, ...]:
        """The damages with how their files are now."""
        with told(self._root):
            return tuple(replace(damage, after=describe(self._root / damage.file)) for damage in damages)

    def _lay(self, fault: StorageFault, files: _Files, keys: Sequence[str]) -> AbstractContextManager[Laid]:
        if fault.kind in HELD:
            return self._held(fault.kind, files)
        match fault.kind:
            case StorageKind.EMPTIED:
                return self._emptied(files, keys[0])
            case StorageKind.FULL_DISK:
                return self._full(files, keys[0])
            case StorageKind.READ_ONLY:
                return self._read_only(files, keys[0])
            case _:
                return self._files_damaged(fault.kind, files, keys)

    # One context manager for each way to do it; each yields once the fault lies there.

    @contextmanager
    def _files_damaged(self, kind: StorageKind, files: _Files, own: Sequence[str]) -> Iterator[Laid]:
        with ExitStack() as laid:
            for path in files.paths:
                laid.enter_context(replaced(path, partial(damage, kind, donor=self._donor(path, own))))
            during = files.words()
            yield Laid(lambda: files.damages(during))

    @contextmanager
    def _held(self, kind: StorageKind, files: _Files) -> Iterator[Laid]:
        """Copies are held: only files of one's own can be."""
        with ExitStack() as laid:
            for path in files.paths:
                laid.enter_context(replaced(path, lambda place, sound: write(place, sound.read_bytes())))
            during = {path: f"{words}, held" for path, words in files.words().items()}
            holds = laid.enter_context(holding(files.paths, SLOW_READ_S if kind is StorageKind.SLOW_READ else math.inf))
            yield Laid(lambda: files.damages(during, holds.held_s()), holds.let_go)

    @contextmanager
    def _emptied(self, files: _Files, key: str) -> Iterator[Laid]:
        """The payloads go at once, which no lookup can see; the index goes at the turn, when nobody looks any more."""
        blocks, index = self._folders(key)
        with ExitStack() as laid:
            laid.enter_context(replaced(blocks, _fresh))
            yield Laid(lambda: files.damages(files.words()), lambda: laid.enter_context(replaced(index, _fresh)))

    @contextmanager
    def _full(self, files: _Files, key: str) -> Iterator[Laid]:
        """A volume with room for the blocks before the chosen one, and for half of that."""
        blocks, index = self._folders(key)
        ((block, place),) = files.places
        with told(self._root):
            file_bytes, mode = place.stat().st_size, blocks.stat().st_mode & 0o7777
        with (
            small_disk(self._small_dir, file_bytes, block, mode) as disk,
            replaced(blocks, lambda folder, _: folder.symlink_to(disk)),
            replaced(index, _fresh),
        ):
            yield Laid(lambda: files.damages(files.words()))

    @contextmanager
    def _read_only(self, files: _Files, key: str) -> Iterator[Laid]:
        blocks, index = self._folders(key)
        with replaced(blocks, _fresh_read_only), replaced(index, _fresh_read_only):
            yield Laid(lambda: files.damages(files.words()))

    def _keys_of(self, prompt_id: str, block_count: int) -> Sequence[str]:
        keys = self._keys.get(prompt_id, ())
        if len(keys) < block_count:
            raise LeverMissing(
                f"the producer's journal does not say where the {block_count} blocks of prompt {prompt_id} lie; "
                "faults in storage need kvproof's own connector"
            )
        return keys

    def _places(self, kind: StorageKind, keys: Mapping[int, str]) -> Iterator[tuple[int, Path]]:
        """The files that the fault does away with, or changes."""
        for block, key in keys.items():
            if kind is not StorageKind.INDEX_MISSING:
                yield block, self._store.payload_path(key, SHARD)
            if kind in (StorageKind.INDEX_MISSING, StorageKind.EMPTIED):
                yield block, self._store.index_path(key, SHARD)

    def _folders(self, key: str) -> tuple[Path, Path]:
        """Of all payloads, and of the whole index."""
        return self._store.payload_path(key, SHARD).parents[1], self._store.index_path(key, SHARD).parents[1]

    def _check(self, kind: StorageKind, files: _Files) -> None:
        for path in files.paths:
            if not path.is_file():
                raise LeverMissing(f"{path}: no such file; is {self._root} the folder that the engines write KV to?")
            if kind in OF_MODES and path.stat().st_uid == 0 and not self._modes_bind_root:
                raise LeverMissing(f"{path} was written by root: its engines may read and write whatever its mode is")

    def _donor(self, place: Path, own: Sequence[str]) -> Path:
        """A block of another prompt; where there is none, another block of the same prompt."""
        others = (other for keys in self._keys.values() for other in keys if other not in own)
        candidates = (self._store.payload_path(key, SHARD) for key in itertools.chain(others, own))
        donor = next(path for path in candidates if path != place)
        return aside_of(donor) if aside_of(donor).exists() else donor


class _Files:
    """Files of blocks, each with its logical block, and how they were."""

    def __init__(self, root: Path, places: tuple[tuple[int, Path], ...]) -> None:
        self.root, self.places = root, places
        self.paths = tuple(path for _, path in places)
        self._before = self.words()

    def words(self) -> Mapping[Path, str]:
        """How they are now. Raises HarnessError."""
        with told(self.root):
            return {path: describe(path) for path in self.paths}

    def damages(self, during: Mapping[Path, str], held_s: Mapping[Path, float] | None = None) -> tuple[Damage, ...]:
        kept_s = held_s or {}
        return tuple(
            Damage(
                block,
                str(path.relative_to(self.root)),
                self._before[path],
                during[path],
                held_s=kept_s.get(path, 0.0),
            )
            for block, path in self.places
        )


def saved_keys(events: Iterable[Event], tag: str) -> tuple[str, ...]:
    """The keys that a producer's journal has for the leading blocks of the request `tag`."""
    saved = (event for event in events if event.name is EventName.SAVED and event.request == tag)
    keys = {block: key for event in saved for block, key in zip(event.blocks, event.keys, strict=False)}
    return tuple(keys[block] for block in itertools.takewhile(keys.__contains__, itertools.count()))


def _fresh(folder: Path, old: Path) -> None:
    """An empty folder with the rights of the old one."""
    folder.mkdir()
    folder.chmod(old.stat().st_mode & 0o7777)


def _fresh_read_only(folder: Path, old: Path) -> None:
    folder.mkdir()
    folder.chmod(old.stat().st_mode & 0o7777 & ~WRITE_BITS)
