"""The command line with real vLLM engines on the CPU, as processes: the example matrix, and how runs go wrong."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from matrix_run import MatrixRun, matrix_run

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> MatrixRun:
    """The whole example matrix, run once."""
    with matrix_run(tmp_path_factory.mktemp("example") / "runs") as run:
        run.finish()
    return run


def test_example_matrix_is_green_with_evidence(example: MatrixRun) -> None:
    assert example.process.returncode == 0, example.output
    cells = example.cells()
    assert len(cells) >= 24
    for name, cell in cells.items():
        evidence = cell["evidence"]
        assert cell["status"] == "pass", name
        assert isinstance(evidence, dict)
        assert evidence["loaded_blocks"] > 0, name
        assert (evidence["fault_fired"] > 0) == (cell["fault"] != "none"), name
        assert (evidence["reported_blocks"] > 0) == (cell["outcome"] in ("recovered", "failed-cleanly")), name


def test_silent_controls_are_caught(example: MatrixRun) -> None:
    caught = {(c["engine"], c["load"]) for c in example.cells().values() if c["outcome"] == "caught"}
    assert caught == {(e, m) for e in ("decode-recompute", "decode-fail") for m in ("sync", "async")}


def test_a_cell_takes_at_most_two_seconds(example: MatrixRun) -> None:
    # On two idle cores 1.1 s, or 1.6 oracles; two cells run at a time, with two requests or more each.
    assert example.is_quick(cell_s_max=2.0, oracles_max=3.0)


def test_a_stored_run_is_judged_alike(example: MatrixRun) -> None:
    from harness.run_folder import RunFolder
    from harness.running.phases import judge_again

    folder = RunFolder.open(example.folder)
    before = folder.load_verdicts()
    assert judge_again(folder).verdicts == before


def test_the_vllm_example_connector(tmp_path: Path) -> None:
    """Its sync cells run; it has no async load, and that is what the report says."""
    patterns = ("recompute-report-*-all", "recompute-drop-*")
    only = [word for pattern in patterns for word in ("--only", pattern)]
    with matrix_run(tmp_path / "runs", *only, KV_CONNECTOR="example") as run:
        run.finish()
    cells = run.cells()
    sync = {name: cell["status"] for name, cell in cells.items() if cell["load"] == "sync"}
    assert set(sync.values()) == {"pass"}, run.output
    skipped = {name: cell["status"] for name, cell in cells.items() if cell["load"] == "async"}
    assert set(skipped.values()) == {"skipped"}
    assert "load-mode" in run.output


def test_an_engine_that_dies_in_the_middle(tmp_path: Path) -> None:
    """Its cell is red, it comes back, and the cells after it are green. (Also: a prefill in several chunks.)"""
    cell = "recompute-delay-sync"
    only = ("--only", cell, "--only", "recompute-report-sync-last")
    with matrix_run(tmp_path / "runs", *only, PREFILL_MAX_NUM_BATCHED_TOKENS="64") as run:
        run.wait_for("oracles")
        journal = run.folder / "evidence" / "decode-recompute" / "journal.jsonl"
        _wait_for_text(journal, f'"planned","service":"decode-recompute".*{cell}')
        run.service("decode-recompute").send_signal(signal.SIGUSR1)
        assert run.finish() == 1, run.output
    statuses = {name: (c["status"], c["outcome"]) for name, c in run.cells().items()}
    assert statuses.pop(cell) == ("fail", "crashed")
    assert {status for status, _ in statuses.values()} == {"pass"}


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with matrix_run(tmp_path / "runs", "--only", "recompute-none-sync", KVPROOF_MODEL="/no/such/model") as run:
        exit_code = run.finish()
    assert exit_code == 64
    assert "ended" in run.output
    assert "exit code" in run.output
    assert "/no/such/model" in run.output
    assert "Traceback" not in run.lines[-1]


def test_ctrl_c_in_the_middle(tmp_path: Path) -> None:
    with matrix_run(tmp_path / "runs", "--only", "recompute-none-sync") as run:
        run.wait_for("prefill")
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 3
    assert "interrupted" in run.output
    assert "Traceback" not in run.output


def test_a_harness_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with matrix_run(tmp_path / "runs", "--only", "recompute-none-sync") as run:
        run.wait_for("waiting for")
        time.sleep(5)
        run.process.kill()
        run.finish()


def _wait_for_text(path: Path, pattern: str) -> None:
    import re

    from matrix_run import eventually

    eventually(lambda: path.exists() and re.search(pattern, path.read_text()) is not None, 120)
