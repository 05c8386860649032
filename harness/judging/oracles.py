"""Which oracles a plan needs, and which of them each request must equal.

The runner measures what `needed` lists; the judge asks for all that is `essential`, and what is `acceptable` for each
request. Pure. A reported bad block k makes vLLM keep the k blocks before it and compute the rest, so the answer must be
that of a request which loaded exactly k blocks: reuse and recompute may differ from it, and from each other, without
any fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from harness.judging.comparison import common_count
from harness.records import Cell, OracleKey, OracleKind, PlannedRequest, Prompt, Role
from services.faults import BAD_BLOCK_KINDS, Fault, FaultKind, LoadMode, select


def needed(cells: Iterable[Cell], prompts: Mapping[str, Prompt], block_size: int) -> tuple[OracleKey, ...]:
    """Every oracle to measure for `cells`, once each, in the order of the plan."""
    keys = (key for cell in cells for key in (*essential(cell, prompts, block_size), *_spare(cell)))
    return tuple(dict.fromkeys(keys))


def essential(cell: Cell, prompts: Mapping[str, Prompt], block_size: int) -> tuple[OracleKey, ...]:
    """The oracles without which nothing can be said of the cell, once each.

    Of a victim's prompt always reuse and recompute: their agreement is also what near ties are measured by.
    """
    return tuple(dict.fromkeys(_essential(cell, prompts, block_size)))


def acceptable(
    cell: Cell, request: PlannedRequest, prompts: Mapping[str, Prompt], block_size: int
) -> tuple[OracleKey, ...]:
    """The oracles of which the request must equal one, the likeliest first.

    Two exceptions: the victim of a silent fault must equal none of them, and an empty tuple means that nothing can
    be asked of the request, because it runs on KV that is wrong by design, or its engine is struck. Where a request
    loads its KV a second time, only the journal knows; the judge looks there.
    """
    keys = _by_path(cell, request, prompts, block_size)
    spare = (recompute(cell, request.prompt_id),) if keys and request.role is Role.SHARER else ()
    return tuple(dict.fromkeys((*keys, *spare)))


def victim_of(cell: Cell) -> PlannedRequest:
    """The request whose load is broken; of several the first one, in a cell without a victim any."""
    return next((request for request in cell.requests if request.role is Role.VICTIM), cell.requests[0])


def first_bad_block(cell: Cell, prompt: Prompt) -> int | None:
    """The first block that the cell's fault spoils, of `prompt` loaded whole; None where it spoils none. Of a save that
    was interrupted it is the first that is not there."""
    if cell.process:
        return min(cell.process.chosen(prompt.full_block_count), default=None) if cell.process.is_of_prefill else None
    if cell.storage:
        spoils = cell.storage.fails or cell.storage.is_miss
        return min(cell.storage.chosen(prompt.full_block_count), default=None) if spoils else None
    return _first_bad_block(cell.fault, prompt)


def shared_bad_block(cell: Cell, request: PlannedRequest, prompts: Mapping[str, Prompt], block_size: int) -> int | None:
    """The first bad block that a sharer may find in the engine's own prefix cache; None where there is none.

    vLLM publishes the blocks of a sync load before they are loaded, those of an async load only afterwards; with
    async loads every request fills blocks of its own. A damaged file is bad for everyone who loads it.
    """
    victim = victim_of(cell)
    if victim.load is not LoadMode.SYNC and not cell.storage:
        return None
    bad = first_bad_block(cell, prompts[victim.prompt_id])
    shared = shared_block_count(prompts[victim.prompt_id], prompts[request.prompt_id], block_size)
    return bad if bad is not None and bad < shared else None


def shared_block_count(one: Prompt, other: Prompt, block_size: int) -> int:
    """Whole leading blocks of `block_size` tokens that are the same in both prompts and can be loaded in both."""
    return min(common_count(one.token_ids, other.token_ids) // block_size, one.full_block_count, other.full_block_count)


def oracle_name(key: OracleKey) -> str:
    """Such as `reuse` or `partial(3)`."""
    return f"{key.kind}({key.blocks})" if key.kind is OracleKind.PARTIAL else key.kind


def oracle_block_count(key: OracleKey, prompt: Prompt) -> int:
    """How many leading blocks the oracle loads."""
    return {OracleKind.REUSE: prompt.full_block_count, OracleKind.RECOMPUTE: 0, OracleKind.PARTIAL: key.blocks}[
        key.kind
    ]


def reuse(cell: Cell, prompt_id: str) -> OracleKey:
    return OracleKey(prompt_id, OracleKind.REUSE, 0, cell.max_tokens, cell.oracle_engine)


def recompute(cell: Cell, prompt_id: str) -> OracleKey:
    return OracleKey(prompt_id, OracleKind.RECOMPUTE, 0, cell.max_tokens, cell.oracle_engine)


def _essential(cell: Cell, prompts: Mapping[str, Prompt], block_size: int) -> Iterator[OracleKey]:
    for request in cell.requests:
        if request.load is not LoadMode.OFF:
            yield reuse(cell, request.prompt_id)
        if request.role is Role.VICTIM:
            # Its canary may find nothing left and compute everything.
            yield recompute(cell, request.prompt_id)
        yield from _by_path(cell, request, prompts, block_size)


def _spare(cell: Cell) -> Iterator[OracleKey]:
    """What a sharer may equal besides: the answer of its prompt computed whole.

    It is computed in the victim's steps, as no oracle is: on an H200 in bfloat16 sharers had the tokens of recompute
    while nothing was broken. Where this was not measured, nothing is excused by it.
    """
    return (recompute(cell, request.prompt_id) for request in cell.requests if request.role is Role.SHARER)


def _by_path(
    cell: Cell, request: PlannedRequest, prompts: Mapping[str, Prompt], block_size: int
) -> tuple[OracleKey, ...]:
    """By what the request's KV may come from, the likeliest first."""
    match request.role:
        case Role.VICTIM:
            return _for_victim(cell, request, prompts)
        case Role.SHARER:
            return _for_sharer(cell, request, prompts, block_size)
        case Role.CANARY:
            return _for_canary(cell, request, prompts)
        case Role.BYSTANDER | Role.RELOAD:
            return (_untouched(cell, request),)


def _for_victim(cell: Cell, request: PlannedRequest, prompts: Mapping[str, Prompt]) -> tuple[OracleKey, ...]:
    if request.fault.kind is FaultKind.SILENT:
        return reuse(cell, request.prompt_id), recompute(cell, request.prompt_id)
    if cell.process and not cell.process.is_of_prefill:
        return ()
    prompt = prompts[request.prompt_id]
    bad = first_bad_block(cell, prompt) if cell.storage or cell.process else _first_bad_block(request.fault, prompt)
    return (_untouched(cell, request) if bad is None else _good_until(cell, request, bad),)


def _for_sharer(
    cell: Cell, request: PlannedRequest, prompts: Mapping[str, Prompt], block_size: int
) -> tuple[OracleKey, ...]:
    """Timing decides whether a sharer meets the bad block or loads a copy of its own; both are right."""
    bad = shared_bad_block(cell, request, prompts, block_size)
    if bad is None:
        return (_untouched(cell, request),)
    if cell.fault.kind is FaultKind.SILENT:
        return ()
    return _good_until(cell, request, bad), _untouched(cell, request)


def _for_canary(cell: Cell, request: PlannedRequest, prompts: Mapping[str, Prompt]) -> tuple[OracleKey, ...]:
    """The canary finds what the victim left in the engine's prefix cache: loaded, repaired, or nothing."""
    if cell.fault.kind is FaultKind.SILENT:
        return ()
    of_victim = _for_victim(cell, victim_of(cell), prompts) if request.prompt_id == victim_of(cell).prompt_id else ()
    keys = (*of_victim, reuse(cell, request.prompt_id), recompute(cell, request.prompt_id))
    return tuple(dict.fromkeys(keys))


def _first_bad_block(fault: Fault, prompt: Prompt) -> int | None:
    if fault.kind not in BAD_BLOCK_KINDS:
        return None
    return min(select(fault.blocks, prompt.full_block_count), default=None)


def _untouched(cell: Cell, request: PlannedRequest) -> OracleKey:
    key = recompute if request.load is LoadMode.OFF else reuse
    return key(cell, request.prompt_id)


def _good_until(cell: Cell, request: PlannedRequest, bad_block: int) -> OracleKey:
    """What a request gives that keeps the blocks before `bad_block` and computes the rest."""
    if bad_block == 0:
        return recompute(cell, request.prompt_id)
    return OracleKey(request.prompt_id, OracleKind.PARTIAL, bad_block, cell.max_tokens, cell.oracle_engine)
