"""The pages of docs/ that are written from the code, so that they cannot say anything else.

`python -m harness.reference` (`make docs`) writes them; a test compares them with what lies in docs/.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from harness.cli.commands import ROOT
from harness.reference.fault_kinds import layers
from harness.reference.matrices import matrices
from harness.reference.words import sections

DOCS = ROOT / "docs"
TEMPLATES = Path(__file__).parent


def pages() -> Mapping[Path, str]:
    """The pages, as they have to be. Raises HarnessError when a matrix that ships has mistakes."""
    ours = matrices()
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    contents = {
        "faults.md": {"layers": layers(ours)},
        "matrix-files.md": {"sections": sections(), "matrices": ours},
    }
    return {
        DOCS / name: environment.get_template(f"{name}.template").render(values) for name, values in contents.items()
    }
