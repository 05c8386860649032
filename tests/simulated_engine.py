"""A stand-in for kvproof's engines: honest, or wrong in one way of ways_to_be_wrong.py.

test_power.py attaches the harness to four of them. To the harness they are vLLM behind FaultInjectingConnector: the
same HTTP answers, the same journal.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

from harness.records import Role
from harness.runner import PREFILL
from harness.stack import AttachStack
from services.faults import NO_FAULT, FaultKind, LoadMode, parse_control
from services.journal import EventName, Journal
from tests.engines import ENGINES
from tests.fake_server import Behaviour, FakeHttpServer, Handler, engine_behaviours, refuse, reply, reset, stream
from tests.ways_to_be_wrong import (
    Answer,
    Blocks,
    Harm,
    Request,
    Tokens,
    Wrong,
    altered,
    detokenize,
    failure,
    garbage,
    harm,
    recovers,
    right,
    stored,
    tokenize,
    top_list,
)

Attached = TypeVar("Attached", bound=AttachStack)

BLOCK_SIZE = 32
CACHE_SHARE = 0.125
"""Of the KV blocks, held by each running request."""
REPAIR_S = 0.05
"""How long a load that is broken keeps a stream waiting: time for its client to leave."""
PARTNER_DEADLINE_S = 5.0
LOAD_COUNT_MAX = 4
"""After so many loads that cannot be used a request is computed."""


class SimulatedEngine:
    """One service. `store` has the prefixes that the producer saved; it belongs to all engines of a test.

    Unlike vLLM's, its /reset_prefix_cache also ends what `Wrong.LEAKS_*` left, so that the next cell starts clean.
    """

    def __init__(self, service: str, store: set[Tokens], evidence_dir: Path, wrong: Wrong) -> None:
        self.service, self._store, self._wrong = service, store, wrong
        self._policy = ENGINES[service].policy if service in ENGINES else ""
        self._journal = Journal(evidence_dir, service)
        self._changed = threading.Condition()
        self._cache: dict[Tokens, bool] = {}
        self._previous_answer = Answer()
        self._to_swap: defaultdict[str, dict[str, Answer]] = defaultdict(dict)
        self._running_count, self._leaked_cache_usage = 0, 0.0
        self._start()

    # HTTP.

    def behaviour(self, path: str, body: dict[str, object]) -> Behaviour:
        """What to do with a request; everything but the sending has happened then."""
        if not self._is_alive:
            return self._come_back() if path == "/health" else reset
        match path:
            case "/v1/completions":
                return self._complete(body)
            case "/tokenize":
                return reply({"tokens": tokenize(str(body["prompt"]))})
            case "/detokenize":
                return reply({"prompt": detokenize(tuple(body["tokens"]))})  # type: ignore[arg-type]
            case "/metrics":
                return refuse(200, self._metrics().encode())
            case "/reset_prefix_cache":
                self._reset()
        return engine_behaviours()[path]

    def _metrics(self) -> str:
        usage = self._running_count * CACHE_SHARE + self._leaked_cache_usage
        return f"""\
vllm:num_requests_running {self._running_count}
vllm:num_requests_waiting 0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total 0
vllm:kv_cache_usage_perc {usage}
vllm:cache_config_info{{block_size="{BLOCK_SIZE}",num_gpu_blocks="728"}} 1
"""

    def _reset(self) -> None:
        self._cache.clear()
        self._running_count, self._leaked_cache_usage = 0, 0.0

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

    def _complete(self, body: dict[str, object]) -> Behaviour:
        request = self._read(body)
        self._occupy(1, 0.0)
        self._previous_answer = answer = self._altered(request, self._serve(request))
        self._write(EventName.RELEASED, request)
        keeps_request = request.is_broken and self._wrong is Wrong.LEAKS_REQUEST
        keeps_blocks = request.is_broken and self._wrong is Wrong.LEAKS_BLOCKS
        self._occupy(0 if keeps_request else -1, CACHE_SHARE if keeps_blocks else 0.0)
        if request.is_broken and self._wrong is Wrong.DIES:
            self._die()
            return reset
        if request.is_broken and self._wrong is Wrong.HANGS:
            return wait_until_hung_up
        return sending(request, answer)

    def _read(self, body: dict[str, object]) -> Request:
        control = parse_control(body["kv_transfer_params"])  # type: ignore[arg-type]
        prompt: Tokens = tuple(body["prompt"])  # type: ignore[arg-type]
        request = Request(prompt, control, int(str(body["max_tokens"])), bool(body["stream"]), self._policy)
        if control.fault != NO_FAULT and self._wrong is Wrong.REJECTS_FAULTS:
            self._write(EventName.REJECTED, request, reason="this engine was started without faults")
            return replace(request, control=replace(control, fault=NO_FAULT))
        return request

    def _occupy(self, request_count: int, leaked_cache_usage: float) -> None:
        with self._changed:
            self._running_count += request_count
            self._leaked_cache_usage += leaked_cache_usage

    def _serve(self, request: Request) -> Answer:
        """As the connector and vLLM do it: look into the own cache, load from the store, repair or fail, keep."""
        keys = prefixes(request.prompt)
        if self.service == PREFILL:
            return self._saved(request, keys)
        cached = self._cached(keys)
        done = self._load(request, keys, len(cached))
        loaded = (*cached, *(block not in done.garbage for block in range(len(cached), len(keys))))
        first_bad = min(done.reported, default=len(keys))
        repaired = (*loaded[:first_bad], *(True for _ in loaded[first_bad:]))
        if self._wrong is Wrong.POISONED_CACHE:
            self._keep(keys, loaded)
        if done.fired and request.stream:
            time.sleep(REPAIR_S)
        if (done.reported or (done.fired and request.is_lost)) and self._policy == "fail":
            return failure(request)
        self._keep(keys, repaired)
        return right(request) if all(repaired) else garbage(request)

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
            assert self._changed.wait_for(lambda: len(answers) == 2, PARTNER_DEADLINE_S), "the partner never came"
            return next(other for role, other in answers.items() if role != request.role)

    # KV.

    def _cached(self, keys: tuple[Tokens, ...]) -> tuple[bool, ...]:
        """Of the leading blocks that the engine's own cache has: whether each is right."""
        with self._changed:
            return tuple(self._cache[key] for key in takewhile(self._cache.__contains__, keys))

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
        self._write(EventName.OFFERED, request, mode, blocks)
        if not blocks:
            return Harm()
        for load_index in range(LOAD_COUNT_MAX):
            self._write(EventName.PLANNED, request, mode, blocks)
            done = self._read_blocks(request, mode, blocks, load_index)
            self._journal_load(request, mode, blocks, done)
            if not offered_again(request, blocks, done):
                break
        return done

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


# Answers as vLLM sends them.


def sending(request: Request, answer: Answer) -> Behaviour:
    if answer.status == 0:
        return reset
    if answer.status != 200:
        return refuse(answer.status, json.dumps(error_body(answer)).encode())
    if request.stream:
        return stream(*stream_events(answer), end=answer.is_whole)
    choices = [choice(answer, 0, len(answer.token_ids))] if answer.token_ids else []
    return reply({"choices": choices, "usage": usage(answer), **error_body(answer)})


def wait_until_hung_up(handler: Handler) -> None:
    handler.connection.recv(1)


def stream_events(answer: Answer) -> Iterator[dict[str, object]]:
    for index in range(len(answer.token_ids)):
        yield {"choices": [choice(answer, index, index + 1)]}
    yield error_body(answer) or {"choices": [], "usage": usage(answer)}


def choice(answer: Answer, begin: int, end: int) -> dict[str, object]:
    token_ids = answer.token_ids[begin:end]
    tops = (top_list(token_id, index) for index, token_id in enumerate(token_ids, begin))
    is_last = end == len(answer.token_ids) and not answer.error
    return {
        "text": detokenize(token_ids),
        "token_ids": token_ids,
        "finish_reason": answer.finish_reason if is_last else None,
        "logprobs": {"top_logprobs": [{f"token_id:{token_id}": top[token_id] for token_id in top} for top in tops]},
    }


def usage(answer: Answer) -> dict[str, int]:
    return {"prompt_tokens": answer.prompt_token_count}


def error_body(answer: Answer) -> dict[str, object]:
    return {"error": {"message": answer.error, "type": "InternalServerError"}} if answer.error else {}


# Servers.


class EngineHandler(Handler):
    server: EngineServer

    def answer(self, body: bytes) -> None:
        self.server.engine.behaviour(self.path, json.loads(body or b"{}"))(self)


class EngineServer(FakeHttpServer):
    """`defects`: what went wrong in the simulation itself; the harness would take it for the engine's doing."""

    def __init__(self, engine: SimulatedEngine) -> None:
        super().__init__(("127.0.0.1", 0), EngineHandler)
        self.engine = engine
        self.defects: list[BaseException | None] = []

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is part of the tests."""
        if not isinstance(sys.exception(), ConnectionError):
            self.defects.append(sys.exception())


@contextmanager
def simulated_stack(evidence_dir: Path, wrong: Wrong) -> Iterator[AttachStack]:
    """A producer and all consumers, all `wrong` in the same way, in threads of this process."""
    evidence_dir.mkdir()
    store: set[Tokens] = set()
    engines = [SimulatedEngine(service, store, evidence_dir, wrong) for service in (PREFILL, *ENGINES)]
    with attached(engines, evidence_dir, None) as stack:
        yield stack


@contextmanager
def attached(
    engines: Iterable[SimulatedEngine],
    evidence_dir: Path,
    kv_dir: Path | None,
    kind: type[Attached] = AttachStack,  # type: ignore[assignment]
) -> Iterator[Attached]:
    with ExitStack() as running:
        servers = [running.enter_context(serving(engine)) for engine in engines]
        urls = {server.engine.service: f"http://127.0.0.1:{server.server_address[1]}" for server in servers}
        yield kind(urls, kv_dir, evidence_dir)
    assert [defect for server in servers for defect in server.defects] == []


@contextmanager
def serving(engine: SimulatedEngine) -> Iterator[EngineServer]:
    with EngineServer(engine) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
