"""One completion against its oracles: equal, a near tie, or where it leaves them.

Called by the judge. Pure. Token ids decide, then the finish reason. Two computations of the same prompt that sum in
another order may swap tokens that are almost equally likely; such a near tie is reported and is not wrong. Both tokens
must be all but leaders in both top-k lists: after wrong KV the two lists have little in common.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, takewhile
from operator import eq

from harness.records import Completion, Difference, OracleKind, OracleRun, Prompt, TokenChoice

NOISE_FLOOR = 1e-3
"""Least noise band, in nats: differences of fp32 kernels stay far below it, wrong KV far above."""

UNKNOWN_DTYPE = ""
"""Of engines that do not say what they compute in."""

LOGIT_MAX = 32.0
"""Logits are taken to be below this. A log-probability does not tell how large its logit was; on an H200 in bfloat16
the gaps in 260 of 280 top-5 lists were whole multiples of 0.0625 or 0.125, its steps from 8 to 16 and from 16 to 32."""

SIGNIFICAND_BITS = {"bfloat16": 8, "float16": 11, "half": 11}
"""Of dtypes whose steps are coarser than NOISE_FLOOR, by vLLM's names; the leading bit, which is not stored, counts."""

NOISE_CEILING = 0.25
"""Largest noise band, in nats: oracles that are further apart are no measure of noise, and must not excuse wrong KV."""

LOGPROB_ROUNDING = 1e-5
"""Log-probabilities are float32 and negative: two that are a whole number of steps apart may seem this much further."""

NO_TOKEN = -1
"""In a Difference, where one completion ends before the other goes on."""


@dataclass(frozen=True)
class Comparison:
    """`ok`: equals an oracle, or differs by a near tie. `difference` is there whenever token ids differ."""

    ok: bool
    detail: str
    difference: Difference | None = None


def noise_floor(dtype: str) -> float:
    """Least noise band, in nats, of engines that compute in `dtype`; one that is not known is taken for an exact one.

    Each logit is rounded to the dtype by up to half a step. So two computations of the gap between two tokens can be
    two steps apart, however alike they are, and a step below LOGIT_MAX is up to LOGIT_MAX / 2 ** significand bits.
    """
    bits = SIGNIFICAND_BITS.get(dtype)
    return NOISE_FLOOR if bits is None else 2 * LOGIT_MAX / 2**bits


def noise_band(runs: Iterable[OracleRun], dtype: str) -> float:
    """The largest log-probability difference, in nats, between two reuse or recompute oracles of one prompt.

    Measured on the two leaders of each position before the two leave each other, and kept between the floor of
    `dtype` and NOISE_CEILING.
    """
    whole = [run for run in runs if run.key.kind is not OracleKind.PARTIAL]
    same = ((a, b) for a, b in combinations(whole, 2) if _same_question(a, b))
    drifts = (drift for a, b in same for drift in _drifts(a.completion, b.completion))
    return min(max((noise_floor(dtype), *drifts)), NOISE_CEILING)


def compare(
    request: str, got: Completion, prompt: Prompt, oracles: Sequence[tuple[str, Completion]], band: float
) -> Comparison:
    """The completion against named oracles, of which it must equal one; what is said otherwise is about the first.

    Of an answer that was cut off, by its deadline or by its client, what came must be how an oracle begins.
    """
    if got.timed_out or got.gave_up:
        begun = [(f"the beginning of {name}", _beginning(oracle, got)) for name, oracle in oracles]
        return _closest(request, got, begun, band) if got.token_ids else Comparison(True, "no token came")
    problem = answer_problem(got, prompt)
    return Comparison(False, problem) if problem else _closest(request, got, oracles, band)


def answer_problem(got: Completion, prompt: Prompt) -> str:
    """Why `got` is no whole answer to `prompt`, or an empty text."""
    if got.timed_out:
        return "no answer before the deadline"
    if got.status_code != 200 or got.error:
        return f"HTTP {got.status_code}: {got.error or 'no error text'}"
    if got.finish_reason not in ("stop", "length"):
        return f"the answer is not whole: finish reason {got.finish_reason or 'missing'}"
    if got.prompt_token_count != len(prompt.token_ids):
        return f"the engine counted {got.prompt_token_count} prompt tokens, the prompt has {len(prompt.token_ids)}"
    return ""


def failed_cleanly(got: Completion, *, stream: bool) -> bool:
    """Whether the request got an error (HTTP 5xx, or an error event in its stream), no text and no tokens."""
    if got.timed_out or got.broken_off or got.text or got.token_ids or got.finish_reason not in ("", "error"):
        return False
    return 500 <= got.status_code < 600 or (stream and got.status_code == 200 and got.error != "")


def common_count(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading token ids are the same in both."""
    return sum(takewhile(bool, map(eq, one, other)))


def _beginning(oracle: Completion, got: Completion) -> Completion:
    """The oracle, had it been cut off where `got` was."""
    return replace(oracle, token_ids=oracle.token_ids[: len(got.token_ids)], finish_reason=got.finish_reason)


def _closest(request: str, got: Completion, oracles: Sequence[tuple[str, Completion]], band: float) -> Comparison:
    """Equal to one of them, or else a near tie with one, or else what parts it from the first."""
    if not oracles:
        return Comparison(False, "its oracle was not measured")
    against_each = [_compare_one(request, got, name, oracle, band) for name, oracle in oracles]
    exact = (c for c in against_each if c.ok and c.difference is None)
    near = (c for c in against_each if c.ok)
    return next(exact, None) or next(near, against_each[0])


def _compare_one(request: str, got: Completion, name: str, oracle: Completion, band: float) -> Comparison:
    difference = _difference(request, got, name, oracle, band)
    if difference is None:
        if got.finish_reason == oracle.finish_reason:
            return Comparison(True, f"equals {name}")
        return Comparison(False, f"finish reason {got.finish_reason}, {name} has {oracle.finish_reason}")
    if difference.near_tie:
        return Comparison(True, f"near tie with {name} at token {difference.index}", difference)
    return Comparison(False, f"differs from {name} at token {difference.index}", difference)


def _difference(request: str, got: Completion, name: str, oracle: Completion, band: float) -> Difference | None:
    if got.token_ids == oracle.token_ids:
        return None
    index = common_count(got.token_ids, oracle.token_ids)
    expected_top, got_top = _top(oracle, index), _top(got, index)
    expected_id, got_id = _token(oracle, index), _token(got, index)
    return Difference(
        request=request,
        oracle=name,
        index=index,
        expected_token_id=expected_id,
        got_token_id=got_id,
        expected_top=expected_top,
        got_top=got_top,
        expected_text=oracle.text,
        got_text=got.text,
        near_tie=all(_is_tie(top, {expected_id, got_id}, band) for top in (expected_top, got_top)),
        expected_token_ids=oracle.token_ids,
        got_token_ids=got.token_ids,
    )


def _is_tie(top: tuple[TokenChoice, ...], tokens: set[int], band: float) -> bool:
    """Whether all these tokens are among the top, at most `band` nats behind the leader."""
    logprobs = {choice.token_id: choice.logprob for choice in top}
    if not tokens <= logprobs.keys():
        return False
    least = max(logprobs.values()) - band - LOGPROB_ROUNDING
    return all(logprobs[token] >= least for token in tokens)


def _same_question(a: OracleRun, b: OracleRun) -> bool:
    return replace(a.key, kind=b.key.kind) == b.key


def _drifts(a: Completion, b: Completion) -> Iterator[float]:
    """Log-probability differences of tokens that lead in both, where both had the same tokens before."""
    for index in range(common_count(a.token_ids, b.token_ids)):
        leaders = {choice.token_id: choice.logprob for choice in _top(a, index)[:2]}
        for choice in _top(b, index)[:2]:
            drift = abs(choice.logprob - leaders.get(choice.token_id, math.nan))
            if math.isfinite(drift):
                yield drift


def _token(completion: Completion, index: int) -> int:
    return completion.token_ids[index] if index < len(completion.token_ids) else NO_TOKEN


def _top(completion: Completion, index: int) -> tuple[TokenChoice, ...]:
    return completion.top[index] if index < len(completion.top) else ()
