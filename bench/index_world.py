"""The indexes that `bench.index` measures, and what it does to them. Times nothing.

A million blocks in 20,000 leaves that hang off 1,000 stems, all of them RESIDENT in HBM and in DRAM
and known to be in the store: the largest a host of this design is meant for.
"""

from collections.abc import Callable, Iterator
from itertools import count

import numpy as np

from bench.index_probe import (
    BLOCK,
    LEAF_BLOCKS,
    LEAVES_A_STEM,
    leaf_tokens,
    path_prompts,
    tokens_of,
)
from kvtier.index.policies import make_policy
from kvtier.index.radix import RadixIndex
from kvtier.index.words import BlockIds, TierId, Tokens

NS = bytes(32)
HBM, DRAM, STORE = 0, 1, 2
COLUMNS = (TierId.HBM, TierId.DRAM, TierId.NVME)
EVICT_BLOCKS = 1024 // BLOCK


def new_index(policy: str, capacity: int, max_hint_blocks: int = 1_000_000) -> RadixIndex:
    """`capacity`: blocks of each pool, which bounds the policy's shadows."""
    return RadixIndex(
        BLOCK,
        COLUMNS,
        stores=[TierId.NVME],
        max_hint_blocks=max_hint_blocks,
        policy=lambda tier: make_policy(policy, capacity, BLOCK),
    )


def serve(index: RadixIndex, tokens: Tokens, capacity: int) -> BlockIds:
    """A request: told to the policies, and made resident in both pools, which make room."""
    index.request(NS, tokens)
    ids = index.insert(NS, tokens)
    for col in (HBM, DRAM):
        index.pin(col, ids)
        absent = ids[index.state(col, ids) == 0]
        excess = len(absent) - (capacity - index.statistics().columns[col].resident)
        if excess > 0:
            evict(index, col, excess)
        index.begin_fill(col, absent, absent)
        index.finish_fill(col, absent)
        index.touch(col, ids)
    index.set_hint(STORE, ids)
    for col in (HBM, DRAM):
        index.unpin(col, ids)
    return ids


def evict(index: RadixIndex, col: int, n: int) -> None:
    victims = index.victims(col, n)
    index.begin_leave(col, victims)
    index.finish_leave(col, victims)


class World:
    """An index of `leaves` leaves, and requests that it has not seen."""

    def __init__(self, policy: str, leaves: int, max_hint_blocks: int = 1_000_000) -> None:
        self.capacity = leaves * (LEAF_BLOCKS + 1)
        self.index = new_index(policy, self.capacity, max_hint_blocks)
        self._stems = leaves // LEAVES_A_STEM
        self._fresh = count()
        self.fill(leaves)

    def fill(self, leaves: int) -> None:
        """So many requests more, each with a leaf of its own."""
        for leaf in self._next(leaves):
            serve(self.index, leaf_tokens(leaf, self._stems), self.capacity)

    def _next(self, n: int) -> Iterator[int]:
        return (next(self._fresh) for _ in range(n))

    def add_path(self, tokens: Tokens, nodes: int) -> None:
        """`tokens` along `nodes` nodes."""
        for prompt in [tokens, *path_prompts(tokens, nodes)]:
            serve(self.index, prompt, self.capacity)


def ask(index: RadixIndex, tokens: Tokens) -> BlockIds:
    """What one request asks: match, every column's residency, slots, touch, pin."""
    ids = index.match(NS, tokens)
    for col in range(len(COLUMNS)):
        index.state(col, ids)
    index.slots(HBM, ids)
    index.slots(DRAM, ids)
    index.touch(HBM, ids)
    index.pin(HBM, ids)
    return ids


def small_leaves(leaves: int) -> tuple[RadixIndex, Callable[[int], None]]:
    """Leaves of four blocks below one stem in HBM, for eviction alone; and a way to add more."""
    index = new_index("lru", 4 * leaves)
    rng = np.random.default_rng(leaves)
    system = tokens_of(4 * BLOCK, 1)

    def add(n: int) -> None:
        tails = rng.integers(0, 2**31 - 1, (n, 4 * BLOCK), dtype=np.int32)
        for tail in tails:
            ids = index.insert(NS, np.concatenate((system, tail)))
            absent = ids[index.state(HBM, ids) == 0]
            index.begin_fill(HBM, absent, absent)
            index.finish_fill(HBM, absent)

    add(leaves)
    return index, add
