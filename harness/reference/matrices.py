"""The matrices that ship, as a page shows them: their cells, and the first words of their files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.planning.plan import MATRIX_FOLDER, load_plan, shipped_matrices
from harness.records import Cell
from harness.stack import COMPOSE_FILE, cell_engines, read_engines


@dataclass(frozen=True)
class Matrix:
    """A matrix that ships. `about`: the first paragraph of the comment that its file opens with."""

    name: str
    about: str
    cells: tuple[Cell, ...]

    @property
    def engine_count(self) -> int:
        """How many decode engines its cells run on."""
        return len({cell.engine for cell in self.cells})


def matrices() -> tuple[Matrix, ...]:
    """By name, on the engines of compose.yaml as they are with nothing set."""
    engines = cell_engines(read_engines(COMPOSE_FILE, {}))
    files = (MATRIX_FOLDER / f"{name}.yaml" for name in shipped_matrices())
    return tuple(Matrix(path.stem, _about(path), load_plan(path, engines).cells) for path in files)


def _about(path: Path) -> str:
    return " ".join(_first_paragraph(path.read_text()))


def _first_paragraph(text: str) -> Iterator[str]:
    """The comment that a file opens with, up to its first empty line, without the signs."""
    for line in text.splitlines():
        words = line.removeprefix("#").strip()
        if not line.startswith("#") or not words:
            return
        yield words
