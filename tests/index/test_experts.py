"""Experts against plain block-by-block models, and the ghost tree they share."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.index.experts import Arc, Frequency, Independent, Recency, TinyLfu
from kvtier.index.ghosts import Ghost, GhostTree, fingerprints

NS = bytes(range(32))
Path = tuple[int, ...]


class BlockLru:
    """Leaf-LRU, block by block: a set of path prefixes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.last: dict[Path, int] = {}
        self.clock = 0

    def request(self, path: Path) -> int:
        self.clock += 1
        prefixes = [path[: i + 1] for i in range(len(path))]
        hits = 0
        while hits < len(path) and prefixes[hits] in self.last:
            hits += 1
        for prefix in prefixes[:hits]:
            self.last[prefix] = self.clock
        for prefix in prefixes[hits:]:
            if len(self.last) >= self.capacity:
                parents = {held[:-1] for held in self.last}
                leaves = [h for h in self.last if h not in parents and h not in prefixes]
                if not leaves:
                    break
                del self.last[min(leaves, key=lambda h: (self.last[h], -len(h)))]
            self.last[prefix] = self.clock
        return hits


def marks(path: Path) -> bytes:
    return fingerprints(NS, np.array(path, np.int32), 1)


paths = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=7).map(tuple), min_size=1, max_size=60
)


@settings(deadline=None, max_examples=60)
@given(paths, st.integers(1, 12))
def test_recency_over_runs_of_blocks_is_leaf_lru_block_by_block(
    requests: list[Path], capacity: int
) -> None:
    tree: GhostTree[None] = GhostTree(1, 0)
    expert = Recency(tree, 0, capacity)
    model = BlockLru(capacity)
    for clock, request in enumerate(requests, 1):
        path, known = tree.path(marks(request), clock)
        assert expert.request(path, known, clock) == model.request(request)
        assert expert.used == len(model.last)
        list(tree.forget())


MAKERS: list[Callable[[GhostTree[None], int, int], Recency[None]]] = [
    Recency,
    Arc,
    lambda tree, number, capacity: Frequency(tree, number, capacity, weight=1.0, most=4),
    lambda tree, number, capacity: Independent(tree, number, capacity, weight=4.0, most=16),
    TinyLfu,
]


def nodes_of(tree: GhostTree[None]) -> list[Ghost[None]]:
    found, todo = [], list(tree.root.children.values())
    while todo:
        node = todo.pop()
        found.append(node)
        todo += node.children.values()
    return found


@settings(deadline=None, max_examples=60)
@given(paths, st.integers(1, 12), st.integers(0, 20))
def test_every_expert_keeps_its_books_a_prefix_closed_set_and_the_path_at_hand(
    requests: list[Path], capacity: int, bound: int
) -> None:
    tree: GhostTree[None] = GhostTree(len(MAKERS), bound)
    experts = [make(tree, i, capacity) for i, make in enumerate(MAKERS)]

    def split(upper: Ghost[None], lower: Ghost[None]) -> None:
        for expert in experts:
            expert.split(upper, lower)

    tree.on_split = split
    for clock, request in enumerate(requests, 1):
        path, known = tree.path(marks(request), clock)
        assert b"".join(node.marks for node in path) == marks(request)
        for expert in experts:
            before = path[-1].depth_held(expert.number)
            assert expert.request(path, known, clock) == before
            assert path[-1].depth_held(expert.number) == min(len(request), capacity)
        for node in tree.forget():
            for expert in experts:
                expert.forgotten(node)
        nodes = nodes_of(tree)
        assert tree.num_nodes == len(nodes)
        idle = sum(len(n) for n in nodes if not n.num_holders and not n.children)
        assert idle <= bound
        for expert in experts:
            me = expert.number
            assert sum(node.held[me] for node in nodes) == expert.used <= capacity
            for node in nodes:
                assert node.twigs[me] == sum(c.held[me] > 0 for c in node.children.values())
                if node.twigs[me]:
                    assert node.held[me] == len(node)
        for node in nodes:
            assert node.num_holders == sum(held > 0 for held in node.held)


@pytest.mark.parametrize("make", MAKERS)
def test_an_expert_never_gets_stuck_on_what_it_holds(
    make: Callable[[GhostTree[None], int, int], Recency[None]],
) -> None:
    """Whatever came before, a path asked for again and again is held in the end."""
    tree: GhostTree[None] = GhostTree(1, 100)
    expert = make(tree, 0, 20)
    tree.on_split = expert.split
    rng = np.random.default_rng(7)
    clock = 0
    for _ in range(400):
        clock += 1
        request = tuple(rng.integers(0, 3, rng.integers(1, 9)).tolist())
        path, known = tree.path(marks(request), clock)
        expert.request(path, known, clock)
        for node in tree.forget():
            expert.forgotten(node)
    wanted = (9, 9, 9, 9, 9)
    for _ in range(40):
        clock += 1
        path, known = tree.path(marks(wanted), clock)
        hits = expert.request(path, known, clock)
        for node in tree.forget():
            expert.forgotten(node)
    assert hits == len(wanted)


def test_fingerprints_tell_namespaces_and_orders_apart() -> None:
    tokens = np.arange(48, dtype=np.int32)
    one = fingerprints(NS, tokens, 16)
    assert len(one) == 12
    assert one != fingerprints(NS[::-1], tokens, 16)
    swapped = tokens.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert fingerprints(NS, swapped, 16)[:4] != one[:4]
    assert fingerprints(NS, swapped, 16)[4:] == one[4:]
    assert fingerprints(NS, tokens[:47], 16) == one[:8]
