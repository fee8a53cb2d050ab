"""The adaptive policy in the real index: it follows, it switches, it never breaks a leaf rule."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.index.experts import Arc, TinyLfu
from kvtier.index.follow import Follow
from kvtier.index.ghosts import GhostTree, fingerprints
from kvtier.index.policies import make_policy
from kvtier.index.policy import LeafLru
from kvtier.index.recency import Recency
from kvtier.index.tree import Node
from kvtier.index.words import Tokens
from kvtier.tools.replay.one_tier import COL, NAMESPACE, OneTier


def marks(node: Node) -> bytes:
    return fingerprints(node.namespace, np.frombuffer(node.data, np.int32), 1)


def policy(name: str, capacity: int) -> Follow:
    made = make_policy(name, capacity, 1)
    assert isinstance(made, Follow)
    return made


paths = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=7), min_size=1, max_size=80)


@settings(deadline=None, max_examples=60)
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


@pytest.mark.parametrize(
    ("make", "beats_recency"), [(Recency, False), (Arc, True), (TinyLfu, True)]
)
def test_a_tier_that_follows_an_expert_hits_about_what_the_expert_hits(
    make: Callable[[GhostTree, int], Recency], beats_recency: bool
) -> None:
    """Not to a block: the tier makes room before it knows what the expert will take in."""
    requests = scan_with_favourites(2000, 2)
    tree = GhostTree(128)
    expert = make(tree, 64)
    theirs = 0
    for clock, request in enumerate(requests, 1):
        path, known = tree.path(fingerprints(NAMESPACE, request, 1), clock)
        theirs += expert.request(path, known, clock)
        tree.forget()
    tier = OneTier(64, Follow(64, marks, [make], lead_recency=False))
    ours = sum(map(tier.request, requests))
    tier.index.check()
    assert abs(ours - theirs) < 0.1 * theirs
    plain = OneTier(64, LeafLru())
    assert (ours > 1.2 * sum(map(plain.request, requests))) == beats_recency


def test_where_frequency_wins_it_is_followed_and_the_hits_show_it() -> None:
    requests = scan_with_favourites(3000, 1)
    follow = policy("adaptive", 64)
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
    clever, plain = OneTier(120, policy("adaptive", 120)), OneTier(120, LeafLru())
    gained = sum(map(clever.request, requests))
    assert gained >= 0.98 * sum(map(plain.request, requests))
