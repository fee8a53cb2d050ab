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

from kvtier.index.experts import Arc, Frequency, Independent, TinyLfu
from kvtier.index.ghosts import ROOT, Ghost, GhostTree
from kvtier.index.policy import Harvest, LeafLru
from kvtier.index.recency import Recency
from kvtier.index.ties import Ties
from kvtier.index.tree import Node

HALF_LIFE = 2000
"""Requests after which a hit counts half in an expert's score."""

_PATIENCE = 20
_MARGIN = 1.01
_REMEMBERED = 2
_SWEPT = 64


Make = Callable[[GhostTree, int], Recency]
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
        self.remembered = _REMEMBERED * capacity
        self.num_switches = 0
        self._capacity = capacity
        self._makers = tuple(makers)
        self._base: LeafLru[Node] = LeafLru()
        self._scores = [0.0] * len(makers)
        self._unit = 1.0
        self._leader = 0
        self._lead_recency = lead_recency
        self._clock = 0
        self._marks = marks
        self._unwanted: OrderedDict[Node, None] = OrderedDict()
        self._sweep: Iterator[Node] = iter(())
        self.watch(GhostTree(self.remembered))

    def watch(self, tree: GhostTree) -> None:
        """Let the experts learn from this tree, which remembers `remembered` blocks at least, in
        place of one of their own. Before the first request."""
        self._tree = tree
        self._ties = Ties(tree)
        self._experts = [make(tree, self._capacity) for make in self._makers]

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
        self._ties.removed(node)
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

    def show(self, path: Sequence[Ghost], known: int, clock: int) -> None:
        """A request for this path of ghosts, of which `known` blocks were seen before."""
        self._clock = clock
        self._unit *= 2 ** (1 / HALF_LIFE)
        for i, expert in enumerate(self._experts):
            self._scores[i] += self._unit * expert.request(path, known, clock)
            if i != self._leader or not self._follows:
                expert.dropped.clear()

    def adapt(self) -> None:
        """Draw the conclusions from the last request, once the tree has forgotten what it would."""
        self._hear()
        self._ties.clear()
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
            node = self._ties.node(ghost)
            if node is not None:
                self._place(node)
        dropped.clear()
        for node in islice(self._sweep, _SWEPT):
            if node in self._base:  # it may have left since the review began
                self._find(node)
                self._place(node)

    def _judge(self, path: Sequence[Node]) -> None:
        """Blocks of a path just used, deepest first: wanted by the leader or not."""
        for node in reversed(path):
            if node not in self._ties:
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
        end = node.start + len(node.ids)
        if node not in self._ties:
            return end
        ghost = self._ties.ghost(node)
        if ghost == ROOT:
            return node.start
        depth = self._experts[self._leader].depth_held(ghost)
        return depth if depth < self._tree.end(ghost) else max(depth, end)

    def _find(self, node: Node) -> None:
        """Tie a live node to the ghost of its last block that a request asked for."""
        runs: list[bytes] = []
        above: Node | None = node
        while above is not None and above.parent is not None:
            runs.append(self._marks(above))
            above = above.parent
        self._ties.tie(node, self._tree.find(b"".join(reversed(runs))))


def arc(capacity: int, marks: Marks) -> Follow:
    """ARC over leaves."""
    return Follow(capacity, marks, [Arc], lead_recency=False)


def adaptive(capacity: int, marks: Marks) -> Follow:
    """The best of recency, ARC, touches, independent touches and TinyLFU, chosen online."""

    def frequency(tree: GhostTree, capacity: int) -> Recency:
        return Frequency(tree, capacity, weight=1.0, most=4)

    def independent(tree: GhostTree, capacity: int) -> Recency:
        return Independent(tree, capacity, weight=4.0, most=16)

    makers: list[Make] = [Recency, Arc, frequency, independent, TinyLfu]
    return Follow(capacity, marks, makers, lead_recency=True)
