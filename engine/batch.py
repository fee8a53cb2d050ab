"""What one launch of the model computes: rows of several sequences, and where their K and V go.

Values only. Knows slots and positions; not leases, tiers or requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtier.index.words import Slots, Tokens


@dataclass(frozen=True, eq=False)
class Span:
    """One sequence's share of a launch: `len(tokens)` rows at positions `start` and on.

    `slots`: pool slots of positions 0 to `start + len(tokens) - 1`, in order; K and V of the
    positions before `start` stand there already. `reach`: positions this sequence may come to have.
    `wants_logits`: the last row's logits are asked for.
    """

    sequence: int
    tokens: Tokens
    start: int
    slots: Slots
    reach: int
    wants_logits: bool

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def context(self) -> int:
        """Positions present once this launch has written its own."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Padding:
    """A launch has `rows` rows, whatever it computes, and `wanted` rows get logits if any does."""

    rows: int
    wanted: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Spans laid end to end: row `i` of every tensor is the same token.

    tokens, positions, slot_mapping: int64 `[rows]`, the last `slot * block_size + offset`.
    wanted: int64, rows whose logits are asked for, in the order of the spans. Spans of one row
    that continue a sequence (decoding) come first. Behind them may come padding: rows that nobody
    asked for, token 0 at position 0, of slot -1, which is not stored; and the first of the wanted
    rows again and again.
    """

    spans: tuple[Span, ...]
    tokens: Tensor
    positions: Tensor
    slot_mapping: Tensor
    wanted: Tensor
    num_decode: int

    @property
    def rows(self) -> int:
        return len(self.tokens)


def lay_out(
    spans: Sequence[Span], block_size: int, device: str = "cpu", padding: Padding | None = None
) -> Batch:
    """Put decoding spans first, then the others, and compute every row's place.

    Raises ValueError if there is more than the `padding` has room for.
    """
    decode = [span for span in spans if span.count == 1 and span.start > 0]
    ordered = (*decode, *(span for span in spans if span.count != 1 or span.start == 0))
    positions = [np.arange(span.start, span.context) for span in ordered]
    places = [
        span.slots[where // block_size].astype(np.int64) * block_size + where % block_size
        for span, where in zip(ordered, positions, strict=True)
    ]
    ends = np.cumsum([span.count for span in ordered])
    wanted = [end - 1 for span, end in zip(ordered, ends, strict=True) if span.wants_logits]
    spare = 0
    if padding is not None:
        spare = padding.rows - int(ends[-1])
        if spare < 0 or len(wanted) > padding.wanted:
            raise ValueError(f"spans: {ends[-1]} rows, {len(wanted)} wanted, exceed {padding}")
        wanted += wanted[:1] * (padding.wanted - len(wanted))

    def rows(
        parts: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.integer]]], filler: int
    ) -> Tensor:
        filled = np.concatenate([*parts, np.full(spare, filler)])
        return torch.from_numpy(filled.astype(np.int64)).to(device)

    return Batch(
        ordered,
        rows([span.tokens for span in ordered], 0),
        rows(positions, 0),
        rows(places, -1),
        torch.tensor(wanted, dtype=torch.int64, device=device),
        len(decode),
    )
