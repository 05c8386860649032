"""prctl(2), which Python does not offer; by the supervisor and `privileges.py`."""

from __future__ import annotations

import ctypes
import errno

_LIBC = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> int:
    """Raises OSError when the kernel refuses."""
    result = int(_LIBC.prctl(option, value, 0, 0, 0))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {errno.errorcode.get(code, code)}")
    return result
