"""What simulated engines say over HTTP, in vLLM's words, and the servers that say it.

simulated_engine.py decides what to answer. A chat is answered with the same tokens and lists as a completion, in the
form of the other API.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from harness.stack import AttachStack
from tests.fake_server import Behaviour, Client, FakeHttpServer, Handler, refuse, reply, reset, stream
from tests.simulated_requests import Answer, Request, detokenize, top_list

Attached = TypeVar("Attached", bound=AttachStack)


class Engine(Protocol):
    service: str

    def behaviour(self, path: str, body: dict[str, object], client: Client) -> Behaviour:
        """What to do with a request; everything but the sending has happened then."""


# Answers as vLLM sends them.


def sending(request: Request, answer: Answer) -> Behaviour:
    if request.client.is_gone:
        return send_nothing
    if answer.status == 0:
        return reset
    if answer.status != 200:
        return refuse(answer.status, json.dumps(error_body(answer)).encode())
    if request.stream:
        return stream(*stream_events(request, answer), end=answer.is_whole)
    choices = [choice(request, answer, 0, len(answer.token_ids))] if answer.token_ids else []
    return reply({"choices": choices, "usage": usage(answer), **error_body(answer)})


def send_nothing(_: Handler) -> None:
    """There is nobody to send it to."""


def wait_until_hung_up(handler: Handler) -> None:
    handler.connection.recv(1)


def stream_events(request: Request, answer: Answer) -> Iterator[dict[str, object]]:
    for index in range(len(answer.token_ids)):
        yield {"choices": [choice(request, answer, index, index + 1)]}
    yield error_body(answer) or {"choices": [], "usage": usage(answer)}


def choice(request: Request, answer: Answer, begin: int, end: int) -> dict[str, object]:
    """Of the answer the tokens from `begin` to `end`."""
    token_ids = answer.token_ids[begin:end]
    tops = [
        {f"token_id:{token_id}": logprob for token_id, logprob in top_list(token_ids[index - begin], index).items()}
        for index in range(begin, end)
    ]
    is_last = end == len(answer.token_ids) and not answer.error
    said = said_in_chat if request.is_chat else said_in_completion
    return {
        "token_ids": token_ids,
        "finish_reason": answer.finish_reason if is_last else None,
        **said(detokenize(token_ids), tops, stream=request.stream),
    }


def said_in_completion(text: str, tops: list[dict[str, float]], *, stream: bool) -> dict[str, object]:  # noqa: ARG001
    return {"text": text, "logprobs": {"top_logprobs": tops}}


def said_in_chat(text: str, tops: list[dict[str, float]], *, stream: bool) -> dict[str, object]:
    positions = [
        {"top_logprobs": [{"token": token, "logprob": logprob} for token, logprob in top.items()]} for top in tops
    ]
    message = {"role": "assistant", "content": text}
    return {"delta" if stream else "message": message, "logprobs": {"content": positions}}


def usage(answer: Answer) -> dict[str, int]:
    return {"prompt_tokens": answer.prompt_token_count}


def error_body(answer: Answer) -> dict[str, object]:
    return {"error": {"message": answer.error, "type": "InternalServerError"}} if answer.error else {}


# Servers.


class EngineHandler(Handler):
    server: EngineServer

    def answer(self, body: bytes) -> None:
        self.server.engine.behaviour(self.path, json.loads(body or b"{}"), Client(self))(self)


class EngineServer(FakeHttpServer):
    """`defects`: what went wrong in the simulation itself; the harness would take it for the engine's doing."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(("127.0.0.1", 0), EngineHandler)
        self.engine = engine
        self.defects: list[BaseException | None] = []

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is part of the tests."""
        if not isinstance(sys.exception(), ConnectionError):
            self.defects.append(sys.exception())


@contextmanager
def attached(
    engines: Iterable[Engine],
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
def serving(engine: Engine) -> Iterator[EngineServer]:
    with EngineServer(engine) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
