"""What every format shows, derived once from a Report: rows, counts, and the words for them. Pure."""

from __future__ import annotations

import difflib
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from harness.judging.judge import only_controls_ran
from harness.planning.seed import seed_words
from harness.records import (
    Cell,
    Completion,
    Difference,
    Finding,
    Observation,
    Outcome,
    Report,
    RequestRecord,
    Role,
    RunInfo,
    Status,
    TokenChoice,
    Verdict,
)
from services.faults import ALWAYS, DELAY_KINDS, WHOLE_LOAD_KINDS, Fault, FaultKind

STATUS_ORDER = tuple(Status)
RUN_OUTCOMES = {0: "pass", 1: "fail", 2: "inconclusive", 3: "error"}


@dataclass(frozen=True)
class Row:
    """One judged cell. `requests` is empty and the durations are 0 when the cell was not run; `not_run` says why
    the harness could not run it. `observed`: its folder has an observation. `again`: the verdict on its second attempt,
    where it had one."""

    cell: Cell
    verdict: Verdict
    requests: tuple[RequestRecord, ...] = ()
    duration_s: float = 0.0
    ttft_s: float = 0.0
    not_run: str = ""
    observed: bool = False
    again: Verdict | None = None

    @property
    def as_expected(self) -> bool:
        return self.verdict.outcome == self.cell.expected

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Where answers left their oracles; of a cell that was skipped they say nothing."""
        return () if self.verdict.status is Status.SKIPPED else self.verdict.differences

    @property
    def attempts(self) -> tuple[Outcome, ...]:
        """What happened each time the cell was run; the first is the one that counts."""
        return (self.verdict.outcome, *((self.again.outcome,) if self.again else ()))

    @property
    def is_flaky(self) -> bool:
        """Not green, and green when it was run again alone."""
        return self.again is not None and self.again.status is Status.PASS

    @property
    def failed_findings(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.verdict.findings if not finding.ok)


def rows(report: Report) -> tuple[Row, ...]:
    """The judged cells in planned order."""
    verdicts = {verdict.cell_id: verdict for verdict in report.verdicts}
    observations = {observation.cell_id: observation for observation in report.observations}
    again = {attempt.verdict.cell_id: attempt.verdict for attempt in report.again}
    return tuple(
        _row(cell, verdicts[cell.id], observations.get(cell.id), again.get(cell.id))
        for cell in report.cells
        if cell.id in verdicts
    )


def _row(cell: Cell, verdict: Verdict, observation: Observation | None, again: Verdict | None) -> Row:
    if observation is None:
        return Row(cell, verdict)
    ttfts_s = (record.completion.ttft_s for record in observation.requests if record.planned.role is Role.VICTIM)
    return Row(
        cell,
        verdict,
        observation.requests,
        observation.duration_s,
        next(ttfts_s, 0.0),
        observation.error or observation.skipped,
        True,
        again,
    )


def not_judged(report: Report) -> tuple[str, ...]:
    """The ids of planned cells without a verdict, as an interrupted run leaves them."""
    judged = {verdict.cell_id for verdict in report.verdicts}
    return tuple(cell.id for cell in report.cells if cell.id not in judged)


def run_outcome(report: Report) -> str:
    """The exit code in one word."""
    return RUN_OUTCOMES.get(report.exit_code, "error")


def outcome_counts(report: Report) -> dict[str, int]:
    """How many cells had each outcome, the most frequent first."""
    return dict(Counter(verdict.outcome.value for verdict in report.verdicts).most_common())


def status_counts(report: Report) -> dict[str, int]:
    """How many cells had each status, without those that none had."""
    counts = Counter(verdict.status for verdict in report.verdicts)
    return {status.value: counts[status] for status in STATUS_ORDER if counts[status]}


def proved(report: Report) -> tuple[tuple[str, str], ...]:
    """What green cells show, by engine and load mode: (`decode-fail, sync`, `2 loaded, 5 failed-cleanly, 1 caught`)."""
    found: dict[str, Counter[str]] = {}
    for row in rows(report):
        if row.verdict.status in (Status.PASS, Status.FIXED):
            found.setdefault(f"{row.cell.engine}, {row.cell.load}", Counter())[row.verdict.outcome.value] += 1
    return tuple(
        (group, ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
        for group, outcomes in found.items()
    )


def known_issues(report: Report) -> tuple[tuple[str, str], ...]:
    """Every link to a known issue that was met, and its cells: `crashed in recompute-raise-sync`."""
    met: dict[str, list[str]] = {}
    for verdict in report.verdicts:
        if verdict.status is Status.KNOWN:
            met.setdefault(verdict.link, []).append(f"{verdict.outcome} in {verdict.cell_id}")
    return tuple((link, ", ".join(cells)) for link, cells in met.items())


def phase_s(report: Report, name: str) -> float:
    """Seconds that a phase took; 0 for one that the run did not have. In `cells` engines run theirs side by side, so
    that it is less than the sum."""
    return dict(report.timing.phases).get(name, 0.0)


def started_at(report: Report) -> str:
    """ISO 8601 in UTC, to the second."""
    return datetime.fromtimestamp(report.info.started_at_s, UTC).isoformat(timespec="seconds")


def cell_words(cell: Cell) -> str:
    """A cell's id, and its group where it has one: `recompute-hang-async (robustness)`."""
    return f"{cell.id} ({cell.group})" if cell.group else cell.id


def fault_words(fault: Fault) -> str:
    """A fault in a few words: `none`, `report first`, `drop 0,2 always`, `delay 1.5 s`, `hang`."""
    if fault.kind is FaultKind.NONE:
        return "none"
    blocks = ",".join(map(str, fault.blocks)) if isinstance(fault.blocks, tuple) else fault.blocks
    where = "" if fault.kind in WHOLE_LOAD_KINDS else blocks
    what = f"{fault.delay_s:g} s" if fault.kind in DELAY_KINDS else where
    times = {1: "", ALWAYS: "always"}.get(fault.times, f"{fault.times} times")
    return " ".join(part for part in (fault.kind, what, times) if part)


def broken_words(cell: Cell) -> str:
    """What a cell breaks, in a few words: as `fault_words`, or `payload-missing middle` for files and processes."""
    fault = cell.storage or cell.process
    if fault is None:
        return fault_words(cell.fault)
    blocks = fault.blocks
    return f"{fault.kind} {','.join(map(str, blocks)) if isinstance(blocks, tuple) else blocks}"


def finding_words(finding: Finding) -> str:
    """A finding on one line."""
    where = f" [{finding.request}]" if finding.request else ""
    detail = f": {finding.detail}" if finding.detail else ""
    got = finding.got or "nothing"
    values = f" (expected {finding.expected}, got {got})" if finding.expected or finding.got else ""
    return f"{finding.check}{where}{detail}{values}"


def reason(row: Row) -> str:
    """Why a cell is not green, on one line."""
    if row.failed_findings:
        return finding_words(row.failed_findings[0])
    return row.not_run or f"{row.verdict.outcome}, expected {row.cell.expected}"


def again_words(row: Row) -> str:
    """What a second attempt showed, with nothing beside it; empty where there was none."""
    if row.again is None:
        return ""
    same = "the same" if row.again.outcome is row.verdict.outcome else "not the same"
    return f"again alone: {row.again.outcome} ({'flaky: not red again alone' if row.is_flaky else same})"


def run_words(report: Report) -> tuple[str, ...]:
    """What has to be known of the run as a whole, one line each."""
    info = report.info
    lines = [seed_words(info.seed)] if info.seed else []
    if only_controls_ran(report.cells, report.verdicts):
        lines.append("nothing but controls was run: every other cell was skipped")
    if info.resumed_at_s:
        lines.append(f"interrupted and resumed, times: {len(info.resumed_at_s)}")
    if info.replay_of:
        lines.append(
            f"repeats cells of {info.replay_of}, under {'other' if info.differences else 'the same'} conditions"
        )
    return (*lines, *(f"not as there: {difference}" for difference in info.differences))


def difference_words(difference: Difference) -> str:
    """Where two completions part, on one line."""
    tie = ", a near-tie" if difference.near_tie else ""
    return (
        f"{difference.request} differs from {difference.oracle} at token {difference.index}: "
        f"expected {_token_words(difference.expected_token_id)}, got {_token_words(difference.got_token_id)}{tie}"
    )


def _token_words(token_id: int) -> str:
    return f"id {token_id}" if token_id >= 0 else "the end"


def top_words(top: Sequence[TokenChoice]) -> str:
    """A top-k list on one line, best first."""
    return "  ".join(f"{choice.token_id} {choice.logprob:.4f}" for choice in top) or "not recorded"


def text_diff(difference: Difference) -> tuple[str, ...]:
    """A unified diff of both texts, without its file header; empty when they are equal."""
    lines = difflib.unified_diff(
        difference.expected_text.split("\n"), difference.got_text.split("\n"), lineterm="", n=1
    )
    return tuple(visible(line) for line in lines)[2:]


def answer_words(completion: Completion) -> str:
    """How a request ended: HTTP status, finish reason, error."""
    status = f"HTTP {completion.status_code}" if completion.status_code else "no answer"
    late = "past its deadline" if completion.timed_out else ""
    return ", ".join(part for part in (status, completion.finish_reason, late, completion.error) if part)


def visible(text: str) -> str:
    """`text` with everything that does not print shown as an escape, line feeds excepted.

    Text of a model or a server may hold terminal codes, direction overrides, or characters XML forbids.
    """
    return "".join(char if char.isprintable() or char == "\n" else _escape(char) for char in text)


def one_line(text: str) -> str:
    """`visible`, with line feeds shown as well."""
    return visible(text).replace("\n", "\\n")


def web_address(text: str) -> bool:
    """Whether `text` is safe to be made a link."""
    return re.fullmatch(r"https?://[A-Za-z0-9._~:/?#@!$&*+,;=%()-]+", text) is not None


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def evidence_folder(report: Report, cell: Cell) -> str:
    """Where a cell's observation, journal and engine log lie."""
    return f"{report.folder.rstrip('/')}/cells/{cell.id}"


def run_command(report: Report) -> str:
    """The command line that makes the same run once more, with the variables that its engines were started with."""
    return " ".join([*_assignments(report.info), "python", report.info.command])


def repeat_command(report: Report, cell: Cell) -> str:
    """The command line that runs just this cell, on the same stack with the same settings."""
    info = report.info
    if info.in_compose:
        make = shlex.join(("make", "up", f"MATRIX={info.matrix}", f"ONLY={cell.id}"))
        return " ".join([*_assignments(info), make])
    folder = report.folder.rstrip("/")
    return shlex.join(("python", "harness/run_matrix.py", "run", "--replay", folder, "--cell", cell.id))


def _assignments(info: RunInfo) -> list[str]:
    return [f"{name}={shlex.quote(value)}" for name, value in info.variables]
