"""Leaf-LRU as a pure planner, on nodes that are plain letters."""

import numpy as np
import pytest

from kvtier.index.policies import make_policy
from kvtier.index.policy import Harvest, LeafLru
from kvtier.index.words import BlockIds


class Letters:
    """A view of a column over a tree written as child -> parent; a node holds a list of blocks."""

    def __init__(
        self, parents: dict[str, str | None], blocks: dict[str, list[int]], stuck: str = ""
    ) -> None:
        self._parents = parents
        self._blocks = blocks
        self._stuck = stuck

    def parent(self, node: str) -> str | None:
        return self._parents[node]

    def twigs(self, node: str) -> int:
        children = [c for c, p in self._parents.items() if p == node]
        return sum(self.holds(c) or self.twigs(c) > 0 for c in children)

    def holds(self, node: str) -> bool:
        return bool(self._blocks[node])

    def relent(self) -> bool:
        return False

    def tail(self, node: str, n: int, keep: int = 0) -> tuple[BlockIds, bool]:
        own = self._blocks[node] if node not in self._stuck else []
        taken = np.array(own[::-1][:n], np.int32)
        return taken, len(taken) == len(self._blocks[node])


def plan(policy: LeafLru[str], n: int, view: Letters) -> list[int]:
    harvest = Harvest(n, view)
    policy.offer(harvest)
    return [int(block) for block in harvest.blocks]


TREE: dict[str, str | None] = {"a": None, "b": "a", "c": "b", "d": "b", "e": None}


def order(nodes: str) -> LeafLru[str]:
    lru: LeafLru[str] = LeafLru()
    for node in nodes:
        lru.added(node)
    return lru


@pytest.mark.parametrize(
    ("n", "expected"),
    [(0, []), (1, [31]), (3, [31, 30, 50]), (6, [31, 30, 50, 41, 40, 20]), (99, None)],
)
def test_a_plan_takes_old_leaves_first_and_each_from_its_tail(
    n: int, expected: list[int] | None
) -> None:
    blocks = {"a": [10], "b": [20], "c": [30, 31], "d": [40, 41], "e": [50]}
    chosen = plan(order("cedba"), n, Letters(TREE, blocks))
    assert chosen == (expected if expected is not None else [31, 30, 50, 41, 40, 20, 10])


def test_a_node_that_may_not_go_keeps_everything_above_it() -> None:
    blocks = {"a": [10], "b": [20], "c": [30], "d": [40], "e": [50]}
    assert plan(order("cedba"), 99, Letters(TREE, blocks, stuck="d")) == [30, 50]


def test_a_node_that_holds_nothing_does_not_shield_the_one_above_it() -> None:
    blocks: dict[str, list[int]] = {"a": [10], "b": [], "c": [30], "d": [40], "e": []}
    assert plan(order("cda"), 99, Letters(TREE, blocks)) == [30, 40, 10]


def test_a_plan_changes_nothing() -> None:
    lru = order("cedba")
    blocks = {"a": [10], "b": [20], "c": [30], "d": [40], "e": [50]}
    view = Letters(TREE, blocks)
    assert plan(lru, 3, view) == plan(lru, 3, view)
    assert "".join(lru) == "cedba"


def test_touched_cold_removed_and_split_nodes_take_their_places() -> None:
    lru = order("cedba")
    lru.touched("cba")
    assert "".join(lru) == "edcba"
    lru.cold("cb")
    assert "".join(lru) == "cbeda"
    lru.removed("e")
    lru.split("x", "d")
    assert "".join(lru) == "cbdax"


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"policy: 'mru' given, want one of lru, arc, adaptive"):
        make_policy("mru", 10, 16)
