"""Text to token ids and back, by the tokenizer that lies beside the weights.

Wraps transformers' `AutoTokenizer`, loaded from the directory alone (no network, no code from the
directory). Knows no model.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kvtier.engine.errors import BadModelFile, BadPrompt, ModelFileMissing
from kvtier.index.words import Tokens, as_tokens

Message = Mapping[str, str]
"""One turn of a chat: `role` and `content`."""

FILES = ("tokenizer.json", "tokenizer.model")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def has_tokenizer(directory: Path) -> bool:
    """Whether a tokenizer lies in a model directory."""
    return any((directory / name).is_file() for name in FILES)


class Tokenizer:
    def __init__(self, directory: Path) -> None:
        """Raises `ModelFileMissing` or `BadModelFile`."""
        if not has_tokenizer(directory):
            raise ModelFileMissing(
                f"{directory}: {FILES[0]} is missing; pass token ids, or a directory with it"
            )
        try:
            self._inner: Any = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            line = str(error).strip().splitlines()[:1]
            raise BadModelFile(
                f"{directory}: tokenizer: cannot be loaded ({''.join(line)}); copy the model again"
            ) from error

    @property
    def inner(self) -> Any:
        """The transformers tokenizer itself, for what this wrapper does not cover."""
        return self._inner

    def encode(self, text: str, *, special: bool = True) -> Tokens:
        """Token ids of `text`; `special` adds what the model expects around a plain text."""
        return as_tokens(self._inner.encode(text, add_special_tokens=special))

    def decode(self, ids: "Sequence[int] | Tokens") -> str:
        """The text of these ids, special tokens left out."""
        text: str = self._inner.decode(as_tokens(ids).tolist(), skip_special_tokens=True)
        return text

    def render_chat(self, messages: Sequence[Message], *, reply: bool = True) -> str:
        """The chat template's text for `messages`; `reply` ends it where an answer begins.

        Raises `BadPrompt` if the model has no chat template.
        """
        if not self._inner.chat_template:
            raise BadPrompt("chat: this model has no chat template; pass plain text or token ids")
        text: str = self._inner.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=reply
        )
        return text

    def encode_chat(self, messages: Sequence[Message]) -> Tokens:
        """Token ids of a rendered chat. The template spells its own special tokens."""
        return self.encode(self.render_chat(messages), special=False)


class TextStream:
    """Turns ids into text as they come, never showing half a character.

    Some tokenizers render an id differently at the start of a text, so each piece is the difference
    between two decodings that both begin at the same earlier id.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._anchor = 0
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._anchor : self._shown])
        after = self._tokenizer.decode(self._ids[self._anchor :])
        if after.endswith(REPLACEMENT) or len(after) <= len(before):
            return ""
        self._anchor, self._shown = self._shown, len(self._ids)
        return after[len(before) :]

    def end(self) -> str:
        """Whatever `push` has held back."""
        before = self._tokenizer.decode(self._ids[self._anchor : self._shown])
        after = self._tokenizer.decode(self._ids[self._anchor :])
        self._anchor = self._shown = len(self._ids)
        return after[len(before) :]
