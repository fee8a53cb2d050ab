"""One memory for several pools: what they share, and what they do not."""

import numpy as np

from kvtier.index.follow import Follow
from kvtier.index.ghosts import ROOT, GhostTree, fingerprints
from kvtier.index.policies import make_policy
from kvtier.index.radix import RadixIndex
from kvtier.index.ties import Ties
from kvtier.index.tree import Node
from kvtier.index.words import TierId, Tokens

NS = bytes(32)
HBM, DRAM = 0, 1
SMALL, LARGE = 40, 120


def serve(index: RadixIndex, tokens: Tokens, slots: dict[int, int]) -> list[list[int]]:
    """A request that is taken into the pools named, which make room; returns the tokens of their
    victims."""
    index.request(NS, tokens)
    ids = index.insert(NS, tokens)
    gone = []
    for col, capacity in slots.items():
        index.pin(col, ids)
        absent = ids[index.state(col, ids) == 0]
        excess = len(absent) - (capacity - index.statistics().columns[col].resident)
        victims = index.victims(col, max(0, excess))
        gone.append(index.tokens_of(victims).tolist())
        index.begin_leave(col, victims)
        index.finish_leave(col, victims)
        index.begin_fill(col, absent, absent)
        index.finish_fill(col, absent)
        index.touch(col, ids)
        index.unpin(col, ids)
    return gone


def follower(index: RadixIndex, col: int) -> Follow:
    policy = index._lanes.policies[col]
    assert isinstance(policy, Follow)
    return policy


def requests(n: int, seed: int) -> list[Tokens]:
    """Favourites that come back among paths that do not: recency does not lead."""
    rng = np.random.default_rng(seed)
    favourites = rng.integers(1 << 20, 1 << 30, (8, 4), dtype=np.int32)
    once = rng.integers(1 << 20, 1 << 30, (n, 4), dtype=np.int32)
    return [favourites[rng.integers(8)] if rng.random() < 0.25 else once[i] for i in range(n)]


def test_the_larger_pool_decides_as_if_it_were_alone() -> None:
    columns = (TierId.HBM, TierId.DRAM)
    slots = {TierId.HBM: SMALL, TierId.DRAM: LARGE}

    def index() -> RadixIndex:
        return RadixIndex(1, columns, policy=lambda tier: make_policy("adaptive", slots[tier], 1))

    both, alone = (
        index(),
        RadixIndex(1, (TierId.DRAM,), policy=lambda tier: make_policy("adaptive", LARGE, 1)),
    )
    for request in requests(700, 1):
        _, theirs = serve(both, request, {HBM: SMALL, DRAM: LARGE})
        (own,) = serve(alone, request, {0: LARGE})
        assert theirs == own
    both.check()
    assert follower(both, DRAM).leader == follower(alone, 0).leader != 0
    assert follower(both, HBM)._tree is follower(both, DRAM)._tree


def test_a_request_is_walked_once_and_every_expert_of_every_pool_sees_it() -> None:
    index = RadixIndex(
        1,
        (TierId.HBM, TierId.DRAM),
        policy=lambda tier: make_policy("adaptive", SMALL, 1),
    )
    tree, walks = follower(index, HBM)._tree, list[int]()
    walk = tree.path

    def counted(marks: bytes, clock: int) -> tuple[list[int], int]:
        walks.append(clock)
        return walk(marks, clock)

    tree.path = counted  # type: ignore[method-assign]
    for request in requests(50, 3):
        index.request(NS, request)
    assert walks == list(range(1, 51))
    used = {e.used for col in (HBM, DRAM) for e in follower(index, col)._experts}
    assert used == {SMALL}


def test_leaf_lru_alone_remembers_no_request() -> None:
    index = RadixIndex(1, (TierId.DRAM,), policy=lambda tier: make_policy("lru", SMALL, 1))
    for request in requests(20, 4):
        index.request(NS, request)
    assert not index._shadows and not index._shadows._tree.num_ghosts


def live(*blocks: int) -> Node:
    """A first node of these blocks."""
    root = Node(NS, None, 0, b"", 1)
    node = Node(NS, root, 0, np.array(blocks, np.int32).tobytes(), 1)
    node.ids = np.arange(len(blocks), dtype=np.int32)
    return node


def marks(*blocks: int) -> bytes:
    return fingerprints(NS, np.array(blocks, np.int32), 1)


def test_a_tie_to_a_forgotten_ghost_is_not_one_to_the_next_of_its_row() -> None:
    tree = GhostTree(0)
    ties, node = Ties(tree), live(1, 2)
    (old,), _ = tree.path(marks(1, 2), 1)
    ties.tie(node, tree.find(marks(1, 2)))
    assert ties.ghost(node) == old and ties.node(old) is node
    tree.forget()
    assert ties.ghost(node) == ROOT and ties.node(old) is node
    ties.clear()
    (new,), _ = tree.path(marks(3), 2)
    assert new == old
    assert node in ties and ties.ghost(node) == ROOT and ties.node(new) is None


def test_a_node_that_left_the_pool_is_kept_alive_by_no_tie() -> None:
    tree = GhostTree(100)
    ties, node = Ties(tree), live(1, 2, 3)
    tree.path(marks(1, 2, 3), 1)
    tree.path(marks(1, 2, 4), 2)
    found = tree.find(marks(1, 2, 3))
    assert len(found) == 2
    ties.tie(node, found)
    ties.removed(node)
    assert node not in ties and not ties._nodes and not ties._ghosts


def test_both_parts_of_a_ghost_that_is_cut_are_tied_to_its_node() -> None:
    tree = GhostTree(100)
    ties, node = Ties(tree), live(1, 2, 3)
    tree.path(marks(1, 2, 3), 1)
    ties.tie(node, tree.find(marks(1, 2, 3)))
    upper, lower = tree.path(marks(1, 2, 4), 2)[0][0], tree.find(marks(1, 2, 3))[-1]
    assert upper != lower and ties.node(upper) is ties.node(lower) is node
