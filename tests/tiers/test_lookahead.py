"""Who waits keeps what it will find, who is done gives up what only it used; nobody is held up."""

import pytest

from kvtier.index.lookahead import Waiting
from kvtier.index.policies import POLICIES
from kvtier.index.words import TierId
from kvtier.tiers.lease import Lease
from tests.tiers.cache_rig import BLOCK_SIZE, NAMESPACE, doc
from tests.tiers.sim_rig import SimRig


def in_hbm(rig: SimRig, number: int, blocks: int) -> int:
    """Tokens of document `number` that stand in HBM, from its root."""
    match = rig.cache.match(NAMESPACE, doc(number, blocks))
    return match.by_tier.get(TierId.HBM, 0) // BLOCK_SIZE


def expect(rig: SimRig, number: int, blocks: int) -> None:
    rig.cache.expect([Waiting(NAMESPACE, doc(number, blocks))])


def hold(rig: SimRig, number: int, blocks: int) -> Lease:
    lease, _ = rig.serve(doc(number, blocks))
    return lease


# ---- look-ahead ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_of_a_waiting_request_outlive_younger_ones(policy: str) -> None:
    rig = SimRig.make(hbm=8, dram=None, store=False, policies={TierId.HBM: policy})
    rig.visit(doc(1, 3))
    rig.visit(doc(2, 4))
    expect(rig, 1, 5)
    rig.visit(doc(3, 5))
    assert in_hbm(rig, 1, 3) == 3
    assert in_hbm(rig, 2, 4) == 0
    rig.settle()


def test_no_more_than_half_of_a_pool_is_kept_for_those_who_wait() -> None:
    rig = SimRig.make(hbm=8, dram=None, store=False)
    rig.visit(doc(1, 6))
    rig.visit(doc(2, 2))
    expect(rig, 1, 6)
    rig.visit(doc(3, 3))
    assert in_hbm(rig, 1, 6) == 4
    assert in_hbm(rig, 2, 2) == 1
    rig.settle()


def test_who_runs_takes_the_blocks_of_who_waits_if_there_are_no_others() -> None:
    rig = SimRig.make(hbm=8, dram=None, store=False)
    rig.visit(doc(1, 4))
    running = hold(rig, 2, 4)
    expect(rig, 1, 4)
    rig.cache.extend(running, 4)
    assert in_hbm(rig, 1, 4) == 0
    rig.cache.release(running)
    rig.settle()


def test_who_runs_is_not_refused_while_the_kept_blocks_have_to_go_down_first() -> None:
    rig = SimRig.make(hbm=8, dram=16, eager_copy_down=False)
    rig.visit(doc(1, 4))
    running = hold(rig, 2, 4)
    expect(rig, 1, 4)
    assert rig.cache.has_room(4)
    rig.cache.extend(running, 4, deadline=rig.cache.clock() + 100)
    assert in_hbm(rig, 1, 4) == 0
    assert rig.cache.match(NAMESPACE, doc(1, 4)).by_tier == {TierId.DRAM: 4 * BLOCK_SIZE}
    rig.cache.release(running)
    rig.settle()


def test_a_pool_can_be_emptied_although_requests_wait() -> None:
    rig = SimRig.make()
    rig.visit(doc(1, 4))
    rig.settle()
    expect(rig, 1, 4)
    assert rig.cache.shed(TierId.HBM, rig.cache.clock() + 100) == 4
    rig.settle()


def test_blocks_are_kept_in_dram_as_well() -> None:
    rig = SimRig.make(hbm=4, dram=8, store=False)
    rig.visit(doc(1, 4))
    rig.settle()
    expect(rig, 1, 4)
    for number in (2, 3, 4):
        rig.visit(doc(number, 4))
        rig.settle()
    assert rig.cache.match(NAMESPACE, doc(1, 4)).tokens == 4 * BLOCK_SIZE
    assert rig.cache.match(NAMESPACE, doc(2, 4)).tokens == 0


# ---- the end of a turn ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_what_only_a_finished_turn_used_leaves_hbm_before_what_is_older(policy: str) -> None:
    rig = SimRig.make(hbm=8, dram=24, policies={TierId.HBM: policy})
    rig.visit(doc(1, 3))
    rig.visit(doc(1, 3))  # found by a second request
    rig.visit(doc(2, 5))
    rig.settle()
    rig.visit(doc(3, 2))
    assert in_hbm(rig, 1, 3) == 3
    assert in_hbm(rig, 2, 5) == 3
    assert rig.cache.match(NAMESPACE, doc(2, 5)).tokens == 5 * BLOCK_SIZE, "DRAM still has it"
    rig.settle()


def test_the_next_turn_retires_what_it_made_and_not_what_it_found() -> None:
    rig = SimRig.make(hbm=8, dram=24)
    rig.visit(doc(1, 3))
    rig.visit(doc(2, 2))
    rig.visit(doc(2, 2))
    rig.settle()
    assert rig.visit(doc(1, 6)) == 3
    rig.settle()
    rig.visit(doc(3, 3))
    assert in_hbm(rig, 1, 6) == 3
    assert in_hbm(rig, 2, 2) == 2
    rig.settle()


def test_a_turn_that_is_taken_up_again_is_ordinary_again() -> None:
    rig = SimRig.make(hbm=8, dram=24)
    rig.visit(doc(1, 4))
    assert rig.visit(doc(1, 4)) == 4
    rig.visit(doc(2, 4))
    rig.settle()
    rig.visit(doc(3, 3))
    assert in_hbm(rig, 1, 4) == 4
    assert in_hbm(rig, 2, 4) == 1
    rig.settle()


def test_two_turns_that_made_the_same_blocks_at_once_have_found_them() -> None:
    rig = SimRig.make(hbm=12, dram=24, store=False)
    first = rig.cache.acquire(NAMESPACE, doc(1, 4))
    second = rig.cache.acquire(NAMESPACE, doc(1, 4))
    rig.compute(first, doc(1, 4))
    rig.compute(second, doc(1, 4))
    rig.cache.release(first)
    rig.cache.release(second)
    rig.visit(doc(2, 8))
    rig.settle()
    rig.visit(doc(3, 4))
    assert in_hbm(rig, 1, 4) == 4
    assert in_hbm(rig, 2, 8) == 4
    rig.settle()


def test_a_request_that_will_be_back_for_its_blocks_retires_nothing() -> None:
    rig = SimRig.make(hbm=8, dram=24)
    rig.visit(doc(1, 4))
    rig.visit(doc(1, 4))
    rig.cache.release(hold(rig, 2, 4), again=True)
    rig.settle()
    rig.visit(doc(3, 4))
    assert in_hbm(rig, 1, 4) == 0
    assert in_hbm(rig, 2, 4) == 4
    rig.settle()


def test_hbm_alone_keeps_what_was_used_last() -> None:
    rig = SimRig.make(hbm=8, dram=None, store=False)
    rig.visit(doc(1, 4))
    rig.visit(doc(1, 4))
    rig.visit(doc(2, 4))
    rig.visit(doc(3, 4))
    assert in_hbm(rig, 1, 4) == 0
    assert in_hbm(rig, 2, 4) == 4


def test_the_end_of_a_turn_changes_nothing_in_dram() -> None:
    rig = SimRig.make(hbm=4, dram=8, store=False)
    for number in (1, 2, 3):
        rig.visit(doc(number, 4))
        rig.settle()
    assert rig.cache.match(NAMESPACE, doc(1, 4)).tokens == 0
    assert rig.cache.match(NAMESPACE, doc(2, 4)).tokens == 4 * BLOCK_SIZE
