"""Whether what is put together belongs together: a stored run's files, and engines with what is written of them.

`phases.py` asks before anything is judged or run: a verdict over parts of two runs would look like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.errors import StackError, UsageError
from harness.records import Observation, Plan, RunInfo
from harness.running.runner import PREFILL
from harness.stack import Stack


def check_stored(
    path: Path, plan: Plan, info: RunInfo, prompt_ids: set[str], observations: Iterable[Observation]
) -> None:
    """Raises UsageError, with all that does not fit, unless the observations are of this run and of its cells."""
    problems = [problem for seen in observations for problem in _foreign(plan, info, prompt_ids, seen)]
    if problems:
        told = "\n  ".join(dict.fromkeys(problems))
        raise UsageError(f"{path} holds parts of different runs, or was changed:\n  {told}")


def check_engines(info: RunInfo, stack: Stack) -> None:
    """Raises StackError when an engine is not the one that its service's folder describes, or when block sizes differ:
    then no engine finds what another has saved."""
    block_size = stack.client(PREFILL).block_size()
    for service in stack.services:
        client = stack.client(service)
        if (own := client.block_size()) != block_size:
            raise StackError(f"{service} has KV blocks of {own} tokens, {PREFILL} of {block_size}; start both alike")
        said = info.engines[service].versions.vllm if service in info.engines else ""
        if said and _number(said) != _number(serves := client.version()):
            raise StackError(
                f"{service} is vLLM {serves}, and its folder in {stack.evidence_dir} describes vLLM {said}: that is "
                "another engine's; give the folder to which this one writes"
            )


def _foreign(plan: Plan, info: RunInfo, prompt_ids: set[str], seen: Observation) -> Iterator[str]:
    cell = next((cell for cell in plan.cells if cell.id == seen.cell_id), None)
    if cell is None:
        yield f"{seen.cell_id} was observed, and is not in the plan"
        return
    if info.block_size < 1 and not seen.error:
        yield f"the block size is {info.block_size}"
    if seen.started_at_s < info.started_at_s:
        yield f"{cell.id} was observed before the run began"
    yield from (
        f"{cell.id} has the request {record.tag}"
        for record in seen.requests
        if not record.tag.startswith(f"{cell.id}.")
    )
    yield from (f"{cell.id} has events of {event.service}" for event in seen.events if event.service != cell.engine)
    asked = {request.prompt_id for request in (*cell.requests, *(record.planned for record in seen.requests))}
    yield from (f"prompt {prompt_id} of {cell.id} is missing" for prompt_id in sorted(asked - prompt_ids))


def _number(version: str) -> str:
    """Without what says how it was built: 0.32.0 of 0.32.0+cpu."""
    return version.split("+")[0]
