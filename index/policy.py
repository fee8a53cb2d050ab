"""Eviction order and plans for one column, apart from the tree: state in, plan out.

Leaf-LRU: of the nodes that hold nothing above anybody, the one unused for longest goes first, and
it goes block by block from its tail. Knows nodes only as hashable things; what hangs below what,
and what may go, it asks a `ColumnView`. Changes no residency.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np

from kvtier.index.words import BlockIds

N = TypeVar("N", bound=Hashable)


class ColumnView(Protocol[N]):
    """What a plan may ask about one column. Answers describe now; a plan changes nothing."""

    def parent(self, node: N) -> N | None:
        """The node above, None above a first node."""
        ...

    def twigs(self, node: N) -> int:
        """How many children lead to something the column holds."""
        ...

    def holds(self, node: N) -> bool:
        """Whether the column holds any of the node's own blocks."""
        ...

    def tail(self, node: N, n: int, keep: int = 0) -> tuple[BlockIds, bool]:
        """Up to `n` evictable blocks from the node's tail, deepest first; stops at the first block
        that must stay, and before the node's first `keep` blocks. The flag: without these, the
        column holds none of the node's blocks."""
        ...

    def relent(self) -> bool:
        """From now on let go of what was only to be passed over; False if there was nothing."""
        ...


class EvictionPolicy(Protocol[N]):
    """The order in which one column gives up its nodes.

    The tree tells it of every node that starts or stops holding blocks in the column. `touched`
    names a path deepest first, up to the root, of nodes the policy knows.
    """

    def added(self, node: N) -> None:
        """The node holds its first block. It counts as just used."""
        ...

    def removed(self, node: N) -> None:
        """The node holds no block any more."""
        ...

    def split(self, upper: N, lower: N) -> None:
        """`upper` is new and took the head of `lower`, which the policy knows. A touch of the path
        to `upper` follows."""
        ...

    def touched(self, nodes: Iterable[N]) -> None:
        """These nodes were just used."""
        ...

    def cold(self, nodes: Iterable[N]) -> None:
        """These nodes, deepest first, should go before all others; nothing else hangs below."""
        ...

    def offer(self, harvest: "Harvest[N]") -> None:
        """Offer nodes in the order in which they should go, until the harvest is full."""
        ...

    def __iter__(self) -> Iterator[N]:
        """Every node it knows, once, the first to go first."""
        ...


class LeafLru(Generic[N]):
    """Least recently used leaf first, in constant time for a touched node and an evicted leaf.

    One ordered dictionary holds *all* nodes of the column, and a path is touched deepest first, so
    every node is older than its ancestors and the head is always the least recently used leaf: no
    heap, no separate set of leaves, no cost that grows with their number. Nodes at the head that
    may not go (pinned, or with moves in flight below) are passed over.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[N, None] = OrderedDict()

    def __iter__(self) -> Iterator[N]:
        return iter(self._order)

    def __contains__(self, node: object) -> bool:
        return node in self._order

    def added(self, node: N) -> None:
        self._order[node] = None

    def removed(self, node: N) -> None:
        del self._order[node]

    def split(self, upper: N, lower: N) -> None:
        self._order[upper] = None

    def touched(self, nodes: Iterable[N]) -> None:
        move = self._order.move_to_end
        for node in nodes:
            move(node)

    def cold(self, nodes: Iterable[N]) -> None:
        for node in reversed(list(nodes)):
            self._order.move_to_end(node, last=False)

    def offer(self, harvest: "Harvest[N]") -> None:
        for node in self._order:
            if not harvest.missing:
                return
            harvest.offer(node)


class Harvest(Generic[N]):
    """The blocks of one plan while it is made. Offer nodes in the order in which they should go.

    A node's tail may go once all that hung below it is in the plan.
    """

    def __init__(self, n: int, view: ColumnView[N]) -> None:
        self.missing = n
        self._view = view
        self._parts: list[BlockIds] = []
        self._taken: dict[N, int] = {}
        self._gone: dict[N, int] = {}  # children that would lead to nothing after this plan

    @property
    def blocks(self) -> BlockIds:
        """What was taken, in order."""
        return np.concatenate(self._parts) if self._parts else np.empty(0, np.int32)

    def relent(self, least: int) -> bool:
        """Whether to offer all nodes again, for `least` blocks in all: fewer were taken, and more
        may go now."""
        self.missing = max(0, least - sum(map(len, self._parts)))
        return self.missing > 0 and self._view.relent()

    def offer(self, node: N, keep: int = 0) -> None:
        """Take what may go from the node's tail, if all that hung below it is taken already."""
        view, taken = self._view, self._taken.get(node, 0)
        if view.twigs(node) != self._gone.get(node, 0):
            return
        blocks, emptied = view.tail(node, taken + self.missing, keep)
        blocks = blocks[taken:]
        if not len(blocks):
            return
        self._parts.append(blocks)
        self._taken[node] = taken + len(blocks)
        self.missing -= len(blocks)
        above = view.parent(node) if emptied else None
        while above is not None:
            self._gone[above] = self._gone.get(above, 0) + 1
            if view.holds(above) or self._gone[above] < view.twigs(above):
                break
            above = view.parent(above)
