"""Talks to one vLLM engine over HTTP and turns whatever comes back into plain values.

The runner, the stacks and the faults call it, from several threads at once; it is also the tokenizer of prompts. Every
call opens its own connection, so that a kept-alive connection which the server closes between two requests is never
taken for a crash, and nothing is ever sent twice. Proxy settings of the environment are ignored.

What the engine does to a completion (an error, half a stream, a reset, silence) is an observation and comes back
in the `Completion`; the other calls raise StackError.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import requests
import urllib3
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ValidationError
from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_fixed

from harness.errors import BlocksHeld, HarnessError, StackError
from harness.records import Completion, Prompt
from harness.running.completions import Departure, Draft, first_problem, path_and_body, refusal
from services.faults import LoadControl

CALL_TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 2**26
"""Of a short call; a prompt's token ids or the metrics have far fewer."""
HEALTH_TIMEOUT_S = 1.0
RESET_TIMEOUT_S = 5.0
RESET_POLL_S = 0.1
EVENT_PREFIX = b"data: "
STREAM_END = b"[DONE]"
METRICS_USED = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
)

Shape = TypeVar("Shape", bound=BaseModel)


class QueueState(NamedTuple):
    """Requests running and waiting, the share of KV blocks held by requests (0..1), and how often requests were
    preempted since the engine started."""

    running_count: int
    waiting_count: int
    cache_usage: float
    preemption_count: int


class _Tokens(BaseModel):
    tokens: tuple[int, ...]


class _Text(BaseModel):
    prompt: str


class _Version(BaseModel):
    version: str


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


class _Reset(BaseModel):
    success: bool


@dataclass(frozen=True)
class _Reply:
    """A whole answer to one of the short calls."""

    url: str
    status_code: int
    content: bytes


class EngineClient:
    """One engine. Safe to use from several threads."""

    def __init__(self, base_url: str) -> None:
        """`base_url` is for example `http://127.0.0.1:8100`. Connects to nothing yet."""
        self.base_url = base_url.rstrip("/")
        self._model_name = ""

    def complete(
        self,
        prompt: Prompt,
        control: LoadControl,
        *,
        max_tokens: int,
        stream: bool,
        deadline_s: float,
        chat: bool = False,
        departure: Departure | None = None,
    ) -> Completion:
        """Generate greedily; the connector gets `control`. Sent once, never again.

        Never raises for what the engine does. `status_code` is the HTTP status, 0 where no answer began; a
        stream that broke off keeps its status and the tokens that came. Once `deadline_s` seconds have passed
        the connection is closed, which makes the engine abort the request, and `timed_out` is set; when the client
        leaves through `departure` likewise, and `gave_up` is set.
        """
        draft = Draft(time.monotonic(), deadline_s)
        try:
            path, body = path_and_body(
                self.model_name(deadline_s), prompt, control, max_tokens=max_tokens, stream=stream, chat=chat
            )
            self._exchange(draft, path, body, control.tag, departure or Departure())
        except ValidationError as error:
            draft.break_off(f"the answer cannot be read: {first_problem(error)}")
        except ValueError as error:
            draft.break_off(f"the answer cannot be read: {error}")
        except (StackError, requests.RequestException, urllib3.exceptions.HTTPError) as error:
            draft.break_off(root_cause(error))
        if draft.gave_up:
            draft.give_up()
        elif draft.timed_out or draft.remaining_s() <= 0:
            draft.time_out()
        return draft.to_completion()

    def _exchange(self, draft: Draft, path: str, body: dict[str, object], tag: str, departure: Departure) -> None:
        headers = {"X-Request-Id": tag} if tag else {}
        url, timeout_s = f"{self.base_url}{path}", max(draft.remaining_s(), 0.001)
        with (
            _session() as session,
            session.post(url, json=body, headers=headers, stream=True, timeout=timeout_s) as response,
            _cut_off_after(draft.remaining_s(), response, draft.time_out),
            departure.closing(lambda: _hang_up(response, draft.give_up)),
        ):
            draft.status_code = response.status_code
            if response.status_code != 200:
                draft.error = refusal(response.content)
            elif body["stream"]:
                _receive_stream(draft, response)
            else:
                draft.add(response.content)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The token ids of `text` as a prompt, the model's own special tokens included."""
        return self._ask(_Tokens, "POST", "/tokenize", {"model": self.model_name(), "prompt": text}).tokens

    def tokenize_chat(self, message: str) -> tuple[int, ...]:
        """The token ids of the prompt that the model's chat template makes of a user's message. Raises StackError
        where the model has no such template."""
        messages = [{"role": "user", "content": message}]
        return self._ask(_Tokens, "POST", "/tokenize", {"model": self.model_name(), "messages": messages}).tokens

    def detokenize(self, token_ids: tuple[int, ...]) -> str:
        return self._ask(_Text, "POST", "/detokenize", {"model": self.model_name(), "tokens": list(token_ids)}).prompt

    def reset_prefix_cache(self) -> None:
        """Empty the engine's own prefix cache (not the connector's store).

        Raises HarnessError when the engine lacks the endpoint, BlocksHeld when it still refuses after RESET_TIMEOUT_S
        seconds, which it does while anything holds KV blocks.
        """
        attempts = Retrying(
            retry=retry_if_result(lambda done: not done),
            stop=stop_after_delay(RESET_TIMEOUT_S),
            wait=wait_fixed(RESET_POLL_S),
        )
        try:
            attempts(self._reset_once)
        except RetryError:
            raise BlocksHeld(
                f"{self.base_url}: the prefix cache could not be reset for {RESET_TIMEOUT_S:g} s: something still "
                "holds KV blocks; /metrics shows vllm:num_requests_running and vllm:kv_cache_usage_perc"
            ) from None

    def _reset_once(self) -> bool:
        response = self._call("POST", "/reset_prefix_cache")
        if response.status_code == 404:
            raise HarnessError(
                f"{self.base_url}: the engine has no /reset_prefix_cache; start it with VLLM_SERVER_DEV_MODE=1, "
                "because each cell needs an empty prefix cache"
            )
        self._check(response)
        # Some vLLM releases answer with an empty body.
        return not response.content or self._read(_Reset, response).success

    def is_healthy(self) -> bool:
        """Whether /health answers 200 within HEALTH_TIMEOUT_S seconds. Never raises for what the engine does."""
        try:
            return self._call("GET", "/health", timeout_s=HEALTH_TIMEOUT_S).status_code == 200
        except StackError:
            return False

    def check_listening(self) -> None:
        """Raises StackError with the reason when nothing answers at the address."""
        self._call("GET", "/health")

    def version(self) -> str:
        """The engine's vLLM version."""
        return self._ask(_Version, "GET", "/version").version

    def model_name(self, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """The first name under which the engine serves its model; asked once."""
        if not self._model_name:
            models = self._ask(_Models, "GET", "/v1/models", timeout_s=timeout_s).data
            if not models:
                raise StackError(f"{self.base_url}/v1/models: no model is served there")
            self._model_name = models[0].id
        return self._model_name

    def block_size(self) -> int:
        """Tokens in one KV block, at least 1."""
        return self._cache_count("block_size")

    def num_gpu_blocks(self) -> int:
        """KV blocks the engine has (vLLM calls them GPU blocks on the CPU, too)."""
        return self._cache_count("num_gpu_blocks")

    def queue_state(self) -> QueueState:
        """Now, from /metrics: counts over all engine cores, usage of the fullest."""
        metrics = self._metrics()
        try:
            return QueueState(
                running_count=int(_total(metrics["vllm:num_requests_running"])),
                waiting_count=int(_total(metrics["vllm:num_requests_waiting"])),
                cache_usage=max(sample.value for sample in metrics["vllm:kv_cache_usage_perc"].samples),
                preemption_count=int(_total(metrics["vllm:num_preemptions"])),
            )
        except (ValueError, OverflowError) as error:
            raise StackError(f"{self.base_url}/metrics: {error}") from None

    def _cache_count(self, name: str) -> int:
        text = self._cache_config.get(name, "missing")
        if not text.isdecimal() or int(text) == 0:
            raise StackError(f"{self.base_url}/metrics: {name} of vllm:cache_config_info is {text}, not a count")
        return int(text)

    @cached_property
    def _cache_config(self) -> dict[str, str]:
        return dict(self._metrics()["vllm:cache_config_info"].samples[0].labels)

    def _metrics(self) -> dict[str, Metric]:
        """One reading of /metrics. Raises StackError when a metric used here is missing."""
        response = self._check(self._call("GET", "/metrics"))
        text = response.content.decode(errors="replace")
        try:
            metrics = {metric.name: metric for metric in text_string_to_metric_families(text) if metric.samples}
        except ValueError as error:
            raise StackError(f"{response.url}: these are no metrics: {error}") from None
        missing = [name for name in METRICS_USED if name not in metrics]
        if missing:
            raise StackError(f"{response.url}: no {', '.join(missing)}; is this vLLM with its metrics switched on?")
        return metrics

    def _ask(
        self,
        shape: type[Shape],
        method: str,
        path: str,
        body: dict[str, object] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Shape:
        return self._read(shape, self._check(self._call(method, path, body, timeout_s)))

    def _call(
        self, method: str, path: str, body: dict[str, object] | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> _Reply:
        url, is_late = f"{self.base_url}{path}", threading.Event()
        try:
            with (
                _session() as session,
                session.request(method, url, json=body, timeout=timeout_s, stream=True) as response,
                _cut_off_after(timeout_s, response, is_late.set),
            ):
                reply = _Reply(url, response.status_code, _content(response))
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise StackError(f"{url}: {'timed out' if is_late.is_set() else root_cause(error)}") from None
        if is_late.is_set():
            raise StackError(f"{url}: timed out")
        return reply

    def _check(self, response: _Reply) -> _Reply:
        if response.status_code != 200:
            raise StackError(f"{response.url}: HTTP {response.status_code}: {refusal(response.content)}")
        return response

    def _read(self, shape: type[Shape], response: _Reply) -> Shape:
        try:
            return shape.model_validate_json(response.content)
        except ValidationError as error:
            raise StackError(f"{response.url}: not what vLLM answers here: {first_problem(error)}") from None


def root_cause(error: BaseException) -> str:
    """What happened below all wrappers, in words: "Connection refused", "timed out"."""
    cause = error.__cause__ or error.__context__
    if cause is not None and not (error.__suppress_context__ and error.__cause__ is None):
        return root_cause(cause)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _session() -> requests.Session:
    session = requests.Session()
    session.trust_env = False
    session.headers["Connection"] = "close"
    return session


def _content(response: requests.Response) -> bytes:
    """The whole body. Raises StackError for one that no engine would send."""
    content = bytearray()
    for chunk in response.iter_content(ANSWER_BYTES_MAX):
        content += chunk
        if len(content) > ANSWER_BYTES_MAX:
            raise StackError(f"{response.url}: the answer has more than {ANSWER_BYTES_MAX} bytes")
    return bytes(content)


@contextlib.contextmanager
def _cut_off_after(limit_s: float, response: requests.Response, note: Callable[[], None]) -> Iterator[None]:
    """Ends a read that is still going on then, however many bytes trickle in: a socket timeout starts anew with each
    of them."""
    timer = threading.Timer(max(limit_s, 0), _hang_up, (response, note))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _hang_up(response: requests.Response, note: Callable[[], None]) -> None:
    note()
    # ValueError, RuntimeError, OSError: the last byte has just been read and the connection is given back.
    with contextlib.suppress(ValueError, RuntimeError, OSError):
        response.raw.shutdown()


def _receive_stream(draft: Draft, response: requests.Response) -> None:
    for line in response.iter_lines():
        if draft.gave_up:
            # What had already arrived is not read by who has left.
            return
        if not line.startswith(EVENT_PREFIX):
            continue
        data = line.removeprefix(EVENT_PREFIX)
        if data == STREAM_END:
            return
        draft.add(data)
        if draft.token_ids and not draft.ttft_s:
            draft.ttft_s = draft.elapsed_s()
    if not draft.error:
        draft.break_off("the stream ended without [DONE]")


def _total(metric: Metric) -> float:
    """Over all engine cores; a counter's samples of when it was created are none of its values."""
    return sum(sample.value for sample in metric.samples if not sample.name.endswith("_created"))
