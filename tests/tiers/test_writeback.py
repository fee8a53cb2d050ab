"""Write-back on the simulated device: what goes down while nobody needs its room, and when."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvtier.index.words import TierId, Tokens
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.errors import TierFull
from kvtier.tiers.pool import ArrayPool
from kvtier.tiers.simulated import SimDevice, SimStore
from kvtier.tiers.writeback import LONGEST_PAUSE_S, LOOK_S
from tests.prf import block_bytes
from tests.tiers.cache_rig import BLOCK_BYTES, BLOCK_SIZE, NAMESPACE, doc, keys_of
from tests.tiers.sim_rig import SimRig

FOREVER = 1000.0


class Puts:
    """Notes what the store is asked to take, and refuses some of it."""

    def __init__(self, rig: SimRig) -> None:
        self.keys: list[str] = []
        self.refuses: Callable[[str], bool] = lambda name: False
        rig.broken = self._asked

    def _asked(self, name: str) -> bool:
        if not name.startswith("put "):
            return False
        self.keys.append(name.removeprefix("put "))
        return self.refuses(name)


def stored(rig: SimRig, tokens: Tokens) -> int:
    """How many leading blocks the store has."""
    held = [rig.store.holds(NAMESPACE, key) for key in keys_of(tokens)]
    assert sorted(held, reverse=True) == held, "a block without its parent"
    return sum(held)


def pass_time(rig: SimRig, seconds: float) -> None:
    """Let time pass in small steps, with somebody who polls and a device that works."""
    until = rig.device.clock() + seconds
    while rig.device.clock() < until:
        rig.device.advance(min(0.5, until - rig.device.clock()))
        rig.cache.poll()
        rig.device.run_all()
        rig.cache.poll()
    rig.cache.check()


def compute(rig: SimRig, tokens: Tokens) -> None:
    """Visit a document; its blocks are in DRAM, and no time has passed."""
    rig.visit(tokens)
    rig.device.run_all()
    rig.cache.poll()
    assert rig.cache.match(NAMESPACE, tokens).tokens == len(tokens)


def sidecar_rig(slots: int) -> SimRig:
    device = SimDevice(3)
    pool, store = ArrayPool(TierId.DRAM, slots, BLOCK_BYTES), SimStore(TierId.NVME, device)
    cache = TieredCache(BLOCK_SIZE, [pool], [store], None, device.signal, clock=device.clock)
    rig = SimRig(cache, [pool], [store])
    rig.device, rig.store = device, store
    return rig


def take_in(rig: SimRig, tokens: Tokens) -> None:
    """What a sidecar's client does with blocks it has computed."""
    keys = keys_of(tokens)
    slots = rig.cache.reserve(len(keys))
    for slot, key in zip(slots.tolist(), keys, strict=True):
        rig.pools[0].view(slot)[:] = block_bytes(key, BLOCK_BYTES)
    digests = [xxh3_64_intdigest(rig.pools[0].view(slot).data) for slot in slots.tolist()]
    rig.committed.update(keys)
    taken = rig.cache.adopt(NAMESPACE, tokens, 0, slots, np.array(digests, np.uint64))
    assert taken == len(keys)


# ---- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 5])
@pytest.mark.parametrize(("options", "after"), [({}, 30.0), ({"writeback_s": 7.25}, 7.25)])
def test_a_block_is_in_the_store_that_long_after_it_was_filled_and_not_before(
    blocks: int, options: dict[str, Any], after: float
) -> None:
    rig = SimRig.make(**options)
    pass_time(rig, 11)
    compute(rig, doc(1, blocks))
    pass_time(rig, after - 0.25)
    assert len(rig.store) == 0
    pass_time(rig, 0.25 + 0.5 * blocks)
    assert stored(rig, doc(1, blocks)) == blocks
    statistics = rig.cache.statistics()
    assert (statistics.written_back, statistics.writeback_waiting) == (blocks, 0)
    assert all(pool.pinned == 0 for pool in statistics.pools)


def test_without_write_back_nothing_goes_down_by_itself() -> None:
    rig = SimRig.make(writeback_s=None)
    compute(rig, doc(1, 5))
    pass_time(rig, 100)
    assert len(rig.store) == 0
    assert rig.cache.next_due() is None


def test_where_hbm_stands_above_the_store_write_back_is_off() -> None:
    rig = SimRig.make(dram=None)
    rig.visit(doc(1, 5))
    pass_time(rig, 100)
    assert len(rig.store) == 0
    assert rig.cache.next_due() is None


def test_a_sidecars_cache_of_dram_alone_writes_back() -> None:
    rig = sidecar_rig(16)
    take_in(rig, doc(1, 5))
    pass_time(rig, 33)
    assert stored(rig, doc(1, 5)) == 5


def test_somebody_is_told_when_to_look_again() -> None:
    rig = SimRig.make()
    clock = rig.device.clock
    assert rig.cache.next_due() == clock() + 30  # nothing can be due before
    compute(rig, doc(1, 2))
    due = clock() + 30
    rig.device.advance(10)
    assert rig.cache.next_due() == due
    rig.device.advance(20)
    rig.cache.poll()
    assert rig.cache.next_due() == clock() + LOOK_S  # a put is on its way
    rig.device.run_all()
    rig.cache.poll()
    assert rig.cache.next_due() == clock() + 30


def test_a_cache_that_is_polled_when_it_says_so_and_never_else_writes_back_in_time() -> None:
    rig = SimRig.make(hbm=8, dram=40)
    for seed in range(3):
        rig.visit(doc(seed, 8))
    rig.settle()
    while rig.device.clock() < 40:
        due = rig.cache.next_due()
        assert due is not None and due > rig.device.clock()
        rig.device.advance(due - rig.device.clock())
        rig.cache.poll()
        rig.device.run_all()
    assert [stored(rig, doc(seed, 8)) for seed in range(3)] == [8, 8, 8]


# ---- in which order ------------------------------------------------------------------------------


def test_a_block_never_goes_before_its_parent() -> None:
    """DRAM has the end of a document, HBM its head: the end waits until the head has come."""
    rig = SimRig.make(hbm=6, dram=8)
    for seed, blocks in ((8, 6), (9, 2)):  # every slot of DRAM has been used before
        rig.visit(doc(seed, blocks))
        rig.cache.shed(TierId.HBM, rig.device.clock() + FOREVER)
    assert rig.cache.statistics().pools[1].free == 0
    pass_time(rig, 60)
    puts = Puts(rig)
    rig.visit(doc(1, 6))
    lease = rig.cache.acquire(NAMESPACE, doc(2, 3))
    with pytest.raises(TierFull):
        rig.cache.extend(lease, 3)  # the last three have to go down
    rig.device.run_all()
    rig.cache.release(lease)
    rig.settle()
    ledger, ids = rig.cache._ledger, rig.cache._index.match(NAMESPACE, doc(1, 6))
    assert ledger.holds(1, ids).tolist() == [False] * 3 + [True] * 3
    pass_time(rig, 100)
    assert puts.keys == []
    rig.cache.shed(TierId.HBM, rig.device.clock() + FOREVER)
    pass_time(rig, 100)
    assert stored(rig, doc(1, 6)) == 6
    assert puts.keys == [key.hex() for key in keys_of(doc(1, 6))]


def test_ancestors_that_are_younger_in_the_pool_are_waited_for() -> None:
    rig = SimRig.make(hbm=6, dram=8)
    rig.visit(doc(1, 6))
    lease = rig.cache.acquire(NAMESPACE, doc(2, 3))
    with pytest.raises(TierFull):
        rig.cache.extend(lease, 3)
    rig.device.run_all()
    rig.cache.release(lease)
    pass_time(rig, 20)
    rig.cache.shed(TierId.HBM, rig.device.clock() + FOREVER)  # now the head comes, at 20 s
    pass_time(rig, 29)
    assert len(rig.store) == 0
    pass_time(rig, 20)
    assert stored(rig, doc(1, 6)) == 6


def test_roots_go_before_what_hangs_off_others() -> None:
    rig = SimRig.make(hbm=20, dram=40)
    compute(rig, doc(1, 5))
    pass_time(rig, 40)
    puts = Puts(rig)
    compute(rig, doc(1, 9))
    compute(rig, doc(2, 4))
    pass_time(rig, 40)
    assert len(puts.keys) == 8
    assert {key.hex() for key in keys_of(doc(2, 4))} < set(puts.keys[:5])


def test_blocks_behind_a_gap_wait_until_it_is_filled() -> None:
    rig = SimRig.make()
    failed = iter([False, False, True])
    rig.broken = lambda name: name.startswith("copy hbm") and next(failed, False)
    compute(rig, doc(1, 5))  # DRAM lacks the third
    rig.broken = lambda name: False
    pass_time(rig, 100)
    assert stored(rig, doc(1, 5)) == 2
    rig.cache.flush(NAMESPACE, doc(1, 3)).wait(rig.device.clock() + FOREVER)
    pass_time(rig, 100)
    assert stored(rig, doc(1, 5)) == 5


def test_what_the_store_has_lost_meanwhile_goes_down_again_with_its_children() -> None:
    rig = SimRig.make()
    compute(rig, doc(1, 3))
    pass_time(rig, 40)
    compute(rig, doc(1, 5))
    rig.store.forget(NAMESPACE, keys_of(doc(1, 5))[1])
    pass_time(rig, 200)
    assert stored(rig, doc(1, 5)) == 5


# ---- what has left -------------------------------------------------------------------------------


def test_a_block_that_left_meanwhile_is_passed_over_and_nothing_leaks() -> None:
    rig = SimRig.make()
    compute(rig, doc(1, 5))
    pass_time(rig, 10)
    for tier in (TierId.HBM, TierId.DRAM):
        rig.cache.shed(tier, rig.device.clock() + FOREVER)  # down they go, all five
    for key in keys_of(doc(1, 5)):
        rig.store.forget(NAMESPACE, key)
    puts = Puts(rig)
    for seed in (2, 3):
        compute(rig, doc(seed, 6))  # into the slots that came free, perhaps under the same ids
    pass_time(rig, 22)
    assert puts.keys == []
    pass_time(rig, 20)
    assert sorted(puts.keys) == sorted(k.hex() for s in (2, 3) for k in keys_of(doc(s, 6)))
    assert rig.cache.statistics().writeback_waiting == 0


@pytest.mark.parametrize("back", [1, 2])
def test_a_block_that_left_and_came_back_counts_from_its_return(back: int) -> None:
    rig = SimRig.make(hbm=2)
    for seed in (1, 2):
        compute(rig, doc(seed, 1))
    for tier in (TierId.HBM, TierId.DRAM):
        rig.cache.shed(tier, rig.device.clock() + FOREVER)
    for seed in (1, 2):
        rig.store.forget(NAMESPACE, keys_of(doc(seed, 1))[0])
    pass_time(rig, 20)
    compute(rig, doc(back, 1))  # with the same id, in the same slot or another
    pass_time(rig, 29)
    assert len(rig.store) == 0
    pass_time(rig, 2)
    assert stored(rig, doc(back, 1)) == 1


def test_a_store_that_takes_nothing_costs_no_memory() -> None:
    rig = SimRig.make(hbm=4, dram=10)
    Puts(rig).refuses = lambda name: True
    most = 0
    for seed in range(200):
        rig.visit(doc(seed, 4))
        pass_time(rig, 1)
        most = max(most, rig.cache.statistics().writeback_waiting)
    assert 0 < most <= 3 * 10
    assert len(rig.store) == 0


# ---- how much ------------------------------------------------------------------------------------


def test_an_eighth_of_the_pool_is_on_its_way_at_most_and_every_slot_is_accounted_for() -> None:
    rig = SimRig.make(hbm=12, dram=24)
    for seed in (1, 2):
        compute(rig, doc(seed, 9))
    rig.device.advance(31)
    rig.cache.poll()
    seen = set()
    while rig.device.num_pending:
        rig.cache.check()
        statistics = rig.cache.statistics()
        dram = statistics.pools[1]
        assert dram.pinned == statistics.in_flight <= 24 // 8
        assert dram.free + dram.resident == dram.total
        seen.add(statistics.in_flight)
        rig.device.run_one()
        rig.cache.poll()
    assert seen == {1, 2, 3}
    assert [stored(rig, doc(seed, 9)) for seed in (1, 2)] == [9, 9]


def test_one_step_starts_no_more_than_a_bounded_number_of_bytes() -> None:
    device, big = SimDevice(3), 16 << 20
    pool, store = ArrayPool(TierId.DRAM, 80, big), SimStore(TierId.NVME, device)
    cache = TieredCache(BLOCK_SIZE, [pool], [store], None, device.signal, clock=device.clock)
    for seed in range(20):
        unknown = np.zeros(1, np.uint64)
        assert cache.adopt(NAMESPACE, doc(seed, 1), 0, cache.reserve(1), unknown) == 1
    device.advance(31)
    cache.poll()
    assert cache.statistics().in_flight == 4  # 64 MiB


# ---- a store that refuses ------------------------------------------------------------------------


def test_a_store_that_refuses_is_left_alone_for_longer_and_longer() -> None:
    rig = SimRig.make()
    puts = Puts(rig)
    puts.refuses = lambda name: True
    compute(rig, doc(1, 1))
    asked: list[float] = []
    while rig.device.clock() < 1000:
        before = len(puts.keys)
        pass_time(rig, 1)
        asked += [rig.device.clock()] * (len(puts.keys) > before)
    waits = [later - sooner for sooner, later in pairwise(asked)]
    assert sorted(waits) == waits
    assert LONGEST_PAUSE_S <= waits[-1] <= LONGEST_PAUSE_S + 2
    puts.refuses = lambda name: False
    pass_time(rig, 2 * LONGEST_PAUSE_S)
    assert stored(rig, doc(1, 1)) == 1


def test_while_the_store_refuses_nothing_else_is_tried() -> None:
    rig = SimRig.make(hbm=16, dram=32)
    puts = Puts(rig)
    puts.refuses = lambda name: True
    for seed in range(12):
        compute(rig, doc(seed, 1))
    pass_time(rig, 30.5)
    assert len(puts.keys) == 4  # an eighth of the pool
    pass_time(rig, 300)
    assert len(puts.keys) < 60
    puts.refuses = lambda name: False
    pass_time(rig, 2 * LONGEST_PAUSE_S)
    assert len(rig.store) == 12


def test_of_a_put_that_is_refused_in_part_the_rest_is_tried_again() -> None:
    rig = SimRig.make(dram=40)
    puts = Puts(rig)
    third = keys_of(doc(1, 5))[2].hex()
    puts.refuses = lambda name: third in name
    compute(rig, doc(1, 5))
    pass_time(rig, 100)
    assert stored(rig, doc(1, 5)) == rig.cache.statistics().written_back == 2
    puts.refuses = lambda name: False
    pass_time(rig, 200)
    assert stored(rig, doc(1, 5)) == rig.cache.statistics().written_back == 5


def test_a_put_is_over_once_the_hints_say_so() -> None:
    """A store's thread may finish it while the cache is in the middle of something."""
    rig = SimRig.make()
    compute(rig, doc(1, 1))
    rig.device.advance(31)
    rig.cache.poll()
    rig.device.run_all()
    write_back = rig.cache._write_back
    assert write_back is not None
    write_back.advance([])
    assert rig.cache.statistics().written_back == 0
    rig.cache.poll()
    assert rig.cache.statistics().written_back == 1


def test_a_block_that_was_refused_in_the_background_is_not_dropped_when_it_has_to_leave() -> None:
    rig = SimRig.make(hbm=4, dram=8)
    puts = Puts(rig)
    puts.refuses = lambda name: True
    compute(rig, doc(1, 3))
    pass_time(rig, 40)
    assert puts.keys and len(rig.store) == 0
    puts.refuses = lambda name: False
    for tier in (TierId.HBM, TierId.DRAM):
        rig.cache.shed(tier, rig.device.clock() + FOREVER)
    assert stored(rig, doc(1, 3)) == 3
    assert rig.cache.statistics().dropped == 0


# ---- beside others -------------------------------------------------------------------------------


def test_eviction_does_not_wait_for_puts_that_nobody_waits_for() -> None:
    rig = sidecar_rig(16)
    for seed in (1, 2):
        take_in(rig, doc(seed, 8))
    rig.device.advance(31)
    rig.cache.poll()
    in_background = rig.cache.statistics().in_flight
    assert in_background == 2
    with pytest.raises(TierFull):
        rig.cache.reserve(2)
    assert rig.cache.statistics().in_flight > in_background


def test_a_flush_does_not_wait_for_puts_that_nobody_waits_for() -> None:
    rig = sidecar_rig(16)
    take_in(rig, doc(1, 6))
    rig.device.advance(31)
    rig.cache.poll()
    assert rig.cache.statistics().in_flight == 2
    ticket = rig.cache.flush(NAMESPACE, doc(1, 6))
    rig.device.choose = lambda n: n - 1  # the last that may run: the background's are the first
    rig.device.run_one()  # the flush's lookup
    rig.cache.poll()
    assert rig.cache.statistics().in_flight == 2 + 6
    rig.device.run_all()
    rig.cache.poll()
    assert ticket.wait(rig.device.clock() + 100)
    assert (ticket.blocks, ticket.failed) == (6, False)
    rig.settle()
    assert rig.cache.statistics().pools[0].pinned == 0


def test_a_block_under_write_back_can_be_used_and_stays_until_its_put_is_over() -> None:
    rig = SimRig.make(hbm=4, dram=8)
    compute(rig, doc(1, 4))
    rig.device.advance(31)
    rig.cache.poll()
    assert rig.cache.statistics().pools[1].pinned == 1
    lease, hits = rig.serve(doc(1, 4))
    assert hits == 4
    rig.cache.release(lease)
    rig.settle()
    assert rig.cache.statistics().pools[1].pinned == 0


def test_what_is_read_from_the_store_is_not_written_back() -> None:
    rig = SimRig.make()
    rig.in_store_only(6)
    puts = Puts(rig)
    assert rig.visit(doc(1, 6)) == 6
    pass_time(rig, 100)
    assert puts.keys == []
    assert rig.cache.statistics().written_back == 0
