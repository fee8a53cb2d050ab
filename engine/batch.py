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


@dataclass(frozen=True, eq=False)
class Batch:
    """Spans laid end to end: row `i` of every tensor is the same token.

    tokens, positions, slot_mapping: int64 `[rows]`, the last `slot * block_size + offset`.
    wanted: int64, rows whose logits are asked for, in the order of the spans. Spans of one row
    that continue a sequence (decoding) come first.
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


def lay_out(spans: Sequence[Span], block_size: int, device: str = "cpu") -> Batch:
    """Put decoding spans first, then the others, and compute every row's place."""
    decode = [span for span in spans if span.count == 1 and span.start > 0]
    ordered = (*decode, *(span for span in spans if span.count != 1 or span.start == 0))
    positions = [np.arange(span.start, span.context) for span in ordered]
    places = [
        span.slots[where // block_size].astype(np.int64) * block_size + where % block_size
        for span, where in zip(ordered, positions, strict=True)
    ]
    ends = np.cumsum([span.count for span in ordered])
    wanted = [end - 1 for span, end in zip(ordered, ends, strict=True) if span.wants_logits]

    def rows(parts: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.integer]]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    return Batch(
        ordered,
        rows([span.tokens for span in ordered]),
        rows(positions),
        rows(places),
        torch.tensor(wanted, dtype=torch.int64, device=device),
        len(decode),
    )
