"""What the members of an enumeration mean: the docstring below each, where the code defines it.

Called by whatever explains a fault or an outcome to people, so that code and explanation cannot differ.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from itertools import pairwise


@cache
def meanings(kind: type[StrEnum]) -> Mapping[str, str]:
    """Value of each member of `kind` -> its docstring on one line; members without one are left out."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    pairs = [(_value(one), _docstring(following)) for one, following in pairwise(definition.body)]
    return {value: words for value, words in pairs if value and words}


def _value(statement: ast.stmt) -> str:
    """The text that an assignment gives a member."""
    match statement:
        case ast.Assign(value=ast.Constant(value=str(text))):
            return text
        case _:
            return ""


def _docstring(statement: ast.stmt) -> str:
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(text.split())
        case _:
            return ""
