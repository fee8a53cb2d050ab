"""Eviction orders: which nodes hold something in each column, and which were used when.

A *lane* is a pool's column, or the one lane more that holds whatever has any store's hint. For
every node it counts its own held blocks (`held`) and the children that lead to held ones
(`twigs`), and it tells each lane's policy what comes, goes and is used. Whatever the policy, what
was retired goes first, the longest retired before the others. Changes no residency.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from kvtier.index.blocks import BlockTable
from kvtier.index.policy import ColumnView, EvictionPolicy, Harvest
from kvtier.index.tree import Node
from kvtier.index.words import BlockIds


class Lanes:
    """One policy a lane. Lane numbers are column numbers; `hint` is one past the last column."""

    def __init__(self, table: BlockTable, policies: Mapping[int, EvictionPolicy[Node]]) -> None:
        self.hint = table.num_columns
        self.policies = dict(policies)
        self.retired = {lane: OrderedDict[Node, None]() for lane in policies}
        self._table = table

    def flags(self, lane: int) -> npt.NDArray[np.uint8]:
        """Per block id, non-zero where the lane holds the block."""
        return self._table.hints if lane == self.hint else self._table.state[lane]

    def hold(self, lane: int, runs: Iterable[tuple[Node, int, int]]) -> None:
        """These runs of blocks (`Tree.runs`) came into the lane; their paths count as used."""
        nodes = []
        for node, begin, end in runs:
            nodes.append(node)
            if not node.held[lane]:
                self.policies[lane].added(node)
                node.newcomer |= 1 << lane
                above = None if node.twigs[lane] else node.parent
                while above is not None:
                    above.twigs[lane] += 1
                    if above.held[lane] or above.twigs[lane] > 1:
                        break
                    above = above.parent
            node.held[lane] += end - begin
        self.use(lane, nodes)

    def drop(self, lane: int, runs: Iterable[tuple[Node, int, int]]) -> None:
        """These runs of blocks left the lane."""
        for node, begin, end in runs:
            node.held[lane] -= end - begin
            if node.held[lane]:
                continue
            self._removed(lane, node)
            above = None if node.twigs[lane] else node.parent
            while above is not None:
                above.twigs[lane] -= 1
                if above.held[lane] or above.twigs[lane]:
                    break
                above = above.parent

    def use(self, lane: int, nodes: Iterable[Node]) -> None:
        """Touch the paths to these nodes (root first) without settling newcomers."""
        seen: set[Node] = set()
        for deepest in reversed(list(nodes)):
            if deepest in seen:
                continue
            path = _upward(deepest)
            seen.update(path)
            self._touched(lane, [node for node in path if node.held[lane]])

    def touch(self, col: int, deepest: Node) -> None:
        """A request uses the path to this node: in the column, and in the hint lane with it."""
        path = _upward(deepest)
        for lane in {col, self.hint} & self.policies.keys():
            settled = ~(1 << lane)
            known = [node for node in path if node.held[lane]]
            for node in known:
                node.newcomer &= settled
            self._touched(lane, known)

    def cool(self, col: int, deepest: Node) -> None:
        """Move newcomers on the path to this node to the cold end, from below.

        Stops at a node that a request has used since it came, or that leads to anything in the
        column beside the path: a promotion never cools what was warm.
        """
        moved: list[Node] = []
        below = 0
        for node in _upward(deepest):
            if node.twigs[col] != below:
                break
            if node.held[col]:
                if not node.newcomer >> col & 1:
                    break
                moved.append(node)
            below = 1 if node.held[col] or node.twigs[col] else 0
        self.policies[col].cold(moved)

    def retire(self, col: int, deepest: Node, start: int) -> None:
        """Nodes from `deepest` up to depth `start` go before all others, until they are used."""
        for node in _upward(deepest):
            if node.start < start:
                break
            if node.held[col]:
                self.retired[col][node] = None

    def plan(self, lane: int, n: int, least: int, view: ColumnView[Node]) -> BlockIds:
        """Up to `n` blocks to evict, in order; protected ones if there are not `least` others."""
        harvest = Harvest(n, view)
        self._offer(lane, harvest)
        if harvest.relent(least):
            self._offer(lane, harvest)
        return harvest.blocks

    def _offer(self, lane: int, harvest: Harvest[Node]) -> None:
        for node in self.retired[lane]:
            if not harvest.missing:
                return
            harvest.offer(node)
        self.policies[lane].offer(harvest)

    def _touched(self, lane: int, nodes: list[Node]) -> None:
        self.policies[lane].touched(nodes)
        retired = self.retired[lane]
        for node in nodes if retired else ():
            retired.pop(node, None)

    def _removed(self, lane: int, node: Node) -> None:
        self.policies[lane].removed(node)
        self.retired[lane].pop(node, None)

    def split(self, upper: Node, lower: Node) -> None:
        """Share out the counts of a node that was cut, and give the new node its place."""
        upper.newcomer = lower.newcomer
        for lane, policy in self.policies.items():
            if lower.held[lane]:
                upper.held[lane] = int(np.count_nonzero(self.flags(lane)[upper.ids]))
                lower.held[lane] -= upper.held[lane]
                if upper.held[lane]:
                    policy.split(upper, lower)
                if not lower.held[lane]:
                    self._removed(lane, lower)
            upper.twigs[lane] = 1 if lower.held[lane] or lower.twigs[lane] else 0
            # The new node's place is below its ancestors: used now, as they are.
            self.use(lane, [upper])


def _upward(node: Node) -> list[Node]:
    """The node and its ancestors without the root: the order in which a path is touched."""
    path: list[Node] = []
    above: Node | None = node
    while above is not None and above.parent is not None:
        path.append(above)
        above = above.parent
    return path
