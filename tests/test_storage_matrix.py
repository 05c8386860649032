"""Storage faults between matrix file and observation: cells, turns on the volume, and what is skipped."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.faults.storage_kinds import LONE, StorageFault, StorageKind
from harness.planning.plan import load_plan, select_cells
from harness.records import Outcome, Role, Status
from harness.run_folder import RunFolder
from harness.running import phases
from harness.running.runner import _Turns
from services.faults import NO_FAULT, BlockSelector, FaultKind, LoadMode
from tests.engines import ENGINES
from tests.simulated_engine import simulated_stack
from tests.ways_to_be_wrong import Wrong

STORAGE = load_plan(Path(__file__).parents[1] / "harness" / "matrix" / "storage.yaml", ENGINES)
HEAD = "schema: 1\nname: small\nprompts:\n  harbour: {text: Boats.}\ncells:\n"
DEADLINE_S = 20


def matrix(tmp_path: Path, entry: str) -> Path:
    path = tmp_path / "matrix.yaml"
    path.write_text(f"{HEAD}  - {{why: Because., workload: {{victim: harbour}}, {entry}}}\n")
    return path


def test_a_kind_tells_its_layer(tmp_path: Path) -> None:
    entry = (
        "engine: [decode-recompute, decode-fail], load: async, fault: {kind: [report, fifo], blocks: [first, [0, 2]]}"
    )
    plan = load_plan(matrix(tmp_path, entry), ENGINES)
    found = {cell.id: (cell.fault.kind, cell.storage, cell.expected) for cell in plan.cells}
    assert len(found) == 8
    assert found["recompute-report-async-first"] == (FaultKind.REPORT, None, Outcome.RECOVERED)
    fifo = StorageFault(StorageKind.FIFO, (0, 2))
    assert found["recompute-fifo-async-blocks-0-2"] == (FaultKind.NONE, fifo, Outcome.RECOVERED)
    assert found["fail-fifo-async-blocks-0-2"] == (FaultKind.NONE, fifo, Outcome.FAILED_CLEANLY)
    assert not any(cell.control for cell in plan.cells)
    stored = [cell for cell in plan.cells if cell.storage]
    assert {request.fault for cell in stored for request in cell.requests} == {NO_FAULT}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_miss_is_no_failure(policy: str, tmp_path: Path) -> None:
    (cell,) = load_plan(
        matrix(tmp_path, f"engine: decode-{policy}, load: sync, fault: {{kind: index-missing}}"), ENGINES
    ).cells
    assert (cell.id, cell.expected) == (f"{policy}-index-missing-sync", Outcome.LOADED)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "{kind: fifi}",
            r"unknown value 'fifi' @ cells.0.fault.kind \(line 6; did you mean fifo\? valid: none, report, ",
        ),
        ("{kind: 3}", r"unknown value 3 @ cells.0.fault.kind"),
        (
            "{kind: fifo, times: 2}",
            r"times means nothing for kind fifo @ cells.0.fault.times \(line 6; it belongs to report",
        ),
        ("{kind: fifo, delay_s: 2}", r"delay_s means nothing for kind fifo"),
        ("{kind: emptied, blocks: first}", r"blocks means nothing for kind emptied"),
        ("{kind: read-only, blocks: first}", r"blocks means nothing for kind read-only"),
    ],
)
def test_mistakes(fault: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        load_plan(matrix(tmp_path, f"engine: decode-fail, load: sync, fault: {fault}"), ENGINES)


@pytest.mark.parametrize("kind", sorted(LONE))
def test_kinds_that_are_exact_for_a_victim_alone(kind: StorageKind, tmp_path: Path) -> None:
    workload = "workload: {kind: group, victim: harbour, bystanders: harbour}"
    path = tmp_path / "matrix.yaml"
    entry = f"engine: decode-fail, load: sync, fault: {{kind: {kind}}}, {workload}"
    path.write_text(f"{HEAD}  - {{why: Because., {entry}}}\n")
    with pytest.raises(UsageError, match=f"{kind} is exact for a victim alone @ cells.0.workload.kind"):
        load_plan(path, ENGINES)


@pytest.mark.parametrize(
    ("kind", "blocks", "chosen"),
    [
        (StorageKind.FULL_DISK, "all", (0,)),
        (StorageKind.FULL_DISK, (2, 4), (2,)),
        (StorageKind.READ_ONLY, "all", (0,)),
        (StorageKind.EMPTIED, "first", (0, 1, 2, 3, 4)),
        (StorageKind.ENDLESS_READ, "last", (4,)),
    ],
)
def test_which_blocks_are_at_fault(kind: StorageKind, blocks: BlockSelector, chosen: tuple[int, ...]) -> None:
    assert StorageFault(kind, blocks).chosen(5) == chosen


# The shipped matrix.


def test_storage_has_every_kind_in_both_load_modes_and_policies() -> None:
    kinds = {cell.storage.kind for cell in STORAGE.cells if cell.storage}
    assert kinds == set(StorageKind)
    axes = Counter((cell.policy, cell.load) for cell in STORAGE.cells if cell.storage)
    assert set(axes) == {(policy, load) for policy in ("recompute", "fail") for load in (LoadMode.SYNC, LoadMode.ASYNC)}
    assert all(cell.why for cell in STORAGE.cells)
    assert sum(bool(cell.report) for cell in STORAGE.cells) > len(STORAGE.cells) * 0.9


def test_storage_has_both_controls_for_every_engine_and_load() -> None:
    pairs = {(cell.engine, cell.load) for cell in STORAGE.cells}
    controls = {(cell.engine, cell.load, cell.fault.kind) for cell in STORAGE.cells if cell.control}
    assert controls == {(*pair, kind) for pair in pairs for kind in (FaultKind.NONE, FaultKind.SILENT)}


# Running.


def test_a_stack_without_a_kv_folder_skips_them(tmp_path: Path) -> None:
    plan = select_cells(STORAGE, ("recompute-zeroed-*",))
    folder = RunFolder.create(tmp_path / "runs", "run")
    with simulated_stack(tmp_path / "evidence", Wrong.NOTHING) as stack:
        report = phases.run(plan, stack, folder, phases.Invocation("storage", "pytest"), phases.Watcher())
    skipped = {verdict.cell_id: verdict for verdict in report.verdicts if verdict.status is Status.SKIPPED}
    assert set(skipped) == {cell.id for cell in plan.cells if cell.storage}
    assert all("give the folder with --kv-dir" in verdict.findings[0].detail for verdict in skipped.values())
    assert report.exit_code == 2


def test_engines_without_kvproofs_connector_skip_them(tmp_path: Path) -> None:
    """Their journals do not say which file holds which block."""
    plan = select_cells(STORAGE, ("recompute-zeroed-sync-*",))
    folder = RunFolder.create(tmp_path / "runs", "run")
    (tmp_path / "kv").mkdir()
    with simulated_stack(tmp_path / "evidence", Wrong.NOTHING) as stack:
        stack.kv_dir = tmp_path / "kv"
        report = phases.run(plan, stack, folder, phases.Invocation("storage", "pytest"), phases.Watcher())
    (verdict,) = (verdict for verdict in report.verdicts if verdict.status is Status.SKIPPED)
    assert "need kvproof's own connector" in verdict.findings[0].detail


class TestTurns:
    def test_many_may_be_inside_at_once(self) -> None:
        turns = _Turns()
        with turns.take(alone=False), turns.take(alone=False):
            pass

    @pytest.mark.parametrize("first_alone", [True, False])
    def test_one_alone_waits_and_is_waited_for(self, first_alone: bool) -> None:
        turns = _Turns()
        done: list[str] = []
        with turns.take(alone=first_alone):
            other = running(turns, alone=not first_alone, then=lambda: done.append("other"))
            other.join(0.1)
            done.append("first")
        other.join(DEADLINE_S)
        assert done == ["first", "other"]

    def test_who_wants_to_be_alone_goes_before_who_comes_later(self) -> None:
        turns = _Turns()
        done: list[str] = []
        with turns.take(alone=False):
            alone = running(turns, alone=True, then=lambda: done.append("alone"))
            alone.join(0.1)
            later = running(turns, alone=False, then=lambda: done.append("later"))
            later.join(0.1)
            assert done == []
        for thread in (alone, later):
            thread.join(DEADLINE_S)
        assert done == ["alone", "later"]

    def test_a_turn_ends_however_its_body_does(self) -> None:
        turns = _Turns()
        with pytest.raises(ZeroDivisionError), turns.take(alone=True):
            raise ZeroDivisionError
        with turns.take(alone=True):
            pass


def running(turns: _Turns, *, alone: bool, then: Callable[[], None]) -> threading.Thread:
    def take() -> None:
        with turns.take(alone=alone):
            then()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread


def test_the_roles_after_a_fault_are_not_planned() -> None:
    assert {request.role for cell in STORAGE.cells for request in cell.requests} == set(Role) - {
        Role.CANARY,
        Role.RELOAD,
    }
