"""Engines that root starts obey file modes, except where they could then not reach their own files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.privileges import obey_file_modes

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root ignores file modes")

SHOW = "import sys; print(open(sys.argv[1]).read())"
START = """
import os, sys
from pathlib import Path
from services.privileges import obey_file_modes
show, secret, *needed = sys.argv[1:]
paths = [Path(path) for path in needed]
files, folders = [path for path in paths if path.is_file()], [path for path in paths if path.is_dir()]
print(obey_file_modes(files, folders), flush=True)
os.execv(sys.executable, [sys.executable, "-c", show, secret])
"""


def shown(secret: Path, *needed: Path) -> list[str]:
    """What an engine-like process is told about its rights, and whether it can read `secret`."""
    done = subprocess.run(
        [sys.executable, "-c", START, SHOW, secret, *needed], capture_output=True, text=True, check=False
    )
    return [*done.stdout.split(), "refused" if "PermissionError" in done.stderr else done.stderr]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("text")
    path.chmod(0o000)
    return path


@as_root
def test_a_file_of_mode_000_is_refused(secret: Path, tmp_path: Path) -> None:
    (tmp_path / "readable").touch()
    assert shown(secret, tmp_path, tmp_path / "readable") == ["True", "refused"]


@as_root
@pytest.mark.parametrize("what", ["file", "folder above it", "folder that is not its own"])
def test_not_where_something_needed_is_out_of_reach(what: str, secret: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    needed = home / "needed"
    needed.write_text("needed")
    os.chown(needed if what == "file" else home, 1234, 1234)
    if what == "file":
        needed.chmod(0o600)
    if what == "folder above it":
        home.chmod(0o700)
    assert shown(secret, home if what == "folder that is not its own" else needed) == ["False", "text", ""]


@as_root
def test_not_where_something_needed_is_missing(secret: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").symlink_to("nowhere")
    code = START.replace("[path for path in paths if path.is_file()]", "paths")
    done = subprocess.run(
        [sys.executable, "-c", code, SHOW, secret, tmp_path / "broken"], capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", "text"], done.stderr


@pytest.mark.skipif(os.getuid() == 0, reason="root has something to give up")
def test_nobody_else_has_anything_to_give_up(tmp_path: Path) -> None:
    assert not obey_file_modes((), (tmp_path,))
