"""Files that keep whoever opens them waiting: slow and endless reads, on real files and without special rights.

`volume.py` calls it. A process that has a lease on a file (fcntl(2), F_SETLEASE; any user on files of its own)
is asked by the kernel to give it up when somebody opens the file, and until it does so the other's open() waits, as it
does on a network file system whose server does not answer. The kernel takes a lease away after
/proc/sys/fs/lease-break-time seconds.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness.errors import LeverMissing
from harness.faults.storage_kinds import LEASE_S_MIN

POLL_S = 0.005
LEASE_BREAK_TIME = Path("/proc/sys/fs/lease-break-time")


class HeldFile:
    """A file with a lease on it. Closing it, or `let_go`, lets those go on who wait for it."""

    def __init__(self, path: Path) -> None:
        """Raises LeverMissing where files cannot be held."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # The kernel sends a signal when somebody waits. That of F_SETLEASE's own would end this process; this
            # one is ignored unless somebody handles it.
            fcntl.fcntl(self._fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            os.close(self._fd)
            raise LeverMissing(f"{path}: its file system does not let files be held ({error.strerror})") from None

    def is_awaited(self) -> bool:
        """Whether somebody has opened it, and waits or waited."""
        return fcntl.fcntl(self._fd, fcntl.F_GETLEASE) != fcntl.F_WRLCK

    def let_go(self) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def close(self) -> None:
        os.close(self._fd)


class Holding:
    """Watches held files, by path, and measures how long each kept its first reader."""

    def __init__(self, files: Mapping[Path, HeldFile], let_go_after_s: float) -> None:
        self._files, self._let_go_after_s = files, let_go_after_s
        self._began_s: dict[Path, float] = {}
        self._held_s: dict[Path, float] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="held-files", daemon=True)

    def start(self) -> None:
        self._watcher.start()

    def stop(self) -> None:
        """Nobody is kept any longer."""
        self._over.set()
        self._watcher.join()
        self.let_go()

    def let_go(self) -> None:
        with self._lock:
            for path in self._files:
                self._let_go(path)

    def held_s(self) -> Mapping[Path, float]:
        """How long the first who opened each file has been kept so far; 0 where nobody did."""
        with self._lock:
            now_s = time.monotonic()
            kept = {path: now_s - self._began_s.get(path, now_s) for path in self._files}
            return {**kept, **self._held_s}

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            with self._lock:
                for path in self._files.keys() - self._held_s.keys():
                    self._look_at(path)

    def _look_at(self, path: Path) -> None:
        if path not in self._began_s and self._files[path].is_awaited():
            self._began_s[path] = time.monotonic()
        if path in self._began_s and time.monotonic() - self._began_s[path] >= self._let_go_after_s:
            self._let_go(path)

    def _let_go(self, path: Path) -> None:
        if path not in self._held_s:
            now_s = time.monotonic()
            self._held_s[path] = now_s - self._began_s.get(path, now_s)
            self._files[path].let_go()


@contextmanager
def holding(paths: Iterable[Path], let_go_after_s: float) -> Iterator[Holding]:
    """Hold files; each is let go `let_go_after_s` seconds after somebody opened it, and all at the end.

    Raises LeverMissing where files cannot be held, or not for LEASE_S_MIN seconds.
    """
    lease_s = float(LEASE_BREAK_TIME.read_text()) if LEASE_BREAK_TIME.exists() else 0.0
    if lease_s < LEASE_S_MIN:
        raise LeverMissing(f"{LEASE_BREAK_TIME} is {lease_s:g} s; files must be held for {LEASE_S_MIN:g} s")
    with ExitStack() as opened:
        files: dict[Path, HeldFile] = {}
        for path in paths:
            files[path] = HeldFile(path)
            opened.callback(files[path].close)
        found = Holding(files, let_go_after_s)
        found.start()
        try:
            yield found
        finally:
            found.stop()
