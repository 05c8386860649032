"""Under which conditions a run took place, and in what two runs differ: stack, versions, engine settings, prompts.

A run that is resumed must find the conditions of its beginning; one that repeats cells of another says what is
different. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from harness.judging.comparison import UNKNOWN_DTYPE
from harness.records import EngineInfo, Prompt, RunInfo
from harness.running.runner import PREFILL

PLACES = frozenset(
    {
        "KVPROOF_KV_DIR",
        "KVPROOF_EVIDENCE_DIR",
        "KVPROOF_MODEL_DIR",
        "KVPROOF_HOST",
        "KVPROOF_PORT",
        "KVPROOF_PARENT_PID",
    }
)
"""Settings that say where an engine lives, not what it does; they differ from run to run."""

UNSET = "not set"


def settings(info: RunInfo) -> dict[str, dict[str, str]]:
    """By service, what makes engines work like those of the run."""
    return {service: _settings(engine) for service, engine in info.engines.items()}


def dtype_of(info: RunInfo) -> str:
    """What the oracles were computed in; the engines of a stack have it in common."""
    return info.engines[PREFILL].settings.get("DTYPE", UNKNOWN_DTYPE) if PREFILL in info.engines else UNKNOWN_DTYPE


def differences(before: RunInfo, now: RunInfo) -> tuple[str, ...]:
    """In what `now` is not like `before`, one thing each; engines that only one of them has are not compared."""
    return tuple(dict.fromkeys(_differences(before, now)))


def prompt_differences(before: Mapping[str, Prompt], now: Mapping[str, Prompt]) -> tuple[str, ...]:
    """Prompts of both that have other tokens."""
    other = (each for each, prompt in now.items() if each in before and before[each].token_ids != prompt.token_ids)
    return tuple(f"prompt {each} has other tokens" for each in other)


def _differences(before: RunInfo, now: RunInfo) -> Iterator[str]:
    yield from _each("", {"stack": before.stack}, {"stack": now.stack})
    yield from _each("", asdict(before.versions), asdict(now.versions))
    yield from _each("", {"block size": str(before.block_size)}, {"block size": str(now.block_size)})
    for service in (service for service in before.engines if service in now.engines):
        one, other = before.engines[service], now.engines[service]
        yield from _each(f"{service}: ", asdict(one.versions), asdict(other.versions))
        yield from _each(f"{service}: ", _settings(one), _settings(other))


def _each(where: str, before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*before, *now}):
        was, is_now = before.get(name, UNSET), now.get(name, UNSET)
        if was != is_now:
            yield f"{where}{name} was {was}, is {is_now}"


def _settings(engine: EngineInfo) -> dict[str, str]:
    return {name: value for name, value in engine.settings.items() if name not in PLACES}
