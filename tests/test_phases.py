"""What the judge is told about the engines of a run."""

from __future__ import annotations

import pytest

from harness.phases import dtype_of
from harness.records import EngineInfo, RunInfo, Versions

VERSIONS = Versions("0.32.0", "2.13.0", "3.11.2", "model", "connector")


def info(**engines: dict[str, str]) -> RunInfo:
    described = {name.replace("_", "-"): EngineInfo(VERSIONS, settings, ()) for name, settings in engines.items()}
    return RunInfo("run", "matrix", "processes", VERSIONS, described, "", 0.0, 32)


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        (info(decode_baseline={"DTYPE": "bfloat16"}, decode_fail={"DTYPE": "float32"}), "bfloat16"),
        (info(decode_baseline={"BLOCK_SIZE": "32"}), ""),
        (info(decode_fail={"DTYPE": "bfloat16"}), ""),
        (info(), ""),
    ],
)
def test_the_dtype_is_that_of_the_engine_with_the_oracles(run: RunInfo, dtype: str) -> None:
    assert dtype_of(run) == dtype
