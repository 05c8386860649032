"""Reads the engines out of compose.yaml, the one definition of the stack, without Docker.

The process stack starts what it says; the compose stack takes names and ports from it, and plans which engines there
are and what they do after a failed load.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError

from harness.errors import UsageError
from harness.records import BASELINE, Engine

COMPOSE_FILE = Path(__file__).resolve().parents[2] / "compose.yaml"

DECODE_ROLE = "decode"
PORT_MAX = 65535
DEFAULT_POLICY = "recompute"
"""What services/entrypoint.py takes where compose.yaml says nothing."""
OWN_SETTINGS = frozenset(
    {"KVPROOF_SERVICE", "KVPROOF_ROLE", "KVPROOF_FAULTS", "KV_LOAD_FAILURE_POLICY", "KVPROOF_HOST", "KVPROOF_PORT"}
)
"""Settings in which two engines may differ and still compute the same tokens in the same steps."""

EXPRESSION = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:(?P<operator>:?-)(?P<default>.*))?", re.ASCII | re.DOTALL)
PASSED_ON = re.compile(r"\$\{(?P<name>[A-Za-z_]\w*):?-[^${}]*\}", re.ASCII)
"""A value that is one variable's, or a default."""
BARE_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class EngineDefinition:
    """One engine. `environment` is complete and interpolated; `host_port` is the published port, 0 for none.
    `profiles`: the service is started only when one of these is asked for; empty: always."""

    service: str
    environment: Mapping[str, str]
    host_port: int
    container_port: int
    profiles: tuple[str, ...] = ()


class _Port(BaseModel):
    target: int
    published: str | int = 0


class _Service(BaseModel):
    environment: dict[str, Scalar] | list[str] = {}
    ports: list[str | int | _Port] = []
    profiles: tuple[str, ...] = ()


class _ComposeFile(BaseModel):
    services: dict[str, _Service]


def read_engines(compose_file: Path, environ: Mapping[str, str]) -> tuple[EngineDefinition, ...]:
    """The services that have a KVPROOF_ROLE, in the file's order.

    Raises UsageError when the file cannot be read, has no such service, or uses an interpolation that is not
    understood here.
    """
    services = _engine_services(compose_file)
    try:
        return tuple(_engine(name, service, environ) for name, service in services.items())
    except InterpolationError as error:
        raise UsageError(f"{compose_file}: {error}") from None


def changed_variables(compose_file: Path, settings: Mapping[str, Mapping[str, str]]) -> tuple[tuple[str, str], ...]:
    """The variables that must have been set, and to what, for engines to get `settings` (by service): those of
    which compose.yaml passes the value on as it is, and whose default is another one. In the file's order.

    Raises UsageError as `read_engines`.
    """
    found: dict[str, str] = {}
    for name, service in _engine_services(compose_file).items():
        for key, value in _pairs(service).items():
            variable = PASSED_ON.fullmatch(_text(value))
            given = settings.get(name, {}).get(key)
            if variable and given is not None and given != interpolate(_text(value), {}):
                found.setdefault(variable["name"], given)
    return tuple(found.items())


def _engine_services(compose_file: Path) -> dict[str, _Service]:
    try:
        services = _ComposeFile.model_validate(yaml.safe_load(compose_file.read_text())).services
    except OSError as error:
        raise UsageError(f"{compose_file}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValidationError) as error:
        raise UsageError(f"{compose_file}: {error}") from None
    engines = {name: service for name, service in services.items() if "KVPROOF_ROLE" in _pairs(service)}
    if not engines:
        raise UsageError(f"{compose_file}: no service has KVPROOF_ROLE in its environment, so there is no engine")
    return engines


def cell_engines(definitions: Iterable[EngineDefinition]) -> dict[str, Engine]:
    """The engines that cells can name, by service: every one that decodes."""
    decoding = {d.service: d for d in definitions if d.environment["KVPROOF_ROLE"] == DECODE_ROLE}
    return {service: _cell_engine(definition, decoding.get(BASELINE)) for service, definition in decoding.items()}


def _cell_engine(definition: EngineDefinition, baseline: EngineDefinition | None) -> Engine:
    """An engine whose settings differ from the baseline's is its own oracle: another step budget is another sum."""
    alike = baseline is not None and _shared_settings(definition) == _shared_settings(baseline)
    policy = definition.environment.get("KV_LOAD_FAILURE_POLICY", DEFAULT_POLICY)
    return Engine(definition.service, policy, BASELINE if alike else definition.service)


def _shared_settings(definition: EngineDefinition) -> dict[str, str]:
    return {name: value for name, value in definition.environment.items() if name not in OWN_SETTINGS}


class InterpolationError(ValueError):
    """The text names the expression that is not understood."""


def interpolate(text: str, environ: Mapping[str, str]) -> str:
    """`text` with `$NAME`, `${NAME}`, `${NAME-default}` and `${NAME:-default}` replaced and `$$` made `$`.

    A default may hold balanced braces and expressions of its own. An unset variable is empty. Raises
    InterpolationError for anything else after a `$`.
    Source: https://docs.docker.com/reference/compose-file/interpolation/
    """
    before, dollar, after = text.partition("$")
    if not dollar:
        return text
    if after.startswith("$"):
        return f"{before}${interpolate(after[1:], environ)}"
    if after.startswith("{"):
        end = _closing_brace(after)
        return before + _expand(after[1:end], environ) + interpolate(after[end + 1 :], environ)
    name = BARE_NAME.match(after)
    if name is None:
        raise InterpolationError(f"a lone $ in {text!r}; write $$ for a dollar sign")
    return before + environ.get(name[0], "") + interpolate(after[name.end() :], environ)


def _closing_brace(text: str) -> int:
    """Index of the brace that closes the one at index 0."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return index
    raise InterpolationError(f"no closing brace in ${text!r}")


def _expand(expression: str, environ: Mapping[str, str]) -> str:
    parts = EXPRESSION.fullmatch(expression)
    if parts is None:
        raise InterpolationError(f"${{{expression}}} is not understood; use ${{NAME}} or ${{NAME:-default}}")
    value = environ.get(parts["name"])
    if value is None or (not value and parts["operator"] == ":-"):
        return interpolate(parts["default"] or "", environ)
    return value


def _pairs(service: _Service) -> dict[str, Scalar]:
    """The environment, also where it is written as a list; None: taken from the caller's environment."""
    if isinstance(service.environment, dict):
        return service.environment
    entries = (entry.partition("=") for entry in service.environment)
    return {name: value if equals else None for name, equals, value in entries}


def _engine(name: str, service: _Service, environ: Mapping[str, str]) -> EngineDefinition:
    pairs = _pairs(service)
    passed_on = {key: environ[key] for key, value in pairs.items() if value is None and key in environ}
    written = {key: interpolate(_text(value), environ) for key, value in pairs.items() if value is not None}
    host_port, container_port = _ports(service, environ)
    return EngineDefinition(name, {**passed_on, **written}, host_port, container_port, service.profiles)


def _text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _ports(service: _Service, environ: Mapping[str, str]) -> tuple[int, int]:
    """The first published port as (host, container); (0, 8000) where none is published."""
    if not service.ports:
        return 0, 8000
    first = service.ports[0]
    if isinstance(first, _Port):
        return _number(interpolate(str(first.published), environ)), first.target
    *published, container = interpolate(str(first), environ).split("/")[0].split(":")
    if len(published) > 2:
        raise InterpolationError(f"{':'.join(published)!r} is neither PORT nor ADDRESS:PORT")
    return _number(published[-1]) if published else 0, _number(container)


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > len(str(PORT_MAX)) or int(text) > PORT_MAX:
        raise InterpolationError(f"{text!r} is not a port number")
    return int(text)
