"""Matrices in containers, with `make up`: the same outcomes as elsewhere, and nothing left."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.compose

ROOT = Path(__file__).resolve().parents[1]

STORAGE = (
    "recompute-flipped-last-sync-middle",
    "recompute-unreadable-sync-middle",
    "recompute-slow-read-sync-middle",
    "recompute-emptied-sync",
    "recompute-full-disk-sync-middle",
    "recompute-read-only-sync",
)
"""Each way to lay a fault on the volume once: the harness is another user than the engines, without special rights."""


def make_up(**environment: str) -> dict[str, dict[str, object]]:
    """The cells of the run's report, by id."""
    known = set((ROOT / "runs").glob("*"))
    environ = {**os.environ, **environment}
    done = subprocess.run(["make", "up"], cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    (folder,) = set((ROOT / "runs").glob("*")) - known
    assert folder.stat().st_uid == os.getuid()
    return {cell["id"]: cell for cell in json.loads((folder / "report.json").read_text())["cells"]}


def test_make_up_is_green_and_leaves_nothing() -> None:
    cells = make_up()
    assert len(cells) >= 24
    assert {cell["status"] for cell in cells.values()} == {"pass"}
    assert all(cell["outcome"] == cell["expected"] for cell in cells.values())
    left = subprocess.run(["docker", "compose", "ps", "-aq"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert left.stdout == ""


def test_faults_in_storage_strike_in_containers_too() -> None:
    cells = make_up(MATRIX="storage", ONLY=",".join(STORAGE))
    assert set(STORAGE) < set(cells)
    assert {cell["status"] for cell in cells.values()} == {"pass"}


def test_faults_of_processes_go_through_docker() -> None:
    """With the override that gives the harness Docker's socket."""
    only = ("recompute-decode-killed-loading-async-middle", "fail-prefill-paused-saving-sync-last")
    files = "compose.yaml:compose.process-faults.yaml"
    cells = make_up(MATRIX="process", ONLY=",".join(only), COMPOSE_FILE=files)
    assert set(only) < set(cells)
    assert {cell["status"] for cell in cells.values()} == {"pass"}
    assert [cells[name]["evidence"]["fault_fired"] for name in only] == [1, 1]
