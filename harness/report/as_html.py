"""report.html: one file that opens anywhere, without network; readable without script, too.

Called through `files.write_reports`. The template engine escapes everything that comes from outside; a Content
Security Policy lets nothing run or apply but the page's own script and style, which it names by their hashes.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from functools import cache
from itertools import zip_longest
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from harness.records import BASELINE, Difference, EngineInfo, Report, TokenChoice
from harness.report import cost, story, timeline, view
from harness.report.cost_chart import chart
from harness.report.picture import SIGNS, picture
from services.journal import Event

FOLDER = Path(__file__).parent / "html"
LOG_LINES_MAX = 30
LOG_CHARACTERS_MAX = 300
PROMPT_CHARACTERS_MAX = 2000
DIFFERENCES_MAX = 3
"""Shown in full in one cell; the others take a line each."""
WHOLE_CELLS_MAX = 25
"""Not green, and shown with journal, log and lists; the file must open quickly where nearly all is red, too."""
EVENTS_MAX = 100
"""Of a cell's journal; half of them its first, half its last."""
TOKENS_BEFORE = 8
TOKENS_AFTER = 16
"""How much of two completions is shown around their first difference."""


@dataclasses.dataclass(frozen=True)
class TokenPair:
    """One position of two completions side by side; empty where one has ended."""

    index: int
    expected: str
    got: str
    first: bool

    @property
    def equal(self) -> bool:
        return self.expected == self.got


@dataclasses.dataclass(frozen=True)
class Settings:
    """What engines were started with: names and values that all share, and those that differ, by service."""

    shared: tuple[tuple[str, str], ...]
    different: tuple[tuple[str, tuple[str, ...]], ...]
    services: tuple[str, ...]


def to_html(report: Report) -> str:
    """The whole report as HTML."""
    style, script = ((FOLDER / name).read_text("utf-8") for name in ("report.css", "report.js"))
    judged = view.rows(report)
    not_green = story.not_green(judged)
    return (
        _environment()
        .get_template("report.html")
        .render(
            report=report,
            rows=judged,
            not_green=not_green,
            shown_whole={row.cell.id for row in not_green[:WHOLE_CELLS_MAX]},
            picture=picture(judged),
            observations={observation.cell_id: observation for observation in report.observations},
            prompts={prompt.id: prompt for prompt in report.prompts},
            versions=dataclasses.asdict(report.info.versions),
            settings=settings(report.info.engines),
            cost_tables=cost.costs(report),
            style=Markup(style),
            script=Markup(script),
            policy=content_security_policy(style, script),
        )
    )


def content_security_policy(style: str, script: str) -> str:
    """Nothing is loaded from anywhere; only this style and this script count."""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = view.visible
    environment.filters["line"] = view.one_line
    environment.filters["of"] = story.local
    environment.filters["log_line"] = log_line
    environment.filters["prompt_text"] = prompt_text
    environment.filters.update(layer=story.layer, kind=story.kind, group=story.group)
    environment.globals.update(
        baseline=BASELINE,
        view=view,
        story=story,
        timeline=timeline.timeline,
        drawing=timeline,
        event_words=timeline.event_words,
        chart=chart,
        signs=SIGNS,
        ends=ends,
        token_pairs=token_pairs,
        top_pairs=top_pairs,
        log_lines_max=LOG_LINES_MAX,
        differences_max=DIFFERENCES_MAX,
    )
    return environment


def log_line(text: str) -> str:
    """A line of an engine's log, cut where it is very long; the file has it whole."""
    shown = view.one_line(text)
    return shown if len(shown) <= LOG_CHARACTERS_MAX else f"{shown[:LOG_CHARACTERS_MAX]}…"


def ends(events: tuple[Event, ...]) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """A journal's first and last events, where it is very long; else all of them, and none."""
    half = EVENTS_MAX // 2
    return (events[:half], events[-half:]) if len(events) > EVENTS_MAX else (events, ())


def prompt_text(text: str) -> str:
    """A prompt with the middle of a very long text left out."""
    shown = view.visible(text)
    half = PROMPT_CHARACTERS_MAX // 2
    return shown if len(shown) <= PROMPT_CHARACTERS_MAX else f"{shown[:half]}\n…\n{shown[-half:]}"


def token_pairs(difference: Difference) -> tuple[TokenPair, ...]:
    """Both completions by position, around the first difference; only that where whole lists were not recorded."""
    expected = difference.expected_token_ids
    got = difference.got_token_ids
    if not expected and not got:
        first = TokenPair(difference.index, str(difference.expected_token_id), str(difference.got_token_id), True)
        return (first,)
    pairs = [
        TokenPair(index, str(left), str(right), index == difference.index)
        for index, (left, right) in enumerate(zip_longest(expected, got, fillvalue=""))
    ]
    return tuple(pairs[max(0, difference.index - TOKENS_BEFORE) : difference.index + TOKENS_AFTER])


def top_pairs(difference: Difference) -> tuple[tuple[TokenChoice | None, TokenChoice | None], ...]:
    """Both top-k lists by rank."""
    return tuple(zip_longest(difference.expected_top, difference.got_top))


def settings(engines: dict[str, EngineInfo]) -> Settings:
    """By name; a setting that an engine does not have is empty."""
    services = tuple(engines)
    names = sorted({name for engine in engines.values() for name in engine.settings})
    values = {name: tuple(engine.settings.get(name, "") for engine in engines.values()) for name in names}
    return Settings(
        shared=tuple((name, given[0]) for name, given in values.items() if len(set(given)) == 1),
        different=tuple((name, given) for name, given in values.items() if len(set(given)) > 1),
        services=services,
    )
