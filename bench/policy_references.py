"""Eviction rules that the cache does not offer, as yardsticks for those that it does.

S3-FIFO (Yang et al., SOSP 2023) and GDSF (Cherkasova, 1998), as experts over the ghost tree.
"""

from collections.abc import Sequence
from heapq import heappop

from kvtier.index.experts import Past
from kvtier.index.ghosts import Ghost, GhostTree
from kvtier.index.recency import Ranked, ghost_of


class Gdsf(Ranked):
    """Rank = inflation + uses; the inflation is the rank of the last victim. All blocks weigh 1."""

    def __init__(self, tree: GhostTree, capacity: int) -> None:
        super().__init__(tree, capacity)
        self._uses = tree.rows.integers("q")
        self._inflation = 0.0

    def split(self, upper: Ghost, lower: Ghost) -> None:
        super().split(upper, lower)
        self._uses[upper] = self._uses[lower]

    def _note(self, path: Sequence[Ghost], known: int, first: int) -> None:
        for i, ghost in enumerate(path):
            self._uses[ghost] = self._uses[ghost] + 1 if i <= first else 1
            self.ranks[ghost] = self._inflation + self._uses[ghost]

    def _lose(self, ghost: Ghost, n: int) -> None:
        self._inflation = max(self._inflation, self.ranks[ghost])
        super()._lose(ghost, n)


class S3Fifo(Ranked):
    """A small queue of a tenth for newcomers, a main queue for what was asked for again.

    A ghost's rank is when it came to its queue. `counts`: 4 for one of the main queue, plus its
    uses (up to 3) since it came there.
    """

    _MAIN = 4

    def __init__(self, tree: GhostTree, capacity: int) -> None:
        super().__init__(tree, capacity)
        self.counts = tree.rows.integers("B")
        self._small = 0
        self._past = Past(tree)
        self._queues: tuple[list[int], ...] = ([], [])

    def split(self, upper: Ghost, lower: Ghost) -> None:
        super().split(upper, lower)
        self.counts[upper] = self.counts[lower]

    def forgotten(self, ghost: Ghost) -> None:
        self.counts[ghost] = 0
        self._past.pop(ghost)

    def _note(self, path: Sequence[Ghost], known: int, first: int) -> None:
        for ghost in path[: first + 1]:
            self.counts[ghost] += self.counts[ghost] & 3 < 3

    def _in_main(self, ghost: Ghost) -> int:
        return int(self.counts[ghost] >= self._MAIN)

    def _queue(self, ghost: Ghost) -> list[int]:
        return self._queues[self._in_main(ghost)]

    def _victim(self) -> Ghost | None:
        for _ in range(8 * self.tree.num_ghosts + 8):
            which = 0 if self._small > self.capacity // 10 or self._small == self.used else 1
            ghost = self._oldest(which) or self._oldest(1 - which)
            if ghost is None:
                return None
            if self._in_main(ghost):
                if not self.counts[ghost] & 3:
                    return ghost
                self.counts[ghost] -= 1
            elif self.counts[ghost] & 3 > 1:
                self.counts[ghost] = self._MAIN
                self._small -= self.held[ghost]
            else:
                return ghost
            self.ranks[ghost] = self._clock
            self.tree.unmark(ghost, self._bit)
            self._push(ghost)
        return None

    def _oldest(self, which: int) -> Ghost | None:
        queue, last = self._queues[which], self.tree.last
        while queue:
            ghost = ghost_of(queue[0])
            in_use = last[ghost] == self._clock
            if self.held[ghost] and not self.twigs[ghost] and not in_use:
                if self._renewed(queue[0], ghost) == queue[0] and self._in_main(ghost) == which:
                    return ghost
            heappop(queue)
            self.tree.dequeue(ghost, self._bit)
            if self.held[ghost] and not in_use:
                self._push(ghost)
        return None

    def _gain(self, ghost: Ghost, n: int) -> None:
        told = self._past.pop(ghost)
        if not self.held[ghost]:
            self.counts[ghost] = self._MAIN if told else 0
            self.ranks[ghost] = self._clock
        self._small += 0 if self._in_main(ghost) else n
        super()._gain(ghost, n)

    def _lose(self, ghost: Ghost, n: int) -> None:
        if not self._in_main(ghost):
            self._small -= n
            self._past.add(ghost, n)
            while self._past.size > self.capacity:
                self._past.pop_oldest()
        super()._lose(ghost, n)
