"""What is on its way: the records a ledger keeps of moves, and runs of blocks cut from masks.

Values and arithmetic only; nothing here starts, ends or waits for anything.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.index.words import BlockIds, Slots, TierId
from kvtier.tiers.contracts import LANDED, Answer, Flight

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Terms:
    """How somebody wants blocks: until when (the cache's clock), and whether he waits for them.

    Each is one's own: who says it, says by it later that he wants them no more.
    """

    deadline: float | None = None
    background: bool = False


@dataclass(frozen=True)
class Move:
    """Blocks `ids` being copied from level `src` to level `dst`.

    `slots` are the destination's (None when `dst` is the store). `arrived(position, tier)` tells
    whoever asked where a block really came from. `background`: nobody waits for it. `wanted`: the
    terms of all who want what comes up.
    """

    flight: Flight
    ids: BlockIds
    src: int
    dst: int
    slots: Slots | None
    arrived: Callable[[int, TierId | None], None] | None = None
    background: bool = False
    wanted: set[Terms] = field(default_factory=set)

    def agree(self) -> None:
        """Hold to the latest deadline of all who want it, and hurry if one of them waits."""
        deadlines = [terms.deadline for terms in self.wanted]
        limits = [deadline for deadline in deadlines if deadline is not None]
        deadline = max(limits) if limits and len(limits) == len(deadlines) else None
        self.flight.agree(deadline, background=all(terms.background for terms in self.wanted))


@dataclass
class TailCopy:
    """Private slots `src` of the top pool being copied to `dst`, for lease `owner`.

    `settled`: the outcome has been applied; until then neither side's slots are given back.
    """

    flight: Flight
    src: Slots
    dst: Slots
    owner: int
    settled: bool = False

    @property
    def failed(self) -> bool:
        """True if it ended and not everything arrived."""
        return self.settled and bool((self.flight.status != LANDED).any())


@dataclass(frozen=True)
class Doubt:
    """The store refused `refused` (from level `col`) though hints promise what is `above` them.

    It may have lost some of that meanwhile: it has been asked. All are pinned in `col`.
    """

    answer: Answer
    above: BlockIds
    refused: BlockIds
    col: int


def mask_runs(mask: Mask) -> list[tuple[int, int]]:
    """`(start, stop)` of each maximal run of true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def branch_runs(ids: BlockIds, wanted: Mask) -> list[BlockIds]:
    """The maximal runs of `ids` (one branch, root first) where `wanted` holds."""
    return [ids[start:stop] for start, stop in mask_runs(wanted)]
