"""The matrix picture: every judged cell once, in the field where its fault and its engine meet."""

from __future__ import annotations

from dataclasses import replace

from harness.faults.storage_kinds import StorageFault, StorageKind
from harness.records import Status
from harness.report.picture import SIGNS, picture
from harness.report.view import Row, rows
from services.faults import FaultKind, LoadMode
from tests import builders
from tests.report_builders import cells, run_report


def row(kind: FaultKind, blocks: str = "all", name: str = "c", storage: StorageKind | None = None) -> Row:
    cell = builders.cell(kind, blocks, name=name)
    if storage:
        cell = replace(cell, storage=StorageFault(storage, blocks))
    (verdict,) = run_report((cell,)).verdicts
    return Row(cell, verdict)


def test_faults_go_down_and_engines_with_their_load_modes_across() -> None:
    drawn = picture(rows(run_report(cells())))
    assert [(engine.policy, engine.name, engine.loads) for engine in drawn.engines] == [
        ("recompute", "decode-recompute", (LoadMode.SYNC, LoadMode.ASYNC)),
        ("fail", "decode-fail", (LoadMode.SYNC, LoadMode.ASYNC)),
    ]
    assert [(line.kind, line.where, line.kind_line_count) for line in drawn.lines] == [
        ("none", "", 1),
        ("silent", "all", 1),
        ("report", "first", 3),
        ("report", "middle", 0),
        ("report", "last", 0),
    ]
    middle = drawn.lines[3].fields
    assert [[tile.row.cell.id for tile in field] for field in middle] == [
        [f"{policy}-report-{load}-middle", f"{policy}-report-{load}-middle-mix"]
        for policy in ("recompute", "fail")
        for load in ("sync", "async")
    ]


def test_every_cell_is_in_one_field() -> None:
    drawn = picture(rows(run_report(cells())))
    shown = [tile.row.cell.id for line in drawn.lines for field in line.fields for tile in field]
    assert sorted(shown) == sorted(cell.id for cell in cells())


def test_layers_and_kinds_that_come_again_join_their_first_lines() -> None:
    drawn = picture(
        (
            row(FaultKind.REPORT, "first", "a"),
            row(FaultKind.NONE, name="b", storage=StorageKind.ZEROED),
            row(FaultKind.SILENT, "all", "c"),
            row(FaultKind.REPORT, "last", "d"),
        )
    )
    assert drawn.layers == ("boundary", "storage")
    assert [(line.kind, line.where) for line in drawn.lines] == [
        ("report", "first"),
        ("report", "last"),
        ("silent", "all"),
        ("zeroed", "all"),
    ]


def test_cells_of_one_field_are_told_apart_by_the_ends_of_their_ids() -> None:
    names = ("chunked-report-sync-all", "chunked-report-sync-all-late", "chunked-report-sync-all-late-own-tail")
    ((field,),) = (line.fields for line in picture(tuple(row(FaultKind.REPORT, name=name) for name in names)).lines)
    assert [tile.label for tile in field] == ["", "late", "late-own-tail"]


def test_a_cell_alone_in_its_field_says_what_is_special_about_it() -> None:
    cell = builders.cell(FaultKind.REPORT, mix=True, stream=True)
    (verdict,) = run_report((cell,)).verdicts
    ((tile,),) = picture((Row(cell, verdict),)).lines[0].fields
    assert tile.label == "3 requests, stream"


def test_every_status_has_a_sign_of_its_own() -> None:
    assert set(SIGNS) == set(Status)
    assert len(set(SIGNS.values())) == len(Status)
