"""services/entrypoint.py: what an environment turns into, and that compose.yaml says the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from services import entrypoint

ROOT = Path(__file__).parent.parent
ENV = {
    "KVPROOF_SERVICE": "prefill",
    "KVPROOF_ROLE": "prefill",
    "KVPROOF_KV_DIR": "/kv",
    "KVPROOF_EVIDENCE_DIR": "/evidence",
    "KVPROOF_MODEL_DIR": "/opt/kvproof/model",
}
DECODE = {**ENV, "KVPROOF_SERVICE": "decode-fail", "KVPROOF_ROLE": "decode"}
SHARED_VOLUME = {
    "kv_connector": "SharedVolumeConnector",
    "kv_connector_module_path": "services.shared_volume",
    "kv_connector_extra_config": {
        "kv_dir": "/kv",
        "evidence_dir": "/evidence",
        "service": "prefill",
        "read_deadline_s": 5.0,
        "verify_checksum": True,
        "allow_faults": False,
    },
}


def option(words: list[str], name: str) -> str:
    assert words.count(name) == 1
    return words[words.index(name) + 1]


def transfer_config(env: Mapping[str, str]) -> dict[str, object]:
    raw = json.loads(option(entrypoint.command(env), "--kv-transfer-config"))
    assert isinstance(raw, dict)
    return raw


def test_a_prefill_engine_is_a_producer_with_the_connector_as_it_is() -> None:
    assert transfer_config(ENV) == {**SHARED_VOLUME, "kv_role": "kv_producer"}


def test_a_decode_engine_is_a_consumer_behind_the_fault_injector() -> None:
    config = transfer_config({**DECODE, "KV_LOAD_FAILURE_POLICY": "fail", "KVPROOF_FAULTS": "true"})
    extra = config.pop("kv_connector_extra_config")
    assert config == {
        "kv_connector": "FaultInjectingConnector",
        "kv_connector_module_path": "services.fault_injecting",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "fail",
    }
    inner_extra = {**SHARED_VOLUME["kv_connector_extra_config"], "service": "decode-fail", "allow_faults": True}  # type: ignore[dict-item]
    assert extra == {
        "evidence_dir": "/evidence",
        "service": "decode-fail",
        "allow_faults": True,
        "inner": {**SHARED_VOLUME, "kv_connector_extra_config": inner_extra},
    }


def test_faults_are_not_obeyed_unless_the_engine_is_started_for_them() -> None:
    extra = transfer_config(DECODE)["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    assert extra["allow_faults"] is False
    assert extra["inner"]["kv_connector_extra_config"]["allow_faults"] is False


def test_a_producer_that_is_started_for_them_obeys_them() -> None:
    extra = transfer_config({**ENV, "KVPROOF_FAULTS": "true"})["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    assert extra["allow_faults"] is True


def test_the_example_connector_keeps_its_files_on_the_volume() -> None:
    assert transfer_config({**ENV, "KV_CONNECTOR": "example"}) == {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": "/kv"},
        "kv_role": "kv_producer",
    }


def test_a_connector_of_ones_own_gets_its_own_settings_on_both_sides() -> None:
    own = {"KV_CONNECTOR": "acme.kv:AcmeConnector", "KV_CONNECTOR_CONFIG": '{"url": "tcp://store"}'}
    expected = {
        "kv_connector": "AcmeConnector",
        "kv_connector_module_path": "acme.kv",
        "kv_connector_extra_config": {"url": "tcp://store"},
    }
    assert transfer_config({**ENV, **own}) == {**expected, "kv_role": "kv_producer"}
    extra = transfer_config({**DECODE, **own})["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    assert extra["inner"] == expected


def test_settings_reach_the_command_line() -> None:
    words = entrypoint.command(
        {
            **ENV,
            "BLOCK_SIZE": "64",
            "MAX_MODEL_LEN": "1024",
            "MAX_NUM_BATCHED_TOKENS": "256",
            "MAX_NUM_SEQS": "4",
            "DTYPE": "bfloat16",
            "KVPROOF_HOST": "0.0.0.0",
            "KVPROOF_PORT": "8100",
            "ENGINE_ARGS": "--max-logprobs 40 --hf-overrides '{\"a\": 1}'",
        }
    )
    expected = {
        "--block-size": "64",
        "--max-model-len": "1024",
        "--max-num-batched-tokens": "256",
        "--max-num-seqs": "4",
        "--dtype": "bfloat16",
        "--host": "0.0.0.0",
        "--port": "8100",
        "--model": "/opt/kvproof/model",
    }
    assert {name: option(words, name) for name in expected} == expected
    assert words[-4:] == ["--max-logprobs", "40", "--hf-overrides", '{"a": 1}']


@pytest.mark.parametrize(
    ("model", "path", "offline"),
    [("smollm2", "/opt/kvproof/model", True), ("/models/own", "/models/own", True), ("org/name", "org/name", False)],
)
def test_only_a_model_from_a_hub_may_use_the_network(model: str, path: str, offline: bool) -> None:
    env = {**ENV, "KVPROOF_MODEL": model}
    assert option(entrypoint.command(env), "--model") == path
    assert ("HF_HUB_OFFLINE" in entrypoint.engine_environment(env)) is offline


def test_the_server_finds_the_connectors_and_its_own_search_path() -> None:
    env = entrypoint.engine_environment({**ENV, "PYTHONPATH": "/own", "OMP_NUM_THREADS": "2"})
    assert env["PYTHONPATH"] == f"{ROOT}:{ROOT}/services/startup:/own"
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["VLLM_SERVER_DEV_MODE"] == env["VLLM_NO_USAGE_STATS"] == "1"


def test_every_problem_is_reported_at_once_with_the_choices() -> None:
    wrong = {
        "KVPROOF_SERVICE": "../prefill",
        "KVPROOF_ROLE": "prefil",
        "KV_LOAD_FAILURE_POLICY": "retry",
        "KV_CONNECTOR": "nixl",
        "KV_CONNECTOR_CONFIG": "[",
        "KVPROOF_FAULTS": "perhaps",
        "KVPROOF_PORT": "0",
        "DTYPE": "fp32",
        "BLOCK_SIZE": "big",
        "ENGINE_ARGS": "'",
    }
    env = {name: value for name, value in ENV.items() if name != "KVPROOF_KV_DIR"} | wrong
    with pytest.raises(entrypoint.SettingsError) as caught:
        entrypoint.command(env)
    lines = str(caught.value).splitlines()
    assert {line.split(":")[0] for line in lines} == {*wrong, "KVPROOF_KV_DIR"}
    for choice in ("'prefill' or 'decode'", "'recompute' or 'fail'", "shared-volume, example, module.path:Class"):
        assert choice in str(caught.value)


def test_a_wrong_setting_ends_with_64_and_no_traceback() -> None:
    script = ROOT / "services" / "entrypoint.py"
    done = subprocess.run([sys.executable, script], env={**ENV, "DTYPE": "x"}, capture_output=True, text=True)
    assert done.returncode == 64
    assert "DTYPE: 'x'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("connector", "says"),
    [
        ("no_such_package:C", "no module no_such_package; install it, or set PYTHONPATH"),
        ("no_such_package.module:C", "No module named 'no_such_package'"),
        ("services.no_such_module:C", "no module services.no_such_module"),
    ],
)
def test_a_connector_that_cannot_be_imported_ends_with_64(connector: str, says: str) -> None:
    env = {**ENV, "KV_CONNECTOR": connector, "KVPROOF_MODEL": "org/name"}
    script = ROOT / "services" / "entrypoint.py"
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert done.returncode == 64
    assert f"KV_CONNECTOR: {connector}: {says}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_connector_that_is_there_is_no_problem() -> None:
    for connector in ("shared-volume", "example", "services.journal:Journal"):
        assert entrypoint.connector_problem(entrypoint.settings({**ENV, "KV_CONNECTOR": connector})) == ""


def compose_environment(service: str) -> dict[str, str]:
    """The service's environment in compose.yaml, with every ${NAME:-default} at its default."""
    raw = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"][service]["environment"]
    return {name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value)) for name, value in raw.items()}


@pytest.mark.parametrize(
    ("service", "role", "faults", "policy"),
    [
        ("prefill", "prefill", True, "recompute"),
        ("decode-baseline", "decode", False, "recompute"),
        ("decode-recompute", "decode", True, "recompute"),
        ("decode-fail", "decode", True, "fail"),
    ],
)
def test_compose_starts_each_service_as_what_it_is(service: str, role: str, faults: bool, policy: str) -> None:
    chosen = entrypoint.settings(compose_environment(service))
    assert (chosen.service, chosen.role, chosen.faults, chosen.policy) == (service, role, faults, policy)


def test_compose_and_the_code_have_the_same_defaults() -> None:
    by_compose = entrypoint.settings(compose_environment("prefill"))
    # A container is reached from outside it, prefill takes a whole prompt in one step, and may be killed in a save.
    deliberate = {"host": "127.0.0.1", "max_num_batched_tokens": 512, "faults": False}
    assert by_compose.model_copy(update=deliberate) == entrypoint.settings(ENV)


def test_every_variable_for_engines_in_compose_is_read_by_someone() -> None:
    read_by_us = {field.alias for field in entrypoint.Settings.model_fields.values()}
    others = {name for name in compose_environment("decode-fail") if name not in read_by_us}
    assert all(name.startswith(("VLLM_", "OMP_", "TORCH_")) for name in others)


def test_what_an_engine_cannot_do_without(tmp_path: Path) -> None:
    (tmp_path / "weights").touch()
    own = tmp_path / "own"
    own.mkdir()
    local = {**ENV, "KVPROOF_MODEL": str(tmp_path), "PYTHONPATH": f"{own}:/nowhere:", "HF_HOME": "/cache"}
    read, write = entrypoint.engine_files(entrypoint.settings(local), local)
    assert {ROOT / "services", Path(sys.prefix), Path(sys.base_prefix), own, tmp_path / "weights"} <= set(read)
    assert Path("/nowhere") not in read
    assert write == (Path("/kv"), Path("/evidence/prefill"))
    hub = {**local, "KVPROOF_MODEL": "owner/model"}
    assert Path("/cache") in entrypoint.engine_files(entrypoint.settings(hub), hub)[1]
