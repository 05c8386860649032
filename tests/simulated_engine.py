"""A stand-in for kvproof's engines: honest, or wrong in one way of ways_to_be_wrong.py.

test_power.py attaches the harness to four of them. To the harness they are vLLM behind FaultInjectingConnector: the
same HTTP answers, the same journal.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from math import inf
from pathlib import Path

from harness.records import Cell, Moment, Role
from harness.running.runner import PREFILL
from harness.stack import AttachStack
from services.faults import NO_FAULT, FaultKind, LoadMode, lookup_delay_s, parse_control
from services.journal import EventName, Journal
from tests.engines import ENGINES
from tests.fake_server import Behaviour, Client, engine_behaviours, refuse, reply, reset
from tests.simulated_http import attached, sending, wait_until_hung_up
from tests.simulated_requests import (
    BLOCK_SIZE,
    Answer,
    Blocks,
    Harm,
    Request,
    Tokens,
    detokenize,
    failure,
    garbage,
    right,
    tokenize,
)
from tests.simulated_scheduler import DEADLINE_S, Company, Pool, Step
from tests.ways_to_be_wrong import Wrong, altered, harm, keeps_given_up, recovers, resumes_on_bad, shows_repair, stored

BLOCK_COUNT = 727
BLOCK_COUNTS = {"decode-tight": 18}
"""KV blocks of services that have not BLOCK_COUNT."""
LOAD_COUNT_MAX = 4
"""After so many loads that cannot be used a request is computed."""


class StarvedError(Exception):
    """Whoever gets this waits for ever."""


class SimulatedEngine:
    """One service. `store` has the prefixes that the producer saved; it belongs to all engines of a test.

    Unlike vLLM's, its /reset_prefix_cache also ends what `Wrong.LEAKS_*` left, so that the next cell starts clean.
    """

    def __init__(
        self, service: str, store: set[Tokens], evidence_dir: Path, wrong: Wrong, cells: Iterable[Cell] = ()
    ) -> None:
        self.service, self._store, self._wrong = service, store, wrong
        self._policy = ENGINES[service].policy if service in ENGINES else ""
        self._cells = {cell.id: cell for cell in cells}
        self._journal = Journal(evidence_dir, service)
        self._changed = threading.Condition()
        self._cache: dict[Tokens, bool] = {}
        self._in_repair: dict[Tokens, bool] = {}
        self._previous_answer = Answer()
        self._to_swap: defaultdict[str, dict[str, Answer]] = defaultdict(dict)
        self._pool, self._company = Pool(BLOCK_COUNTS.get(service, BLOCK_COUNT)), Company()
        self._running: set[str] = set()
        self._start()

    # HTTP.

    def behaviour(self, path: str, body: dict[str, object], client: Client) -> Behaviour:
        """What to do with a request; everything but the sending has happened then."""
        if not self._is_alive:
            return self._come_back() if path == "/health" else reset
        match path:
            case "/v1/completions" | "/v1/chat/completions":
                return self._complete(self._read(body, client))
            case "/tokenize":
                return reply({"tokens": tokens_of(body)})
            case "/detokenize":
                return reply({"prompt": detokenize(tuple(body["tokens"]))})  # type: ignore[arg-type]
            case "/metrics":
                return refuse(200, self._metrics().encode())
            case "/reset_prefix_cache":
                self._reset()
        return engine_behaviours()[path]

    def _metrics(self) -> str:
        return f"""\
vllm:num_requests_running {len(self._running)}
vllm:num_requests_waiting 0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total {self._pool.preemption_count}
vllm:kv_cache_usage_perc {self._pool.usage}
vllm:cache_config_info{{block_size="{BLOCK_SIZE}",num_gpu_blocks="{BLOCK_COUNT + 1}"}} 1
"""

    def _reset(self) -> None:
        self._cache.clear()
        self._running.clear()
        self._pool.clear()

    # Life and death.

    def _start(self) -> None:
        self._is_alive = True
        self._journal.write(EventName.ENGINE_STARTED, reason="simulated", pid=1)
        self._journal.write(EventName.ENGINE_READY, pid=1)

    def _die(self) -> None:
        self._is_alive = False
        self._reset()
        self._journal.write(EventName.ENGINE_EXITED, reason="signal SIGKILL", pid=1)

    def _come_back(self) -> Behaviour:
        """Unhealthy this time, and up the next."""
        self._start()
        return refuse(503, b"")

    # Requests.

    def _complete(self, request: Request) -> Behaviour:
        self._running.add(request.tag)
        try:
            self._previous_answer = answer = self._altered(request, self._serve(request))
        except StarvedError:
            self._release(request)
            return wait_until_hung_up
        self._write(EventName.RELEASED, request)
        self._release(request)
        self._company.note(request, Step.ENDED)
        if self._is_killed_by(request):
            self._die()
            return reset
        if request.is_broken and self._wrong is Wrong.HANGS:
            return wait_until_hung_up
        return sending(request, answer)

    def _release(self, request: Request) -> None:
        leaks = request.client.is_gone and self._wrong is Wrong.DEPARTURE_LEAKS
        if leaks or (request.is_broken and self._wrong is Wrong.LEAKS_BLOCKS):
            self._pool.leak(request.tag)
        else:
            self._pool.give_back(request.tag)
        if not (request.is_broken and self._wrong is Wrong.LEAKS_REQUEST):
            self._running.discard(request.tag)

    def _is_killed_by(self, request: Request) -> bool:
        if self._wrong is Wrong.DEPARTURE_KILLS:
            return request.client.is_gone
        return request.is_broken and self._wrong is Wrong.DIES

    def _read(self, body: dict[str, object], client: Client) -> Request:
        control = parse_control(body["kv_transfer_params"])  # type: ignore[arg-type]
        is_chat = "messages" in body
        prompt: Tokens = tokens_of(body) if is_chat else tuple(body["prompt"])  # type: ignore[arg-type]
        max_tokens, is_stream = int(str(body["max_tokens"])), bool(body["stream"])
        cell = self._cells.get(control.tag.split(".")[0])
        request = Request(prompt, control, max_tokens, is_stream, self._policy, is_chat, client, cell)
        if control.fault != NO_FAULT and self._wrong is Wrong.REJECTS_FAULTS:
            self._write(EventName.REJECTED, request, reason="this engine was started without faults")
            return replace(request, control=replace(control, fault=NO_FAULT))
        return request

    def _serve(self, request: Request) -> Answer:
        """As the connector and vLLM do it: look into the own cache, load from the store, repair or fail, keep."""
        keys = prefixes(request.prompt)
        if self.service == PREFILL:
            return self._saved(request, keys)
        self._wait_behind_loads(request)
        cached = self._cached(keys)
        self._company.note(request, Step.LOOKED)
        self._take_blocks(request, len(cached))
        done = self._load(request, keys, len(cached))
        loaded = tuple(block not in done.garbage for block in range(len(cached), len(keys)))
        own = keys[len(cached) :]
        first_bad = min(done.reported, default=len(keys)) - len(cached)
        repaired = (*loaded[:first_bad], *(True for _ in loaded[first_bad:]))
        if self._wrong is Wrong.POISONED_CACHE:
            self._keep(own, loaded)
        with self._repair(request, own, loaded):
            self._go_on_beside_others(request, is_repaired=done.reported != ())
        if (done.reported or (done.fired and request.is_lost)) and self._policy == "fail":
            return failure(request)
        if self._ends_on_bad_blocks(request, own, loaded):
            return garbage(request)
        self._keep(own, repaired)
        return right(request) if all((*cached, *repaired)) else garbage(request)

    def _altered(self, request: Request, answer: Answer) -> Answer:
        is_of_pair = request.cell_id.endswith("-mix") and request.role in (Role.VICTIM, Role.BYSTANDER)
        if self._wrong is Wrong.ANSWERS_SWAPPED and is_of_pair:
            return self._swapped(request, answer)
        if self._wrong is Wrong.STALE_ANSWER and recovers(request):
            return self._previous_answer
        return altered(self._wrong, request, answer)

    def _swapped(self, request: Request, answer: Answer) -> Answer:
        """The other answer of the pair, once it is there."""
        with self._changed:
            answers = self._to_swap[request.cell_id]
            answers[request.role] = answer
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(answers) == 2, DEADLINE_S), "the partner never came"
            return next(other for role, other in answers.items() if role != request.role)

    # Requests beside each other.

    def _wait_behind_loads(self, request: Request) -> None:
        comes_after = request.planned is not None and request.planned.sent is Moment.LOADING
        if self._wrong is Wrong.PARKED_LOADS_BLOCK and comes_after:
            self._company.wait_for(request, [Role.VICTIM], Step.ENDED)

    def _take_blocks(self, request: Request, cached_count: int) -> None:
        count = -(-len(request.prompt) // BLOCK_SIZE) - cached_count
        if self._wrong is Wrong.FULL_POOL_IS_FINAL and not self._pool.has_room(count):
            raise StarvedError
        self._pool.take(request.tag, count)

    @contextmanager
    def _repair(self, request: Request, keys: tuple[Tokens, ...], loaded: tuple[bool, ...]) -> Iterator[None]:
        """While the blocks that could not be loaded are computed again."""
        is_shown = not all(loaded) and shows_repair(self._wrong, request)
        if is_shown:
            self._in_repair = dict(zip(keys, loaded, strict=True))
        yield
        if is_shown:
            self._in_repair = {}

    def _go_on_beside_others(self, request: Request, *, is_repaired: bool) -> None:
        """Be as slow as it takes the others of the cell to come, or the client to leave."""
        if is_repaired and request.role == Role.VICTIM:
            self._company.wait_for(request, [Role.SHARER], Step.LOOKED)
            if request.gives_up is Moment.REPAIR:
                request.client.wait_until_gone(DEADLINE_S)
        self._company.note(request, Step.COMPUTING)
        if request.planned and request.planned.sent is Moment.AHEAD:
            self._company.wait_for(request, [Role.VICTIM], Step.COMPUTING)
            if self._is_in_want_of_blocks(request):
                self._pool.grow(request.tag)
                self._company.wait_for(request, [Role.VICTIM], Step.PREEMPTED)
        elif request.role == Role.VICTIM and self._is_in_want_of_blocks(request):
            self._pool.wait_until_preempted(request.tag)
            self._company.note(request, Step.PREEMPTED)
            self._take_blocks(request, 0)

    def _is_in_want_of_blocks(self, request: Request) -> bool:
        return request.cell is not None and request.cell.preempts and self._wrong is not Wrong.PREEMPTS_NOBODY

    def _ends_on_bad_blocks(self, request: Request, keys: tuple[Tokens, ...], loaded: tuple[bool, ...]) -> bool:
        if request.client.is_gone and keeps_given_up(self._wrong, request):
            self._keep(keys, loaded)
        return not all(loaded) and self._is_in_want_of_blocks(request) and resumes_on_bad(self._wrong, request)

    # KV.

    def _cached(self, keys: tuple[Tokens, ...]) -> tuple[bool, ...]:
        """Of the leading blocks that the engine's own cache has: whether each is right."""
        with self._changed:
            there = {**self._in_repair, **self._cache}
            return tuple(there[key] for key in takewhile(there.__contains__, keys))

    def _keep(self, keys: tuple[Tokens, ...], are_right: tuple[bool, ...]) -> None:
        """A cached block that is wrong stays so, whoever computes it again."""
        with self._changed:
            for key, is_right in zip(keys, are_right, strict=True):
                self._cache[key] = is_right and self._cache.get(key, True)

    def _load(self, request: Request, keys: tuple[Tokens, ...], cached_count: int) -> Harm:
        """Load what the store has beyond the cached blocks, as the request's control says, and journal it."""
        control = request.control
        if control.load is LoadMode.OFF:
            return Harm()
        stored_count = stored(self._wrong, request, self._found(request, keys))
        blocks = tuple(range(cached_count, min(stored_count, control.offer_blocks)))
        mode = control.load if blocks and self._wrong is not Wrong.LOADS_SYNC else LoadMode.SYNC
        if not self._is_looked_up(request, mode, blocks):
            return Harm(fired=(blocks,))
        self._write(EventName.OFFERED, request, mode, blocks)
        if not blocks:
            return Harm()
        for load_index in range(LOAD_COUNT_MAX):
            self._write(EventName.PLANNED, request, mode, blocks)
            if request.gives_up is Moment.LOADING:
                request.client.wait_until_gone(DEADLINE_S)
            done = self._read_blocks(request, mode, blocks, load_index)
            self._journal_load(request, mode, blocks, done)
            if not offered_again(request, blocks, done):
                break
        return done

    def _is_looked_up(self, request: Request, mode: LoadMode, blocks: Blocks) -> bool:
        """In the end; an honest engine does not wait for ever."""
        delay_s = lookup_delay_s(request.control.fault, 0)
        if not blocks or not delay_s:
            return True
        self._write(EventName.FAULT_FIRED, request, mode, blocks, request.control.fault.kind)
        if self._wrong is Wrong.PENDING_IS_FINAL:
            raise StarvedError
        if delay_s < inf:
            time.sleep(delay_s)
        return delay_s < inf

    # What a store does; here it is a set of prefixes.

    def _saved(self, request: Request, keys: tuple[Tokens, ...]) -> Answer:
        self._store.update(keys)
        return right(request)

    def _found(self, request: Request, keys: tuple[Tokens, ...]) -> int:  # noqa: ARG002
        return sum(1 for _ in takewhile(self._store.__contains__, keys))

    def _read_blocks(self, request: Request, mode: LoadMode, blocks: Blocks, load_index: int) -> Harm:  # noqa: ARG002
        return harm(self._wrong, request, blocks, load_index)

    def _journal_load(self, request: Request, mode: LoadMode, blocks: Blocks, done: Harm) -> None:
        time.sleep(done.delay_s)
        if done.failed:
            self._write(EventName.FAILED, request, mode, done.failed)
        loaded = tuple(block for block in blocks if block not in done.failed)
        self._write(EventName.LOADED, request, mode, loaded, digests=done.digests)
        for fired in done.fired:
            self._write(EventName.FAULT_FIRED, request, mode, fired, request.control.fault.kind)
        if mode is LoadMode.ASYNC:
            self._write(EventName.FINISHED, request, mode)
        if done.journaled:
            self._write(EventName.REPORTED, request, mode, done.journaled)

    def _write(
        self,
        name: EventName,
        request: Request,
        mode: str = "",
        blocks: Blocks = (),
        reason: str = "",
        digests: tuple[str, ...] = (),
        keys: tuple[str, ...] = (),
    ) -> None:
        tag = request.control.tag
        self._journal.write(name, request=tag, mode=mode, blocks=blocks, reason=reason, digests=digests, keys=keys)


def offered_again(request: Request, blocks: Blocks, done: Harm) -> bool:
    """Whether nothing of a load could be used, and its connector, which does not know, has it all to offer again."""
    is_retried = request.control.fault.kind is FaultKind.REOFFER and request.policy == "recompute"
    return is_retried and blocks[0] in done.reported


def prefixes(prompt: Tokens) -> tuple[Tokens, ...]:
    """What identifies each whole block that can be loaded: all tokens up to its end."""
    return tuple(prompt[:end] for end in range(BLOCK_SIZE, len(prompt), BLOCK_SIZE))


def tokens_of(body: dict[str, object]) -> Tokens:
    """Of a text, or of what a chat template makes of a user's message."""
    if "messages" not in body:
        return tokenize(str(body["prompt"]))
    (message,) = body["messages"]  # type: ignore[misc]
    return tokenize(f"User: {message['content']}\nAssistant:")


@contextmanager
def simulated_stack(evidence_dir: Path, wrong: Wrong, cells: Iterable[Cell] = ()) -> Iterator[AttachStack]:
    """A producer and all consumers, all `wrong` in the same way, in threads of this process. `cells`: those in which
    requests wait for each other, or clients leave."""
    evidence_dir.mkdir()
    store: set[Tokens] = set()
    engines = [SimulatedEngine(service, store, evidence_dir, wrong, cells) for service in (PREFILL, *ENGINES)]
    with attached(engines, evidence_dir, None) as stack:
        yield stack
