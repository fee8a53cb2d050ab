"""How a document and a question become a prompt, the same in prewarming as in serving.

The document comes first and the question last, inside one user message, so that every question
about one document shares the tokens of the document. Knows no tier and no model.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvtier.index.words import Tokens

# Two questions that share no first character, so that no tokenizer merges the same thing across
# the seam between the fixed text and both of them.
_PROBES = ("What is said here?", "7 points, please.")


ChatPrompt = Callable[[Sequence[Mapping[str, str]]], Tokens]
"""Renders the chat template around messages, with the generation prompt, as token ids."""


def full_prompt(chat: ChatPrompt, document: str | None, question: str) -> Tokens:
    """Token ids of the chat prompt that asks `question` about `document` (None: no document)."""
    text = question if document is None else f"{document.strip()}\n\nQuestion: {question}"
    return chat([{"role": "user", "content": text}])


def document_prefix(chat: ChatPrompt, document: str, block_size: int) -> Tokens:
    """The tokens that all questions about `document` start with, cut to whole blocks.

    The chat template is rendered around the document with two different questions; what both token
    sequences share from the start does not depend on the question. May be empty.
    """
    first, second = (full_prompt(chat, document, probe) for probe in _PROBES)
    shared = common_prefix(first, second)
    return first[: shared - shared % block_size]


def common_prefix(first: Tokens, second: Tokens) -> int:
    """How many leading tokens agree."""
    n = min(len(first), len(second))
    differ = np.flatnonzero(first[:n] != second[:n])
    return int(differ[0]) if len(differ) else n
