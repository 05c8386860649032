"""Doctor: each check finds what is wrong, says what to do, and is no obstacle for a stack that does not need it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli import doctor, doctor_docker, machine
from harness.cli.doctor import CHECKS, Check, Machine, State, examine
from harness.run_matrix import main
from harness.stack.definition import read_engines

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def here(tmp_path: Path) -> Machine:
    return Machine(tmp_path, {}, tmp_path / "runs", tmp_path / "kv", read_engines(ROOT / "compose.yaml", {}))


def problem(check: Check, *said: str) -> None:
    assert check.state is State.PROBLEM
    assert check.remedy
    assert all(words in check.found for words in said), check.found


def test_every_check_of_the_issue_is_there() -> None:
    assert [name for name, _, _ in CHECKS] == [
        *("Python", "packages", "model", "memory", "shared memory", "disk", "folders", "ports", "earlier runs"),
        *("Docker engine", "Docker Compose", "Docker buildx", "Docker disk", "GPU"),
    ]


def test_what_a_stack_does_not_need_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = Check(State.PROBLEM, "broken", "mend it")
    monkeypatch.setattr(doctor, "CHECKS", (("thing", lambda _: broken, ("compose",)),))
    assert examine(ROOT, {}, "compose", tmp_path, None) == {"thing": broken}
    (check,) = examine(ROOT, {}, "processes", tmp_path, None).values()
    assert check == Check(State.NOTE, "broken (this stack does not need it)", "mend it")


def test_a_check_that_is_refused_is_a_problem_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(_: Machine) -> Check:
        raise PermissionError(13, "Permission denied", "/proc/1")

    fine = Check(State.OK, "fine")
    monkeypatch.setattr(doctor, "CHECKS", (("a", refused, ("attach",)), ("b", lambda _: fine, ("attach",))))
    checks = examine(ROOT, {}, "attach", tmp_path, None)
    problem(checks["a"], "Permission denied")
    assert checks["b"] == fine


def test_the_lock_is_compared_with_what_is_installed() -> None:
    locked = doctor.locked_versions("# a comment\nA_b==1.0\nruamel.yaml==2  # why\n\ntorch==2.13.0+cpu\n")
    assert locked == {"a-b": "1.0", "ruamel-yaml": "2", "torch": "2.13.0+cpu"}
    assert doctor.compare_packages(locked, {**locked, "more": "1"}) == Check(State.OK, "3 as in requirements.lock")
    problem(doctor.compare_packages(locked, {"a-b": "1.0"}), "not installed: ruamel-yaml, torch")
    other = doctor.compare_packages(locked, {**locked, "a-b": "1.1"})
    assert (other.state, other.found) == (State.NOTE, "other versions: a-b 1.1, not 1.0")


def test_the_packages_here_are_those_of_the_lock(here: Machine) -> None:
    assert doctor.packages(replace(here, root=ROOT)).state is not State.PROBLEM


def test_models(here: Machine, tmp_path: Path) -> None:
    assert doctor.model(here).state is State.NOTE
    folder = tmp_path / ".cache" / "smollm2"
    folder.mkdir(parents=True)
    problem(doctor.model(here), "no config.json")
    (folder / "config.json").write_text("{}")
    problem(doctor.model(here), "no *.safetensors")
    (folder / "model.safetensors").write_text("")
    assert doctor.model(here) == Check(State.OK, str(folder))
    assert doctor.model(replace(here, environ={"KVPROOF_MODEL": str(folder)})) == Check(State.OK, str(folder))
    problem(doctor.model(replace(here, environ={"KVPROOF_MODEL": "/no/such"})), "/no/such")
    assert "fetched from a model hub" in doctor.model(replace(here, environ={"KVPROOF_MODEL": "org/model"})).found


def test_memory() -> None:
    problem(doctor.enough_memory(4 * machine.GIB, 4), "4.0 GiB available", "4 engines may need 10.0 GiB")
    assert doctor.enough_memory(10 * machine.GIB, 4).state is State.OK


@pytest.mark.parametrize("check", [doctor.shared_memory, doctor.disk, doctor_docker.docker_disk])
def test_room(check: Callable[[Machine], Check], here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (doctor, doctor_docker):
        monkeypatch.setattr(module, "free_bytes", lambda _: 7 * machine.GIB)
    assert check(here).state is State.OK
    for module in (doctor, doctor_docker):
        monkeypatch.setattr(module, "free_bytes", lambda _: machine.GIB // 2)
    problem(check(here), "0.5 GiB free")


def test_folders(here: Machine, tmp_path: Path) -> None:
    assert doctor.folders(here).state is State.OK
    (tmp_path / "file").write_text("")
    problem(doctor.folders(replace(here, kv_dir=tmp_path / "file" / "kv")), str(tmp_path / "file" / "kv"))
    problem(doctor.folders(replace(here, runs=tmp_path / "file")), str(tmp_path / "file"))


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everything")
def test_a_folder_without_rights(here: Machine, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    problem(doctor.folders(here), "runs", "kv")


def test_ports(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_docker, "project_runs", lambda _: False)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        busy = replace(here, engines=tuple(replace(engine, host_port=port) for engine in here.engines[:1]))
        problem(doctor_docker.ports(busy), f"taken: {port}")
        monkeypatch.setattr(doctor_docker, "project_runs", lambda _: True)
        assert doctor_docker.ports(busy).state is State.OK
    assert doctor_docker.ports(busy) == Check(State.OK, f"free: {port}")


def test_engines_of_a_run_that_has_ended(here: Machine) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    command = [sys.executable, "-c", "input()"]
    for parent, state in ((ended.pid, State.PROBLEM), (os.getpid(), None)):
        environ = {**os.environ, "KVPROOF_PARENT_PID": str(parent)}
        with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE) as engine:
            check = doctor.earlier_engines(here)
            assert (f" {engine.pid}" in check.remedy) is (state is State.PROBLEM)
            engine.communicate(b"\n")


def test_docker_that_does_not_answer(here: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    problem(doctor_docker.docker_engine(here), "no engine answers")
    assert doctor_docker.project_runs(here) is False


@pytest.mark.parametrize(("version", "state"), [("20.10.24", "PROBLEM"), ("23.0.1", "ok"), ("odd", "PROBLEM")])
def test_docker_versions(version: str, state: str) -> None:
    assert doctor_docker.recent_docker(version).state == state


@pytest.mark.parametrize("check", [doctor_docker.docker_compose, doctor_docker.docker_buildx])
def test_docker_plugins(
    check: Callable[[Machine], Check], here: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    problem(check(here), "is not there")
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho $1 $2 2.26\n")
    docker.chmod(0o755)
    assert check(here).state is State.OK
    docker.write_text("#!/bin/sh\necho no such plugin >&2; exit 1\n")
    problem(check(here))


def test_a_gpu_is_only_told(here: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.gpu(here).state is State.NOTE
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho NVIDIA H200, 143771 MiB\n")
    smi.chmod(0o755)
    assert "NVIDIA H200" in doctor.gpu(here).found


def test_the_command_ends_with_remedies_and_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "free_bytes", lambda _: 100 * machine.GIB)
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--stack", "attach", "--runs", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().out.rstrip().endswith("all fine for --stack attach")
    assert main(["doctor", "--stack", "attach", "--runs", str(tmp_path / "file" / "runs")]) == 3
    printed = capsys.readouterr().out
    assert f"folders: cannot be written: {tmp_path / 'file' / 'runs'}" in printed
    assert "choose others with --runs and --kv-dir" in printed
    assert printed.rstrip().endswith("1 to mend before --stack attach")
