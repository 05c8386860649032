"""Files and folders of the KV volume: described, replaced for a while, and put back.

`volume.py` and its neighbours call it. What lies in a place is always replaced by a rename within its
directory: the file may belong to another user, whose directories the harness's group may write to. The sound file
itself is moved aside and back, so it keeps its owner, mode and bytes; a run that was killed in between leaves it beside
its place, and `put_all_back` finds it there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from harness.errors import HarnessError
from harness.records import NOTHING, VolumeFile

ASIDE_SUFFIX = ".kvproof-aside"

Put = Callable[[Path, Path], None]
"""Puts something into a place (first) that is free, in the stead of what was moved aside (second)."""


@contextmanager
def told(root: Path) -> Iterator[None]:
    """What the system refuses is said to the user, with the path."""
    try:
        yield
    except OSError as error:
        where = error.filename or root
        raise HarnessError(
            f"{where}: cannot damage or restore KV files there ({error.strerror}); "
            f"let this user's group write to the directories of {root}"
        ) from error


@contextmanager
def replaced(place: Path, put: Put) -> Iterator[None]:
    """Something else in the place of a file or folder, which is put back whatever happens. Raises HarnessError."""
    aside = aside_of(place)
    with told(place):
        os.rename(place, aside)
    try:
        with told(place):
            put(place, aside)
        yield
    finally:
        with told(place):
            _put_back(aside, place)


def put_all_back(root: Path) -> None:
    """What a run that was killed left aside. Raises HarnessError."""
    with told(root):
        for aside in list(root.rglob(f"*{ASIDE_SUFFIX}")):
            _put_back(aside, aside.with_name(aside.name.removesuffix(ASIDE_SUFFIX)))


def aside_of(place: Path) -> Path:
    return place.with_name(place.name + ASIDE_SUFFIX)


def describe(path: Path) -> str:
    """What lies at a path, in words that change when it does."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return NOTHING
    if not stat.S_ISREG(status.st_mode):
        return _kind_word(status.st_mode)
    mode = f"mode {stat.S_IMODE(status.st_mode):03o}"
    try:
        with path.open("rb") as file:
            return f"{status.st_size} bytes, {mode}, xxh3 {hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()}"
    except PermissionError:
        return f"{status.st_size} bytes, {mode}"


def listing(root: Path) -> tuple[VolumeFile, ...]:
    """Everything below `root`, by name. Raises HarnessError."""
    with told(root):
        paths = (Path(at, name) for at, folders, names in os.walk(root) for name in (*folders, *names))
        found = ((str(path.relative_to(root)), path.lstat()) for path in paths)
        return tuple(sorted((VolumeFile(*_entry(name, status)) for name, status in found), key=lambda f: f.name))


def write(place: Path, data: bytes, mode: int = 0o644) -> None:
    """Put a file into `place`, whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, place)
    except BaseException:
        os.unlink(temporary)
        raise


def _put_back(aside: Path, place: Path) -> None:
    if stat.S_ISDIR(_mode(place)):
        shutil.rmtree(place)
    elif aside.is_dir():
        place.unlink(missing_ok=True)
    os.replace(aside, place)


def _mode(path: Path) -> int:
    """Of what lies at the path; 0 where nothing does."""
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_mode
    return 0


def _kind_word(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISLNK, "a link"), (stat.S_ISFIFO, "a FIFO"))
    return next((word for is_kind, word in kinds if is_kind(mode)), "something that is no file")


def _entry(name: str, status: os.stat_result) -> tuple[str, int]:
    """Name and size; what is no regular file has its kind in its name and no size."""
    regular = stat.S_ISREG(status.st_mode)
    return (name, status.st_size) if regular else (f"{name} ({_kind_word(status.st_mode)})", 0)
