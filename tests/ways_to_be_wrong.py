"""The ways in which a simulated engine can be wrong, each a small change to what an honest one does.

simulated_engine.py asks `harm` what happens to a load and `altered` what to answer. Pure: a prompt's answer depends on
its tokens and on whether the KV of every block is right, and on nothing else.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from harness.oracles import BROKEN_KINDS, LOST_KINDS
from harness.records import Role
from services.faults import FaultKind, LoadControl, breakage

TIE_INDEX = 3
TIE_GAP = 5e-4
"""At this generated token the two leaders are this close, in nats: a near tie by the judge's smallest noise band."""

Tokens = tuple[int, ...]
Blocks = tuple[int, ...]


class Wrong(StrEnum):
    """One way to be wrong each; it shows in requests with a reported fault, unless another is named."""

    NOTHING = "nothing"

    GARBAGE_AFTER_RECOVERY = "garbage-after-recovery"
    GARBAGE_ONCE = "garbage-once"
    """As before, but not when the cell is run again."""
    ANSWERS_SWAPPED = "answers-swapped"
    """Victim and bystander of a mix get each other's."""
    STALE_ANSWER = "stale-answer"
    """That of the request before."""
    TOKEN_MISSING = "token-missing"
    FINISH_REASON = "finish-reason"
    PROMPT_TOKEN_COUNT = "prompt-token-count"
    ERROR_BODY_WITH_200 = "error-body-with-200"
    ERROR_INSTEAD_OF_RECOVERY = "error-instead-of-recovery"
    CONNECTION_RESET = "connection-reset"
    STREAM_WITHOUT_END = "stream-without-end"
    NEAR_TIE = "near-tie"
    """Not wrong: at a tie the other leader wins."""

    LOADED_GARBAGE = "loaded-garbage"
    """The no-fault control reads wrong KV."""
    DELAYED_GARBAGE = "delayed-garbage"
    """A late load is not waited for."""
    SHARER_GARBAGE = "sharer-garbage"
    SHARER_ERROR = "sharer-error"
    BYSTANDER_GARBAGE = "bystander-garbage"
    BYSTANDER_ERROR = "bystander-error"
    CANARY_ERROR = "canary-error"
    POISONED_CACHE = "poisoned-cache"
    """The broken blocks stay in the engine's own prefix cache."""

    FAIL_GIVES_GARBAGE = "fail-gives-garbage"
    FAIL_GIVES_TEXT_THEN_ERROR = "fail-gives-text-then-error"
    FAIL_RECOVERS = "fail-recovers"
    FAIL_BLAMES_CLIENT = "fail-blames-client"
    FAIL_BREAKS_STREAM_OFF = "fail-breaks-stream-off"
    """Without a word: no error event, no [DONE]."""
    FAIL_ENDS_STREAM_EMPTY = "fail-ends-stream-empty"
    """[DONE] and nothing else."""

    DIES = "dies"
    HANGS = "hangs"
    LEAKS_REQUEST = "leaks-request"
    LEAKS_BLOCKS = "leaks-blocks"

    REPORTS_NOTHING = "reports-nothing"
    REPORT_NOT_JOURNALED = "report-not-journaled"
    """And all answers are right: nobody can tell why."""
    REPORTS_ANOTHER_BLOCK = "reports-another-block"
    FIRES_ELSEWHERE = "fires-elsewhere"
    FIRES_NEVER = "fires-never"
    FIRES_TWICE = "fires-twice"
    STORE_FAILS = "store-fails"
    """A block fails that no fault was to break."""

    LOADS_NOTHING = "loads-nothing"
    LOADS_ONE_BLOCK_LESS = "loads-one-block-less"
    LOADS_SYNC = "loads-sync"
    """Whatever was asked."""
    REJECTS_FAULTS = "rejects-faults"
    SILENT_INVISIBLE = "silent-invisible"
    """Garbage that nobody reports gives the right answer."""
    SILENT_ERROR = "silent-error"
    ORACLE_UNSTABLE = "oracle-unstable"
    """The second measurement differs."""
    ORACLE_LOADS_NOTHING = "oracle-loads-nothing"

    # With faults in storage; what else is wrong shows in requests whose reads fail.
    LOADS_DAMAGED_BYTES = "loads-damaged-bytes"
    """Nothing is checked, and nothing reported."""
    READS_WITHOUT_DEADLINE = "reads-without-deadline"
    KEEPS_LATE_BYTES = "keeps-late-bytes"
    """A read that was given up spoils the block that was repaired meanwhile."""
    FAILS_WITH_STORAGE = "fails-with-storage"
    """Under policy recompute, too."""
    HOLDS_BLOCKS = "holds-blocks"
    """For ever, and its metrics do not say so; only the prefix cache cannot be emptied any more."""
    PUBLISHES_TORN_BLOCKS = "publishes-torn-blocks"
    """A block whose save failed is in the index."""
    PREFILL_FAILS_WITHOUT_ROOM = "prefill-fails-without-room"
    PREFILL_DIES_WITHOUT_ROOM = "prefill-dies-without-room"


OF_STORAGE = frozenset(list(Wrong)[list(Wrong).index(Wrong.LOADS_DAMAGED_BYTES) :])
"""What only engines with a real volume can do wrong."""


@dataclass(frozen=True)
class Request:
    """`policy`: the kv_load_failure_policy of the engine that got it."""

    prompt: Tokens
    control: LoadControl
    max_tokens: int
    stream: bool
    policy: str

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


def at_the_tie(answer: Answer) -> Answer:
    """The answer with the other leader."""
    before, tied, after = answer.token_ids[:TIE_INDEX], answer.token_ids[TIE_INDEX], answer.token_ids[TIE_INDEX + 1 :]
    return replace(answer, token_ids=(*before, rival(tied), *after))


Who = Callable[[Request], bool]


def is_broken(request: Request) -> bool:
    return request.is_broken


def recovers(request: Request) -> bool:
    return request.is_broken and request.policy == "recompute"


def recovers_for_the_first_time(request: Request) -> bool:
    return recovers(request) and not request.is_again


def fails(request: Request) -> bool:
    return request.is_broken and request.policy == "fail"


def fails_in_stream(request: Request) -> bool:
    return fails(request) and request.stream


def is_second_oracle(request: Request) -> bool:
    return request.cell_id == "oracle" and request.role == "1"


def has(role: Role) -> Who:
    return lambda request: request.role == role


def is_victim_of(kind: FaultKind) -> Who:
    return lambda request: request.role == Role.VICTIM and request.control.fault.kind is kind


OTHER_ANSWERS: Mapping[Wrong, tuple[Who, Callable[[Request], Answer]]] = {
    Wrong.GARBAGE_AFTER_RECOVERY: (recovers, garbage),
    Wrong.GARBAGE_ONCE: (recovers_for_the_first_time, garbage),
    Wrong.ERROR_INSTEAD_OF_RECOVERY: (recovers, failure),
    Wrong.ERROR_BODY_WITH_200: (is_broken, lambda request: replace(failure(request), status=200)),
    Wrong.LOADED_GARBAGE: (is_victim_of(FaultKind.NONE), garbage),
    Wrong.DELAYED_GARBAGE: (is_victim_of(FaultKind.DELAY), garbage),
    Wrong.SHARER_GARBAGE: (has(Role.SHARER), garbage),
    Wrong.SHARER_ERROR: (has(Role.SHARER), failure),
    Wrong.BYSTANDER_GARBAGE: (has(Role.BYSTANDER), garbage),
    Wrong.BYSTANDER_ERROR: (has(Role.BYSTANDER), failure),
    Wrong.CANARY_ERROR: (has(Role.CANARY), failure),
    Wrong.FAIL_GIVES_GARBAGE: (fails, garbage),
    Wrong.FAIL_GIVES_TEXT_THEN_ERROR: (fails, lambda request: replace(right(request), error="load failed")),
    Wrong.FAIL_RECOVERS: (fails, right),
    Wrong.SILENT_INVISIBLE: (is_victim_of(FaultKind.SILENT), right),
    Wrong.SILENT_ERROR: (is_victim_of(FaultKind.SILENT), failure),
    Wrong.ORACLE_UNSTABLE: (is_second_oracle, garbage),
}

CHANGED_ANSWERS: Mapping[Wrong, tuple[Who, Callable[[Answer], Answer]]] = {
    Wrong.TOKEN_MISSING: (recovers, lambda answer: replace(answer, token_ids=answer.token_ids[:-1])),
    Wrong.FINISH_REASON: (recovers, lambda answer: replace(answer, finish_reason="stop")),
    Wrong.PROMPT_TOKEN_COUNT: (recovers, lambda answer: replace(answer, prompt_token_count=1)),
    Wrong.STREAM_WITHOUT_END: (recovers, lambda answer: replace(answer, is_whole=False)),
    Wrong.NEAR_TIE: (recovers, at_the_tie),
    Wrong.CONNECTION_RESET: (is_broken, lambda answer: replace(answer, status=0)),
    Wrong.FAIL_BLAMES_CLIENT: (fails, lambda answer: replace(answer, status=400)),
    Wrong.FAIL_BREAKS_STREAM_OFF: (fails_in_stream, lambda answer: replace(answer, error="", is_whole=False)),
    Wrong.FAIL_ENDS_STREAM_EMPTY: (fails_in_stream, lambda answer: replace(answer, error="")),
}


def altered(wrong: Wrong, request: Request, answer: Answer) -> Answer:
    """What an engine that is `wrong` says where an honest one gives `answer`."""
    if wrong in OTHER_ANSWERS:
        who, other = OTHER_ANSWERS[wrong]
        return other(request) if who(request) else answer
    if wrong in CHANGED_ANSWERS:
        who, change = CHANGED_ANSWERS[wrong]
        return change(answer) if who(request) else answer
    return answer


# Loads.


def harm(wrong: Wrong, request: Request, blocks: Blocks, earlier_load_count: int) -> Harm:
    """What an engine that is `wrong` does to a load of `blocks` that follows `earlier_load_count` loads."""
    planned = planned_harm(request, blocks, earlier_load_count)
    return CHANGED_HARMS[wrong](planned) if request.is_broken and wrong in CHANGED_HARMS else planned


def planned_harm(request: Request, blocks: Blocks, earlier_load_count: int) -> Harm:
    """As FaultInjectingConnector carries the fault out."""
    planned = breakage(request.control.fault, len(blocks), earlier_load_count)
    spoilt = tuple(blocks[index] for index in planned.garbage or planned.withheld)
    reported = tuple(blocks[index] for index in planned.reported)
    fired = (spoilt or blocks,) if planned.fires else ()
    return Harm(fired, spoilt, reported, reported, delay_s=planned.delay_s)


def moved(blocks: Blocks) -> Blocks:
    """Each block's neighbour."""
    return tuple(block - 1 if block else block + 1 for block in blocks)


def moved_report(planned: Harm) -> Harm:
    reported = moved(planned.reported)
    return replace(planned, reported=reported, journaled=reported)


def moved_fault(planned: Harm) -> Harm:
    return replace(moved_report(planned), fired=(moved(planned.garbage),), garbage=moved(planned.garbage))


CHANGED_HARMS: Mapping[Wrong, Callable[[Harm], Harm]] = {
    Wrong.REPORTS_NOTHING: lambda planned: replace(planned, reported=(), journaled=()),
    Wrong.REPORT_NOT_JOURNALED: lambda planned: replace(planned, journaled=()),
    Wrong.REPORTS_ANOTHER_BLOCK: moved_report,
    Wrong.FIRES_ELSEWHERE: moved_fault,
    Wrong.FIRES_NEVER: lambda _: Harm(),
    Wrong.FIRES_TWICE: lambda planned: replace(planned, fired=planned.fired * 2),
    Wrong.STORE_FAILS: lambda planned: replace(planned, failed=(0,), reported=(0, *planned.reported)),
}


def stored(wrong: Wrong, request: Request, block_count: int) -> int:
    """How many of the `block_count` leading blocks in the store an engine that is `wrong` finds."""
    match wrong:
        case Wrong.LOADS_NOTHING if request.is_of_cell:
            return 0
        case Wrong.LOADS_ONE_BLOCK_LESS if request.is_of_cell:
            return block_count - 1
        case Wrong.ORACLE_LOADS_NOTHING if request.cell_id == "oracle":
            return 0
        case _:
            return block_count
