"""Who may import whom: read from the import statements, so that it holds on any machine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(path for folder in ("services", "harness") for path in (ROOT / folder).rglob("*.py"))

ENGINE_PACKAGES = {"vllm", "torch"}
OF_ENGINE = {
    "services/shared_volume/__init__.py",
    "services/shared_volume/worker.py",
    "services/fault_injecting/__init__.py",
    "services/kv_blocks.py",
    "services/vllm_compat.py",
}
"""What runs inside an engine and is of no use outside it."""

SHARED_WITH_HARNESS = {"services.faults", "services.journal", "services.signals", "services.store"}
"""Of the services, what the harness may import: plain types and files."""


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports as soon as it is imported; what it needs for types or in a function is not."""
    for node in _run_at_import(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If) and not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield from _run_at_import([*node.body, *node.orelse])
        elif isinstance(node, ast.With | ast.Try):
            yield from _run_at_import(node.body)


def is_of(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_look_at() -> None:
    assert {names(path) for path in MODULES} > OF_ENGINE


@pytest.mark.parametrize("path", MODULES, ids=names)
def test_only_the_connectors_import_the_engine(path: Path) -> None:
    uses = any(is_of(module, ENGINE_PACKAGES) for module in imported(path))
    assert uses == (names(path) in OF_ENGINE)


@pytest.mark.parametrize("path", MODULES, ids=names)
def test_services_and_harness_know_only_plain_types_of_each_other(path: Path) -> None:
    modules = list(imported(path))
    if names(path).startswith("services/"):
        assert not any(is_of(module, {"harness"}) for module in modules)
    else:
        of_services = [module for module in modules if is_of(module, {"services"})]
        assert [module for module in of_services if not is_of(module, SHARED_WITH_HARNESS)] == []


def test_what_is_imported_later_or_for_types_does_not_count(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "from typing import TYPE_CHECKING\nimport json.decoder\nif TYPE_CHECKING:\n    import torch\n"
        "if json:\n    from vllm import config\ndef later():\n    import harness\n"
    )
    assert list(imported(module)) == ["typing.TYPE_CHECKING", "json.decoder", "vllm.config"]
