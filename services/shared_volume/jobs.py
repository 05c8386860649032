"""What the scheduler side asks of the workers in one step: blocks to load, and blocks to save."""

from __future__ import annotations

from dataclasses import dataclass

from services.faults import Hold, LoadControl, LoadMode


@dataclass(frozen=True)
class LoadJob:
    """Blocks to load for one request: `keys[i]` goes into `block_ids[i]`, logical block `first_block + i`."""

    request_id: str
    tag: str
    mode: LoadMode
    first_block: int
    keys: tuple[str, ...]
    block_ids: tuple[int, ...]
    hold: Hold | None = None


@dataclass(frozen=True)
class SaveJob:
    """Blocks to save for one request: `block_ids[i]` goes under `keys[i]`, logical block `first_block + i`."""

    request_id: str
    tag: str
    first_block: int
    keys: tuple[str, ...]
    block_ids: tuple[int, ...]
    hold: Hold | None = None


def tag(control: LoadControl, request_id: str) -> str:
    """The name of a request in journals."""
    return control.tag or request_id
