"""The chart of one cost table: where its points and lines stand, in units of the drawing. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from harness.report.cost import CostTable, Line, Series
from harness.report.timeline import Tick, step

WIDTH = 640
HEIGHT = 300
LEFT = 58
RIGHT = 14
TOP = 14
BOTTOM = 46
OFFSETS = {
    Series.ORACLE: 0,
    Series.SOUND_SYNC: 9,
    Series.SOUND_ASYNC: 18,
    Series.RECOVERED_SYNC: 9,
    Series.RECOVERED_ASYNC: 18,
}
"""Series stand beside each other, so that none hides another."""

STYLES = {
    Series.ORACLE: "oracle",
    Series.SOUND_SYNC: "sync",
    Series.SOUND_ASYNC: "async",
    Series.RECOVERED_SYNC: "sync",
    Series.RECOVERED_ASYNC: "async",
}


@dataclass(frozen=True)
class Dot:
    style: str
    x: float
    y: float
    title: str


@dataclass(frozen=True)
class Chart:
    """`line`: the path through the medians of the oracles. `reuse_y`, `recompute_y`: 0 where not measured."""

    dots: tuple[Dot, ...]
    line: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    bottom: int = HEIGHT - BOTTOM


def chart(table: CostTable) -> Chart:
    """Every measured request is a dot: its first bad block across, its time upwards from zero."""
    last_s = max(line.times_s[-1] for line in table.lines) * 1.05
    block_count = max(table.workload.block_count, 1)

    def x(good_blocks: int) -> float:
        return round(LEFT + 16 + good_blocks / block_count * (WIDTH - LEFT - RIGHT - 50), 1)

    def y(time_s: float) -> float:
        return round(HEIGHT - BOTTOM - time_s / last_s * (HEIGHT - BOTTOM - TOP), 1)

    dots = tuple(
        Dot(
            STYLES[line.series], x(line.good_blocks) + OFFSETS[line.series], y(time_s), f"{line.series}: {time_s:.3f} s"
        )
        for line in table.lines
        for time_s in line.times_s
    )
    oracles = [(x(line.good_blocks), y(line.median_s)) for line in table.lines if line.series is Series.ORACLE]
    line = "M" + "L".join(f"{left} {top}" for left, top in oracles) if len(oracles) > 1 else ""
    step_s = step(last_s, 6)
    y_ticks = tuple(Tick(y(index * step_s), f"{index * step_s:g} s") for index in range(int(last_s / step_s) + 1))
    return Chart(dots, line, tuple(Tick(x(good), _place(good, block_count)) for good in _places(table.lines)), y_ticks)


def _places(lines: tuple[Line, ...]) -> list[int]:
    return sorted({line.good_blocks for line in lines})


def _place(good_blocks: int, block_count: int) -> str:
    return "none" if good_blocks == block_count else str(good_blocks)
