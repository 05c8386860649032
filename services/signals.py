"""The signals that an engine's supervisor obeys, for who sends them: faults of the process."""

from __future__ import annotations

import signal

KILL_ENGINE = signal.SIGUSR1
"""Kill the engine, as by kill -9; another one is started."""
PAUSE_ENGINE = signal.SIGUSR2
"""Stop the engine and everything below it, until it is resumed."""
RESUME_ENGINE = signal.SIGCONT
"""Let a paused engine go on."""
