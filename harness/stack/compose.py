"""The engines as containers that Docker Compose has started; this module finds them, it never starts or stops them.

Inside the harness container (KVPROOF_IN_COMPOSE=1) names and folders follow from compose.yaml. On the host the Docker
engine is asked for the running project.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import docker
import requests
from docker.errors import DockerException

from harness.errors import LeverMissing, StackError
from harness.records import EngineInfo
from harness.running.client import root_cause
from harness.stack.base import Lever, Stack
from harness.stack.definition import EngineDefinition, changed_variables, read_engines

if TYPE_CHECKING:
    from docker.models.containers import Container

PROJECT_LABEL = "com.docker.compose.project"
SERVICE_LABEL = "com.docker.compose.service"
DEFAULT_PROJECT = "kvproof"
DOCKER_SOCKET = Path("/var/run/docker.sock")
KV_MOUNT = "/kv"
EVIDENCE_MOUNT = "/evidence"
SMALL_MOUNT = "/small"
ENDED_STATES = ("exited", "dead")
START_HINT = "start the stack with `make up` or `docker compose up --detach`"


class ComposeStack(Stack):
    """The running Compose project. `environ` decides where we are (KVPROOF_IN_COMPOSE), which project it is
    (COMPOSE_PROJECT_NAME), and which engines of a profile run (COMPOSE_PROFILES)."""

    name = "compose"

    def __init__(self, compose_file: Path, environ: Mapping[str, str], services: tuple[str, ...]) -> None:
        """Uses only `services`, and of those only the ones that run. Raises UsageError when compose.yaml cannot be
        read."""
        self._profiles = environ.get("COMPOSE_PROFILES", "")
        engines = [engine for engine in read_engines(compose_file, environ) if engine.service in services]
        super().__init__(
            tuple(engine.service for engine in engines if is_started(engine, self._profiles.split(","))),
            Path(environ.get("KVPROOF_KV_DIR", KV_MOUNT)),
            Path(environ.get("KVPROOF_EVIDENCE_DIR", EVIDENCE_MOUNT)),
        )
        self._compose_file = compose_file
        self.in_compose = environ.get("KVPROOF_IN_COMPOSE", "") == "1"
        # On the host the folder has another path than in the engines.
        self.small_dir = Path(environ.get("KVPROOF_SMALL_DIR", SMALL_MOUNT)) if self.in_compose else None
        self._project = environ.get("COMPOSE_PROJECT_NAME", DEFAULT_PROJECT)
        self._container_ports = {engine.service: engine.container_port for engine in engines}
        self._urls = {service: f"http://{service}:{port}" for service, port in self._container_ports.items()}
        self._containers: dict[str, Container] = {}

    def start(self) -> None:
        """Inside a container: nothing to find. On the host: raises StackError when the project does not run, or
        its volumes cannot be read by this user."""
        if self.in_compose:
            return
        self._containers = self._find_containers()
        self._urls = {service: self._published_url(service) for service in self.services}
        mounts = {mount["Destination"]: Path(mount["Source"]) for mount in self._first_container().attrs["Mounts"]}
        self.evidence_dir = _require_folder(mounts.get(EVIDENCE_MOUNT), "evidence", os.R_OK | os.X_OK)
        self.kv_dir = _require_folder(mounts.get(KV_MOUNT), "KV", os.R_OK | os.W_OK | os.X_OK)

    def stop(self) -> None:
        """Nothing: Compose started the services and Compose ends them."""

    def url(self, service: str) -> str:
        return self._urls[service]

    def changed_variables(self, engines: Mapping[str, EngineInfo]) -> tuple[tuple[str, str], ...]:
        own = (("COMPOSE_PROFILES", self._profiles),) if self._profiles else ()
        return own + changed_variables(self._compose_file, {name: engine.settings for name, engine in engines.items()})

    def lever(self, service: str) -> Lever:
        if self.in_compose and not DOCKER_SOCKET.exists():
            raise LeverMissing(
                f"{service}: to kill or pause an engine the harness container needs the Docker socket: "
                "compose.process-faults.yaml gives it (docs/own-services.md)"
            )
        self._containers = self._containers or self._find_containers()
        container = self._containers[service]

        def send(number: signal.Signals) -> None:
            try:
                container.kill(signal=number.name)
            except (DockerException, requests.RequestException) as error:
                raise StackError(f"{service}: Docker refused to signal the container: {error}") from None

        return send

    def _find_containers(self) -> dict[str, Container]:
        label = f"{PROJECT_LABEL}={self._project}"
        try:
            found = docker.from_env().containers.list(filters={"label": label})
        except (DockerException, requests.RequestException) as error:
            raise StackError(f"the Docker engine cannot be reached: {root_cause(error)}") from None
        containers = {container.labels.get(SERVICE_LABEL): container for container in found}
        missing = [service for service in self.services if service not in containers]
        if missing:
            raise StackError(f"Compose project {self._project}: {', '.join(missing)} not running; {START_HINT}")
        return {service: containers[service] for service in self.services}

    def _first_container(self) -> Container:
        return self._containers[self.services[0]]

    def _published_url(self, service: str) -> str:
        bindings = self._containers[service].ports.get(f"{self._container_ports[service]}/tcp")
        if not bindings:
            raise StackError(f"{service}: its container publishes no port; run the harness inside Compose (`make up`)")
        return f"http://127.0.0.1:{bindings[0]['HostPort']}"

    def _end_of(self, service: str) -> str:
        container = self._containers.get(service)
        if container is None:
            return super()._end_of(service)
        container.reload()
        if container.status not in ENDED_STATES:
            return super()._end_of(service)
        return f"its container ended, exit code {container.attrs['State']['ExitCode']}"

    def _exit_code(self, service: str) -> int:
        container = self._containers.get(service)
        return int(container.attrs["State"]["ExitCode"]) if container else super()._exit_code(service)


def is_started(engine: EngineDefinition, profiles: Sequence[str]) -> bool:
    """Whether `docker compose up` with these profiles starts the engine; `*` is every profile."""
    return not engine.profiles or not {"*", *engine.profiles}.isdisjoint(profiles)


def _require_folder(folder: Path | None, label: str, rights: int) -> Path:
    if folder is None:
        raise StackError(f"the engines have no {label} volume; is this kvproof's compose.yaml?")
    if not os.access(folder, rights):
        raise StackError(
            f"{folder}: the {label} volume is not open to this user; run the harness inside Compose (`make up`), "
            "or on the host with enough rights"
        )
    return folder
