"""A run on disk: everything that is needed to judge a run again, or to report it again, without an engine.

`session.py` and `phases.py` save as soon as something is known; `phases.py`, `commands.py` and `compare.py` load.

    <runs>/<run_id>/run.json  plan.json  prompts.json  oracles.json  timing.json
    <runs>/<run_id>/evidence/<service>/        journals and logs of the engines
    <runs>/<run_id>/cells/<cell_id>/cell.json  observation.json  journal.jsonl  engine.log  verdict.json
    <runs>/<run_id>/cells/<cell_id>/again/     the same of its second attempt, where there was one

A file is there whole or not at all: each is written beside its place and then renamed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from harness.errors import HarnessError, UsageError
from harness.records import (
    CELL_ID_BYTES_MAX,
    SCHEMA_VERSION,
    Cell,
    Observation,
    OracleRun,
    Plan,
    Prompt,
    RunInfo,
    Timing,
    Verdict,
)
from services.journal import ENGINE_LOG_NAME, JOURNAL_NAME, Event

T = TypeVar("T")

RUN_NAME = "run.json"
OBSERVATION_NAME = "observation.json"
VERDICT_NAME = "verdict.json"
TIMING_NAME = "timing.json"
ORACLES_NAME = "oracles.json"
AGAIN_NAME = "again"
EVIDENCE_NAME = "evidence"
NAME_CHARS = 50
"""Of a file's name, in that of the temporary file beside it: it may be as long as a name can be."""

_run_info = TypeAdapter(RunInfo)
_plan = TypeAdapter(Plan)
_prompts = TypeAdapter(tuple[Prompt, ...])
_oracles = TypeAdapter(tuple[OracleRun, ...])
_timing = TypeAdapter(Timing)
_cell = TypeAdapter(Cell)
_observation = TypeAdapter(Observation)
_verdict = TypeAdapter(Verdict)
_event = TypeAdapter(Event)


def new_run_id(now: datetime) -> str:
    """A folder name that sorts by time, such as 20261130-154501."""
    return now.strftime("%Y%m%d-%H%M%S")


def dumps(adapter: TypeAdapter[T], value: T) -> str:
    """`value` as indented JSON. Infinite and NaN log-probabilities are kept, as Infinity and NaN."""
    return json.dumps(adapter.dump_python(value, mode="json"), indent=1, ensure_ascii=False) + "\n"


def loads(adapter: TypeAdapter[T], text: str | bytes) -> T:
    """Inverse of `dumps`. Raises pydantic.ValidationError for anything else."""
    return adapter.validate_json(text)


def write_text(path: Path, text: str) -> None:
    """Put `text` at `path` as UTF-8, whole or not at all; makes the folders above it.

    A lone surrogate, which UTF-8 cannot hold, becomes "?". Raises HarnessError when the disk refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise HarnessError(f"cannot write {path}: {error.strerror}") from error


def _replace(path: Path, data: bytes) -> None:
    path = path.resolve()
    if path.exists() and not path.is_file():
        # A device or a pipe is written to, and stays what it is; a folder refuses.
        path.write_bytes(data)
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:NAME_CHARS]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp lets only the owner read; results of a container are read by the host's user.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        # Interrupted when it had its name already.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. Loading raises UsageError when a file is missing or is not what a run wrote."""

    path: Path

    @classmethod
    def create(cls, runs_dir: Path, run_id: str) -> RunFolder:
        """A new, empty run folder. Raises UsageError when it is there already or cannot be made."""
        path = runs_dir / run_id
        try:
            (path / "cells").mkdir(parents=True)
        except FileExistsError:
            raise UsageError(f"{path} is there already; name another run id or another folder for runs") from None
        except OSError as error:
            raise UsageError(
                f"cannot make the run folder {path}: {error.strerror}; "
                f"let user {os.getuid()} write to {runs_dir} or name another folder for runs"
            ) from error
        return cls(path)

    @classmethod
    def create_new(cls, runs_dir: Path, now: datetime) -> RunFolder:
        """As `create`, named by the time; a second run of the same second gets a number behind it."""
        run_id = new_run_id(now)
        taken = (n for n in itertools.count(2) if not (runs_dir / f"{run_id}-{n}").exists())
        return cls.create(runs_dir, f"{run_id}-{next(taken)}" if (runs_dir / run_id).exists() else run_id)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The run that lies at `path`. Raises UsageError when none does, or one of another schema version."""
        file = path / RUN_NAME
        if not _is_file(file):
            raise UsageError(f"{path} is not a run folder: it has no {RUN_NAME}")
        version = _schema_version(file)
        if version != SCHEMA_VERSION:
            raise UsageError(
                f"{file}: schema_version is {version}, this version reads {SCHEMA_VERSION}; "
                "use the version of kvproof that wrote it"
            )
        return cls(path)

    def save_info(self, info: RunInfo) -> None:
        self._save(RUN_NAME, _run_info, info)

    def load_info(self) -> RunInfo:
        return self._load(RUN_NAME, _run_info)

    def save_plan(self, plan: Plan) -> None:
        self._save("plan.json", _plan, plan)

    def load_plan(self) -> Plan:
        return self._load("plan.json", _plan)

    def save_prompts(self, prompts: tuple[Prompt, ...]) -> None:
        self._save("prompts.json", _prompts, prompts)

    def load_prompts(self) -> tuple[Prompt, ...]:
        return self._load("prompts.json", _prompts)

    def save_oracles(self, oracles: tuple[OracleRun, ...]) -> None:
        self._save(ORACLES_NAME, _oracles, oracles)

    def load_oracles(self) -> tuple[OracleRun, ...]:
        return self._load(ORACLES_NAME, _oracles)

    def has_oracles(self) -> bool:
        """Whether the oracles were measured; they are saved when all are."""
        return _is_file(self.path / ORACLES_NAME)

    def has_info(self) -> bool:
        """Whether the run has begun."""
        return _is_file(self.path / RUN_NAME)

    def save_timing(self, timing: Timing) -> None:
        self._save(TIMING_NAME, _timing, timing)

    def load_timing(self) -> Timing:
        """What was spent so far; nothing before the first phase ended."""
        there = _is_file(self.path / TIMING_NAME)
        return self._load(TIMING_NAME, _timing) if there else Timing((), 0.0)

    def save_observation(self, cell: Cell, observation: Observation, *, again: bool = False) -> None:
        """The cell, what was observed, its journal events (one a line) and its log lines."""
        name = self._attempt_name(cell.id, again)
        self._save(f"{name}/cell.json", _cell, cell)
        write_text(self.path / name / JOURNAL_NAME, "".join(map(_event_line, observation.events)))
        write_text(self.path / name / ENGINE_LOG_NAME, "".join(f"{line}\n" for line in observation.log_lines))
        # Last, because its presence says that the cell is complete.
        self._save(f"{name}/{OBSERVATION_NAME}", _observation, replace(observation, events=(), log_lines=()))

    def load_cell(self, cell_id: str) -> Cell:
        return self._load(f"{self._attempt_name(cell_id)}/cell.json", _cell)

    def load_observation(self, cell_id: str, *, again: bool = False) -> Observation:
        name = self._attempt_name(cell_id, again)
        observation = self._load(f"{name}/{OBSERVATION_NAME}", _observation)
        lines = self._read(f"{name}/{JOURNAL_NAME}").splitlines()
        events = tuple(self._parse(f"{name}/{JOURNAL_NAME}, line {n}", _event, line) for n, line in enumerate(lines, 1))
        log = self._read(f"{name}/{ENGINE_LOG_NAME}").decode(errors="replace")
        return replace(observation, events=events, log_lines=tuple(log.split("\n")[:-1]))

    def save_verdict(self, verdict: Verdict, *, again: bool = False) -> None:
        self._save(f"{self._attempt_name(verdict.cell_id, again)}/{VERDICT_NAME}", _verdict, verdict)

    def load_verdict(self, cell_id: str) -> Verdict:
        return self._load(f"{self._attempt_name(cell_id)}/{VERDICT_NAME}", _verdict)

    def load_observations(self, *, again: bool = False) -> tuple[Observation, ...]:
        """Of every cell that was run (or, `again`, run a second time), in the order of the plan; an interrupted run
        has fewer than cells."""
        return tuple(self.load_observation(each, again=again) for each in self._cells_with(OBSERVATION_NAME, again))

    def load_verdicts(self) -> tuple[Verdict, ...]:
        """Of every cell that was judged, in the order of the plan."""
        return tuple(self.load_verdict(cell_id) for cell_id in self._cells_with(VERDICT_NAME))

    def save_evidence(self, evidence_dir: Path, services: Iterable[str]) -> None:
        """Copy the logs and journals of these services to `evidence/`, unless they lie there already."""
        kept = self.path / EVIDENCE_NAME
        if evidence_dir.resolve() == kept.resolve():
            return
        for service in services:
            for file in (evidence_dir / service).glob("*"):
                # Somebody else's folder may hold anything; only files can be copied.
                if file.is_file():
                    (kept / service).mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, kept / service / file.name)

    def discard_unused(self) -> bool:
        """Remove the folder again, unless an engine has left something in it; whether it was removed."""
        if any(path.is_file() for path in (self.path / EVIDENCE_NAME).rglob("*")):
            return False
        shutil.rmtree(self.path)
        return True

    def cell_path(self, cell_id: str) -> Path:
        """The folder with a cell's evidence."""
        return self.path / self._attempt_name(cell_id)

    def _cells_with(self, name: str, again: bool = False) -> tuple[str, ...]:
        ids = (cell.id for cell in self.load_plan().cells)
        return tuple(each for each in ids if _is_file(self.path / self._attempt_name(each, again) / name))

    @staticmethod
    def _attempt_name(cell_id: str, again: bool = False) -> str:
        # A cell id comes from a matrix file, and must not lead out of the run folder.
        bad = cell_id in ("", ".", "..") or not cell_id.isprintable() or set(cell_id) & set("/\\")
        if bad or len(cell_id.encode(errors="replace")) > CELL_ID_BYTES_MAX:
            raise UsageError(
                f"cell id {cell_id!r} cannot be a folder name: use up to {CELL_ID_BYTES_MAX} printable characters, "
                "no slash, not '.' or '..'"
            )
        return f"cells/{cell_id}/{AGAIN_NAME}" if again else f"cells/{cell_id}"

    def _save(self, name: str, adapter: TypeAdapter[T], value: T) -> None:
        write_text(self.path / name, dumps(adapter, value))

    def _load(self, name: str, adapter: TypeAdapter[T]) -> T:
        return self._parse(name, adapter, self._read(name))

    def _read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {self.path / name}: {error.strerror}; the run may be incomplete") from error

    def _parse(self, name: str, adapter: TypeAdapter[T], data: bytes) -> T:
        try:
            return loads(adapter, data)
        except ValidationError as error:
            raise UsageError(f"{self.path / name} is not what kvproof wrote:\n{_problems(error)}") from error


def _is_file(path: Path) -> bool:
    """Raises UsageError where that cannot be seen."""
    try:
        return path.is_file()
    except OSError as error:
        raise UsageError(f"cannot look at {path}: {error.strerror}") from error


def _event_line(event: Event) -> str:
    # Empty fields are left out, as in a service's own journal.
    fields = _event.dump_python(event, mode="json", exclude_defaults=True)
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False) + "\n"


def _schema_version(file: Path) -> object:
    try:
        raw = json.loads(file.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not JSON: {error}") from error
    return raw.get("schema_version", "missing") if isinstance(raw, dict) else "missing"


def _problems(error: ValidationError) -> str:
    return "\n".join(
        f"  {problem['msg']} @ {'.'.join(map(str, problem['loc'])) or 'the whole file'}" for problem in error.errors()
    )
