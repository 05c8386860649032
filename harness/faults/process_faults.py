"""Carries out faults of processes: an engine stops in the middle of a block, is struck there, and lives again.

The runner calls `ProcessFaults`. What is watched for is an event in the engine's journal; the harness never guesses
by the clock where an engine is. In a cell that strikes the producer the victim's files are removed and saved anew,
so that there is a save to disturb, and saved once more when the producer is back: other cells find what they had.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import LeverMissing, StackError
from harness.faults.process_kinds import ProcessFault, save_tag
from harness.faults.volume import SHARD
from harness.faults.volume_files import describe, told
from harness.records import (
    NOTHING,
    Cell,
    Completion,
    Damage,
    PlannedRequest,
    ProcessRecord,
    Prompt,
    Role,
    VolumeFile,
    VolumeRecord,
)
from harness.running.sending import wait_until
from harness.running.tail import Tail
from harness.stack import Stack
from services.faults import Hold, LoadControl
from services.journal import EventName, journal_path
from services.signals import KILL_ENGINE, PAUSE_ENGINE, RESUME_ENGINE
from services.store import BlockStore

HELD_DEADLINE_S = 60.0
"""How long an engine may take to reach the block at which it is struck."""
STRUCK_DEADLINE_S = 20.0
"""How long a supervisor may take to do what it was told."""
RESTART_DEADLINE_S = 180.0
"""How long an engine that was killed may take to come back."""
SAVE_DEADLINE_S = 60.0
POLL_S = 0.005

Progress = Callable[[str], None]
Words = Mapping[tuple[int, Path], str]
"""What lies in each file of a prompt, by logical block and path."""


def hold_for(cell: Cell, planned: PlannedRequest, prompt: Prompt) -> Hold | None:
    """Where the decode stops in the load of a cell's request; None where it does not."""
    if cell.process is None or cell.process.is_of_prefill or planned.role is not Role.VICTIM:
        return None
    return cell.process.hold(prompt.full_block_count)


class BlockFiles:
    """The files of one prompt's blocks on a KV folder, by the keys of its blocks in order."""

    def __init__(self, kv_dir: Path, keys: tuple[str, ...]) -> None:
        """Raises HarnessError when the folder cannot be used."""
        self.root = kv_dir
        with told(kv_dir):
            store = BlockStore(kv_dir)
        self._places = [
            (block, path)
            for block, key in enumerate(keys)
            for path in (store.payload_path(key, SHARD), store.index_path(key, SHARD))
        ]

    def words(self) -> Words:
        with told(self.root):
            return {(block, path): describe(path) for block, path in self._places}

    def listing(self) -> tuple[VolumeFile, ...]:
        """Every file of these blocks, unfinished ones too."""
        with told(self.root):
            return tuple(VolumeFile(str(path.relative_to(self.root)), path.lstat().st_size) for path in self._found())

    def remove(self) -> None:
        with told(self.root):
            for path in self._found():
                path.unlink()

    def _found(self) -> list[Path]:
        return sorted(found for _, path in self._places for found in path.parent.glob(f"{path.name}*"))


@dataclass
class Strike:
    """What a fault of a process has done so far; nothing in a cell without one."""

    files: BlockFiles | None = None
    journal: Tail | None = None
    before: Words = field(default_factory=dict)
    during: Words = field(default_factory=dict)
    listing: tuple[VolumeFile, ...] = ()
    saves: tuple[Completion, ...] = ()

    def record(self) -> ProcessRecord:
        return ProcessRecord(self.journal.events() if self.journal else (), self.saves)

    def volume(self) -> VolumeRecord:
        """The victim's files, with how they are now."""
        if self.files is None:
            return VolumeRecord()
        after = self.files.words()
        damages = (
            Damage(block, str(path.relative_to(self.files.root)), words, self.during.get((block, path), ""), now)
            for ((block, path), words), now in zip(self.before.items(), after.values(), strict=True)
        )
        return VolumeRecord(tuple(damages), self.listing, self.files.listing())


class ProcessFaults:
    """Strikes the engines of `stack`. `producer`: the service that saves KV; one cell at a time has it to itself."""

    def __init__(self, stack: Stack, producer: str, progress: Progress) -> None:
        self._stack, self._producer, self._progress = stack, producer, progress
        self._producer_in_use = threading.Lock()

    def turn(self, cell: Cell) -> AbstractContextManager[object]:
        """To be held while the cell runs."""
        return self._producer_in_use if cell.process and cell.process.is_of_prefill else nullcontext()

    @contextmanager
    def struck(self, cell: Cell, prompt: Prompt, keys: tuple[str, ...]) -> Iterator[Strike]:
        """Strike as the cell's fault says: the producer before the body runs, the decode while it does. Afterwards the
        engine goes on, or is back, and the victim's KV is whole.

        `keys`: of the victim's blocks. An engine that does not stop where it should is not struck; the journal tells.
        Raises LeverMissing before anything was done, StackError when an engine does not obey or does not come back.
        """
        fault = cell.process
        assert fault, "a cell whose fault is of a process"
        engine = _Engine(self._stack, self._producer if fault.is_of_prefill else cell.engine, fault, self._progress)
        files = self._files(prompt, keys)
        if fault.is_of_prefill:
            self._make_ready(files, prompt)
        strike = Strike(files, before=files.words(), listing=files.listing())
        if fault.is_of_prefill:
            with self._producer_struck(engine, fault, cell.id, prompt, files, strike):
                yield strike
        else:
            with self._decode_struck(engine):
                yield strike

    def _files(self, prompt: Prompt, keys: tuple[str, ...]) -> BlockFiles:
        if self._stack.kv_dir is None:
            raise LeverMissing("files on the KV volume cannot be reached from here; give the folder with --kv-dir")
        if len(keys) < prompt.full_block_count:
            raise LeverMissing(
                f"the producer's journal does not say where the blocks of prompt {prompt.id} lie; "
                "faults of processes need kvproof's own connector"
            )
        return BlockFiles(self._stack.kv_dir, keys[: prompt.full_block_count])

    def _make_ready(self, files: BlockFiles, prompt: Prompt) -> None:
        """The producer is up, and the prompt saved, also where a cell before this one left it cut off."""
        self._stack.wait_ready((self._producer,), RESTART_DEADLINE_S, self._progress)
        self._stack.client(self._producer).reset_prefix_cache()
        if NOTHING in files.words().values():
            self._save(prompt, LoadControl(tag=f"prefill.{prompt.id}"))
            self._stack.client(self._producer).reset_prefix_cache()

    @contextmanager
    def _producer_struck(
        self, engine: _Engine, fault: ProcessFault, cell_id: str, prompt: Prompt, files: BlockFiles, strike: Strike
    ) -> Iterator[None]:
        files.remove()
        strike.journal = Tail(engine.journal_path)
        with ThreadPoolExecutor(1) as pool:
            control = LoadControl(tag=save_tag(cell_id), hold=fault.hold(prompt.full_block_count))
            save = pool.submit(self._save, prompt, control)
            struck = engine.strike(strike.journal, save.done)
            try:
                strike.during = files.words()
                yield
            finally:
                if struck:
                    engine.revive(strike.journal)
            strike.saves = (save.result(),)
        if fault.kills:
            strike.saves += (self._save(prompt, LoadControl(tag=f"{save_tag(cell_id)}-again")),)

    @contextmanager
    def _decode_struck(self, engine: _Engine) -> Iterator[None]:
        journal, over = Tail(engine.journal_path), threading.Event()
        with ThreadPoolExecutor(1) as pool:
            striking = pool.submit(engine.strike, journal, over.is_set)
            try:
                yield
            finally:
                over.set()
                if striking.result():
                    engine.revive(journal)

    def _save(self, prompt: Prompt, control: LoadControl) -> Completion:
        client = self._stack.client(self._producer)
        return client.complete(prompt, control, max_tokens=1, stream=True, deadline_s=SAVE_DEADLINE_S)


class _Engine:
    """One service, to be killed or paused when it stops for that."""

    def __init__(self, stack: Stack, service: str, fault: ProcessFault, progress: Progress) -> None:
        """Raises LeverMissing."""
        self._stack, self._service, self._fault, self._progress = stack, service, fault, progress
        self._lever = stack.lever(service)
        self.journal_path = journal_path(stack.evidence_dir, service)

    def strike(self, journal: Tail, over: Callable[[], bool]) -> bool:
        """Whether the engine stopped, and is gone or paused now; `over` says that it will not stop any more."""
        wait_until(lambda: journal.has(EventName.HELD) or over(), HELD_DEADLINE_S, POLL_S)
        if not journal.has(EventName.HELD):
            return False
        if self._fault.kills:
            self._lever(KILL_ENGINE)
            self._await(journal, EventName.ENGINE_EXITED)
        else:
            self._pause(journal)
        return True

    def _pause(self, journal: Tail) -> None:
        """Nobody would resume an engine whose pause was not confirmed in time."""
        self._lever(PAUSE_ENGINE)
        try:
            self._await(journal, EventName.ENGINE_PAUSED)
        except StackError:
            self._lever(RESUME_ENGINE)
            raise

    def revive(self, journal: Tail) -> None:
        """Have an engine that was struck serve again."""
        if self._fault.kills:
            self._stack.wait_ready((self._service,), RESTART_DEADLINE_S, self._progress)
        else:
            self._lever(RESUME_ENGINE)
            self._await(journal, EventName.ENGINE_RESUMED)

    def _await(self, journal: Tail, name: EventName) -> None:
        if not wait_until(lambda: journal.has(name), STRUCK_DEADLINE_S, POLL_S):
            raise StackError(self._stack.report(self._service, f"no {name} {STRUCK_DEADLINE_S:g} s after it was told"))
