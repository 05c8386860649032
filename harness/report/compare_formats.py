"""A comparison of two runs on the terminal, as Markdown, and as one HTML file. Nothing here decides."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.report.as_markdown import code
from harness.report.compare import RunComparison
from harness.report.compare_view import Section, headline, sections, why_worse
from harness.report.terminal import ANY_WIDTH, print_line
from harness.report.view import visible

TEMPLATE_NAME = "compare.template.html"


def print_comparison(comparison: RunComparison, console: Console) -> None:
    """Every section, why cells got worse, and the headline last."""
    for section in sections(comparison):
        _print_section(section, console)
    for lines in why_worse(comparison):
        print_line(console, Text(""))
        for line in lines:
            print_line(console, Text(f"  {visible(line)}"))
    print_line(console, Text(f"\n{headline(comparison)}", "bold red" if comparison.worse else "bold green"))


def _print_section(section: Section, console: Console) -> None:
    print_line(console, Text(f"\n{section.title}", "bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(section.columns))
    for name in section.columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", no_wrap=True)
    for index, row in enumerate(section.rows):
        table.add_row(*(Text(visible(word)) for word in row), style="red" if index < section.bad else None)
    if section.rows:
        # As wide as it has to be: ids and paths are to be copied.
        table.width = console.measure(table, options=console.options.update(width=ANY_WIDTH)).maximum
        console.print(table, soft_wrap=True)
    for line in section.lines:
        print_line(console, Text(line, "dim"))


def to_markdown(comparison: RunComparison) -> str:
    """For a comment; everything that is not ours stands in code spans."""
    lines = [f"## kvproof: {headline(comparison)}", ""]
    for section in sections(comparison):
        lines += [f"### {section.title}", *_table(section), *section.lines, ""]
    worse = why_worse(comparison)
    if worse:
        lines += ["### Why", "", *(_entry(*words) for words in worse), ""]
    return "\n".join(lines)


def _table(section: Section) -> list[str]:
    if not section.rows:
        return []
    heads = [name.removeprefix(">") for name in section.columns]
    rules = ["--:" if name.startswith(">") else "---" for name in section.columns]
    cells = [[_cell(word) for word in row] for row in section.rows]
    return ["", *(f"| {' | '.join(row)} |" for row in (heads, rules, *cells)), ""]


def _cell(text: str) -> str:
    # A bar ends a table cell even inside a code span.
    return code(text).replace("|", "\\|")


def _entry(why: str, evidence: str, repeat: str) -> str:
    return f"- {code(why)}\n  {code(evidence)}\n  {code(repeat)}"


def to_html(comparison: RunComparison) -> str:
    """One file without network or script; everything from outside is escaped by the template engine."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["visible"] = visible
    return environment.get_template(TEMPLATE_NAME).render(
        comparison=comparison,
        headline=headline(comparison),
        sections=sections(comparison),
        why_worse=why_worse(comparison),
    )
