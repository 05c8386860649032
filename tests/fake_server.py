"""A stand-in for vLLM's server, for the tests of client and stack only: HTTP by hand, so that it can misbehave."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_running{engine="1"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 3.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 3.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0"} 2.0
vllm:num_preemptions_total{engine="1"} 1.0
vllm:num_preemptions_created{engine="0"} 1.7e9
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",num_gpu_blocks="728"} 1.0
"""


class Handler(BaseHTTPRequestHandler):
    """Answers from `server.fake`; every connection serves one request, as the client asks."""

    protocol_version = "HTTP/1.1"
    server: FakeHttpServer

    def do_GET(self) -> None:
        self.answer(b"")

    def do_POST(self) -> None:
        self.answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def answer(self, body: bytes) -> None:
        fake = self.server.fake
        fake.requests.append((self.path, dict(self.headers), json.loads(body) if body else None))
        behaviour = fake.behaviours.get(self.path, refuse(404, b'{"detail":"Not Found"}'))
        behaviour(self)

    def send_whole(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Keeps the test output clean."""


Behaviour = Callable[[Handler], None]


class Client:
    """Who sent the request that `handler` answers, and may leave before there is an answer."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.is_gone = False

    def wait_until_gone(self, deadline_s: float) -> None:
        """Send the head of a stream, and wait until the client has closed the connection. AssertionError when it does
        not."""
        connection = self._handler.connection
        connection.settimeout(deadline_s)
        try:
            self._handler.begin_stream()
            assert connection.recv(1, socket.MSG_PEEK) == b"", "the client sends more than a request"
        except TimeoutError:
            raise AssertionError("the client never left") from None
        except ConnectionError:
            pass  # It left what had been sent to it unread.
        finally:
            connection.settimeout(None)
        self.is_gone = True


class FakeHttpServer(ThreadingHTTPServer):
    daemon_threads = True
    fake: FakeServer

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is part of the tests."""


@dataclass
class FakeServer:
    """What each path does, and the requests that came: (path, headers, JSON body)."""

    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str], object]] = field(default_factory=list)
    url: str = ""


def reply(content: object) -> Behaviour:
    return lambda handler: handler.send_whole(200, json.dumps(content).encode())


def refuse(status: int, content: bytes) -> Behaviour:
    return lambda handler: handler.send_whole(status, content)


def stream(*events: object, end: bool = True) -> Behaviour:
    """The events, then [DONE]; without `end` the connection just closes in the middle of the chunked body."""

    def behave(handler: Handler) -> None:
        handler.begin_stream()
        for event in events:
            handler.send_chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        if end:
            handler.send_chunk(b"data: [DONE]\n\n")
            handler.send_chunk(b"")

    return behave


def hang(*, seconds: float) -> Behaviour:
    return lambda _: time.sleep(seconds)


def reset(handler: Handler) -> None:
    """Close without a word."""
    handler.close_connection = True


def trickle(*, seconds: float) -> Behaviour:
    """One byte every 50 ms: no read ever times out."""

    def behave(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        for _ in range(int(seconds / 0.05)):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)

    return behave


def engine_behaviours() -> dict[str, Behaviour]:
    """A healthy engine without completions."""
    return {
        "/health": reply({}),
        "/version": reply({"version": "0.32.0"}),
        "/v1/models": reply({"object": "list", "data": [{"id": "kvproof-model"}]}),
        "/metrics": refuse(200, METRICS.encode()),
        "/tokenize": reply({"count": 2, "tokens": [504, 3575], "max_model_len": 2048}),
        "/detokenize": reply({"prompt": "The capital"}),
        "/reset_prefix_cache": reply({"success": True}),
    }


@contextmanager
def running() -> Iterator[FakeServer]:
    """A healthy engine on a free port, in threads of this process."""
    with FakeHttpServer(("127.0.0.1", 0), Handler) as server:
        server.fake = FakeServer(engine_behaviours())
        server.fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server.fake
        finally:
            server.shutdown()
            thread.join()


def serve(port: int) -> None:
    """A healthy engine in this process, until it is killed."""
    with FakeHttpServer(("127.0.0.1", port), Handler) as server:
        server.fake = FakeServer(engine_behaviours())
        print(f"serving on {port}", flush=True)
        server.serve_forever(poll_interval=0.02)


def supervise() -> int:
    """A stand-in for services/entrypoint.py: same environment, signals, journal and log; FAKE_MODE says how it errs.

    fine, exits (at once, code 7), bad-setting (code 64), bad-argument (code 2), engine-exits (first start fails, code
    5), stubborn (ignores SIGTERM), never-ready
    """
    from services.journal import ENGINE_LOG_NAME, EventName, Journal

    service, mode = os.environ["KVPROOF_SERVICE"], os.environ.get("FAKE_MODE", "fine")
    if mode == "exits":
        print("line one\nKVPROOF_ROLE: 'judge' is not a role", flush=True)
        return 7
    if mode in ("bad-setting", "bad-argument"):
        print("BLOCK_SIZE: 'banana' is no number", flush=True)
        return 64 if mode == "bad-setting" else 2
    watched = {signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    evidence_dir = Path(os.environ["KVPROOF_EVIDENCE_DIR"])
    journal = Journal(evidence_dir, service)
    action = {"engine-exits": "fail", "never-ready": "sleep"}.get(mode, "serve")
    while True:
        with (evidence_dir / service / ENGINE_LOG_NAME).open("ab") as log:
            engine = subprocess.Popen(
                [sys.executable, __file__, action, os.environ["KVPROOF_PORT"]],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        journal.write(EventName.ENGINE_STARTED, pid=engine.pid)
        if action == "serve":
            journal.write(EventName.ENGINE_READY)
        number = signal.sigwait(watched)
        while number == signal.SIGTERM and mode == "stubborn":
            number = signal.sigwait(watched)
        engine.kill()
        engine.wait()
        journal.write(EventName.ENGINE_EXITED, reason=f"exit code {engine.returncode}")
        if number == signal.SIGTERM:
            return 0
        if action == "fail":
            return 5
        signal.sigtimedwait({signal.SIGCHLD}, 0)


def main() -> int:
    match sys.argv[1:]:
        case ["serve", port]:
            serve(int(port))
        case ["fail", _]:
            print("ValueError: no such model", flush=True)
            return 5
        case ["sleep", _]:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD})
            signal.pause()
        case _:
            return supervise()
    return 0


if __name__ == "__main__":
    sys.exit(main())
