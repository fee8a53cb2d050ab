"""Named cases on the simulated device: failures, deadlines and sharing, in an order we choose."""

import numpy as np
import pytest

from kvtier.index.words import TierId
from kvtier.tiers.device import D2H
from kvtier.tiers.errors import LaunchRefused, TierFull
from tests.tiers.cache_rig import BLOCK_BYTES, NAMESPACE, doc, keys_of, stamped
from tests.tiers.sim_rig import GpuRig, SimRig


@pytest.fixture
def rig() -> SimRig:
    return SimRig.make()


def test_recompute_refills_what_was_lost(rig: SimRig) -> None:
    rig.in_store_only(6)
    rig.store.forget(NAMESPACE, keys_of(doc(1, 6))[2])
    assert rig.visit(doc(1, 6)) == 2
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


def test_the_guard_refuses_a_slot_that_a_copy_is_filling(rig: SimRig) -> None:
    rig.visit(doc(1, 3))
    rig.settle()
    rig.cache.shed(TierId.HBM, rig.cache.clock() + 100)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 3))
    filling = rig.cache.slots_of(lease.load.ids)
    with pytest.raises(LaunchRefused, match="FILLING"):
        rig.cache.guard.check([(lease, stamped(rig.cache, filling))])
    assert lease.ticket.wait(rig.cache.clock() + 100)
    rig.cache.guard.check([(lease, stamped(rig.cache, filling))])
    rig.cache.release(lease)


def test_blocks_go_down_only_after_the_compute_that_fills_them() -> None:
    rig = GpuRig.make(async_compute=True)
    rig.use(doc(1, 5))  # a copy down is queued at once, before the compute has run
    rig.come_to_rest()
    assert rig.cache.shed(TierId.HBM, rig.cache.clock() + 100) == 5
    lease = rig.cache.acquire(NAMESPACE, doc(1, 5))
    assert lease.ticket.wait(rig.cache.clock() + 100)
    assert lease.landed_blocks == 5
    rig.expect_bytes(lease, doc(1, 5))


def test_asking_again_for_slots_that_compute_still_reads_evicts_no_more() -> None:
    rig = GpuRig.make(hbm=6, async_compute=True)
    for seed in range(1, 7):
        rig.use(doc(seed, 1))
    rig.come_to_rest()
    for seed in range(1, 7):
        rig.use(doc(seed, 1))
    lease = rig.cache.acquire(NAMESPACE, doc(7, 2))
    for _ in range(4):
        with pytest.raises(TierFull):
            rig.cache.extend(lease, 2)
    assert rig.cache.statistics().pools[0].leaving == 2
    assert rig.cache.has_room(6)
    before = rig.cache.clock()
    rig.cache.extend(lease, 2, deadline=before + 10)
    assert rig.cache.clock() - before < 0.05  # it sees in time that compute is over
    rig.cache.release(lease)
    rig.come_to_rest()


def test_a_block_that_is_leaving_and_nowhere_else_is_matched_and_kept() -> None:
    rig = GpuRig.make(hbm=4, dram=None, store=False, async_compute=True)
    rig.use(doc(1, 4))
    other = rig.cache.acquire(NAMESPACE, doc(2, 1))
    with pytest.raises(TierFull):
        rig.cache.extend(other, 1)  # compute still writes what is to go
    assert rig.cache.statistics().pools[0].leaving == 1
    assert rig.cache.match(NAMESPACE, doc(1, 4)).by_tier == {TierId.HBM: 16}
    lease = rig.cache.acquire(NAMESPACE, doc(1, 4))
    assert lease.landed_blocks == 4
    rig.device.run_all()
    rig.expect_bytes(lease, doc(1, 4))
    rig.come_to_rest()


def test_a_lookup_ends_when_what_it_found_leaves_meanwhile() -> None:
    rig = GpuRig.make(hbm=4, dram=2, store=False, async_compute=True)
    rig.use(doc(1, 2))
    rig.come_to_rest()
    rig.cache.flush(NAMESPACE, doc(1, 2)).close()
    rig.cache.shed(TierId.HBM, rig.cache.clock() + 100)
    index = rig.cache._index
    stays = index.match(NAMESPACE, doc(1, 2))
    index.pin(1, stays)  # DRAM is full
    rig.use(doc(2, 4))
    other = rig.cache.acquire(NAMESPACE, doc(3, 1))
    with pytest.raises(TierFull):
        rig.cache.extend(other, 1)
    assert rig.cache.statistics().pools[0].leaving > 0
    ticket = rig.cache.lookup(NAMESPACE, doc(2, 4))
    rig.device.run_all()
    assert ticket.wait(rig.cache.clock() + 100)
    assert sum(ticket.hit_tokens.values()) < 16
    ticket.close()
    index.unpin(1, stays)
    rig.come_to_rest()


def test_blocks_wait_for_slots_below_that_are_coming_free_and_are_not_dropped() -> None:
    rig = GpuRig.make(hbm=4, dram=4, async_compute=True)
    rig.use(doc(1, 4))
    assert rig.cache.flush(NAMESPACE, doc(1, 4)).wait(rig.cache.clock() + 100)
    rig.cache.shed(TierId.HBM, rig.cache.clock() + 100)
    rig.come_to_rest()
    rig.use(doc(2, 4))
    rig.mover.reading(rig.pools[1], np.arange(4, dtype=np.int32))  # what the copy down displaces
    lease = rig.cache.acquire(NAMESPACE, doc(3, 1))
    with pytest.raises(TierFull):
        rig.cache.extend(lease, 1)
    rig.cache.extend(lease, 1, deadline=rig.cache.clock() + 100)
    rig.cache.release(lease)
    rig.come_to_rest()
    assert rig.cache.statistics().dropped == 0


def test_a_flush_keeps_a_block_that_is_about_to_be_dropped() -> None:
    rig = GpuRig.make(hbm=4, dram=6, async_compute=True)
    rig.use(doc(1, 4))
    other = rig.cache.acquire(NAMESPACE, doc(2, 1))
    rig.broken = lambda name: name.startswith("copy hbm")
    with pytest.raises(TierFull):
        rig.cache.extend(other, 1)
    rig.come_to_rest()  # the copy down has failed: the block goes next time
    rig.use(doc(1, 4))
    with pytest.raises(TierFull):
        rig.cache.extend(other, 1)
    assert rig.cache.statistics().pools[0].leaving == 1
    rig.broken = lambda name: False
    ticket = rig.cache.flush(NAMESPACE, doc(1, 4))
    assert ticket.wait(rig.cache.clock() + 100)
    assert ticket.blocks == 4
    rig.come_to_rest()


def test_slots_for_a_lease_that_was_released_meanwhile_go_back(rig: SimRig) -> None:
    rig = SimRig.make(hbm=4, dram=6)
    rig.visit(doc(1, 4))  # nothing of it is in DRAM yet
    lease = rig.cache.acquire(NAMESPACE, doc(2, 3))
    lease.ticket.settle()
    rig.device.schedule("cancel", lambda: rig.cache.release(lease))
    with pytest.raises(ValueError, match="released"):
        rig.cache.extend(lease, 3, deadline=rig.cache.clock() + 100)
    rig.settle()
    assert rig.cache.statistics().pools[0].private == 0


def test_commit_refuses_while_blocks_are_still_arriving(rig: SimRig) -> None:
    rig.in_store_only(4)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 4))
    rig.cache.extend(lease, 4)
    with pytest.raises(ValueError, match="settle its ticket"):
        rig.cache.commit(lease, doc(1, 4))
    assert lease.ticket.wait(rig.cache.clock() + 100)
    rig.expect_bytes(lease, doc(1, 4))
    rig.cache.release(lease)
    rig.settle()


def test_closing_the_ticket_of_a_lease_lets_go_of_nothing(rig: SimRig) -> None:
    rig.in_store_only(4)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 4))
    assert lease.ticket.wait(rig.cache.clock() + 100)
    lease.ticket.close()
    rig.expect_bytes(lease, doc(1, 4))
    assert rig.cache.statistics().pools[0].pinned == len(lease.block_table) == 4
    rig.cache.release(lease)
    rig.settle()
    assert rig.cache.statistics().pools[0].pinned == 0


def test_the_guard_refuses_the_tail_of_a_fork_until_it_has_arrived(rig: SimRig) -> None:
    lease, _ = rig.serve(doc(1, 2))
    rig.cache.extend(lease, 1)
    twin = rig.cache.fork(lease)
    with pytest.raises(LaunchRefused, match=rf"COPYING by lease {twin.id}"):
        rig.cache.guard.check([(twin, twin.table)])
    assert twin.ticket.wait(rig.cache.clock() + 100)
    assert not twin.ticket.failed
    rig.cache.guard.check([(twin, twin.table)])
    rig.cache.release(twin)
    rig.cache.release(lease)
    rig.settle()


def test_a_fork_whose_tail_was_lost_says_so_and_cannot_run(rig: SimRig) -> None:
    lease, _ = rig.serve(doc(1, 2))
    rig.cache.extend(lease, 2)
    rig.broken = lambda name: " to hbm" in name
    twin = rig.cache.fork(lease)
    assert twin.ticket.wait(rig.cache.clock() + 100)
    assert twin.ticket.failed
    with pytest.raises(LaunchRefused, match="COPYING"):
        rig.cache.guard.check([(twin, twin.table)])
    with pytest.raises(ValueError, match="tail"):
        rig.cache.commit(twin, doc(1, 3))
    with pytest.raises(ValueError, match="tail"):
        rig.cache.fork(twin)
    rig.cache.release(twin)
    rig.cache.release(lease)
    rig.settle()
    assert rig.cache.statistics().pools[0].private == 0


def test_a_tail_being_copied_is_not_given_to_others_though_its_lease_computes_on() -> None:
    rig = GpuRig.make(hbm=3, dram=None, store=False, async_compute=True)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 1))
    rig.launch(lease, doc(1, 1))
    twin = rig.cache.fork(lease)
    rig.cache.guard.launched([(lease, lease.table)])  # it writes behind what is copied
    assert rig.device.run_one()  # all compute, not the copy
    rig.cache.release(lease)
    third = rig.cache.acquire(NAMESPACE, doc(2, 2))
    with pytest.raises(TierFull):
        rig.launch(third, doc(2, 2))
    assert twin.ticket.wait(rig.cache.clock() + 100)
    rig.launch(third, doc(2, 2))
    rig.device.run_all()
    assert rig.cache.commit(twin, doc(1, 1)) == 1
    rig.expect_bytes(twin, doc(1, 1))
    rig.cache.release(twin)
    rig.cache.release(third)
    rig.come_to_rest()


def test_a_parent_that_the_store_lost_unseen_goes_down_again_with_its_children() -> None:
    rig = SimRig.make(hbm=12, dram=24)
    rig.visit(doc(1, 2))
    assert rig.cache.flush(NAMESPACE, doc(1, 2)).wait(rig.cache.clock() + 100)
    rig.store.forget(NAMESPACE, keys_of(doc(1, 2))[0])  # it was hot above, so cold down there
    rig.visit(doc(1, 9))
    for seed in range(2, 5):
        rig.visit(doc(seed, 8))
        rig.settle()
    assert rig.cache.statistics().dropped == 0
    assert rig.visit(doc(1, 9)) == 9
    rig.settle()
    rig.store.check()


def test_blocks_behind_a_prefix_that_never_leaves_hbm_reach_the_store() -> None:
    rig = SimRig.make(hbm=8, dram=10)
    tails = [np.concatenate([doc(1, 2), doc(seed, 3)]) for seed in range(2, 10)]
    for _ in range(3):
        for tokens in tails:
            hits = rig.visit(tokens)
            rig.store.check()
    rig.settle()
    assert hits == 5
    assert len(rig.store) == 2 + 3 * len(tails)


def test_a_run_on_its_way_down_may_hold_the_ancestor_of_what_makes_room_for_it() -> None:
    rig = SimRig.make(hbm=3, dram=3)
    root = doc(1, 1)
    rig.visit(np.concatenate([root, doc(2, 1)]))
    rig.visit(np.concatenate([root, doc(3, 2)]))  # the end of the first goes to DRAM
    rig.visit(doc(4, 3))  # so have root and two blocks to, where the first cannot leave before root
    rig.settle()
    assert rig.visit(np.concatenate([root, doc(3, 2)])) == 3
    rig.settle()
    rig.store.check()


def test_a_block_behind_a_gap_in_the_store_is_not_let_go_and_brought_back_for_ever() -> None:
    """It was: an eviction of DRAM without a deadline never ended."""
    rig = SimRig.make(hbm=6, dram=14)
    rig.visit(doc(1, 4))
    rig.settle()
    index = rig.cache._index
    ids = index.match(NAMESPACE, doc(1, 4))
    index.set_hint(2, ids[1:2])  # its put has landed after the root had left the store
    index.pin(1, ids[:1])
    rig.cache.shed(TierId.DRAM, rig.cache.clock() + 5)
    assert rig.mover.statistics().demoted_blocks == 4  # what went to DRAM at first, and no more
    assert all(rig.store.holds(NAMESPACE, key) for key in keys_of(doc(1, 4)))
    index.unpin(1, ids[:1])
    rig.settle()


def test_a_flush_believes_the_store_and_not_old_hints(rig: SimRig) -> None:
    tokens = doc(1, 5)
    rig.visit(tokens)
    assert rig.cache.flush(NAMESPACE, tokens).wait(rig.cache.clock() + 100)
    rig.store.forget(NAMESPACE, keys_of(tokens)[1])
    ticket = rig.cache.flush(NAMESPACE, tokens)
    assert ticket.wait(rig.cache.clock() + 100)
    assert (ticket.blocks, ticket.failed) == (5, False)
    assert all(rig.store.holds(NAMESPACE, key) for key in keys_of(tokens))
    rig.settle()


def test_a_load_ends_at_once_when_its_store_hangs_and_late_bytes_go_where_they_belong(
    rig: SimRig,
) -> None:
    rig.in_store_only(6)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6))
    rig.store.hang()
    assert lease.ticket.done()
    assert lease.landed_blocks == 0
    second = rig.cache.acquire(NAMESPACE, doc(1, 6))
    assert second.ticket.done()  # it does not wait for what hangs already
    assert rig.cache.statistics().pools[1].filling == 6
    assert rig.cache.commit(second, doc(1, 0)) == 0
    assert rig.compute(lease, doc(1, 6)) == 6
    for each in (lease, second):
        rig.cache.release(each)
    rig.device.run_all()  # now the bytes arrive
    rig.settle()
    assert rig.cache.statistics().pools[1].resident == 6
    assert rig.visit(doc(1, 6)) == 6
    rig.settle()


def test_room_that_a_hung_fetch_holds_is_not_waited_for() -> None:
    rig = SimRig.make(hbm=4, dram=None)
    rig.visit(doc(1, 4))
    assert rig.cache.flush(NAMESPACE, doc(1, 4)).wait(rig.cache.clock() + 100)
    rig.cache.shed(TierId.HBM, rig.cache.clock() + 100)
    before = rig.cache.clock()
    lease = rig.cache.acquire(NAMESPACE, doc(1, 4))
    rig.store.hang()
    with pytest.raises(TierFull):
        rig.cache.extend(lease, 4, deadline=before + 100)
    assert rig.cache.clock() == before
    rig.cache.release(lease)
    rig.device.run_all()
    rig.settle()
    assert rig.visit(doc(1, 4)) == 4


@pytest.mark.parametrize("shared", [False, True])
def test_a_request_that_goes_calls_off_the_reads_that_nobody_else_waits_for(
    rig: SimRig, shared: bool
) -> None:
    rig.in_store_only(6)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6))
    other = rig.cache.acquire(NAMESPACE, doc(1, 6)) if shared else None
    rig.cache.release(lease)
    rig.device.run_all()
    rig.settle()
    assert rig.cache.statistics().pools[1].resident == (6 if shared else 0)
    if other is not None:
        assert other.landed_blocks == 6
        rig.cache.release(other)
    assert rig.visit(doc(1, 6)) == 6
    rig.settle()


def test_a_request_that_only_stops_waiting_lets_the_rest_land(rig: SimRig) -> None:
    rig.in_store_only(6)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6))
    lease.ticket.settle()
    rig.cache.release(lease)
    rig.device.run_all()
    rig.settle()
    assert rig.cache.statistics().pools[1].resident == 6


# ---- room on the links, and what is called off ---------------------------------------------------


def in_dram_only(rig: SimRig, blocks: int) -> None:
    rig.visit(doc(1, blocks))
    rig.cache.shed(TierId.HBM, rig.cache.clock() + 100)
    assert rig.cache.match(NAMESPACE, doc(1, blocks)).by_tier.keys() == {TierId.DRAM}


def test_no_more_copies_start_than_a_link_has_room_for_and_all_arrive() -> None:
    rig = SimRig.make(most_in_flight=2 * BLOCK_BYTES)
    in_dram_only(rig, 7)
    most = 0
    lease = rig.cache.acquire(NAMESPACE, doc(1, 7))
    while not lease.ticket.done():
        most = max(most, rig.mover.statistics().up.in_flight_bytes)
        assert rig.device.run_one()
    assert (lease.landed_blocks, most) == (7, 2 * BLOCK_BYTES)
    rig.expect_bytes(lease, doc(1, 7))
    rig.cache.release(lease)
    rig.settle()


def test_a_block_larger_than_a_links_limit_moves_by_itself() -> None:
    rig = SimRig.make(most_in_flight=1)
    in_dram_only(rig, 5)
    assert rig.visit(doc(1, 5)) == 5
    rig.settle()


def test_a_link_down_that_is_full_holds_up_no_promotion() -> None:
    rig = SimRig.make(most_in_flight=2 * BLOCK_BYTES)
    in_dram_only(rig, 3)
    other, _ = rig.serve(doc(2, 4))
    assert rig.mover.room(D2H) == 0  # its blocks are being copied down
    lease = rig.cache.acquire(NAMESPACE, doc(1, 3))
    assert rig.mover.statistics().up.in_flight_bytes == 2 * BLOCK_BYTES
    assert lease.ticket.wait(rig.cache.clock() + 100)
    assert lease.landed_blocks == 3
    for each in (lease, other):
        rig.cache.release(each)
    rig.settle()


@pytest.mark.parametrize("shared", [False, True])
def test_a_request_that_goes_calls_off_the_copies_that_nobody_else_waits_for(shared: bool) -> None:
    rig = SimRig.make()
    in_dram_only(rig, 6)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6))
    other = rig.cache.acquire(NAMESPACE, doc(1, 6)) if shared else None
    rig.cache.release(lease)
    rig.settle()
    statistics = rig.cache.statistics().pools[0]
    assert (statistics.resident, statistics.limbo) == (6 if shared else 0, 0)
    assert rig.mover.statistics().up.called_off_blocks == (0 if shared else 6)
    if other is not None:
        assert other.landed_blocks == 6
        rig.cache.release(other)
    assert rig.visit(doc(1, 6)) == 6
    rig.settle()


@pytest.mark.parametrize("shared", [False, True])
def test_copies_that_come_too_late_do_not_begin_unless_somebody_waits_for_longer(
    shared: bool,
) -> None:
    rig = SimRig.make()
    in_dram_only(rig, 6)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6), deadline=rig.cache.clock() + 1)
    other = rig.cache.acquire(NAMESPACE, doc(1, 6)) if shared else None
    rig.device.run_one()
    rig.device.run_one()
    rig.device.advance(1.0)
    rig.device.run_all()
    assert lease.ticket.done()
    if other is not None:
        assert other.ticket.done()
        assert other.landed_blocks == 6
        rig.cache.release(other)
    else:
        assert lease.landed_blocks == 2
    rig.expect_bytes(lease, doc(1, 6))
    rig.cache.release(lease)
    rig.settle()
    assert rig.visit(doc(1, 6)) == 6


def test_while_the_link_down_is_full_new_blocks_wait_unlooked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = GpuRig.make(most_in_flight=BLOCK_BYTES, async_compute=True)
    for seed in range(1, 7):
        rig.use(doc(seed, 1))  # compute has not run: nothing can land
    ledger = rig.cache._ledger
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "lower_blocks", lambda ids, col: pytest.fail("looked at"))
        rig.cache.poll()
    rig.come_to_rest()
    assert rig.cache.statistics().pools[1].resident == 6
