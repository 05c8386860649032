"""The words of matrix files, from the models that read them: a section for each, a row for each of its keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, Field

from harness.judging.known_issues import IssueEntry
from harness.planning.matrix_words import (
    RULES,
    CellsEntry,
    Entry,
    FaultEntry,
    IncludeEntry,
    MatrixFile,
    PromptEntry,
    RepeatEntry,
    WorkloadEntry,
)

TITLES: Mapping[str, type[Entry]] = {
    "The file": MatrixFile,
    "include": IncludeEntry,
    "prompts": PromptEntry,
    "repeat": RepeatEntry,
    "cells": CellsEntry,
    "fault": FaultEntry,
    "workload": WorkloadEntry,
    "known_issues.yaml": IssueEntry,
}


class Shape(BaseModel):
    """What a JSON Schema says of a value, as far as these models use it."""

    kind: str = Field(default="", validation_alias="type")
    title: str = ""
    description: str = ""
    default: object = None
    const: object = None
    enum: list[object] = []
    any_of: list[Shape] = Field(default=[], validation_alias="anyOf")
    ref: str = Field(default="", validation_alias="$ref")
    items: Shape | None = None
    pattern: str = ""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = Field(default=None, validation_alias="exclusiveMinimum")
    is_axis: object = Field(default=None, validation_alias="minLength")
    """Of an array: lists at these keys give cells of their own."""


class Mapped(BaseModel):
    """The schema of one model."""

    properties: dict[str, Shape]
    required: list[str] = []


@dataclass(frozen=True)
class Key:
    """A row: the key, what its value may be, what it is when it is left out, and what it means."""

    name: str
    value: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Section:
    """A mapping of the file."""

    title: str
    about: str
    keys: tuple[Key, ...]


def sections() -> tuple[Section, ...]:
    return tuple(Section(title, _line(model.__doc__ or ""), _keys(model)) for title, model in TITLES.items())


def _keys(model: type[Entry]) -> tuple[Key, ...]:
    schema = Mapped.model_validate(model.model_json_schema(by_alias=True))
    return tuple(
        Key(name, _cell(value_words(name, shape)), _default(shape, name in schema.required), _cell(shape.description))
        for name, shape in schema.properties.items()
    )


def value_words(name: str, shape: Shape) -> str:
    """What may stand at a key, in words."""
    choices = [shape.const] if shape.const is not None else shape.enum
    if choices:
        return _either(map(_code, choices))
    if shape.any_of:
        return " or ".join(value_words(name, one) for one in shape.any_of if one.kind != "null")
    if shape.ref:
        return "a mapping, see below"
    if shape.items:
        return _list_words(name, shape.items, shape.is_axis is not None)
    if shape.pattern:
        return RULES[name]
    return _plain_words(shape)


def _list_words(name: str, item: Shape, is_axis: bool) -> str:
    if item.ref or item == Shape():
        return "a list"
    return f"{value_words(name, item)}; or a list of these{', an axis' if is_axis else ''}"


def _plain_words(shape: Shape) -> str:
    words = {
        "string": "a text",
        "boolean": "`true` or `false`",
        "integer": "a whole number",
        "number": "a number",
        "object": "a mapping",
    }.get(shape.kind, shape.title)
    limits = (("above", shape.above), ("from", shape.minimum), ("up to", shape.maximum))
    return " ".join([words, *(f"{word} {limit:g}" for word, limit in limits if limit is not None)])


def _default(shape: Shape, required: bool) -> str:
    """Empty where leaving it out means nothing in particular, or where its meaning says what then holds."""
    if required:
        return "*needed*"
    value = shape.default
    lone = value[0] if isinstance(value, list) and len(value) == 1 else value
    return _code(lone) if lone or lone is False or lone == 0 else ""


def _code(value: object) -> str:
    """A value as a file would have it."""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _either(choices: Iterable[str]) -> str:
    *most, last = choices
    return f"{', '.join(most)} or {last}" if most else last


def _cell(text: str) -> str:
    """A text as it can stand in a table."""
    return _line(text).replace("|", "\\|")


def _line(text: str) -> str:
    return " ".join(text.split())
