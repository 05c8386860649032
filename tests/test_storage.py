"""The run folder: what is saved is what is loaded, and a user's mistake gets an answer, not a traceback."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from harness import records
from harness.errors import HarnessError, UsageError
from harness.run_folder import RunFolder, dumps, loads, new_run_id, write_text
from services.faults import SELECTOR_NAMES, Fault
from services.journal import Event, read_events

text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
numbers = st.floats(allow_nan=False)
log_line = text.map(lambda line: line.replace("\n", ""))

for plain, strategy in ((str, text), (float, numbers), (int, st.integers(-(2**63), 2**63 - 1))):
    st.register_type_strategy(plain, strategy)
st.register_type_strategy(
    Fault,
    st.builds(
        Fault, blocks=st.one_of(st.sampled_from(SELECTOR_NAMES), st.lists(st.integers(0, 99), max_size=3).map(tuple))
    ),
)
RECORD_TYPES = tuple(
    kind
    for kind in vars(records).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__.startswith(("harness", "services"))
)
few = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
observations = st.builds(records.Observation, cell_id=st.just("a.b"), log_lines=st.lists(log_line).map(tuple))


@pytest.mark.parametrize("kind", RECORD_TYPES, ids=lambda kind: kind.__name__)
@few
@given(data=st.data())
def test_every_record_survives_json(kind: type, data: st.DataObject) -> None:
    adapter = TypeAdapter(kind)
    value = data.draw(st.from_type(kind))
    assert loads(adapter, dumps(adapter, value)) == value


@few
@given(cell=st.builds(records.Cell, id=st.just("a.b")), observation=observations)
def test_an_observation_is_split_into_files_and_put_together_again(
    cell: records.Cell, observation: records.Observation
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        folder.save_observation(cell, observation)
        assert folder.load_observation("a.b") == observation
        assert folder.load_cell("a.b") == cell


@few
@given(events=st.lists(st.builds(Event, time_s=st.floats(1.0, 1e10), service=st.just("prefill"))).map(tuple))
def test_a_saved_journal_reads_like_a_services_own(events: tuple[Event, ...]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        folder.save_observation(cell_named("c"), observation_of("c", events))
        assert read_events(folder.cell_path("c") / "journal.jsonl")[0] == events


def cell_named(cell_id: str) -> records.Cell:
    requests = (records.PlannedRequest(records.Role.VICTIM, "p", records.LoadMode.SYNC),)
    return records.Cell(cell_id, "decode", "recompute", records.LoadMode.SYNC, requests, records.Outcome.LOADED, "")


def observation_of(cell_id: str, events: tuple[Event, ...] = ()) -> records.Observation:
    state = records.EngineState(True, 0, 0, 0.0, 0)
    return records.Observation(cell_id, (), state, state, True, events, ("one", ""), 1.0, 2.0)


def verdict_of(cell_id: str) -> records.Verdict:
    return records.Verdict(cell_id, records.Outcome.LOADED, records.Status.PASS, (), records.Evidence())


def info_of(run_id: str) -> records.RunInfo:
    versions = records.Versions("0.32", "2.13", "3.11", "m", "c")
    return records.RunInfo(run_id, "m.yaml", "compose", "run", 1.0, versions=versions, block_size=32)


def test_a_run_is_written_and_read_again(tmp_path: Path) -> None:
    cells = (cell_named("z"), cell_named("a"), cell_named("never-run"))
    folder = RunFolder.create(tmp_path / "runs", "r1")
    folder.save_info(info_of("r1"))
    folder.save_plan(records.Plan("quick", (records.PromptSpec("p", "text"),), cells))
    folder.save_prompts((records.Prompt("p", (1, 2), "text", 0),))
    key = records.OracleKey("p", records.OracleKind.PARTIAL, 2)
    folder.save_oracles((records.OracleRun(key, records.Completion(200, token_ids=(5,))),))
    folder.save_timing(records.Timing((("cells", 2.0),), 3.0))
    for cell in cells[:2]:
        folder.save_observation(cell, observation_of(cell.id))
    folder.save_verdict(verdict_of("a"))

    again = RunFolder.open(tmp_path / "runs" / "r1")
    assert again.load_info() == info_of("r1")
    assert again.load_plan().cells == cells
    assert again.load_prompts()[0].token_ids == (1, 2)
    assert again.load_oracles()[0].key == key
    assert again.load_timing().phases == (("cells", 2.0),)
    assert again.load_observations() == (observation_of("z"), observation_of("a"))
    assert again.load_verdicts() == (verdict_of("a"),)
    assert (again.cell_path("z") / "engine.log").read_text() == "one\n\n"


def test_nothing_half_written_stays(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.mkdir()
    with pytest.raises(HarnessError, match=r"cannot write .*x: .*directory"):
        write_text(target, "text")
    assert list(tmp_path.iterdir()) == [target]


def test_files_can_be_read_by_others_and_replace_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_text(path, "a long old text")
    write_text(path, "new \ud800")
    assert path.read_bytes() == b"new ?"
    assert path.stat().st_mode & 0o777 == 0o644


def test_run_ids_sort_by_time() -> None:
    assert new_run_id(datetime(2026, 11, 30, 15, 45, 1, tzinfo=UTC)) == "20261130-154501"


def test_a_run_id_is_used_once(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "r1")
    with pytest.raises(UsageError, match="r1 is there already"):
        RunFolder.create(tmp_path, "r1")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=rf"cannot make the run folder {tmp_path}/file/r1: .*user {os.getuid()}"):
        RunFolder.create(tmp_path / "file", "r1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a run folder: it has no run.json"),
        ("{", "run.json is not JSON"),
        ("[]", "schema_version is missing"),
        ('{"schema_version": 99}', "schema_version is 99, this version reads 1"),
    ],
)
def test_open_refuses_what_is_no_run(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        RunFolder.open(tmp_path)


def test_a_damaged_file_is_named_with_each_problem(tmp_path: Path) -> None:
    (tmp_path / "timing.json").write_text(json.dumps({"phases": "soon"}))
    with pytest.raises(UsageError, match=r"(?s)timing.json is not what kvproof wrote.*@ phases.*@ duration_s"):
        RunFolder(tmp_path).load_timing()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"plan.json: No such file.*may be incomplete"):
        RunFolder(tmp_path).load_plan()


@pytest.mark.parametrize("cell_id", ["", ".", "..", "../x", "a/b", "a\\b", "a\nb", "\0", "x" * 201])
def test_a_cell_id_cannot_leave_the_run_folder(tmp_path: Path, cell_id: str) -> None:
    with pytest.raises(UsageError, match="cannot be a folder name"):
        RunFolder(tmp_path).cell_path(cell_id)
