"""The frame of the experts: what one holds, and the queues that say which leaf it gives up first.

An expert holds a prefix-closed set of blocks of at most its capacity, and gives up leaves only, as
a tier does. What it knows of a ghost stands in columns beside the tree's, and a queue entry is one
integer: a small host has tens of thousands of each. Knows the ghost tree and a request counter for
a clock; no live block, no time, and of the rules (`experts.py`) only the simplest, recency.
"""

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from itertools import count
from struct import Struct

from kvtier.index.ghosts import ROOT, Ghost, GhostTree

_ROW_BITS, _SERIAL_BITS, _DEPTH_BITS = 28, 40, 31
_ROW, _DEEPEST = (1 << _ROW_BITS) - 1, (1 << _DEPTH_BITS) - 1
_ABOVE_SERIAL = _SERIAL_BITS + _ROW_BITS
_ABOVE_DEPTH = _DEPTH_BITS + _ABOVE_SERIAL
"""A queue entry is, from its high bits: a rank, the depth (deeper goes first), a serial number and
the ghost."""


def ghost_of(entry: int) -> Ghost:
    """Whom a queue entry is about."""
    return entry & _ROW


class Recency:
    """Leaf-LRU, and the frame of the other rules.

    Columns: `held`, how many leading blocks of a ghost the expert holds, and `twigs`, how many of
    its children lead to held ones. `dropped` lists the ghosts that lost blocks since it was last
    emptied. A heap holds every leaf with a rank that is at most its present one; the present one is
    looked up when a leaf comes to the top.
    """

    def __init__(self, tree: GhostTree, capacity: int) -> None:
        self.tree = tree
        self.capacity = capacity
        self.held = tree.rows.integers("i")
        self.twigs = tree.rows.integers("i")
        self.used = 0
        self.dropped: list[Ghost] = []
        self._bit = tree.enrol(self)
        self._clock = 0
        self._serial = count()
        self._heap: list[int] = []

    def request(self, path: Sequence[Ghost], known: int, clock: int) -> int:
        """A request for exactly this path, of which `known` blocks were seen before. Returns how
        many leading blocks were held."""
        tree, held, self._clock = self.tree, self.held, clock
        first = len(path) - 1
        while first >= 0 and not held[path[first]]:
            first -= 1
        hits = tree.start[path[first]] + held[path[first]] if first >= 0 else 0
        self._note(path, known, first)
        deepest = path[first] if first >= 0 else None
        for ghost in path[max(first, 0) :]:
            wanted = tree.length(ghost) - held[ghost]
            if wanted:
                room = self.capacity - self.used
                if room < wanted:
                    room += self._make_room(wanted - room)
                taken = min(wanted, room)
                if taken > 0:
                    self._gain(ghost, taken)
                    deepest = ghost
                if taken < wanted:
                    break
        if deepest is not None:
            self._push(deepest)
        return hits

    def depth_held(self, ghost: Ghost) -> int:
        """How many blocks from the root down to this ghost are held."""
        while ghost != ROOT:
            if self.held[ghost]:
                return self.tree.start[ghost] + self.held[ghost]
            ghost = self.tree.parent[ghost]
        return 0

    def split(self, upper: Ghost, lower: Ghost) -> None:
        """The tree cut a ghost in two: share out what is held."""
        held = self.held[lower]
        if held:
            taken = min(held, self.tree.length(upper))
            self.held[upper], self.held[lower] = taken, held - taken
            self.tree.share(upper, lower, self._bit, held - taken)
        self.twigs[upper] = 1 if self.held[lower] or self.twigs[lower] else 0

    def forgotten(self, ghost: Ghost) -> None:
        """The tree dropped a ghost that no expert holds."""

    def _note(self, path: Sequence[Ghost], known: int, first: int) -> None:
        """Count the request. Ghosts up to `first` are held in part at least."""

    def _make_room(self, n: int) -> int:
        """Drop up to `n` blocks; returns how many went."""
        freed = 0
        while freed < n:
            victim = self._victim()
            if victim is None:
                break
            cut = min(self.held[victim], n - freed)
            self._lose(victim, cut)
            freed += cut
        return freed

    def _victim(self) -> Ghost | None:
        return self._head(self._heap)

    def _rank(self, ghost: Ghost) -> int:
        """The leaf of the smallest rank goes first."""
        return self.tree.last[ghost]

    def _entry(self, rank: int, above: int, ghost: Ghost) -> int:
        first = (rank << _DEPTH_BITS | above) << _SERIAL_BITS
        return (first | next(self._serial)) << _ROW_BITS | ghost

    def _renewed(self, entry: int, ghost: Ghost) -> int:
        """The entry, or a greater one if the rank has grown."""
        rank = self._rank(ghost)
        if rank <= entry >> _ABOVE_DEPTH:
            return entry
        return self._entry(rank, entry >> _ABOVE_SERIAL & _DEEPEST, ghost)

    def _head(self, heap: list[int]) -> Ghost | None:
        """The leaf that goes first, left in place. Ghosts of the path at hand do not count."""
        held, twigs, last, clock = self.held, self.twigs, self.tree.last, self._clock
        while heap:
            entry = heap[0]
            ghost = entry & _ROW
            if not held[ghost] or twigs[ghost] or last[ghost] == clock:
                heappop(heap)
                self.tree.dequeue(ghost, self._bit)
                continue
            now = self._renewed(entry, ghost)
            if now == entry:
                return ghost
            heapreplace(heap, now)
        return None

    def _push(self, ghost: Ghost) -> None:
        if not self.twigs[ghost] and not self.tree.is_queued(ghost, self._bit):
            self.tree.enqueue(ghost, self._bit)
            above = _DEEPEST - self.tree.start[ghost]
            heappush(self._queue(ghost), self._entry(self._rank(ghost), above, ghost))

    def _queue(self, ghost: Ghost) -> list[int]:
        """The heap a leaf belongs to."""
        return self._heap

    def _gain(self, ghost: Ghost, n: int) -> None:
        if not self.held[ghost]:
            self.twigs[self.tree.parent[ghost]] += 1
            self.tree.hold(ghost, self._bit)
        self.held[ghost] += n
        self.used += n

    def _lose(self, ghost: Ghost, n: int) -> None:
        self.held[ghost] -= n
        self.used -= n
        self.dropped.append(ghost)
        if self.held[ghost]:
            return
        self.tree.drop(ghost, self._bit)
        parent = self.tree.parent[ghost]
        self.twigs[parent] -= 1
        if self.held[parent]:
            self._push(parent)


class Ranked(Recency):
    """A frame for rules that give each ghost a rank, a float not below 0, in the column `ranks`."""

    _FLOAT, _BITS = Struct("<d"), Struct("<q")

    def __init__(self, tree: GhostTree, capacity: int) -> None:
        super().__init__(tree, capacity)
        self.ranks = tree.rows.floats()

    def split(self, upper: Ghost, lower: Ghost) -> None:
        super().split(upper, lower)
        self.ranks[upper] = self.ranks[lower]

    def _rank(self, ghost: Ghost) -> int:
        """The bits of the float, which are ordered as such floats are."""
        bits: int = self._BITS.unpack(self._FLOAT.pack(self.ranks[ghost]))[0]
        return bits


class TwoQueues(Recency):
    """A frame for rules that tell two kinds of ghosts apart, least recently used first in each.

    The column `kinds` is 0 or 1, and may change while a ghost is queued.
    """

    def __init__(self, tree: GhostTree, capacity: int) -> None:
        super().__init__(tree, capacity)
        self.kinds = tree.rows.integers("B")
        self._heaps: tuple[list[int], ...] = ([], [])

    def split(self, upper: Ghost, lower: Ghost) -> None:
        super().split(upper, lower)
        self.kinds[upper] = self.kinds[lower]

    def forgotten(self, ghost: Ghost) -> None:
        self.kinds[ghost] = 0

    def _queue(self, ghost: Ghost) -> list[int]:
        return self._heaps[self.kinds[ghost]]

    def _head_of(self, kind: int) -> Ghost | None:
        heap = self._heaps[kind]
        while True:
            ghost = self._head(heap)
            if ghost is None or self.kinds[ghost] == kind:
                return ghost
            heappop(heap)
            self.tree.dequeue(ghost, self._bit)
            self._push(ghost)
