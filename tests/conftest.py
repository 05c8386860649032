"""Ctrl-C is tested, also where it means nothing to whoever runs the tests: in the background of a script."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
