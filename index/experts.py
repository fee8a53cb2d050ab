"""Eviction rules that run on metadata alone, each over the whole stream of requests.

What an expert would have hit is its score; which blocks it dropped is its advice.

    Recency       least recently used leaf (`recency.py`)
    Arc           ARC (Megiddo and Modha, FAST 2003), both lists restricted to leaves
    Frequency     recency plus a bonus for touches, counted in eviction lifetimes
    Independent   the same, but only touches by a new branch or a repeated path count
    TinyLfu       recency among what frequency admits (Einziger et al., ACM TOS 2017)
"""

from collections.abc import Sequence

from kvtier.index.ghosts import Ghost, GhostTree
from kvtier.index.recency import Ranked, TwoQueues
from kvtier.index.rows import Order

_AGING = 0.999
_FORGIVEN = 6.0
"""Lifetimes after which the touches of an absent block no longer count."""


class Frequency(Ranked):
    """`last use + weight * lifetime * min(touches, most)`.

    `lifetime` is the smoothed age of what is evicted, in requests, so that the bonus means the same
    at every capacity.
    """

    def __init__(self, tree: GhostTree, capacity: int, *, weight: float, most: int) -> None:
        super().__init__(tree, capacity)
        self._weight = weight
        self._most = most
        self._touches = tree.rows.integers("B")
        self._lifetime = 1.0

    def split(self, upper: Ghost, lower: Ghost) -> None:
        super().split(upper, lower)
        self._touches[upper] = self._touches[lower]

    def forgotten(self, ghost: Ghost) -> None:
        self._touches[ghost] = 0

    def _counts(self, path: Sequence[Ghost], known: int) -> bool:
        """Whether this request's touches count."""
        return True

    def _note(self, path: Sequence[Ghost], known: int, first: int) -> None:
        tree, touches, counts = self.tree, self._touches, self._counts(path, known)
        stale = self._clock - _FORGIVEN * self._lifetime
        for ghost in path:
            told = touches[ghost]
            if tree.start[ghost] < known:
                if tree.before[ghost] < stale and not self.held[ghost]:
                    told = 0
                if counts and told < self._most:
                    told += 1
                touches[ghost] = told
            self.ranks[ghost] = self._clock + self._weight * self._lifetime * told

    def _lose(self, ghost: Ghost, n: int) -> None:
        keep = _AGING**n
        age = max(1, self._clock - self.tree.last[ghost])
        self._lifetime = keep * self._lifetime + (1 - keep) * age
        super()._lose(ghost, n)


class Independent(Frequency):
    """A path that only grows (the next turn of one conversation) does not count."""

    def _counts(self, path: Sequence[Ghost], known: int) -> bool:
        if not path or not known:
            return False
        if self.tree.end(path[-1]) == known:
            return True
        return self.tree.branches[self.tree.parent[path[-1]]] > 1


class TinyLfu(TwoQueues):
    """Guests and members: a newcomer to a full cache is a guest until it was asked for more often
    than the least recently used member, and guests go first.

    The rule as published does not take a guest in at all. A tier has to hold what is computed, so
    an expert that did not would promise hits that the tier cannot have.

    Counts up to 15, halved every ten capacities of blocks asked for.
    """

    _SAMPLE = 10
    _TOP = 15
    _GUEST, _MEMBER = 0, 1

    def __init__(self, tree: GhostTree, capacity: int) -> None:
        super().__init__(tree, capacity)
        self._counts = tree.rows.integers("I")
        self._seen = 0
        self._epoch = 0
        self._full = False

    def split(self, upper: Ghost, lower: Ghost) -> None:
        super().split(upper, lower)
        self._counts[upper] = self._counts[lower]

    def forgotten(self, ghost: Ghost) -> None:
        super().forgotten(ghost)
        self._counts[ghost] = 0

    def _note(self, path: Sequence[Ghost], known: int, first: int) -> None:
        counts, kinds, epoch = self._counts, self.kinds, self._epoch << 4
        for ghost in path:
            counts[ghost] = epoch | min(self._TOP, self._frequency(ghost) + 1)
        for ghost in path[: first + 1]:
            if kinds[ghost] == self._GUEST and self._deserves(ghost):
                kinds[ghost] = self._MEMBER
        if path:
            self._seen += self.tree.end(path[-1])
        if self._seen > self._SAMPLE * self.capacity:
            self._seen = 0
            self._epoch += 1

    def _frequency(self, ghost: Ghost) -> int:
        told = self._counts[ghost]
        return (told & self._TOP) >> min(self._epoch - (told >> 4), 5)

    def _deserves(self, ghost: Ghost) -> bool:
        rival = self._head_of(self._MEMBER)
        return rival is None or self._frequency(ghost) > self._frequency(rival)

    def _victim(self) -> Ghost | None:
        self._full = True
        guest = self._head_of(self._GUEST)
        return self._head_of(self._MEMBER) if guest is None else guest

    def _gain(self, ghost: Ghost, n: int) -> None:
        if not self.held[ghost]:
            member = not self._full or self._deserves(ghost)
            self.kinds[ghost] = self._MEMBER if member else self._GUEST
        super()._gain(ghost, n)


class Arc(TwoQueues):
    """Two lists, of blocks seen once and more often; what either has dropped lately says which is
    too short."""

    def __init__(self, tree: GhostTree, capacity: int) -> None:
        super().__init__(tree, capacity)
        self._sizes = [0, 0]
        self._target = 0.0
        self._past = (Past(tree), Past(tree))

    def forgotten(self, ghost: Ghost) -> None:
        super().forgotten(ghost)
        for past in self._past:
            past.pop(ghost)

    def split(self, upper: Ghost, lower: Ghost) -> None:
        super().split(upper, lower)
        for past in self._past:
            past.split(upper, lower)

    def _note(self, path: Sequence[Ghost], known: int, first: int) -> None:
        for ghost in path[: first + 1]:
            if not self.kinds[ghost]:
                self._turn(ghost)
                self.tree.unmark(ghost, self._bit)

    def _turn(self, ghost: Ghost) -> None:
        """It was asked for again."""
        self.kinds[ghost] = 1
        self._sizes[0] -= self.held[ghost]
        self._sizes[1] += self.held[ghost]

    def _victim(self) -> Ghost | None:
        once = 0 if self._sizes[0] > self._target else 1
        first = self._head_of(once)
        return self._head_of(1 - once) if first is None else first

    def _gain(self, ghost: Ghost, n: int) -> None:
        again = False
        for which, past in enumerate(self._past):
            mine, other = past.size, self._past[1 - which].size
            told = past.pop(ghost)
            if told:
                step = min(told, n) * max(1.0, other / max(1, mine))
                self._target += step if which == 0 else -step
                self._target = min(max(self._target, 0.0), float(self.capacity))
                again = True
        if not self.held[ghost]:
            self.kinds[ghost] = int(again)
        elif again and not self.kinds[ghost]:
            self._turn(ghost)
        self._sizes[self.kinds[ghost]] += n
        super()._gain(ghost, n)

    def _lose(self, ghost: Ghost, n: int) -> None:
        which = self.kinds[ghost]
        self._sizes[which] -= n
        self._past[which].add(ghost, n)
        once, often = self._past
        while self._sizes[0] + once.size > self.capacity and once.size:
            once.pop_oldest()
        while once.size + often.size > self.capacity and often.size:
            often.pop_oldest()
        super()._lose(ghost, n)


class Past:
    """What one of ARC's lists dropped: ghosts, the one that lost blocks first in front, and how
    many blocks of each. `size` is their sum."""

    def __init__(self, tree: GhostTree) -> None:
        self.size = 0
        self._tree = tree
        self._order = Order(tree.rows)
        self._told = tree.rows.integers("i")

    def add(self, ghost: Ghost, n: int) -> None:
        """`n` blocks more; the ghost goes to the back."""
        if self._told[ghost]:
            self._order.remove(ghost)
        self._order.append(ghost)
        self._told[ghost] += n
        self.size += n

    def pop(self, ghost: Ghost) -> int:
        """Take it out, if it is in; returns how many blocks there were of it."""
        told = self._told[ghost]
        if told:
            self._order.remove(ghost)
            self._told[ghost] = 0
            self.size -= told
        return told

    def pop_oldest(self) -> None:
        """Take the front one out."""
        oldest = self._order.first
        if oldest is not None:
            self.pop(oldest)

    def split(self, upper: Ghost, lower: Ghost) -> None:
        """The blocks that went last stay with `lower`."""
        more = self._told[lower] - self._tree.length(lower)
        if more > 0:
            self._told[lower] -= more
            self._told[upper] = more
            self._order.append(upper)
