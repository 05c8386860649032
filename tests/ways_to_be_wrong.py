"""The ways in which a simulated engine can be wrong, each a small change to what an honest one does.

simulated_engine.py asks `harm` what happens to a load, `altered` what to answer, and the functions at the end what
becomes of a repair. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum

from harness.records import Moment, Role
from services.faults import FaultKind, LoadMode, breakage
from tests.simulated_requests import (
    BLOCK_SIZE,
    TIE_INDEX,
    Answer,
    Blocks,
    Harm,
    Request,
    failure,
    garbage,
    right,
    rival,
)


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

    # With company; the repairs are those of sync loads, whose blocks vLLM publishes before they are loaded.
    REPAIR_IS_SHARED = "repair-is-shared"
    """Who comes during a repair finds the blocks in the prefix cache, as they are."""
    GIVEN_UP_REPAIR_STAYS = "given-up-repair-stays"
    """In the prefix cache, where its client has left."""
    PREEMPTED_RESUMES_ON_BAD = "preempted-resumes-on-bad"
    """Who is preempted during its repair finds its own bad blocks in the prefix cache."""
    DEPARTURE_KILLS = "departure-kills"
    DEPARTURE_LEAKS = "departure-leaks"
    """What is held for a client that leaves is never given back."""
    DEPARTURE_ENDS_SHARER = "departure-ends-sharer"
    """Who leaves takes those with the same prompt along."""
    LATE_WRITES_HIT_OTHERS = "late-writes-hit-others"
    """Blocks of a load whose client has left are given to others while it goes on."""
    PARKED_LOADS_BLOCK = "parked-loads-block"
    """Who comes after a late load waits for it, whether it needs any block or not."""
    FULL_POOL_IS_FINAL = "full-pool-is-final"
    """Who finds too few blocks never gets any."""
    PENDING_IS_FINAL = "pending-is-final"
    """A lookup that was not answered at once is never asked again."""
    PREEMPTS_NOBODY = "preempts-nobody"
    PREEMPTION_SPOILS_OTHERS = "preemption-spoils-others"
    """Who gets the blocks of a preempted request computes on what it left in them."""

    # Prompts at the edges, and chats.
    LOADS_FROM_NOWHERE = "loads-from-nowhere"
    """A prompt below a block."""
    LOADS_LAST_TOKEN = "loads-last-token"
    """A prompt that ends with a block, as a whole."""
    CHAT_GARBAGE = "chat-garbage"
    CHAT_TOKEN_MISSING = "chat-token-missing"
    CHAT_FAILS_WITH_TEXT = "chat-fails-with-text"
    """Under policy fail, and the error comes after it."""

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


OF_COMPANY = frozenset(
    list(Wrong)[list(Wrong).index(Wrong.REPAIR_IS_SHARED) : list(Wrong).index(Wrong.LOADS_DAMAGED_BYTES)]
)
"""What shows only where requests meet, clients leave, or prompts and answers have another form."""

OF_STORAGE = frozenset(list(Wrong)[list(Wrong).index(Wrong.LOADS_DAMAGED_BYTES) :])
"""What only engines with a real volume can do wrong."""


def at_the_tie(answer: Answer) -> Answer:
    """The answer with the other leader."""
    before, tied, after = answer.token_ids[:TIE_INDEX], answer.token_ids[TIE_INDEX], answer.token_ids[TIE_INDEX + 1 :]
    return replace(answer, token_ids=(*before, rival(tied), *after))


def without_last_token(answer: Answer) -> Answer:
    return replace(answer, token_ids=answer.token_ids[:-1])


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


def recovers_chat(request: Request) -> bool:
    return recovers(request) and request.is_chat


def fails_chat(request: Request) -> bool:
    return fails(request) and request.is_chat


def shares_with_leaver(request: Request) -> bool:
    return request.role == Role.SHARER and request.cell is not None and any(r.gives_up for r in request.cell.requests)


def comes_after_leaver(request: Request) -> bool:
    return request.planned is not None and request.planned.sent is Moment.GONE


def is_ahead_of_preempted(request: Request) -> bool:
    ahead = request.planned is not None and request.planned.sent is Moment.AHEAD
    return ahead and request.cell is not None and request.cell.preempts


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
    Wrong.DEPARTURE_ENDS_SHARER: (shares_with_leaver, failure),
    Wrong.LATE_WRITES_HIT_OTHERS: (comes_after_leaver, garbage),
    Wrong.PREEMPTION_SPOILS_OTHERS: (is_ahead_of_preempted, garbage),
    Wrong.CHAT_GARBAGE: (recovers_chat, garbage),
    Wrong.CHAT_FAILS_WITH_TEXT: (fails_chat, lambda request: replace(right(request), error="load failed")),
}

CHANGED_ANSWERS: Mapping[Wrong, tuple[Who, Callable[[Answer], Answer]]] = {
    Wrong.TOKEN_MISSING: (recovers, without_last_token),
    Wrong.CHAT_TOKEN_MISSING: (recovers_chat, without_last_token),
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
    fired = (spoilt or reported or blocks,) if planned.fires else ()
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
        case Wrong.LOADS_FROM_NOWHERE if request.is_of_cell and len(request.prompt) <= BLOCK_SIZE:
            return 1
        case Wrong.LOADS_LAST_TOKEN if request.is_of_cell and len(request.prompt) % BLOCK_SIZE == 0:
            return block_count + 1
        case _:
            return block_count


# Repairs of sync loads, between a bad load and the last block that is computed again.


def shows_repair(wrong: Wrong, request: Request) -> bool:
    """Whether others find the blocks in the prefix cache meanwhile."""
    return wrong is Wrong.REPAIR_IS_SHARED and request.control.load is LoadMode.SYNC


def keeps_given_up(wrong: Wrong, request: Request) -> bool:
    """Whether the blocks are in the prefix cache for good once the client has left."""
    return wrong is Wrong.GIVEN_UP_REPAIR_STAYS and request.control.load is LoadMode.SYNC


def resumes_on_bad(wrong: Wrong, request: Request) -> bool:
    """Whether a request that was preempted meanwhile takes them for good."""
    return wrong is Wrong.PREEMPTED_RESUMES_ON_BAD and request.control.load is LoadMode.SYNC
