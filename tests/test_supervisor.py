"""services/supervisor.py with a small HTTP server in vLLM's place."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import tenacity

from services.journal import Event, EventName, journal_path, read_events
from services.signals import KILL_ENGINE, PAUSE_ENGINE, RESUME_ENGINE

ROOT = Path(__file__).parent.parent
FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
DEADLINE_S = 30.0
SUPERVISE = """
import os, sys
from pathlib import Path
from services import supervisor
evidence_dir, port, parent, *command = sys.argv[1:]
parent_pid = os.getppid() if parent == "parent" else 0
sys.exit(supervisor.run(supervisor.Engine(
    tuple(command), os.environ, "decode", Path(evidence_dir), "127.0.0.1", int(port), parent_pid)))
"""


def wait_for(what: Callable[[], object]) -> None:
    """Until `what` is true; fails after the deadline."""
    tenacity.Retrying(
        stop=tenacity.stop_after_delay(DEADLINE_S),
        wait=tenacity.wait_fixed(0.05),
        retry=tenacity.retry_if_result(lambda seen: not seen),
    )(what)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Supervised:
    """A supervisor process with the fake engine, or `command`, below it."""

    def __init__(self, evidence_dir: Path, *command: str) -> None:
        self.evidence_dir = evidence_dir
        self.port = free_port()
        self.engine_command = command or (sys.executable, str(FAKE_ENGINE), str(self.port))
        self.process = self.start()

    @property
    def argv(self) -> list[str]:
        return [sys.executable, "-c", SUPERVISE, str(self.evidence_dir), str(self.port), "alone", *self.engine_command]

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self.argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def events(self, name: EventName) -> list[Event]:
        events, _ = read_events(journal_path(self.evidence_dir, "decode"))
        return [event for event in events if event.name is name]

    def wait_ready(self, count: int = 1) -> None:
        wait_for(lambda: len(self.events(EventName.ENGINE_READY)) >= count)

    @property
    def log(self) -> str:
        return (self.evidence_dir / "decode" / "engine.log").read_text()

    @property
    def engine_pids(self) -> list[int]:
        """Every engine and every engine's core, so far."""
        cores = [int(line.split()[1]) for line in self.log.splitlines() if line.startswith("core ")]
        return [*(event.pid for event in self.events(EventName.ENGINE_STARTED)), *cores]

    def signal_and_wait(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)

    def kill_everything(self) -> None:
        """For the teardown of a test that failed."""
        family = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        for process in family:
            process.kill()
        psutil.wait_procs(family)


Start = Callable[..., Supervised]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Supervised] = []

    def starter(*command: str) -> Supervised:
        started.append(Supervised(tmp_path, *command))
        return started[-1]

    yield starter
    for supervised in started:
        if supervised.process.poll() is None:
            supervised.kill_everything()
        supervised.process.communicate()


def test_an_engine_is_started_and_noted_when_ready(start: Start) -> None:
    supervised = start()
    supervised.wait_ready()
    (started,) = supervised.events(EventName.ENGINE_STARTED)
    (ready,) = supervised.events(EventName.ENGINE_READY)
    assert started.pid == ready.pid
    assert "fake_engine.py" in started.reason
    assert all(alive(pid) for pid in supervised.engine_pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_leaves_nothing_and_exits_0(start: Start, number: signal.Signals) -> None:
    supervised = start()
    supervised.wait_ready()
    assert supervised.signal_and_wait(number) == 0
    assert not any(alive(pid) for pid in supervised.engine_pids)
    assert len(supervised.events(EventName.ENGINE_EXITED)) == 1


def test_told_to_stop_before_it_is_ready_it_stops(start: Start) -> None:
    supervised = start(sys.executable, "-c", "import time; time.sleep(600)")
    wait_for(lambda: supervised.events(EventName.ENGINE_STARTED))
    assert supervised.signal_and_wait(signal.SIGTERM) == 0
    assert not any(alive(pid) for pid in supervised.engine_pids)


def test_an_engine_that_ignores_the_request_to_stop_is_killed(start: Start) -> None:
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    supervised = start(sys.executable, "-c", deaf)
    wait_for(lambda: supervised.events(EventName.ENGINE_STARTED) and "deaf" in supervised.log)
    assert supervised.signal_and_wait(signal.SIGTERM) == 0
    (exited,) = supervised.events(EventName.ENGINE_EXITED)
    assert exited.reason == "signal SIGKILL"


def test_a_failed_first_start_ends_with_the_engines_code_and_its_last_words(start: Start) -> None:
    supervised = start(sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)")
    output, _ = supervised.process.communicate(timeout=DEADLINE_S)
    assert supervised.process.returncode == 3
    assert "did not start (exit code 3)" in output
    assert "no such model" in output
    assert [event.reason for event in supervised.events(EventName.ENGINE_EXITED)] == ["exit code 3"]


def test_a_command_that_cannot_be_run_is_a_message_and_code_1(start: Start) -> None:
    supervised = start("/nonexistent/python")
    output, _ = supervised.process.communicate(timeout=DEADLINE_S)
    assert supervised.process.returncode == 1
    assert "/nonexistent/python" in output
    assert "Traceback" not in output


def test_a_taken_port_is_a_message_and_no_start(start: Start) -> None:
    first = start()
    first.wait_ready()
    second = subprocess.run(first.argv, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert second.returncode == 1
    assert f"cannot listen on 127.0.0.1:{first.port}" in second.stderr
    assert len(first.events(EventName.ENGINE_STARTED)) == 1


def test_an_engine_that_dies_later_is_cleared_away_and_started_again(start: Start) -> None:
    supervised = start()
    supervised.wait_ready()
    first = supervised.engine_pids
    os.kill(first[0], signal.SIGSEGV)
    supervised.wait_ready(count=2)
    assert not any(alive(pid) for pid in first)
    assert [event.reason for event in supervised.events(EventName.ENGINE_EXITED)] == ["signal SIGSEGV"]
    assert supervised.signal_and_wait(signal.SIGTERM) == 0
    assert not any(alive(pid) for pid in supervised.engine_pids)


def test_an_engine_can_be_killed_like_a_crash(start: Start) -> None:
    supervised = start()
    supervised.wait_ready()
    supervised.process.send_signal(KILL_ENGINE)
    supervised.wait_ready(count=2)
    assert [event.reason for event in supervised.events(EventName.ENGINE_EXITED)] == ["signal SIGKILL"]


def stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def paused(start: Start) -> Supervised:
    supervised = start()
    supervised.wait_ready()
    supervised.process.send_signal(PAUSE_ENGINE)
    wait_for(lambda: all(stopped(pid) for pid in supervised.engine_pids))
    wait_for(lambda: supervised.events(EventName.ENGINE_PAUSED))
    return supervised


def test_a_paused_engine_and_its_core_stand_still_until_they_are_resumed(start: Start) -> None:
    supervised = paused(start)
    assert supervised.events(EventName.ENGINE_RESUMED) == []
    supervised.process.send_signal(RESUME_ENGINE)
    wait_for(lambda: not any(stopped(pid) for pid in supervised.engine_pids))
    (pause,), (resume,) = (supervised.events(name) for name in (EventName.ENGINE_PAUSED, EventName.ENGINE_RESUMED))
    assert pause.pid == resume.pid == supervised.engine_pids[0]
    assert supervised.events(EventName.ENGINE_EXITED) == []
    assert supervised.signal_and_wait(signal.SIGTERM) == 0


def test_a_paused_engine_can_be_killed(start: Start) -> None:
    supervised = paused(start)
    supervised.process.send_signal(KILL_ENGINE)
    supervised.wait_ready(count=2)
    assert [event.reason for event in supervised.events(EventName.ENGINE_EXITED)] == ["signal SIGKILL"]


def test_a_paused_engine_ends_as_any_other_when_told_to_stop(start: Start) -> None:
    """Not by SIGKILL, after the grace."""
    supervised = paused(start)
    assert supervised.signal_and_wait(signal.SIGTERM) == 0
    assert [event.reason for event in supervised.events(EventName.ENGINE_EXITED)] == ["signal SIGTERM"]
    assert not any(alive(pid) for pid in supervised.engine_pids)


def test_a_kill_from_outside_is_told_from_our_own(start: Start) -> None:
    supervised = start()
    supervised.wait_ready()
    os.kill(supervised.events(EventName.ENGINE_STARTED)[0].pid, signal.SIGKILL)
    supervised.wait_ready(count=2)
    (exited,) = supervised.events(EventName.ENGINE_EXITED)
    assert exited.reason == "signal SIGKILL, not from kvproof: often the kernel's, when memory runs out"


def test_kill_9_of_the_supervisor_leaves_nothing(start: Start) -> None:
    supervised = start()
    supervised.wait_ready()
    family = [child.pid for child in psutil.Process(supervised.process.pid).children(recursive=True)]
    assert set(supervised.engine_pids) < set(family)
    supervised.signal_and_wait(signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in family))
    (exited,) = supervised.events(EventName.ENGINE_EXITED)
    assert exited.reason.endswith("; stopped because its supervisor had been killed")


def test_kill_9_of_the_keeper_leaves_nothing(start: Start) -> None:
    supervised = start()
    supervised.wait_ready()
    (keeper,) = psutil.Process(supervised.process.pid).children()
    keeper.kill()
    assert supervised.process.wait(DEADLINE_S) == 1
    assert not any(alive(pid) for pid in supervised.engine_pids)
    (exited,) = supervised.events(EventName.ENGINE_EXITED)
    assert exited.reason.startswith("ended with its supervisor, which got signal SIGKILL, not from kvproof")


def test_it_ends_with_its_parent_when_asked_to(start: Start, tmp_path: Path) -> None:
    supervised = start()
    supervised.wait_ready()
    assert supervised.signal_and_wait(signal.SIGTERM) == 0
    argv = ["parent" if word == "alone" else word for word in supervised.argv]
    code = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
    output = (tmp_path / "output").open("w")
    with output, subprocess.Popen([sys.executable, "-c", code, *argv], cwd=ROOT, stdout=output) as parent:
        supervised.wait_ready(count=2)
        family = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        assert len(family) == 4
        parent.kill()
        wait_for(lambda: not any(alive(pid) for pid in family))
