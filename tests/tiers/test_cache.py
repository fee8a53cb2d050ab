"""The cache over real threads (CpuDevice), small pools, no store: the life of a lease."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.index.words import TierId
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.contracts import Signal
from kvtier.tiers.device import CpuDevice
from kvtier.tiers.errors import LaunchRefused
from kvtier.tiers.mover import Mover
from kvtier.tiers.pool import ArrayPool
from tests.tiers.cache_rig import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    NAMESPACE,
    Rig,
    doc,
    stamped,
)


def make_rig(hbm_slots: int, dram_slots: int | None) -> Rig:
    signal = Signal()
    pools = [ArrayPool(TierId.HBM, hbm_slots, BLOCK_BYTES)]
    if dram_slots is not None:
        pools.append(ArrayPool(TierId.DRAM, dram_slots, BLOCK_BYTES))
    cache = TieredCache(BLOCK_SIZE, pools, [], Mover(CpuDevice(signal)), signal)
    return Rig(cache, pools, [])


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = make_rig(8, 24)
    yield rig
    assert rig.cache.drain(rig.cache.clock() + 30)
    rig.cache.check()
    rig.cache.close()


def test_what_was_committed_is_hit_and_what_was_not_is_not(rig: Rig) -> None:
    assert rig.visit(doc(1, 5)) == 0
    assert rig.visit(doc(1, 5)) == 5
    assert rig.visit(doc(1, 7)) == 5
    assert rig.visit(doc(2, 3)) == 0


def test_tokens_that_do_not_fill_a_block_are_not_cached(rig: Rig) -> None:
    tokens = doc(1, 3)
    rig.visit(tokens[:-1])
    assert rig.visit(tokens) == 2


def test_limit_leaves_at_least_one_token_to_compute(rig: Rig) -> None:
    tokens = doc(1, 4)
    rig.visit(tokens)
    lease = rig.cache.acquire(NAMESPACE, tokens, limit=len(tokens) - 1)
    assert lease.cached_tokens == 3 * BLOCK_SIZE
    rig.cache.release(lease)


def test_eviction_takes_the_least_recently_used_leaf_and_never_a_pinned_block(rig: Rig) -> None:
    held, _ = rig.serve(doc(1, 4))
    rig.visit(doc(2, 3))
    rig.visit(doc(3, 4))  # 4 + 3 + 4 > 8: something of doc 2 had to go
    rig.expect_bytes(held, doc(1, 4))
    match = rig.cache.match(NAMESPACE, doc(1, 4))
    assert match.by_tier == {TierId.HBM: 16}
    rig.cache.release(held)


def test_without_a_lower_tier_eviction_forgets_and_says_so() -> None:
    rig = make_rig(4, None)
    rig.visit(doc(1, 4))
    rig.visit(doc(2, 4))
    assert rig.visit(doc(1, 4)) == 0
    assert rig.cache.statistics().dropped >= 4


def test_commit_refuses_tokens_other_than_the_leases(rig: Rig) -> None:
    lease, _ = rig.serve(doc(1, 2))
    rig.cache.extend(lease, 1)
    known = rig.cache.statistics().blocks
    with pytest.raises(ValueError, match="differ"):
        rig.cache.commit(lease, doc(2, 3))
    with pytest.raises(ValueError, match="do not fit"):
        rig.cache.commit(lease, doc(1, 5))
    assert rig.cache.statistics().blocks == known
    rig.cache.release(lease)


def test_release_frees_private_blocks_and_may_be_repeated(rig: Rig) -> None:
    lease = rig.cache.acquire(NAMESPACE, doc(1, 2))
    rig.cache.extend(lease, 5)
    rig.cache.release(lease)
    rig.cache.release(lease)
    assert rig.cache.statistics().pools[0].free == 8


def test_a_fork_shares_blocks_and_copies_the_partial_tail(rig: Rig) -> None:
    tokens = doc(1, 3)
    lease, _ = rig.serve(tokens)
    rig.cache.extend(lease, 1)
    tail = rig.pools[0].view(int(lease.block_table[3]))
    tail[:] = 7
    twin = rig.cache.fork(lease)
    assert twin.ticket.wait(rig.cache.clock() + 10)
    assert np.array_equal(twin.block_table[:3], lease.block_table[:3])
    assert twin.block_table[3] != lease.block_table[3]
    assert (rig.pools[0].view(int(twin.block_table[3])) == 7).all()
    rig.cache.release(lease)
    rig.expect_bytes(twin, tokens)
    rig.cache.guard.check([(twin, twin.table)])
    rig.cache.release(twin)


def test_the_guard_refuses_free_foreign_and_outside_slots(rig: Rig) -> None:
    mine = rig.cache.acquire(NAMESPACE, doc(1, 2))
    rig.cache.extend(mine, 2)
    foreign = rig.cache.acquire(NAMESPACE, doc(2, 1))
    rig.cache.extend(foreign, 1)
    rig.cache.guard.check([(mine, mine.table), (foreign, foreign.table)])
    with pytest.raises(LaunchRefused, match=rf"PRIVATE by lease {foreign.id}"):
        rig.cache.guard.check([(mine, foreign.table)])
    gone = foreign.table
    rig.cache.release(foreign)
    with pytest.raises(LaunchRefused, match="FREE"):
        rig.cache.guard.check([(mine, gone)])
    with pytest.raises(LaunchRefused, match="outside"):
        rig.cache.guard.check([(mine, stamped(rig.cache, [99]))])
    rig.cache.release(mine)


def test_has_room_and_statistics_add_up(rig: Rig) -> None:
    lease, _ = rig.serve(doc(1, 3))
    rig.cache.extend(lease, 2)
    hbm = rig.cache.statistics().pools[0]
    assert (hbm.total, hbm.resident, hbm.private, hbm.pinned) == (8, 3, 2, 3)
    assert rig.cache.has_room(3)
    assert not rig.cache.has_room(4)
    rig.cache.release(lease)
    assert rig.cache.drain(rig.cache.clock() + 10)  # what is being copied down cannot leave yet
    assert rig.cache.has_room(8)
