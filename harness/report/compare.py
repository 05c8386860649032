"""Two stored runs -> what is different: cells, versions and settings, cost.

`commands.py` calls `compare` with what both runs reported; nothing is judged again. Pure apart from `stored`.

Cost is compared by kind of load, never by single cell: a cell is measured once, beside other engines' cells, so
nothing is known of its noise. Reuse and recompute oracles are measured twice, each alone on its engine.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from harness.judging.oracles import oracle_name
from harness.records import Cell, OracleRun, Report, Role, RunInfo, Status, Verdict
from harness.run_folder import RunFolder
from harness.running.conditions import settings
from harness.running.phases import exit_code_of

RANKS = {
    Status.PASS: 0,
    Status.FIXED: 0,
    Status.KNOWN: 1,
    Status.SKIPPED: 2,
    Status.INCONCLUSIVE: 3,
    Status.ERROR: 4,
    Status.FAIL: 5,
}
"""How bad a status is: less proved, then nothing proved, then red."""
RANK_NOT_JUDGED = 3
PAIRS_MIN = 3
"""With fewer measurements in both runs a kind's cost is not compared."""


class Kind(StrEnum):
    """What became of a cell."""

    WORSE = "worse"
    BETTER = "better"
    OTHER = "different"
    """As bad as before, with another outcome."""
    APPEARED = "appeared"
    VANISHED = "vanished"


@dataclass(frozen=True)
class CellChange:
    """A cell that is not as it was. `before`, `after`: status and outcome in words, empty where the run has no such
    cell. `redefined`: fields of the cell that the runs define differently. `worse`: also of a new cell that is red."""

    cell_id: str
    kind: Kind
    before: str
    after: str
    redefined: tuple[str, ...]
    worse: bool


@dataclass(frozen=True)
class Setting:
    """Something that both runs name, and differently; empty where one does not name it."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Cost:
    """Seconds that one kind of load took: medians of both runs, and `ratio`, the median of after/before over the
    `pair_count` things measured in both. A ratio between 1/noise and noise says nothing."""

    kind: str
    before_s: float
    after_s: float
    ratio: float
    noise: float
    pair_count: int

    @property
    def changed(self) -> bool:
        return self.pair_count >= PAIRS_MIN and not 1 / self.noise <= self.ratio <= self.noise


@dataclass(frozen=True)
class RunComparison:
    """`repeat_noise`: the largest ratio between two measurements of one oracle within a run, over
    `repeat_count` oracles; 1 where none was measured twice."""

    before: Report
    after: Report
    changes: tuple[CellChange, ...]
    same_count: int
    settings: tuple[Setting, ...]
    costs: tuple[Cost, ...]
    repeat_noise: float
    repeat_count: int

    @property
    def worse(self) -> bool:
        return any(change.worse for change in self.changes)


def stored(folder: RunFolder) -> Report:
    """Raises UsageError when the folder is not a whole run."""
    info, cells, verdicts = folder.load_info(), folder.load_plan().cells, folder.load_verdicts()
    return Report(
        info,
        folder.load_timing(),
        cells,
        folder.load_observations(),
        verdicts,
        exit_code_of(info, cells, verdicts),
        str(folder.path),
        oracles=folder.load_oracles() if folder.has_oracles() else (),
    )


def compare(before: Report, after: Report) -> RunComparison:
    changes = tuple(_changes(before, after))
    repeats = [*_repeat_ratios(before.oracles), *_repeat_ratios(after.oracles)]
    repeat_noise = max((1.0, *repeats))
    in_both = {cell.id for cell in before.cells} & {cell.id for cell in after.cells}
    return RunComparison(
        before,
        after,
        changes,
        len(in_both) - sum(change.cell_id in in_both for change in changes),
        tuple(_settings(before.info, after.info)),
        tuple(_costs(_measured(before), _measured(after), repeat_noise)),
        repeat_noise,
        len(repeats),
    )


def _changes(before: Report, after: Report) -> Iterator[CellChange]:
    """In the order of the second run, then what it lacks."""
    cells_before = {cell.id: cell for cell in before.cells}
    cells_after = {cell.id: cell for cell in after.cells}
    verdicts_before = {verdict.cell_id: verdict for verdict in before.verdicts}
    verdicts_after = {verdict.cell_id: verdict for verdict in after.verdicts}
    for cell_id, cell in cells_after.items():
        now = verdicts_after.get(cell_id)
        if cell_id not in cells_before:
            red = now is not None and now.status in (Status.FAIL, Status.ERROR)
            yield CellChange(cell_id, Kind.APPEARED, "", _words(now), (), red)
            continue
        then = verdicts_before.get(cell_id)
        redefined = _redefined(cells_before[cell_id], cell)
        if redefined or _words(then) != _words(now):
            kind = _kind(_rank(then), _rank(now))
            yield CellChange(cell_id, kind, _words(then), _words(now), redefined, kind is Kind.WORSE)
    for cell_id in cells_before:
        if cell_id not in cells_after:
            yield CellChange(cell_id, Kind.VANISHED, _words(verdicts_before.get(cell_id)), "", (), False)


def _kind(rank_before: int, rank_after: int) -> Kind:
    if rank_after == rank_before:
        return Kind.OTHER
    return Kind.WORSE if rank_after > rank_before else Kind.BETTER


def _rank(verdict: Verdict | None) -> int:
    return RANKS[verdict.status] if verdict else RANK_NOT_JUDGED


def _words(verdict: Verdict | None) -> str:
    return f"{verdict.status} {verdict.outcome}" if verdict else "not judged"


def _redefined(before: Cell, after: Cell) -> tuple[str, ...]:
    """Fields that differ and decide what is done or expected."""
    names = (field.name for field in dataclasses.fields(Cell) if field.name not in ("why", "report", "group"))
    then, now = dataclasses.asdict(before), dataclasses.asdict(after)
    return tuple(name for name in names if then[name] != now[name])


def _settings(before: RunInfo, after: RunInfo) -> Iterator[Setting]:
    """Versions, then how it was run, then the settings of the engines of both; of all at once where they agree."""
    services = before.engines.keys() & after.engines.keys()
    then, now = _named(before, services), _named(after, services)
    for name in dict.fromkeys((*then, *now)):
        if then.get(name, "") != now.get(name, ""):
            yield Setting(name, then.get(name, ""), now.get(name, ""))


def _named(info: RunInfo, services: Set[str]) -> dict[str, str]:
    run = {"matrix": info.matrix, "stack": info.stack, "block size": str(info.block_size), "seed": str(info.seed)}
    named = {**dataclasses.asdict(info.versions), **run}
    of_services = {service: own for service, own in settings(info).items() if service in services}
    for name in dict.fromkeys(name for own in of_services.values() for name in own):
        named |= _of_engines(name, {service: own.get(name, "") for service, own in of_services.items()})
    return named


def _of_engines(name: str, values: Mapping[str, str]) -> dict[str, str]:
    """`name`: the value of most engines, and `name of service` for each that has another one."""
    usual = statistics.mode(values.values())
    return {name: usual} | {f"{name} of {service}": value for service, value in values.items() if value != usual}


Measured = Mapping[str, Mapping[str, float]]
"""Kind of load -> what was measured -> seconds."""


def _measured(run: Report) -> Measured:
    """Oracles by time to first token, the median of their repeats; cells by how long the victim's answer took."""
    found: dict[str, dict[str, float]] = {}
    for name, times_s in _oracle_times_s(run.oracles).items():
        kind = name.split()[0].partition("(")[0]
        found.setdefault(f"{kind} oracle, first token", {})[name] = statistics.median(times_s)
    green = {v.cell_id: v.outcome for v in run.verdicts if v.status in (Status.PASS, Status.FIXED)}
    loads = {cell.id: cell.load for cell in run.cells}
    for observation in run.observations:
        victims = (r.completion for r in observation.requests if r.planned.role is Role.VICTIM)
        if observation.cell_id in green:
            kind = f"{green[observation.cell_id]} {loads[observation.cell_id]} cells, whole answer"
            found.setdefault(kind, {})[observation.cell_id] = next(victims).duration_s
    return found


def _oracle_times_s(runs: Iterable[OracleRun]) -> dict[str, list[float]]:
    """Times to first token by oracle, such as `partial(3) of library, 8 tokens, on decode-baseline`."""
    times_s: dict[str, list[float]] = {}
    for run in runs:
        if run.completion.ttft_s > 0:
            name = f"{oracle_name(run.key)} of {run.key.prompt_id}, {run.key.max_tokens} tokens, on {run.key.engine}"
            times_s.setdefault(name, []).append(run.completion.ttft_s)
    return times_s


def _repeat_ratios(runs: Iterable[OracleRun]) -> Iterator[float]:
    """How far apart two measurements of one oracle are: slower/faster."""
    for times_s in _oracle_times_s(runs).values():
        for pair in combinations(times_s, 2):
            yield max(pair) / min(pair)


def _costs(before: Measured, after: Measured, repeat_noise: float) -> Iterator[Cost]:
    for kind, now in after.items():
        then = before.get(kind, {})
        names = [name for name in now if then.get(name, 0) > 0 and now[name] > 0]
        if names:
            ratios = [now[name] / then[name] for name in names]
            yield Cost(
                kind,
                statistics.median(then[name] for name in names),
                statistics.median(now[name] for name in names),
                statistics.median(ratios),
                max(repeat_noise, _spread(ratios)),
                len(names),
            )


def _spread(ratios: list[float]) -> float:
    """How much single ratios scatter: upper/lower quartile."""
    if len(ratios) < PAIRS_MIN:
        return 1.0
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return upper / lower
