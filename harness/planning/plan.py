"""Matrix file -> cells: every entry is expanded to one cell per combination of its axes.

`commands.py` calls `load_plan` and then `select_cells`. A file with mistakes is refused as a whole, with every
mistake at once, each as `what is wrong @ path.to.the.field (line; valid choices)`.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import UsageError
from harness.planning.controls import controls_of, undisturbed
from harness.planning.expansion import Engines, expand
from harness.planning.matrix_checks import entry_problems, prompt_problems
from harness.planning.matrix_file import Location, Problem, checked, choose, parse, report
from harness.planning.matrix_words import CellsEntry, IncludeEntry, MatrixFile, PromptEntry
from harness.records import CELL_ID_BYTES_MAX, Cell, Plan, PromptSpec

CELLS_MAX = 10_000
MATRIX_FOLDER = Path(__file__).resolve().parents[1] / "matrix"
"""The matrices that ship; another file may include them wherever it lies."""
KNOWN_ISSUES_FILE = MATRIX_FOLDER / "known_issues.yaml"
"""Lies beside them, and is none."""


def load_plan(path: Path, engines: Engines) -> Plan:
    """The plan in a matrix file: its cells in the order of the file, and the prompts that they use. Its cells run on
    `engines`.

    Raises UsageError that lists every problem of the file.
    """
    plan = _load(path, engines, ())
    return _keep(plan, {cell.id for cell in plan.cells})


def _load(path: Path, engines: Engines, including: tuple[Path, ...]) -> Plan:
    """The plan with all prompts of the file and those that it includes. `including`: the files that led here."""
    document = parse(path)
    problems = [Problem(f"{at[-1]} is given twice", at) for at in document.repeated]
    plan = _plan(document.root, path, engines, including, problems)
    if problems:
        raise UsageError(report(path, document, problems))
    return plan


def select_cells(plan: Plan, patterns: tuple[str, ...]) -> Plan:
    """The cells whose id matches any of the globs, the cells without which these prove nothing (`controls.py`), and
    the prompts that all of them use; everything when there are no patterns.

    Raises UsageError for every pattern that matches no cell.
    """
    ids = [cell.id for cell in plan.cells]
    lost = [pattern for pattern in patterns if not fnmatch.filter(ids, pattern)]
    if lost:
        raise UsageError("\n".join(_no_such_cell(pattern, ids, plan.name) for pattern in lost))
    chosen = {cell_id for pattern in patterns or ("*",) for cell_id in fnmatch.filter(ids, pattern)}
    wanted = [cell for cell in plan.cells if cell.id in chosen]
    backing = (other for cell in wanted for find in (controls_of, undisturbed) for other in find(cell, plan.cells))
    return _keep(plan, chosen | {cell.id for cell in backing})


def engines_of(cells: Iterable[Cell]) -> tuple[str, ...]:
    """The services that cells and their oracles need, once each."""
    return tuple(dict.fromkeys(service for cell in cells for service in (cell.oracle_engine, cell.engine)))


def _no_such_cell(pattern: str, ids: Sequence[str], plan_name: str) -> str:
    near = difflib.get_close_matches(pattern.replace("*", ""), ids, n=3, cutoff=0.4) or ids[:3]
    return f"no cell of {plan_name} matches {pattern!r}; the nearest are {', '.join(near)}"


def _keep(plan: Plan, cell_ids: set[str]) -> Plan:
    cells = tuple(cell for cell in plan.cells if cell.id in cell_ids)
    used = {request.prompt_id for cell in cells for request in cell.requests}
    used |= {spec.share_with for spec in plan.prompts if spec.id in used}
    return replace(plan, cells=cells, prompts=tuple(spec for spec in plan.prompts if spec.id in used))


def _plan(root: object, path: Path, engines: Engines, including: tuple[Path, ...], problems: list[Problem]) -> Plan:
    """The plan, complete if `problems` stays empty; prompts and entries are checked even if the top is wrong."""
    top = checked(MatrixFile, root, (), problems)
    included = _included(top.include if top else (), path, engines, including, problems)
    raw_prompts, raw_cells = _sections(root)
    prompts = {key: checked(PromptEntry, raw, ("prompts", key), problems) for key, raw in raw_prompts.items()}
    own = {key: _spec(key, entry) for key, entry in prompts.items() if entry}
    problems += (
        Problem(f"{key} is another prompt in an included file", ("prompts", key), "give it another id")
        for key, spec in own.items()
        if included.prompts.get(key, spec) != spec
    )
    specs = included.prompts | own
    names = tuple(dict.fromkeys((*included.prompts, *prompts)))
    problems += prompt_problems(specs, names)
    cells = dict(included.cells)
    for index, raw in enumerate(raw_cells):
        if entry := checked(CellsEntry, raw, ("cells", index), problems, tuple(engines)):
            problems += entry_problems(entry, ("cells", index), specs, names)
            problems += _add(cells, expand(entry, engines), ("cells", index))
    if not cells and not problems:
        problems.append(Problem("there are no cells", (), "write cells, or include a matrix"))
    return Plan(top.name if top else "", tuple(specs.values()), tuple(cells.values()))


@dataclass(frozen=True)
class _Included:
    """What other matrix files give: cells and prompts by id."""

    cells: dict[str, Cell]
    prompts: dict[str, PromptSpec]


def _included(
    entries: Sequence[IncludeEntry],
    path: Path,
    engines: Engines,
    including: tuple[Path, ...],
    problems: list[Problem],
) -> _Included:
    cells: dict[str, Cell] = {}
    prompts: dict[str, PromptSpec] = {}
    for index, entry in enumerate(entries):
        at = ("include", index, "matrix")
        other = _matrix_file(entry.matrix, path.parent)
        if other in (*including, path):
            problems.append(Problem(f"{entry.matrix} includes this file", at, "a matrix cannot include itself"))
        elif not _is_file(other):
            near = choose(entry.matrix, sorted({file.stem for file in _matrix_files(path.parent)}))
            problems.append(Problem(f"no matrix {entry.matrix!r} beside this file, and none ships", at, near))
        else:
            plan = _load(other, engines, (*including, path))
            problems += _take(plan, entry, cells, prompts, ("include", index))
    return _Included(cells, prompts)


def _matrix_file(name: str, folder: Path) -> Path:
    """The file of a matrix in `folder` or, where it has none, among those that ship."""
    beside, shipped = (place / f"{name}.yaml" for place in (folder, MATRIX_FOLDER))
    return shipped if _is_file(shipped) and not _is_file(beside) else beside


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # The name is longer than any file's.
        return False


def _matrix_files(folder: Path) -> Iterator[Path]:
    places = dict.fromkeys((folder, MATRIX_FOLDER))
    return (file for place in places for file in place.glob("*.yaml") if file != KNOWN_ISSUES_FILE)


def shipped_matrices() -> tuple[str, ...]:
    """The names of the matrices that ship."""
    return tuple(sorted(file.stem for file in _matrix_files(MATRIX_FOLDER)))


def _take(
    plan: Plan, entry: IncludeEntry, cells: dict[str, Cell], prompts: dict[str, PromptSpec], at: Location
) -> Iterator[Problem]:
    """Add what an entry includes. Every file has the controls that its own cells need; the first ones do for all."""
    ids = [cell.id for cell in plan.cells]
    for key, patterns in (("only", entry.only), ("without", entry.without)):
        for pattern in patterns:
            if not fnmatch.filter(ids, pattern):
                yield Problem(_no_such_cell(pattern, ids, plan.name), (*at, key))
    for cell in plan.cells:
        if _matches(cell.id, entry.only) and not _matches(cell.id, entry.without):
            if cell.id in cells and not cell.control:
                yield Problem(f"a second cell {cell.id}", at, "leave it out of one of the files with `without`")
            cells.setdefault(cell.id, cell)
    for spec in plan.prompts:
        if prompts.setdefault(spec.id, spec) != spec:
            yield Problem(f"{plan.name} has another prompt {spec.id}", at, "give one of them another id")


def _matches(cell_id: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(cell_id, pattern) for pattern in patterns)


def _sections(root: object) -> tuple[Mapping[str, object], Sequence[object]]:
    fields = root if isinstance(root, dict) else {}
    prompts, cells = fields.get("prompts"), fields.get("cells")
    named = {str(key): raw for key, raw in prompts.items()} if isinstance(prompts, dict) else {}
    return named, cells if isinstance(cells, list) else []


def _spec(prompt_id: str, entry: PromptEntry) -> PromptSpec:
    repeated = entry.repeat.text * entry.repeat.count if entry.repeat else ""
    text = repeated + entry.text
    return PromptSpec(
        prompt_id,
        text,
        entry.token_count,
        entry.secret,
        entry.share_with,
        entry.shared_blocks,
        entry.chat,
        entry.unstored,
    )


def _add(cells: dict[str, Cell], new: Iterable[Cell], at: Location) -> Iterator[Problem]:
    told: set[str] = set()
    for cell in new:
        if len(cells) == CELLS_MAX:
            yield Problem(f"more than {CELLS_MAX} cells", at, "use fewer values, or several files")
            return
        if len(cell.id.encode()) > CELL_ID_BYTES_MAX:
            hint = f"at most {CELL_ID_BYTES_MAX} bytes; give the entry or its prompt a shorter name"
            yield Problem(f"the cell id {cell.id} is too long", at, hint)
        if cell.id in cells and cell.id not in told:
            told.add(cell.id)
            yield Problem(
                f"a second cell {cell.id}",
                at,
                "give the entry a name of its own, which ends the ids of its cells; or an axis has a value twice",
            )
        cells[cell.id] = cell
