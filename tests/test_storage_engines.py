"""Faults in storage on real vLLM engines on the CPU: all are noticed, and a connector that checks nothing is red."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from matrix_run import MatrixRun, matrix_run
from small_disks import small_disk_at

from harness.report.compare import Kind, compare, stored
from harness.run_folder import RunFolder

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    with small_disk_at(tmp_path_factory.mktemp("small"), "64m") as folder:
        yield folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, small_dir: Path | None) -> MatrixRun:
    """The whole storage matrix, run once."""
    disk = {"KVPROOF_SMALL_DIR": str(small_dir)} if small_dir else {}
    with matrix_run(tmp_path_factory.mktemp("storage") / "runs", "--matrix", "storage", **disk) as run:
        run.finish()
    return run


@pytest.fixture(scope="module")
def unchecked(tmp_path_factory: pytest.TempPathFactory) -> MatrixRun:
    """The cells with flipped bits, with a connector that does not look at its checksums."""
    only = ("--matrix", "storage", "--only", "recompute-flipped-*")
    with matrix_run(tmp_path_factory.mktemp("unchecked") / "runs", *only, KV_VERIFY_CHECKSUM="false") as run:
        run.finish()
    return run


def may_be_skipped(cell_id: str, small_dir: Path | None) -> bool:
    """Where root's rights, or the lack of them, leave no way to do it."""
    by_modes = any(kind in cell_id for kind in ("-unreadable-", "-read-only-"))
    return by_modes or ("-full-disk-" in cell_id and small_dir is None)


def test_storage_matrix_is_green_with_evidence(whole: MatrixRun, small_dir: Path | None) -> None:
    assert whole.process.returncode == 0, whole.output
    cells = whole.cells()
    for name, cell in cells.items():
        evidence = cell["evidence"]
        assert isinstance(evidence, dict)
        if may_be_skipped(name, small_dir) and cell["status"] == "skipped":
            continue
        assert cell["status"] == "pass", name
        assert (evidence["fault_fired"] > 0) == (cell["fault"] != "none"), name
        assert (evidence["reported_blocks"] > 0) == (cell["outcome"] in ("recovered", "failed-cleanly")), name
    # One cell at a time, with three requests or more each.
    assert whole.is_quick(cell_s_max=3.0, oracles_max=5.0)


def test_without_the_checksum_flipped_bits_in_the_payload_are_red(unchecked: MatrixRun) -> None:
    """Only those: the header has a checksum of its own, which cannot be switched off."""
    assert unchecked.process.returncode == 1, unchecked.output
    found = {name: (str(cell["status"]), str(cell["outcome"])) for name, cell in unchecked.cells().items()}
    payload = payload_cells(unchecked)
    assert len(payload) == 6
    assert {found[name][0] for name in payload} == {"fail"}
    assert {found[name][1] for name in payload} <= {"wrong-output", "unreported"}
    assert "wrong-output" in {found[name][1] for name in payload}
    assert {status for name, (status, _) in found.items() if name not in payload} == {"pass"}
    assert f"run --replay {unchecked.folder} --cell recompute-flipped-" in unchecked.output


def test_compare_names_exactly_the_cells_that_differ(whole: MatrixRun, unchecked: MatrixRun) -> None:
    comparison = compare(*(stored(RunFolder.open(run.folder)) for run in (whole, unchecked)))
    in_both = {change.cell_id: change.kind for change in comparison.changes if change.kind is not Kind.VANISHED}
    assert in_both == dict.fromkeys(payload_cells(unchecked), Kind.WORSE)
    settings = [(setting.name, setting.before, setting.after) for setting in comparison.settings]
    assert settings == [("KV_VERIFY_CHECKSUM", "true", "false")]


def payload_cells(run: MatrixRun) -> set[str]:
    return {name for name in run.cells() if "flipped-" in name and name.endswith("-middle")}
