"""False alarms on real vLLM engines on the CPU: hundreds of requests with nothing broken, and no finding."""

from __future__ import annotations

from pathlib import Path

import pytest
from matrix_run import matrix_run

from harness.run_folder import RunFolder

pytestmark = pytest.mark.engine

REQUEST_COUNT = 300


def test_no_alarm_where_nothing_is_broken(tmp_path: Path) -> None:
    with matrix_run(tmp_path / "runs", "--matrix", "quiet") as run:
        assert run.finish() == 0, run.output
    folder = RunFolder.open(run.folder)
    quiet = {cell.id for cell in folder.load_plan().cells if cell.fault.kind == "none"}
    answers = [r.completion for seen in folder.load_observations() if seen.cell_id in quiet for r in seen.requests]
    assert len(answers) >= REQUEST_COUNT
    verdicts = [verdict for verdict in folder.load_verdicts() if verdict.cell_id in quiet]
    assert {verdict.outcome for verdict in verdicts} == {"loaded"}
    # In float32 not even near ties.
    assert [difference for verdict in verdicts for difference in verdict.differences] == []
