"""Matrix file -> cells: every entry is expanded to one cell per combination of its axes.

`commands.py` calls `load_plan` and then `select_cells`. A file with mistakes is refused as a whole, with every
mistake at once, each as `what is wrong @ path.to.the.field (line; valid choices)`.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.controls import controls_of, undisturbed
from harness.errors import UsageError
from harness.matrix_checks import entry_problems, fault_keys, prompt_problems
from harness.matrix_file import (
    CellsEntry,
    FaultEntry,
    Location,
    MatrixFile,
    Problem,
    PromptEntry,
    WorkloadEntry,
    checked,
    parse,
    report,
)
from harness.oracles import BROKEN_KINDS
from harness.records import Cell, Outcome, Plan, PlannedRequest, PromptSpec, Role
from harness.storage_kinds import StorageFault, StorageKind
from services.faults import ALWAYS, BREACH_KINDS, NO_FAULT, BlockSelector, Fault, FaultKind, LoadMode

POLICIES = {"decode-recompute": "recompute", "decode-fail": "fail", "decode-baseline": "recompute"}
"""The kv_load_failure_policy of every engine that can run a cell."""


ROBUSTNESS = "robustness"
"""The group of cells in which the connector breaks its contract on purpose."""


def load_plan(path: Path) -> Plan:
    """The plan in a matrix file: its cells in the order of the file, and the prompts that they use.

    Raises UsageError that lists every problem of the file.
    """
    document = parse(path)
    problems = [Problem(f"{at[-1]} is given twice", at) for at in document.repeated]
    plan = _plan(document.root, problems)
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


def _no_such_cell(pattern: str, ids: Sequence[str], plan_name: str) -> str:
    near = difflib.get_close_matches(pattern.replace("*", ""), ids, n=3, cutoff=0.4) or ids[:3]
    return f"no cell of {plan_name} matches {pattern!r}; the nearest are {', '.join(near)}"


def _keep(plan: Plan, cell_ids: set[str]) -> Plan:
    cells = tuple(cell for cell in plan.cells if cell.id in cell_ids)
    used = {request.prompt_id for cell in cells for request in cell.requests}
    used |= {spec.share_with for spec in plan.prompts if spec.id in used}
    return replace(plan, cells=cells, prompts=tuple(spec for spec in plan.prompts if spec.id in used))


def _plan(root: object, problems: list[Problem]) -> Plan:
    """The plan, complete if `problems` stays empty; prompts and entries are checked even if the top is wrong."""
    top = checked(MatrixFile, root, (), problems)
    raw_prompts, raw_cells = _sections(root)
    prompts = {key: checked(PromptEntry, raw, ("prompts", key), problems) for key, raw in raw_prompts.items()}
    specs = {key: _spec(key, entry) for key, entry in prompts.items() if entry}
    problems += prompt_problems(specs, tuple(prompts))
    cells: dict[str, Cell] = {}
    for index, raw in enumerate(raw_cells):
        if entry := checked(CellsEntry, raw, ("cells", index), problems):
            problems += entry_problems(entry, ("cells", index), specs, tuple(prompts))
            problems += _add(cells, _expand(entry), ("cells", index))
    return _keep(Plan(top.name if top else "", tuple(specs.values()), tuple(cells.values())), set(cells))


def _sections(root: object) -> tuple[Mapping[str, object], Sequence[object]]:
    fields = root if isinstance(root, dict) else {}
    prompts, cells = fields.get("prompts"), fields.get("cells")
    named = {str(key): raw for key, raw in prompts.items()} if isinstance(prompts, dict) else {}
    return named, cells if isinstance(cells, list) else []


def _spec(prompt_id: str, entry: PromptEntry) -> PromptSpec:
    repeated = entry.repeat.text * entry.repeat.count if entry.repeat else ""
    text = repeated + entry.text
    return PromptSpec(prompt_id, text, entry.token_count, entry.secret, entry.share_with, entry.shared_blocks)


def _add(cells: dict[str, Cell], new: Iterable[Cell], at: Location) -> Iterator[Problem]:
    for cell in new:
        if cell.id in cells:
            yield Problem(
                f"a second cell {cell.id}", at, "give the entry a name of its own: it ends the ids of its cells"
            )
        cells[cell.id] = cell


def _expand(entry: CellsEntry) -> Iterator[Cell]:
    for engine, load, victim, stream, (fault, words) in itertools.product(
        entry.engine, entry.load, entry.workload.victim, entry.workload.stream, _faults(entry.fault)
    ):
        mode = LoadMode(load)
        yield Cell(
            id=_cell_id(entry, engine, mode, victim, stream, fault, words),
            engine=engine,
            policy=POLICIES[engine],
            load=mode,
            requests=_requests(entry.workload, mode, victim, stream, fault),
            expected=Outcome(entry.expect) if entry.expect else _expected(fault, POLICIES[engine]),
            why=" ".join(entry.why.split()),
            max_tokens=entry.max_tokens,
            deadline_s=entry.deadline_s,
            control=_is_control(entry, fault.kind) if entry.control is None else entry.control,
            report=entry.report,
            group=ROBUSTNESS if fault.kind in BREACH_KINDS else "",
            storage=fault if isinstance(fault, StorageFault) else None,
        )


def _faults(entry: FaultEntry) -> Iterator[tuple[Fault | StorageFault, tuple[str, ...]]]:
    """Every fault of an entry, with the words that tell it from others of its kind in a cell id."""
    for kind in entry.kind:
        used = fault_keys(kind)
        axes = (
            (entry.blocks if "blocks" in used else None) or (None,),
            (entry.times if "times" in used else None) or (None,),
            (entry.delay_s if "delay_s" in used else None) or (None,),
        )
        for blocks, times, delay_s in itertools.product(*axes):
            fault = _fault(kind, NO_FAULT.blocks if blocks is None else blocks, times or NO_FAULT.times, delay_s or 0.0)
            yield fault, _fault_words(blocks, times, delay_s if len(axes[-1]) > 1 else None)


def _fault(kind: FaultKind | StorageKind, blocks: BlockSelector, times: int, delay_s: float) -> Fault | StorageFault:
    return StorageFault(kind, blocks) if isinstance(kind, StorageKind) else Fault(kind, blocks, times, delay_s)


def _fault_words(blocks: BlockSelector | None, times: int | None, delay_s: float | None) -> tuple[str, ...]:
    """For what the file names: `middle`, `blocks-0-2`, `always`, `3-times`, `500ms`."""
    words = []
    if blocks is not None:
        words.append(blocks if isinstance(blocks, str) else "-".join(["blocks", *map(str, blocks)]))
    if times is not None:
        words.append("always" if times == ALWAYS else f"{times}-times")
    if delay_s is not None:
        words.append(f"{round(delay_s * 1000)}ms")
    return tuple(words)


def _cell_id(
    entry: CellsEntry,
    engine: str,
    load: LoadMode,
    victim: str,
    stream: bool,
    fault: Fault | StorageFault,
    words: Iterable[str],
) -> str:
    """`policy-kind-load`, then only what tells the cell from its neighbours."""
    workload = entry.workload
    return "-".join(
        [
            engine.removeprefix("decode-"),
            fault.kind,
            load,
            *words,
            *([workload.kind] if workload.kind != "single" else []),
            *([victim] if len(workload.victim) > 1 else []),
            *(["stream"] if stream else []),
            *([entry.name] if entry.name else []),
        ]
    )


def _requests(
    workload: WorkloadEntry, load: LoadMode, victim: str, stream: bool, fault: Fault | StorageFault
) -> tuple[PlannedRequest, ...]:
    """The victim first; the others are loaded in the same mode, without a fault. A fault in storage is no request's."""
    own = fault if isinstance(fault, Fault) else NO_FAULT
    return (
        PlannedRequest(Role.VICTIM, victim, load, own, stream),
        *(PlannedRequest(Role.SHARER, prompt, load, stream=stream) for prompt in workload.sharers),
        *(PlannedRequest(Role.BYSTANDER, prompt, load, stream=stream) for prompt in workload.bystanders),
    )


def _expected(fault: Fault | StorageFault, policy: str) -> Outcome:
    """What vLLM promises, also where a connector breaks its contract: a load that is broken is repaired or fails, as
    the policy says, and one that is right is used, whatever else is reported."""
    if isinstance(fault, StorageFault):
        return Outcome.LOADED if fault.is_miss else _repaired(policy)
    if fault.kind is FaultKind.SILENT:
        return Outcome.CAUGHT
    return _repaired(policy) if fault.kind in BROKEN_KINDS else Outcome.LOADED


def _repaired(policy: str) -> Outcome:
    return Outcome.FAILED_CLEANLY if policy == "fail" else Outcome.RECOVERED


def _is_control(entry: CellsEntry, kind: FaultKind | StorageKind) -> bool:
    """By default a lone victim without a fault, or with a silent one, is a control."""
    return entry.workload.kind == "single" and kind in (FaultKind.NONE, FaultKind.SILENT)
