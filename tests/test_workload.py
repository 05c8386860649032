"""Prompts have exactly the tokens and blocks that a matrix file asks for; here a token is a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.planning.workload import build_prompts, full_block_count
from harness.records import PromptSpec

BLOCK_SIZE = 4
TEXT = "The word is owl.\nA long story.\nThe word is"
SECRET = PromptSpec("harbour", TEXT, 60, "owl")


def characters(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


class Characters:
    """A tokenizer whose tokens are characters; `opening` comes before every text, a chat is put in brackets."""

    def __init__(self, opening: tuple[int, ...] = ()) -> None:
        self._opening = opening

    def tokenize(self, text: str) -> tuple[int, ...]:
        return self._opening + characters(text)

    def tokenize_chat(self, message: str) -> tuple[int, ...]:
        return characters(f"<{message}>")

    def detokenize(self, token_ids: tuple[int, ...]) -> str:
        return "".join(map(chr, token_ids))


def text_of(*specs: PromptSpec) -> str:
    return build_prompts(specs, Characters(), BLOCK_SIZE)[specs[-1].id].text


def problems(*specs: PromptSpec) -> list[str]:
    with pytest.raises(UsageError) as caught:
        build_prompts(specs, Characters(), BLOCK_SIZE)
    return str(caught.value).splitlines()[1:]


def test_text_without_a_count_is_used_as_it_is() -> None:
    prompt = build_prompts([PromptSpec("plain", "Hi Hi Hi Bob")], Characters(), BLOCK_SIZE)["plain"]
    assert prompt.token_ids == characters("Hi Hi Hi Bob")
    assert prompt.text == "Hi Hi Hi Bob"
    assert prompt.full_block_count == 2


@pytest.mark.parametrize(("token_count", "blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (0, 0)])
def test_the_last_token_is_never_loaded(token_count: int, blocks: int) -> None:
    assert full_block_count(token_count, BLOCK_SIZE) == blocks


def test_a_story_is_cut_between_secret_and_question() -> None:
    spec = PromptSpec("harbour", TEXT, 36, "owl")
    assert text_of(spec) == "The word is owl.\nA long \nThe word is"


def test_a_story_that_is_too_short_is_repeated() -> None:
    assert text_of(SECRET) == "The word is owl.\nA long story.\nA long story.\nA l\nThe word is"


def test_a_count_that_leaves_no_story_keeps_first_and_last_line() -> None:
    assert text_of(PromptSpec("harbour", TEXT, 28, "owl")) == "The word is owl.\nThe word is"


def test_a_text_of_one_line_is_cut_and_repeated_as_a_whole() -> None:
    assert text_of(PromptSpec("plain", "abc", 10)) == "abcabcabca"


@given(token_count=st.integers(28, 300), block_size=st.integers(1, 12))
def test_counts_are_exact(token_count: int, block_size: int) -> None:
    spec = PromptSpec("harbour", TEXT, token_count, "owl")
    prompt = build_prompts([spec], Characters(), block_size)["harbour"]
    assert len(prompt.token_ids) == token_count
    assert prompt.full_block_count == (token_count - 1) // block_size
    assert prompt.text.startswith("The word is owl.")
    assert prompt.text.endswith("\nThe word is")
    assert prompt.secret == "owl"


@given(shared_blocks=st.integers(1, 14))
def test_exactly_the_shared_blocks_are_equal(shared_blocks: int) -> None:
    sharer = PromptSpec("ferry", "My word: fox.\nNo story.\nMy word:", 120, "fox", "harbour", shared_blocks)
    built = build_prompts([sharer, SECRET], Characters(), BLOCK_SIZE)
    assert list(built) == ["ferry", "harbour"]
    own, other = built["ferry"].token_ids, built["harbour"].token_ids
    border, following = shared_blocks * BLOCK_SIZE, (shared_blocks + 1) * BLOCK_SIZE
    assert len(own) == 120
    assert own[:border] == other[:border]
    assert own[border:following] != other[border:following]
    assert built["ferry"].text[border:].startswith("\nMy word: fox.\nNo story.")


def test_a_text_without_a_count_follows_the_shared_prefix() -> None:
    assert text_of(SECRET, PromptSpec("ferry", "Go.", share_with="harbour", shared_blocks=3)) == "The word is \nGo."


def test_special_tokens_come_once_and_count() -> None:
    ferry = PromptSpec("ferry", "Go.", share_with="harbour", shared_blocks=3)
    built = build_prompts([SECRET, ferry], Characters((1,)), BLOCK_SIZE)
    assert len(built["harbour"].token_ids) == 60
    assert built["harbour"].text.startswith("\x01The word is owl.\nA long")
    assert built["ferry"].text == "\x01The word is\nGo."


@pytest.mark.parametrize(
    ("specs", "problem"),
    [
        (
            [PromptSpec("harbour", TEXT, 27, "owl")],
            "token_count is 27, but at least 28 are needed: 0 before the text, 16 for the first line, 12 for the last",
        ),
        ([PromptSpec("empty", "", 12)], "the text is empty"),
        ([PromptSpec("tiny", "abcd")], "4 tokens give 0 blocks that can be loaded, but 1 are needed: at least 5"),
        (
            [PromptSpec("late", "The word is owl", secret="owl")],
            "the secret ends at token 15, but only the first 12 of 15",
        ),
        ([PromptSpec("mute", "The word is not said", secret="owl")], "the text does not say its secret 'owl'"),
        (
            [SECRET, PromptSpec("ferry", "Go.", 0, "", "harbour", 15)],
            "shares 15 blocks with harbour, of which only 14 can be loaded",
        ),
        (
            [SECRET, PromptSpec("ferry", "Go", 20, "", "harbour", 5)],
            "20 tokens give 4 blocks that can be loaded, but 5",
        ),
        ([SECRET, PromptSpec("ferry", "a\nb\nc", 12, "", "harbour", 3)], "at least 16 are needed: 12 before the text"),
        ([PromptSpec("ferry", "Go", 20, "", "harbour", 5)], "shares blocks with harbour, which could not be built"),
        (
            [PromptSpec("one", "abcd\nefg"), PromptSpec("two", "efghij", share_with="one", shared_blocks=1)],
            "shares more than 1 blocks with one: change its text",
        ),
    ],
    ids=lambda value: value[-1].id if isinstance(value, list) else "",
)
def test_an_impossible_prompt_says_why(specs: list[PromptSpec], problem: str) -> None:
    assert problem in problems(*specs)[-1]
    assert problems(*specs)[-1].endswith(f"@ prompts.{specs[-1].id}")


def test_all_impossible_prompts_are_listed_in_the_order_of_the_file() -> None:
    ferry = PromptSpec("ferry", "Go.", 0, "", "harbour", 99)
    assert [line.split(" @ ")[1] for line in problems(ferry, SECRET, PromptSpec("tiny", "a"))] == [
        "prompts.ferry",
        "prompts.tiny",
    ]


TALK = PromptSpec("talk", "The word is owl. What is it?", secret="owl", chat=True)


def test_a_chat_is_what_the_template_makes_of_the_message() -> None:
    prompt = build_prompts([TALK], Characters(), BLOCK_SIZE)["talk"]
    assert prompt.text == "<The word is owl. What is it?>"
    assert prompt.token_ids == characters(prompt.text)
    assert prompt.message == TALK.text
    assert not prompt.unstored


def test_the_secret_of_a_chat_may_come_after_all_that_the_template_adds() -> None:
    assert problems(PromptSpec("talk", "The word is owl", secret="owl", chat=True)) == [
        "  the secret ends at token 17, but only the first 16 of 17 tokens are loaded @ prompts.talk"
    ]


def test_a_prompt_that_is_to_be_unstored() -> None:
    prompt = build_prompts([PromptSpec("short", "Bob!", unstored=True)], Characters(), BLOCK_SIZE)["short"]
    assert (prompt.full_block_count, prompt.unstored) == (0, True)


def test_an_unstored_prompt_that_has_a_block() -> None:
    assert problems(PromptSpec("short", "Bobby", unstored=True)) == [
        "  5 tokens give 1 blocks that can be loaded, but the prompt is to be unstored: at most 4 tokens "
        "@ prompts.short"
    ]


# The seed.


@pytest.mark.parametrize("seed", [7, 123, 999_999])
@pytest.mark.parametrize("count", [0, 28, 60])
def test_a_seed_takes_the_place_of_the_first_tokens(seed: int, count: int) -> None:
    spec = PromptSpec("harbour", TEXT, count, "owl")
    plain, salted = (build_prompts([spec], Characters(), BLOCK_SIZE, each)["harbour"] for each in (0, seed))
    digits = len(str(seed))
    assert salted.text == str(seed) + plain.text[digits:]
    assert salted.full_block_count == plain.full_block_count


def test_two_seeds_give_two_prompts() -> None:
    seeds = (0, 1, 12, 121, 2, 999_999)
    texts = {build_prompts([SECRET], Characters(), BLOCK_SIZE, seed)["harbour"].token_ids for seed in seeds}
    assert len(texts) == len(seeds)


def test_a_sharer_has_the_salt_of_the_prompt_whose_blocks_it_shares() -> None:
    sharer = PromptSpec("sharer", TEXT, 60, "", "harbour", 3)
    prompts = build_prompts([SECRET, sharer], Characters(), BLOCK_SIZE, 45)
    assert prompts["sharer"].text.startswith("45e word is ")
    assert prompts["sharer"].text[12:].startswith("\nThe word is owl.")


def test_a_prompt_shorter_than_the_salt_keeps_its_length() -> None:
    spec = PromptSpec("short", "Hi Bo")
    assert build_prompts([spec], Characters(), BLOCK_SIZE, 123_456)["short"].text == "12345"


def test_the_salt_comes_after_the_models_own_beginning() -> None:
    prompt = build_prompts([SECRET], Characters((1,)), BLOCK_SIZE, 45)["harbour"]
    assert prompt.token_ids[:4] == (1, ord("4"), ord("5"), ord("e"))


def test_the_salt_of_a_chat_is_in_its_message() -> None:
    prompt = build_prompts([TALK], Characters(), BLOCK_SIZE, 45)["talk"]
    assert prompt.message == "45e word is owl. What is it?"
    assert prompt.text == f"<{prompt.message}>"


def test_a_chat_whose_length_the_seed_changes_is_refused() -> None:
    class Merging(Characters):
        def tokenize_chat(self, message: str) -> tuple[int, ...]:
            return super().tokenize_chat(message.replace("45", "4"))

    with pytest.raises(UsageError, match="with the seed 45 it has 29 tokens and not 30: try another"):
        build_prompts([TALK], Merging(), BLOCK_SIZE, 45)


def test_a_salt_that_hides_the_secret_is_refused() -> None:
    spec = PromptSpec("early", "owl is the word of the day", 0, "owl")
    assert build_prompts([spec], Characters(), BLOCK_SIZE)["early"].secret == "owl"
    with pytest.raises(UsageError, match="the seed 12 takes the place of the secret"):
        build_prompts([spec], Characters(), BLOCK_SIZE, 12)
