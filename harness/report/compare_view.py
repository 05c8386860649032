"""A comparison of two runs as sections that every format shows alike. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from harness.records import Report
from harness.report.compare import PAIRS_MIN, CellChange, Cost, Kind, RunComparison
from harness.report.view import evidence_folder, reason, repeat_command, rows, run_outcome, started_at


@dataclass(frozen=True)
class Section:
    """A table under a title; `lines` stand below it. Without rows only title and lines are shown. `bad`: how many
    of the first rows are about something that got worse."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    lines: tuple[str, ...] = ()
    bad: int = 0


def headline(comparison: RunComparison) -> str:
    """What the exit code says, in words."""
    worse = sum(change.worse for change in comparison.changes)
    others = Counter(change.kind for change in comparison.changes if not change.worse)
    what = f"{worse} cell{'s' if worse != 1 else ''} got worse" if worse else "nothing got worse"
    counts = [f"{others[kind]} {kind}" for kind in Kind if others[kind]]
    return "; ".join((what, ", ".join([*counts, f"{comparison.same_count} as before"])))


def sections(comparison: RunComparison) -> tuple[Section, ...]:
    """The runs, what changed (worst first), settings that differ, cost."""
    return (_runs(comparison), _cells(comparison), _settings(comparison), _costs(comparison))


def why_worse(comparison: RunComparison) -> tuple[tuple[str, ...], ...]:
    """For each cell that got worse: its id and why, its evidence, and the command that repeats it."""
    report = comparison.after
    judged = {row.cell.id: row for row in rows(report)}
    found = (judged[change.cell_id] for change in comparison.changes if change.worse and change.cell_id in judged)
    return tuple(
        (
            f"{row.cell.id}: {reason(row)}",
            f"evidence: {evidence_folder(report, row.cell)}",
            f"repeat:   {repeat_command(report, row.cell)}",
        )
        for row in found
    )


def _runs(comparison: RunComparison) -> Section:
    runs = (("A", comparison.before), ("B", comparison.after))
    return Section("runs", ("", "run", "started", "outcome", "cells"), tuple(_run(name, run) for name, run in runs))


def _run(name: str, run: Report) -> tuple[str, ...]:
    judged = f"{len(run.verdicts)} of {len(run.cells)}"
    return name, run.folder, started_at(run), f"{run_outcome(run)} ({run.exit_code})", judged


def _cells(comparison: RunComparison) -> Section:
    order = list(Kind)
    changes = sorted(comparison.changes, key=lambda change: (not change.worse, order.index(change.kind)))
    bad = sum(change.worse for change in changes)
    if not changes:
        return Section("cells: no difference")
    return Section("cells that differ", ("", "cell", "A", "B"), tuple(map(_change, changes)), bad=bad)


def _change(change: CellChange) -> tuple[str, ...]:
    redefined = f"; another cell by {', '.join(change.redefined)}" if change.redefined else ""
    return change.kind, change.cell_id, change.before or "-", f"{change.after or '-'}{redefined}"


def _settings(comparison: RunComparison) -> Section:
    if not comparison.settings:
        return Section("versions and settings: no difference")
    lines = tuple((setting.name, setting.before or "-", setting.after or "-") for setting in comparison.settings)
    return Section("versions and settings that differ", ("", "A", "B"), lines)


def _costs(comparison: RunComparison) -> Section:
    if not comparison.costs:
        return Section("cost: nothing that both runs measured")
    repeats = f"{comparison.repeat_count} oracles that were measured twice within a run"
    lines = (
        f"noise: the larger of two ratios, slower/faster of {repeats} (the largest: {comparison.repeat_noise:.2f}), "
        "and upper/lower quartile of the single B/A.",
        f"B/A: the median over what both runs measured; a kind with fewer than {PAIRS_MIN} is not compared.",
        "What all kinds share may be the machine or its load, of which this noise knows nothing. Cells run beside "
        "each other, oracles alone on their engine. Cost does not decide the exit code.",
    )
    columns = ("kind of load", ">n", ">A s", ">B s", ">B/A", ">noise", "")
    return Section("cost", columns, tuple(map(_cost, comparison.costs)), lines)


def _cost(cost: Cost) -> tuple[str, ...]:
    compared = "beyond the noise" if cost.pair_count >= PAIRS_MIN else "too few"
    word = "within" if cost.pair_count >= PAIRS_MIN and not cost.changed else compared
    numbers = (f"{cost.before_s:.3f}", f"{cost.after_s:.3f}", f"{cost.ratio:.2f}", f"{cost.noise:.2f}")
    return cost.kind, str(cost.pair_count), *numbers, word
