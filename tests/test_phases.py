"""What a run asks before anything is sent, and what the judge is told about its engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness import phases
from harness.errors import UsageError
from harness.phases import dtype_of
from harness.plan import load_plan, select_cells
from harness.records import Cell, EngineInfo, PlannedRequest, RunInfo, Versions
from harness.storage import RunFolder
from harness.watcher import Watcher
from services.faults import FaultKind
from tests.engines import ENGINES
from tests.simulated_engine import simulated_stack
from tests.ways_to_be_wrong import Wrong

EXAMPLE = Path(__file__).resolve().parents[1] / "harness" / "matrix" / "example.yaml"
VERSIONS = Versions("0.32.0", "2.13.0", "3.11.2", "model", "connector")


def info(**engines: dict[str, str]) -> RunInfo:
    described = {name.replace("_", "-"): EngineInfo(VERSIONS, settings, ()) for name, settings in engines.items()}
    return RunInfo("run", "matrix", "processes", VERSIONS, described, "", 0.0, 32)


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        (info(prefill={"DTYPE": "bfloat16"}, decode_fail={"DTYPE": "float32"}), "bfloat16"),
        (info(prefill={"BLOCK_SIZE": "32"}), ""),
        (info(decode_fail={"DTYPE": "bfloat16"}), ""),
        (info(), ""),
    ],
)
def test_the_dtype_is_what_the_engines_have_in_common(run: RunInfo, dtype: str) -> None:
    assert dtype_of(run) == dtype


def test_a_run_with_such_blocks_ends_before_anything_is_sent(tmp_path: Path) -> None:
    plan = select_cells(load_plan(EXAMPLE, ENGINES), ("recompute-report-sync-first",))
    cells = tuple(
        replace(c, requests=(with_blocks(c, (99,)),)) if c.fault.kind is FaultKind.REPORT else c for c in plan.cells
    )
    with simulated_stack(tmp_path / "evidence", Wrong.NOTHING) as stack:
        folder = RunFolder.create(tmp_path / "runs", "run")
        with pytest.raises(UsageError, match=r"no block 99: .* @ cell recompute-report-sync-first"):
            phases.run(replace(plan, cells=cells), stack, folder, phases.Invocation("example", "pytest"), Watcher())
        journal = tmp_path / "evidence" / "prefill" / "journal.jsonl"
        assert "prefill." not in journal.read_text()


def with_blocks(of: Cell, blocks: tuple[int, ...]) -> PlannedRequest:
    return replace(of.requests[0], fault=replace(of.requests[0].fault, blocks=blocks))
