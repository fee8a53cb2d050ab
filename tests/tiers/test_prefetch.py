"""Prefetch hints: a block is read once, behind whoever waits, within bounds, until a deadline."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from kvtier.index.words import TierId
from kvtier.tiers.contracts import LANDED, Fetch, Flight
from kvtier.tiers.lease import Ticket
from tests.tiers.cache_rig import BLOCK_SIZE, NAMESPACE, doc, keys_of
from tests.tiers.sim_rig import SimRig


def terms_of(flight: Flight) -> tuple[float | None, bool, bool]:
    """By when it is wanted, whether nobody waits for it, whether it was called off."""
    return flight.deadline, flight.background, flight.cancelled


class HintRig(SimRig):
    """Keeps every fetch the store was asked for."""

    fetches: list[tuple[Fetch, Flight]]

    @classmethod
    def stored(cls, blocks: int, *, dram: int = 24, **options: Any) -> "HintRig":
        """Document 1 stands in the store and nowhere else."""
        rig = cls.make(dram=dram, **options)
        rig.in_store_only(blocks)
        rig.settle()
        rig.fetches = []
        plain = rig.store.fetch

        def fetch(request: Fetch) -> Flight:
            flight = plain(request)
            rig.fetches.append((request, flight))
            return flight

        rig.store.fetch = fetch  # type: ignore[method-assign]
        return rig

    @property
    def reads(self) -> Counter[bytes]:
        """How often each block was read from the store, or is to be."""
        return Counter(key for request, _ in self.fetches for key in request.keys)

    @property
    def reading(self) -> int:
        """Blocks of background fetches that have not arrived."""
        return sum(
            int((flight.status == 0).sum()) for _, flight in self.fetches if flight.background
        )

    def found(self) -> None:
        """Run until the first fetch has begun."""
        while not self.fetches:
            assert self.device.run_one()
            self.cache.poll()

    def in_dram(self, blocks: int) -> bool:
        by_tier = self.cache.match(NAMESPACE, doc(1, blocks)).by_tier
        return by_tier == {TierId.DRAM: blocks * BLOCK_SIZE}

    def wait(self, ticket: Ticket) -> None:
        assert ticket.wait(self.cache.clock() + 100)


def test_two_prefetches_of_one_document_read_each_block_once() -> None:
    rig = HintRig.stored(6)
    hints = [rig.cache.prefetch(NAMESPACE, doc(1, 6)) for _ in range(2)]
    for hint in hints:
        rig.wait(hint)
        assert sum(hint.hit_tokens.values()) == 24
        hint.close()
    assert rig.reads == Counter(keys_of(doc(1, 6)))
    assert rig.in_dram(6)


@pytest.mark.parametrize("steps", range(12))
def test_a_prefetch_and_a_request_read_each_block_once(steps: int) -> None:
    rig = HintRig.stored(6)
    hint = rig.cache.prefetch(NAMESPACE, doc(1, 6))
    for _ in range(steps):
        rig.device.run_one()
        rig.cache.poll()
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6))
    rig.wait(lease.ticket)
    assert lease.landed_blocks == 6
    rig.expect_bytes(lease, doc(1, 6))
    assert rig.reads == Counter(keys_of(doc(1, 6)))
    hint.close()
    rig.cache.release(lease)
    rig.settle()


def test_a_request_hurries_what_is_being_read_and_reads_the_rest_itself_at_once() -> None:
    rig = HintRig.stored(6)  # of which a prefetch may be reading three at a time
    hint = rig.cache.prefetch(NAMESPACE, doc(1, 6), deadline=5.0)
    rig.found()
    (first,) = rig.fetches
    assert (len(first[0].keys), first[1].background, first[1].deadline) == (3, True, 5.0)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6))
    assert (first[1].background, first[1].deadline) == (False, None)
    while len(rig.fetches) < 2:
        assert rig.device.run_one()
        rig.cache.poll()
    assert [(len(r.keys), f.background) for r, f in rig.fetches] == [(3, False), (3, False)]
    rig.device.advance(10)  # the prefetch is over, the request is not
    rig.wait(lease.ticket)
    assert lease.landed_blocks == 6
    hint.close()
    rig.cache.release(lease)
    rig.settle()


def test_all_prefetches_together_read_no_more_than_an_eighth_of_the_pool_at_a_time() -> None:
    rig = HintRig.stored(6)
    branch = np.concatenate([doc(1, 4), doc(2, 4)])
    rig.visit(branch)
    rig.cache.flush(NAMESPACE, branch).wait(rig.cache.clock() + 100)
    for tier in (TierId.HBM, TierId.DRAM):
        rig.cache.shed(tier, rig.cache.clock() + 100)
    rig.fetches.clear()
    hints = [rig.cache.prefetch(NAMESPACE, tokens) for tokens in (doc(1, 6), branch[:24])]
    most = 0
    while not all(hint.is_done for hint in hints):
        assert rig.device.run_one()
        rig.cache.poll()
        most = max(most, rig.reading)
    assert most == 3
    assert sum(rig.reads.values()) == 8
    for hint in hints:
        hint.close()
    rig.settle()


def test_no_read_begins_after_the_deadline_and_what_has_arrived_stays() -> None:
    rig = HintRig.stored(6)
    hint = rig.cache.prefetch(NAMESPACE, doc(1, 6), deadline=rig.cache.clock() + 5)
    rig.found()
    while not rig.in_dram(2):
        assert rig.device.run_one()
        rig.cache.poll()
    here = sum(flight.status.tolist().count(1) for _, flight in rig.fetches)
    rig.device.advance(6)
    assert hint.done()
    rig.settle()
    assert sum(flight.status.tolist().count(1) for _, flight in rig.fetches) == here
    assert rig.in_dram(here) and not rig.in_dram(here + 1)
    hint.close()
    assert rig.visit(doc(1, 6)) == 6  # the rest is where it was


def test_a_prefetch_whose_deadline_has_passed_reads_nothing() -> None:
    rig = HintRig.stored(6)
    rig.device.advance(10)
    hint = rig.cache.prefetch(NAMESPACE, doc(1, 6), deadline=10.0)
    assert hint.is_done
    hint.close()
    rig.settle()
    assert not rig.fetches


def test_loading_ends_at_the_deadline_of_a_request() -> None:
    rig = HintRig.stored(6)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6), deadline=rig.cache.clock() + 5)
    rig.found()
    assert rig.fetches[0][0].deadline == lease.load.terms.deadline == 5.0
    while lease.landed_blocks < 2:
        assert rig.device.run_one()
        rig.cache.poll()
    landed = lease.landed_blocks
    rig.device.advance(6)
    assert lease.ticket.done()
    assert lease.landed_blocks == landed
    rig.cache.release(lease)
    rig.settle()


def test_a_request_that_has_gone_leaves_a_read_to_the_deadline_of_who_is_left() -> None:
    rig = HintRig.stored(6)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6), deadline=5.0)
    rig.found()
    ((_, flight),) = rig.fetches
    patient = rig.cache.acquire(NAMESPACE, doc(1, 6))
    later = rig.cache.acquire(NAMESPACE, doc(1, 6), deadline=7.0)
    assert terms_of(flight) == (None, False, False)
    rig.cache.release(patient)
    assert terms_of(flight) == (7.0, False, False)
    rig.cache.release(later)
    assert terms_of(flight) == (5.0, False, False)
    rig.wait(lease.ticket)
    assert lease.landed_blocks == 6
    rig.cache.release(lease)
    rig.settle()


def test_a_load_that_ends_at_its_deadline_leaves_its_reads_to_who_does_not_wait() -> None:
    rig = HintRig.stored(3)
    hint = rig.cache.prefetch(NAMESPACE, doc(1, 3))
    rig.found()
    lease = rig.cache.acquire(NAMESPACE, doc(1, 3), deadline=rig.cache.clock() + 5)
    ((_, flight),) = rig.fetches
    assert (flight.deadline, flight.background) == (None, False)
    rig.device.advance(6)
    assert lease.ticket.done()
    assert terms_of(flight) == (None, True, False)
    rig.wait(hint)
    assert rig.in_dram(3)
    hint.close()
    rig.cache.release(lease)
    rig.settle()


def test_a_load_that_ends_at_its_deadline_calls_off_what_nobody_else_wants() -> None:
    rig = HintRig.stored(6)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6), deadline=rig.cache.clock() + 5)
    rig.found()
    ((_, flight),) = rig.fetches
    rig.device.advance(6)
    assert lease.ticket.done()
    assert flight.cancelled
    rig.settle()  # the lease is still held
    assert not (flight.status == LANDED).any()
    rig.cache.release(lease)


def test_what_a_request_stops_waiting_for_is_read_on_in_the_background() -> None:
    rig = HintRig.stored(6)
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6))
    rig.found()
    ((_, flight),) = rig.fetches
    lease.ticket.settle()
    assert (flight.background, flight.cancelled) == (True, False)
    again = rig.cache.acquire(NAMESPACE, doc(1, 6))
    assert not flight.background
    rig.cache.release(again)
    rig.cache.release(lease)
    assert (flight.background, flight.cancelled) == (True, False)
    rig.settle()
    assert rig.in_dram(6)


def test_a_prefetch_that_is_closed_is_not_read_on() -> None:
    rig = HintRig.stored(6)
    hint = rig.cache.prefetch(NAMESPACE, doc(1, 6))
    rig.found()
    hint.close()
    hint.close()
    rig.settle()
    ((_, flight),) = rig.fetches
    assert flight.cancelled
    assert not any(flight.status.tolist().count(1) for _, flight in rig.fetches)
    assert rig.cache.statistics().pools[1].pinned == 0


def test_closing_a_prefetch_leaves_a_request_that_shares_it_alone() -> None:
    rig = HintRig.stored(3)
    hint = rig.cache.prefetch(NAMESPACE, doc(1, 3))
    rig.found()
    lease = rig.cache.acquire(NAMESPACE, doc(1, 3))
    hint.close()
    rig.wait(lease.ticket)
    assert lease.landed_blocks == 3
    rig.cache.release(lease)
    rig.settle()


def test_a_request_takes_up_what_a_closed_prefetch_is_reading() -> None:
    rig = HintRig.stored(6)
    hint = rig.cache.prefetch(NAMESPACE, doc(1, 6))
    rig.found()
    hint.close()
    lease = rig.cache.acquire(NAMESPACE, doc(1, 6))
    rig.wait(lease.ticket)
    assert lease.landed_blocks == 6
    rig.expect_bytes(lease, doc(1, 6))
    rig.cache.release(lease)
    rig.settle()


def test_a_prefetch_that_finds_no_room_begins_nothing_until_the_others_have_their_answer() -> None:
    rig = HintRig.stored(6)
    cold = rig.cache.prefetch(NAMESPACE, doc(2, 12))
    assert rig.cache.prefetch(NAMESPACE, doc(1, 6)).is_idle
    rig.wait(cold)
    warm = rig.cache.prefetch(NAMESPACE, doc(1, 6))
    assert not warm.is_idle
    rig.wait(warm)
    assert rig.in_dram(6)
    warm.close()
    cold.close()
    rig.settle()


def test_open_prefetches_pin_half_of_the_pool_at_most() -> None:
    rig = HintRig.stored(20, hbm=20, dram=24)
    first = rig.cache.prefetch(NAMESPACE, doc(1, 8))
    second = rig.cache.prefetch(NAMESPACE, doc(1, 20))  # four are left for it, and it shares them
    for hint in (first, second):
        rig.wait(hint)
    assert [len(hint.sources) for hint in (first, second)] == [8, 4]
    assert rig.cache.statistics().pools[1].pinned <= 12
    third = rig.cache.prefetch(NAMESPACE, doc(1, 20))
    assert third.is_done and not third.sources
    first.close()
    fourth = rig.cache.prefetch(NAMESPACE, doc(1, 20))
    rig.wait(fourth)
    assert len(fourth.sources) == 8
    for hint in (second, third, fourth):
        hint.close()
    rig.settle()


def test_a_prefetch_evicts_nothing_that_is_pinned() -> None:
    rig = HintRig.stored(4, hbm=4, dram=8)
    index = rig.cache._index
    for seed in (2, 3):
        rig.visit(doc(seed, 4))
        rig.settle()
    stays = np.concatenate([index.match(NAMESPACE, doc(seed, 4)) for seed in (2, 3)])
    index.pin(1, stays)
    hint = rig.cache.prefetch(NAMESPACE, doc(1, 4))
    rig.wait(hint)
    assert not rig.fetches
    assert rig.cache._ledger.holds(1, stays).all()
    index.unpin(1, stays)
    hint.close()
    rig.settle()


def test_requests_take_slots_before_prefetches_that_came_earlier() -> None:
    rig = HintRig.stored(8, hbm=8, dram=8)
    rig.cache._index.clear_hint(2, rig.cache._index.match(NAMESPACE, doc(1, 8))[:1])
    hint = rig.cache.prefetch(NAMESPACE, doc(1, 4))
    lease = rig.cache.acquire(NAMESPACE, doc(1, 8))
    rig.device.run_all()  # both are told what the store has
    rig.cache.poll()
    request, flight = rig.fetches[0]
    assert (len(request.keys), flight.background) == (8, False)
    rig.wait(lease.ticket)
    assert lease.landed_blocks == 8
    hint.close()
    rig.cache.release(lease)
    rig.settle()


def test_a_prefetch_gets_on_while_requests_keep_coming() -> None:
    rig = HintRig.stored(6)
    hint = rig.cache.prefetch(NAMESPACE, doc(1, 6))
    for seed in range(2, 30):
        rig.visit(doc(seed, 2))
    assert hint.is_done
    assert len(hint.sources) == 6
    hint.close()


def test_where_hbm_stands_right_above_the_store_nothing_is_prefetched() -> None:
    rig = SimRig.make(dram=None)
    assert rig.cache.prefetch(NAMESPACE, doc(1, 6)).is_done


def test_time_is_due_at_the_deadline_of_a_prefetch() -> None:
    rig = HintRig.stored(6, writeback_s=None)
    assert rig.cache.next_due() is None
    hint = rig.cache.prefetch(NAMESPACE, doc(1, 6), deadline=3.0)
    assert (rig.cache.is_prefetching, rig.cache.next_due()) == (True, 3.0)
    rig.wait(hint)
    assert (rig.cache.is_prefetching, rig.cache.next_due()) == (False, None)
    hint.close()
