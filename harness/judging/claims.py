"""What was seen of the engine, and what is claimed of a cell; part of `checks.CHECKS`, as `preconditions.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from harness.judging import process_checks, storage_checks
from harness.judging.answers import comparison, right_answer, wanted
from harness.judging.case import AFTERWARDS, Case, counted, listed
from harness.judging.oracles import reuse
from harness.records import Finding, Role
from services.faults import REPORTED_KINDS
from services.journal import Event, EventName

CACHE_USAGE_TOLERANCE = 1e-6
"""Far below one block of any cache; the metric is a rounded float."""


def engine_alive(case: Case) -> Iterator[Finding]:
    """The engine lived through the cell, or came back once it was killed by the cell itself."""
    before, after, planned = case.observation.before, case.observation.after, process_checks.planned_exits(case)
    exits = after.restart_count - before.restart_count
    got = f"{exits} exits, {'healthy' if after.healthy else 'not healthy'}"
    ok = after.healthy and exits <= planned
    why = "; ".join(event.reason for event in case.observation.events if event.name is EventName.ENGINE_EXITED)
    yield Finding(
        "engine-alive", ok, "" if ok else why, expected=f"{'at most ' * planned}{planned} exits, healthy", got=got
    )


def in_time(case: Case) -> Iterator[Finding]:
    """Every request ended before its deadline."""
    for record in case.observation.requests:
        if process_checks.outlasts_its_client(case, record):
            continue
        got = f"{record.completion.duration_s:.1f} s"
        expected = f"within {record.planned.deadline_s or case.cell.deadline_s:g} s"
        yield Finding("in-time", not record.completion.timed_out, "", record.tag, expected, got)


def same_bytes_loaded(case: Case) -> Iterator[Finding]:
    """Every block that was loaded has the bytes that the reuse oracle got; exact on any hardware.

    Not asked of blocks whose files are damaged: that these are not loaded at all is a claim of its own.
    """
    for record in case.observation.requests:
        runs = case.oracles.get(reuse(case.cell, record.planned.prompt_id), ())
        wanted = _digests(event for run in runs for event in run.events)
        got = _digests(event for event in case.observation.events if event.request == record.tag)
        sound = wanted.keys() - storage_checks.damaged_for(case, record)
        other = tuple(block for block, digests in got.items() if block in sound and not digests <= wanted[block])
        detail = f"other bytes than the oracle got in blocks {listed((other,))}" if other else ""
        yield Finding("same-bytes-loaded", not other, detail, record.tag)


def victim_equals_oracle(case: Case) -> Iterator[Finding]:
    """The victim of an honest fault has the right tokens, or under policy `fail` an error and nothing else.

    That an answer did not end before its deadline is no concern of this check and the next two."""
    for record in case.records(Role.VICTIM):
        if not case.is_silent(record):
            yield from right_answer(case, record)


def others_equal_oracle(case: Case) -> Iterator[Finding]:
    """Requests beside the victim have the right tokens; who shares a bad block may fail with it."""
    for record in case.records(Role.SHARER, Role.BYSTANDER):
        yield from right_answer(case, record)


def canary_equals_oracle(case: Case) -> Iterator[Finding]:
    """The same prompt afterwards is right: nothing bad stayed in a cache."""
    for record in case.records(*AFTERWARDS):
        yield from right_answer(case, record)


def nothing_leaked(case: Case) -> Iterator[Finding]:
    """Queues are empty, and requests hold no more blocks than before."""
    before, after = case.observation.before, case.observation.after
    held = after.cache_usage > before.cache_usage + CACHE_USAGE_TOLERANCE
    ok = case.observation.settled and after.running_count == after.waiting_count == 0 and not held
    got = f"{after.running_count} running, {after.waiting_count} waiting, {after.cache_usage:.1%} of the blocks held"
    detail = "" if case.observation.settled else "the engine did not come to rest, or would not empty its prefix cache"
    expected = f"0 running, 0 waiting, {before.cache_usage:.1%} of the blocks held"
    yield Finding("nothing-leaked", ok, detail, expected=expected, got=got)


def failure_reported(case: Case) -> Iterator[Finding]:
    """vLLM was told of every block each time it was broken."""
    for record in case.observation.requests:
        if record.planned.fault.kind in REPORTED_KINDS:
            fired = case.blocks(record, EventName.FAULT_FIRED)
            reported = case.blocks(record, EventName.REPORTED)
            ok = not counted(fired) - counted(reported)
            yield Finding("failure-reported", ok, "", record.tag, listed(fired), listed(reported))


def control_caught(case: Case) -> Iterator[Finding]:
    """Wrong KV that nobody reported shows: a whole answer, with tokens that no oracle has."""
    for record in case.records(Role.VICTIM):
        if case.is_silent(record):
            found = comparison(case, record)
            ok = not found.ok and found.difference is not None and not record.completion.timed_out
            yield Finding("control-caught", ok, found.detail, record.tag, f"not {wanted(case, record)}")


def _digests(events: Iterable[Event]) -> dict[int, frozenset[str]]:
    """What was loaded into each logical block, over all loads; empty where a journal has no digests."""
    pairs = [
        (block, digest)
        for event in events
        if event.name is EventName.LOADED
        for block, digest in zip(event.blocks, event.digests, strict=False)
    ]
    return {block: frozenset(d for b, d in pairs if b == block) for block, _ in pairs}
