"""Carries out a cell's fault in storage: lays it on the volume, has the prompt saved there where that is the fault, and
keeps what was seen.

The runner calls `StorageFaults`. A volume that takes no saves is put in the place of the engines' own, and nothing of
it stays behind: the cell's prompt is saved on the sound volume before all cells, and on the other one in its cell.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from harness.errors import LeverMissing
from harness.faults.process_kinds import save_tag
from harness.faults.storage_kinds import TURNING_POINTS, UNSAVED
from harness.faults.volume import Laid, Volume, saved_keys
from harness.faults.volume_files import put_all_back
from harness.judging.oracles import victim_of
from harness.records import Cell, Damage, ProcessRecord, Prompt, VolumeFile, VolumeRecord
from harness.running.journals import read_journal
from harness.running.tail import Tail
from harness.stack import Stack
from services.faults import LoadControl
from services.journal import journal_path

SAVE_DEADLINE_S = 60.0
TURN_POLL_S = 0.002


def prefill_tag(prompt_id: str) -> str:
    """Of the request that has a prompt saved before all cells."""
    return f"prefill.{prompt_id}"


@dataclass
class VolumeWatch:
    """A cell's volume with the fault on it; without a fault in storage there is nothing to watch."""

    volume: Volume | None = None
    laid: Laid | None = None
    before: tuple[VolumeFile, ...] = ()
    damages: tuple[Damage, ...] = ()
    save: ProcessRecord = field(default_factory=ProcessRecord)

    def record(self) -> VolumeRecord:
        """Once the fault is off again: what it did, and how everything is now."""
        if self.volume is None:
            return VolumeRecord()
        return VolumeRecord(self.volume.seen_again(self.damages), self.before, self.volume.listing())


class StorageFaults:
    """Faults in the storage of `stack`. `producer`: the service that saves KV; `prompts` by id."""

    def __init__(self, stack: Stack, producer: str, prompts: Mapping[str, Prompt]) -> None:
        """Puts back what a run that was killed left aside, before anything is saved. Raises HarnessError."""
        self._stack, self._producer, self._prompts = stack, producer, prompts
        if stack.kv_dir is not None:
            put_all_back(stack.kv_dir)
        self._known_volume: Volume | None = None

    @contextmanager
    def laid(self, cell: Cell) -> Iterator[VolumeWatch]:
        """The cell's fault lies on the volume while the body runs. Raises LeverMissing where the stack cannot do it,
        HarnessError when the system refuses."""
        if cell.storage is None:
            yield VolumeWatch()
            return
        volume = self._volume()
        watch = VolumeWatch(volume, before=volume.listing())
        prompt = self._prompts[victim_of(cell).prompt_id]
        with volume.damaged(cell.storage, prompt.id, prompt.full_block_count) as watch.laid:
            with self._saved(cell, prompt, watch), self._turning(cell, watch.laid):
                yield watch
            watch.damages = watch.laid.damages()

    @contextmanager
    def _turning(self, cell: Cell, laid: Laid) -> Iterator[None]:
        """While the body runs the fault turns, if its kind does: at the first such event in the engine's journal."""
        point = TURNING_POINTS.get(cell.storage.kind) if cell.storage else None
        if point is None:
            yield
            return
        journal, over = Tail(journal_path(self._stack.evidence_dir, cell.engine)), threading.Event()

        def turn() -> None:
            while not journal.has(point):
                if over.wait(TURN_POLL_S):
                    return
            laid.turn()

        with ThreadPoolExecutor(1) as pool:
            turning = pool.submit(turn)
            try:
                yield
            finally:
                over.set()
            turning.result()

    @cached_property
    def keys(self) -> Mapping[str, tuple[str, ...]]:
        """By prompt, the store's keys of its blocks, as far as the producer's journal has them."""
        events, _ = read_journal(journal_path(self._stack.evidence_dir, self._producer))
        return {prompt_id: saved_keys(events, prefill_tag(prompt_id)) for prompt_id in self._prompts}

    def _volume(self) -> Volume:
        if self._known_volume is None:
            stack = self._stack
            if stack.kv_dir is None:
                raise LeverMissing("files on the KV volume cannot be reached from here; give the folder with --kv-dir")
            bound = all(stack.obeys_file_modes(service) for service in stack.services)
            self._known_volume = Volume(stack.kv_dir, self.keys, stack.small_dir, modes_bind_root=bound)
        return self._known_volume

    @contextmanager
    def _saved(self, cell: Cell, prompt: Prompt, watch: VolumeWatch) -> Iterator[None]:
        """Where that is the fault, have the producer compute the prompt anew and save it, as far as it can."""
        if cell.storage is None or cell.storage.kind not in UNSAVED:
            yield
            return
        client = self._stack.client(self._producer)
        client.reset_prefix_cache()
        journal = Tail(journal_path(self._stack.evidence_dir, self._producer))
        control = LoadControl(tag=save_tag(cell.id))
        answer = client.complete(prompt, control, max_tokens=1, stream=True, deadline_s=SAVE_DEADLINE_S)
        yield
        # Read at the end: that the producer died of it is journaled a moment after its answer broke off.
        watch.save = ProcessRecord(journal.events(), (answer,))
