"""The adaptive policy: follow the expert that would have served the requests best lately.

Every request is shown to all experts (`experts.py`), each a metadata-only cache of this tier's
capacity. The one with the best discounted score leads. What the leader has dropped, the tier gives
up first, in the order in which the leader dropped it; after that, and while plain recency leads,
the least recently used leaf goes. So the tier comes to hold what the leader holds, whatever rule
the leader follows, and a change of leader costs no flush. Choosing among policies by virtual caches
is from Gramacy et al., "Adaptive Caching by Refetching" (NIPS 2002); they refetch to switch.

Knows the tree's nodes by their place and their run of blocks; never a residency.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from kvtier.index.experts import Arc, Frequency, Independent, Recency, TinyLfu
from kvtier.index.ghosts import Ghost, GhostTree
from kvtier.index.policy import Harvest, LeafLru
from kvtier.index.tree import Node

HALF_LIFE = 2000
"""Requests after which a hit counts half in an expert's score."""

_PATIENCE = 20
_MARGIN = 1.01
_REMEMBERED = 2
_SWEPT = 64


Make = Callable[[GhostTree[Node], int, int], Recency[Node]]
Marks = Callable[[Node], bytes]


class Follow:
    """An `EvictionPolicy` led by one of several experts.

    `capacity` is the tier's, in blocks. `marks(node)` are the fingerprints of a live node's blocks.
    `lead_recency` tells that expert 0 is plain recency, so that its advice need not be followed
    block by block.
    """

    def __init__(
        self,
        capacity: int,
        marks: Marks,
        makers: Sequence[Make],
        *,
        lead_recency: bool,
    ) -> None:
        self._base: LeafLru[Node] = LeafLru()
        self._tree: GhostTree[Node] = GhostTree(len(makers), _REMEMBERED * capacity)
        self._tree.on_split = self._split_ghost
        self._experts = [make(self._tree, i, capacity) for i, make in enumerate(makers)]
        self._scores = [0.0] * len(makers)
        self._unit = 1.0
        self._leader = 0
        self._lead_recency = lead_recency
        self._clock = 0
        self._marks = marks
        self._known: dict[Node, Ghost[Node]] = {}
        self._unwanted: OrderedDict[Node, None] = OrderedDict()
        self._sweep: Iterator[Node] = iter(())
        self.num_switches = 0

    @property
    def leader(self) -> int:
        """Which expert is followed now."""
        return self._leader

    def __iter__(self) -> Iterator[Node]:
        return iter(self._base)

    def added(self, node: Node) -> None:
        self._base.added(node)

    def removed(self, node: Node) -> None:
        self._base.removed(node)
        self._known.pop(node, None)
        self._unwanted.pop(node, None)

    def split(self, upper: Node, lower: Node) -> None:
        self._base.split(upper, lower)

    def touched(self, nodes: Iterable[Node]) -> None:
        path = list(nodes)
        self._base.touched(path)
        if self._follows and path:
            self._judge(path)

    def cold(self, nodes: Iterable[Node]) -> None:
        self._base.cold(nodes)

    def requested(self, marks: bytes) -> None:
        if not marks:
            return
        self._clock += 1
        path, known = self._tree.path(marks, self._clock)
        self._unit *= 2 ** (1 / HALF_LIFE)
        for i, expert in enumerate(self._experts):
            self._scores[i] += self._unit * expert.request(path, known, self._clock)
            if i != self._leader or not self._follows:
                expert.dropped.clear()
        for ghost in self._tree.forget():
            for expert in self._experts:
                expert.forgotten(ghost)
        self._hear()
        if self._clock % _PATIENCE == 0:
            self._elect()

    def offer(self, harvest: Harvest[Node]) -> None:
        if self._follows:
            for node in self._unwanted:
                if not harvest.missing:
                    return
                harvest.offer(node, max(0, self._wanted_depth(node) - node.start))
        self._base.offer(harvest)

    # ---- inside ----------------------------------------------------------------------------------

    @property
    def _follows(self) -> bool:
        """Whether anybody but plain recency leads."""
        return self._leader > 0 or not self._lead_recency

    def _elect(self) -> None:
        scores = self._scores
        best = max(range(len(scores)), key=scores.__getitem__)
        if best != self._leader and scores[best] > _MARGIN * scores[self._leader]:
            self._leader = best
            self.num_switches += 1
            self._unwanted.clear()
            self._sweep = iter(list(self._base)) if self._follows else iter(())
        if self._unit > 1e100:
            self._scores = [score / self._unit for score in scores]
            self._unit = 1.0

    def _hear(self) -> None:
        """Note what the leader dropped, and go on with the review that a new leader asks for."""
        if not self._follows:
            return
        dropped = self._experts[self._leader].dropped
        for ghost in dropped:
            node = ghost.live
            if node is not None and node in self._known:
                self._place(node)
        dropped.clear()
        for node in islice(self._sweep, _SWEPT):
            if node in self._base:  # it may have left since the review began
                self._find(node)
                self._place(node)

    def _judge(self, path: Sequence[Node]) -> None:
        """Blocks of a path just used, deepest first: wanted by the leader or not."""
        for node in reversed(path):
            if node not in self._known:
                self._find(node)
        for node in path:
            self._place(node)

    def _place(self, node: Node) -> None:
        if self._wanted_depth(node) < node.start + len(node.ids):
            self._unwanted[node] = None
        else:
            self._unwanted.pop(node, None)

    def _wanted_depth(self, node: Node) -> int:
        """Blocks from the root that should stay; no less than the node's end if all of it should.

        What no request asked for yet (a sequence still growing) stays as long as what it hangs
        from.
        """
        ghost = self._known.get(node)
        if ghost is None or ghost.parent is None:
            return node.start if ghost is not None else node.start + len(node.ids)
        depth = ghost.depth_held(self._leader)
        return depth if depth < ghost.end else max(depth, node.start + len(node.ids))

    def _find(self, node: Node) -> None:
        """Tie a live node to the ghost of its last block that a request asked for."""
        runs: list[bytes] = []
        above: Node | None = node
        while above is not None and above.parent is not None:
            runs.append(self._marks(above))
            above = above.parent
        ghost, found = self._tree.find(self._tree.root, b"".join(reversed(runs)))
        self._known[node] = ghost
        for each in reversed(found):
            if each.end <= node.start:
                break
            each.live = node

    def _split_ghost(self, upper: Ghost[Node], lower: Ghost[Node]) -> None:
        for expert in self._experts:
            expert.split(upper, lower)


def arc(capacity: int, marks: Marks) -> Follow:
    """ARC over leaves."""
    return Follow(capacity, marks, [Arc], lead_recency=False)


def adaptive(capacity: int, marks: Marks) -> Follow:
    """The best of recency, ARC, touches, independent touches and TinyLFU, chosen online."""

    def frequency(tree: GhostTree[Node], number: int, capacity: int) -> Recency[Node]:
        return Frequency(tree, number, capacity, weight=1.0, most=4)

    def independent(tree: GhostTree[Node], number: int, capacity: int) -> Recency[Node]:
        return Independent(tree, number, capacity, weight=4.0, most=16)

    makers: list[Make] = [Recency, Arc, frequency, independent, TinyLfu]
    return Follow(capacity, marks, makers, lead_recency=True)
