"""Which sequences of a launch stand on the same slots from position 0 on. Knows slots, no requests.

Found anew for each launch from the block tables, which are on the host anyway: nothing is kept, so
nothing can be stale.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier.index.words import Slots

Group = tuple[list[int], int]
"""Sequences by their row, and how many units of positions they share."""


@dataclass(eq=False)
class _Open:
    """Sorted sequences from `first` on that share `height` units, and the best groups so far."""

    height: int
    first: int
    groups: list[Group] = field(default_factory=list)
    saved: int = 0


def common_prefixes(tables: Sequence[Slots], block_size: int, unit: int) -> list[Group]:
    """Disjoint groups of two or more sequences, with what each shares.

    `tables[i]` int32: sequence i's slots from position 0 on. A group of n that shares u units of
    `unit` positions saves (n - 1) u. In sorted order every set that shares a prefix is a run; the
    runs form a tree (the longest-common-prefix intervals of Abouelhoda et al., 2004). Each of its
    nodes is one group or keeps its children's, whichever saves more; whom those leave over goes
    alone. So no single group saves more than the answer.
    """
    order = sorted(range(len(tables)), key=lambda row: tables[row].tobytes())
    heights = [
        _common(tables[one], tables[two]) * block_size // unit
        for one, two in zip(order, order[1:], strict=False)
    ]
    stack: list[_Open] = []
    for last, height in enumerate([*heights, 0] if order else []):
        closed = _Open(height, last)
        while stack and stack[-1].height > height:
            top = stack.pop()
            closed.groups = top.groups + closed.groups
            closed.saved += top.saved
            whole = top.height * (last - top.first)
            if whole >= closed.saved:
                closed.groups = [(sorted(order[top.first : last + 1]), top.height)]
                closed.saved = whole
            closed.first = top.first
        if stack and stack[-1].height == height:
            stack[-1].groups += closed.groups
            stack[-1].saved += closed.saved
        else:
            stack.append(closed)
    return stack[0].groups if stack else []


def _common(one: Slots, two: Slots) -> int:
    """Leading entries in which two tables agree."""
    length = min(len(one), len(two))
    differ = np.flatnonzero(one[:length] != two[:length])
    return int(differ[0]) if len(differ) else length
