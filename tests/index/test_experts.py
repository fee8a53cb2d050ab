"""Experts against plain block-by-block models, and the ghost tree they share."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.index.experts import Arc, Frequency, Independent, TinyLfu
from kvtier.index.ghosts import ROOT, Ghost, GhostTree, fingerprints
from kvtier.index.recency import Recency

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
    tree = GhostTree(0)
    expert = Recency(tree, capacity)
    model = BlockLru(capacity)
    for clock, request in enumerate(requests, 1):
        path, known = tree.path(marks(request), clock)
        assert expert.request(path, known, clock) == model.request(request)
        assert expert.used == len(model.last)
        tree.forget()


MAKERS: list[Callable[[GhostTree, int], Recency]] = [
    Recency,
    Arc,
    lambda tree, capacity: Frequency(tree, capacity, weight=1.0, most=4),
    lambda tree, capacity: Independent(tree, capacity, weight=4.0, most=16),
    TinyLfu,
]


def ghosts_of(tree: GhostTree) -> list[Ghost]:
    return [ghost for ghost in range(len(tree._marks)) if tree.length(ghost)]


@settings(deadline=None, max_examples=60)
@given(paths, st.integers(1, 12), st.integers(0, 20))
def test_every_expert_keeps_its_books_a_prefix_closed_set_and_the_path_at_hand(
    requests: list[Path], capacity: int, bound: int
) -> None:
    tree = GhostTree(bound)
    experts = [make(tree, capacity) for make in MAKERS]
    for clock, request in enumerate(requests, 1):
        path, known = tree.path(marks(request), clock)
        assert b"".join(map(tree.marks, path)) == marks(request)
        assert tree.find(marks(request)) == path
        for expert in experts:
            before = expert.depth_held(path[-1])
            assert expert.request(path, known, clock) == before
            assert expert.depth_held(path[-1]) == min(len(request), capacity)
        tree.forget()
        ghosts = ghosts_of(tree)
        children: dict[Ghost, list[Ghost]] = {ghost: [] for ghost in [ROOT, *ghosts]}
        for ghost in ghosts:
            children[tree.parent[ghost]].append(ghost)
        assert tree.num_ghosts == len(ghosts)
        idle = sum(tree.length(g) for g in ghosts if not tree.holders(g) and not children[g])
        assert idle <= bound
        for expert in experts:
            held, twigs = expert.held, expert.twigs
            assert sum(held) == sum(held[g] for g in ghosts) == expert.used <= capacity
            for ghost in ghosts:
                assert twigs[ghost] == sum(held[c] > 0 for c in children[ghost])
                if twigs[ghost]:
                    assert held[ghost] == tree.length(ghost)
        for ghost in ghosts:
            holders = sum(expert.held[ghost] > 0 for expert in experts)
            assert tree.holders(ghost).bit_count() == holders


@pytest.mark.parametrize("make", MAKERS)
def test_an_expert_never_gets_stuck_on_what_it_holds(
    make: Callable[[GhostTree, int], Recency],
) -> None:
    """Whatever came before, a path asked for again and again is held in the end."""
    tree = GhostTree(100)
    expert = make(tree, 20)
    rng = np.random.default_rng(7)
    clock = 0
    for _ in range(400):
        clock += 1
        request = tuple(rng.integers(0, 3, rng.integers(1, 9)).tolist())
        path, known = tree.path(marks(request), clock)
        expert.request(path, known, clock)
        tree.forget()
    wanted = (9, 9, 9, 9, 9)
    for _ in range(40):
        clock += 1
        path, known = tree.path(marks(wanted), clock)
        hits = expert.request(path, known, clock)
        tree.forget()
    assert hits == len(wanted)


@pytest.mark.parametrize("make", MAKERS)
def test_a_forgotten_ghost_leaves_nothing_to_the_next_one_of_its_row(
    make: Callable[[GhostTree, int], Recency],
) -> None:
    """Rows are used again at once, and an expert goes on as if each ghost were new."""
    rng = np.random.default_rng(11)
    requests = [tuple(rng.integers(0, 3, rng.integers(1, 9)).tolist()) for _ in range(1500)]
    thrifty, lavish = (run_on(make, requests, again) for again in (True, False))
    assert thrifty == lavish


def run_on(
    make: Callable[[GhostTree, int], Recency], requests: list[Path], again: bool
) -> list[int]:
    """Hits of each request, with rows used again or never."""
    tree = GhostTree(15)
    if not again:
        tree.rows.give = lambda row: None  # type: ignore[method-assign]
    expert = make(tree, 10)
    hits = []
    for clock, request in enumerate(requests, 1):
        path, known = tree.path(marks(request), clock)
        hits.append(expert.request(path, known, clock))
        tree.forget()
    assert (len(tree.rows) < 200) == again
    return hits


def test_a_row_in_a_queue_is_not_used_again_before_its_last_entry_left() -> None:
    tree = GhostTree(0)
    bit = tree.enrol(Recency(tree, 1))
    (old,), _ = tree.path(marks((1,)), 1)
    tree.enqueue(old, bit)
    tree.unmark(old, bit)
    assert not tree.is_queued(old, bit)
    tree.enqueue(old, bit)
    tree.forget()
    assert tree.num_ghosts == 0
    (new,), _ = tree.path(marks((2,)), 2)
    tree.dequeue(old, bit)
    (third,), _ = tree.path(marks((3,)), 3)
    tree.dequeue(old, bit)
    (fourth,), _ = tree.path(marks((4,)), 4)
    assert len({old, new, third}) == 3 and fourth == old
    assert not tree.is_queued(fourth, bit)


def test_what_a_ghost_held_is_shared_out_when_it_is_cut() -> None:
    tree = GhostTree(100)
    experts = [make(tree, 4) for make in MAKERS]
    path, known = tree.path(marks((1, 2, 3, 4, 5, 6)), 1)
    for expert in experts:
        expert.request(path, known, 1)
    path, known = tree.path(marks((1, 2, 7)), 2)
    assert known == 2 and [tree.length(ghost) for ghost in path] == [2, 1]
    (lower,) = (g for g in ghosts_of(tree) if g not in path)
    for expert in experts:
        assert [expert.held[g] for g in (*path, lower)] == [2, 0, 2]
        assert expert.twigs[path[0]] == 1


def test_there_is_room_for_sixteen_experts() -> None:
    tree = GhostTree(0)
    for _ in range(16):
        Recency(tree, 1)
    with pytest.raises(ValueError, match="experts: 16 of one tree are the most"):
        Recency(tree, 1)


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


def test_fingerprints_are_the_hash_they_always_were() -> None:
    """A sum of products modulo 2^64, mixed: 128k tokens in a tenth of a millisecond."""
    factor, whole = 0x9E3779B97F4A7C15, (1 << 64) - 1
    tokens = np.random.default_rng(5).integers(-3, 1 << 31, 3 * 16, dtype=np.int32)
    found = np.frombuffer(fingerprints(NS, tokens, 16), np.uint32)
    for block, mark in zip(tokens.reshape(3, 16).tolist(), found.tolist(), strict=True):
        terms = ((token + 1) * (2 * i + 1) * factor for i, token in enumerate(block))
        mixed = (sum(terms) & whole) ^ int.from_bytes(NS[:8], "little")
        mixed = ((mixed ^ mixed >> 29) * factor) & whole
        assert mark == mixed >> 32
