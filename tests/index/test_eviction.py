"""What leaves a column and in which order, and how hints come and go, case by case."""

import numpy as np
import pytest

from kvtier.index.policy import EvictionPolicy, LeafLru
from kvtier.index.radix import IndexCorrupt, RadixIndex
from kvtier.index.tree import Node
from kvtier.index.words import Residency, TierId
from tests.index.helpers import DRAM, HBM, NS, NVME, evict, fill, make, text

# ---- eviction ------------------------------------------------------------------------------------


def test_a_leaf_whose_tail_has_left_the_column_already_is_trimmed_further_up() -> None:
    index = make(3)
    ids = fill(index, DRAM, text(3, *range(70)))
    fill(index, HBM, text(3, *range(60)))
    for n in (3, 10, 99):
        assert index.victims(HBM, n).tolist() == ids[:60][::-1][:n].tolist()


def test_touching_a_leaf_makes_its_ancestors_recent_too() -> None:
    index = make(3)
    a = fill(index, HBM, text(3, 1, 2))
    fill(index, HBM, text(3, 1, 3))
    c = fill(index, HBM, text(3, 4))
    index.touch(HBM, a)
    evict(index, HBM, index.victims(HBM, 1))
    assert index.victims(HBM, 9).tolist() == [int(c[0]), int(a[1]), int(a[0])]


def test_a_split_keeps_the_lower_part_where_it_was_in_the_order() -> None:
    index = make(3)
    a = fill(index, HBM, text(3, 1, 2))
    b = fill(index, HBM, text(3, 5))
    fork = fill(index, HBM, text(3, 1, 3))
    assert index.victims(HBM, 9).tolist() == [int(i) for i in (a[1], b[0], fork[1], a[0])]


def test_each_column_has_its_own_order() -> None:
    index = make(3)
    a, b = fill(index, HBM, text(3, 1)), fill(index, HBM, text(3, 2))
    fill(index, DRAM, text(3, 1))
    fill(index, DRAM, text(3, 2))
    index.touch(DRAM, a)
    assert index.victims(HBM, 9).tolist() == [int(a[0]), int(b[0])]
    assert index.victims(DRAM, 9).tolist() == [int(b[0]), int(a[0])]


def test_a_promoted_path_goes_first_until_it_is_used() -> None:
    index = make(3)
    warm = fill(index, DRAM, text(3, 1, 2))
    cold = fill(index, DRAM, text(3, 5, 6))
    index.touch_cold(DRAM, cold)
    assert index.victims(DRAM, 2).tolist() == cold[::-1].tolist()
    index.touch(DRAM, cold)
    index.touch_cold(DRAM, cold)
    assert index.victims(DRAM, 2).tolist() == warm[::-1].tolist()


def test_a_promotion_that_lands_in_pieces_ends_up_cold_as_a_whole() -> None:
    index = make(3)
    fill(index, DRAM, text(3, 1, 2))
    index.set_hint(NVME, index.insert(NS, text(3, 5, 6)))
    index.set_hint(NVME, index.insert(NS, text(3, 5, 7)))
    ids = index.match(NS, text(3, 5, 6))
    index.begin_fill(DRAM, ids, np.array([50, 51], np.int32))
    for piece in (ids[:1], ids[1:]):
        index.finish_fill(DRAM, piece)
        index.touch_cold(DRAM, piece)
    assert index.victims(DRAM, 2).tolist() == ids[::-1].tolist()


def test_a_promotion_whose_node_is_split_before_it_lands_is_cold_in_both_parts() -> None:
    index = make(3)
    warm = fill(index, DRAM, text(3, 1))
    ids = index.insert(NS, text(3, 5, 6))
    index.begin_fill(DRAM, ids, np.array([50, 51], np.int32))
    index.insert(NS, text(3, 5, 7))
    index.finish_fill(DRAM, ids)
    index.touch_cold(DRAM, ids)
    assert index.victims(DRAM, 9).tolist() == [int(ids[1]), int(ids[0]), int(warm[0])]


def test_a_promotion_beside_another_that_hangs_below_the_same_node_cools_only_itself() -> None:
    index = make(3)
    one, two = fill(index, DRAM, text(3, 5, 6)), fill(index, DRAM, text(3, 5, 7))
    index.touch_cold(DRAM, two)
    assert index.victims(DRAM, 9).tolist() == [int(two[1]), int(one[1]), int(one[0])]


def test_a_promotion_below_a_warm_branch_does_not_cool_it() -> None:
    index = make(3)
    warm = fill(index, DRAM, text(3, 1, 2))
    index.touch(DRAM, warm)
    other = fill(index, DRAM, text(3, 9))
    index.touch(DRAM, other)
    cold = fill(index, DRAM, text(3, 1, 7))
    index.touch_cold(DRAM, cold[1:])
    order = [int(i) for i in (cold[1], warm[1], other[0], warm[0])]
    assert index.victims(DRAM, 9).tolist() == order


def test_another_policy_can_take_the_place_of_leaf_lru_in_one_tier() -> None:
    class Unmoved(LeafLru[Node]):
        """First in, first out: a touch moves nothing."""

        def touched(self, nodes: object) -> None:
            return

    def policy(tier: TierId) -> EvictionPolicy[Node]:
        return Unmoved() if tier is TierId.HBM else LeafLru()

    index = RadixIndex(3, [TierId.HBM, TierId.DRAM], policy=policy)
    a, b = fill(index, HBM, text(3, 1)), fill(index, HBM, text(3, 2))
    fill(index, DRAM, text(3, 1))
    fill(index, DRAM, text(3, 2))
    for col in (HBM, DRAM):
        index.touch(col, a)
    assert index.victims(HBM, 1).tolist() == a.tolist()
    assert index.victims(DRAM, 1).tolist() == b.tolist()


# ---- hints ---------------------------------------------------------------------------------------


def test_a_refusal_clears_the_hints_from_that_block_down_and_nowhere_else() -> None:
    index = make(3)
    a = index.insert(NS, text(3, 1, 2, 3))
    b = index.insert(NS, text(3, 1, 2, 4))
    c = index.insert(NS, text(3, 1, 5))
    for ids in (a, b, c):
        index.set_hint(NVME, ids)
    index.pin(DRAM, a)
    index.clear_hint(NVME, a[1:2])
    assert index.state(NVME, a).tolist() == [Residency.RESIDENT, 0, 0]
    assert index.match(NS, text(3, 1, 2, 4)).tolist() == b[:2].tolist()
    assert index.match(NS, text(3, 1, 5)).tolist() == c.tolist()
    index.check()


def test_hints_alone_are_bounded_oldest_leaves_first_tail_first() -> None:
    index = make(3, max_hint_blocks=4)
    a = index.insert(NS, text(3, 1, 2, 3))
    index.set_hint(NVME, a)
    b = index.insert(NS, text(3, 7, 8))
    index.set_hint(NVME, b)
    assert index.statistics().hint_only == 4
    assert index.match(NS, text(3, 1, 2, 3)).tolist() == a[:2].tolist()
    index.touch(NVME, a[:2])
    c = index.insert(NS, text(3, 9))
    index.set_hint(NVME, c)
    assert index.match(NS, text(3, 7, 8)).tolist() == b[:1].tolist()
    index.check()


def test_blocks_that_a_pool_holds_or_a_pin_names_do_not_count_as_hints_alone() -> None:
    index = make(3, max_hint_blocks=2)
    a = fill(index, DRAM, text(3, 1, 2, 3))
    index.set_hint(NVME, a)
    index.pin(HBM, a)
    assert index.statistics().hint_only == 0
    evict(index, DRAM, a)
    assert index.statistics().hint_only == 0
    index.unpin(HBM, a)
    assert index.statistics().hint_only == 2
    assert index.match(NS, text(3, 1, 2, 3)).tolist() == a[:2].tolist()
    index.check()


def test_blocks_that_leave_their_last_pool_come_under_the_bound_oldest_first() -> None:
    index = make(3, max_hint_blocks=1)
    a, b = fill(index, DRAM, text(3, 1)), fill(index, DRAM, text(3, 2))
    for ids in (a, b, a):
        index.set_hint(NVME, ids)
    evict(index, DRAM, np.concatenate((a, b)))
    assert index.statistics().hint_only == 1
    assert index.match(NS, text(3, 1)).tolist() == a.tolist()
    assert len(index.match(NS, text(3, 2))) == 0
    index.check()


def test_dropping_hints_spares_what_carries_blocks_in_use() -> None:
    index = make(3, max_hint_blocks=0)
    a = index.insert(NS, text(3, 1, 2))
    index.begin_fill(DRAM, a[1:], np.array([5], np.int32))
    index.set_hint(NVME, a)
    assert index.state(NVME, a).tolist() == [Residency.RESIDENT] * 2
    assert index.match(NS, text(3, 1, 2)).tolist() == a.tolist()
    index.check()


def test_dropping_hints_looks_past_no_branch_that_is_in_use() -> None:
    index = make(3, max_hint_blocks=0)
    fork = index.insert(NS, text(3, 1, 9))
    ids = index.insert(NS, text(3, 1, 2, 3))
    index.forget(fork)
    index.begin_fill(DRAM, ids[1:2], np.array([5], np.int32))
    index.set_hint(NVME, ids[[0, 2]])
    assert index.state(NVME, ids).tolist() == [Residency.RESIDENT, 0, 0]
    assert index.match(NS, text(3, 1, 2, 3)).tolist() == ids[:2].tolist()
    index.check()


@pytest.mark.parametrize("order", [[1, 3], [3, 1]])
def test_a_refusal_of_scattered_blocks_clears_below_each_of_them(order: list[int]) -> None:
    index = make(3)
    ids = index.insert(NS, text(3, 1, 2, 3, 4))
    fork = index.insert(NS, text(3, 1, 2, 9))
    index.set_hint(NVME, ids)
    index.set_hint(NVME, fork)
    index.clear_hint(NVME, ids[order])
    assert index.match(NS, text(3, 1, 2, 3, 4)).tolist() == ids[:1].tolist()
    assert index.statistics().hint_only == 1
    index.check()


def test_clearing_and_forgetting_pass_over_ids_that_are_gone() -> None:
    index = make(3)
    ids = fill(index, DRAM, text(3, 1, 2))
    evict(index, DRAM, ids)
    index.clear_hint(NVME, ids)
    index.forget(ids)
    assert index.statistics().blocks == 0


def test_a_pools_column_takes_no_hint_and_a_stores_column_no_slot() -> None:
    index = make(3)
    ids = index.insert(NS, text(3, 1))
    with pytest.raises(IndexCorrupt, match="not a store"):
        index.set_hint(DRAM, ids)
    with pytest.raises(IndexCorrupt, match="not a pool"):
        index.begin_fill(NVME, ids, ids)
    with pytest.raises(IndexCorrupt, match="not a pool"):
        index.victims(NVME, 1)
    index.set_hint(NVME, ids)
    assert index.slots(NVME, ids).tolist() == [-1]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_leaves_leave_in_the_order_of_their_last_use(seed: int) -> None:
    rng = np.random.default_rng(seed)
    index = make(3)
    leaves = [fill(index, HBM, text(3, 0, i, i + 100)) for i in range(1, 30)]
    last_use = {int(ids[-1]): n for n, ids in enumerate(leaves)}
    for n in range(100, 200):
        ids = leaves[int(rng.integers(len(leaves)))]
        index.touch(HBM, ids)
        last_use[int(ids[-1])] = n
    tails = [b for b in index.victims(HBM, 1000).tolist() if b in last_use]
    assert tails == sorted(last_use, key=lambda block: last_use[block])
