"""One cell on running services -> one Observation; no opinion.

`session.py` calls it. It resets what would carry over from the cell before, sends the requests, watches until the
engine is quiet again, and copies the evidence. What goes wrong in an engine is recorded, never raised.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from harness.errors import BlocksHeld, HarnessError, LeverMissing, StackError
from harness.faults.process_faults import ProcessFaults, Strike, hold_for
from harness.faults.storage_faults import StorageFaults, prefill_tag
from harness.judging.oracles import oracle_block_count, oracle_name, victim_of
from harness.records import (
    Cell,
    Completion,
    EngineState,
    Observation,
    OracleKey,
    OracleRun,
    PlannedRequest,
    Prompt,
    RequestRecord,
    Role,
)
from harness.running.client import EngineClient
from harness.running.completions import Departure
from harness.running.sending import Cues, send_all, wait_until
from harness.running.tail import Tail
from harness.stack import Stack
from services.faults import FaultKind, LoadControl, LoadMode
from services.journal import ENGINE_LOG_NAME, EventName, journal_path

PREFILL = "prefill"

RESTART_DEADLINE_S = 180.0
"""How long an engine that died may take to come back."""
KILL_DEADLINE_S = 20.0
"""How long an engine that is killed may take to be gone."""
SETTLE_DEADLINE_S = 10.0
"""How long an engine may hold blocks or queues after its last answer."""
SETTLE_POLL_S = 0.02

GONE = EngineState(healthy=False, running_count=0, waiting_count=0, cache_usage=0.0, restart_count=0)

Progress = Callable[[str], None]


class Runner:
    """Runs cells and oracles on `stack`, one at a time per engine. `prompts` by id."""

    def __init__(self, stack: Stack, prompts: Mapping[str, Prompt], progress: Progress) -> None:
        self._stack = stack
        self._prompts = prompts
        self._progress = progress
        self._turns = _Turns()
        self._processes = ProcessFaults(stack, PREFILL, progress)
        self._storage = StorageFaults(stack, PREFILL, prompts)
        self._unsettled: set[str] = set()
        self._run_counts: Counter[str] = Counter()

    def runnable(self, cells: Iterable[Cell]) -> tuple[Cell, ...]:
        """The cells whose engines the stack has."""
        return tuple(cell for cell in cells if {cell.engine, cell.oracle_engine} <= {*self._stack.services})

    def prefill(self, prompt: Prompt) -> None:
        """Have the producer compute and save a prompt's KV. Raises StackError when it cannot."""
        journal = Tail(journal_path(self._stack.evidence_dir, PREFILL))
        completion = self._complete(PREFILL, prompt, LoadControl(tag=prefill_tag(prompt.id)), max_tokens=1)
        unsaved = [event.reason for event in journal.events() if event.name is EventName.SAVE_FAILED]
        if unsaved:
            raise StackError(f"the KV of prompt {prompt.id} was not saved: {unsaved[0]}")
        if completion.status_code != 200 or completion.error:
            what = f"prefill of prompt {prompt.id} failed: HTTP {completion.status_code} {completion.error}"
            raise StackError(self._stack.report(PREFILL, what))

    def warm_up(self, service: str, prompt: Prompt) -> None:
        """Take the first, slow requests of each kind (compute, sync load, async load) out of what is measured."""
        for load in (LoadMode.OFF, LoadMode.SYNC, LoadMode.ASYNC):
            self._reset(service)
            self._complete(service, prompt, LoadControl(tag=f"warm-up.{load}", load=load), max_tokens=4)

    def oracle(self, key: OracleKey, run_index: int) -> OracleRun:
        """Measure one oracle on its engine, with an empty prefix cache."""
        prompt = self._prompts[key.prompt_id]
        self._reset(key.engine)
        journal = Tail(journal_path(self._stack.evidence_dir, key.engine))
        count = oracle_block_count(key, prompt)
        control = LoadControl(
            tag=f"oracle.{key.prompt_id}.{oracle_name(key)}.{run_index}",
            load=LoadMode.SYNC if count else LoadMode.OFF,
            offer_blocks=count,
        )
        completion = self._complete(key.engine, prompt, control, key.max_tokens)
        return OracleRun(key, completion, journal.events())

    def run(self, cell: Cell) -> Observation:
        """Run a cell. An engine that cannot be brought to a clean start gives an Observation with `error`, a stack that
        lacks what the cell needs one with `skipped`. Nothing else runs beside a cell that damages files."""
        self._run_counts[cell.id] += 1
        with self._turns.take(alone=cell.storage is not None), self._processes.turn(cell):
            started_at_s, began_s = time.time(), time.monotonic()
            try:
                return self._observe(cell, started_at_s, began_s)
            except LeverMissing as lack:
                return replace(_not_observed(cell, "", started_at_s, time.monotonic() - began_s), skipped=str(lack))
            except HarnessError as error:
                return _not_observed(cell, str(error), started_at_s, time.monotonic() - began_s)

    def _observe(self, cell: Cell, started_at_s: float, began_s: float) -> Observation:
        if not self.runnable((cell,)):
            raise LeverMissing(f"{cell.engine} does not run here: it belongs to a profile (COMPOSE_PROFILES=extra)")
        before = self._prepare(cell)
        journal = Tail(journal_path(self._stack.evidence_dir, cell.engine))
        log = Tail(self._stack.evidence_dir / cell.engine / ENGINE_LOG_NAME)
        with self._storage.laid(cell) as watch:
            with self._struck(cell) as strike:
                records = self._send_all(cell, journal, began_s)
            since = self._since(cell, before)
            for planned in _after_requests(cell):
                self._settle(cell, since)
                records += (self._send(cell, planned, len(records), began_s),)
            settled = self._settle(cell, since)
        if (cell.storage or cell.process) and self._state(cell.engine).healthy:
            reloads = self._reload(cell, len(records), began_s)
            records += reloads
            settled = reloads != () and self._settle(cell, since)
        if not settled:
            self._unsettled.add(cell.engine)
        return Observation(
            cell_id=cell.id,
            requests=records,
            before=before,
            after=self._state(cell.engine),
            settled=settled,
            events=journal.events(),
            log_lines=log.lines(),
            started_at_s=started_at_s,
            duration_s=time.monotonic() - began_s,
            volume=watch.record() if cell.storage else strike.volume(),
            process=watch.save if cell.storage else strike.record(),
        )

    def _struck(self, cell: Cell) -> AbstractContextManager[Strike]:
        if cell.process is None:
            return nullcontext(Strike())
        victim = victim_of(cell).prompt_id
        return self._processes.struck(cell, self._prompts[victim], self._storage.keys[victim])

    def _since(self, cell: Cell, before: EngineState) -> EngineState:
        """What the engine's rest is measured by: one that was struck on purpose has begun anew."""
        if cell.process is None:
            return before
        return replace(before, restart_count=self._stack.restart_count(cell.engine))

    def _reload(self, cell: Cell, index: int, began_s: float) -> tuple[RequestRecord, ...]:
        """The victim's prompt again, now that the files were put back, from the store. Not where the engine still holds
        blocks: with its old prefix cache it would not load them again, and what it holds is a finding of its own."""
        try:
            self._reset(cell.engine)
        except BlocksHeld:
            return ()
        return (self._send(cell, _asked_again(cell, Role.RELOAD), index, began_s),)

    def _prepare(self, cell: Cell) -> EngineState:
        if cell.engine in self._unsettled:
            # Where the engine cannot be killed, the reset below may be refused, and says what is held.
            with contextlib.suppress(LeverMissing):
                self._restart(cell.engine)
            self._unsettled.discard(cell.engine)
        self._stack.wait_ready((cell.engine,), RESTART_DEADLINE_S, self._progress)
        self._reset(cell.engine)
        return self._state(cell.engine)

    def _restart(self, service: str) -> None:
        """Have an engine killed that does not come to rest, and wait until it is gone. Raises HarnessError."""
        restart_count = self._stack.restart_count(service)
        self._stack.kill_engine(service)
        gone = wait_until(lambda: self._stack.restart_count(service) > restart_count, KILL_DEADLINE_S, SETTLE_POLL_S)
        if not gone:
            raise StackError(self._stack.report(service, f"still there {KILL_DEADLINE_S:g} s after it was killed"))

    def _reset(self, service: str) -> None:
        """Empty the engine's prefix cache. Raises BlocksHeld or another StackError with the end of the engine's log."""
        try:
            self._stack.client(service).reset_prefix_cache()
        except BlocksHeld as error:
            raise BlocksHeld(self._stack.report(service, str(error))) from None
        except HarnessError as error:
            raise StackError(self._stack.report(service, str(error))) from None

    def _send_all(self, cell: Cell, journal: Tail, began_s: float) -> tuple[RequestRecord, ...]:
        def send(planned: PlannedRequest, index: int, departure: Departure) -> RequestRecord:
            return self._send(cell, planned, index, began_s, departure)

        def request_count() -> int:
            state = self._state(cell.engine)
            return state.running_count + state.waiting_count

        return send_all(cell, send, Cues(journal.events, request_count))

    def _send(
        self, cell: Cell, planned: PlannedRequest, index: int, began_s: float, departure: Departure | None = None
    ) -> RequestRecord:
        count, prompt = self._run_counts[cell.id], self._prompts[planned.prompt_id]
        tag = ".".join([cell.id, str(index), *([] if count == 1 else [f"again-{count}"]), planned.role])
        sent_s = time.monotonic() - began_s
        completion = self._stack.client(cell.engine).complete(
            prompt,
            LoadControl(tag=tag, load=planned.load, fault=planned.fault, hold=hold_for(cell, planned, prompt)),
            max_tokens=cell.max_tokens,
            stream=planned.stream,
            deadline_s=planned.deadline_s or cell.deadline_s,
            chat=planned.chat,
            departure=departure,
        )
        return RequestRecord(planned, tag, sent_s, completion)

    def _settle(self, cell: Cell, before: EngineState) -> bool:
        """Whether the queues are empty and no more blocks held than before, within SETTLE_DEADLINE_S seconds.

        Nothing but /metrics is asked meanwhile: an engine must get there without other traffic.
        """

        def settled() -> bool:
            now = self._state(cell.engine)
            idle = not now.running_count and not now.waiting_count and now.cache_usage <= before.cache_usage
            # A dead engine will not settle; the judge sees its restart count.
            return idle or now.restart_count > before.restart_count

        return wait_until(settled, SETTLE_DEADLINE_S, SETTLE_POLL_S)

    def _state(self, service: str) -> EngineState:
        client, restart_count = self._stack.client(service), self._stack.restart_count(service)
        try:
            queue = client.queue_state()
        except StackError:
            return EngineState(False, 0, 0, 0.0, restart_count)
        return EngineState(
            client.is_healthy(),
            queue.running_count,
            queue.waiting_count,
            queue.cache_usage,
            restart_count,
            queue.preemption_count,
        )

    def _complete(self, service: str, prompt: Prompt, control: LoadControl, max_tokens: int) -> Completion:
        client: EngineClient = self._stack.client(service)
        return client.complete(prompt, control, max_tokens=max_tokens, stream=True, deadline_s=RESTART_DEADLINE_S)


class _Turns:
    """Many cells at a time, or one alone; who wants to be alone is let in before others come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside, self._wanting_to_be_alone, self._is_alone = 0, 0, False

    @contextmanager
    def take(self, *, alone: bool) -> Iterator[None]:
        self._enter(alone)
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._is_alone = False
                self._changed.notify_all()

    def _enter(self, alone: bool) -> None:
        with self._changed:
            self._wanting_to_be_alone += alone
            self._changed.wait_for(lambda: self._inside == 0 if alone else not self._must_wait())
            self._wanting_to_be_alone -= alone
            self._inside += 1
            self._is_alone = alone

    def _must_wait(self) -> bool:
        return self._is_alone or self._wanting_to_be_alone > 0


def _after_requests(cell: Cell) -> tuple[PlannedRequest, ...]:
    """The canary: the victim's prompt again, without a fault. After a silent fault the engine's prefix cache is
    wrong by design, so there is nothing to ask."""
    if victim_of(cell).fault.kind is FaultKind.SILENT:
        return ()
    return (_asked_again(cell, Role.CANARY),)


def _asked_again(cell: Cell, role: Role) -> PlannedRequest:
    """The victim's prompt, asked in the same way, without a fault."""
    victim = victim_of(cell)
    return PlannedRequest(role, victim.prompt_id, victim.load, stream=victim.stream, chat=victim.chat)


def _not_observed(cell: Cell, error: str, started_at_s: float, duration_s: float) -> Observation:
    return Observation(
        cell_id=cell.id,
        requests=(),
        before=GONE,
        after=GONE,
        settled=False,
        events=(),
        log_lines=(),
        started_at_s=started_at_s,
        duration_s=duration_s,
        error=error,
    )
