"""What doctor's checks look at and say, and the questions to the machine that several of them ask."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from harness.stack.definition import EngineDefinition

GIB = 1024**3
COMMAND_TIMEOUT_S = 10


class State(StrEnum):
    """`NOTE`: worth knowing, and no obstacle."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "PROBLEM"


@dataclass(frozen=True)
class Check:
    """What was found. `remedy`: what to do; empty where nothing has to be done."""

    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Machine:
    """What the checks look at. `root`: the repository. `kv_dir` None: a temporary folder. `engines`: without those
    of a profile that is not asked for."""

    root: Path
    environ: Mapping[str, str]
    runs: Path
    kv_dir: Path | None
    engines: tuple[EngineDefinition, ...]


def enough(where: str, there_bytes: int, needed_bytes: int, what: str, remedy: str) -> Check:
    found = f"{there_bytes / GIB:.1f} GiB {where}"
    if there_bytes >= needed_bytes:
        return Check(State.OK, found)
    return Check(State.PROBLEM, f"{found}; {what} may need {needed_bytes / GIB:.1f} GiB", remedy)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free if folder.exists() else 0


def nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())


def first_line(*command: str) -> str:
    """The first line that a command prints, empty when it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(done.stdout.splitlines()), "")
