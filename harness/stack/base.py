"""The interface of a stack, and what all stacks share: waiting until engines are ready, and saying why one is not.

`commands.py` makes one stack per run, `phases.py` opens it (`with stack:`), the runner uses it. Evidence lies where the
services write it: `<evidence_dir>/<service>/`.
"""

from __future__ import annotations

import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import TypeAdapter, ValidationError
from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_fixed

from harness.errors import StackError, UsageError
from harness.records import EngineInfo
from harness.running.client import EngineClient
from harness.stack.life import LifeReader
from services.journal import ENGINE_INFO_NAME, ENGINE_LOG_NAME, EventName, journal_path
from services.signals import KILL_ENGINE

POLL_S = 0.25
NOTICE_S = 20.0
LOG_LINE_COUNT = 20
SEARCHED_LINE_COUNT = 400
ERROR_LINE = re.compile(r"\b\w*(Error|Exception): \S")
"""Of a Python traceback; the API server's last words only point to the engine core's first ones."""
SETTINGS_EXIT_CODES = (2, 64)
"""64: the engine's entrypoint refused a setting; 2: vLLM's server refused a word of its command line."""
LOG_TAIL_BYTES = 64 * 1024

Progress = Callable[[str], None]
Lever = Callable[[signal.Signals], None]


class Stack(ABC):
    """Running engines. `services` are their names; `kv_dir` is the shared KV folder as seen from here, or None
    where it cannot be reached (then storage faults cannot be done). `small_dir` is a folder on a small disk, reached by
    the same path from the engines, that may be filled up; None where there is none."""

    name: str
    small_dir: Path | None = None
    in_compose = False
    """Whether the harness itself is a container of the stack."""

    def __init__(self, services: tuple[str, ...], kv_dir: Path | None, evidence_dir: Path) -> None:
        self.services = services
        self.kv_dir = kv_dir
        self.evidence_dir = evidence_dir
        self._opened_at_s = time.time()
        self._clients: dict[str, EngineClient] = {}
        self._lives: dict[str, LifeReader] = {}

    @abstractmethod
    def start(self) -> None:
        """Start or find the services, without waiting until they are ready. Raises StackError or UsageError;
        nothing is left running then."""

    @abstractmethod
    def stop(self) -> None:
        """End what `start` started, and nothing else. May be called again, and before `start`."""

    @abstractmethod
    def url(self, service: str) -> str:
        """Base URL of a service; known once `start` has returned."""

    @abstractmethod
    def lever(self, service: str) -> Lever:
        """What sends signals to a service's supervisor, which obeys those of services/signals.py.

        A lever returns at once, and raises StackError when it is refused; the service's journal tells when it has
        worked. Raises LeverMissing where this stack cannot signal.
        """

    def kill_engine(self, service: str) -> None:
        """Have the vLLM process killed; its supervisor starts another one. Raises as `lever` and its lever do."""
        self.lever(service)(KILL_ENGINE)

    def obeys_file_modes(self, service: str) -> bool:  # noqa: ARG002
        """Whether the service's engine obeys the modes of files although it may run as root. False where that is not
        known."""
        return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def client(self, service: str) -> EngineClient:
        """The client for a service; the same one each time."""
        if service not in self._clients:
            self._clients[service] = EngineClient(self.url(service))
        return self._clients[service]

    def restart_count(self, service: str) -> int:
        """How often the engine has ended so far, by its supervisor's journal; it only grows."""
        return self._life(service).read().exit_count

    def log_tail(self, service: str, line_count: int) -> tuple[str, ...]:
        """The last lines of the service's log; none where there is no log yet."""
        path = self._log_path(service)
        if not path.exists():
            return ()
        with path.open("rb") as log:
            log.seek(max(path.stat().st_size - LOG_TAIL_BYTES, 0))
            return tuple(log.read().decode(errors="replace").splitlines()[-line_count:])

    def engine_info(self, service: str) -> EngineInfo | None:
        """What the service's engine was started with; None where its entrypoint is not ours (attach). Raises StackError
        for a file that no entrypoint wrote."""
        path = self.evidence_dir / service / ENGINE_INFO_NAME
        try:
            return TypeAdapter(EngineInfo).validate_json(path.read_bytes()) if path.exists() else None
        except ValidationError:
            raise StackError(f"{path} describes no engine; remove it, or have the engine write it anew") from None

    def changed_variables(self, engines: Mapping[str, EngineInfo]) -> tuple[tuple[str, str], ...]:  # noqa: ARG002
        """The variables, and their values, that made these engines differ from compose.yaml's defaults; none where
        the engines are not started from it."""
        return ()

    def report(self, service: str, what: str) -> str:
        """What happened to a service, with its last log lines and where the log lies."""
        lines = self.log_tail(service, LOG_LINE_COUNT)
        path = self._log_path(service)
        if not lines:
            return f"{service}: {what}; no log at {path}"
        first_error = next(
            (line for line in self.log_tail(service, SEARCHED_LINE_COUNT) if ERROR_LINE.search(line)), ""
        )
        cause = [f"{service}: {what}; log: {path}, first error in it:", f"  | {first_error}"] if first_error else []
        head = "its last lines:" if cause else f"{service}: {what}; log: {path}, its last lines:"
        return "\n".join([*cause, head, *(f"  | {line}" for line in lines)])

    def first_exit(self) -> str | None:
        """Which service has ended for good, with exit code and log; None where all still live.

        For a harness that is told to stop (Compose ends all containers as soon as one exits) and wants to say why.
        """
        ended = ((service, self._end_of(service)) for service in self.services)
        return next((self.report(service, end) for service, end in ended if end), None)

    def wait_ready(self, services: Iterable[str], deadline_s: float, progress: Progress) -> None:
        """Wait until all `services` answer; tell `progress` what is awaited, on change and every NOTICE_S seconds.

        Raises StackError as soon as one of them has ended, or after `deadline_s` seconds, and UsageError when it ended
        because of its settings; the text has exit code, log lines and path.
        """
        awaited = _Awaited(tuple(services), progress)
        attempts = Retrying(
            retry=retry_if_result(lambda ready: not ready), stop=stop_after_delay(deadline_s), wait=wait_fixed(POLL_S)
        )
        try:
            attempts(self._all_ready, awaited)
        except RetryError:
            late = (self.report(service, f"still not ready after {deadline_s:g} s") for service in awaited.services)
            raise StackError("\n".join(late)) from None

    def _all_ready(self, awaited: _Awaited) -> bool:
        for service in awaited.services:
            # A health check may take a second; the others' ends are to be seen before that.
            self._require_alive(awaited.all)
            if self._is_ready(service):
                awaited.remove(service)
        awaited.notify()
        return not awaited.services

    def _require_alive(self, services: Iterable[str]) -> None:
        for service in services:
            if end := self._end_of(service):
                error = UsageError if self._exit_code(service) in SETTINGS_EXIT_CODES else StackError
                raise error(self.report(service, end))

    def _is_ready(self, service: str) -> bool:
        """Healthy, and its supervisor (where there is one) knows it, so that it may be killed from now on."""
        return self.client(service).is_healthy() and self._life(service).read().state in (None, EventName.ENGINE_READY)

    def _end_of(self, service: str) -> str:
        """How a service ended for good, in words; empty while it lives. Here: by its journal, since this stack
        was made; a supervisor ends when its engine's first start fails."""
        life = self._life(service).read()
        gave_up = life.gave_up_since(self._opened_at_s)
        return f"the engine ended before it was ready ({life.exit_reason})" if gave_up else ""

    def _exit_code(self, service: str) -> int:  # noqa: ARG002
        """Of a service that has ended for good; 0 where it cannot be known."""
        return 0

    def _log_path(self, service: str) -> Path:
        return self.evidence_dir / service / ENGINE_LOG_NAME

    def _life(self, service: str) -> LifeReader:
        if service not in self._lives:
            self._lives[service] = LifeReader(journal_path(self.evidence_dir, service))
        return self._lives[service]


class _Awaited:
    """The services that are not ready yet, and when this was last said."""

    def __init__(self, services: tuple[str, ...], progress: Progress) -> None:
        self.all = self.services = services
        self._progress = progress
        self._began_s = time.monotonic()
        self._said: tuple[str, ...] = ()
        self._said_at_s = 0.0

    def remove(self, service: str) -> None:
        self.services = tuple(other for other in self.services if other != service)

    def notify(self) -> None:
        now_s = time.monotonic()
        if not self.services or (self.services == self._said and now_s - self._said_at_s < NOTICE_S):
            return
        self._said, self._said_at_s = self.services, now_s
        self._progress(f"waiting for {', '.join(self.services)} ({now_s - self._began_s:.0f} s)")
