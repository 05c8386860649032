"""Doctor's checks of what the Compose stack needs of Docker."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from harness.cli.machine import GIB, Check, Machine, State, enough, first_line, free_bytes, nearest
from harness.stack.compose import DEFAULT_PROJECT, PROJECT_LABEL
from harness.stack.processes import HOST

IMAGE_BYTES = 6 * GIB
DOCKER_MAJOR_MIN = 23
"""Older engines lack a build feature that compose.yaml uses (additional_contexts)."""


def docker_engine(_: Machine) -> Check:
    version = first_line("docker", "version", "--format", "{{.Server.Version}}")
    if version:
        return recent_docker(version)
    remedy = "install and start Docker Engine (Debian, as root: make docker-engine), or join the group docker"
    return Check(State.PROBLEM, "no engine answers `docker version`", remedy)


def recent_docker(version: str) -> Check:
    major = re.match(r"\d+", version)
    if major and int(major[0]) >= DOCKER_MAJOR_MIN:
        return Check(State.OK, version)
    return Check(State.PROBLEM, f"{version} is too old to build the images", f"install {DOCKER_MAJOR_MIN} or newer")


def docker_compose(_: Machine) -> Check:
    return _plugin(
        "compose", "install the Compose v2 plugin (docker-compose-plugin; Debian, as root: make docker-engine)"
    )


def docker_buildx(_: Machine) -> Check:
    return _plugin("buildx", "install the buildx plugin (docker-buildx-plugin; Debian, as root: make docker-engine)")


def _plugin(name: str, remedy: str) -> Check:
    said = first_line("docker", name, "version")
    return Check(State.OK, said) if said else Check(State.PROBLEM, f"docker {name} is not there", remedy)


def docker_disk(_: Machine) -> Check:
    folder = Path(first_line("docker", "info", "--format", "{{.DockerRootDir}}") or "/var/lib/docker")
    remedy = "free some (docker system df shows who has it)"
    return enough(f"free for {folder}", free_bytes(nearest(folder)), IMAGE_BYTES, "the images", remedy)


def ports(machine: Machine) -> Check:
    taken = [engine.host_port for engine in machine.engines if engine.host_port and not port_is_free(engine.host_port)]
    if not taken:
        return Check(State.OK, f"free: {', '.join(str(engine.host_port) for engine in machine.engines)}")
    numbers = ", ".join(map(str, taken))
    if project_runs(machine):
        return Check(State.OK, f"{numbers}: taken while the Compose project runs")
    return Check(State.PROBLEM, f"taken: {numbers}", "end who listens there, or set PREFILL_PORT, DECODE_..._PORT")


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def project_runs(machine: Machine) -> bool:
    label = f"{PROJECT_LABEL}={machine.environ.get('COMPOSE_PROJECT_NAME') or DEFAULT_PROJECT}"
    return first_line("docker", "ps", "--quiet", "--filter", f"label={label}") != ""
