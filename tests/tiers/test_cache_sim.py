"""Named cases on the simulated device: failures, deadlines and sharing, in an order we choose."""

from collections.abc import Callable

import pytest

from kvtier.index.words import TierId
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.errors import LaunchRefused
from kvtier.tiers.mover import Mover
from kvtier.tiers.pool import ArrayPool
from kvtier.tiers.simulated import SimDevice, SimStore
from tests.tiers.cache_rig import BLOCK_BYTES, BLOCK_SIZE, NAMESPACE, Rig, doc, keys_of


class SimRig(Rig):
    """A rig whose copies run when the test says so, and fail when it says so."""

    device: SimDevice
    store: SimStore
    mover: Mover
    broken: Callable[[str], bool]

    @classmethod
    def make(cls, hbm: int = 8, dram: int = 24, capacity: int | None = None) -> "SimRig":
        device = SimDevice(7)
        pools = [
            ArrayPool(TierId.HBM, hbm, BLOCK_BYTES, debug=True),
            ArrayPool(TierId.DRAM, dram, BLOCK_BYTES, debug=True),
        ]
        store = SimStore(TierId.NVME, device, capacity=capacity)
        mover = Mover(device)
        cache = TieredCache(BLOCK_SIZE, pools, [store], mover, device.signal, clock=device.clock)
        rig = cls(cache, pools, [store])
        rig.device, rig.store, rig.mover = device, store, mover
        rig.broken = lambda name: False
        device.faults = lambda name: rig.broken(name)
        return rig

    def settle(self) -> None:
        assert self.cache.drain(self.cache.clock() + 1000)
        self.cache.check()

    def in_store_only(self, blocks: int) -> None:
        """Documents 1 of `blocks` blocks stands in the store and nowhere else."""
        self.visit(doc(1, blocks))
        self.cache.flush(NAMESPACE, doc(1, blocks)).wait(self.cache.clock() + 1000)
        for tier in (TierId.HBM, TierId.DRAM):
            self.cache.shed(tier, self.cache.clock() + 1000)
        assert self.cache.match(NAMESPACE, doc(1, blocks)).by_tier.keys() <= {TierId.NVME}


@pytest.fixture
def rig() -> SimRig:
    return SimRig.make()


def test_a_block_the_store_lost_is_a_miss_and_not_promised_again(rig: SimRig) -> None:
    rig.in_store_only(6)
    rig.store.forget(NAMESPACE, keys_of(doc(1, 6))[2])
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6))
    assert lease.ticket.wait(rig.cache.clock() + 100)
    assert lease.landed_blocks == 2
    rig.expect_bytes(lease, doc(1, 6))
    rig.cache.release(lease)
    assert rig.cache.match(NAMESPACE, doc(1, 6)).tokens == 2 * BLOCK_SIZE
    rig.settle()


def test_recompute_refills_what_was_lost(rig: SimRig) -> None:
    rig.in_store_only(6)
    rig.store.forget(NAMESPACE, keys_of(doc(1, 6))[2])
    assert rig.visit(doc(1, 6)) == 2
    assert rig.visit(doc(1, 6)) == 6
    rig.settle()


def test_a_copy_that_fails_half_way_leaves_the_contiguous_part(rig: SimRig) -> None:
    rig.visit(doc(1, 6))
    rig.settle()
    rig.cache.shed(TierId.HBM, rig.cache.clock() + 100)
    failed = iter([False, False, False, True])
    rig.broken = lambda name: name.startswith("copy dram") and next(failed, False)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6))
    assert lease.ticket.wait(rig.cache.clock() + 100)
    assert lease.landed_blocks == 3
    rig.expect_bytes(lease, doc(1, 6))
    rig.broken = lambda name: False
    rig.cache.release(lease)
    assert rig.visit(doc(1, 6)) == 6
    rig.settle()


def test_two_requests_for_one_document_share_every_copy(rig: SimRig) -> None:
    rig.in_store_only(6)
    before = rig.mover.statistics().promoted_blocks
    first = rig.cache.acquire(NAMESPACE, doc(1, 6))
    second = rig.cache.acquire(NAMESPACE, doc(1, 6))
    for lease in (first, second):
        assert lease.ticket.wait(rig.cache.clock() + 100)
        assert lease.landed_blocks == 6
        rig.expect_bytes(lease, doc(1, 6))
    assert rig.mover.statistics().promoted_blocks - before == 6
    rig.cache.release(first)
    rig.cache.release(second)
    rig.settle()


def test_at_the_deadline_a_request_starts_with_what_has_arrived(rig: SimRig) -> None:
    rig.in_store_only(6)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6))
    while lease.landed_blocks < 2:
        rig.device.run_one()
        rig.cache.poll()
    landed = lease.landed_blocks
    lease.ticket.settle()
    assert (lease.landed_blocks, lease.ticket.is_done) == (landed, True)
    rig.settle()  # the rest lands, for others
    rig.expect_bytes(lease, doc(1, 6))
    rig.cache.release(lease)
    assert rig.visit(doc(1, 6)) == 6


def test_blocks_from_nvme_enter_dram_at_the_cold_end() -> None:
    rig = SimRig.make(hbm=4, dram=12)
    rig.in_store_only(4)
    rig.visit(doc(2, 4))
    rig.settle()
    rig.visit(doc(1, 4))  # comes up through DRAM
    rig.visit(doc(3, 4))
    rig.visit(doc(4, 4))  # DRAM must give something up
    rig.settle()
    assert rig.cache.match(NAMESPACE, doc(2, 4)).by_tier == {TierId.DRAM: 16}


def test_a_store_that_refuses_everything_stalls_nobody() -> None:
    rig = SimRig.make(hbm=4, dram=8)
    rig.broken = lambda name: name.startswith("put")
    for seed in range(1, 7):
        assert rig.visit(doc(seed, 4)) == 0
    rig.settle()
    assert len(rig.store) == 0
    assert rig.cache.statistics().dropped > 0


def test_a_flush_that_the_store_refuses_says_how_far_it_came(rig: SimRig) -> None:
    rig.visit(doc(1, 6))
    third = keys_of(doc(1, 6))[3].hex()
    rig.broken = lambda name: name == f"put {third}"
    ticket = rig.cache.flush(NAMESPACE, doc(1, 6))
    assert ticket.wait(rig.cache.clock() + 100)
    assert (ticket.blocks, ticket.failed) == (3, True)
    rig.settle()


def test_a_flush_of_what_is_nowhere_fails_at_once(rig: SimRig) -> None:
    ticket = rig.cache.flush(NAMESPACE, doc(9, 3))
    assert ticket.wait(rig.cache.clock() + 100)
    assert (ticket.blocks, ticket.failed) == (0, True)


def test_the_store_keeps_no_block_without_its_parent(rig: SimRig) -> None:
    rig = SimRig.make(hbm=4, dram=8, capacity=10)
    for seed in (1, 2, 3, 1, 4, 2, 5, 1):
        rig.visit(doc(seed, 4))
        rig.store.check()
    rig.settle()
    rig.store.check()


def test_the_guard_refuses_a_slot_that_a_copy_is_filling(rig: SimRig) -> None:
    rig.visit(doc(1, 3))
    rig.settle()
    rig.cache.shed(TierId.HBM, rig.cache.clock() + 100)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 3))
    filling = rig.cache.slots_of(lease.load.ids)
    with pytest.raises(LaunchRefused, match="FILLING"):
        rig.cache.guard.check([(lease, filling)])
    assert lease.ticket.wait(rig.cache.clock() + 100)
    rig.cache.guard.check([(lease, filling)])
    rig.cache.release(lease)
