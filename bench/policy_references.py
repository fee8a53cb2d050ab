"""Eviction rules that the cache does not offer, as yardsticks for those that it does.

S3-FIFO (Yang et al., SOSP 2023) and GDSF (Cherkasova, 1998), as experts over the ghost tree.
"""

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush

from kvtier.index.experts import Recency
from kvtier.index.ghosts import Ghost, GhostTree

Node = Ghost[None]


class Gdsf(Recency[None]):
    """Rank = inflation + uses; the inflation is the rank of the last victim. All blocks weigh 1."""

    def __init__(self, tree: GhostTree[None], number: int, capacity: int) -> None:
        super().__init__(tree, number, capacity)
        self._inflation = 0.0

    def _note(self, path: Sequence[Node], known: int, first: int) -> None:
        me = self.number
        for i, node in enumerate(path):
            node.counts[me] = node.counts[me] + 1 if i <= first else 1
            node.ranks[me] = self._inflation + node.counts[me]

    def _rank(self, node: Node) -> float:
        return node.ranks[self.number]

    def _lose(self, node: Node, n: int) -> None:
        self._inflation = max(self._inflation, node.ranks[self.number])
        super()._lose(node, n)


class S3Fifo(Recency[None]):
    """A small queue of a tenth for newcomers, a main queue for what was asked for again.

    `counts`: 4 for a node of the main queue, plus its uses (up to 3) since it came there.
    """

    _MAIN = 4

    def __init__(self, tree: GhostTree[None], number: int, capacity: int) -> None:
        super().__init__(tree, number, capacity)
        self._small = 0
        self._ghosts: OrderedDict[Node, int] = OrderedDict()
        self._ghost_blocks = 0
        self._queues: tuple[list[tuple[float, int, int, Node]], ...] = ([], [])

    def forgotten(self, node: Node) -> None:
        self._ghost_blocks -= self._ghosts.pop(node, 0)

    def _note(self, path: Sequence[Node], known: int, first: int) -> None:
        me = self.number
        for node in path[: first + 1]:
            uses = node.counts[me] & 3
            node.counts[me] += uses < 3

    def _in_main(self, node: Node) -> int:
        return int(node.counts[self.number] >= self._MAIN)

    def _push(self, node: Node) -> None:
        if node not in self._queued and not node.twigs[self.number]:
            self._queued.add(node)
            entry = (node.ranks[self.number], -node.start, next(self._serial), node)
            heappush(self._queues[self._in_main(node)], entry)

    def _victim(self) -> Node | None:
        me = self.number
        for _ in range(8 * self.tree.num_nodes + 8):
            which = 0 if self._small > self.capacity // 10 or self._small == self.used else 1
            node = self._oldest(which) or self._oldest(1 - which)
            if node is None:
                return None
            if self._in_main(node):
                if not node.counts[me] & 3:
                    return node
                node.counts[me] -= 1
            elif node.counts[me] & 3 > 1:
                node.counts[me] = self._MAIN
                self._small -= node.held[me]
            else:
                return node
            node.ranks[me] = self._clock
            self._queued.discard(node)
            self._push(node)
        return None

    def _oldest(self, which: int) -> Node | None:
        me, queue = self.number, self._queues[which]
        while queue:
            rank, _, _, node = queue[0]
            if node.held[me] and not node.twigs[me] and node.last != self._clock:
                if rank == node.ranks[me] and self._in_main(node) == which:
                    return node
            heappop(queue)
            self._queued.discard(node)
            if node.held[me] and node.last != self._clock:
                self._push(node)
        return None

    def _gain(self, node: Node, n: int) -> None:
        me = self.number
        told = self._ghosts.pop(node, 0)
        self._ghost_blocks -= told
        if not node.held[me]:
            node.counts[me] = self._MAIN if told else 0
            node.ranks[me] = self._clock
        self._small += 0 if self._in_main(node) else n
        super()._gain(node, n)

    def _lose(self, node: Node, n: int) -> None:
        if not self._in_main(node):
            self._small -= n
            self._ghosts[node] = self._ghosts.pop(node, 0) + n
            self._ghost_blocks += n
            while self._ghost_blocks > self.capacity:
                self._ghost_blocks -= self._ghosts.popitem(last=False)[1]
        super()._lose(node, n)
