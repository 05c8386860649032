"""What a run and its cells are about, in words for people who were not there. Pure; called by the HTML report."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby
from urllib.parse import quote

from harness.faults.process_kinds import ProcessKind
from harness.faults.storage_kinds import StorageKind
from harness.meanings import meanings
from harness.records import Cell, Finding, Moment, Outcome, PlannedRequest, Prompt, Report, Status, TokenChoice
from harness.report.view import Row, broken_words, one_line, rows, web_address
from services.faults import FaultKind
from services.journal import ENGINE_LOG_NAME, JOURNAL_NAME

EVIDENCE_FILES = ("observation.json", JOURNAL_NAME, ENGINE_LOG_NAME, "verdict.json")
"""In the folder of a cell that was run."""

BROKEN = "a KV load was broken {} and vLLM answered as it should"
HARMLESS = "a fault that may only cost time cost no answer {}"
SOUND = "a sound load gave the right answer {}"
CAUGHT = "silent corruption was caught {}"
CLAIMS = (BROKEN, HARMLESS, SOUND, CAUGHT)

ORACLE_CHECKS = ("oracle-stable", "oracle-loaded", "oracles-agree")
"""Checks of what cells are compared with; said once for all of them where they hold."""

RED = (Status.FAIL, Status.ERROR)
NOT_GREEN = (*RED, Status.INCONCLUSIVE, Status.KNOWN, Status.FIXED)
"""What people have to look at, in this order; a fixed cell is one to take off the list of known issues."""


def proved(report: Report) -> str:
    """What the run shows, in one or two sentences."""
    judged = rows(report)
    sentence = {0: _green, 1: _red, 2: _inconclusive}.get(report.exit_code, _broken)(judged)
    versions = report.info.versions
    parts = (f"vLLM {versions.vllm}" if versions.vllm else "vLLM", versions.model, versions.connector)
    return f"{', '.join(part for part in parts if part)}: {sentence}{_known(judged)}"


def _green(judged: tuple[Row, ...]) -> str:
    held = [row for row in judged if row.verdict.status in (Status.PASS, Status.FIXED)]
    counts = Counter(filter(None, map(_claim, held)))
    told = [claim.format(times(counts[claim])) for claim in CLAIMS if counts[claim]]
    return f"{'; '.join(told)}." if told else "nothing was proved, because no cell passed."


def _claim(row: Row) -> str:
    """What a cell that passed proves."""
    match row.verdict.outcome:
        case Outcome.RECOVERED | Outcome.FAILED_CLEANLY:
            return BROKEN
        case Outcome.LOADED:
            return SOUND if layer(row.cell) == "no fault" else HARMLESS
        case Outcome.CAUGHT:
            return CAUGHT
        case _:
            return ""


def _red(judged: tuple[Row, ...]) -> str:
    red = [row for row in judged if row.verdict.status is Status.FAIL]
    outcomes = [row.verdict.outcome for row in red]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))
    return f"{len(red)} of {len(judged)} cells did not end as they must ({counts})."


def _inconclusive(judged: tuple[Row, ...]) -> str:
    open_count = sum(row.verdict.status is Status.INCONCLUSIVE for row in judged)
    if not open_count:
        return "nothing is proved, because nothing but controls was run."
    return f"nothing is proved yet, because {open_count} of {len(judged)} cells are inconclusive."


def _broken(judged: tuple[Row, ...]) -> str:
    broken_count = sum(row.verdict.status is Status.ERROR for row in judged)
    return f"the harness or its stack broke, in {broken_count} of {len(judged)} cells; the run proves nothing."


def _known(judged: tuple[Row, ...]) -> str:
    known = sum(row.verdict.status is Status.KNOWN for row in judged)
    return f" Known upstream and still red: {cells_words(known)}." if known else ""


def not_green(judged: tuple[Row, ...]) -> tuple[Row, ...]:
    """The cells to look at, the worst first."""
    wanted = [row for row in judged if row.verdict.status in NOT_GREEN]
    return tuple(sorted(wanted, key=lambda row: NOT_GREEN.index(row.verdict.status)))


def times(count: int) -> str:
    """`never`, `once`, `twice`, `3 times`."""
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def fired_words(cell: Cell, count: int) -> str:
    """How often the fault was carried out. A file is damaged once; what is counted is who noticed."""
    if cell.storage and cell.storage.fails:
        return f"the damage was noticed {times(count)}" if count else "nobody noticed the damage"
    return f"the fault fired {times(count)}"


def cells_words(count: int) -> str:
    return "1 cell" if count == 1 else f"{count} cells"


def layer(cell: Cell) -> str:
    """Where a cell breaks something."""
    if cell.storage or cell.process:
        return "storage" if cell.storage else "process"
    return "no fault" if kind(cell) == FaultKind.NONE else "boundary"


def group(cell: Cell) -> str:
    """The group that a cell is filtered by."""
    return cell.group or "no group"


def kind(cell: Cell) -> str:
    """What a cell breaks, without where and how often."""
    return broken_words(cell).split(" ")[0]


def fault_meaning(cell: Cell) -> str:
    """What the cell's fault does, as the code defines it."""
    kinds = {"storage": StorageKind, "process": ProcessKind}.get(layer(cell), FaultKind)
    return meanings(kinds).get(kind(cell), "")


def outcome_meaning(outcome: Outcome) -> str:
    return meanings(Outcome).get(outcome, "")


def workload(cell: Cell) -> str:
    """What sets a cell apart from one plain request, or an empty text: `3 at once, stream`."""
    count, first = len(cell.requests), cell.requests[0]
    traits = (
        (count > 1, f"{count} requests"),
        (first.stream, "stream"),
        (first.chat, "chat"),
        (any(planned.gives_up for planned in cell.requests), "given up"),
        (cell.preempts, "preempted"),
    )
    return ", ".join(words for holds, words in traits if holds)


def request_words(planned: PlannedRequest, prompts: Mapping[str, Prompt], block_size: int) -> str:
    """A request of the plan: its role, how much of its prompt can be loaded, and what is not plain about it."""
    prompt = prompts.get(planned.prompt_id)
    size = ""
    if prompt:
        size = f", {len(prompt.token_ids)} tokens, {prompt.full_block_count} whole blocks of {block_size}"
    parts = (
        f"{planned.role}: prompt {planned.prompt_id}{size}",
        f"load {planned.load}",
        "chat" if planned.chat else "",
        "streamed" if planned.stream else "",
        f"sent at: {_moment(planned.sent)}" if planned.sent is not Moment.START else "",
        f"its client leaves at: {_moment(planned.gives_up)}" if planned.gives_up else "",
    )
    return "; ".join(part for part in parts if part)


def _moment(moment: Moment) -> str:
    return f"{moment} ({meanings(Moment)[moment].rstrip('.')})"


def blocks_words(blocks: Iterable[int]) -> str:
    """Block indices, runs of them shortened: `0-6`, `0,2`."""
    runs = groupby(enumerate(sorted(blocks)), key=lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(group) for _, group in runs)]
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ends)


def held_words(findings: Iterable[Finding]) -> tuple[str, ...]:
    """Checks that hold, a line for each: what came of each request or oracle, said once where it was expected so."""
    by_check = groupby(findings, key=lambda finding: finding.check)
    return tuple(f"{check}: {'; '.join(filter(None, map(_held, same)))}".removesuffix(": ") for check, same in by_check)


def oracle_checks(judged: Iterable[Row]) -> tuple[str, ...]:
    """The checks of oracles that hold, once each, a line for each: many cells share an oracle."""
    findings = (finding for row in judged for finding in row.verdict.findings)
    held = dict.fromkeys(finding for finding in findings if finding.ok and finding.check in ORACLE_CHECKS)
    return tuple(held_words((finding,))[0] for finding in held)


def _held(finding: Finding) -> str:
    what = " ".join(part for part in (finding.request, finding.detail) if part)
    if not finding.expected and not finding.got:
        return what
    differs = f"expected {finding.expected}, got {finding.got}"
    values = finding.got if finding.expected == finding.got else differs
    return f"{what} ({values})" if what else values


def local(text: str, cell: Cell) -> str:
    """A text about a cell, on one line, in which the requests' tags need not repeat the cell's id."""
    return one_line(text).replace(f"{one_line(cell.id)}.", "")


def address(link: str) -> str:
    """Where a public report is: `link` itself, or what `owner/repository#number` and `vllm#number` stand for; empty
    where it is none of these."""
    short = re.fullmatch(r"(vllm|[\w.-]+/[\w.-]+)#(\d+)", link, re.ASCII)
    if short:
        repository = "vllm-project/vllm" if short[1] == "vllm" else short[1]
        return f"https://github.com/{repository}/issues/{short[2]}"
    return link if web_address(link) else ""


def anchor(cell: Cell) -> str:
    """The id of a cell's story in the page; the same text is its link's fragment."""
    return f"cell-{quote(cell.id, safe='')}"


def evidence_links(row: Row) -> tuple[tuple[str, str], ...]:
    """(name, address relative to the report) of the files in a cell's folder."""
    names = EVIDENCE_FILES if row.observed else EVIDENCE_FILES[-1:]
    return tuple((name, f"cells/{quote(row.cell.id, safe='')}/{name}") for name in names)


def percent(choice: TokenChoice) -> float:
    """A token's probability, 0..100."""
    return 100 * math.exp(min(choice.logprob, 0.0)) if not math.isnan(choice.logprob) else 0.0


def common_length(one: str, other: str) -> int:
    """How many leading characters two texts share."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
