"""A matrix file takes cells and prompts from others in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.planning.plan import load_plan
from harness.records import Plan
from tests.engines import ENGINES

BASE = """
schema: 1
name: base
prompts:
  harbour: {text: Boats and boats.}
  library: {text: Books and books.}
cells:
  - {why: Control., engine: decode-fail, load: sync, workload: {victim: harbour}}
  - why: Broken.
    engine: decode-fail
    load: sync
    fault: {kind: report, blocks: [first, last]}
    workload: {victim: library}
"""
CONTROL, FIRST, LAST = "fail-none-sync", "fail-report-sync-first", "fail-report-sync-last"


def plan_of(tmp_path: Path, text: str, **others: str) -> Plan:
    for name, content in ({"base": BASE} | others).items():
        (tmp_path / f"{name}.yaml").write_text(content)
    path = tmp_path / "top.yaml"
    path.write_text(f"schema: 1\nname: top\n{text}")
    return load_plan(path, ENGINES)


def problem(tmp_path: Path, text: str, **others: str) -> str:
    with pytest.raises(UsageError) as caught:
        plan_of(tmp_path, text, **others)
    return str(caught.value).splitlines()[1].strip()


def ids(plan: Plan) -> list[str]:
    return [cell.id for cell in plan.cells]


def test_everything_of_another_file(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "include: [{matrix: base}]")
    assert ids(plan) == [CONTROL, FIRST, LAST]
    assert [spec.id for spec in plan.prompts] == ["harbour", "library"]


def test_chosen_cells_and_only_the_prompts_that_they_use(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "include: [{matrix: base, only: fail-report-*, without: '*-last'}]")
    assert (ids(plan), [spec.id for spec in plan.prompts]) == ([FIRST], ["library"])


def test_a_matrix_that_ships_is_found_from_any_folder(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "include: [{matrix: example, only: recompute-delay-sync}]")
    assert ids(plan) == ["recompute-delay-sync"]


def test_a_file_beside_this_one_goes_before_one_that_ships(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "include: [{matrix: example}]", example=BASE)
    assert ids(plan) == [CONTROL, FIRST, LAST]


def test_own_cells_use_the_prompts_of_the_other_file(tmp_path: Path) -> None:
    own = "cells: [{why: Mine., engine: decode-recompute, load: async, workload: {victim: library}}]"
    plan = plan_of(tmp_path, f"include: [{{matrix: base, only: {CONTROL}}}]\n{own}")
    assert ids(plan) == [CONTROL, "recompute-none-async"]


def test_the_first_of_two_controls_does_for_both(tmp_path: Path) -> None:
    other = BASE.replace("victim: harbour", "victim: library").replace("base", "other")
    text = f"include: [{{matrix: base}}, {{matrix: other, only: {CONTROL}}}]"
    plan = plan_of(tmp_path, text, other=other)
    assert ids(plan) == [CONTROL, FIRST, LAST]
    assert plan.cells[0].requests[0].prompt_id == "harbour"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "include: [{matrix: bas}]",
            "no matrix 'bas' beside this file, and none ships @ include.0.matrix (line 3; did you mean base? ",
        ),
        (
            "include: [{matrix: top}]",
            "top includes this file @ include.0.matrix (line 3; a matrix cannot include itself)",
        ),
        ("include: [{matrix: Base}]", "'Base' does not fit @ include.0.matrix (line 3; lower-case letters, digits"),
        ("include: [{matrix: base, only: zzz}]", "no cell of base matches 'zzz'; the nearest are fail-none-sync, "),
        ("include: [{matrix: base, without: zzz}]", "no cell of base matches 'zzz'; the nearest are fail-none-sync, "),
        ("include: [{matrix: base}, {matrix: base}]", f"a second cell {FIRST} @ include.1 (line 3; leave it out"),
        ("include: [{matrix: base, onyl: a}]", "unknown key onyl @ include.0.onyl (line 3; did you mean only? valid: "),
        ("include: []", "there are no cells @ top of the file (line 1; write cells, or include a matrix)"),
        (
            "include: [{matrix: base}]\nprompts: {library: {text: Others.}}",
            "library is another prompt in an included file @ prompts.library (line 4; give it another id)",
        ),
    ],
)
def test_mistakes(tmp_path: Path, text: str, says: str) -> None:
    assert problem(tmp_path, text).startswith(says)


def test_two_files_with_different_prompts_of_one_name(tmp_path: Path) -> None:
    other = BASE.replace("Books and books", "Bread").replace("base", "other")
    said = problem(tmp_path, "include: [{matrix: base}, {matrix: other, only: fail-none-sync}]", other=other)
    assert said.startswith("other has another prompt library @ include.1")


def test_files_that_include_each_other(tmp_path: Path) -> None:
    other = "schema: 1\nname: other\ninclude: [{matrix: top}]"
    with pytest.raises(UsageError, match=r"other\.yaml: 1 problem"):
        plan_of(tmp_path, "include: [{matrix: other}]", other=other)


def test_a_mistake_in_an_included_file_is_told_as_one_of_that_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"base\.yaml: 1 problem"):
        plan_of(tmp_path, "include: [{matrix: base}]", base=BASE.replace("decode-fail, load", "decode-fial, load", 1))
