"""Keeps one vLLM server running: start, log, journal, start again after a death, and leave nothing behind.

Two small processes, so that either may be killed at any moment: the guard, which whoever started us knows and
signals, and the keeper, the engine's parent. Each adopts the orphans below it (PR_SET_CHILD_SUBREAPER): vLLM's
EngineCore and workers stay in reach when the API server above them is gone. If the guard dies, the keeper gets
SIGTERM and stops the engine; if the keeper dies, the guard kills what is left.

Signals: SIGTERM and SIGINT stop the engine and exit 0; those of signals.py are faults of the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil
import requests

from services.journal import ENGINE_LOG_NAME, EventName, Journal
from services.prctl import prctl
from services.signals import KILL_ENGINE, PAUSE_ENGINE, RESUME_ENGINE

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
FAULT_SIGNALS = frozenset({KILL_ENGINE, PAUSE_ENGINE, RESUME_ENGINE})
WATCHED_SIGNALS = STOP_SIGNALS | FAULT_SIGNALS | {signal.SIGCHLD}
STOP_GRACE_S = 10.0
KILL_DEADLINE_S = 10.0
HEALTH_POLL_S = 0.5
PARENT_POLL_S = 0.5
RESTART_PAUSE_S = 1.0
OUT_OF_MEMORY = ", not from kvproof: often the kernel's, when memory runs out"
SHOWN_LOG_LINES = 40

# <linux/prctl.h>
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Engine:
    """What to run. `host` and `port` are where the server listens. `parent_pid`: stop when our parent is no longer
    this process; 0: whoever it is."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    service: str
    evidence_dir: Path
    host: str
    port: int
    parent_pid: int = 0

    @property
    def health_url(self) -> str:
        reachable = "127.0.0.1" if self.host in ("", "0.0.0.0") else self.host
        return f"http://{reachable}:{self.port}/health"

    @property
    def log_path(self) -> Path:
        return self.evidence_dir / self.service / ENGINE_LOG_NAME


def run(engine: Engine) -> int:
    """Supervise until told to stop (0), or until the first start fails (the engine's exit code, at least 1).

    Call it once, from a process with a single thread: it forks.
    """
    os.umask(0o002)  # the harness reads and damages KV files as a member of the group
    if problem := _port_problem(engine):
        print(problem, file=sys.stderr, flush=True)
        return 1
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED_SIGNALS)
    _adopt_orphans()
    guard_pid = os.getpid()
    keeper_pid = os.fork()
    if keeper_pid == 0:
        _keep_and_exit(engine, guard_pid)
    return _guard(keeper_pid, engine)


def _port_problem(engine: Engine) -> str:
    """Another server on our port would answer /health in our engine's name."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((engine.host, engine.port))
        except OSError as error:
            return f"{engine.service}: cannot listen on {engine.host}:{engine.port}: {error.strerror}"
    return ""


def _guard(keeper_pid: int, engine: Engine) -> int:
    """Pass signals on to the keeper until it ends; then kill what it left, and say so if it was killed itself.

    The parent is polled because the kernel's death signal follows the thread that started us, and a harness
    may start engines from short-lived threads.
    """
    parent_pid = engine.parent_pid
    while True:
        number = _next_signal(PARENT_POLL_S if parent_pid else None)
        if number == signal.SIGCHLD:
            exit_codes = _reap()
            if keeper_pid in exit_codes:
                _kill_descendants()
                return _end_of_keeper(exit_codes[keeper_pid], engine)
        elif number:
            os.kill(keeper_pid, number)
        elif os.getppid() != parent_pid:
            os.kill(keeper_pid, signal.SIGTERM)
            parent_pid = os.getppid()


def _end_of_keeper(exit_code: int, engine: Engine) -> int:
    """The guard's exit code. A keeper that was killed could not note the end of the engine."""
    if exit_code >= 0:
        return exit_code
    reason = f"ended with its supervisor, which got {_exit_reason(exit_code, by_us=False)}"
    Journal(engine.evidence_dir, engine.service).write(EventName.ENGINE_EXITED, reason=reason)
    print(f"{engine.service}: engine {reason}", flush=True)
    return 1


def _keep_and_exit(engine: Engine, guard_pid: int) -> NoReturn:
    """The keeper's whole life; whatever happens it must not return into the guard's code."""
    exit_code = 1
    try:
        _die_with(guard_pid, signal.SIGTERM)
        _adopt_orphans()
        exit_code = _Keeper(engine).keep()
    except OSError as error:
        print(f"{engine.service}: {error}", file=sys.stderr, flush=True)
    except Exception:  # noqa: BLE001  (this process has no caller who could see it)
        traceback.print_exc()
    finally:
        os._exit(exit_code)


class _Keeper:
    """The engine's parent."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.journal = Journal(engine.evidence_dir, engine.service)
        self.was_ready = False
        self.killed_by_us = False
        self.guard_pid = os.getppid()

    def keep(self) -> int:
        self.say(f"log: {self.engine.log_path}")
        while True:
            process = self.start()
            stopped = self.watch(process)
            if stopped:
                self.stop(process)
            _kill_descendants()
            reason = _exit_reason(process.returncode, by_us=self.killed_by_us)
            if stopped and os.getppid() != self.guard_pid:
                reason += "; stopped because its supervisor had been killed"
            self.killed_by_us = False
            self.journal.write(EventName.ENGINE_EXITED, reason=reason, pid=process.pid)
            if stopped:
                return 0
            if not self.was_ready:
                return self.give_up(process.returncode, reason)
            self.say(f"engine ended ({reason}); starting it again")
            if _next_signal(RESTART_PAUSE_S, STOP_SIGNALS):
                return 0

    def start(self) -> subprocess.Popen[bytes]:
        keeper_pid = os.getpid()

        def prepare() -> None:
            _die_with(keeper_pid, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED_SIGNALS)

        with self.engine.log_path.open("ab") as log:
            process = subprocess.Popen(
                self.engine.command,
                env=dict(self.engine.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=prepare,
            )
        self.journal.write(EventName.ENGINE_STARTED, reason=" ".join(self.engine.command), pid=process.pid)
        return process

    def watch(self, process: subprocess.Popen[bytes]) -> bool:
        """Until the engine ended (False) or we are told to stop (True). Polls /health until it is ready."""
        ready = False
        while process.poll() is None:
            number = _next_signal(None if ready else HEALTH_POLL_S)
            if number in STOP_SIGNALS:
                return True
            if number in FAULT_SIGNALS:
                self.strike(process, number)
            elif number == signal.SIGCHLD:
                _reap(except_pid=process.pid)
            elif not number and _healthy(self.engine.health_url):
                ready = self.was_ready = True
                self.journal.write(EventName.ENGINE_READY, pid=process.pid)
                self.say("ready")
        return False

    def strike(self, process: subprocess.Popen[bytes], number: int) -> None:
        """Do to the engine what a fault signal asks for."""
        self.say(f"{signal.Signals(number).name}: a fault of the process")
        if number == KILL_ENGINE:
            self.killed_by_us = True
            process.kill()
        elif number == PAUSE_ENGINE:
            _signal_descendants(signal.SIGSTOP)
            self.journal.write(EventName.ENGINE_PAUSED, pid=process.pid)
        else:
            self.journal.write(EventName.ENGINE_RESUMED, pid=process.pid)
            _signal_descendants(signal.SIGCONT)

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """SIGTERM to the process group, paused or not, and SIGKILL after the grace."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        _signal_descendants(signal.SIGCONT)
        try:
            process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self.killed_by_us = True
            process.kill()
            process.wait()

    def give_up(self, return_code: int, reason: str) -> int:
        with self.engine.log_path.open(errors="replace") as log:
            last_lines = deque(log, SHOWN_LOG_LINES)
        self.say(f"engine did not start ({reason}); end of {self.engine.log_path}:\n{''.join(last_lines)}")
        return return_code if return_code > 0 else 1

    def say(self, text: str) -> None:
        print(f"{self.engine.service}: {text}", flush=True)


def _exit_reason(return_code: int, *, by_us: bool) -> str:
    if return_code >= 0:
        return f"exit code {return_code}"
    from_outside = return_code == -signal.SIGKILL and not by_us
    return f"signal {signal.Signals(-return_code).name}" + (OUT_OF_MEMORY if from_outside else "")


def _healthy(url: str) -> bool:
    with requests.Session() as session:
        session.trust_env = False  # a proxy is not the way to our own child
        try:
            return session.get(url, timeout=2).status_code == 200
        except requests.RequestException:
            return False


def _next_signal(timeout_s: float | None, numbers: frozenset[signal.Signals] = WATCHED_SIGNALS) -> int:
    """The next pending signal, or 0 after `timeout_s`; None waits without end."""
    if timeout_s is None:
        return signal.sigwait(numbers)
    info = signal.sigtimedwait(numbers, timeout_s)
    return info.si_signo if info else 0


def _reap(except_pid: int = 0) -> dict[int, int]:
    """Collect ended children, adopted ones too: pid -> exit code, negative for a signal.

    `except_pid` is left to the Popen object that owns it.
    """
    pids = [child.pid for child in psutil.Process().children() if child.pid != except_pid]
    exits = [(pid, *os.waitpid(pid, os.WNOHANG)) for pid in pids]
    return {pid: os.waitstatus_to_exitcode(status) for pid, ended_pid, status in exits if ended_pid}


def _signal_descendants(number: signal.Signals) -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _kill_descendants() -> None:
    """SIGKILL everything below this process. Parents first: each death makes us the parent of the next."""
    while descendants := psutil.Process().children(recursive=True):
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                process.wait(KILL_DEADLINE_S)


def _adopt_orphans() -> None:
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def _die_with(parent_pid: int, number: signal.Signals) -> None:
    """Get `number` when the parent dies, also when it died before this call."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), number)
