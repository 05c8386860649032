"""The words of a matrix file: what may stand where, and what it means.

`matrix_file.py` reads YAML into these models, docs/matrix-files.md is written from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from harness.faults.process_kinds import ProcessKind
from harness.faults.storage_kinds import StorageKind
from services.faults import ALWAYS, SELECTOR_NAMES, BlockSelector, FaultKind

WORD_PATTERN = r"^[a-z0-9]+(-[a-z0-9]+)*$"
WORD_RULE = "lower-case letters, digits and single dashes"

RULES = {
    "name": WORD_RULE,
    "matrix": WORD_RULE,
    "report": "such as vllm#19329 or owner/repository#7",
    "link": "an https address, such as https://github.com/vllm-project/vllm/issues/19329",
}
"""What the pattern of a field means."""

AnyKind = FaultKind | StorageKind | ProcessKind

KINDS: Mapping[str, AnyKind] = {kind.value: kind for kind in (*FaultKind, *StorageKind, *ProcessKind)}
"""Every kind of fault; the kind tells at which layer it strikes."""

Item = TypeVar("Item")


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

# How docs/matrix-files.md shows what pydantic cannot say.
_PROMPT = WithJsonSchema({"title": "a prompt's id"})
_GLOB = WithJsonSchema({"title": "a glob"})
_BLOCKS = WithJsonSchema(
    {"title": f"{', '.join(f'`{name}`' for name in SELECTOR_NAMES)}, an index, or a list of indices"}
)
_TIMES = WithJsonSchema({"title": "a whole number >= 1, or `always`"})
_KIND = WithJsonSchema({"title": "a kind of fault"})
_ENGINE = WithJsonSchema({"title": "a decode engine of compose.yaml"})

PromptId = Annotated[str, _PROMPT]
Names = Annotated[tuple[PromptId, ...], BeforeValidator(_as_tuple)]
"""One prompt or a list of prompts that belong together."""
Globs = Annotated[tuple[Annotated[str, _GLOB], ...], BeforeValidator(_as_tuple)]
"""One pattern or a list of patterns of cell ids."""

Blocks = Annotated[BlockSelector, BeforeValidator(_as_selector), _BLOCKS]
Times = Annotated[int, BeforeValidator(_as_times), Field(ge=1), _TIMES]
Kind = Annotated[AnyKind, PlainValidator(_as_kind), _KIND]
EngineName = Annotated[str, PlainValidator(_as_engine), _ENGINE]
Word = Annotated[str, Field(pattern=WORD_PATTERN)]


class Entry(BaseModel):
    """A mapping of the file: unknown keys are mistakes, and nothing is converted silently. What stands below a field
    is what docs/matrix-files.md says of it."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class IncludeEntry(Entry):
    """Cells of another matrix file, and all its prompts: the cells that match any glob of `only` and none of `without`.
    A control that two files have is taken from the first."""

    matrix: Word
    """The other file, by its name without `.yaml`: one in the same folder or, failing that, in harness/matrix."""
    only: Globs = ("*",)
    """Globs of cell ids; each has to match a cell."""
    without: Globs = ()
    """Globs of cell ids to leave out; each has to match a cell."""


class MatrixFile(Entry):
    """The top of the file. Cells come in the order of the file, those that are included first."""

    schema_version: Literal[1] = Field(alias="schema")
    """The version of these words."""
    name: Word
    """What reports call the matrix."""
    include: list[IncludeEntry] = []
    """Other matrix files to take cells and prompts from, a list of mappings."""
    prompts: dict[str, object] = {}
    """A mapping from a prompt's id to the prompt."""
    cells: list[object] = []
    """A list of entries, each of which gives one or more cells."""


class RepeatEntry(Entry):
    """A text that is said over and over, before `text`."""

    text: str = Field(min_length=1)
    """What is repeated, with the space that separates it."""
    count: int = Field(ge=1, le=100_000)
    """How often."""


class PromptEntry(Entry):
    """A prompt. Each costs a prefill and its oracles: some seconds on a slow CPU. With `token_count` the first and
    the last paragraph are kept whole, and what is between them is cut, or repeated, to make exactly that many tokens.
    So the first paragraph can tell a secret and the last can ask for it, and wrong KV shows in the answer."""

    text: str = Field(min_length=1)
    """Paragraphs are separated by an empty line."""
    repeat: RepeatEntry | None = None
    """A text to repeat before `text`."""
    token_count: int = Field(0, ge=0, le=10_000_000)
    """How many tokens are sent; 0: as many as the text has. A prompt can load its whole blocks, but never its last
    token: (tokens - 1) // block size."""
    secret: str = ""
    """A word of the first paragraph that occurs in no other prompt."""
    share_with: str = ""
    """The prompt whose first blocks this one begins with; `text` then begins on a new line."""
    shared_blocks: int = Field(0, ge=0, le=1_000_000)
    """How many blocks that are."""
    chat: bool = False
    """The text is a user's message, and the model's chat template makes the prompt of it."""
    unstored: bool = False
    """The prompt is shorter than a block on purpose, so nothing of it can come from the store."""


class FaultEntry(Entry):
    """What is broken. Keys that mean nothing for any kind of the entry are mistakes; [faults.md](faults.md) says which
    a kind has."""

    kind: Axis[Kind] = (FaultKind.NONE,)
    """What goes wrong, and in which layer; see [faults.md](faults.md)."""
    blocks: Axis[Blocks] | None = None
    """Which of the victim's blocks: a name, or indices counted from 0. `[0, 2]` gives two cells, `[[0, 2]]` one cell
    with both blocks. Without it `all`, and for a fault of a process `middle`."""
    times: Axis[Times] | None = None
    """How many loads of the request are broken, 1 if not given. Where fewer loads take place than are to be broken, the
    cell proves nothing."""
    delay_s: Axis[Annotated[float, Field(gt=0, le=3600)]] | None = None
    """How many seconds late the load ends (kind `delay`), or its lookup is answered (`pending`); both need it."""


class WorkloadEntry(Entry):
    """Which requests a cell sends, and when. The runner itself adds the canary: the victim's prompt once more, after
    the fault."""

    kind: Literal["single", "mix", "twin", "late", "group"] = "single"
    """`single`: the victim alone. `mix`: with one sharer and one bystander, which have to be named. `twin`: the
    victim's prompt twice at once. `late`: one request is sent during the repair of the victim. `group`: any of the
    requests below."""
    victim: Axis[PromptId]
    """The prompt whose load is broken (or, with kind `none`, watched)."""
    fellows: Names = ()
    """More victims: sent with the first, their loads broken in the same way."""
    ahead: Names = ()
    """Requests without a load that already run when the victim is sent."""
    sharers: Names = ()
    """Requests beside the victim that begin with its first blocks."""
    bystanders: Names = ()
    """Requests beside the victim that share nothing with it; they load their own KV, in the cell's load mode."""
    late: Names = ()
    """Requests sent when vLLM has been told that blocks of the victim are bad."""
    then: Names = ()
    """Requests sent when the victim's client has its answer, or has left."""
    gives_up: Literal["loading", "repair"] | None = None
    """When the victim's client closes its connection: during the load, or during the repair. Without it, it stays."""
    preempts: bool = False
    """The cell proves nothing unless vLLM has preempted a request meanwhile."""
    bystander_deadline_s: float = Field(0, ge=0, le=3600)
    """How many seconds bystanders may take, where that is less than the cell's `deadline_s`; 0: the same."""
    stream: Axis[bool] = (False,)
    """Answers come as server-sent events."""
    api: Axis[Literal["completions", "chat"]] = ("completions",)
    """Which API is asked; `chat` needs prompts with `chat: true`."""


class CellsEntry(Entry):
    """One entry of `cells`. A list at `engine`, `load`, `fault.kind`, `fault.blocks`, `fault.times`, `fault.delay_s`,
    `workload.victim`, `workload.stream` or `workload.api` is an axis: the entry gives one cell per combination."""

    why: str = Field(min_length=1)
    """One sentence: what must hold, or what would go unnoticed without this cell."""
    name: Word | None = None
    """Ends the ids of the entry's cells; needed where two entries would give the same id."""
    report: str = Field("", pattern=r"^([\w.-]+(/[\w.-]+)?#\d+)?$")
    """A public report about just this, as `owner/repository#number` or, for short, `vllm#number`."""
    engine: Axis[EngineName]
    """Where the cells run: `decode-recompute` and `decode-fail` are named after vLLM's `kv_load_failure_policy`,
    `decode-chunked` and `decode-tight` recompute in small steps, `decode-baseline` takes kind `none` only."""
    load: Axis[Literal["sync", "async"]]
    """`sync`: KV is loaded inside the forward step. `async`: beside it, and the request waits."""
    fault: FaultEntry = Field(default_factory=FaultEntry)
    """What is broken; without it nothing is."""
    workload: WorkloadEntry
    """Which requests are sent."""
    expect: Literal["loaded", "recovered", "failed-cleanly", "caught"] | None = None
    """The outcome that is right. Without it: what vLLM and the policy of the engine promise for this fault."""
    max_tokens: int = Field(8, ge=1, le=10_000_000)
    """How many tokens each answer has at most."""
    deadline_s: float = Field(60.0, gt=0, le=3600)
    """How many seconds each request may take."""
    control: bool | None = None
    """The cell shows that the test itself works: where it is not as expected, its engine's other cells with this load
    mode are inconclusive. Without it: true for a single victim with kind `none` or `silent`."""


NESTED: Mapping[str, type[Entry]] = {
    "fault": FaultEntry,
    "workload": WorkloadEntry,
    "repeat": RepeatEntry,
    "include": IncludeEntry,
}
