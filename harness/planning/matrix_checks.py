"""Mistakes in a matrix file that only show when prompts and entries are seen together. Pure; called by `plan.py`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from harness.faults.process_kinds import OF_PREFILL, ProcessKind
from harness.faults.storage_kinds import LONE, OF_WHOLE_VOLUME, StorageKind
from harness.planning.matrix_file import Location, Problem, choose
from harness.planning.matrix_words import WORD_PATTERN, WORD_RULE, AnyKind, CellsEntry, FaultEntry, WorkloadEntry
from harness.records import BASELINE, PromptSpec
from services.faults import ASYNC_KINDS, DELAY_KINDS, SYNC_KINDS, WHOLE_LOAD_KINDS, FaultKind


def fault_keys(kind: AnyKind) -> tuple[str, ...]:
    """The keys of `fault` that mean something for a kind."""
    if isinstance(kind, ProcessKind):
        return ("blocks",)
    if isinstance(kind, StorageKind):
        return () if kind in OF_WHOLE_VOLUME else ("blocks",)
    match kind:
        case FaultKind.NONE | FaultKind.UNANSWERED:
            return ()
        case _ if kind in DELAY_KINDS:
            return ("times", "delay_s")
        case _ if kind in WHOLE_LOAD_KINDS:
            return ("times",)
        case _:
            return ("blocks", "times")


def prompt_problems(specs: Mapping[str, PromptSpec], prompt_ids: Sequence[str]) -> Iterator[Problem]:
    """What is wrong among the prompts; `specs` has those of `prompt_ids` that are well-formed by themselves."""
    for prompt_id in prompt_ids:
        if not re.fullmatch(WORD_PATTERN, prompt_id):
            yield Problem(f"{prompt_id!r} cannot be a prompt's id", ("prompts", prompt_id), WORD_RULE)
    for spec in specs.values():
        yield from _sharing_problems(spec, specs, prompt_ids)
        yield from _secret_problems(spec, specs)
        if spec.chat and (spec.token_count or spec.share_with):
            hint = "a chat template decides about its tokens"
            yield Problem("a chat prompt has neither token_count nor share_with", ("prompts", spec.id), hint)


def entry_problems(
    entry: CellsEntry, at: Location, specs: Mapping[str, PromptSpec], prompt_ids: Sequence[str]
) -> Iterator[Problem]:
    """What is wrong in one entry of `cells`, which is at location `at`."""
    yield from _fault_problems(entry.fault, (*at, "fault"))
    yield from _process_problems(entry, at)
    yield from _mode_problems(entry, at)
    yield from _lone_problems(entry, at)
    yield from _shape_problems(entry.workload, (*at, "workload"))
    yield from _reference_problems(entry.workload, (*at, "workload"), prompt_ids)
    yield from _prefix_problems(entry.workload, (*at, "workload"), specs)
    yield from _chat_problems(entry.workload, (*at, "workload"), specs)
    if BASELINE in entry.engine and entry.fault.kind != (FaultKind.NONE,):
        yield Problem(f"{BASELINE} obeys no faults", (*at, "engine"), "valid with kind none only")


def _sharing_problems(
    spec: PromptSpec, specs: Mapping[str, PromptSpec], prompt_ids: Sequence[str]
) -> Iterator[Problem]:
    at: Location = ("prompts", spec.id, "share_with")
    if bool(spec.share_with) != bool(spec.shared_blocks):
        yield Problem("share_with and shared_blocks need each other", ("prompts", spec.id))
    others = [prompt_id for prompt_id in prompt_ids if prompt_id != spec.id]
    if spec.share_with and spec.share_with not in others:
        yield Problem(f"no other prompt {spec.share_with!r}", at, choose(spec.share_with, others))
    elif spec.share_with in specs and specs[spec.share_with].share_with:
        hint = f"name {specs[spec.share_with].share_with} instead"
        yield Problem(f"{spec.share_with} itself begins with the blocks of another prompt", at, hint)


def _secret_problems(spec: PromptSpec, specs: Mapping[str, PromptSpec]) -> Iterator[Problem]:
    at: Location = ("prompts", spec.id, "secret")
    if not spec.secret:
        return
    if (count := spec.text.count(spec.secret)) != 1:
        yield Problem(f"the text says {spec.secret!r} {count} times", at, "once is right")
    lines = spec.text.split("\n")
    if spec.token_count and (len(lines) < 3 or spec.secret not in lines[0]):
        hint = "first paragraph: the secret; last: the question; what is between them is cut to token_count"
        yield Problem("the secret is not in the first of at least three paragraphs", at, hint)
    others = [other.id for other in specs.values() if other.id != spec.id and spec.secret in other.text]
    if others:
        yield Problem(f"{spec.secret!r} is also in {', '.join(others)}", at, "a secret occurs in one prompt only")


def _fault_problems(fault: FaultEntry, at: Location) -> Iterator[Problem]:
    """Keys that none of the entry's kinds uses, and a delay without its length."""
    used = {key for kind in fault.kind for key in fault_keys(kind)}
    for key in sorted(fault.model_fields_set - {"kind"} - used):
        kinds = ", ".join(kind for kind in FaultKind if key in fault_keys(kind))
        yield Problem(f"{key} means nothing for kind {', '.join(fault.kind)}", (*at, key), f"it belongs to {kinds}")
    if DELAY_KINDS.intersection(fault.kind) and "delay_s" not in fault.model_fields_set:
        yield Problem("delay_s is missing", (*at, "delay_s"), f"seconds, for kind {' and '.join(sorted(DELAY_KINDS))}")


def _process_problems(entry: CellsEntry, at: Location) -> Iterator[Problem]:
    """A process is struck at one block, and what it drags along is not judged."""
    kinds = [kind for kind in entry.fault.kind if isinstance(kind, ProcessKind)]
    if not kinds:
        return
    for blocks in entry.fault.blocks or ():
        if blocks == "all" or (isinstance(blocks, tuple) and len(blocks) != 1):
            hint = "first, middle, last or a block index counted from 0"
            yield Problem(f"a process is struck at one block, not at {blocks!r}", (*at, "fault", "blocks"), hint)
    workload = entry.workload
    beside = workload.fellows + workload.ahead + workload.sharers + workload.late + workload.then
    if beside or workload.gives_up or workload.kind not in ("single", "group"):
        hint = "use kind single, or kind group with bystanders: what others find is up to chance"
        yield Problem("only bystanders beside a process that is struck", (*at, "workload"), hint)
    if workload.bystanders and not OF_PREFILL.issuperset(kinds):
        hint = "valid where the producer is struck"
        yield Problem("bystanders would be struck with their engine", (*at, "workload", "bystanders"), hint)


def _mode_problems(entry: CellsEntry, at: Location) -> Iterator[Problem]:
    """Kinds that only one load mode can have."""
    for mode, other, kinds in (("sync", "async", ASYNC_KINDS), ("async", "sync", SYNC_KINDS)):
        for kind in entry.fault.kind:
            if mode in entry.load and kind in kinds:
                hint = f"valid with load {other} only; give it an entry of its own"
                yield Problem(f"{kind} cannot happen to a load that is {mode}", (*at, "load"), hint)


def _lone_problems(entry: CellsEntry, at: Location) -> Iterator[Problem]:
    """Kinds in which others beside the victim would see one thing or another, as it happens."""
    for kind in entry.fault.kind:
        if kind in LONE and entry.workload.kind != "single":
            hint = "use kind single; give it an entry of its own"
            yield Problem(f"{kind} is exact for a victim alone", (*at, "workload", "kind"), hint)


def _shape_problems(workload: WorkloadEntry, at: Location) -> Iterator[Problem]:
    sharers, bystanders = len(workload.sharers), len(workload.bystanders)
    others = sum(map(len, _named(workload).values())) - len(workload.victim)
    if workload.kind == "single" and others > 0:
        yield Problem("single is a victim alone", at, "other requests belong to kind mix, twin, late and group")
    if workload.kind == "mix" and (sharers, bystanders, others) != (1, 1, 2):
        yield Problem(f"mix with {sharers} sharers and {bystanders} bystanders", at, "one of each, or kind group")
    if workload.kind == "twin" and others > 0:
        yield Problem("twin is the victim's prompt twice", at, "other requests belong to kind group")
    if workload.kind == "late" and (len(workload.late), others) != (1, 1):
        yield Problem("late is a victim, and one request during its repair", at, "name it with late, or use kind group")
    if workload.kind == "group" and others == 0:
        yield Problem("a group of one", at, "name other requests, or use kind single")
    if workload.bystander_deadline_s and not bystanders:
        yield Problem("there are no bystanders", (*at, "bystander_deadline_s"), "name them, or leave this out")


def _reference_problems(workload: WorkloadEntry, at: Location, prompt_ids: Sequence[str]) -> Iterator[Problem]:
    for field, names in _named(workload).items():
        for name in names:
            if name not in prompt_ids:
                yield Problem(f"unknown prompt {name!r}", (*at, field), choose(name, prompt_ids))


def _named(workload: WorkloadEntry) -> dict[str, tuple[str, ...]]:
    """The prompts of each key that names some."""
    return {
        "victim": workload.victim,
        "fellows": workload.fellows,
        "ahead": workload.ahead,
        "sharers": workload.sharers,
        "bystanders": workload.bystanders,
        "late": workload.late,
        "then": workload.then,
    }


def _chat_problems(workload: WorkloadEntry, at: Location, specs: Mapping[str, PromptSpec]) -> Iterator[Problem]:
    """Through the chat API only what a chat template made can be said, and the same tokens are a prompt as well."""
    if "chat" not in workload.api:
        return
    for name in itertools.chain(*_named(workload).values()):
        if name in specs and not specs[name].chat:
            yield Problem(f"prompt {name} is no chat", (*at, "api"), f"give {name} chat: true")


def _prefix_problems(workload: WorkloadEntry, at: Location, specs: Mapping[str, PromptSpec]) -> Iterator[Problem]:
    """In a mix the sharer's prefix is exact, so it must be declared (in a group it may be repeated text)."""
    if workload.kind != "mix":
        return
    for victim in workload.victim:
        for sharer in workload.sharers:
            if sharer in specs and victim in specs and victim not in (sharer, specs[sharer].share_with):
                hint = f"give {sharer} share_with: {victim}"
                yield Problem(f"{sharer} shares no blocks with {victim}", (*at, "sharers"), hint)
