"""The picture of a run: what is broken downwards; policy, engine and load mode across; judged cells where they meet.

Called by the HTML report. Pure; rows and columns stand in the order in which the cells name them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from harness.records import Status
from harness.report.story import kind, layer, workload
from harness.report.view import Row, broken_words
from services.faults import LoadMode

SIGNS = {
    Status.PASS: "✓",
    Status.FAIL: "✗",
    Status.KNOWN: "◆",
    Status.FIXED: "◇",
    Status.INCONCLUSIVE: "?",
    Status.ERROR: "!",
    Status.SKIPPED: "-",
}
"""So that a status is read without colour."""


@dataclass(frozen=True)
class Engine:
    """A group of columns: the load modes of one engine."""

    policy: str
    name: str
    loads: tuple[LoadMode, ...]


@dataclass(frozen=True)
class Tile:
    """A cell in the picture. `label`: what tells it from the others in its field, or what is special about it."""

    row: Row
    label: str


@dataclass(frozen=True)
class Line:
    """A row: cells that break the same thing in the same place, by column. `kind_line_count`: how many rows, from
    this one on, share its kind; 0 where an earlier row began that."""

    layer: str
    kind: str
    where: str
    kind_line_count: int
    fields: tuple[tuple[Tile, ...], ...]


@dataclass(frozen=True)
class Picture:
    engines: tuple[Engine, ...]
    lines: tuple[Line, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line.layer for line in self.lines))


def picture(judged: tuple[Row, ...]) -> Picture:
    """Every judged cell is in exactly one field."""
    engines = _engines(judged)
    columns = [(engine.policy, engine.name, load) for engine in engines for load in engine.loads]
    keys = dict.fromkeys((layer(row.cell), kind(row.cell), broken_words(row.cell)) for row in judged)
    # Kinds and layers that a matrix names again later join their first rows.
    layers, kinds = [list(dict.fromkeys(key[part] for key in keys)) for part in (0, 1)]
    ordered = sorted(keys, key=lambda key: (layers.index(key[0]), kinds.index(key[1])))
    lines: list[Line] = []
    for key in ordered:
        same = [other for other in ordered if other[:2] == key[:2]]
        lines.append(_line(key, len(same) if key == same[0] else 0, judged, columns))
    return Picture(engines, tuple(lines))


def _engines(judged: tuple[Row, ...]) -> tuple[Engine, ...]:
    pairs = dict.fromkeys((row.cell.policy, row.cell.engine) for row in judged)
    loads = {pair: {row.cell.load for row in judged if (row.cell.policy, row.cell.engine) == pair} for pair in pairs}
    return tuple(Engine(*pair, tuple(load for load in LoadMode if load in loads[pair])) for pair in pairs)


def _line(
    key: tuple[str, str, str], kind_line_count: int, judged: tuple[Row, ...], columns: list[tuple[str, str, LoadMode]]
) -> Line:
    own = [row for row in judged if (layer(row.cell), kind(row.cell), broken_words(row.cell)) == key]
    fields = tuple(
        _tiles([row for row in own if (row.cell.policy, row.cell.engine, row.cell.load) == column])
        for column in columns
    )
    return Line(key[0], key[1], key[2].removeprefix(key[1]).strip(), kind_line_count, fields)


def _tiles(rows: list[Row]) -> tuple[Tile, ...]:
    """Cells of one field have ids that differ only at their ends; that end is what they are about."""
    if len(rows) == 1:
        return (Tile(rows[0], workload(rows[0].cell)),)
    words = [row.cell.id.split("-") for row in rows]
    same = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*words, strict=False)))
    return tuple(Tile(row, "-".join(own[same:])) for row, own in zip(rows, words, strict=True))
