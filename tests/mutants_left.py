"""After `make mutation`: which changes to the judge were noticed neither by its tests nor by the type checker.

Exits 1 when there are any besides those of equivalent_mutants.yaml, where each has the reason why it changes nothing.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import TypeAdapter

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.yaml")
MUTMUT = (sys.executable, "-m", "mutmut")
NOTICED = ("killed", "caught by type check")
UNKNOWN = "not checked"


@dataclass(frozen=True)
class Equivalent:
    """`line`: the changed line as it is after the change, in a function of module `file`."""

    file: str
    line: str
    why: str


def main() -> int:
    listed = TypeAdapter(tuple[Equivalent, ...]).validate_python(yaml.safe_load(EQUIVALENT.read_text()) or ())
    known = {(each.file, each.line) for each in listed}
    states = dict(line.strip().split(": ", 1) for line in _mutmut("results", "--all", "true") if ": " in line)
    diffs = {name: _mutmut("show", name) for name, state in states.items() if state not in (*NOTICED, UNKNOWN)}
    left = {name: diff for name, diff in diffs.items() if _change(diff) not in known}
    for name, diff in left.items():
        print(f"{name}: {states[name]}", *diff, "", sep="\n")
    gone = known - {_change(diff) for diff in diffs.values()}
    for file, line in sorted(gone):
        print(f"{EQUIVALENT.name}: no change gives `{line}` in {file} any more, or the tests notice it: drop it")
    untried = list(states.values()).count(UNKNOWN)
    counts = f"{len(left)} not noticed, {len(diffs) - len(left)} that change nothing, {untried} not tried"
    print(f"{len(states)} changes: {counts}")
    return 1 if left or gone or untried or not states else 0


def _change(diff: list[str]) -> tuple[str, str]:
    """The file, and the line that was put in; empty where a line was taken out."""
    file = next(line.removeprefix("+++ ") for line in diff if line.startswith("+++ "))
    new = (line[1:].strip() for line in diff if line.startswith("+") and not line.startswith("+++ "))
    return file, next(new, "")


def _mutmut(*arguments: str) -> list[str]:
    done = subprocess.run([*MUTMUT, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main())
