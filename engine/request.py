"""One request on its way through the engine, and what comes back of it.

Holds state; decides nothing. The scheduler moves it on, the runner reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from kvtier.engine.sampling import Sampler, SamplingParams
from kvtier.index.words import TierId, Tokens
from kvtier.tiers.lease import Lease, Ticket


class State(StrEnum):
    """WAITING -> LOADING -> RUNNING -> FINISHED; preemption leads back to WAITING."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class Completion:
    """What one prompt led to.

    `cached_tokens` of the prompt came from the cache; `hit_tokens` says from which tiers. `ttft_s`:
    seconds from submission to the first token (for a prefill, to the end of it). `finish_reason`:
    "stop" (an end id, which is not part of `token_ids`), "length", or "prefilled". `text` is empty
    where no tokenizer was asked for.
    """

    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    cached_tokens: int
    hit_tokens: Mapping[TierId, int]
    ttft_s: float
    total_s: float
    finish_reason: str


@dataclass(eq=False)
class Request:
    """`tokens` is the prompt and, behind it, what was generated so far.

    `computed`: leading tokens whose K and V stand in the lease's blocks. `sampling` None asks for
    the prompt's K and V only. Times are the cache's clock, in seconds.
    `asked`: the cache has heard of this request, and counts it no more.
    """

    id: int
    namespace: bytes
    prompt: Tokens
    sampling: SamplingParams | None
    max_tokens: int
    arrived: float
    state: State = State.WAITING
    computed: int = 0
    lease: Lease | None = None
    asked: bool = False
    prefetch: Ticket | None = None
    load_until: float = 0.0
    stalled_at: float | None = None
    cached_tokens: int | None = None
    hit_tokens: Mapping[TierId, int] = field(default_factory=dict)
    first_token_at: float | None = None
    finished_at: float = 0.0
    finish_reason: str = ""

    def __post_init__(self) -> None:
        self._buffer = np.empty(len(self.prompt) + self.max_tokens, np.int32)
        self._buffer[: len(self.prompt)] = self.prompt
        self._length = len(self.prompt)
        self.sampler = Sampler(self.sampling) if self.sampling else None

    @property
    def tokens(self) -> Tokens:
        return self._buffer[: self._length]

    @property
    def generated(self) -> Tokens:
        return self._buffer[len(self.prompt) : self._length]

    @property
    def reach(self) -> int:
        """Positions this request may come to have in the pool."""
        return len(self._buffer)

    @property
    def pending(self) -> int:
        """Tokens whose K and V are still to be computed."""
        return self._length - self.computed

    @property
    def generating(self) -> bool:
        """Whether the next launch computes its last token and picks another."""
        return self.pending == 1

    @property
    def cache_limit(self) -> int:
        """Tokens the cache may supply: one must be computed if logits are wanted."""
        return self._length if self.sampler is None else self._length - 1

    def append(self, token: int) -> None:
        self._buffer[self._length] = token
        self._length += 1

    def completion(self, text: str = "") -> Completion:
        """The outcome. Only of a finished request."""
        first = self.finished_at if self.first_token_at is None else self.first_token_at
        return Completion(
            tuple(self.generated.tolist()),
            text,
            len(self.prompt),
            self.cached_tokens or 0,
            self.hit_tokens,
            first - self.arrived,
            self.finished_at - self.arrived,
            self.finish_reason,
        )
