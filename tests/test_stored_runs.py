"""`run --replay`, `run --resume`, `run --seed` and runs that break, as a user calls them; engines are simulated."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli.command_line import RunOptions, parse, with_stack_of
from harness.run_folder import RunFolder
from harness.run_matrix import main
from harness.stack import AttachStack
from tests.simulated_engine import simulated_stack
from tests.ways_to_be_wrong import Wrong

ROOT = Path(__file__).resolve().parents[1]
CELL = "recompute-report-sync-middle"
CONTROLS = ("recompute-none-sync", "recompute-silent-sync")


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[AttachStack]:
    with simulated_stack(tmp_path / "evidence", Wrong.NOTHING) as running:
        yield running


def words(stack: AttachStack, tmp_path: Path, *more: str) -> list[str]:
    urls = [word for service in stack.services for word in ("--url", f"{service}={stack.url(service)}")]
    return [
        "run",
        "--stack",
        "attach",
        *urls,
        "--evidence-dir",
        str(stack.evidence_dir),
        *more,
        "--runs",
        runs(tmp_path),
    ]


def runs(tmp_path: Path) -> str:
    return str(tmp_path / "runs")


def newest(tmp_path: Path) -> RunFolder:
    return RunFolder.open(max((tmp_path / "runs").iterdir(), key=lambda path: (path.name.count("-"), path.name)))


def report_of(folder: RunFolder) -> dict[str, object]:
    return dict(json.loads((folder.path / "report.json").read_text()))


def test_a_stored_run_knows_everything_that_repeats_a_cell(
    stack: AttachStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also its stack; and the matrix file may be gone."""
    matrix = tmp_path / "m.yaml"
    matrix.write_text((Path(__file__).parents[1] / "harness" / "matrix" / "example.yaml").read_text())
    assert main(words(stack, tmp_path, "--matrix", str(matrix), "--only", "recompute-*-sync*", "--seed", "7")) == 0
    matrix.unlink()
    original = newest(tmp_path)
    capsys.readouterr()
    assert main(["run", "--replay", str(original.path), "--cell", CELL, "--runs", runs(tmp_path)]) == 0
    again = newest(tmp_path)
    assert again.path != original.path
    raw = report_of(again)
    assert (raw["stack"], raw["seed"], raw["replay_of"], raw["differences"]) == ("attach", 7, str(original.path), [])
    assert {cell.id for cell in again.load_plan().cells} == {CELL, *CONTROLS}
    before = {prompt.id: prompt for prompt in original.load_prompts()}
    assert all(before[prompt.id] == prompt for prompt in again.load_prompts())
    printed = capsys.readouterr().out
    assert "seed 7: " in printed
    assert f"repeats cells of {original.path}, under the same conditions" in printed.replace("\n", " ")


def test_a_replay_tells_differences_and_goes_on(
    stack: AttachStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(stack, tmp_path, "--only", CELL)) == 0
    original = newest(tmp_path)
    info = original.load_info()
    original.save_info(replace(info, versions=replace(info.versions, vllm="0.31.0")))
    assert main(["run", "--replay", str(original.path), "--cell", CELL, "--runs", runs(tmp_path)]) == 0
    assert "NOT AS IN THE RUN THAT IS REPEATED: vllm was 0.31.0, is 0.32.0" in capsys.readouterr().out


def test_a_run_is_finished_in_its_own_folder(
    stack: AttachStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(stack, tmp_path, "--only", CELL)) == 0
    folder = newest(tmp_path)
    before = report_of(folder)
    (folder.path / "cells" / CELL / "observation.json").unlink()
    assert main(["judge", str(folder.path)]) == 3
    assert main(["run", "--resume", str(folder.path)]) == 0
    after = report_of(folder)
    assert (after["resumed_count"], after["counts"], after["run_id"]) == (1, before["counts"], before["run_id"])
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert "interrupted and resumed, times: 1" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_ended_in_the_middle(
    number: signal.Signals, stack: AttachStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [sys.executable, "harness/run_matrix.py", *words(stack, tmp_path)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert any("[ 3/" in line for line in process.stdout)
        process.send_signal(number)
        rest = process.stdout.read()
        assert process.wait(60) == (3 if number is signal.SIGINT else -signal.SIGKILL)
    folder = newest(tmp_path)
    assert (f"to do the rest: python harness/run_matrix.py run --resume {folder.path}" in rest) is (
        number is signal.SIGINT
    )
    before = {seen.cell_id: seen for seen in folder.load_observations()}
    assert 3 <= len(before) < len(folder.load_plan().cells)
    assert main(["run", "--resume", str(folder.path)]) == 0, capsys.readouterr().out
    after = {seen.cell_id: seen for seen in folder.load_observations()}
    assert set(after) == {cell.id for cell in folder.load_plan().cells}
    assert {name: after[name] for name in before} == before


def test_a_run_that_cannot_be_finished_here_stays_as_it_is(
    stack: AttachStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(stack, tmp_path, "--only", CELL)) == 0
    folder = newest(tmp_path)
    (folder.path / "cells" / CELL / "observation.json").unlink()
    info = folder.load_info()
    folder.save_info(replace(info, versions=replace(info.versions, vllm="0.31.0")))
    before = folder.load_info()
    assert main(["run", "--resume", str(folder.path)]) == 64
    assert "vllm was 0.31.0, is 0.32.0" in "".join(capsys.readouterr())
    assert folder.load_info() == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--cell", "x"], "--replay RUN --cell ID"),
        (["run", "--replay", "r", "--matrix", "m"], "--matrix cannot be given beside --replay"),
        (["run", "--resume", "r", "--only=x"], "--only cannot be given beside --replay or --resume"),
        (["run", "--resume", "r", "--seed", "2"], "--seed cannot be given"),
        (["run", "--resume", "r", "--replay", "r"], "not allowed with argument"),
        (["run", "--seed", "1000000"], "is not a whole number from 0 to 999999"),
        (["run", "--seed", "-1"], "is not a whole number"),
        (["run", "--seed", "x"], "is not a whole number"),
        (["run", "--resume", "no-such-run"], "no-such-run is not a run folder"),
        (["run", "--replay", "no-such-run"], "no-such-run is not a run folder"),
    ],
)
def test_words_that_do_not_fit_exit_64(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(arguments)
    except SystemExit as end:
        code = int(str(end.code))
    captured = capsys.readouterr()
    assert code == 64
    assert says in captured.out + captured.err


def test_a_cell_that_the_stored_run_has_not(
    stack: AttachStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(stack, tmp_path, "--only", CELL)) == 0
    original = newest(tmp_path)
    assert main(["run", "--replay", str(original.path), "--cell", "fail-none-sync", "--runs", runs(tmp_path)]) == 64
    assert "no cell of example matches 'fail-none-sync'" in "".join(capsys.readouterr())
    assert newest(tmp_path).path == original.path


def test_what_is_given_counts_before_the_stored_stack() -> None:
    stored = ("--stack", "attach", "--url", "prefill=http://a:1", "--evidence-dir", "e", "--kv-dir", "k")

    def options(*given: str) -> RunOptions:
        parsed = parse(("run", "--resume", "r", *given), {})
        assert isinstance(parsed, RunOptions)
        return with_stack_of(parsed, stored)

    assert sorted(options().stack_words()) == sorted(stored)
    assert options("--stack", "processes").stack == "processes"
    assert options("--url", "prefill=http://b:2").url == (("prefill", "http://b:2"),)
    assert options("--kv-dir", "other").kv_dir == Path("other")


# Runs that break.


def test_a_mistake_before_anything_began_leaves_no_folder(tmp_path: Path) -> None:
    assert main(["run", "--stack", "attach", "--runs", runs(tmp_path)]) == 64
    (tmp_path / "file").write_text("")
    assert main(["run", "--kv-dir", str(tmp_path / "file" / "kv"), "--runs", runs(tmp_path)]) == 64
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_run_whose_engines_are_not_there_leaves_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evidence").mkdir()
    services = ("prefill", "decode-baseline", "decode-recompute")
    urls = [word for service in services for word in ("--url", f"{service}=http://127.0.0.1:1")]
    evidence = ["--evidence-dir", str(tmp_path / "evidence"), "--only", CELL, "--runs", runs(tmp_path)]
    assert main(["run", "--stack", "attach", *urls, *evidence]) == 3
    raw = report_of(newest(tmp_path))
    assert (raw["exit_code"], raw["outcome"], raw["stack"]) == (3, "error", "attach")
    assert "Connection refused" in str(raw["error"])
    assert "Connection refused" in capsys.readouterr().out
    names = {path.name for path in newest(tmp_path).path.iterdir()}
    assert {"run.json", "report.json", "report.html", "junit.xml", "summary.md"} <= names
