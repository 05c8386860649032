"""Faults in storage on real vLLM engines on the CPU: all are noticed, and a connector that checks nothing is red."""

from __future__ import annotations

from pathlib import Path

import pytest
from matrix_run import matrix_run

pytestmark = pytest.mark.engine

CELL_S_MAX = 3.0


def test_storage_matrix_is_green_with_evidence(tmp_path: Path) -> None:
    with matrix_run(tmp_path / "runs", "--matrix", "storage") as run:
        assert run.finish() == 0, run.output
    cells = run.cells()
    for name, cell in cells.items():
        evidence = cell["evidence"]
        assert isinstance(evidence, dict)
        if "unreadable" in name and cell["status"] == "skipped":
            continue
        assert cell["status"] == "pass", name
        assert (evidence["fault_fired"] > 0) == (cell["fault"] != "none"), name
        assert (evidence["reported_blocks"] > 0) == (cell["outcome"] in ("recovered", "failed-cleanly")), name
    assert float(str(run.report["cells_s"])) / len(cells) <= CELL_S_MAX


def test_without_the_checksum_flipped_bits_in_the_payload_are_red(tmp_path: Path) -> None:
    """Only those: the header has a checksum of its own, which cannot be switched off."""
    only = ("--matrix", "storage", "--only", "recompute-flipped-*")
    with matrix_run(tmp_path / "runs", *only, KV_VERIFY_CHECKSUM="false") as run:
        assert run.finish() == 1, run.output
    found = {name: (str(cell["status"]), str(cell["outcome"])) for name, cell in run.cells().items()}
    payload = {name for name in found if "flipped-" in name and name.endswith("-middle")}
    assert len(payload) == 6
    assert {found[name][0] for name in payload} == {"fail"}
    assert {found[name][1] for name in payload} <= {"wrong-output", "unreported"}
    assert "wrong-output" in {found[name][1] for name in payload}
    assert {status for name, (status, _) in found.items() if name not in payload} == {"pass"}
