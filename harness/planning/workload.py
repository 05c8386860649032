"""Prompts with exact token and block counts, made from the texts of a matrix file.

`phases.py` calls `build_prompts` once, with the tokenizer of the running engines. A prompt with a secret says it
early, where its KV is loaded from the store, and asks for it at the end: with another prompt's KV, or garbage,
the answer is visibly wrong. Pure: tokenizer in, prompts out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from harness.errors import UsageError
from harness.planning.seed import salted
from harness.records import Prompt, PromptSpec


class Tokenizer(Protocol):
    """The tokenizer of the engines; an EngineClient is one. May raise HarnessError."""

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The token ids of a text as a prompt, the model's own special tokens included."""

    def tokenize_chat(self, message: str) -> tuple[int, ...]:
        """The token ids of the prompt that the model's chat template makes of a user's message."""

    def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """The text of token ids."""


@dataclass(frozen=True)
class _Tokens:
    """`opening`: the special tokens with which the tokenizer begins every text; they belong before a prompt only.
    `seed`: of the run."""

    tokenizer: Tokenizer
    opening: tuple[int, ...]
    seed: int

    def of(self, text: str) -> tuple[int, ...]:
        return self.tokenizer.tokenize(text)[len(self.opening) :]


class _ImpossibleError(ValueError):
    """A spec that no prompt can satisfy with this tokenizer and block size; the text says why."""


def build_prompts(
    specs: Sequence[PromptSpec], tokenizer: Tokenizer, block_size: int, seed: int = 0
) -> dict[str, Prompt]:
    """One Prompt per spec, by id, in the order of `specs`; with another `seed`, of the same length with other KV keys.

    The tokenizer may begin every text with the model's special tokens; a prompt has them once, and they count.
    `block_size` is in tokens. A `share_with` names a spec that shares nothing itself. Raises UsageError that lists
    every spec that cannot be built.
    """
    tokens = _Tokens(tokenizer, _opening(tokenizer), seed)
    built: dict[str, Prompt] = {}
    problems: dict[str, str] = {}
    for spec in sorted(specs, key=lambda spec: bool(spec.share_with)):
        try:
            built[spec.id] = _build(spec, built, tokens, block_size)
        except _ImpossibleError as error:
            problems[spec.id] = str(error)
    if problems:
        raise UsageError(_report(specs, problems, block_size))
    return {spec.id: built[spec.id] for spec in specs}


def full_block_count(token_count: int, block_size: int) -> int:
    """Whole blocks that may be loaded: at least the last prompt token is always computed."""
    return max(0, token_count - 1) // block_size


def _opening(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What two texts that have no token in common both begin with."""
    pairs = zip(tokenizer.tokenize("x"), tokenizer.tokenize("\n"), strict=False)
    return tuple(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _build(written: PromptSpec, built: Mapping[str, Prompt], tokens: _Tokens, block_size: int) -> Prompt:
    spec = _salted_chat(written, tokens) if written.chat and tokens.seed else written
    prefix = _shared_prefix(spec, built, block_size) or tokens.opening
    token_ids = _token_ids(spec, prefix, tokens)
    block_count = full_block_count(len(token_ids), block_size)
    text = tokens.tokenizer.detokenize(token_ids)
    prompt = Prompt(spec.id, token_ids, text, block_count, spec.secret, spec.text if spec.chat else "", spec.unstored)
    _check_loadable(prompt, spec, block_size)
    _check_secret_loaded(prompt, len(prefix), spec, tokens, block_size)
    _check_shares_no_more(prompt, spec, built, block_size)
    return prompt


def _salted_chat(spec: PromptSpec, tokens: _Tokens) -> PromptSpec:
    """The message with the seed in it; what the template makes of it must have as many tokens as without."""
    text = tokens.tokenizer.detokenize(salted(tokens.of(spec.text), tokens.seed, tokens.of))
    counts = [len(tokens.tokenizer.tokenize_chat(each)) for each in (spec.text, text)]
    if counts[0] != counts[1]:
        raise _ImpossibleError(
            f"with the seed {tokens.seed} it has {counts[1]} tokens and not {counts[0]}: try another"
        )
    return replace(spec, text=text)


def _token_ids(spec: PromptSpec, prefix: tuple[int, ...], tokens: _Tokens) -> tuple[int, ...]:
    if spec.chat:
        return tokens.tokenizer.tokenize_chat(spec.text)
    own = _own_tokens(spec, len(prefix), tokens)
    return prefix + (own if spec.share_with else salted(own, tokens.seed, tokens.of))


def _shared_prefix(spec: PromptSpec, built: Mapping[str, Prompt], block_size: int) -> tuple[int, ...]:
    if not spec.share_with:
        return ()
    if spec.share_with not in built:
        raise _ImpossibleError(f"shares blocks with {spec.share_with}, which could not be built")
    other = built[spec.share_with]
    if spec.shared_blocks > other.full_block_count:
        raise _ImpossibleError(
            f"shares {spec.shared_blocks} blocks with {other.id}, of which only {other.full_block_count} can be loaded"
        )
    return other.token_ids[: spec.shared_blocks * block_size]


def _own_tokens(spec: PromptSpec, prefix_token_count: int, tokens: _Tokens) -> tuple[int, ...]:
    """The tokens after the shared prefix: the whole text, or the text cut or repeated to the spec's count."""
    text = _own_text(spec)
    if not spec.token_count:
        return tokens.of(text)
    head, story, tail = (tokens.of(part) for part in _parts(text))
    least = prefix_token_count + len(head) + len(tail)
    if spec.token_count < least:
        raise _ImpossibleError(
            f"token_count is {spec.token_count}, but at least {least} are needed: "
            f"{prefix_token_count} before the text, {len(head)} for the first line, {len(tail)} for the last"
        )
    return head + _fill(story, spec.token_count - least) + tail


def _own_text(spec: PromptSpec) -> str:
    """The spec's text; after a shared prefix, which may end inside a word, it begins on a new line."""
    return f"\n{spec.text}" if spec.share_with else spec.text


def _parts(text: str) -> tuple[str, str, str]:
    """First line, the lines between, last line; a text of fewer than three lines is all `between`."""
    break_after = text.find("\n", 1)
    break_before = text.rfind("\n")
    if not 0 < break_after < break_before:
        return "", text, ""
    return text[:break_after], text[break_after:break_before], text[break_before:]


def _fill(story: tuple[int, ...], count: int) -> tuple[int, ...]:
    if not story:
        raise _ImpossibleError("the text is empty")
    repeats = -(-count // len(story))
    return (story * repeats)[:count]


def _check_loadable(prompt: Prompt, spec: PromptSpec, block_size: int) -> None:
    """A prompt can load at least one block, and every block it shares; an unstored one can load none."""
    if spec.unstored:
        if prompt.full_block_count > 0:
            raise _ImpossibleError(
                f"{len(prompt.token_ids)} tokens give {prompt.full_block_count} blocks that can be loaded, but the "
                f"prompt is to be unstored: at most {block_size} tokens"
            )
        return
    if prompt.full_block_count < max(1, spec.shared_blocks):
        raise _ImpossibleError(
            f"{len(prompt.token_ids)} tokens give {prompt.full_block_count} blocks that can be loaded, but "
            f"{max(1, spec.shared_blocks)} are needed: at least {max(1, spec.shared_blocks) * block_size + 1} tokens"
        )


def _check_secret_loaded(
    prompt: Prompt, prefix_token_count: int, spec: PromptSpec, tokens: _Tokens, block_size: int
) -> None:
    if not spec.secret or spec.unstored:
        return
    before, secret, _ = _own_text(spec).partition(spec.secret)
    if not secret:
        raise _ImpossibleError(f"the text does not say its secret {spec.secret!r}")
    # What a chat template adds may all come before the message.
    added_token_count = len(prompt.token_ids) - len(tokens.of(spec.text)) if spec.chat else prefix_token_count
    end = added_token_count + len(tokens.of(before + secret))
    loaded_token_count = prompt.full_block_count * block_size
    if tokens.seed and spec.secret not in prompt.text:
        raise _ImpossibleError(f"the seed {tokens.seed} takes the place of the secret: give a shorter one")
    if end > loaded_token_count:
        raise _ImpossibleError(
            f"the secret ends at token {end}, but only the first {loaded_token_count} of "
            f"{len(prompt.token_ids)} tokens are loaded"
        )


def _check_shares_no_more(prompt: Prompt, spec: PromptSpec, built: Mapping[str, Prompt], block_size: int) -> None:
    if not spec.share_with:
        return
    following = slice(spec.shared_blocks * block_size, (spec.shared_blocks + 1) * block_size)
    if prompt.token_ids[following] == built[spec.share_with].token_ids[following]:
        raise _ImpossibleError(f"shares more than {spec.shared_blocks} blocks with {spec.share_with}: change its text")


def _report(specs: Sequence[PromptSpec], problems: Mapping[str, str], block_size: int) -> str:
    lines = [f"  {problems[spec.id]} @ prompts.{spec.id}" for spec in specs if spec.id in problems]
    return "\n".join([f"prompts that cannot be built with blocks of {block_size} tokens:", *lines])
