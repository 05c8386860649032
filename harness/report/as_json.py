"""report.json: what scripts and dashboards read."""

from __future__ import annotations

import dataclasses
import json

from harness.records import Report
from harness.report.view import Row, broken_words, cells_s, outcome_counts, rows, run_outcome, started_at


def to_json(report: Report) -> str:
    """The report as JSON. Seconds that were not measured are 0."""
    info, timing = report.info, report.timing
    fields = {
        "schema_version": info.schema_version,
        "run_id": info.run_id,
        "outcome": run_outcome(report),
        "exit_code": report.exit_code,
        "versions": dataclasses.asdict(info.versions),
        "stack": info.stack,
        "started_at": started_at(report),
        "duration_s": round(timing.duration_s, 3),
        "startup_s": round(timing.startup_s, 3),
        "cells_s": round(cells_s(report), 3),
        "counts": outcome_counts(report),
        "cells": [_cell(row) for row in rows(report)],
    }
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


def _cell(row: Row) -> dict[str, object]:
    return {
        "id": row.cell.id,
        "engine": row.cell.engine,
        "load": row.cell.load,
        "fault": broken_words(row.cell),
        "expected": row.cell.expected,
        "outcome": row.verdict.outcome,
        "status": row.verdict.status,
        "group": row.cell.group,
        "link": row.verdict.link,
        "findings": [dataclasses.asdict(finding) for finding in row.verdict.findings],
        "duration_s": round(row.duration_s, 3),
        "ttft_s": round(row.ttft_s, 4),
        "evidence": dataclasses.asdict(row.verdict.evidence),
    }
