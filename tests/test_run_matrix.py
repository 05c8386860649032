"""The command line: what it prints and which exit code it gives, without engines."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.cli.command_line import COMMANDS, RunOptions, parse
from harness.run_folder import RunFolder
from harness.run_matrix import main

ROOT = Path(__file__).resolve().parents[1]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and everything printed."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = int(str(end.code))
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_list_prints_every_cell_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(["list"], capsys)
    assert code == 0
    assert len(text.splitlines()) >= 24
    assert "recompute-none-sync  [loaded]  With nothing broken" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--stack", "nonsense"], "invalid choice: 'nonsense'"),
        (["--no-such-option"], "unrecognized arguments"),
        (["run", "--url", "prefill"], "'prefill' is not NAME=URL"),
        (["list", "--only", "recompute-repot-sync-first"], "recompute-report-sync-first"),
        (["list", "--matrix", "no-such-matrix"], "no such matrix; those that ship are default, example, full"),
        (["list", "--matrix", "no-such.yaml"], "cannot read the matrix file"),
        (["judge", "no-such-run"], "is not a run folder"),
        (["--url", "prefill=http://127.0.0.1:1"], "--url is for services that run elsewhere: --stack attach"),
        (["--stack", "compose", "--evidence-dir", "e"], "--evidence-dir is for services that run elsewhere"),
        (["--stack", "compose", "--kv-dir", "k"], "--kv-dir has no effect with --stack compose"),
        (["--stack", "attach", "--url", "a=http://h:1", "--url", "a=http://h:2"], "--url names a twice"),
        (["--resume", "runs/A", "--runs", "elsewhere"], "--runs cannot be given beside --resume"),
    ],
)
def test_bad_arguments_exit_64(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(arguments, capsys)
    assert code == 64
    assert says in text
    assert "Traceback" not in text


@pytest.mark.parametrize("text", ["[" * 3000, '!!int ""', "!!bool foo", "!!timestamp foo", "a: *b", "\x00", "", "[1]"])
def test_a_file_that_is_no_matrix_exits_64(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(text)
    code, printed = run(["list", "--matrix", str(file)], capsys)
    assert code == 64
    assert "Traceback" not in printed


def test_all_mistakes_of_a_matrix_at_once_without_terminal_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.yaml"
    cells = '[{why: "w", engin: x, load: sinc, fault: {kind: reprot}, workload: {victim: p}, "\\e[31mEVIL": 1}]'
    file.write_text(f"schema: 1\nname: n\nprompts: {{p: {{text: hello}}}}\ncells: {cells}\n")
    code, printed = run(["list", "--matrix", str(file)], capsys)
    assert code == 64
    assert all(word in printed for word in ("engin", "sinc", "reprot", "cells.0.fault.kind", "did you mean report"))
    assert "\x1b[31mEVIL" not in printed


def test_attach_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attach = ["--stack", "attach", "--runs", str(tmp_path / "runs"), "--evidence-dir", str(tmp_path)]
    code, text = run(attach, capsys)
    assert (code, "needs --url NAME=URL" in text) == (64, True)
    urls = ["--url", "prefill=http://127.0.0.1:1"]
    code, text = run([*attach, *urls, "--url", "decode-recompte=http://127.0.0.1:1"], capsys)
    assert (code, "no service is called decode-recompte; the services are prefill, decode-b" in text) == (64, True)
    code, text = run([*attach, *urls], capsys)
    assert (code, "no --url for decode-baseline, decode-recompute" in text) == (64, True)


def test_a_url_that_nobody_listens_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    services = ("prefill", "decode-baseline", "decode-recompute", "decode-fail")
    urls = [word for service in services for word in ("--url", f"{service}=http://127.0.0.1:1")]
    options = ["--stack", "attach", "--runs", str(tmp_path / "runs"), "--evidence-dir", str(tmp_path)]
    code, text = run([*options, *urls], capsys)
    assert code == 3
    assert all(f"{service}: http://127.0.0.1:1" in text for service in services)
    assert "Connection refused" in text


def test_a_kv_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    code, text = run(["--runs", str(tmp_path / "runs"), "--kv-dir", str(tmp_path / "file" / "kv")], capsys)
    assert code == 64
    assert "the KV folder cannot be written" in text


def test_two_runs_in_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    from datetime import UTC, datetime

    now = datetime(2026, 11, 30, 15, 45, 1, tzinfo=UTC)
    names = [RunFolder.create_new(tmp_path, now).path.name for _ in range(3)]
    assert names == ["20261130-154501", "20261130-154501-2", "20261130-154501-3"]


@pytest.mark.parametrize("name", ["KVPROOF_RUNS_DIR", "KVPROOF_MATRIX", "KVPROOF_ONLY"])
def test_a_variable_that_is_empty_counts_as_not_set(name: str) -> None:
    assert parse(["run"], {name: ""}) == parse(["run"], {})


def test_variables_are_defaults_and_arguments_win() -> None:
    environ = {"KVPROOF_RUNS_DIR": "there", "KVPROOF_MATRIX": "storage", "KVPROOF_ONLY": "a,b"}
    options = parse(["--runs", "here"], environ)
    assert isinstance(options, RunOptions)
    assert (options.runs, options.matrix, options.only) == (Path("here"), "storage", ("a", "b"))
    only = parse(["--only", "c", "--only", "d"], environ)
    assert isinstance(only, RunOptions)
    assert only.only == ("c", "d")


def test_the_words_that_choose_a_stack_choose_it_again() -> None:
    assert options_of(["run"]).stack_words() == ()
    words = ["--stack", "attach", "--url", "prefill=http://h:1", "--url", "a=http://h:2"]
    words += ["--kv-dir", "k v", "--evidence-dir", "e"]
    options = options_of(words)
    assert options_of(options.stack_words()) == options
    assert options_of(options_of(["--stack", "compose"]).stack_words()).stack == "compose"


# Help and completion.


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_helps_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run([command, "--help"], capsys)
    assert code == 0
    assert "Example" in text
    assert f"run_matrix.py {command}" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_are_understood(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = run([command, "--help"], capsys)
    examples = re.findall(r"^  (?:[A-Z_]+=\S+ )?run_matrix\.py(.*?)(?: {2,}.*| > .*)?$", text, re.MULTILINE)
    for example in examples:
        parse(shlex.split(example), {})
    assert examples or command == "completion"


def completed(*words: str) -> list[str]:
    """What bash offers for the last word."""
    script = f"""
        source <({sys.executable} harness/run_matrix.py completion bash)
        COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}
        $(complete -p run_matrix.py | sed -E 's/.*-F ([^ ]+).*/\\1/') run_matrix.py {shlex.quote(words[-1])}
        printf '%s\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return sorted(word.strip() for word in done.stdout.split())


def test_bash_completes_commands_options_choices_and_folders() -> None:
    assert completed("run_matrix.py", "") == sorted(COMMANDS)
    assert completed("run_matrix.py", "run", "--st") == ["--stack"]
    assert completed("run_matrix.py", "run", "--stack", "") == ["attach", "compose", "processes"]
    assert completed("run_matrix.py", "judge", "harness/rep") == ["harness/report"]


def test_zsh_gets_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(["completion", "zsh"], capsys)
    assert code == 0
    assert text.startswith("#compdef run_matrix.py")


def test_it_is_a_command_that_a_shell_can_complete() -> None:
    assert os.access(ROOT / "harness" / "run_matrix.py", os.X_OK)
    assert (ROOT / "harness" / "run_matrix.py").read_text().startswith("#!/usr/bin/env python3\n")


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("import no_such_package\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "harness/run_matrix.py", "list"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("kvproof needs the Python package no_such_package; run `make demo` once")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["list"], ["completion", "bash"], ["doctor", "--stack", "attach"]])
def test_a_reader_that_has_gone_changes_no_exit_code(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "harness/run_matrix.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def shell(words: str, **environ: str) -> tuple[int, str]:
    """Exit code of `python harness/run_matrix.py` with these words of a shell, and what it printed."""
    command = f"{shlex.quote(sys.executable)} harness/run_matrix.py {words}"
    environment = {**os.environ, **environ}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, check=False)
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("list >/dev/full", 3),
        ("list --matrix nosuch 2>/dev/full", 64),
        ("judge nosuch >/dev/full 2>&1", 64),
        ("--no-such-option 2>/dev/full", 64),
    ],
)
def test_a_full_disk_behind_an_output_never_looks_like_a_red_cell(words: str, code: int) -> None:
    assert shell(words)[0] == code


def test_what_the_encoding_of_the_terminal_lacks_is_escaped(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    cells = "[{why: Snow \u96ea., engine: decode-fail, load: sync, workload: {victim: p}}]"
    file.write_text(f"schema: 1\nname: n\nprompts: {{p: {{text: hello}}}}\ncells: {cells}\n")
    code, text = shell(f"list --matrix {file}", PYTHONIOENCODING="ascii")
    assert (code, "Snow \\u96ea." in text) == (0, True)


def test_a_comparison_overwrites_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = ROOT / "tests" / "recorded"
    before, after = (
        shutil.copytree(recorded / name, tmp_path / name) for name in ("20261130-202128", "20261130-202446")
    )
    plan = (after / "plan.json").read_bytes()
    code, text = run(["compare", str(before), str(after), "--html", str(after / "plan.json")], capsys)
    assert (code, "lies in a folder that is compared" in text) == (64, True)
    assert (after / "plan.json").read_bytes() == plan
    code, text = run(["compare", str(before), str(after), "--html", str(tmp_path)], capsys)
    assert (code, "cells" in text, "Is a directory" in text) == (3, True, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        main(["list", "--only", "recompute-none-sync"])
        assert signal.getsignal(number) is signal.SIG_IGN
        signal.signal(number, signal.SIG_DFL)
        main(["list", "--only", "recompute-none-sync"])
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)


def test_an_old_python_is_told() -> None:
    start = "import runpy, sys; sys.version_info = (3, 10, 9); runpy.run_path(sys.argv[1], run_name='__main__')"
    command = [sys.executable, "-c", start, "harness/run_matrix.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "kvproof needs Python 3.11" in done.stderr) == (3, True)
    assert "Traceback" not in done.stderr


def options_of(arguments: Sequence[str]) -> RunOptions:
    options = parse(arguments, {})
    assert isinstance(options, RunOptions)
    return options
