"""The conformance list of a prefix index, continued: cases that need slots, copies or a store.

`tests/index/test_conformance.py` begins the list and names what has its tests elsewhere.
"""

import numpy as np
import pytest

from kvtier.index.namespace import Namespace
from kvtier.index.words import TierId
from kvtier.tiers.errors import TierFull
from tests.index.helpers import BASE, variants
from tests.tiers.cache_rig import BLOCK_SIZE, NAMESPACE, doc, keys_of
from tests.tiers.sim_rig import SimRig

LATER = 1000.0
ORDER = [TierId.HBM, TierId.DRAM, TierId.NVME]


@pytest.fixture
def rig() -> SimRig:
    return SimRig.make()


def only_in(rig: SimRig, tier: TierId, blocks: int = 6) -> None:
    """Document 1 stands in this tier and in none above it."""
    rig.visit(doc(1, blocks))
    rig.settle()
    if tier is TierId.HBM:
        return
    rig.cache.shed(TierId.HBM, rig.cache.clock() + LATER)
    if tier is TierId.NVME:
        rig.in_store_only(blocks)
    assert rig.cache.match(NAMESPACE, doc(1, blocks)).by_tier == {tier: blocks * BLOCK_SIZE}


# ---- structure -----------------------------------------------------------------------------------


def test_blocks_computed_twice_are_adopted_and_their_second_slots_freed(rig: SimRig) -> None:
    """Re-insertion returns duplicates to free: the second request adopts the first one's."""
    tokens = doc(1, 3)
    first = rig.cache.acquire(NAMESPACE, tokens)
    second = rig.cache.acquire(NAMESPACE, tokens)
    for lease in (first, second):
        assert lease.ticket.wait(rig.cache.clock() + LATER)
    rig.compute(first, tokens)
    rig.cache.extend(second, 3)
    free = rig.cache.statistics().pools[0].free
    assert not set(second.block_table) & set(first.block_table)
    assert rig.cache.commit(second, tokens) == 3
    assert np.array_equal(second.block_table, first.block_table)
    rig.settle()
    assert rig.cache.statistics().pools[0].free == free + 3
    rig.cache.release(first)
    rig.expect_bytes(second, tokens)
    rig.cache.release(second)
    assert rig.cache.statistics().pools[0].resident == 3


# ---- isolation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ORDER)
@pytest.mark.parametrize(("name", "other"), variants(), ids=[name for name, _ in variants()])
def test_no_tier_serves_a_namespace_that_differs_in_one_field(
    tier: TierId, name: str, other: Namespace
) -> None:
    """Isolation per field of the fingerprint, in every tier."""
    rig = SimRig.make()
    rig.visit(doc(1, 3), BASE.digest)
    assert rig.cache.flush(BASE.digest, doc(1, 3)).wait(rig.cache.clock() + LATER)
    for above in ORDER[: ORDER.index(tier)]:
        rig.cache.shed(above, rig.cache.clock() + LATER)
    assert rig.visit(doc(1, 3), other.digest) == 0
    assert rig.visit(doc(1, 3), BASE.digest) == 3
    rig.settle()


# ---- tiers ---------------------------------------------------------------------------------------


def test_blocks_evicted_from_hbm_are_served_from_dram(rig: SimRig) -> None:
    """A device-evicted block with a host copy still hits, and is a device hit afterwards."""
    only_in(rig, TierId.DRAM)
    for tier in (TierId.DRAM, TierId.HBM):
        lease, hits = rig.serve(doc(1, 6))
        assert (hits, dict(lease.hit_tokens)) == (6, {tier: 24})
        rig.cache.release(lease)
    rig.settle()


def test_nothing_behind_an_ancestor_that_was_not_copied_down_is_a_hit(rig: SimRig) -> None:
    """No holes behind un-backed ancestors: a match stops at the gap, and recompute closes it."""
    rig.broken = lambda name: name.startswith("copy hbm[0]")  # the first block's, the root
    rig.visit(doc(1, 6))
    rig.settle()
    rig.broken = lambda name: False
    assert rig.cache.shed(TierId.HBM, rig.cache.clock() + LATER) == 6
    assert rig.cache.statistics().pools[1].resident == 5
    assert rig.cache.match(NAMESPACE, doc(1, 6)).tokens == 0
    assert rig.visit(doc(1, 6)) == 0
    rig.settle()
    assert rig.visit(doc(1, 6)) == 6
    assert rig.cache.statistics().pools[1].resident == 6
    rig.settle()


def test_the_store_keeps_no_block_without_its_parent() -> None:
    """The same of a store: what lies behind a gap could never be found."""
    rig = SimRig.make(hbm=4, dram=8, capacity=10)
    for seed in (1, 2, 3, 1, 4, 2, 5, 1):
        rig.visit(doc(seed, 4))
        rig.store.check()
    rig.settle()
    assert len(rig.store) > 0
    rig.store.check()


@pytest.mark.parametrize("tier", [TierId.DRAM, TierId.NVME])
def test_blocks_being_loaded_are_not_evicted(rig: SimRig, tier: TierId) -> None:
    """A pending load is never evicted, neither the copy nor what it reads."""
    only_in(rig, tier)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6))
    while sum(pool.filling for pool in rig.cache.statistics().pools) == 0:
        assert rig.device.run_one()
        rig.cache.poll()
    before = rig.cache.statistics()
    for each in (TierId.HBM, TierId.DRAM):
        assert rig.cache.shed(each, rig.cache.clock()) == 0
    assert rig.cache.statistics() == before
    assert lease.ticket.wait(rig.cache.clock() + LATER)
    assert lease.landed_blocks == 6
    rig.expect_bytes(lease, doc(1, 6))
    rig.cache.release(lease)
    rig.settle()


def test_blocks_being_stored_are_not_evicted_before_they_are(rig: SimRig) -> None:
    """A pending store is never evicted: its slot is being read."""
    only_in(rig, TierId.DRAM)
    ticket = rig.cache.flush(NAMESPACE, doc(1, 6))
    while len(rig.store) < 2:
        assert rig.device.run_one()
        rig.cache.poll()
    assert len(rig.store) < 6
    rig.cache.shed(TierId.DRAM, rig.cache.clock())
    assert rig.cache.statistics().pools[1].resident >= 6 - len(rig.store)
    assert rig.cache.match(NAMESPACE, doc(1, 6)).tokens == 6 * BLOCK_SIZE
    assert ticket.wait(rig.cache.clock() + LATER)
    assert (ticket.blocks, ticket.failed) == (6, False)
    assert rig.visit(doc(1, 6)) == 6
    rig.settle()


def test_a_promotion_that_races_an_insertion_has_one_owner(rig: SimRig) -> None:
    """Promotion racing insertion: who commits a block that a copy is filling waits for it."""
    tokens = doc(1, 3)
    early = rig.cache.acquire(NAMESPACE, tokens)
    assert early.ticket.wait(rig.cache.clock() + LATER)
    rig.cache.extend(early, 3)
    rig.visit(tokens)
    rig.settle()
    rig.cache.shed(TierId.HBM, rig.cache.clock() + LATER)
    late = rig.cache.acquire(NAMESPACE, tokens)  # fills HBM again, and nothing has run yet
    assert rig.compute(early, tokens) == 0
    assert (len(early.committed), len(early.private)) == (0, 3)
    rig.cache.guard.check([(early, early.table)])
    assert late.ticket.wait(rig.cache.clock() + LATER)
    assert rig.cache.commit(early, tokens) == 3
    assert np.array_equal(early.block_table, late.block_table)
    for lease in (early, late):
        rig.expect_bytes(lease, tokens)
        rig.cache.release(lease)
    rig.settle()
    assert rig.cache.statistics().pools[0].resident == 3


def test_a_promotion_that_fails_half_way_leaves_the_contiguous_part(rig: SimRig) -> None:
    """A half-failed promotion: the request starts with what has arrived, the rest is no hit."""
    only_in(rig, TierId.DRAM)
    failed = iter([False, False, False, True])
    rig.broken = lambda name: name.startswith("copy dram") and next(failed, False)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6))
    assert lease.ticket.wait(rig.cache.clock() + LATER)
    assert lease.landed_blocks == 3
    rig.expect_bytes(lease, doc(1, 6))
    rig.broken = lambda name: False
    rig.cache.release(lease)
    assert rig.visit(doc(1, 6)) == 6
    rig.settle()


def test_an_allocation_that_fails_leaves_every_count_as_it_was() -> None:
    """A full pool of pinned blocks refuses and changes nothing."""
    rig = SimRig.make(hbm=4, dram=None, store=False)
    lease, _ = rig.serve(doc(1, 3))
    other = rig.cache.acquire(NAMESPACE, doc(2, 2))
    before = rig.cache.statistics()
    with pytest.raises(TierFull, match="no room for 2 blocks"):
        rig.cache.extend(other, 2, deadline=rig.cache.clock() + 5)
    assert rig.cache.statistics() == before
    assert not rig.cache.has_room(2)
    rig.cache.release(lease)
    assert rig.cache.has_room(2)
    rig.compute(other, doc(2, 2))
    rig.cache.release(other)
    rig.settle()


def test_a_block_the_store_lost_is_a_miss_and_not_promised_again(rig: SimRig) -> None:
    """A failed load: the next lookup misses, so that nobody tries the same for ever."""
    rig.in_store_only(6)
    rig.store.forget(NAMESPACE, keys_of(doc(1, 6))[2])
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6))
    assert lease.ticket.wait(rig.cache.clock() + LATER)
    assert lease.landed_blocks == 2
    rig.expect_bytes(lease, doc(1, 6))
    rig.cache.release(lease)
    assert rig.cache.match(NAMESPACE, doc(1, 6)).tokens == 2 * BLOCK_SIZE
    rig.settle()


def test_closing_amid_transfers_ends_every_one_and_loses_no_slot(rig: SimRig) -> None:
    """Reset during transfers: what is loading and what is being written ends, all slots return."""
    rig.in_store_only(4)
    loading = rig.cache.acquire(NAMESPACE, doc(1, 4))
    rig.visit(doc(2, 3))
    going_down = rig.cache.flush(NAMESPACE, doc(2, 3))
    assert rig.cache.statistics().in_flight > 0
    rig.cache.close()
    assert loading.ticket.wait(rig.cache.clock() + LATER)
    assert going_down.wait(rig.cache.clock() + LATER)
    rig.expect_bytes(loading, doc(1, 4), loading.landed_blocks)
    rig.cache.release(loading)
    going_down.close()
    rig.device.run_all()
    rig.settle()
    for pool in rig.cache.statistics().pools:
        assert pool.free + pool.resident == pool.total
        assert pool.pinned == 0


# ---- global --------------------------------------------------------------------------------------


def test_with_hbm_and_dram_flushed_the_same_blocks_come_from_nvme(rig: SimRig) -> None:
    """Flush HBM and DRAM, ask again: a hit on NVMe, with the same bytes."""
    only_in(rig, TierId.NVME)
    lease, hits = rig.serve(doc(1, 6))
    assert (hits, dict(lease.hit_tokens)) == (6, {TierId.NVME: 24})
    rig.cache.release(lease)
    rig.settle()
