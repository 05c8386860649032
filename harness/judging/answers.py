"""One answer of a cell, held against the oracles of which it must equal one."""

from __future__ import annotations

from collections.abc import Iterator

from harness.judging import storage_checks
from harness.judging.case import FAIL_POLICY, Case
from harness.judging.comparison import Comparison, compare, failed_cleanly
from harness.judging.oracles import acceptable, oracle_name, reuse, shared_bad_block
from harness.records import Finding, OracleKey, RequestRecord, Role
from services.faults import BROKEN_KINDS
from services.journal import EventName


def right_answer(case: Case, record: RequestRecord) -> Iterator[Finding]:
    keys = _keys(case, record)
    if not keys:
        return
    check = f"{record.planned.role}-equals-oracle"
    if _may_fail(case, record) and failed_cleanly(record.completion, stream=record.planned.stream):
        yield Finding(check, True, f"failed cleanly: HTTP {record.completion.status_code}", record.tag)
    else:
        found = comparison(case, record)
        yield Finding(check, found.ok, found.detail, record.tag, wanted(case, record), record.completion.text)
    yield from _foreign_secrets(case, record)


def _foreign_secrets(case: Case, record: RequestRecord) -> Iterator[Finding]:
    """Another prompt's secret in an answer shows whose KV was read."""
    own = case.prompt(record)
    others = (prompt for prompt in case.prompts.values() if own.secret and prompt.secret not in ("", own.secret))
    for other in others:
        if other.secret in record.completion.text:
            detail = f"the answer has the secret of prompt {other.id}"
            yield Finding("foreign-secret", False, detail, record.tag, own.secret, other.secret)


def comparison(case: Case, record: RequestRecord) -> Comparison:
    runs = [(key, case.oracles.get(key, ())[:1]) for key in _keys(case, record)]
    oracles = [(oracle_name(key), run.completion) for key, first in runs for run in first]
    return compare(record.tag, record.completion, case.prompt(record), oracles, case.noise_band)


def _keys(case: Case, record: RequestRecord) -> tuple[OracleKey, ...]:
    """As `acceptable`; but a victim whose later load was left whole runs on loaded KV after all."""
    loads, broken = (case.blocks(record, name) for name in (EventName.PLANNED, EventName.FAULT_FIRED))
    if record.planned.fault.kind in BROKEN_KINDS and len(loads) > len(broken) > 0:
        return (reuse(case.cell, record.planned.prompt_id),)
    return acceptable(case.cell, record.planned, case.prompts, case.block_size)


def wanted(case: Case, record: RequestRecord) -> str:
    return " or ".join(oracle_name(key) for key in _keys(case, record))


def _may_fail(case: Case, record: RequestRecord) -> bool:
    """Whether policy `fail` allows this request an error: its own load was bad, or it shares the bad block."""
    if case.cell.policy != FAIL_POLICY:
        return False
    if case.cell.storage:
        return storage_checks.may_fail(case, record)
    if record.planned.role is Role.SHARER:
        return shared_bad_block(case.cell, record.planned, case.prompts, case.block_size) is not None
    return record.planned.fault.kind in BROKEN_KINDS
