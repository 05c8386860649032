"""What the harness tells a user when it cannot go on; `run_matrix.py` prints the text and exits with the code.

HarnessError            3   the harness or its stack broke
├── LeverMissing        3   this stack cannot do what a cell asks of it; the cell is skipped
├── StackError          3   a service did not start, died, or cannot be reached
│   └── BlocksHeld      3   an engine that should be at rest still holds KV blocks
└── UsageError         64   bad arguments or a bad matrix file
"""

from __future__ import annotations


class HarnessError(Exception):
    """The text says what is wrong, where, and what to do; it is shown without a traceback."""

    exit_code = 3


class StackError(HarnessError):
    """A service did not start, died, or cannot be reached."""


class BlocksHeld(StackError):
    """An engine that should be at rest still holds KV blocks, so its prefix cache cannot be emptied."""


class LeverMissing(HarnessError):
    """This stack cannot do what a cell asks of it (kill an engine, say); such a cell is skipped, not failed."""


class UsageError(HarnessError):
    """Bad arguments or a bad matrix file; lists every problem at once."""

    exit_code = 64
