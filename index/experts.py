"""Eviction rules that run on metadata alone, each over the whole stream of requests.

An expert holds a prefix-closed set of blocks of at most its capacity, and gives up leaves only, as
a tier does. What it would have hit is its score; which blocks it dropped is its advice. Knows the
ghost tree and a request counter for a clock; no live block, no time.

    Recency       least recently used leaf
    Arc           ARC (Megiddo and Modha, FAST 2003), both lists restricted to leaves
    Frequency     recency plus a bonus for touches, counted in eviction lifetimes
    Independent   the same, but only touches by a new branch or a repeated path count
    TinyLfu       recency among what frequency admits (Einziger et al., ACM TOS 2017)
"""

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

from kvtier.index.ghosts import Ghost, GhostTree

L = TypeVar("L")

_AGING = 0.999
_FORGIVEN = 6.0
"""Lifetimes after which the touches of an absent block no longer count."""


class Recency(Generic[L]):
    """Leaf-LRU, and the frame of the other rules.

    `number` is the expert's column in every ghost. `dropped` lists the ghosts that lost blocks
    since it was last emptied. A heap holds every leaf with a rank that is at most its present one;
    the present one is looked up when a leaf comes to the top.
    """

    def __init__(self, tree: GhostTree[L], number: int, capacity: int) -> None:
        self.tree = tree
        self.number = number
        self.capacity = capacity
        self.used = 0
        self.dropped: list[Ghost[L]] = []
        self._clock = 0
        self._serial = count()
        self._heap: list[tuple[float, int, int, Ghost[L]]] = []
        self._queued: set[Ghost[L]] = set()

    def request(self, path: Sequence[Ghost[L]], known: int, clock: int) -> int:
        """A request for exactly this path, of which `known` blocks were seen before. Returns how
        many leading blocks were held."""
        me, self._clock = self.number, clock
        first = len(path) - 1
        while first >= 0 and not path[first].held[me]:
            first -= 1
        hits = path[first].start + path[first].held[me] if first >= 0 else 0
        self._note(path, known, first)
        deepest = path[first] if first >= 0 else None
        for node in path[max(first, 0) :]:
            wanted = len(node) - node.held[me]
            if wanted:
                room = self.capacity - self.used
                if room < wanted:
                    room += self._make_room(wanted - room)
                taken = min(wanted, room)
                if taken > 0:
                    self._gain(node, taken)
                    deepest = node
                if taken < wanted:
                    break
        if deepest is not None:
            self._push(deepest)
        return hits

    def forgotten(self, node: Ghost[L]) -> None:
        """The tree dropped a node that no expert holds."""

    def split(self, upper: Ghost[L], lower: Ghost[L]) -> None:
        """The tree cut a node in two; held blocks and counts are shared out already."""

    def _note(self, path: Sequence[Ghost[L]], known: int, first: int) -> None:
        """Count the request. Nodes up to `first` are held in part at least."""

    def _rank(self, node: Ghost[L]) -> float:
        """The leaf of the smallest rank goes first. Grows with every touch."""
        return node.last

    def _make_room(self, n: int) -> int:
        """Drop up to `n` blocks; returns how many went."""
        freed = 0
        while freed < n:
            victim = self._victim()
            if victim is None:
                break
            cut = min(victim.held[self.number], n - freed)
            self._lose(victim, cut)
            freed += cut
        return freed

    def _victim(self) -> Ghost[L] | None:
        return self._head(self._heap)

    def _head(self, heap: list[tuple[float, int, int, Ghost[L]]]) -> Ghost[L] | None:
        """The leaf that goes first, left in place. Nodes of the path at hand do not count."""
        me = self.number
        while heap:
            rank, depth, _, node = heap[0]
            if not node.held[me] or node.twigs[me] or node.last == self._clock:
                heappop(heap)
                self._queued.discard(node)
                continue
            now = self._rank(node)
            if now > rank:
                heapreplace(heap, (now, depth, next(self._serial), node))
                continue
            return node
        return None

    def _push(self, node: Ghost[L]) -> None:
        if node not in self._queued and not node.twigs[self.number]:
            self._queued.add(node)
            heappush(self._heap, (self._rank(node), -node.start, next(self._serial), node))

    def _gain(self, node: Ghost[L], n: int) -> None:
        me = self.number
        if not node.held[me]:
            node.num_holders += 1
            if node.parent is not None:
                node.parent.twigs[me] += 1
            self.tree.revive(node)
        node.held[me] += n
        self.used += n

    def _lose(self, node: Ghost[L], n: int) -> None:
        me = self.number
        node.held[me] -= n
        self.used -= n
        self.dropped.append(node)
        if node.held[me]:
            return
        node.num_holders -= 1
        self.tree.settle(node)
        parent = node.parent
        if parent is not None:
            parent.twigs[me] -= 1
            if parent.held[me]:
                self._push(parent)


class Frequency(Recency[L]):
    """`last use + weight * lifetime * min(touches, most)`.

    `lifetime` is the smoothed age of what is evicted, in requests, so that the bonus means the same
    at every capacity.
    """

    def __init__(
        self, tree: GhostTree[L], number: int, capacity: int, *, weight: float, most: int
    ) -> None:
        super().__init__(tree, number, capacity)
        self._weight = weight
        self._most = most
        self._lifetime = 1.0

    def _rank(self, node: Ghost[L]) -> float:
        return node.ranks[self.number]

    def _counts(self, path: Sequence[Ghost[L]], known: int) -> bool:
        """Whether this request's touches count."""
        return True

    def _note(self, path: Sequence[Ghost[L]], known: int, first: int) -> None:
        me, counts = self.number, self._counts(path, known)
        stale = self._clock - _FORGIVEN * self._lifetime
        for node in path:
            if node.start < known:
                if node.before < stale and not node.held[me]:
                    node.counts[me] = 0
                if counts:
                    node.counts[me] += 1
            bonus = min(node.counts[me], self._most)
            node.ranks[me] = self._clock + self._weight * self._lifetime * bonus

    def _lose(self, node: Ghost[L], n: int) -> None:
        keep = _AGING**n
        age = max(1, self._clock - node.last)
        self._lifetime = keep * self._lifetime + (1 - keep) * age
        super()._lose(node, n)


class Independent(Frequency[L]):
    """A path that only grows (the next turn of one conversation) does not count."""

    def _counts(self, path: Sequence[Ghost[L]], known: int) -> bool:
        if not path or not known:
            return False
        if path[-1].end == known:
            return True
        fresh = path[-1].parent
        return fresh is not None and fresh.branches > 1


class TwoQueues(Recency[L]):
    """A frame for rules that tell two kinds of nodes apart, least recently used first in each."""

    def __init__(self, tree: GhostTree[L], number: int, capacity: int) -> None:
        super().__init__(tree, number, capacity)
        self._heaps: tuple[list[tuple[float, int, int, Ghost[L]]], ...] = ([], [])

    def _kind(self, node: Ghost[L]) -> int:
        """0, or 1 if a rule says so. May change while the node is queued."""
        return 0

    def _push(self, node: Ghost[L]) -> None:
        if node not in self._queued and not node.twigs[self.number]:
            self._queued.add(node)
            entry = (node.last, -node.start, next(self._serial), node)
            heappush(self._heaps[self._kind(node)], entry)

    def _head_of(self, kind: int) -> Ghost[L] | None:
        heap = self._heaps[kind]
        while True:
            node = self._head(heap)
            if node is None or self._kind(node) == kind:
                return node
            heappop(heap)
            self._queued.discard(node)
            self._push(node)


class TinyLfu(TwoQueues[L]):
    """Guests and members: a newcomer to a full cache is a guest until it was asked for more often
    than the least recently used member, and guests go first.

    The rule as published does not take a guest in at all. A tier has to hold what is computed, so
    an expert that did not would promise hits that the tier cannot have.

    Counts up to 15, halved every ten capacities of blocks asked for.
    """

    _SAMPLE = 10
    _TOP = 15
    _GUEST, _MEMBER = 0, 1

    def __init__(self, tree: GhostTree[L], number: int, capacity: int) -> None:
        super().__init__(tree, number, capacity)
        self._seen = 0
        self._epoch = 0
        self._full = False

    def _kind(self, node: Ghost[L]) -> int:
        return int(node.ranks[self.number])

    def _note(self, path: Sequence[Ghost[L]], known: int, first: int) -> None:
        me = self.number
        for node in path:
            node.counts[me] = self._epoch << 4 | min(self._TOP, self._frequency(node) + 1)
        for node in path[: first + 1]:
            if self._kind(node) == self._GUEST and self._deserves(node):
                node.ranks[me] = self._MEMBER
        if path:
            self._seen += path[-1].end
        if self._seen > self._SAMPLE * self.capacity:
            self._seen = 0
            self._epoch += 1

    def _frequency(self, node: Ghost[L]) -> int:
        told = node.counts[self.number]
        return (told & self._TOP) >> min(self._epoch - (told >> 4), 5)

    def _deserves(self, node: Ghost[L]) -> bool:
        rival = self._head_of(self._MEMBER)
        return rival is None or self._frequency(node) > self._frequency(rival)

    def _victim(self) -> Ghost[L] | None:
        self._full = True
        return self._head_of(self._GUEST) or self._head_of(self._MEMBER)

    def _gain(self, node: Ghost[L], n: int) -> None:
        if not node.held[self.number]:
            member = not self._full or self._deserves(node)
            node.ranks[self.number] = self._MEMBER if member else self._GUEST
        super()._gain(node, n)


class Arc(TwoQueues[L]):
    """Two lists, of blocks seen once and more often; ghosts of either say which is too short."""

    def __init__(self, tree: GhostTree[L], number: int, capacity: int) -> None:
        super().__init__(tree, number, capacity)
        self._sizes = [0, 0]
        self._target = 0.0
        self._ghosts: tuple[OrderedDict[Ghost[L], int], ...] = (OrderedDict(), OrderedDict())
        self._ghost_sizes = [0, 0]

    def forgotten(self, node: Ghost[L]) -> None:
        for which in (0, 1):
            self._ghost_sizes[which] -= self._ghosts[which].pop(node, 0)

    def split(self, upper: Ghost[L], lower: Ghost[L]) -> None:
        for ghosts in self._ghosts:
            told = ghosts.get(lower, 0)
            if told > len(lower):
                ghosts[lower] = len(lower)
                ghosts[upper] = told - len(lower)

    def _note(self, path: Sequence[Ghost[L]], known: int, first: int) -> None:
        me = self.number
        for node in path[: first + 1]:
            if not node.counts[me]:
                node.counts[me] = 1
                self._sizes[0] -= node.held[me]
                self._sizes[1] += node.held[me]
                self._queued.discard(node)

    def _kind(self, node: Ghost[L]) -> int:
        return node.counts[self.number]

    def _victim(self) -> Ghost[L] | None:
        once = 0 if self._sizes[0] > self._target else 1
        return self._head_of(once) or self._head_of(1 - once)

    def _gain(self, node: Ghost[L], n: int) -> None:
        me = self.number
        again = False
        for which in (0, 1):
            told = self._ghosts[which].pop(node, 0)
            if told:
                mine, other = self._ghost_sizes[which], self._ghost_sizes[1 - which]
                step = min(told, n) * max(1.0, other / max(1, mine))
                self._target += step if which == 0 else -step
                self._target = min(max(self._target, 0.0), float(self.capacity))
                self._ghost_sizes[which] -= told
                again = True
        if not node.held[me]:
            node.counts[me] = int(again)
        elif again and not node.counts[me]:
            self._sizes[0] -= node.held[me]
            self._sizes[1] += node.held[me]
            node.counts[me] = 1
        self._sizes[node.counts[me]] += n
        super()._gain(node, n)

    def _lose(self, node: Ghost[L], n: int) -> None:
        which = node.counts[self.number]
        self._sizes[which] -= n
        ghosts = self._ghosts[which]
        ghosts[node] = ghosts.pop(node, 0) + n
        self._ghost_sizes[which] += n
        while self._sizes[0] + self._ghost_sizes[0] > self.capacity and self._ghosts[0]:
            self._ghost_sizes[0] -= self._ghosts[0].popitem(last=False)[1]
        while sum(self._ghost_sizes) > self.capacity and self._ghosts[1]:
            self._ghost_sizes[1] -= self._ghosts[1].popitem(last=False)[1]
        super()._lose(node, n)
