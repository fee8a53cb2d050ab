"""Prewarming through our own engine: the `Target` of a job is an `LLM` over a store."""

from kvtier.engine.llm import LLM
from kvtier.index.words import Tokens
from kvtier.tools.errors import BadDocument
from kvtier.tools.prompt import document_prefix

# A flush that takes longer has a drive that hangs; the document counts as refused.
FLUSH_TIMEOUT_S = 600.0


class EngineTarget:
    """`capacity_bytes`: what the store may hold, None where a sidecar decides it."""

    def __init__(self, llm: LLM, capacity_bytes: int | None) -> None:
        self._llm = llm
        self.capacity_bytes = capacity_bytes
        self.block_size = llm.layout.block_size
        self.block_bytes = llm.layout.nbytes
        self.namespace = llm.namespace().digest

    def prefix(self, text: str) -> Tokens:
        """Raises `BadDocument` if the model could not take it with a question behind it."""
        tokens = document_prefix(self._llm.chat_prompt, text, self._llm.share_tokens)
        longest = self._llm.config.max_positions
        if len(tokens) >= longest:
            raise BadDocument(f"{len(tokens)} tokens, the model allows {longest}; split it")
        return tokens

    def held(self, tokens: Tokens) -> int:
        """A flush of what memory lacks finds out what is durable, and writes what is not yet."""
        return self._llm.flush(tokens, timeout_s=FLUSH_TIMEOUT_S).blocks

    def prefill(self, tokens: Tokens) -> int:
        done = self._llm.prefill(tokens)
        return done.prompt_tokens - done.cached_tokens

    def flush(self, tokens: Tokens) -> int:
        return self._llm.flush(tokens, timeout_s=FLUSH_TIMEOUT_S).blocks
