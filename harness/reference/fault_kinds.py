"""Every kind of fault, as a page shows it: what is done, where, what is expected then, and which cells have it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness.faults.process_kinds import ProcessKind
from harness.faults.storage_kinds import MISSES, REASONS, StorageKind
from harness.meanings import meanings
from harness.planning.expansion import expected_outcome, plain_fault
from harness.planning.matrix_checks import fault_keys
from harness.planning.matrix_words import AnyKind
from harness.records import Cell
from harness.reference.matrices import Matrix
from harness.report.story import address
from services.faults import ASYNC_KINDS, BREACH_KINDS, SYNC_KINDS, FaultKind

LAYERS: Mapping[str, type[FaultKind | StorageKind | ProcessKind]] = {
    "boundary": FaultKind,
    "storage": StorageKind,
    "process": ProcessKind,
}
POLICIES = ("recompute", "fail")


@dataclass(frozen=True)
class Use:
    """Cells that exist for one reason. `cells`: by the names of the matrices that have them."""

    why: str
    report: str
    link: str
    cells: Mapping[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class KindPage:
    """One kind. `loads`: the load modes that can have it. `keys`: of a matrix file's `fault`. `expected`: by policy.
    `read`: what kvproof's own store says of a read of such a block."""

    name: str
    meaning: str
    loads: tuple[str, ...]
    keys: tuple[str, ...]
    expected: Mapping[str, str]
    read: str
    breach: bool
    uses: tuple[Use, ...]

    @property
    def cell_count(self) -> int:
        return sum(len(ids) for use in self.uses for ids in use.cells.values())


def layers(matrices: tuple[Matrix, ...]) -> Mapping[str, tuple[KindPage, ...]]:
    """The kinds of each layer, in the order of the code."""
    return {layer: tuple(_page(kind, matrices) for kind in kinds) for layer, kinds in LAYERS.items()}


def _page(kind: AnyKind, matrices: tuple[Matrix, ...]) -> KindPage:
    return KindPage(
        name=kind.value,
        meaning=meanings(type(kind))[kind.value],
        loads=_loads(kind),
        keys=fault_keys(kind),
        expected={policy: expected_outcome(plain_fault(kind), policy).value for policy in POLICIES},
        read=_read(kind),
        breach=kind in BREACH_KINDS,
        uses=_uses(kind, matrices),
    )


def _loads(kind: AnyKind) -> tuple[str, ...]:
    return ("async",) if kind in ASYNC_KINDS else ("sync",) if kind in SYNC_KINDS else ("sync", "async")


def _read(kind: AnyKind) -> str:
    if not isinstance(kind, StorageKind):
        return ""
    return "not found" if kind in MISSES else REASONS[kind].value if kind in REASONS else "sound"


def kind_of(cell: Cell) -> AnyKind:
    """What the cell breaks."""
    return (cell.storage or cell.process or cell.fault).kind


def _uses(kind: AnyKind, matrices: tuple[Matrix, ...]) -> tuple[Use, ...]:
    """By reason and report, in the order in which the matrices name them."""
    cells = [cell for matrix in matrices for cell in matrix.cells if kind_of(cell) == kind]
    reasons = dict.fromkeys((cell.why, cell.report) for cell in cells)
    return tuple(
        Use(why, report, address(report), _found(_ids(cells, why, report), matrices)) for why, report in reasons
    )


def _ids(cells: Iterable[Cell], why: str, report: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cell.id for cell in cells if (cell.why, cell.report) == (why, report)))


def _found(ids: tuple[str, ...], matrices: tuple[Matrix, ...]) -> Mapping[tuple[str, ...], tuple[str, ...]]:
    cells_of = {matrix.name: {cell.id for cell in matrix.cells} for matrix in matrices}
    names = {cell_id: tuple(name for name, its in cells_of.items() if cell_id in its) for cell_id in ids}
    return {those: tuple(i for i in ids if names[i] == those) for those in dict.fromkeys(names.values())}
