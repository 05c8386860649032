"""Every check of a cell, in order, and what a broken one means.

`judge.py` runs them all. What must hold before anything is claimed is in `preconditions.py`, what is claimed in
`claims.py`; faults in storage and of processes have checks of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness.judging import claims, preconditions, process_checks, storage_checks
from harness.judging.case import Case
from harness.records import Finding, Outcome

Check = Callable[[Case], Iterator[Finding]]

CHECKS: tuple[tuple[Outcome, Check], ...] = (
    (Outcome.UNPROVEN, preconditions.engine_ready),
    (Outcome.CRASHED, claims.engine_alive),
    (Outcome.CRASHED, storage_checks.producer_alive),
    (Outcome.HUNG, claims.in_time),
    (Outcome.CRASHED, process_checks.producer_serves),
    (Outcome.POISONED, process_checks.published_is_whole),
    (Outcome.POISONED, process_checks.nothing_unpublished_loaded),
    (Outcome.COLLATERAL, storage_checks.save_answered),
    (Outcome.POISONED, process_checks.volume_whole_again),
    (Outcome.NOT_RUN, preconditions.load_mode),
    (Outcome.UNPROVEN, preconditions.requests_sent),
    (Outcome.UNPROVEN, preconditions.controls_accepted),
    (Outcome.UNPROVEN, preconditions.one_worker),
    (Outcome.UNPROVEN, preconditions.kv_loaded),
    (Outcome.UNPROVEN, preconditions.moments_met),
    (Outcome.UNPROVEN, preconditions.victim_preempted),
    (Outcome.UNPROVEN, preconditions.fault_fired),
    (Outcome.UNPROVEN, storage_checks.damage_done),
    (Outcome.UNPROVEN, storage_checks.save_failed),
    (Outcome.UNPROVEN, storage_checks.kv_loaded_beside_damage),
    (Outcome.UNPROVEN, process_checks.struck_as_planned),
    (Outcome.UNPROVEN, process_checks.kv_loaded_around),
    (Outcome.UNPROVEN, preconditions.kv_loaded_again),
    (Outcome.UNPROVEN, preconditions.nothing_else_failed),
    (Outcome.UNPROVEN, preconditions.oracles_stable),
    (Outcome.UNPROVEN, preconditions.oracles_loaded),
    (Outcome.UNPROVEN, preconditions.oracles_agree),
    (Outcome.WRONG_OUTPUT, claims.same_bytes_loaded),
    (Outcome.WRONG_OUTPUT, claims.victim_equals_oracle),
    (Outcome.WRONG_OUTPUT, process_checks.victim_got_nothing),
    (Outcome.POISONED, claims.canary_equals_oracle),
    (Outcome.POISONED, storage_checks.torn_block_not_found),
    (Outcome.POISONED, storage_checks.volume_unchanged),
    (Outcome.COLLATERAL, claims.others_equal_oracle),
    (Outcome.LEAKED, claims.nothing_leaked),
    (Outcome.UNREPORTED, claims.failure_reported),
    (Outcome.UNREPORTED, storage_checks.damage_noticed),
    (Outcome.MISSED, claims.control_caught),
)
"""Each check, and the outcome of a cell in which it is the first that is broken.

What was seen of the engine comes first, because it stands whatever else was proven: an engine that died, and with it
every answer after that; then answers that never came, unless there is a proven wrong one (`judge.py`); then what has to
hold before anything is claimed; then the claims, the worst first: wrong text that a client took for an answer, wrong
text that will come to others, and what can be seen without reading text.
"""
