"""The layout of prompts: what is prewarmed is what every question starts with."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.index.words import Tokens, as_tokens
from kvtier.tools.prompt import common_prefix, document_prefix, full_prompt
from tests.tiny_model import make_tiny_tokenizer


class Tiny:
    """The tiny tokenizer behind the face that prompts need."""

    def __init__(self) -> None:
        self._tokenizer = make_tiny_tokenizer()

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> Tokens:
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        return as_tokens(self._tokenizer.encode(str(text), add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny()


@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("question", ["Who?", "the end\n\n", "9 lives?", "\nthin"])
def test_every_question_starts_with_the_prewarmed_blocks(
    tiny: Tiny, block_size: int, question: str
) -> None:
    document = "In the beginning was the thing.\n\nThen came the others.\n"
    prefix = document_prefix(tiny.chat_prompt, document, block_size)
    prompt = full_prompt(tiny.chat_prompt, document, question)
    assert len(prefix) % block_size == 0
    # A question may merge with the seam before it; never more than its last block is lost to that.
    assert common_prefix(prefix, prompt) >= len(prefix) - block_size
    assert len(prefix) >= len(full_prompt(tiny.chat_prompt, document, "")) - 30 - block_size


def test_the_question_stands_after_the_document(tiny: Tiny) -> None:
    text = tiny.decode(full_prompt(tiny.chat_prompt, "  The facts.  ", "What are they?").tolist())
    assert "The facts.\n\nQuestion: What are they?" in text


def test_a_prompt_without_a_document_is_the_question_alone(tiny: Tiny) -> None:
    text = tiny.decode(full_prompt(tiny.chat_prompt, None, "Hello there").tolist())
    assert "Hello there" in text and "Question" not in text


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_the_common_prefix_is_the_longest_one(first: list[int], second: list[int]) -> None:
    n = common_prefix(as_tokens(first), as_tokens(second))
    assert first[:n] == second[:n]
    assert n == min(len(first), len(second)) or first[n] != second[n]


def test_a_document_shorter_than_a_block_has_no_prefix(tiny: Tiny) -> None:
    prefix = document_prefix(tiny.chat_prompt, "x", 512)
    assert prefix.dtype == np.int32 and len(prefix) == 0
