"""The terminal or pipe that a command prints to, which may be gone before the command is done."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO

from rich.console import Console


class OutputConsole(Console):
    """rich's, but a reader that has gone (`| head`) ends nothing: a run goes on, its exit code stays the judge's. What
    the encoding of the stream lacks is escaped."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(highlight=False, stderr=stderr)
        stream = sys.stderr if stderr else sys.stdout
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def on_broken_pipe(self) -> None:
        _nobody_reads(self.file.fileno())


def print_raw(text: str) -> None:
    """`text` on stdout as it is, except for characters that its encoding lacks; nothing where stdout is closed."""
    if sys.stdout is None:
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        _nobody_reads(sys.stdout.fileno())


def let_go(stream: TextIO | None) -> None:
    """The last of `stream`, at the end of the process; what its disk has no room for must not change the exit code."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError):
            _nobody_reads(stream.fileno())


def _nobody_reads(descriptor: int) -> None:
    """Whatever is still written there goes nowhere."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)
