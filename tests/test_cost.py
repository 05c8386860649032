"""What recovery costs, from made runs: only what was measured, each kind of request at its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.faults.process_kinds import ProcessFault, ProcessKind
from harness.faults.storage_kinds import StorageFault, StorageKind
from harness.records import BASELINE, Cell, Completion, Moment, Observation, Report, Role
from harness.report.as_html import to_html
from harness.report.cost import CostTable, Measure, Series, Workload, costs
from harness.report.cost_chart import chart
from services.faults import Fault, FaultKind, LoadMode
from services.journal import EventName
from tests import builders
from tests.report_builders import cells, run_report

WORKLOAD = Workload(BASELINE, 29, 7, 8)


def only(kind: FaultKind = FaultKind.REPORT, blocks: str = "middle", **more: object) -> Report:
    """The controls, and one cell."""
    controls = tuple(cell for cell in cells() if cell.control)
    return run_report((*controls, builders.cell(kind, blocks, name="one", **more)))  # type: ignore[arg-type]


def places(table: CostTable, series: Series) -> list[int]:
    return [line.good_blocks for line in table.lines if line.series is series]


def with_durations(report: Report, change: Callable[[float], float]) -> Report:
    def changed(completion: Completion) -> Completion:
        return replace(completion, duration_s=change(completion.duration_s))

    oracles = tuple(replace(run, completion=changed(run.completion)) for run in report.oracles)
    return replace(report, oracles=oracles)


def change_cell(report: Report, change: Callable[[Cell], Cell]) -> Report:
    return replace(report, cells=tuple(change(cell) if cell.id == "one" else cell for cell in report.cells))


def change_observation(report: Report, change: Callable[[Observation], Observation]) -> Report:
    return replace(report, observations=tuple(change(o) if o.cell_id == "one" else o for o in report.observations))


def test_each_request_is_where_its_first_bad_block_is() -> None:
    (table,) = costs(run_report(cells()))
    assert (table.workload, table.measure) == (WORKLOAD, Measure.WHOLE)
    assert places(table, Series.ORACLE) == [0, 3, 6, 7]
    assert places(table, Series.RECOVERED_SYNC) == places(table, Series.RECOVERED_ASYNC) == [0, 3, 6]
    assert places(table, Series.SOUND_SYNC) == places(table, Series.SOUND_ASYNC) == [7]


def test_times_are_those_that_were_measured() -> None:
    (table,) = costs(with_durations(only(), lambda duration_s: duration_s * 3))
    assert {line.series: line.times_s for line in table.lines if line.good_blocks == 3} == {
        Series.ORACLE: (1.5, 1.5),
        Series.RECOVERED_SYNC: (0.5,),
    }
    assert (table.reuse_s, table.recompute_s) == (1.5, 1.5)


def test_time_to_first_token_is_of_streamed_requests() -> None:
    report = only(stream=True)
    tables = {table.measure: table for table in costs(report)}
    assert set(tables) == {Measure.TTFT, Measure.WHOLE}
    assert [(line.series, line.times_s) for line in tables[Measure.TTFT].lines] == [(Series.RECOVERED_SYNC, (0.25,))]
    assert tables[Measure.TTFT].reuse_s == 0


def test_the_spread_is_the_largest_between_equal_measurements() -> None:
    report = only()
    first, *others = report.oracles
    slower = replace(first, completion=replace(first.completion, duration_s=0.75))
    (table,) = costs(replace(report, oracles=(slower, *others)))
    assert table.spread == pytest.approx(0.5)
    (steady,) = costs(report)
    assert steady.spread == 0


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (FaultKind.REPORT, {"mix": True}),
        (FaultKind.REPORT, {"times": 2}),
        (FaultKind.REPORT_LATE, {}),
        (FaultKind.SILENT, {}),
    ],
)
def test_what_does_more_than_fail_once_alone_is_not_a_cost_of_recovery(
    kind: FaultKind, more: dict[str, object]
) -> None:
    assert costs(only(kind, **more)) == ()


@pytest.mark.parametrize("trait", [{"chat": True}, {"gives_up": Moment.REPAIR}])
def test_chats_and_requests_that_are_given_up_are_not_compared(trait: dict[str, object]) -> None:
    odd = change_cell(only(), lambda cell: replace(cell, requests=(replace(cell.requests[0], **trait),)))  # type: ignore[arg-type]
    assert costs(odd) == ()


def test_a_killed_process_is_no_cost_of_recovery() -> None:
    fault = ProcessFault(ProcessKind.DECODE_KILLED_LOADING)
    assert costs(change_cell(only(), lambda cell: replace(cell, process=fault))) == ()


def test_cells_are_compared_with_the_oracles_of_their_own_engine() -> None:
    (table,) = costs(change_cell(only(), lambda cell: replace(cell, oracle_engine="decode-small-baseline")))
    assert table.workload.oracle_engine == "decode-small-baseline"
    assert places(table, Series.ORACLE) == []
    assert table.reuse_s == 0


def test_a_wrong_answer_has_no_cost() -> None:
    report = only()
    verdicts = tuple(replace(v, outcome="wrong-output") if v.cell_id == "one" else v for v in report.verdicts)
    assert costs(replace(report, verdicts=verdicts)) == ()


def test_a_recovery_without_a_named_block_has_no_place() -> None:
    report = change_observation(only(), lambda seen: builders.without(seen, EventName.REPORTED))
    assert costs(report) == ()


def test_an_answer_with_an_error_was_not_measured() -> None:
    report = change_observation(only(), lambda seen: builders.change_answer(seen, Role.VICTIM, error="no"))
    assert costs(report) == ()


def test_damaged_files_count_and_misses_do_not() -> None:
    damaged = change_cell(
        only(FaultKind.REPORT),
        lambda cell: replace(
            cell, storage=StorageFault(StorageKind.ZEROED), requests=(replace(cell.requests[0], fault=Fault()),)
        ),
    )
    (table,) = costs(damaged)
    assert places(table, Series.RECOVERED_SYNC) == [3]
    missed = change_cell(
        only(FaultKind.NONE), lambda cell: replace(cell, storage=StorageFault(StorageKind.INDEX_MISSING))
    )
    assert costs(missed) == ()


def test_where_nothing_recovered_the_report_has_no_page_on_cost() -> None:
    controls = tuple(cell for cell in cells() if cell.control)
    assert '<section id="cost"' not in to_html(run_report(controls))
    page = to_html(only())
    assert '<section id="cost"' in page
    assert "Whole request, prompt of 29 tokens (7 blocks), 8 tokens generated" in page


def test_the_chart_has_a_dot_for_every_request_and_rises_with_time() -> None:
    report = only(load=LoadMode.ASYNC)
    (table,) = costs(report)
    drawn = chart(table)
    assert len(drawn.dots) == sum(len(line.times_s) for line in table.lines)
    assert {dot.style for dot in drawn.dots} == {"oracle", "sync", "async"}
    assert [tick.text for tick in drawn.x_ticks] == ["0", "3", "none"]
    heights = [tick.at for tick in drawn.y_ticks]
    assert heights == sorted(heights, reverse=True)
    assert drawn.y_ticks[0].at == drawn.bottom
    slow = max(drawn.dots, key=lambda dot: float(dot.title.split()[-2]))
    assert slow.y == min(dot.y for dot in drawn.dots)
