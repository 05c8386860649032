"""The words of a matrix file, and how its YAML is read: every mistake becomes a Problem with path and line.

`plan.py` calls `parse` and `checked`, adds problems of its own, and hands all of them to `report`.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from harness.errors import UsageError
from harness.process_kinds import ProcessKind
from harness.storage_kinds import StorageKind
from services.faults import ALWAYS, SELECTOR_NAMES, BlockSelector, FaultKind

Location = tuple[str | int, ...]
"""Where in the file: keys, and list indices counted from 0."""

WORD_PATTERN = r"^[a-z0-9]+(-[a-z0-9]+)*$"
WORD_RULE = "lower-case letters, digits and single dashes"

RULES = {
    "name": WORD_RULE,
    "report": "such as vllm#19329 or owner/repository#7",
    "link": "an https address, such as https://github.com/vllm-project/vllm/issues/19329",
}
"""What the pattern of a field means."""

AnyKind = FaultKind | StorageKind | ProcessKind

KINDS: Mapping[str, AnyKind] = {kind.value: kind for kind in (*FaultKind, *StorageKind, *ProcessKind)}
"""Every kind of fault; the kind tells at which layer it strikes."""

Item = TypeVar("Item")
Model = TypeVar("Model", bound=BaseModel)


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _as_selector(value: object) -> BlockSelector:
    if isinstance(value, str) and value in SELECTOR_NAMES:
        return value
    indices = value if isinstance(value, list) else [value]
    if indices and all(type(index) is int and index >= 0 for index in indices):
        return tuple(sorted(set(indices)))
    choices = f"{', '.join(SELECTOR_NAMES)}, a block index counted from 0, or [[0, 2]] for blocks 0 and 2 together"
    raise PydanticCustomError("choice", "{value} names no blocks", {"value": repr(value), "choices": choices})


def _as_kind(value: object) -> AnyKind:
    if isinstance(value, str) and value in KINDS:
        return KINDS[value]
    raise PydanticCustomError("enum", "unknown kind", {"expected": ", ".join(KINDS)})


def _as_engine(value: object, info: ValidationInfo) -> str:
    """The file is validated with the names of all engines as its context."""
    engines: tuple[str, ...] = info.context or ()
    if isinstance(value, str) and value in engines:
        return value
    raise PydanticCustomError("enum", "unknown engine", {"expected": ", ".join(engines)})


def _as_times(value: object) -> object:
    return ALWAYS if value == "always" else value


Axis = Annotated[tuple[Item, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
"""One value, or a list of values that each give cells of their own."""

Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
"""One name or a list of names that belong together."""

Blocks = Annotated[BlockSelector, BeforeValidator(_as_selector)]
Times = Annotated[int, BeforeValidator(_as_times), Field(ge=1)]
Kind = Annotated[AnyKind, PlainValidator(_as_kind)]
EngineName = Annotated[str, PlainValidator(_as_engine)]
Word = Annotated[str, Field(pattern=WORD_PATTERN)]


class Entry(BaseModel):
    """A mapping of the file: unknown keys are mistakes, and nothing is converted silently."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class IncludeEntry(Entry):
    """Cells and prompts of another matrix file in the same folder, by its name without `.yaml`: the cells that match
    any glob of `only` and none of `without`, and every prompt."""

    matrix: Word
    only: Names = ("*",)
    without: Names = ()


class MatrixFile(Entry):
    """The top of the file; prompts and cells are checked one by one, so that all their mistakes are found."""

    schema_version: Literal[1] = Field(alias="schema")
    name: Word
    include: list[IncludeEntry] = []
    prompts: dict[str, object] = {}
    cells: list[object] = []


class RepeatEntry(Entry):
    """`text`, `count` times."""

    text: str = Field(min_length=1)
    count: int = Field(ge=1, le=100_000)


class PromptEntry(Entry):
    """As records.PromptSpec; `repeat` comes before `text`."""

    text: str = Field(min_length=1)
    repeat: RepeatEntry | None = None
    token_count: int = Field(0, ge=0)
    secret: str = ""
    share_with: str = ""
    shared_blocks: int = Field(0, ge=0)
    chat: bool = False
    unstored: bool = False


class FaultEntry(Entry):
    """As services.faults.Fault, storage_kinds.StorageFault or process_kinds.ProcessFault, with lists as axes; None: not
    given."""

    kind: Axis[Kind] = (FaultKind.NONE,)
    blocks: Axis[Blocks] | None = None
    times: Axis[Times] | None = None
    delay_s: Axis[Annotated[float, Field(gt=0)]] | None = None


class WorkloadEntry(Entry):
    """Which requests a cell sends, and when. `fellows`: more victims, sent with the first and broken in the same way.
    `ahead`, `late`, `then`: requests that are sent before the victim, during its repair, and after its client has
    gone; `bystander_deadline_s` is for `bystanders`."""

    kind: Literal["single", "mix", "twin", "late", "group"] = "single"
    victim: Axis[str]
    fellows: Names = ()
    ahead: Names = ()
    sharers: Names = ()
    bystanders: Names = ()
    late: Names = ()
    then: Names = ()
    gives_up: Literal["loading", "repair"] | None = None
    preempts: bool = False
    bystander_deadline_s: float = Field(0, ge=0, le=3600)
    stream: Axis[bool] = (False,)
    api: Axis[Literal["completions", "chat"]] = ("completions",)


class CellsEntry(Entry):
    """One entry of `cells`: a cell per combination of its axes; None: derived from the rest."""

    why: str = Field(min_length=1)
    name: Word | None = None
    report: str = Field("", pattern=r"^([\w.-]+(/[\w.-]+)?#\d+)?$")
    engine: Axis[EngineName]
    load: Axis[Literal["sync", "async"]]
    fault: FaultEntry = FaultEntry()
    workload: WorkloadEntry
    expect: Literal["loaded", "recovered", "failed-cleanly", "caught"] | None = None
    max_tokens: int = Field(8, ge=1)
    deadline_s: float = Field(60.0, gt=0, le=3600)
    control: bool | None = None


NESTED: Mapping[str, type[Entry]] = {
    "fault": FaultEntry,
    "workload": WorkloadEntry,
    "repeat": RepeatEntry,
    "include": IncludeEntry,
}


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
        loader = _Loader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        root = loader.construct_document(node) if node else None
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} is not a {what}: {_syntax(error)}") from None
    places = [*_places(node, ())] if node else []
    return Document(root, dict(places), _repeated(location for location, _ in places))


class _Loader(yaml.SafeLoader):
    """Only `true` and `false` are booleans (`off` is a word here); anchors cannot be referred to."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the base class declares it so
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

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
    return f"{problem.what} @ {where} ({'; '.join(notes)})"


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
