"""Runs a command on a terminal of its own, as a user's shell would, and shows what came there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"
PLAIN_TERMINAL = {"TERM": "xterm-256color", "PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
"""Nothing of what CI systems set to have colours or none."""


class Terminal:
    """What a command writes on its terminal; `process` is the command."""

    def __init__(self, process: subprocess.Popen[bytes], device: int) -> None:
        self.process = process
        self._device = device
        self._written = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        return self._written.decode(errors="replace")

    @property
    def text(self) -> str:
        """The output without terminal codes."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.output).replace("\r\n", "\n")

    def wait_for(self, text: str, deadline_s: float = 60) -> None:
        end_s = time.monotonic() + deadline_s
        while text not in self.text:
            assert time.monotonic() < end_s, f"{text!r} never came:\n{self.text}"
            assert self._reader.is_alive() or text in self.text, f"{text!r} never came:\n{self.text}"
            time.sleep(0.01)

    def interrupt(self) -> None:
        """Ctrl-C, as the terminal passes it on."""
        os.write(self._device, b"\x03")

    def finish(self, deadline_s: float = 60) -> int:
        """Wait for the end; the exit code."""
        code = self.process.wait(deadline_s)
        self._reader.join(10)
        return code

    def echoes(self) -> bool:
        """Whether the terminal shows what is typed and breaks lines, as a shell left it."""
        modes = termios.tcgetattr(self._device)
        return bool(modes[3] & termios.ECHO and modes[3] & termios.ICANON and modes[1] & termios.OPOST)

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._device, 65536)
            except OSError:  # Linux says so when the last writer is gone
                return
            if not part:
                return
            self._written += part


@contextmanager
def on_terminal(*arguments: str, columns: int = 80, **environment: str) -> Iterator[Terminal]:
    """`run_matrix.py ARGUMENTS` on a terminal of that width; nothing of it is left afterwards."""
    device, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "harness/run_matrix.py", *arguments],
        cwd=ROOT,
        env={**PLAIN_TERMINAL, **environment},
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(inner)
    try:
        yield Terminal(process, device)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(device)
