"""Simulated engines that can be killed and paused in the middle of a block; honest, or wrong in one way each.

test_process_power.py runs the process matrix on four of them. As their KV really lies on a volume, what a killed
producer leaves there is real.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path

from harness.records import Cell, Role
from harness.running.runner import PREFILL
from harness.stack import AttachStack
from harness.stack.base import Lever
from services.faults import HoldPoint, LoadMode
from services.journal import EventName
from services.signals import KILL_ENGINE, PAUSE_ENGINE
from services.store import Shard
from tests.engines import ENGINES
from tests.fake_server import Behaviour, Client, reset
from tests.simulated_engine import prefixes
from tests.simulated_http import attached, sending, wait_until_hung_up
from tests.simulated_requests import Answer, Blocks, Harm, Request, Tokens, failure, garbage, right
from tests.simulated_storage import LAYOUT, StoringEngine, block_names, payload
from tests.ways_to_be_wrong import Wrong

HOLD_DEADLINE_S = 20.0


class Failing(StrEnum):
    """One way to be wrong each, in cells whose fault is of a process."""

    NOTHING = "nothing"

    NEVER_STOPS = "never-stops"
    """Whatever a request asks."""
    WORKS_WHILE_PAUSED = "works-while-paused"
    PUBLISHES_FIRST = "publishes-first"
    """Every index entry, then the payloads."""
    FINDS_PAYLOADS = "finds-payloads"
    """Lookups see payloads, whether they have an index entry or not."""
    WAITS_FOR_PRODUCER = "waits-for-producer"
    """A prefix that is not whole will be so some day."""
    FAILS_ON_MISS = "fails-on-miss"
    """Under policy fail."""
    GARBAGE_AFTER_SAVE = "garbage-after-save"
    """Where a save was interrupted."""
    STALE_AFTER_RESTART = "stale-after-restart"
    """An engine that comes back believes in blocks that it has lost."""
    SPOILS_FILES = "spoils-files"
    """Of the block that it was loading when it was killed."""
    ANSWERS_WHEN_KILLED = "answers-when-killed"
    LEAKS_AFTER_PAUSE = "leaks-after-pause"
    DIES_OF_PAUSE = "dies-of-pause"
    NEVER_SAVES_AGAIN = "never-saves-again"
    """A producer that was killed: it answers, and saves nothing."""
    REFUSES_AFTERWARDS = "refuses-afterwards"
    """So does one that was killed."""


class KilledError(Exception):
    """The process of whoever gets this is gone."""


class MortalEngine(StoringEngine):
    """One service that obeys the signals of a supervisor."""

    def __init__(
        self, service: str, kv_dir: Path, evidence_dir: Path, failing: Failing, cells: Iterable[Cell] = ()
    ) -> None:
        self._failing = failing
        self._death_count = 0
        self._awake, self._struck = threading.Event(), threading.Event()
        self._awake.set()
        super().__init__(service, kv_dir, evidence_dir, Wrong.NOTHING, cells)

    def behaviour(self, path: str, body: dict[str, object], client: Client) -> Behaviour:
        self._awake.wait()
        try:
            return super().behaviour(path, body, client)
        except KilledError:
            return reset

    # Signals.

    def signal(self, number: signal.Signals) -> None:
        if number == KILL_ENGINE:
            self._death_count += 1
            self._die()
            self._struck.set()
        elif number == PAUSE_ENGINE:
            self._journal.write(EventName.ENGINE_PAUSED, pid=1)
            if self._failing is Failing.WORKS_WHILE_PAUSED:
                self._struck.set()
            else:
                self._awake.clear()
        else:
            self._journal.write(EventName.ENGINE_RESUMED, pid=1)
            if self._failing is Failing.DIES_OF_PAUSE:
                self._death_count += 1
                self._die()
            self._awake.set()
            self._struck.set()

    def _hold(self, request: Request, block: int, point: HoldPoint) -> None:
        hold = request.control.hold
        if hold is None or (hold.block, hold.point) != (block, point) or self._failing is Failing.NEVER_STOPS:
            return
        deaths = self._death_count
        self._struck.clear()
        self._write(EventName.HELD, request, blocks=(block,), reason=point)
        assert self._struck.wait(HOLD_DEADLINE_S), "nobody struck"
        if self._death_count > deaths:
            self._spoil(request, block)
            raise KilledError
        if self._failing is Failing.LEAKS_AFTER_PAUSE:
            self._pool.leak("nobody")
            self._holds_blocks = True

    def _spoil(self, request: Request, block: int) -> None:
        if self._failing is Failing.SPOILS_FILES and self.service != PREFILL:
            self._volume.payload_path(block_names(request.prompt)[block], Shard()).write_bytes(b"")

    # Requests.

    def _complete(self, request: Request) -> Behaviour:
        try:
            waits = self.service != PREFILL and self._failing is Failing.WAITS_FOR_PRODUCER
            if waits and self._is_short(request):
                return wait_until_hung_up
            return super()._complete(request)
        except KilledError:
            if self._failing is Failing.ANSWERS_WHEN_KILLED and self.service != PREFILL:
                return sending(request, right(request))
            raise

    def _serve(self, request: Request) -> Answer:
        is_short = self._is_short(request)
        answer = super()._serve(request)
        if self.service == PREFILL or request.role not in set(Role):
            return answer
        if is_short and self._failing is Failing.FAILS_ON_MISS and request.policy == "fail":
            return failure(request)
        is_stale = self._failing is Failing.STALE_AFTER_RESTART and self._death_count > 0
        is_torn = self._failing is Failing.GARBAGE_AFTER_SAVE and is_short
        return garbage(request) if is_stale or is_torn else answer

    # KV.

    def _saved(self, request: Request, keys: tuple[Tokens, ...]) -> Answer:
        if self._death_count > 0 and self._failing is Failing.REFUSES_AFTERWARDS:
            return failure(request)
        if self._death_count > 0 and self._failing is Failing.NEVER_SAVES_AGAIN:
            return right(request)
        names = block_names(request.prompt)[: len(keys)]
        if self._failing is Failing.PUBLISHES_FIRST:
            for name in names:
                self._volume.index_path(name, Shard()).parent.mkdir(exist_ok=True)
                self._volume.index_path(name, Shard()).touch()
        return super()._saved(request, keys)

    def _publish(self, request: Request, block: int, name: str) -> None:
        held = partial(self._hold, request, block, HoldPoint.INDEX)
        self._volume.publish(name, Shard(), LAYOUT, self._pieces(request, block, name), before_index=held)

    def _pieces(self, request: Request, block: int, name: str) -> Iterator[bytes]:
        whole = payload(name)
        yield whole[: len(whole) // 2]
        self._hold(request, block, HoldPoint.PAYLOAD)
        yield whole[len(whole) // 2 :]

    def _is_short(self, request: Request) -> bool:
        """Whether not every block that can be loaded is published."""
        names = block_names(request.prompt)[: len(prefixes(request.prompt))]
        return not all(self._volume.contains(name) for name in names)

    def _found(self, request: Request, keys: tuple[Tokens, ...]) -> int:
        if self._failing is not Failing.FINDS_PAYLOADS:
            return super()._found(request, keys)
        names = block_names(request.prompt)[: len(keys)]
        there = (self._volume.payload_path(name, Shard()).exists() for name in names)
        count = next((i for i, is_there in enumerate(there) if not is_there), len(names))
        self._write(EventName.LOOKUP, request, blocks=tuple(range(len(self._cached(keys)), count)))
        return count

    def _read_blocks(self, request: Request, mode: LoadMode, blocks: Blocks, load_index: int) -> Harm:
        for block in blocks:
            self._hold(request, block, HoldPoint.LOAD)
        return super()._read_blocks(request, mode, blocks, load_index)


class SignalledStack(AttachStack):
    """Engines elsewhere, but with levers."""

    engines: dict[str, MortalEngine]

    def lever(self, service: str) -> Lever:
        return self.engines[service].signal


@contextmanager
def mortal_stack(folder: Path, failing: Failing, cells: Iterable[Cell] = ()) -> Iterator[SignalledStack]:
    """A producer and all consumers on one volume, all `failing` in the same way, in threads of this process."""
    evidence_dir, kv_dir = folder / "evidence", folder / "kv"
    evidence_dir.mkdir()
    engines = [MortalEngine(service, kv_dir, evidence_dir, failing, cells) for service in (PREFILL, *ENGINES)]
    with attached(engines, evidence_dir, kv_dir, SignalledStack) as stack:
        stack.engines = {engine.service: engine for engine in engines}
        yield stack
