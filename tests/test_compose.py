"""The example matrix in containers, with `make up`: the same outcomes, and nothing left."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.compose

ROOT = Path(__file__).resolve().parents[1]


def test_make_up_is_green_and_leaves_nothing() -> None:
    known = set((ROOT / "runs").glob("*"))
    done = subprocess.run(["make", "up"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    (folder,) = set((ROOT / "runs").glob("*")) - known
    report = json.loads((folder / "report.json").read_text())
    assert folder.stat().st_uid == os.getuid()
    assert len(report["cells"]) >= 24
    assert {cell["status"] for cell in report["cells"]} == {"pass"}
    assert all(cell["outcome"] == cell["expected"] for cell in report["cells"])
    left = subprocess.run(["docker", "compose", "ps", "-aq"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert left.stdout == ""
