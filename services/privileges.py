"""Engines that root started obey the modes of files, as they do in containers and as they do for every other user.

`entrypoint.py` calls it before it starts the engine. Otherwise a KV file that nobody may read, or a volume that nobody
may write to, would be read and written all the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from services.prctl import prctl

# <linux/prctl.h>, <linux/capability.h>
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE = 1
CAP_DAC_READ_SEARCH = 2

READ, WRITE, SEARCH = 0o4, 0o2, 0o1


def obey_file_modes(read: Iterable[Path], write: Iterable[Path]) -> bool:
    """Whether programs that this process starts from now on obey file modes although root runs them.

    Not where they then could not reach what they `read` (a checkout in somebody's private home, say) or `write`
    (folders): for them everything stays as it was.
    """
    reachable = all(_allows(path, READ) for path in read) and all(_allows(path, WRITE | SEARCH) for path in write)
    if os.geteuid() != 0 or not reachable:
        return False
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        if prctl(PR_CAPBSET_READ, capability):
            prctl(PR_CAPBSET_DROP, capability)
    return True


def _allows(path: Path, rights: int) -> bool:
    """Whether the path is there, and a root that obeys modes has these rights to it and reaches it."""
    real = path.resolve()
    return real.exists() and _has(real, rights) and all(_has(folder, SEARCH) for folder in real.parents)


def _has(path: Path, rights: int) -> bool:
    status = path.stat()
    shift = 6 if status.st_uid == 0 else 3 if status.st_gid == 0 else 0
    return (status.st_mode >> shift) & rights == rights
