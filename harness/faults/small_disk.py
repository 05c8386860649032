"""A full disk: a folder on a small file system of its own, filled up but for what is to fit.

`volume.py` calls it. The folder for it comes with the stack (compose.yaml mounts a small tmpfs;
KVPROOF_SMALL_DIR names one for engines that are plain processes); a file system that is not small is never filled.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import LeverMissing

PREFIX = "kvproof-"
DISK_BYTES_MAX = 1 << 30
"""A file system larger than this is not one that somebody gave away to be filled."""


@contextmanager
def small_disk(small_dir: Path | None, file_bytes: int, file_count: int, mode: int) -> Iterator[Path]:
    """A new folder with this mode, on whose file system there is room for `file_count` files of `file_bytes` each and
    for half of one more. Everything is removed at the end.

    Raises LeverMissing where there is no folder, or its file system is too large or too small.
    """
    if small_dir is None:
        raise LeverMissing(
            "this stack has no small disk; for --stack processes mount one (tmpfs, 64 MB) and set KVPROOF_SMALL_DIR"
        )
    for left in small_dir.glob(f"{PREFIX}*"):  # by a run that was killed
        shutil.rmtree(left)
    status = os.statvfs(small_dir)
    room_bytes = (2 * file_count + 1) * -(-file_bytes // status.f_frsize) * status.f_frsize // 2
    disk_bytes, free_bytes = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    if disk_bytes > DISK_BYTES_MAX:
        raise LeverMissing(f"{small_dir}: its file system has {disk_bytes} bytes; {DISK_BYTES_MAX} at most are filled")
    if free_bytes < room_bytes:
        raise LeverMissing(f"{small_dir}: {free_bytes} bytes are free, {room_bytes} are needed for the KV of a prompt")
    with tempfile.TemporaryDirectory(dir=small_dir, prefix=PREFIX) as folder:
        os.chmod(folder, mode)
        with tempfile.TemporaryFile(dir=small_dir) as filler:
            os.posix_fallocate(filler.fileno(), 0, max(1, free_bytes - room_bytes))
            yield Path(folder)
