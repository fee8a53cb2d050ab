"""The adaptive policy in the real index: it follows, it switches, it never breaks a leaf rule."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.index.experts import Arc, Recency, TinyLfu
from kvtier.index.follow import Follow, adaptive
from kvtier.index.ghosts import fingerprints
from kvtier.index.policy import LeafLru
from kvtier.index.radix import RadixIndex
from kvtier.index.tree import Node
from kvtier.index.words import Residency, TierId, Tokens

NS = bytes(range(32))
COL = 0


def marks(node: Node) -> bytes:
    return fingerprints(node.namespace, np.frombuffer(node.data, np.int32), 1)


class OneTier:
    """A tier of `capacity` blocks of one token under the index, without bytes."""

    def __init__(self, capacity: int, policy: LeafLru[Node] | Follow) -> None:
        self.index = RadixIndex(1, (TierId.DRAM,), policy=lambda tier: policy)
        self.free = list(range(capacity))

    def request(self, tokens: Tokens) -> int:
        """Hits; takes the rest in as far as room can be made."""
        index = self.index
        index.request(NS, tokens)
        ids = index.match(NS, tokens)
        here = index.state(COL, ids) == Residency.RESIDENT
        hits = len(ids) if here.all() else int(here.argmin())
        index.touch(COL, ids[:hits])
        index.pin(COL, ids[:hits])
        while len(self.free) < len(tokens) - hits:
            victims = index.victims(COL, len(tokens) - hits - len(self.free))
            if not len(victims):
                break
            index.begin_leave(COL, victims)
            self.free += index.finish_leave(COL, victims).tolist()
        taken = min(len(tokens) - hits, len(self.free))
        if taken:
            new = index.insert(NS, tokens[: hits + taken])[hits:]
            slots = np.array(self.free[-taken:], np.int32)
            del self.free[-taken:]
            index.begin_fill(COL, new, slots)
            index.finish_fill(COL, new)
        index.unpin(COL, ids[:hits])
        return hits


paths = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=7), min_size=1, max_size=80)


@pytest.mark.parametrize(("seed", "capacity"), [(1, 12), (2, 31), (3, 60)])
def test_whoever_follows_recency_hits_what_recency_hits(seed: int, capacity: int) -> None:
    """Give or take a few: the tier drops what its leader dropped, a request later at times."""
    rng = np.random.default_rng(seed)
    requests = [rng.integers(0, 3, rng.integers(1, 7)).astype(np.int32) for _ in range(500)]
    follow: Follow = Follow(capacity, marks, [Recency], lead_recency=False)
    followed, plain = OneTier(capacity, follow), OneTier(capacity, LeafLru())
    ours, theirs = sum(map(followed.request, requests)), sum(map(plain.request, requests))
    followed.index.check()
    assert theirs > 300
    assert abs(ours - theirs) <= 0.03 * theirs


@settings(deadline=None, max_examples=60, derandomize=True)
@given(paths, st.integers(2, 12))
def test_the_adaptive_policy_keeps_the_index_whole(
    requests: list[list[int]], capacity: int
) -> None:
    follow: Follow = Follow(capacity, marks, [Recency, Arc, TinyLfu], lead_recency=True)
    tier = OneTier(capacity, follow)
    for request in requests:
        tokens = np.array(request, np.int32)
        hits = tier.request(tokens)
        assert hits <= len(tokens)
        tier.index.check()
        assert set(follow) == {node for node in tier.index._tree.walk_nodes() if node.held[COL]}


def scan_with_favourites(n: int, seed: int) -> list[Tokens]:
    """One-shot paths with a few that come back more rarely than recency can wait for."""
    rng = np.random.default_rng(seed)
    favourites = rng.integers(1 << 20, 1 << 30, (12, 4), dtype=np.int32)
    once = rng.integers(1 << 20, 1 << 30, (n, 4), dtype=np.int32)
    return [favourites[rng.integers(12)] if rng.random() < 0.25 else once[i] for i in range(n)]


def test_where_frequency_wins_it_is_followed_and_the_hits_show_it() -> None:
    requests = scan_with_favourites(3000, 1)
    follow = adaptive(64, marks)
    clever, plain = OneTier(64, follow), OneTier(64, LeafLru())
    gained = sum(map(clever.request, requests))
    lost = sum(map(plain.request, requests))
    assert follow.leader != 0 and follow.num_switches >= 1
    assert gained > 1.4 * lost


def test_where_recency_wins_nothing_is_lost() -> None:
    rng = np.random.default_rng(3)
    chats = [rng.integers(1, 1 << 30, 40, dtype=np.int32) for _ in range(200)]
    requests = [
        chats[which][: 4 * turn]
        for base in range(0, 200, 2)
        for turn in range(1, 11)
        for which in (base, base + 1)
    ]
    clever, plain = OneTier(120, adaptive(120, marks)), OneTier(120, LeafLru())
    gained = sum(map(clever.request, requests))
    assert gained >= 0.98 * sum(map(plain.request, requests))
