"""How the YAML of a matrix file is read: every mistake becomes a Problem with path and line.

`plan.py` calls `parse` and `checked`, adds problems of its own, and hands all of them to `report`.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from harness.errors import UsageError
from harness.planning.matrix_words import NESTED, RULES

FILE_BYTES_MAX = 2**22
"""Of a matrix file; a device, or somebody's disk image, has more."""
NUMBER_MAX = 10**12
"""Of a whole number in it, far above what any key can mean; Python does not print every number that YAML can write."""

Location = tuple[str | int, ...]
"""Where in the file: keys, and list indices counted from 0."""

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Document:
    """A parsed file: its values, the line of each location counted from 1, and keys that are given twice."""

    root: object
    lines: Mapping[Location, int]
    repeated: tuple[Location, ...]


@dataclass(frozen=True)
class Problem:
    """One mistake: what is wrong, where, and what to do about it (valid choices, nearest name)."""

    what: str
    location: Location
    hint: str = ""


def parse(path: Path, what: str = "matrix file") -> Document:
    """Read a file, a `what`. Raises UsageError when it cannot be read or is not YAML; says line and column."""
    try:
        loader = _Loader(_text(path))
        node = loader.get_single_node()
        root = loader.construct_document(node) if node else None
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a {what}: byte {error.start} is not UTF-8; save it as UTF-8") from None
    except RecursionError:
        raise UsageError(f"{path} is not a {what}: lists or mappings are nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{path} is not a {what}: {_syntax(error)}") from None
    places = [*_places(node, ())] if node else []
    return Document(root, dict(places), _repeated(location for location, _ in places))


def _text(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"it has more than {FILE_BYTES_MAX} bytes")
    return data.decode("utf-8")


class _Loader(yaml.SafeLoader):
    """Only `true` and `false` are booleans (`off` is a word here), dates are text, numbers have a limit; anchors cannot
    be referred to."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the base class declares it so
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("bool", "timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        kind = node.tag.rpartition(":")[2]
        try:
            value: object = super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):
            raise yaml.MarkedYAMLError(problem=f"this is no {kind}", problem_mark=node.start_mark) from None
        if isinstance(value, int) and abs(value) > NUMBER_MAX:
            raise yaml.MarkedYAMLError(problem="this number is too large", problem_mark=node.start_mark)
        return value

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not supported", problem_mark=event.start_mark)
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), ["t", "f"])


def _places(node: yaml.Node, location: Location) -> Iterator[tuple[Location, int]]:
    """Every location below `node` with its line; a key that is given twice comes twice."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*location, str(key.value)), key.start_mark.line + 1
            yield from _places(value, (*location, str(key.value)))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*location, index), value.start_mark.line + 1
            yield from _places(value, (*location, index))


def _repeated(locations: Iterable[Location]) -> tuple[Location, ...]:
    """Keys given twice, without those that are inside such a key."""
    twice = [location for location, count in Counter(locations).items() if count > 1]
    return tuple(location for location in twice if not any(at in twice for at in _outwards(location[:-1])))


def _syntax(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"{error.problem or error.context} @ line {mark.line + 1}, column {mark.column + 1}"
    return str(error)


def checked(
    model: type[Model], raw: object, location: Location, problems: list[Problem], engines: tuple[str, ...] = ()
) -> Model | None:
    """`raw` as a `model`, or None with what is wrong appended to `problems`. `engines`: names that cells may use."""
    try:
        return model.model_validate(raw, context=engines)
    except ValidationError as error:
        problems += [_problem(model, raw, location, details) for details in error.errors(include_url=False)]
        return None


def choose(given: str, valid: Sequence[str]) -> str:
    """A hint: the nearest valid choice, if there is one, and all of them."""
    near = difflib.get_close_matches(given, valid, n=1)
    return f"{f'did you mean {near[0]}? ' if near else ''}valid: {', '.join(valid)}"


def report(path: Path, document: Document, problems: Sequence[Problem]) -> str:
    """All problems for the user, in the order of the file."""
    lines = [(_line(document, problem.location), _sentence(problem, document)) for problem in problems]
    count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
    return "\n".join([f"{path}: {count}", *(f"  {text}" for _, text in sorted(lines, key=lambda line: line[0]))])


def _sentence(problem: Problem, document: Document) -> str:
    where = ".".join(map(str, problem.location)) or "top of the file"
    notes = [f"line {_line(document, problem.location)}", *([problem.hint] if problem.hint else [])]
    return f"{problem.what} @ {where} ({'; '.join(notes)})".replace("\n", "\\n")


def _line(document: Document, location: Location) -> int:
    """The line of a location, or of the nearest thing around it that the file has."""
    return next((document.lines[at] for at in _outwards(location) if at in document.lines), 1)


def _outwards(location: Location) -> Iterator[Location]:
    return (location[:length] for length in range(len(location), 0, -1))


def _problem(model: type[BaseModel], raw: object, location: Location, error: ErrorDetails) -> Problem:
    path, context, given = error["loc"], error.get("ctx", {}), repr(error["input"])
    at = location + _existing(raw, path)
    match error["type"]:
        case "extra_forbidden":
            return Problem(f"unknown key {path[-1]}", at, choose(str(path[-1]), _keys(model, path[:-1])))
        case "missing":
            return Problem(f"{path[-1]} is missing", location + path)
        case "enum" | "literal_error":
            valid = re.findall(r"[\w-]+", context["expected"].replace(" or ", ","))
            return Problem(f"unknown value {given}", at, choose(str(error["input"]), valid))
        case "too_short":
            return Problem(f"{at[-1]} is empty", at)
        case "choice":
            return Problem(error["msg"], at, f"valid: {context['choices']}")
        case "string_pattern_mismatch":
            return Problem(f"{given} does not fit", at, RULES[str(at[-1])])
        case "model_type":
            return Problem(f"{given} is not a mapping", at, f"valid keys: {', '.join(_keys(model, path))}")
    return Problem(f"{error['msg'][0].lower()}{error['msg'][1:]}, not {given}", at)


def _keys(model: type[BaseModel], path: Location) -> tuple[str, ...]:
    """The keys of the mapping at `path` inside a `model`."""
    inside = [NESTED[step] for step in path if isinstance(step, str)]
    fields = (inside[-1] if inside else model).model_fields
    return tuple(field.alias or name for name, field in fields.items())


def _existing(raw: object, path: Location) -> Location:
    """`path` without the steps that the file does not have: a lone value is a list of one to the model."""
    found: list[str | int] = []
    for step in path:
        children = dict(enumerate(raw)) if isinstance(raw, list) else raw
        if isinstance(children, dict) and step in children:
            found.append(step)
            raw = children[step]
    return tuple(found)
