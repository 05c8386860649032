"""The journal: facts about KV loads, appended as JSON lines by the process that acted and read back by the harness.

One file per service: `<evidence>/<service>/journal.jsonl`. A line is one `Event`. Writers append each line
with a single write, so that several processes of one engine can share a file; readers pass the byte offset
where they stopped.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import weakref
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from annotated_types import Interval

Seconds = Annotated[float, Interval(ge=0, le=1e11)]
"""A span of time, or a Unix time; whoever reads a file that somebody may have edited checks the bounds."""

JOURNAL_NAME = "journal.jsonl"
ENGINE_LOG_NAME = "engine.log"
ENGINE_INFO_NAME = "engine.json"
"""What an engine was started with: `versions`, `settings` and `command`; written before its first start."""


class EventName(StrEnum):
    """What can happen; the connector that writes it is named in brackets."""

    LOOKUP = "lookup"
    """[shared volume, scheduler side] `blocks`: logical blocks found in the index."""
    SAVED = "saved"
    """[shared volume, worker side] `blocks` were published (or were already published), under the store's `keys`,
    one per block, in the same order."""
    SAVE_FAILED = "save_failed"
    """[shared volume, worker side] `blocks` could not be written; `reason` says why."""
    HELD = "held"
    """[shared volume, worker side] the request asked for a stop at the one block in `blocks`; `reason` is a
    faults.HoldPoint, `duration_s` how long the stop lasts at most. What comes next, comes after the stop."""
    READ_FAILED = "read_failed"
    """[shared volume, worker side] `blocks` could not be read; `reason` is a store.FailureReason."""

    OFFERED = "offered"
    """[fault injecting, scheduler side] `blocks` were offered to vLLM, in load mode `mode`."""
    PLANNED = "planned"
    """[fault injecting, scheduler side] vLLM allocated `block_ids` for logical `blocks`; a load follows."""
    LOADED = "loaded"
    """[fault injecting, worker side] a load ended and `blocks` hold what the inner connector read;
    `digests` has one xxh3_64 hex digest of the KV bytes per block, taken before any breakage."""
    FAILED = "failed"
    """[fault injecting, worker side] the inner connector itself reported `blocks` as failed."""
    FAULT_FIRED = "fault_fired"
    """[fault injecting, worker side] the fault `reason` was carried out on `blocks` (block bytes were really
    changed, the delay really passed, the load was really kept back, reported once too often, or raised). [scheduler
    side] of a lookup: from now on it is not answered."""
    REPORTED = "reported"
    """[fault injecting, worker side] `blocks` / `block_ids` were handed to vLLM as failed; ids beyond the end of
    `blocks` belong to nobody. Without `request` where the inner connector named block ids of no load that ended in
    this step."""
    FINISHED = "finished"
    """[fault injecting, worker side] an async load was reported to vLLM as finished."""
    REJECTED = "rejected"
    """[fault injecting or shared volume, scheduler side] the request's control was malformed or faults are not allowed
    here; `reason` says why; it is then loaded and saved as if it had no control."""
    RELEASED = "released"
    """[fault injecting, scheduler side] vLLM finished the request, however it ended."""

    ENGINE_STARTED = "engine_started"
    """[supervisor] a vLLM process was started; `reason` is the command line, `pid` its process id."""
    ENGINE_READY = "engine_ready"
    """[supervisor] /health answered 200."""
    ENGINE_EXITED = "engine_exited"
    """[supervisor] the vLLM process ended; `reason` is the exit code or signal in words."""
    ENGINE_PAUSED = "engine_paused"
    """[supervisor] the vLLM process and everything below it was stopped (SIGSTOP)."""
    ENGINE_RESUMED = "engine_resumed"
    """[supervisor] it goes on (SIGCONT)."""


class JournalDamaged(ValueError):
    """A whole line that no journal wrote; the text says which file, which line and what is wrong with it."""


@dataclass(frozen=True)
class Event:
    """One fact. `time_s` is Unix time in seconds. `blocks` are logical block indices of the prompt (0 = its
    first block); `block_ids` are vLLM's physical ids, in the same order. `request` is the control's tag, or
    vLLM's request id where a request has none. Unused fields stay empty."""

    name: EventName
    service: str
    time_s: Seconds
    request: str = ""
    mode: str = ""
    blocks: tuple[int, ...] = ()
    block_ids: tuple[int, ...] = ()
    digests: tuple[str, ...] = ()
    reason: str = ""
    duration_s: Seconds = 0.0
    pid: int = 0
    keys: tuple[str, ...] = ()


class Journal:
    """Appends events of one service. Safe for several threads and processes; keeps the file open."""

    def __init__(self, evidence_dir: Path, service: str) -> None:
        """Creates `<evidence_dir>/<service>/`. Raises OSError when that cannot be written."""
        self.service = service
        self.path = journal_path(evidence_dir, service)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # Not at exit: threads may still write then.
        weakref.finalize(self, os.close, self._fd).atexit = False

    def write(
        self,
        name: EventName,
        *,
        request: str = "",
        mode: str = "",
        blocks: tuple[int, ...] = (),
        block_ids: tuple[int, ...] = (),
        digests: tuple[str, ...] = (),
        reason: str = "",
        duration_s: float = 0.0,
        pid: int = 0,
        keys: tuple[str, ...] = (),
    ) -> None:
        """Append one event, stamped with the time now."""
        event = Event(
            name, self.service, time.time(), request, mode, blocks, block_ids, digests, reason, duration_s, pid, keys
        )
        os.write(self._fd, (json.dumps(to_json(event), separators=(",", ":")) + "\n").encode())


def journal_path(evidence_dir: Path, service: str) -> Path:
    return evidence_dir / service / JOURNAL_NAME


def to_json(event: Event) -> dict[str, object]:
    """The event without its empty fields."""
    return {key: value for key, value in dataclasses.asdict(event).items() if value not in ("", (), 0, 0.0)}


def from_json(raw: object) -> Event:
    """Inverse of `to_json`. Raises TypeError or ValueError for what no journal wrote."""
    if not isinstance(raw, dict):
        raise TypeError(f"not a mapping but {type(raw).__name__}")
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
    return Event(**{**fields, "name": EventName(str(fields.get("name")))})  # type: ignore[arg-type]


def read_events(path: Path, offset_bytes: int = 0) -> tuple[tuple[Event, ...], int]:
    """The events in whole lines after `offset_bytes`, and the offset where to read on.

    A missing file is an empty journal. A last line without its line feed is left for the next call. Raises
    JournalDamaged for a whole line that is no event.
    """
    if not path.exists():
        return (), offset_bytes
    with path.open("rb") as file:
        file.seek(offset_bytes)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    lines = whole.split(b"\n")[:-1]
    events = tuple(_event(line, path, offset_bytes, index) for index, line in enumerate(lines))
    return events, offset_bytes + len(whole)


def _event(line: bytes, path: Path, offset_bytes: int, index: int) -> Event:
    """The event in the line `index` (counted from 0) after `offset_bytes`."""
    try:
        return from_json(json.loads(line))
    except (TypeError, ValueError, RecursionError) as error:
        number = path.read_bytes()[:offset_bytes].count(b"\n") + index + 1
        raise JournalDamaged(f"{path}, line {number}: not a line of a journal: {error}") from error
