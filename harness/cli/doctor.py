"""Whether this machine can run kvproof: one small function for each thing that has to be there.

`commands.py` calls `examine`; the terminal shows the result. A check that a stack does not need is told, but is no
problem for it. Nothing is changed or started here.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness.cli.doctor_docker import docker_buildx, docker_compose, docker_disk, docker_engine, ports
from harness.cli.machine import GIB, Check, Machine, State, enough, first_line, free_bytes, nearest
from harness.stack.compose import is_started
from harness.stack.definition import read_engines
from harness.stack.processes import LOCAL_MODEL, MODEL_FOLDER

ENGINE_BYTES = int(2.5 * GIB)
"""Memory of one engine of compose.yaml with its default model."""
SHARED_MEMORY_BYTES = GIB
RUNS_BYTES = GIB
EMBEDDED_MODEL = "smollm2"
INSTALL = "run `make demo` once, and use .venv/bin/python"


def examine(root: Path, environ: Mapping[str, str], stack: str, runs: Path, kv_dir: Path | None) -> dict[str, Check]:
    """Every check by name. Raises UsageError when compose.yaml cannot be read."""
    profiles = environ.get("COMPOSE_PROFILES", "").split(",")
    engines = (engine for engine in read_engines(root / "compose.yaml", environ) if is_started(engine, profiles))
    machine = Machine(root, environ, runs, kv_dir, tuple(engines))
    return {name: _for_stack(_checked(check, machine), stack in needed_by) for name, check, needed_by in CHECKS}


def _checked(check: Callable[[Machine], Check], machine: Machine) -> Check:
    """A check that the machine refuses to answer is a problem, and the others go on."""
    try:
        return check(machine)
    except (OSError, ValueError, psutil.Error) as error:
        return Check(State.PROBLEM, f"cannot be found out: {error}", "run doctor as the user who will run the matrix")


def _for_stack(check: Check, needed: bool) -> Check:
    if needed or check.state is not State.PROBLEM:
        return check
    return replace(check, state=State.NOTE, found=f"{check.found} (this stack does not need it)")


def python_version(_: Machine) -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] == (3, 11):
        return Check(State.OK, version)
    return Check(State.NOTE, f"{version}; requirements.lock was made for 3.11", "make demo PYTHON=python3.11")


def packages(machine: Machine) -> Check:
    """Every package of requirements.lock, in its version; another version may be meant (to test another vLLM)."""
    return compare_packages(
        locked_versions((machine.root / "requirements.lock").read_text()),
        {canonicalize_name(found.name): found.version for found in importlib.metadata.distributions()},
    )


def locked_versions(lock: str) -> dict[str, str]:
    """Package -> version, from the text of a lock file. Raises ValueError for a line that is no requirement."""
    lines = (line.partition("#")[0].strip() for line in lock.splitlines())
    locked = [Requirement(line) for line in lines if line]
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in locked}


def compare_packages(locked: Mapping[str, str], installed: Mapping[str, str]) -> Check:
    missing = [name for name in locked if name not in installed]
    other = [f"{n} {installed[n]}, not {v}" for n, v in locked.items() if n in installed and installed[n] != v]
    if missing:
        return Check(State.PROBLEM, f"not installed: {_few(missing)}", INSTALL)
    if other:
        remedy = "if that is not meant: .venv/bin/pip install --no-deps -r requirements.lock"
        return Check(State.NOTE, f"other versions: {_few(other)}", remedy)
    return Check(State.OK, f"{len(locked)} as in requirements.lock")


def model(machine: Machine) -> Check:
    name = machine.environ.get("KVPROOF_MODEL") or EMBEDDED_MODEL
    if name == EMBEDDED_MODEL:
        folder = Path(machine.environ.get("KVPROOF_MODEL_DIR") or machine.root / MODEL_FOLDER)
        if not folder.exists():
            return Check(State.NOTE, f"{name} is made in {folder} at the first start (10 s, 0.3 GB)")
        return model_folder(
            folder, "let KVPROOF_MODEL_DIR name a folder that is not there yet; the model is made in it"
        )
    if name.startswith(LOCAL_MODEL):
        return model_folder(Path(name), "let KVPROOF_MODEL name a folder with a model as Hugging Face stores it")
    return Check(State.NOTE, f"{name} is fetched from a model hub, unless it is in the cache; that needs a network")


def model_folder(folder: Path, remedy: str) -> Check:
    """A folder that vLLM can load: readable, with a config and weights."""
    if not os.access(folder, os.R_OK | os.X_OK) or not os.access(folder / "config.json", os.R_OK):
        return Check(State.PROBLEM, f"{folder} has no config.json that can be read", remedy)
    if not any(os.access(file, os.R_OK) for file in folder.glob("*.safetensors")):
        return Check(State.PROBLEM, f"{folder} has no *.safetensors that can be read", remedy)
    return Check(State.OK, str(folder))


def memory(machine: Machine) -> Check:
    available_bytes = psutil.virtual_memory().available
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
        used_bytes = int(limit.with_name("memory.current").read_text())
        available_bytes = min(available_bytes, int(text) - used_bytes)
    return enough_memory(available_bytes, len(machine.engines))


def enough_memory(available_bytes: int, engine_count: int) -> Check:
    needed_bytes = engine_count * ENGINE_BYTES
    remedy = "end other programs, or run fewer engines: --only 'recompute-*' needs three"
    return enough("available", available_bytes, needed_bytes, f"{engine_count} engines", remedy)


def shared_memory(_: Machine) -> Check:
    remedy = "give the container that this runs in more (--shm-size 1g), or remount /dev/shm with size=1g"
    return enough("free in /dev/shm", free_bytes(Path("/dev/shm")), SHARED_MEMORY_BYTES, "the engines", remedy)


def disk(machine: Machine) -> Check:
    """Room for results and KV."""
    folders = (machine.runs, machine.kv_dir or Path(tempfile.gettempdir()))
    folder = min(folders, key=lambda folder: free_bytes(nearest(folder)))
    remedy = "free some, or choose other folders with --runs and --kv-dir"
    return enough(f"free for {folder}", free_bytes(nearest(folder)), RUNS_BYTES, "a run", remedy)


def folders(machine: Machine) -> Check:
    """Whether results, and KV files, can be written where they are to go."""
    chosen = [folder for folder in (machine.runs, machine.kv_dir or Path(tempfile.gettempdir())) if folder]
    closed = [str(folder) for folder in chosen if not _writable(folder)]
    if closed:
        remedy = f"let them be folders that user {os.getuid()} may write to, or choose others with --runs and --kv-dir"
        return Check(State.PROBLEM, f"cannot be written: {', '.join(closed)}", remedy)
    return Check(State.OK, f"can be written: {', '.join(map(str, chosen))}")


def earlier_engines(_: Machine) -> Check:
    """Engines whose harness has ended; they end with it unless they hang."""
    parents = dict(_engine_parents())
    stale = [pid for pid, parent in parents.items() if not psutil.pid_exists(parent)]
    if stale:
        pids = " ".join(map(str, stale))
        return Check(State.PROBLEM, f"engines of a run that has ended: process {pids}", f"kill {pids}")
    if parents:
        return Check(State.NOTE, f"another run goes on: process {sorted(set(parents.values()))[0]}")
    return Check(State.OK, "none is left")


def _engine_parents() -> Iterator[tuple[int, int]]:
    """Processes of engines that can be seen, with the process of their harness."""
    for process in psutil.process_iter():
        try:
            parent = process.environ().get("KVPROOF_PARENT_PID", "")
        except psutil.Error:
            continue  # ended meanwhile, or another user's
        if parent.isdecimal():
            yield process.pid, int(parent)


def gpu(_: Machine) -> Check:
    names = first_line("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    return Check(
        State.NOTE, f"{names} (compose.gpu.yaml uses it)" if names else "none; not needed, engines run on the CPU"
    )


def _writable(folder: Path) -> bool:
    there = nearest(folder)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _few(words: list[str]) -> str:
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more" if len(words) > 4 else "")


ALL, LOCAL, CONTAINERS = ("processes", "compose", "attach"), ("processes",), ("compose",)
CHECKS: tuple[tuple[str, Callable[[Machine], Check], tuple[str, ...]], ...] = (
    ("Python", python_version, ALL),
    ("packages", packages, LOCAL),
    ("model", model, LOCAL),
    ("memory", memory, (*LOCAL, *CONTAINERS)),
    ("shared memory", shared_memory, LOCAL),
    ("disk", disk, ALL),
    ("folders", folders, ALL),
    ("ports", ports, CONTAINERS),
    ("earlier runs", earlier_engines, (*LOCAL, *CONTAINERS)),
    ("Docker engine", docker_engine, CONTAINERS),
    ("Docker Compose", docker_compose, CONTAINERS),
    ("Docker buildx", docker_buildx, CONTAINERS),
    ("Docker disk", docker_disk, CONTAINERS),
    ("GPU", gpu, ()),
)
"""What is looked at, and which stacks need it."""
