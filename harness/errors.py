"""What the harness tells a user when it cannot go on; `run_matrix.py` prints the text and exits with the code.

    HarnessError            3   the harness or its stack broke
    ├── StackError          3   a service did not start, died, or cannot be reached
    └── UsageError         64   bad arguments or a bad matrix file
"""

from __future__ import annotations


class HarnessError(Exception):
    """The text says what is wrong, where, and what to do; it is shown without a traceback."""

    exit_code = 3


class StackError(HarnessError):
    """A service did not start, died, or cannot be reached."""


class UsageError(HarnessError):
    """Bad arguments or a bad matrix file; lists every problem at once."""

    exit_code = 64
