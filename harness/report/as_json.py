"""report.json: what scripts and dashboards read; report.schema.json beside this file says what is in it.

`make schema` writes the schema; a test compares it with what this module says.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter

from harness.records import SCHEMA_VERSION, Evidence, Finding, Outcome, Report, Status, Versions
from harness.report.view import RUN_OUTCOMES, Row, broken_words, outcome_counts, phase_s, rows, run_outcome, started_at
from services.faults import LoadMode

SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True)
class JsonCell:
    """One judged cell."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    id: Annotated[str, Field(description="Unique in the run; also the name of the cell's folder.")]
    engine: Annotated[str, Field(description="The service that was tried.")]
    load: LoadMode
    fault: Annotated[
        str, Field(description="What was broken, in words: `none`, `report first`, `payload-missing middle`.")
    ]
    expected: Outcome
    outcome: Outcome
    status: Annotated[Status, Field(description="What the outcome means for the run; `known` and `fixed` have a link.")]
    attempts: Annotated[
        tuple[Outcome, ...],
        Field(
            description="What happened each time: a cell that is not green is run once more, alone. The first counts."
        ),
    ]
    flaky: Annotated[bool, Field(description="Not green, but green when it was run again alone.")]
    group: Annotated[str, Field(description="Cells that reports keep apart, such as `robustness`; empty for most.")]
    link: Annotated[str, Field(description="The known issue; empty where there is none.")]
    findings: tuple[Finding, ...]
    duration_s: Annotated[float, Field(description="0 where the cell was not run.")]
    ttft_s: Annotated[
        float | None,
        Field(
            description="The victim's time to first token; null where it was not measured: the request was not "
            "streamed, or got no token."
        ),
    ]
    evidence: Evidence


@dataclass(frozen=True)
class JsonReport:
    """The report of a run, as kvproof writes it."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    schema_version: Annotated[
        int,
        Field(
            description="Changes when a field is taken away or means something else.",
            json_schema_extra={"const": SCHEMA_VERSION},
        ),
    ]
    run_id: str
    outcome: Annotated[
        str, Field(description="The exit code in a word.", json_schema_extra={"enum": [*RUN_OUTCOMES.values()]})
    ]
    exit_code: Annotated[
        int,
        Field(
            description="0 all well (known issues included), 1 a cell failed, 2 inconclusive, 3 the harness broke, "
            "64 bad settings."
        ),
    ]
    versions: Versions
    stack: str
    seed: Annotated[
        int, Field(description="Of the order of the cells and the salt of the prompts; 0: the file's order, no salt.")
    ]
    started_at: Annotated[str, Field(description="ISO 8601, UTC.", json_schema_extra={"format": "date-time"})]
    duration_s: float
    startup_s: Annotated[float, Field(description="Until every engine was ready.")]
    cells_s: Annotated[float, Field(description="All cells; engines run theirs side by side, so less than the sum.")]
    error: Annotated[str, Field(description="Why the run did not come to its end; empty where it did.")]
    resumed_count: Annotated[int, Field(description="How often it was interrupted and gone on with.")]
    replay_of: Annotated[str, Field(description="The run folder whose cells are repeated here, or empty.")]
    differences: Annotated[tuple[str, ...], Field(description="In what this run is not like `replay_of`.")]
    counts: Annotated[
        dict[str, int], Field(description="How many cells had each outcome; without those that none had.")
    ]
    cells: tuple[JsonCell, ...]


def to_json(report: Report) -> str:
    """The report as JSON."""
    return json.dumps(dataclasses.asdict(_report(report)), indent=2, ensure_ascii=False) + "\n"


def schema() -> str:
    """JSON Schema of report.json."""
    fields = {"$schema": SCHEMA_ID, **TypeAdapter(JsonReport).json_schema(mode="serialization")}
    return json.dumps(fields, indent=2) + "\n"


def _report(report: Report) -> JsonReport:
    info, timing = report.info, report.timing
    return JsonReport(
        schema_version=SCHEMA_VERSION,
        run_id=info.run_id,
        outcome=run_outcome(report),
        exit_code=report.exit_code,
        versions=info.versions,
        stack=info.stack,
        seed=info.seed,
        started_at=started_at(report),
        duration_s=round(timing.duration_s, 3),
        startup_s=round(phase_s(report, "start"), 3),
        cells_s=round(phase_s(report, "cells"), 3),
        error=info.failure.text if info.failure else "",
        resumed_count=len(info.resumed_at_s),
        replay_of=info.replay_of,
        differences=info.differences,
        counts=outcome_counts(report),
        cells=tuple(map(_cell, rows(report))),
    )


def _cell(row: Row) -> JsonCell:
    return JsonCell(
        id=row.cell.id,
        engine=row.cell.engine,
        load=row.cell.load,
        fault=broken_words(row.cell),
        expected=row.cell.expected,
        outcome=row.verdict.outcome,
        status=row.verdict.status,
        attempts=row.attempts,
        flaky=row.is_flaky,
        group=row.cell.group,
        link=row.verdict.link,
        findings=row.verdict.findings,
        duration_s=round(row.duration_s, 3),
        ttft_s=round(row.ttft_s, 4) or None,
        evidence=row.verdict.evidence,
    )
