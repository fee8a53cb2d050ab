"""What waiting requests will find is evicted after all else; it is a wish, never a pin."""

import pytest

from kvtier.index.lookahead import Waiting
from kvtier.index.policies import POLICIES, make_policy
from kvtier.index.radix import RadixIndex
from kvtier.index.words import BlockIds, TierId
from tests.index.helpers import DRAM, HBM, NS, NVME, evict, fill, text


def make(policy: str = "lru", *, hbm: int = 4, dram: int = 9) -> RadixIndex:
    """Blocks of three tokens. `hbm` and `dram`: how many blocks may be protected there."""
    return RadixIndex(
        3,
        [TierId.HBM, TierId.DRAM, TierId.NVME],
        stores=[TierId.NVME],
        policy=lambda tier: make_policy(policy, 20, 3),
        protectable={TierId.HBM: hbm, TierId.DRAM: dram},
    )


def waiting(*blocks: int) -> Waiting:
    return Waiting(NS, text(3, *blocks))


def order(index: RadixIndex, col: int = HBM) -> list[int]:
    return [int(block) for block in index.victims(col, 99)]


def backwards(*runs: BlockIds) -> list[int]:
    """Each run from its tail."""
    return [int(block) for run in runs for block in run[::-1]]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_waiting_request_will_find_goes_after_all_others(policy: str) -> None:
    index = make(policy)
    a, b, c = (fill(index, HBM, text(3, first, 10 + first)) for first in (1, 2, 3))
    assert order(index) == backwards(a, b, c)
    index.expect([waiting(1, 11, 12)])
    assert order(index) == backwards(b, c, a)
    assert index.victims(HBM, 3).tolist() == backwards(b, c)[:3]
    index.check()


def test_only_the_part_of_a_run_that_it_will_find_is_kept() -> None:
    index = make()
    a, b = fill(index, HBM, text(3, 1, 2, 3, 4)), fill(index, HBM, text(3, 5))
    index.expect([waiting(1, 2, 9)])
    assert order(index) == [*backwards(a[2:], b), *backwards(a[:2])]


def test_no_more_than_the_given_number_is_kept_and_the_next_request_comes_first() -> None:
    index = make(hbm=3)
    a, b = fill(index, HBM, text(3, 1, 2)), fill(index, HBM, text(3, 5, 6))
    other = fill(index, HBM, text(3, 7))
    index.expect([waiting(5, 6), waiting(1, 2)])
    assert order(index) == [*backwards(a[1:], other), *backwards(a[:1], b)]
    index.expect([waiting(1, 2), waiting(5, 6)])
    assert order(index) == [*backwards(b[1:], other), *backwards(a, b[:1])]


def test_a_plan_of_many_gives_up_what_is_kept_only_for_the_few_that_are_needed() -> None:
    index = make()
    a, b = fill(index, HBM, text(3, 1, 2, 3)), fill(index, HBM, text(3, 5, 6))
    index.expect([waiting(1, 2, 3)])
    assert index.victims(HBM, 9, least=1).tolist() == backwards(b)
    assert index.victims(HBM, 9, least=3).tolist() == [*backwards(b), *backwards(a)[:1]]


def test_neither_pinned_blocks_nor_those_of_an_earlier_request_count() -> None:
    index = make(hbm=2)
    a, b = fill(index, HBM, text(3, 1, 2)), fill(index, HBM, text(3, 1, 3))
    other = fill(index, HBM, text(3, 7))
    index.pin(HBM, a)
    index.expect([waiting(1, 2), waiting(1, 3)])
    assert order(index) == backwards(other, b[1:])
    index.unpin(HBM, a)
    index.expect([waiting(1, 2), waiting(1, 2), waiting(1, 3)])
    assert order(index) == [*backwards(b[1:], other), *backwards(a)]


def test_each_pool_keeps_what_it_holds_itself() -> None:
    index = make(hbm=1, dram=9)
    a, b = fill(index, HBM, text(3, 1, 2)), fill(index, HBM, text(3, 5))
    fill(index, DRAM, text(3, 1, 2))
    fill(index, DRAM, text(3, 5))
    index.expect([waiting(1, 2)])
    assert order(index, HBM) == backwards(a[1:], b, a[:1])
    assert order(index, DRAM) == backwards(b, a)


def test_where_nothing_may_be_kept_nothing_is() -> None:
    index = make(hbm=0)
    a, b = fill(index, HBM, text(3, 1)), fill(index, HBM, text(3, 2))
    index.expect([waiting(1)])
    assert order(index) == backwards(a, b)


def test_a_request_that_waits_no_more_leaves_nothing_behind() -> None:
    index = make()
    a, b = fill(index, HBM, text(3, 1)), fill(index, HBM, text(3, 2))
    index.expect([waiting(1), waiting(8, 9)])
    before = index.statistics()
    assert index.evictable(HBM) == 2, "it is kept by being passed over, not by a pin"
    assert order(index) == backwards(b, a)
    index.expect([])
    assert order(index) == backwards(a, b)
    assert index.statistics() == before
    index.check()


def test_blocks_that_come_and_go_while_a_request_waits_confuse_nothing() -> None:
    index = make()
    a = fill(index, HBM, text(3, 1, 2))
    index.expect([waiting(1, 2)])
    assert order(index) == backwards(a)
    evict(index, HBM, index.victims(HBM, 1))
    reused = fill(index, HBM, text(3, *range(20, 1500)))  # the tables have grown meanwhile
    assert int(a[1]) in reused.tolist()
    may_go = index.victims(HBM, 9999).tolist()
    assert sorted(may_go) == sorted([int(a[0]), *reused.tolist()])
    index.expect([waiting(1, 2)])
    assert index.victims(HBM, 9999).tolist()[-1] == int(a[0])
    index.check()


# ---- the end of a turn ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_what_only_a_finished_turn_used_goes_before_what_is_older(policy: str) -> None:
    index = make(policy)
    old = fill(index, HBM, text(3, 1, 2))
    first, second = fill(index, HBM, text(3, 5, 6)), fill(index, HBM, text(3, 7, 8))
    index.retire(HBM, first)
    index.retire(HBM, second)
    assert order(index) == backwards(first, second, old)
    index.check()


def test_a_run_that_grew_in_place_is_cut_where_the_turn_began() -> None:
    index = make()
    index.found(fill(index, HBM, text(3, 1, 2)))
    other = fill(index, HBM, text(3, 9))
    ids = fill(index, HBM, text(3, 1, 2, 3, 4))
    assert index.statistics().nodes == 2
    index.retire(HBM, ids[2:])
    assert order(index) == backwards(ids[2:], other, ids[:2])
    index.check()


def test_what_another_request_found_keeps_its_place_and_all_above_it() -> None:
    index = make()
    other = fill(index, HBM, text(3, 9))
    ids = fill(index, HBM, text(3, 1, 2, 3, 4))
    index.found(ids[:3])
    index.retire(HBM, ids)
    assert order(index) == backwards(ids[3:], other, ids[:3])
    index.found(ids)
    index.touch(HBM, ids)
    index.retire(HBM, ids)
    assert order(index) == backwards(other, ids)


def test_a_new_block_is_not_taken_for_the_one_that_had_its_id() -> None:
    index = make()
    before = fill(index, HBM, text(3, 1, 2))
    index.found(before)
    evict(index, HBM, before[::-1])
    other, ids = fill(index, HBM, text(3, 9)), fill(index, HBM, text(3, 5))
    assert {*other.tolist(), *ids.tolist()} == set(before.tolist())
    index.retire(HBM, ids)
    assert order(index) == backwards(ids, other)


def test_blocks_of_a_finished_turn_that_are_used_again_are_ordinary_again() -> None:
    index = make()
    other, ids = fill(index, HBM, text(3, 9)), fill(index, HBM, text(3, 1, 2, 3))
    index.retire(HBM, ids)
    index.touch(HBM, ids[:1])
    assert order(index) == backwards(ids[1:], other, ids[:1])
    index.touch(HBM, ids)
    assert order(index) == backwards(other, ids)
    index.check()


def test_the_end_of_a_turn_concerns_one_pool_only() -> None:
    index = make()
    old, ids = fill(index, DRAM, text(3, 9)), fill(index, DRAM, text(3, 1, 2))
    fill(index, HBM, text(3, 1, 2))
    index.set_hint(NVME, ids)
    index.retire(HBM, ids)
    assert order(index, DRAM) == backwards(old, ids)


def test_a_branch_below_a_retired_run_keeps_it_until_the_branch_has_gone() -> None:
    index = make()
    other = fill(index, HBM, text(3, 9))
    longer = fill(index, HBM, text(3, 1, 2, 3))
    index.retire(HBM, longer[:2])
    assert order(index) == backwards(other, longer[2:], longer[:2])
    evict(index, HBM, longer[2:])
    assert order(index) == backwards(longer[:2], other)
    index.check()


def test_retired_blocks_that_a_waiting_request_will_find_stay_all_the_same() -> None:
    index = make()
    old, ids = fill(index, HBM, text(3, 9)), fill(index, HBM, text(3, 1, 2))
    index.retire(HBM, ids)
    index.expect([waiting(1, 2)])
    assert order(index) == backwards(old, ids)
    evict(index, HBM, ids[::-1])
    index.check()
