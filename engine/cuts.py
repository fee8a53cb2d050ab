"""How a request's tokens are cut into launches, and which of them others may find in the cache.

Freely, or in exact mode always at the same places. Decides nothing of the queue or the cache.
"""

from dataclasses import dataclass
from typing import Protocol

from kvtier.engine.request import Request


class Cuts(Protocol):
    """What the scheduler asks."""

    @property
    def least(self) -> int:
        """Rows of budget without which no prompt goes on."""
        ...

    def next(self, request: Request, budget: int) -> tuple[int, int]:
        """How many tokens to compute next, and the rows that takes; 0 and 0 if they do not fit."""
        ...

    def is_decoding(self, request: Request) -> bool:
        """Whether it is past its prompt, so that somebody waits for its next token."""
        ...

    def shared(self, request: Request, tokens: int) -> int:
        """How many of its first `tokens` others may find once computed, and it of others'."""
        ...


@dataclass(frozen=True)
class FreeCuts:
    """Launches take what the budget leaves; every whole block is shared, whoever computed it."""

    block_size: int
    least: int = 1

    def next(self, request: Request, budget: int) -> tuple[int, int]:
        count = max(min(request.pending, budget), 0)
        return count, count

    def is_decoding(self, request: Request) -> bool:
        return request.generating

    def shared(self, request: Request, tokens: int) -> int:
        return tokens // self.block_size * self.block_size


@dataclass(frozen=True)
class ChunkCuts:
    """Exact mode: a token is computed among the same neighbours in a launch of the same shape,
    whatever was found in the cache, whoever runs beside it, and however often it is computed.

        0 ........ chunk ........ 2 chunk ..... prompt's end ................ tokens
        |  a launch  |  a launch  |  one padded  |  one row of a launch each  |
        |   shared   |   shared   |  private     |  private                   |

    What was generated before a preemption is generated again: its rows are run one after another
    as they were the first time, with the tokens that were picked then.
    """

    chunk: int

    @property
    def least(self) -> int:
        return self.chunk

    def next(self, request: Request, budget: int) -> tuple[int, int]:
        rest = len(request.prompt) - request.computed
        if rest <= 0:
            return (1, 1) if request.pending and budget >= 1 else (0, 0)
        return (min(rest, self.chunk), self.chunk) if budget >= self.chunk else (0, 0)

    def is_decoding(self, request: Request) -> bool:
        return request.computed >= len(request.prompt)

    def shared(self, request: Request, tokens: int) -> int:
        return min(tokens, len(request.prompt)) // self.chunk * self.chunk
