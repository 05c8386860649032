"""The conditions of a run: what its engines computed in, and in what two runs are not alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.records import EngineInfo, RunInfo, Versions
from harness.running.conditions import differences, dtype_of, settings

VERSIONS = Versions("0.32.0", "2.13.0", "3.11.2", "model", "connector")


def info(**engines: dict[str, str]) -> RunInfo:
    described = {name.replace("_", "-"): EngineInfo(VERSIONS, given, ()) for name, given in engines.items()}
    return RunInfo("run", "matrix", "processes", "", 0.0, versions=VERSIONS, engines=described, block_size=32)


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        (info(prefill={"DTYPE": "bfloat16"}, decode_fail={"DTYPE": "float32"}), "bfloat16"),
        (info(prefill={"BLOCK_SIZE": "32"}), ""),
        (info(decode_fail={"DTYPE": "bfloat16"}), ""),
        (info(), ""),
    ],
)
def test_the_dtype_is_that_of_the_engine_that_every_run_has(run: RunInfo, dtype: str) -> None:
    assert dtype_of(run) == dtype


RUN = info(prefill={"DTYPE": "float32", "KVPROOF_PORT": "1"}, decode_fail={"DTYPE": "float32", "OMP_NUM_THREADS": "1"})


def test_a_run_is_like_itself_wherever_its_engines_lived() -> None:
    elsewhere = info(
        prefill={"DTYPE": "float32", "KVPROOF_PORT": "2", "KVPROOF_KV_DIR": "/kv"},
        decode_fail={"DTYPE": "float32", "OMP_NUM_THREADS": "1"},
    )
    assert differences(RUN, RUN) == ()
    assert differences(RUN, elsewhere) == ()
    assert differences(RUN, replace(elsewhere, seed=7, run_id="other", command="x")) == ()


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (replace(RUN, stack="compose"), ("stack was processes, is compose",)),
        (replace(RUN, block_size=64), ("block size was 32, is 64",)),
        (replace(RUN, versions=replace(VERSIONS, torch="2.14")), ("torch was 2.13.0, is 2.14",)),
        (
            info(prefill={"DTYPE": "bfloat16"}, decode_fail={"DTYPE": "float32", "MORE": "1"}),
            (
                "prefill: DTYPE was float32, is bfloat16",
                "decode-fail: MORE was not set, is 1",
                "decode-fail: OMP_NUM_THREADS was 1, is not set",
            ),
        ),
    ],
)
def test_each_difference_is_told(now: RunInfo, said: tuple[str, ...]) -> None:
    assert differences(RUN, now) == said


def test_what_one_engine_runs_is_compared_too() -> None:
    other = EngineInfo(replace(VERSIONS, vllm="0.31.0"), RUN.engines["prefill"].settings, ())
    now = replace(RUN, engines={**RUN.engines, "prefill": other})
    assert differences(RUN, now) == ("prefill: vllm was 0.32.0, is 0.31.0",)


def test_an_engine_of_only_one_run_is_no_difference() -> None:
    assert differences(RUN, info(prefill={"DTYPE": "float32"})) == ()


def test_the_settings_of_a_run_are_those_that_are_no_places() -> None:
    assert settings(RUN) == {
        "prefill": {"DTYPE": "float32"},
        "decode-fail": {"DTYPE": "float32", "OMP_NUM_THREADS": "1"},
    }
