"""What a run shows while it goes on: on a terminal, in a pipe, as JSON, and after Ctrl-C; engines are simulated."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from harness.records import Outcome, Status
from harness.report.progress import LiveProgress
from services.faults import LoadMode
from tests.builders import cell
from tests.simulated_engine import simulated_stack
from tests.terminal import HIDE_CURSOR, PLAIN_TERMINAL, ROOT, SHOW_CURSOR, on_terminal
from tests.test_report import SCHEMA_FILE, verdict_of
from tests.ways_to_be_wrong import Wrong

ONE_CELL = ("--only", "recompute-report-sync-middle")
CONTROLS = ("recompute-none-sync", "recompute-silent-sync")


@dataclass(frozen=True)
class Attached:
    """Arguments that attach `run_matrix.py run` to simulated engines."""

    arguments: tuple[str, ...]
    runs: Path


@pytest.fixture
def attached(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Attached]:
    """To honest engines, or to those whose `Wrong` is the parameter."""
    evidence, runs = tmp_path / "evidence", tmp_path / "runs"
    with simulated_stack(evidence, getattr(request, "param", Wrong.NOTHING)) as stack:
        urls = [word for service in stack.services for word in ("--url", f"{service}={stack.url(service)}")]
        folders = ("--evidence-dir", str(evidence), "--runs", str(runs))
        yield Attached(("run", "--stack", "attach", *urls, *folders, *ONE_CELL), runs)


def piped(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "harness/run_matrix.py", *arguments],
        cwd=ROOT,
        env={**PLAIN_TERMINAL, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# The display.


def shown(progress: LiveProgress, width: int = 80) -> list[str]:
    console = Console(width=width, _environ={})
    with console.capture() as captured:
        console.print(progress.render())
    return [line.rstrip() for line in captured.get().splitlines() if line.strip()]


def test_the_display_says_what_is_awaited_and_how_long() -> None:
    progress = LiveProgress(Console())
    progress.phase_begun("start")
    progress.waiting("waiting for prefill (20 s)")
    assert shown(progress) == ["start  0 s: waiting for prefill (20 s)"]
    progress.phase_begun("oracles")
    assert shown(progress) == ["oracles  0 s"]


def test_the_display_counts_cells_by_engine_and_load_mode() -> None:
    running = cell(name="fail-" + "long-" * 30, load=LoadMode.ASYNC, policy="fail")
    done = tuple(cell(name=f"done-{index}") for index in range(3))
    progress = LiveProgress(Console(quiet=True))
    progress.phase_begun("cells")
    progress.cells_planned((*done, running))
    for each in (*done, running):
        progress.cell_begun(each)
    progress.cell_done(done[0], verdict_of(done[0].id, Status.PASS, Outcome.RECOVERED), 1.0)
    progress.cell_done(done[1], verdict_of(done[1].id, Status.FAIL, Outcome.HUNG), 1.0)
    lines = shown(progress)
    assert lines[0].split() == ["engine", "load", "done", "pass", "fail", "now"]
    assert lines[2].split() == ["decode-recompute", "sync", "2/3", "1", "1", "0", "s", "done-2"]
    assert re.fullmatch(r" decode-fail +async +0/1 +0 s fail-long-[long-]*…", lines[3])
    assert lines[4] == "cells 2 of 4  0 s"
    assert max(map(len, lines)) <= 80
    progress.cells_planned(done[:1])
    assert shown(progress)[-1] == "cells 0 of 1  0 s"
    progress.phase_begun("stop")
    assert shown(progress)[-2].split() == ["decode-recompute", "sync", "0/1", "0", "s", "done-2"]
    assert shown(progress)[-1] == "stop  0 s"


# A whole run.


def test_on_a_terminal(attached: Attached) -> None:
    with on_terminal(*attached.arguments) as terminal:
        assert terminal.finish() == 0, terminal.text
        assert terminal.echoes()
    assert terminal.output.rindex(SHOW_CURSOR) > terminal.output.rindex(HIDE_CURSOR)
    assert {f"[{n}/3]" in terminal.text for n in (1, 2, 3)} == {True}
    assert re.search(r"decode-recompute +sync +3/3 +3", terminal.text)
    for cell_id in (*CONTROLS, ONE_CELL[1]):
        assert re.search(rf"pass  {cell_id} +\S+ +\d+/0/", terminal.text), "whole and on one line"
    assert "stop  0 s" in terminal.text
    assert "\x1b[32m" in terminal.output
    assert terminal.text.rstrip().splitlines()[-1].startswith("PASS  exit code 0")


def test_without_colour_there_is_none(attached: Attached) -> None:
    with on_terminal(*attached.arguments, NO_COLOR="1") as terminal:
        assert terminal.finish() == 0
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|9[0-7])m", terminal.output)


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}])
def test_in_a_pipe_there_are_lines(environment: dict[str, str], attached: Attached) -> None:
    done = piped(*attached.arguments, **environment)
    assert done.returncode == 0
    assert HIDE_CURSOR not in done.stdout
    assert ("\x1b[" in done.stdout) is bool(environment)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).splitlines()
    assert [line.split("  ")[0] for line in plain[1:4]] == ["start", "prefill", "oracles"]
    assert re.fullmatch(r"\[3/3\] pass recompute-report-sync-middle  recovered  \d\.\d s", plain[6])
    assert done.stderr == ""


@pytest.mark.parametrize("attached", [Wrong.GARBAGE_AFTER_RECOVERY], indirect=True)
def test_quiet_prints_what_is_red_and_the_end(attached: Attached) -> None:
    done = piped(*attached.arguments, "--quiet")
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert lines[1] == "FAIL recompute-report-sync-middle: wrong-output, expected recovered"
    assert lines[-3] == "2 pass, 1 fail  (1 loaded, 1 caught, 1 wrong-output)"
    assert lines[-1].startswith("FAIL  exit code 1")
    assert not any(control in done.stdout for control in CONTROLS)


@pytest.mark.parametrize("attached", [Wrong.GARBAGE_AFTER_RECOVERY], indirect=True)
def test_json_is_all_there_is_on_stdout(attached: Attached) -> None:
    done = piped(*attached.arguments, "--json")
    (folder,) = attached.runs.iterdir()
    assert done.stdout == (folder / "report.json").read_text()
    assert (
        json.loads(done.stdout)["schema_version"]
        == json.loads(SCHEMA_FILE.read_text())["properties"]["schema_version"]["const"]
    )
    assert "FAIL  exit code 1" in done.stderr
    judged = piped("judge", str(folder), "--json", "--quiet")
    assert (judged.returncode, json.loads(judged.stdout)) == (1, json.loads(done.stdout))


def test_json_of_a_run_that_cannot_begin_is_nothing(tmp_path: Path) -> None:
    done = piped("judge", str(tmp_path), "--json")
    assert (done.returncode, done.stdout) == (64, "")
    assert "is not a run folder" in done.stderr


# Ctrl-C.


@pytest.mark.parametrize("attached", [Wrong.HANGS], indirect=True)
def test_ctrl_c_leaves_the_terminal_as_it_was(attached: Attached) -> None:
    with on_terminal(*attached.arguments) as terminal:
        terminal.wait_for("cells 2 of 3")
        assert terminal.output.count(HIDE_CURSOR) == 1
        terminal.interrupt()
        assert terminal.finish() == 3
        assert terminal.echoes()
    assert terminal.output.rindex(SHOW_CURSOR) > terminal.output.rindex(HIDE_CURSOR)
    assert "interrupted; everything that was started has been stopped; to do the rest: " in terminal.text
    assert "Traceback" not in terminal.text


def test_ctrl_c_during_the_imports_gives_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("import signal\nprint('importing', flush=True)\nsignal.pause()\n")
    with on_terminal("list", PYTHONPATH=str(tmp_path)) as terminal:
        terminal.wait_for("importing")
        terminal.interrupt()
        assert terminal.finish() == -signal.SIGINT
    assert "Traceback" not in terminal.text
