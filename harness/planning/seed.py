"""What the seed of a run decides: the order of its cells, and the salt of its prompts.

Seed 0, the default, changes nothing: cells in the order of the matrix file, prompts as they are written there. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from harness.records import Cell

SEED_MAX = 999_999
"""Its digits take the place of a prompt's first words."""


def in_order(cells: Sequence[Cell], seed: int) -> tuple[Cell, ...]:
    """The cells in the order in which they are run; the same for the same seed."""
    return tuple(Random(seed).sample(list(cells), len(cells))) if seed else tuple(cells)


def salted(token_ids: tuple[int, ...], seed: int, tokens: Callable[[str], tuple[int, ...]]) -> tuple[int, ...]:
    """A prompt's own tokens with the digits of the seed in place of the first ones: every KV block of the prompt gets
    another key, and the counts stay. `tokens` gives the tokens of a text without a beginning."""
    salt = tokens(str(seed)) if seed else ()
    return (*salt, *token_ids[len(salt) :])[: len(token_ids)]


def seed_words(seed: int) -> str:
    """What the seed did, for people."""
    if seed:
        return f"seed {seed}: it orders the cells and is the first word of each prompt"
    return "seed 0: cells in the order of the file, prompts as written"
