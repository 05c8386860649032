"""What a simulated engine is asked and answers: tokens, requests, answers, and what becomes of a load.

Pure: a prompt's answer depends on its tokens and on whether the KV of every block is right, and on nothing else.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from harness.records import Cell, Moment, PlannedRequest, Role
from services.faults import BROKEN_KINDS, LOST_KINDS, LoadControl
from tests.fake_server import Client

TIE_INDEX = 3
TIE_GAP = 5e-4
"""At this generated token the two leaders are this close, in nats: a near tie by the judge's smallest noise band."""

BLOCK_SIZE = 32

Tokens = tuple[int, ...]
Blocks = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """`policy`: the kv_load_failure_policy of the engine that got it. `cell`: the one it belongs to, where that is
    known; then it is known, too, who else is to come and who is to leave."""

    prompt: Tokens
    control: LoadControl
    max_tokens: int
    stream: bool
    policy: str
    is_chat: bool
    client: Client
    cell: Cell | None

    @property
    def tag(self) -> str:
        return self.control.tag

    @property
    def cell_id(self) -> str:
        """Of requests outside cells some other word, such as `oracle`."""
        return self.control.tag.split(".")[0]

    @property
    def role(self) -> str:
        """A Role; of requests outside cells some other word."""
        return self.control.tag.split(".")[-1]

    @property
    def is_again(self) -> bool:
        """Of the second attempt of a cell."""
        return any(word.startswith("again") for word in self.control.tag.split("."))

    @property
    def attempt(self) -> str:
        """The cell and the attempt at it."""
        return f"{self.cell_id} {self.is_again}"

    @property
    def index(self) -> int:
        """In its cell; only of requests in cells."""
        return int(self.control.tag.split(".")[1])

    @property
    def planned(self) -> PlannedRequest | None:
        """None for a request that is in no plan: oracles, canaries and the like."""
        if self.cell is None or not self.is_of_cell or self.index >= len(self.cell.requests):
            return None
        return self.cell.requests[self.index]

    @property
    def gives_up(self) -> Moment | None:
        return self.planned.gives_up if self.planned else None

    @property
    def is_of_cell(self) -> bool:
        return self.role in set(Role)

    @property
    def is_broken(self) -> bool:
        return self.control.fault.kind in BROKEN_KINDS

    @property
    def is_lost(self) -> bool:
        return self.control.fault.kind in LOST_KINDS


@dataclass(frozen=True)
class Answer:
    """`status` 0: the connection is closed without a word. `is_whole`: a stream ends with [DONE]."""

    token_ids: Tokens = ()
    prompt_token_count: int = 0
    finish_reason: str = "length"
    status: int = 200
    error: str = ""
    is_whole: bool = True


@dataclass(frozen=True)
class Harm:
    """What happens to a load: the blocks of each FAULT_FIRED event, the blocks that hold `garbage`, those `reported`
    to the engine and `journaled` as reported, and those that the store itself `failed`. `digests`: of what was read
    into the other blocks, if anything was read at all."""

    fired: tuple[Blocks, ...] = ()
    garbage: Blocks = ()
    reported: Blocks = ()
    journaled: Blocks = ()
    failed: Blocks = ()
    delay_s: float = 0.0
    digests: tuple[str, ...] = ()


# Tokens.


def tokenize(text: str) -> Tokens:
    """Words and signs; a token id is the bytes of the piece as a number, so no vocabulary is needed."""
    return tuple(int.from_bytes(piece.encode(), "big") for piece in re.findall(r" ?\w+|\W", text))


def detokenize(token_ids: Tokens) -> str:
    return b"".join(token_id.to_bytes(-(-token_id.bit_length() // 8), "big") for token_id in token_ids).decode()


WORDS = tokenize(" red blue green white black grey pink gold iron clay salt sand moss fern pine oak")


def generated(prompt: Tokens, count: int, *, is_right: bool) -> Tokens:
    """With the right KV the prompt's secret comes first."""
    secrets = re.findall(r"secret word of the \w+ is( \w+)", detokenize(prompt)) if is_right else []
    digest = hashlib.sha256(repr((prompt, is_right)).encode()).digest()
    words = tuple(WORDS[byte % len(WORDS)] for byte in digest)
    return (tokenize("".join(secrets[-1:])) + words)[:count]


def top_list(token_id: int, index: int) -> dict[int, float]:
    """Five log-probabilities for the generated token `index`; `token_id` leads, its rival comes next."""
    others = [word for word in WORDS if word not in (token_id, rival(token_id))]
    gap = TIE_GAP if index == TIE_INDEX else 2.0
    return {token_id: -0.5, rival(token_id): -0.5 - gap, **{others[i]: -5.0 - i for i in range(3)}}


def rival(token_id: int) -> int:
    """Of two words each is the other's."""
    return WORDS[WORDS.index(token_id) ^ 1] if token_id in WORDS else WORDS[0]


# Answers.


def right(request: Request) -> Answer:
    return Answer(generated(request.prompt, request.max_tokens, is_right=True), len(request.prompt))


def garbage(request: Request) -> Answer:
    return Answer(generated(request.prompt, request.max_tokens, is_right=False), len(request.prompt))


def failure(request: Request) -> Answer:
    """What vLLM answers when a load failed under policy `fail`; a stream has begun by then."""
    return Answer(prompt_token_count=len(request.prompt), status=200 if request.stream else 500, error="load failed")
