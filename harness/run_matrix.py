#!/usr/bin/env python3
"""The command line of kvproof: `python harness/run_matrix.py` or `python -m harness.run_matrix`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    # Until somebody can say it better, Ctrl-C ends this process at once, not with a traceback out of an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
if sys.version_info < (3, 11):  # noqa: UP036 - whoever has an older one is to be told, not shown a traceback
    print("kvproof needs Python 3.11 or newer: make demo PYTHON=python3.11, then .venv/bin/python", file=sys.stderr)
    sys.exit(3)
if __package__ in (None, ""):
    # Started as a file: the packages lie beside the folder of this file.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

try:
    from harness.cli.command_line import parse
    from harness.cli.commands import execute
    from harness.errors import HarnessError
    from harness.report.console import OutputConsole, let_go
    from harness.report.view import visible
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    print(
        f"kvproof needs the Python package {error.name}; run `make demo` once, then use .venv/bin/python "
        "(`run_matrix.py doctor` checks the rest)",
        file=sys.stderr,
    )
    sys.exit(3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Whoever started this with nohup, or in the background of a script, has decided otherwise.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        return execute(parse(sys.argv[1:] if arguments is None else arguments, os.environ))
    except HarnessError as error:
        _tell(str(error))
        return error.exit_code
    except OSError as error:
        # A full disk, a folder that may not be read: the machine's state, not a defect.
        _tell(str(error))
        return HarnessError.exit_code
    except KeyboardInterrupt:
        _tell("interrupted; everything that was started has been stopped")
        return HarnessError.exit_code
    except Exception:  # noqa: BLE001 - a defect of ours must not look like a red cell, whose exit code is Python's own
        with contextlib.suppress(OSError):
            OutputConsole(stderr=True).print_exception()
        return HarnessError.exit_code


def _tell(problem: str) -> None:
    # Where stderr is on a full disk, too, the exit code has to do.
    with contextlib.suppress(OSError):
        OutputConsole(stderr=True).print(visible(problem), style="bold red", markup=False, soft_wrap=True)


def _interrupt(signal_number: int, frame: object) -> NoReturn:  # noqa: ARG001
    raise KeyboardInterrupt


if __name__ == "__main__":
    exit_code = main()
    let_go(sys.stdout)
    let_go(sys.stderr)
    if threading.active_count() > 1:
        # After Ctrl-C requests to services of others may still be out; their threads must not hold up the end.
        os._exit(exit_code)
    sys.exit(exit_code)
