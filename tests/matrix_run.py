"""Runs the command line as a user would, for tests that need real engines."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from harness.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
RUN_DEADLINE_S = 600
LEFT_DEADLINE_S = 20


@dataclass
class MatrixRun:
    """A finished or running `run_matrix.py`. `marker` is in the environment of everything it starts."""

    process: subprocess.Popen[str]
    runs_dir: Path
    marker: str
    lines: list[str] = field(default_factory=list)

    def wait_for(self, text: str) -> None:
        """Read the output up to a line with `text`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return
        raise AssertionError(f"{text!r} never came:\n{self.output}")

    def finish(self) -> int:
        """Wait for the end, and that nothing is left running; the exit code."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.readlines()
        exit_code = self.process.wait(RUN_DEADLINE_S)
        eventually(lambda: not self.left(), LEFT_DEADLINE_S)
        return exit_code

    def left(self) -> list[psutil.Process]:
        """Processes of this run other than the command itself."""
        return [p for p in _with_environment("KVPROOF_TEST_RUN", self.marker) if p.pid != self.process.pid]

    def service(self, name: str) -> psutil.Process:
        """The process that the stack started for a service."""
        return next(
            p for p in self.left() if p.ppid() == self.process.pid and _environment(p)["KVPROOF_SERVICE"] == name
        )

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def folder(self) -> Path:
        (folder,) = self.runs_dir.iterdir()
        return folder

    @property
    def report(self) -> dict[str, object]:
        return dict(json.loads((self.folder / "report.json").read_text()))

    def is_quick(self, cell_s_max: float, oracles_max: float) -> bool:
        """Whether a cell took at most so many seconds on average, or, on a slow or busy machine, at most as long as so
        many oracles of this run (their median)."""
        oracles = RunFolder.open(self.folder).load_oracles()
        oracle_s = statistics.median(run.completion.duration_s for run in oracles)
        return float(str(self.report["cells_s"])) / len(self.cells()) <= max(cell_s_max, oracles_max * oracle_s)

    def cells(self) -> dict[str, dict[str, object]]:
        """The cells of report.json by id."""
        return {cell["id"]: cell for cell in self.report["cells"]}  # type: ignore[attr-defined]


@contextmanager
def matrix_run(runs_dir: Path, *arguments: str, **environment: str) -> Iterator[MatrixRun]:
    """Start `run_matrix.py run ARGUMENTS`; whatever the test does, nothing of it is left afterwards."""
    marker = str(runs_dir)
    process = subprocess.Popen(
        [sys.executable, "harness/run_matrix.py", "run", "--runs", str(runs_dir), *arguments],
        cwd=ROOT,
        env={**os.environ, "KVPROOF_TEST_RUN": marker, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = MatrixRun(process, runs_dir, marker)
    try:
        yield run
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        if process.stdout:
            process.stdout.close()


def eventually(holds: Callable[[], bool], deadline_s: float) -> None:
    """Wait until it holds; AssertionError after the deadline."""
    end_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end_s, "still not so at the deadline"
        time.sleep(0.05)


def _with_environment(name: str, value: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _environment(process).get(name) == value]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return {}
