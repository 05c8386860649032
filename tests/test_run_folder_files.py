"""What a run folder does with the files of others: pipes and links stay what they are, and only files are copied."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness.errors import HarnessError, UsageError
from harness.planning.plan import CELLS_MAX, load_plan
from harness.records import CELL_ID_BYTES_MAX
from harness.report.console import print_raw
from harness.run_folder import RunFolder, write_text
from harness.run_matrix import main
from harness.running import phases
from tests.engines import ENGINES

MATRIX = """
schema: 1
name: small
prompts:
  harbour: {{text: A story of boats., token_count: 100}}
cells:
  - {{why: It must., engine: decode-recompute, load: sync, workload: {{victim: harbour}}, {more}}}
"""


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "text")
    reader.join(20)
    assert got == ["text"]
    assert pipe.is_fifo()


def test_what_a_link_leads_to_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert (link.is_symlink(), target.read_text()) == (True, "new")


def test_a_folder_in_the_way_is_told(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"cannot write .*: Is a directory"):
        write_text(tmp_path, "text")


def test_of_somebody_elses_folder_only_the_files_of_the_services_are_kept(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    folder = RunFolder.create(evidence / "runs", "run")
    (evidence / "prefill").mkdir()
    (evidence / "prefill" / "journal.jsonl").write_text("{}\n")
    os.mkfifo(evidence / "prefill" / "pipe")
    (evidence / "prefill" / "nowhere").symlink_to(tmp_path / "nothing")
    (evidence / "other").mkdir()
    (evidence / "other" / "large").write_text("x")
    folder.save_evidence(evidence, ("prefill", "decode-recompute"))
    kept = [path.relative_to(folder.path) for path in (folder.path / "evidence").rglob("*") if path.is_file()]
    assert kept == [Path("evidence/prefill/journal.jsonl")]


def test_a_name_that_no_disk_takes_is_told() -> None:
    with pytest.raises(UsageError, match="File name too long"):
        RunFolder.open(Path("x" * 5000))


def test_before_anything_is_stored_the_problem_itself_is_told(tmp_path: Path) -> None:
    problem = HarnessError("the disk is full")
    with pytest.raises(HarnessError, match="the disk is full"):
        phases.fail(RunFolder.create_new(tmp_path, datetime.now(UTC)), problem)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (f"name: {'x' * CELL_ID_BYTES_MAX}", "the cell id recompute-none-sync-x+ is too long"),
        (f"fault: {{kind: report, blocks: {list(range(CELLS_MAX + 1))}}}", f"more than {CELLS_MAX} cells"),
    ],
)
def test_what_no_run_could_do_is_told_with_the_matrix(tmp_path: Path, more: str, problem: str) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(MATRIX.format(more=more))
    with pytest.raises(UsageError, match=problem):
        load_plan(file, ENGINES)


def test_an_option_that_is_cut_short_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--replay", "runs/A", "--see", "7"])
    assert ended.value.code == 64
    assert "unrecognized arguments: --see 7" in capsys.readouterr().err


def test_a_full_disk_behind_stdout_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(["completion", "bash"]) == 3
        monkeypatch.undo()
    told = capsys.readouterr().err
    assert "No space left on device" in told
    assert "Traceback" not in told


def test_characters_that_stdout_lacks_are_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr("sys.stdout", out)
        print_raw("a → b\n")
    assert (tmp_path / "out").read_text() == "a \\u2192 b\n"


def test_a_closed_stdout_is_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    print_raw("text")
