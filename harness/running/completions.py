"""What is asked of vLLM's completion APIs, and how an answer is taken in, piece by piece, until it is a Completion.

`client.py` sends and receives; nothing here knows HTTP. A chat is asked with a user's message, everything else with
token ids; both give tokens and top-k lists of the same form.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pydantic import BaseModel, ValidationError

from harness.records import Completion, Prompt, TokenChoice
from services.faults import LoadControl, to_params

TOP_COUNT = 5
ERROR_CHARS_MAX = 500
TOKEN_PREFIX = "token_id:"


class _TopEntry(BaseModel):
    token: str
    logprob: float


class _Position(BaseModel):
    top_logprobs: list[_TopEntry]


class _Logprobs(BaseModel):
    """`top_logprobs` in completions, `content` in chats."""

    top_logprobs: list[dict[str, float] | None] = []
    content: list[_Position] | None = None

    def lists(self) -> Iterator[dict[str, float]]:
        yield from (entry or {} for entry in self.top_logprobs)
        yield from ({entry.token: entry.logprob for entry in at.top_logprobs} for at in self.content or ())


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    """`text` in completions; in chats `message`, or `delta` in a stream."""

    text: str = ""
    message: _Message = _Message()
    delta: _Message = _Message()
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Usage(BaseModel):
    prompt_tokens: int = 0


class _Error(BaseModel):
    message: str
    type: str = "error"


class _Answer(BaseModel):
    """A whole completion, one event of a stream, or a refusal."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


@dataclass
class Draft:
    """A completion while it arrives."""

    began_s: float
    deadline_s: float
    status_code: int = 0
    error: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    top: list[tuple[TokenChoice, ...]] = field(default_factory=list)
    prompt_token_count: int = 0
    ttft_s: float = 0.0
    timed_out: bool = False
    broken_off: bool = False
    gave_up: bool = False

    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    def remaining_s(self) -> float:
        return self.deadline_s - self.elapsed_s()

    def add(self, data: bytes) -> None:
        """Take in a whole answer or one stream event. Raises ValidationError for what no engine sends."""
        answer = _Answer.model_validate_json(data)
        if answer.error:
            self.error = f"{answer.error.type}: {answer.error.message}"
        if answer.usage:
            self.prompt_token_count = answer.usage.prompt_tokens
        for choice in answer.choices:
            self._add_choice(choice)

    def _add_choice(self, choice: _Choice) -> None:
        self.text += choice.text + (choice.message.content or "") + (choice.delta.content or "")
        self.token_ids += choice.token_ids or []
        self.finish_reason = choice.finish_reason or self.finish_reason
        if choice.logprobs:
            self.top += [_top_list(entry) for entry in choice.logprobs.lists()]

    def break_off(self, error: str) -> None:
        self.broken_off = True
        self.error = error

    def give_up(self) -> None:
        self.gave_up = True
        self.error = "the client gave up"

    def time_out(self) -> None:
        self.timed_out = True
        self.error = f"no complete answer within {self.deadline_s:g} s"

    def to_completion(self) -> Completion:
        return Completion(
            status_code=self.status_code,
            error=self.error,
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            top=tuple(self.top),
            prompt_token_count=self.prompt_token_count,
            ttft_s=self.ttft_s,
            duration_s=self.elapsed_s(),
            timed_out=self.timed_out,
            broken_off=self.broken_off,
            gave_up=self.gave_up,
        )


class Departure:
    """A client's way to leave before its answer is whole. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._close: Callable[[], None] | None = None
        self._has_left = False

    def leave(self) -> None:
        """Close the connection, now or as soon as there is one; nothing where the answer is whole by then."""
        with self._lock:
            self._has_left = True
            if self._close:
                self._close()

    @contextmanager
    def closing(self, close: Callable[[], None]) -> Iterator[None]:
        """While this lasts, `leave` calls `close`."""
        with self._lock:
            self._close = close
            if self._has_left:
                close()
        try:
            yield
        finally:
            with self._lock:
                self._close = None


def path_and_body(
    model: str, prompt: Prompt, control: LoadControl, *, max_tokens: int, stream: bool, chat: bool
) -> tuple[str, dict[str, object]]:
    """Where to POST, and what: greedy, with the ids and the TOP_COUNT likeliest tokens of each position."""
    body: dict[str, object] = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "seed": 0,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "kv_transfer_params": to_params(control),
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    if not chat:
        return "/v1/completions", {**body, "prompt": list(prompt.token_ids), "logprobs": TOP_COUNT}
    messages = [{"role": "user", "content": prompt.message}]
    return "/v1/chat/completions", {**body, "messages": messages, "logprobs": True, "top_logprobs": TOP_COUNT}


def refusal(content: bytes) -> str:
    """The message in an error body, or the body itself where it is not vLLM's."""
    try:
        error = _Answer.model_validate_json(content).error
    except ValidationError:
        error = None
    if error:
        return f"{error.type}: {error.message}"
    return content[:ERROR_CHARS_MAX].decode(errors="replace") or "empty answer"


def first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    return f"{problem['msg']} @ {'.'.join(map(str, problem['loc'])) or 'the whole'}"


def _top_list(entry: dict[str, float]) -> tuple[TokenChoice, ...]:
    choices = [TokenChoice(int(name.removeprefix(TOKEN_PREFIX)), logprob) for name, logprob in entry.items()]
    return tuple(sorted(choices, key=lambda choice: (-choice.logprob, choice.token_id)))
