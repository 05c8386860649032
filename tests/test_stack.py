"""The stacks with real processes and a stand-in for the engine; nothing may be left running, whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest
import yaml

from harness.errors import LeverMissing, StackError, UsageError
from harness.records import EngineInfo, Versions
from harness.stack import AttachStack, ComposeStack, ProcessStack, compose
from harness.stack.definition import InterpolationError, changed_variables, interpolate, read_engines
from harness.stack.life import EngineLife, LifeReader
from harness.stack.processes import reserve_port
from services.journal import EventName, Journal
from tests import fake_server

ROOT = Path(__file__).resolve().parent.parent
ENTRYPOINT = "import sys; from tests import fake_server; sys.exit(fake_server.main())\n"
SILENT: Callable[[str], None] = lambda _: None  # noqa: E731


def process_environ(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def write_compose(folder: Path, modes: Mapping[str, str], host_port: int = 0) -> Path:
    """A compose.yaml with these engines, and the stand-in where the engines' entry point lies."""
    services: dict[str, object] = {
        service: {
            "ports": [f"127.0.0.1:{host_port}:8000"] if host_port else [],
            "environment": {"KVPROOF_SERVICE": service, "KVPROOF_ROLE": "decode", "FAKE_MODE": mode},
        }
        for service, mode in modes.items()
    }
    path = folder / "compose.yaml"
    path.write_text(yaml.safe_dump({"services": {**services, "harness": {"image": "x"}}}, sort_keys=False))
    (folder / "services").mkdir()
    (folder / "services" / "entrypoint.py").write_text(ENTRYPOINT)
    return path


MakeStack = Callable[..., ProcessStack]


@pytest.fixture
def make_stack(tmp_path: Path) -> Iterator[MakeStack]:
    """Makes stacks and checks afterwards that none of their processes is left."""
    marker = f"FAKE_MARKER={tmp_path}"

    def make(kv_dir: Path | None = None, host_port: int = 0, **modes: str) -> ProcessStack:
        compose_file = write_compose(tmp_path, modes, host_port)
        return ProcessStack(compose_file, tmp_path / "run", kv_dir, process_environ(FAKE_MARKER=str(tmp_path)))

    yield make
    # What has just been killed may take a moment to go.
    eventually(lambda: processes_with(marker) == [], deadline_s=3)


def processes_with(variable: str) -> list[str]:
    """Command lines of the live processes that have this in their environment, other than this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0") and folder.name != str(os.getpid()):
                found.append((folder / "cmdline").read_text())
        except OSError:
            continue  # it has just ended, or is not ours
    return found


def eventually(condition: Callable[[], bool], deadline_s: float = 10) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "still not so"
        time.sleep(0.05)


def test_start_ready_kill_stop(make_stack: MakeStack) -> None:
    said: list[str] = []
    with make_stack(prefill="fine", decode="fine") as stack:
        assert stack.services == ("prefill", "decode")
        stack.wait_ready(stack.services, 20, said.append)
        assert stack.client("decode").version() == "0.32.0"
        assert stack.client("decode") is stack.client("decode")
        assert stack.url("prefill") != stack.url("decode")
        assert stack.first_exit() is None
        assert stack.log_tail("decode", 5)[0].startswith("serving on")
        kv_dir = stack.kv_dir
        assert kv_dir is not None
        assert kv_dir.is_dir()

        stack.kill_engine("decode")
        eventually(lambda: stack.restart_count("decode") == 1)
        assert stack.restart_count("prefill") == 0
        stack.wait_ready(["decode"], 20, said.append)
    assert said[0].startswith("waiting for prefill, decode (")
    assert not kv_dir.exists()
    stack.stop()


def test_a_supervisor_that_exits_at_once(make_stack: MakeStack) -> None:
    with make_stack(good="fine", bad="exits") as stack:
        began_s = time.monotonic()
        with pytest.raises(StackError) as caught:
            stack.wait_ready(stack.services, 60, SILENT)
        text = str(caught.value)
        assert text.startswith("bad: ended, exit code 7; log: ")
        assert "supervisor.log" in text
        assert "  | KVPROOF_ROLE: 'judge' is not a role" in text
        assert time.monotonic() - began_s < 5
        assert stack.restart_count("good") <= 1


def test_an_engine_whose_first_start_fails(make_stack: MakeStack) -> None:
    message = r"(?s)bad: ended, exit code 5; .*engine.log.*ValueError: no such model"
    with make_stack(bad="engine-exits") as stack, pytest.raises(StackError, match=message):
        stack.wait_ready(stack.services, 60, SILENT)


@pytest.mark.parametrize("mode", ["bad-setting", "bad-argument"])
def test_an_engine_that_refuses_its_settings_is_the_users_mistake(make_stack: MakeStack, mode: str) -> None:
    with make_stack(bad=mode, good="fine") as stack, pytest.raises(UsageError, match=r"(?s)bad: ended.*BLOCK_SIZE"):
        stack.wait_ready(stack.services, 60, SILENT)


def test_an_engine_that_has_ended_stops_nobody_who_waits_for_another(make_stack: MakeStack) -> None:
    with make_stack(one="fine", other="fine") as stack:
        stack.wait_ready(stack.services, 20, SILENT)
        stack._processes["other"].kill()
        eventually(lambda: stack.first_exit() is not None)
        stack.wait_ready(["one"], 5, SILENT)
        with pytest.raises(StackError, match="other: ended, killed by SIGKILL"):
            stack.wait_ready(["other"], 5, SILENT)


def test_settings_of_a_stored_run_count_before_those_of_now(tmp_path: Path) -> None:
    compose_file = write_compose(tmp_path, {"one": "exits", "two": "exits"})
    stored = {"one": {"FAKE_MODE": "fine"}}
    environ = process_environ(FAKE_MARKER=str(tmp_path))
    with ProcessStack(compose_file, tmp_path / "run", None, environ, ("one",), stored) as stack:
        stack.wait_ready(["one"], 20, SILENT)


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({"KVPROOF_MODEL": "./mine"}, {"KVPROOF_MODEL": "/mine", "KVPROOF_MODEL_DIR": "/.cache/smollm2"}),
        ({"KVPROOF_MODEL": "org/model"}, {"KVPROOF_MODEL": "org/model"}),
        ({"KVPROOF_MODEL_DIR": "there"}, {"KVPROOF_MODEL_DIR": "/there"}),
        ({"KVPROOF_MODEL_DIR": ""}, {"KVPROOF_MODEL_DIR": "/.cache/smollm2"}),
    ],
)
def test_a_models_folder_is_the_one_that_is_seen_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], seen: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    compose_file = write_compose(tmp_path, {"one": "fine"})
    given = process_environ(FAKE_MARKER=str(tmp_path), **given)
    with ProcessStack(compose_file, tmp_path / "run", None, given) as stack:
        environ = psutil.Process(stack._processes["one"].pid).environ()
    assert {name: environ[name].replace(str(tmp_path), "") for name in seen} == seen


def test_an_engine_that_never_answers(make_stack: MakeStack) -> None:
    said: list[str] = []
    with make_stack(slow="never-ready", good="fine") as stack:
        with pytest.raises(StackError, match=r"^slow: still not ready after 8 s; no log") as caught:
            stack.wait_ready(stack.services, 8, said.append)
        assert "good" not in str(caught.value)
        assert said[-1].startswith("waiting for slow (")
        assert len(said) <= 4


def test_a_supervisor_that_ignores_the_end(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.stack.processes.STOP_GRACE_S", 0.3)
    with make_stack(stubborn="stubborn") as stack:
        stack.wait_ready(stack.services, 20, SILENT)


def test_a_supervisor_killed_from_outside_is_named(make_stack: MakeStack) -> None:
    with make_stack(one="fine") as stack:
        stack.wait_ready(stack.services, 20, SILENT)
        stack._processes["one"].kill()
        eventually(lambda: stack.first_exit() is not None)
        assert "one: ended, killed by SIGKILL" in str(stack.first_exit())


def test_the_published_port_is_used_when_it_is_free(make_stack: MakeStack) -> None:
    with reserve_port(0) as held:
        port = held.getsockname()[1]
    with make_stack(host_port=port, one="fine") as stack:
        assert stack.url("one") == f"http://127.0.0.1:{port}"


def test_a_taken_port_gives_another_one(make_stack: MakeStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with make_stack(host_port=port, one="fine", two="fine") as stack:
            stack.wait_ready(stack.services, 20, SILENT)
            assert len({stack.url("one"), stack.url("two"), f"http://127.0.0.1:{port}"}) == 3


def test_two_runs_never_choose_the_same_port() -> None:
    with reserve_port(0) as first:
        port = first.getsockname()[1]
        with reserve_port(port) as second:
            assert second.getsockname()[1] != port
        with socket.socket() as engine:
            engine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            engine.bind(("127.0.0.1", port))
            engine.listen()


def test_a_kv_folder_of_the_user_stays(make_stack: MakeStack, tmp_path: Path) -> None:
    with make_stack(kv_dir=tmp_path / "my kv", one="fine") as stack:
        assert stack.kv_dir == tmp_path / "my kv"
    assert (tmp_path / "my kv").is_dir()


def test_a_kv_folder_that_cannot_be_written(make_stack: MakeStack, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stack = make_stack(kv_dir=tmp_path / "file" / "kv", one="fine")
    with pytest.raises(UsageError, match=r"file/kv: the KV folder cannot be written \(Not a directory\); .*--kv-dir"):
        stack.start()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up root in a child")
def test_a_kv_folder_without_rights(tmp_path: Path) -> None:
    program = (
        "import os, sys, pathlib; from harness.errors import UsageError; from harness.stack import processes\n"
        "os.setuid(65534)\n"
        "try: processes._require_writable(pathlib.Path(sys.argv[1]), 'KV', 'do this')\n"
        "except UsageError as error: print(error)\n"
    )
    (tmp_path / "kv").mkdir(mode=0o700)
    command = [sys.executable, "-c", program, str(tmp_path / "kv")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert "kv: the KV folder cannot be written (Permission denied); do this" in done.stdout, done.stderr


HARNESS = """
import sys, pathlib, os
from harness.records import EngineInfo, Versions
from harness.stack import ProcessStack
with ProcessStack(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), None, os.environ) as stack:
    stack.wait_ready(stack.services, 60, lambda text: print(text, flush=True))
"""


def test_ctrl_c_while_waiting_leaves_nothing(tmp_path: Path) -> None:
    compose_file = write_compose(tmp_path, {"slow": "never-ready", "good": "fine"})
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS, str(compose_file), str(tmp_path / "run")],
        env=process_environ(FAKE_MARKER=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert harness.stdout is not None
    with harness.stdout:
        assert "waiting for" in harness.stdout.readline()
        eventually(lambda: len(processes_with(f"FAKE_MARKER={tmp_path}")) >= 5)
        harness.send_signal(signal.SIGINT)
        assert harness.wait(10) != 0
    eventually(lambda: processes_with(f"FAKE_MARKER={tmp_path}") == [], deadline_s=3)


def test_inside_compose_there_is_no_lever_without_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "DOCKER_SOCKET", tmp_path / "docker.sock")
    stack = ComposeStack(write_compose(tmp_path, {"one": "fine"}), {"KVPROOF_IN_COMPOSE": "1"}, ("one",))
    with pytest.raises(LeverMissing, match=r"one: .* needs the Docker socket: compose\.process-faults\.yaml gives it"):
        stack.lever("one")


def test_unknown_service(tmp_path: Path) -> None:
    compose_file = write_compose(tmp_path, {"one": "fine"})
    with pytest.raises(UsageError, match=r"no engine is called two; compose\.yaml has one"):
        ProcessStack(compose_file, tmp_path, None, {}, services=("two",))


@pytest.mark.skipif(os.getuid() != 0, reason="only root ignores file modes")
@pytest.mark.parametrize("bounding_set", ["-dac_override,-dac_read_search", "-dac_override", ""])
def test_whether_an_engine_obeys_file_modes(bounding_set: str, tmp_path: Path) -> None:
    stack = ProcessStack(write_compose(tmp_path, {"decode": "fine"}), tmp_path / "run", None, process_environ())
    assert not stack.obeys_file_modes("decode")
    limit = [f"--bounding-set={bounding_set}"] if bounding_set else []
    with subprocess.Popen(["setpriv", *limit, "sleep", "60"]) as engine:
        Journal(stack.evidence_dir, "decode").write(EventName.ENGINE_STARTED, pid=engine.pid)
        eventually(lambda: Path(f"/proc/{engine.pid}/comm").read_text() == "sleep\n")
        assert stack.obeys_file_modes("decode") == (bounding_set.count("-dac") == 2)
        engine.kill()
    assert not stack.obeys_file_modes("decode")


def test_a_small_disk_is_named_by_the_environment(tmp_path: Path) -> None:
    compose_file = write_compose(tmp_path, {"decode": "fine"})
    for value, folder in (("/mnt/small", Path("/mnt/small")), ("", None)):
        environ = process_environ(KVPROOF_SMALL_DIR=value)
        assert ProcessStack(compose_file, tmp_path / "run", None, environ).small_dir == folder
    assert ComposeStack(compose_file, {"KVPROOF_IN_COMPOSE": "1"}, ("decode",)).small_dir == Path("/small")
    assert ComposeStack(compose_file, {"KVPROOF_SMALL_DIR": "/small"}, ("decode",)).small_dir is None


def test_attach(tmp_path: Path) -> None:
    with fake_server.running() as fake, AttachStack({"decode": fake.url}, None, tmp_path) as stack:
        stack.wait_ready(["decode"], 5, SILENT)
        assert (stack.services, stack.kv_dir, stack.url("decode")) == (("decode",), None, fake.url)
        assert stack.restart_count("decode") == 0
        with pytest.raises(LeverMissing, match="decode: "):
            stack.kill_engine("decode")
        stack.stop()
        assert stack.client("decode").is_healthy()


def test_attach_names_every_url_that_nobody_answers(tmp_path: Path) -> None:
    with reserve_port(0) as one, reserve_port(0) as two:
        urls = [f"http://127.0.0.1:{held.getsockname()[1]}" for held in (one, two)]
        with pytest.raises(StackError) as caught:
            AttachStack(dict(zip("ab", urls, strict=True)), None, tmp_path).start()
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"a: {urls[0]}/health: Connection refused")
    assert second.startswith(f"b: {urls[1]}/health: Connection refused")


def test_attach_needs_the_evidence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the evidence folder is missing; .*KVPROOF_EVIDENCE_DIR"):
        AttachStack({}, None, tmp_path / "none")


def test_inside_compose_everything_follows_from_the_file(tmp_path: Path) -> None:
    compose_file = write_compose(tmp_path, {"prefill": "fine", "decode-fail": "fine"}, host_port=8100)
    stack = ComposeStack(
        compose_file, {"KVPROOF_IN_COMPOSE": "1", "KVPROOF_EVIDENCE_DIR": str(tmp_path)}, ("prefill", "decode-fail")
    )
    stack.start()
    assert stack.url("decode-fail") == "http://decode-fail:8000"
    assert stack.kv_dir == Path("/kv")
    assert stack.first_exit() is None
    journal = Journal(tmp_path, "decode-fail")
    journal.write(EventName.ENGINE_STARTED, pid=1)
    journal.write(EventName.ENGINE_EXITED, reason="exit code 1")
    assert str(stack.first_exit()).startswith("decode-fail: the engine ended before it was ready (exit code 1)")
    with pytest.raises(StackError, match="decode-fail: the engine ended"):
        stack.wait_ready(stack.services, 5, SILENT)


def test_what_started_containers_otherwise_than_by_default() -> None:
    environ = {"KVPROOF_IN_COMPOSE": "1", "COMPOSE_PROFILES": "extra"}
    engines = read_engines(ROOT / "compose.yaml", {"KV_VERIFY_CHECKSUM": "false"})
    infos = {
        engine.service: EngineInfo(Versions("", "", "", "", ""), dict(engine.environment), ()) for engine in engines
    }
    for more, profile in (({}, ()), (environ, (("COMPOSE_PROFILES", "extra"),))):
        stack = ComposeStack(ROOT / "compose.yaml", more, ("prefill",))
        assert stack.changed_variables(infos) == (*profile, ("KV_VERIFY_CHECKSUM", "false"))
        assert stack.in_compose is bool(more)


def test_no_docker_engine(tmp_path: Path) -> None:
    compose_file = write_compose(tmp_path, {"prefill": "fine"})
    program = (
        "import sys, pathlib; from harness.stack import ComposeStack; from harness.errors import StackError\n"
        "try: ComposeStack(pathlib.Path(sys.argv[1]), {}, ('prefill',)).start()\n"
        "except StackError as error: print(error)\n"
    )
    environ = process_environ(DOCKER_HOST=f"unix://{tmp_path}/no.sock")
    command = [sys.executable, "-c", program, str(compose_file)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.stdout.strip() == "the Docker engine cannot be reached: No such file or directory", done.stderr


def lived(tmp_path: Path, *names: EventName) -> EngineLife:
    journal = Journal(tmp_path, "decode")
    for name in names:
        journal.write(name, reason="exit code 1" if name is EventName.ENGINE_EXITED else "", pid=7)
    return LifeReader(journal.path).read()


STARTED, READY, EXITED = EventName.ENGINE_STARTED, EventName.ENGINE_READY, EventName.ENGINE_EXITED


@pytest.mark.parametrize(
    ("names", "exit_count", "is_running", "gave_up"),
    [
        ((), 0, False, False),
        ((STARTED,), 0, True, False),
        ((STARTED, READY, EventName.LOADED), 0, True, False),
        ((STARTED, EXITED), 1, False, True),
        ((STARTED, READY, EXITED), 1, False, False),
        ((STARTED, READY, EXITED, STARTED), 1, True, False),
        ((STARTED, READY, EXITED, STARTED, EXITED), 2, False, False),
    ],
)
def test_the_life_of_an_engine(
    tmp_path: Path, names: tuple[EventName, ...], exit_count: int, is_running: bool, gave_up: bool
) -> None:
    life = lived(tmp_path, *names)
    assert (life.exit_count, life.is_running, life.gave_up_since(1)) == (exit_count, is_running, gave_up)


def test_an_exit_of_an_earlier_run_is_not_of_this_one(tmp_path: Path) -> None:
    assert not lived(tmp_path, STARTED, EXITED).gave_up_since(time.time() + 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("${SET}", "value"),
        ("$SET/x", "value/x"),
        ("a${SET}b${UNSET}c", "avaluebc"),
        ("${UNSET:-default}", "default"),
        ("${UNSET:-}", ""),
        ("${EMPTY:-default}", "default"),
        ("${EMPTY-default}", ""),
        ("${UNSET-a:b-c}", "a:b-c"),
        ("${UNSET:-{}}", "{}"),
        ('${UNSET:-{"a": {"b": 1}}}!', '{"a": {"b": 1}}!'),
        ("${UNSET:-${SET}-2}", "value-2"),
        ("$$HOME $${SET}", "$HOME ${SET}"),
        ("127.0.0.1:${UNSET:-8100}:8000", "127.0.0.1:8100:8000"),
    ],
)
def test_interpolate(text: str, expected: str) -> None:
    assert interpolate(text, {"SET": "value", "EMPTY": ""}) == expected


@pytest.mark.parametrize("text", ["${SET", "${}", "${SET:+x}", "${SET:?needed}", "5 $ each", "$"])
def test_interpolate_refuses(text: str) -> None:
    with pytest.raises(InterpolationError):
        interpolate(text, {})


def test_read_engines_with_merges_lists_and_long_ports(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(
        """
x-env: &env {KVPROOF_PORT: 8000, DTYPE: "${DTYPE:-float32}", FLAG: true, NOTHING: "${NOTHING:-}"}
services:
  a:
    ports: ["127.0.0.1:${A_PORT:-8100}:8000/tcp"]
    environment: {<<: *env, KVPROOF_ROLE: prefill, FROM_CALLER: null, NOT_THERE: null}
  b:
    ports: [{target: 9000, published: 8101}]
    environment: ["KVPROOF_ROLE=decode", "A=b=c", "FROM_CALLER"]
  c: {environment: {KVPROOF_ROLE: decode}}
  harness: {environment: {X: "${X:?not understood here, and not needed}"}}
"""
    )
    a, b, c = read_engines(path, {"DTYPE": "bfloat16", "FROM_CALLER": "yes"})
    assert a.environment == {
        "KVPROOF_PORT": "8000",
        "DTYPE": "bfloat16",
        "FLAG": "true",
        "NOTHING": "",
        "KVPROOF_ROLE": "prefill",
        "FROM_CALLER": "yes",
    }
    assert (a.host_port, a.container_port) == (8100, 8000)
    assert (b.environment["A"], b.environment["FROM_CALLER"], b.host_port, b.container_port) == (
        "b=c",
        "yes",
        8101,
        9000,
    )
    assert (c.host_port, c.container_port) == (0, 8000)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("services: {a: {environment: {KVPROOF_ROLE: '${A:?b}'}}}", "is not understood"),
        ("services: {a: {image: x}}", "no service has KVPROOF_ROLE"),
        ("services: [", "while parsing"),
        ("services: {a: {ports: ['x:8000'], environment: {KVPROOF_ROLE: decode}}}", "'x' is not a port number"),
        (
            "services: {a: {ports: ['65536:8000'], environment: {KVPROOF_ROLE: decode}}}",
            "'65536' is not a port number",
        ),
        (
            "services: {a: {ports: ['127.0.0.1:1:2:8000'], environment: {KVPROOF_ROLE: decode}}}",
            "'127.0.0.1:1:2' is neither PORT nor ADDRESS:PORT",
        ),
        ("nothing: 1", "services"),
    ],
)
def test_read_engines_refuses(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=problem) as caught:
        read_engines(path, {})
    assert str(path) in str(caught.value)


def test_read_engines_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_engines(tmp_path / "compose.yaml", {})


def test_our_own_compose_file() -> None:
    engines = read_engines(ROOT / "compose.yaml", {})
    always = ["prefill", "decode-baseline", "decode-recompute", "decode-fail"]
    assert [engine.service for engine in engines if not engine.profiles] == always
    assert [(e.service, e.profiles) for e in engines[4:]] == [
        ("decode-chunked", ("extra",)),
        ("decode-tight", ("extra",)),
    ]
    assert len({engine.host_port for engine in engines} - {0}) == len(engines)
    assert all(engine.environment["KVPROOF_SERVICE"] == engine.service for engine in engines)


def test_what_made_engines_differ_from_the_defaults() -> None:
    environ = {"KV_VERIFY_CHECKSUM": "false", "ENGINE_ARGS": "--max-num-seqs 4", "DTYPE": "float32", "OTHER": "x"}
    environ |= {"PREFILL_MAX_NUM_BATCHED_TOKENS": "64", "PREFILL_PORT": "9000"}
    settings = {engine.service: engine.environment for engine in read_engines(ROOT / "compose.yaml", environ)}
    assert dict(changed_variables(ROOT / "compose.yaml", settings)) == {
        "KV_VERIFY_CHECKSUM": "false",
        "PREFILL_MAX_NUM_BATCHED_TOKENS": "64",
        "ENGINE_ARGS": "--max-num-seqs 4",
    }
    assert changed_variables(ROOT / "compose.yaml", {}) == ()
