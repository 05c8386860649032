"""The engines of compose.yaml as plain processes of this machine, for hosts without Docker.

Each engine is `python services/entrypoint.py` with the environment that compose.yaml gives it; container folders
and addresses are replaced by folders and ports of this machine. The processes end with the harness, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from harness.errors import UsageError
from harness.records import EngineInfo
from harness.stack.base import Lever, Stack
from harness.stack.definition import EngineDefinition, changed_variables, read_engines

HOST = "127.0.0.1"
STOP_GRACE_S = 20.0
SUPERVISOR_LOG_NAME = "supervisor.log"
MODEL_FOLDER = Path(".cache/smollm2")
LOCAL_MODEL = ("/", "./", "../")
"""How KVPROOF_MODEL begins where it is a folder, not a hub id; services/entrypoint.py takes it so."""
FILE_MODE_CAPABILITIES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, as bits of /proc/<pid>/status: who has them may ignore file modes."""


class ProcessStack(Stack):
    """Starts and stops the engines itself."""

    name = "processes"

    def __init__(
        self,
        compose_file: Path,
        run_dir: Path,
        kv_dir: Path | None,
        environ: Mapping[str, str],
        services: tuple[str, ...] = (),
        settings: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Evidence goes to `<run_dir>/evidence`. `kv_dir` None: a temporary folder, removed by `stop`.
        `services`: start only these; empty: all. Raises UsageError."""
        environ = _seen_from_here(environ)
        engines = read_engines(compose_file, environ)
        self._engines = _chosen(engines, services)
        super().__init__(tuple(engine.service for engine in self._engines), kv_dir, run_dir.resolve() / "evidence")
        self._compose_file = compose_file
        self._root = compose_file.resolve().parent
        self._environ = environ
        self._settings = settings or {}
        self.small_dir = Path(environ["KVPROOF_SMALL_DIR"]) if environ.get("KVPROOF_SMALL_DIR") else None
        self._ports: dict[str, socket.socket] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        try:
            self._make_folders()
            self._ports = {engine.service: reserve_port(engine.host_port) for engine in self._engines}
            for engine in self._engines:
                self._processes[engine.service] = self._launch(engine)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        deadline_s = time.monotonic() + STOP_GRACE_S
        for service, process in self._processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline_s - time.monotonic(), 0))
            self._kill_rest(service, process)
        self._processes = {}
        for held in self._ports.values():
            held.close()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def url(self, service: str) -> str:
        return f"http://{HOST}:{self._port(service)}"

    def changed_variables(self, engines: Mapping[str, EngineInfo]) -> tuple[tuple[str, str], ...]:
        return changed_variables(self._compose_file, {name: engine.settings for name, engine in engines.items()})

    def lever(self, service: str) -> Lever:
        return self._processes[service].send_signal

    def obeys_file_modes(self, service: str) -> bool:
        """By the capabilities of the running engine."""
        status = Path(f"/proc/{self._life(service).read().pid}/status")
        effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text() if status.exists() else "", re.MULTILINE)
        return effective is not None and not int(effective[1], 16) & FILE_MODE_CAPABILITIES

    def _port(self, service: str) -> int:
        return int(self._ports[service].getsockname()[1])

    def _make_folders(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="kvproof-", ignore_cleanup_errors=True)
        self.kv_dir = (self.kv_dir or Path(self._temporary.name) / "kv").resolve()
        _require_writable(self.kv_dir, "KV", "free space or rights there, or choose another one with --kv-dir")
        for service in self.services:
            _require_writable(self.evidence_dir / service, "evidence", "choose another place for the run's results")

    def _launch(self, engine: EngineDefinition) -> subprocess.Popen[bytes]:
        with self._supervisor_log(engine.service).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(self._root / "services" / "entrypoint.py")],
                cwd=self._root,
                env=self._environment(engine),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self, engine: EngineDefinition) -> dict[str, str]:
        return {
            **self._environ,
            **engine.environment,
            **self._settings.get(engine.service, {}),
            "KVPROOF_KV_DIR": str(self.kv_dir),
            "KVPROOF_EVIDENCE_DIR": str(self.evidence_dir),
            "KVPROOF_MODEL_DIR": self._environ.get("KVPROOF_MODEL_DIR") or str(self._root / MODEL_FOLDER),
            "KVPROOF_HOST": HOST,
            "KVPROOF_PORT": str(self._port(engine.service)),
            "KVPROOF_PARENT_PID": str(os.getpid()),
            # vLLM leaves sockets behind in the folder for temporary files.
            "TMPDIR": self._temporary.name if self._temporary else tempfile.gettempdir(),
            "PYTHONUNBUFFERED": "1",
        }

    def _kill_rest(self, service: str, process: subprocess.Popen[bytes]) -> None:
        """What is left of a service after its grace: the supervisor's process group, and the engine's own one."""
        _kill_group(process.pid)
        process.wait()
        life = self._life(service).read()
        if life.is_running and life.pid:
            _kill_group(life.pid)

    def _end_of(self, service: str) -> str:
        process = self._processes.get(service)
        if process is None or process.poll() is None:
            return ""
        return f"ended, {_exit_words(process.returncode)}"

    def _exit_code(self, service: str) -> int:
        return self._processes[service].returncode

    def _log_path(self, service: str) -> Path:
        """The engine's log; the supervisor's while no engine has written anything."""
        engine_log = super()._log_path(service)
        return engine_log if engine_log.exists() and engine_log.stat().st_size else self._supervisor_log(service)

    def _supervisor_log(self, service: str) -> Path:
        return self.evidence_dir / service / SUPERVISOR_LOG_NAME


def reserve_port(port: int) -> socket.socket:
    """A socket that keeps `port` for one engine, or a free port where another program has it or it is 0.

    Engines take their port long after they were started, and vLLM's SO_REUSEPORT lets two of them share one, so
    two runs beside each other must not choose the same. Nobody listens on the socket returned; close it to give
    the port back.
    """
    held = socket.socket()
    try:
        # Without SO_REUSEADDR this also fails for a port that is bound but not listened on yet.
        held.bind((HOST, port))
    except OSError:
        held.close()
        if port == 0:
            raise
        return reserve_port(0)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # now the engine may bind beside us
    return held


def _seen_from_here(environ: Mapping[str, str]) -> dict[str, str]:
    """With the model's folders as whoever set them sees them: engines run in the repository's root."""
    model, model_dir = environ.get("KVPROOF_MODEL", ""), environ.get("KVPROOF_MODEL_DIR", "")
    return {
        **environ,
        **({"KVPROOF_MODEL": str(Path(model).absolute())} if model.startswith(LOCAL_MODEL) else {}),
        **({"KVPROOF_MODEL_DIR": str(Path(model_dir).absolute())} if model_dir else {}),
    }


def _chosen(engines: tuple[EngineDefinition, ...], services: tuple[str, ...]) -> tuple[EngineDefinition, ...]:
    known = [engine.service for engine in engines]
    unknown = [service for service in services if service not in known]
    if unknown:
        raise UsageError(f"no engine is called {', '.join(unknown)}; compose.yaml has {', '.join(known)}")
    return tuple(engine for engine in engines if not services or engine.service in services)


def _require_writable(folder: Path, label: str, remedy: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"kvproof")
    except OSError as error:
        raise UsageError(f"{folder}: the {label} folder cannot be written ({error.strerror}); {remedy}") from None


def _kill_group(group_id: int) -> None:
    # Nothing of the group is left, or on macOS only zombies: both mean that it is over.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group_id, signal.SIGKILL)


def _exit_words(returncode: int) -> str:
    return f"killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exit code {returncode}"
