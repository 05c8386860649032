"""Parts of different runs, and engines that are not those of their folders, are refused before anything is said."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.errors import StackError, UsageError
from harness.records import EngineInfo, RunInfo, Versions
from harness.run_folder import RunFolder
from harness.running.consistency import check_engines
from harness.running.phases import judge_again
from harness.stack import AttachStack
from tests.fake_server import METRICS, FakeServer, refuse, reply, running

RECORDED = Path(__file__).parent / "recorded"
GREEN, RED = RECORDED / "20261130-202128", RECORDED / "20261130-202446"
CELL = "recompute-flipped-last-sync-middle"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A copy of a red run."""
    return RunFolder.open(Path(shutil.copytree(RED, tmp_path / "run")))


def change(path: Path, edit: Callable[[dict[str, object]], None]) -> None:
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


def test_a_stored_run_is_judged(folder: RunFolder) -> None:
    assert judge_again(folder).exit_code == 1


def test_a_cell_of_an_earlier_run_is_no_cell_of_this_one(folder: RunFolder) -> None:
    shutil.rmtree(folder.cell_path(CELL))
    shutil.copytree(GREEN / "cells" / CELL, folder.cell_path(CELL))
    with pytest.raises(UsageError, match=f"{CELL} was observed before the run began"):
        judge_again(folder)


def test_an_observation_of_another_cell_is_told_by_its_requests(folder: RunFolder) -> None:
    other = folder.cell_path("recompute-none-sync")
    shutil.copyfile(other / "observation.json", folder.cell_path(CELL) / "observation.json")
    change(folder.cell_path(CELL) / "observation.json", lambda raw: raw.update(cell_id=CELL))
    with pytest.raises(UsageError, match=f"{CELL} has the request recompute-none-sync.0.victim"):
        judge_again(folder)


def test_events_of_another_engine_are_told(folder: RunFolder) -> None:
    journal = folder.cell_path(CELL) / "journal.jsonl"
    journal.write_text(journal.read_text().replace("decode-recompute", "decode-fail"))
    with pytest.raises(UsageError, match=f"{CELL} has events of decode-fail"):
        judge_again(folder)


def test_an_observation_of_no_cell_of_the_plan_is_told(folder: RunFolder) -> None:
    change(folder.cell_path(CELL) / "again" / "observation.json", lambda raw: raw.update(cell_id="elsewhere"))
    with pytest.raises(UsageError, match="elsewhere was observed, and is not in the plan"):
        judge_again(folder)


def test_a_prompt_that_is_missing_and_a_block_size_that_is_none_are_told(folder: RunFolder) -> None:
    (folder.path / "prompts.json").write_text("[]")
    change(folder.path / "run.json", lambda raw: raw.update(block_size=0))
    with pytest.raises(UsageError, match=f"the block size is 0\n(.*\n)*.*prompt \\w+ of {CELL} is missing"):
        judge_again(folder)


def in_request(name: str, value: object) -> Callable[[dict[str, object]], None]:
    def edit(raw: dict[str, object]) -> None:
        requests = raw["requests"]
        assert isinstance(requests, list)
        *parents, field = name.split(".")
        place = requests[0]
        for parent in parents:
            place = place[parent]
        assert field in place
        place[field] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (in_request("sent_s", math.inf), "less than or equal to 100000000000 @ requests.0.sent_s"),
        (in_request("sent_s", -1.0), "greater than or equal to 0 @ requests.0.sent_s"),
        (in_request("completion.ttft_s", math.nan), "@ requests.0.completion.ttft_s"),
        (in_request("planned.fault.blocks", "some"), "@ requests.0.planned.fault.blocks"),
        (in_request("planned.prompt_id", "nobody's"), f"prompt nobody's of {CELL} is missing"),
        (lambda raw: raw.update(started_at_s=math.inf), "@ started_at_s"),
    ],
)
def test_what_no_run_writes_is_told(folder: RunFolder, edit: Callable[[dict[str, object]], None], told: str) -> None:
    change(folder.cell_path(CELL) / "observation.json", edit)
    with pytest.raises(UsageError, match=re.escape(told)):
        judge_again(folder)


def test_a_time_of_an_event_that_no_clock_gives_is_told(folder: RunFolder) -> None:
    journal = folder.cell_path(CELL) / "journal.jsonl"
    journal.write_text(re.sub('"time_s":[0-9.]+', '"time_s":1e300', journal.read_text()))
    with pytest.raises(UsageError, match="@ time_s"):
        judge_again(folder)


def test_a_line_that_no_journal_has_is_named(folder: RunFolder) -> None:
    journal = folder.cell_path(CELL) / "journal.jsonl"
    first, second, *others = journal.read_text().splitlines()
    journal.write_text("\n".join([first, second[:-9], *others, ""]))
    with pytest.raises(UsageError, match=re.escape("journal.jsonl, line 2 is not what kvproof wrote")):
        judge_again(folder)


def test_a_cell_without_requests_is_told(folder: RunFolder) -> None:
    change(folder.path / "plan.json", lambda raw: raw["cells"][0].update(requests=[]))  # type: ignore[index]
    with pytest.raises(UsageError, match=re.escape("@ cells.0.requests")):
        judge_again(folder)


def test_json_that_is_nested_without_end_is_told(folder: RunFolder) -> None:
    (folder.path / "run.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"run\.json is not JSON"):
        RunFolder.open(folder.path)


def test_who_did_not_finish_is_never_well(tmp_path: Path) -> None:
    folder = RunFolder.open(Path(shutil.copytree(GREEN, tmp_path / "run")))
    assert judge_again(folder).exit_code == 0
    change(folder.path / "run.json", lambda raw: raw.update(failure={"text": "boom", "exit_code": 0}))
    assert judge_again(folder).exit_code == 3


@pytest.fixture
def servers() -> Iterator[tuple[FakeServer, FakeServer]]:
    with running() as prefill, running() as decode:
        yield prefill, decode


def attached(servers: tuple[FakeServer, FakeServer], evidence_dir: Path) -> AttachStack:
    prefill, decode = servers
    return AttachStack({"prefill": prefill.url, "decode-recompute": decode.url}, None, evidence_dir)


def described(vllm: str) -> RunInfo:
    info = EngineInfo(Versions(vllm=vllm), {}, ())
    return RunInfo("id", "example", "attach", "run", 1.0, engines={"decode-recompute": info})


@pytest.mark.parametrize("vllm", ["0.32.0", "0.32.0+cpu", ""])
def test_engines_that_are_what_is_written_of_them(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path, vllm: str
) -> None:
    check_engines(described(vllm), attached(servers, tmp_path))


def test_the_folder_of_another_version_is_told(servers: tuple[FakeServer, FakeServer], tmp_path: Path) -> None:
    servers[1].behaviours["/version"] = reply({"version": "9.9.9"})
    with pytest.raises(StackError, match=r"decode-recompute is vLLM 9.9.9, and its folder in .* describes vLLM 0.32.0"):
        check_engines(described("0.32.0"), attached(servers, tmp_path))


def test_block_sizes_that_differ_are_told(servers: tuple[FakeServer, FakeServer], tmp_path: Path) -> None:
    other = METRICS.replace('block_size="32"', 'block_size="64"')
    servers[1].behaviours["/metrics"] = refuse(200, other.encode())
    with pytest.raises(StackError, match="decode-recompute has KV blocks of 64 tokens, prefill of 32"):
        check_engines(described(""), attached(servers, tmp_path))
