"""The demo's documents: Python's own reference topics, joined to about 1k, 2k and 4k tokens.

Every Python ships the text (`pydoc_data.topics`), so nothing is downloaded. The text differs a
little between Python versions; within one it is always the same.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics


@dataclass(frozen=True)
class DemoDocument:
    """A text of at most `target_tokens`, and a question about how it begins."""

    name: str
    text: str
    question: str


@dataclass(frozen=True)
class _Recipe:
    name: str
    target_tokens: int
    first_topic: str
    question: str


_RECIPES = (
    _Recipe("1k", 1024, "raise", "What happens if raise is used with no expression?"),
    _Recipe("2k", 2048, "try", "What does the try statement specify?"),
    _Recipe("4k", 4096, "comparisons", "Which values do comparisons yield?"),
)


def demo_documents(count_tokens: Callable[[str], int]) -> list[DemoDocument]:
    """The three documents, whole paragraphs each, as long as their targets allow."""
    return [
        DemoDocument(
            recipe.name,
            _fill(recipe.first_topic, recipe.target_tokens, count_tokens),
            recipe.question,
        )
        for recipe in _RECIPES
    ]


def _fill(first_topic: str, target_tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Paragraphs of `first_topic`, then of the topics after it by name, up to the target."""
    kept: list[str] = []
    tokens = 0
    for paragraph in _paragraphs(first_topic):
        tokens += count_tokens(f"{paragraph}\n\n")
        if tokens > target_tokens:
            break
        kept.append(paragraph)
    return "\n\n".join(kept)


def _paragraphs(first_topic: str) -> Iterator[str]:
    names = sorted(topics)
    start = names.index(first_topic)
    for name in names[start:] + names[:start]:
        for paragraph in topics[name].strip().split("\n\n"):
            if paragraph.strip():
                yield paragraph.rstrip()
