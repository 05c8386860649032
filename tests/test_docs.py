"""The docs: pages from the code are as the code is, commands are understood and, without engines, run; links lead
somewhere.

In the pages a `console` block has commands after `$ ` and below each what it printed, in which `...` stands for any
lines; a `bash` block has commands only. A `yaml` block whose first line is a comment with a name is a matrix file.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from harness.cli.command_line import parse
from harness.judging.known_issues import IssueEntry
from harness.planning.matrix_words import KINDS, NESTED, CellsEntry, MatrixFile, PromptEntry
from harness.planning.plan import load_plan
from harness.reference import pages
from harness.reference.matrices import matrices
from harness.run_matrix import main
from tests.engines import ENGINES

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = pages()
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RESULTS = ROOT / "docs" / "results"
RECORDED = ROOT / "tests" / "recorded"
WITHOUT_ENGINES = ("list", "judge", "compare", "doctor", "completion")
WITH_OUTPUT_OF_ITS_OWN = ("doctor", "completion")
"""What they print depends on the machine, or is a script."""

MAKEFILE = (ROOT / "Makefile").read_text()
SETTINGS = MAKEFILE + "".join(
    path.read_text()
    for path in (*ROOT.glob("compose*.yaml"), *ROOT.glob("harness/**/*.py"), *ROOT.glob("services/*.py"))
)
OF_THE_SHELL = ("cd", "export", "git", "source", "xdg-open")
LOOKS = ("grep",)
"""Commands of the shell that only look at files of a run; they are run, too."""
CELL_ID = re.compile(r"(?:recompute|fail|chunked|tight)-[a-z0-9_*-]+")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Command:
    """One command of a page, and what the page shows of its output."""

    page: Path
    text: str
    output: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """Without variables, comments and the shell's own `<( )`."""
        inside = re.search(r"<\((.*)\)", self.text)
        words = shlex.split(inside[1] if inside else self.text, comments=True)
        return words[len(self.variables) :]

    @property
    def variables(self) -> dict[str, str]:
        assignments = takewhile(lambda word: re.match(r"[A-Z_0-9]+=", word), shlex.split(self.text, comments=True))
        return dict(word.split("=", 1) for word in assignments)

    @property
    def arguments(self) -> list[str] | None:
        """Of run_matrix.py; None for other commands."""
        words = self.words
        if "harness/run_matrix.py" in words:
            return words[words.index("harness/run_matrix.py") + 1 :]
        return words[3:] if words[1:3] == ["-m", "harness.run_matrix"] else None

    def __str__(self) -> str:
        return f"{name(self.page)}: {self.text}"


def commands_of(page: Path) -> Iterator[Command]:
    for token in MarkdownIt().parse(page.read_text()):
        lines = token.content.replace("\\\n", " ").splitlines()
        if token.info == "bash":
            yield from (Command(page, line) for line in lines if line and not line.startswith("#"))
        if token.info == "console":
            starts = [index for index, line in enumerate(lines) if line.startswith("$ ")]
            for start, end in pairwise([*starts, len(lines)]):
                yield Command(page, lines[start].removeprefix("$ "), tuple(lines[start + 1 : end]))


COMMANDS = [command for page in PAGES for command in commands_of(page)]
RUNNABLE = [
    command
    for command in COMMANDS
    if (words := command.arguments) is not None and ((words[:1] and words[0] in WITHOUT_ENGINES) or "--help" in words)
]


def spans(page: Path) -> Iterator[str]:
    """What stands between backticks in a page."""
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        yield from (child.content for child in token.children or () if child.type == "code_inline")


def matrix_files(page: Path, folder: Path) -> list[Path]:
    """The matrix files of a page, written to `folder`."""
    files = []
    for token in MarkdownIt().parse(page.read_text()):
        if token.info == "yaml" and (named := re.match(r"# ([\w-]+\.yaml)\n", token.content)):
            files.append(folder / named[1])
            files[-1].write_text(token.content)
    return files


# What there is to check.


def test_pages_and_commands_are_found() -> None:
    assert {name(page) for page in PAGES} >= {"README.md", "docs/faults.md", "docs/matrix-files.md"}
    assert {(command.arguments or ["run"])[0] for command in RUNNABLE} >= {"list"}
    assert any(command.words[0] == "make" for command in COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_console_block_begins_with_a_command(page: Path) -> None:
    blocks = [token.content for token in MarkdownIt().parse(page.read_text()) if token.info == "console"]
    assert [block for block in blocks if not block.startswith("$ ")] == []


def test_a_console_block_is_commands_and_output(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ A=1 make \\\n  demo  # quick\nall\nwell\n$ cat x\n```\n\n```bash\n# no\nmake up\n```\n"
    )
    first, second, third = commands_of(page)
    assert (first.words, first.variables, first.output) == (["make", "demo"], {"A": "1"}, ("all", "well"))
    assert (second.words, second.output, third.words) == (["cat", "x"], (), ["make", "up"])


# Pages from the code.


@pytest.mark.parametrize("path", WRITTEN, ids=name)
def test_a_page_from_the_code_is_as_the_code_is(path: Path) -> None:
    assert path.read_text() == WRITTEN[path], f"{name(path)} is old: make docs writes it again"


def test_every_kind_of_fault_has_its_place() -> None:
    text = WRITTEN[ROOT / "docs" / "faults.md"]
    assert [kind for kind in KINDS if f"\n### {kind}\n" not in text] == []


def test_every_word_of_a_matrix_file_is_explained() -> None:
    text = WRITTEN[ROOT / "docs" / "matrix-files.md"]
    for model in (MatrixFile, *NESTED.values(), PromptEntry, CellsEntry, IssueEntry):
        for key, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{key} has no docstring"
            assert f"| `{field.alias or key}` |" in text, key


def test_every_cell_that_ships_is_in_the_catalogue() -> None:
    text = WRITTEN[ROOT / "docs" / "faults.md"]
    assert [cell_id for cell_id in shipped_ids() if f"`{cell_id}`" not in text] == []


@cache
def shipped_ids() -> set[str]:
    return {cell.id for matrix in matrices() for cell in matrix.cells}


# Commands.


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_is_understood(command: Command) -> None:
    words = command.words
    ours = [variable for variable in command.variables if not variable.startswith("VLLM_")]
    assert [variable for variable in ours if not re.search(rf"\b{variable}\b", SETTINGS)] == []
    if command.arguments is not None:
        understood(command.arguments)
    elif words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        assert [target for target in targets if not re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)] == []
    elif words[:2] == ["docker", "compose"]:
        files = [after for option, after in pairwise(words) if option == "-f"]
        assert [file for file in files if not (ROOT / file).is_file()] == []
    elif words[1:2] == ["-m"]:
        assert words[0].endswith("python")
        assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file() or words[2] in ("pytest", "pip")
    else:
        assert words[0] in OF_THE_SHELL + LOOKS


def understood(arguments: list[str]) -> None:
    """The real parser takes them."""
    if "--help" in arguments:
        with pytest.raises(SystemExit, match=r"^0$"):
            parse(arguments, {})
    else:
        parse(arguments, {})


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what commands of the docs name: the matrix files of all pages, and runs: real ones, which the pages
    show and tests/recorded has, or any stored run under a name that stands for one of the reader's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "112")
    for page in PAGES:
        matrix_files(page, tmp_path)
    for run in {match for command in COMMANDS for match in re.findall(r"(?<!\S)runs/([\w-]+)", command.text)}:
        stored = RECORDED / run
        shutil.copytree(stored if stored.is_dir() else RECORDED / "h200-v2-runner", tmp_path / "runs" / run)
    return tmp_path


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("command", RUNNABLE, ids=str)
def test_a_command_without_engines_does_what_the_page_shows(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, value in command.variables.items():
        monkeypatch.setenv(variable, value)
    arguments = command.arguments or []
    try:
        code = main(arguments)
    except SystemExit as end:
        code = int(str(end.code))
    captured = capsys.readouterr()
    assert code in {"judge": (0, 1), "compare": (0, 1), "doctor": (0, 3)}.get(arguments[0], (0,)), captured.err
    if arguments[0] not in WITH_OUTPUT_OF_ITS_OWN:
        shows(command.output, captured.out.splitlines())


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.words[0] in LOOKS], ids=str)
def test_what_a_page_sees_in_files_is_there(command: Command, workplace: Path) -> None:
    done = subprocess.run(command.words, cwd=workplace, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    shows(command.output, done.stdout.splitlines())


def shows(shown: tuple[str, ...], printed: list[str]) -> None:
    """Every line that a page shows was printed, in this order; `...` stands for the rest of a line, or for lines."""
    lines = iter(line.rstrip() for line in printed)
    for wanted in filter(None, shown):
        pattern = wanted.rstrip().removesuffix("...")
        exact = pattern == wanted.rstrip()
        assert any(line == pattern if exact else line.startswith(pattern) for line in lines), wanted


def test_what_is_shown_must_have_been_printed() -> None:
    shows(("a", "...", "c d...", ""), ["a", "b", "c d e"])
    for wrong in (("b", "a"), ("c",), ("a", "a")):
        with pytest.raises(AssertionError):
            shows(wrong, ["a", "b", "c d e"])


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_matrix_files_of_a_page_are_right(page: Path, tmp_path: Path) -> None:
    for file in matrix_files(page, tmp_path):
        assert load_plan(file, ENGINES).cells


# What pages name.


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert [link for link in links(page) if not leads(link, page)] == []


def links(page: Path) -> Iterator[str]:
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        for child in token.children or ():
            target = child.attrs.get("href") or child.attrs.get("src")
            if target and not re.match(r"https?:", str(target)):
                yield str(target)


def leads(link: str, page: Path) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_and_targets_that_a_page_names_exist(page: Path) -> None:
    named = [span for span in spans(page) if re.fullmatch(r"(harness|services|docs|tests|images)/[\w./-]+", span)]
    assert [path for path in named if not (ROOT / path).exists()] == []
    targets = [match[1] for span in spans(page) if (match := re.match(r"make ([a-z-]+)", span))]
    assert [target for target in targets if not re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)] == []


# Results of earlier runs keep the names that cells had then.
@pytest.mark.parametrize("page", [page for page in PAGES if RESULTS not in page.parents], ids=name)
def test_cells_that_a_page_names_exist(page: Path, tmp_path: Path) -> None:
    own = {cell.id for file in matrix_files(page, tmp_path) for cell in load_plan(file, ENGINES).cells}
    named = [span for span in spans(page) if CELL_ID.fullmatch(span)]
    assert [cell for cell in named if not fnmatch.filter(own | shipped_ids(), cell)] == []
