"""What the radix index promises, case by case. Random operations: `test_radix_model.py`."""

import numpy as np
import pytest

from kvtier.index.policy import EvictionPolicy, LeafLru
from kvtier.index.radix import IndexCorrupt, RadixIndex
from kvtier.index.tree import Node
from kvtier.index.words import BlockIds, Residency, TierId, Tokens

NS = b"namespace"
HBM, DRAM, NVME = 0, 1, 2
SIZES = pytest.mark.parametrize("size", [1, 3, 16])


def make(size: int, *, max_hint_blocks: int = 1_000_000) -> RadixIndex:
    columns = [TierId.HBM, TierId.DRAM, TierId.NVME]
    return RadixIndex(size, columns, stores=[TierId.NVME], max_hint_blocks=max_hint_blocks)


def text(size: int, *blocks: int, rest: int = 0) -> Tokens:
    """Blocks named by numbers (a block repeats its number), then `rest` more tokens."""
    return np.repeat(np.array([*blocks, 99], np.int32), size)[: len(blocks) * size + rest]


def fill(index: RadixIndex, col: int, tokens: Tokens, namespace: bytes = NS) -> BlockIds:
    """Insert and make RESIDENT what is ABSENT in `col`; a block's slot is its id."""
    ids = index.insert(namespace, tokens)
    absent = ids[index.state(col, ids) == Residency.ABSENT]
    index.begin_fill(col, absent, absent)
    index.finish_fill(col, absent)
    return ids


def evict(index: RadixIndex, col: int, ids: BlockIds) -> None:
    index.begin_leave(col, ids)
    index.finish_leave(col, ids)


# ---- match ---------------------------------------------------------------------------------------


@SIZES
def test_an_empty_index_and_an_empty_prompt_match_nothing(size: int) -> None:
    index = make(size)
    assert len(index.match(NS, text(size, 1, 2))) == 0
    fill(index, HBM, text(size, 1, 2))
    assert len(index.match(NS, text(size))) == 0


@SIZES
def test_exact_longer_and_shorter_prompts_match_whole_blocks(size: int) -> None:
    index = make(size)
    ids = fill(index, HBM, text(size, 1, 2, 3)).tolist()
    assert index.match(NS, text(size, 1, 2, 3)).tolist() == ids
    assert index.match(NS, text(size, 1, 2, 3, 4, rest=size - 1)).tolist() == ids
    assert index.match(NS, text(size, 1, 2)).tolist() == ids[:2]
    assert index.match(NS, text(size, 1, 2, rest=size - 1)).tolist() == ids[:2]


@pytest.mark.parametrize("at", [3, 4, 5])
def test_divergence_inside_a_block_rounds_down_and_on_an_edge_does_not(at: int) -> None:
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 2, 3)).tolist()
    tokens = text(3, 1, 2, 3)
    tokens[at] = 77
    assert index.match(NS, tokens).tolist() == ids[:1]


def test_match_changes_nothing() -> None:
    index = make(3)
    fill(index, HBM, text(3, 1, 2, 3))
    before = index.statistics(), index.victims(HBM, 9).tolist()
    index.match(NS, text(3, 1, 7))
    assert (index.statistics(), index.victims(HBM, 9).tolist()) == before


def test_the_returned_ids_are_the_callers_own() -> None:
    index = make(1)
    fill(index, HBM, text(1, 1, 2, 3))
    index.match(NS, text(1, 1, 2, 3))[:] = 55
    index.insert(NS, text(1, 1, 2, 3))[:] = 55
    index.check()


@SIZES
def test_namespaces_do_not_see_each_other(size: int) -> None:
    index = make(size)
    ours = fill(index, HBM, text(size, 1, 2))
    assert len(index.match(b"other", text(size, 1, 2))) == 0
    theirs = fill(index, HBM, text(size, 1, 2), b"other")
    assert not set(ours.tolist()) & set(theirs.tolist())
    assert index.namespace_of(int(theirs[0])) == b"other"
    assert not set(index.keys(ours)) & set(index.keys(theirs))


# ---- structure -----------------------------------------------------------------------------------


@SIZES
def test_a_split_keeps_ids_states_slots_pins_and_keys(size: int) -> None:
    index = make(size)
    ids = fill(index, HBM, text(size, 1, 2, 3, 4))
    fill(index, DRAM, text(size, 1, 2))
    index.pin(HBM, ids[:3])
    keys = index.keys(ids)
    before = [index.state(c, ids).tolist() + index.slots(c, ids).tolist() for c in range(3)]
    other = fill(index, HBM, text(size, 1, 2, 9))
    assert index.statistics().nodes == 3 and index.statistics().leaves == 2
    assert other[:2].tolist() == ids[:2].tolist()
    assert index.match(NS, text(size, 1, 2, 3, 4)).tolist() == ids.tolist()
    after = [index.state(c, ids).tolist() + index.slots(c, ids).tolist() for c in range(3)]
    assert after == before
    assert index.keys(ids) == keys
    assert index.statistics().columns[HBM].pinned == 3
    index.check()


@SIZES
def test_inserting_known_tokens_returns_the_same_ids(size: int) -> None:
    index = make(size)
    ids = fill(index, HBM, text(size, 1, 2, 3))
    assert index.insert(NS, text(size, 1, 2, 3, rest=size - 1)).tolist() == ids.tolist()
    assert index.statistics().blocks == 3


def test_equal_blocks_at_different_depths_are_different_blocks_with_different_keys() -> None:
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 1, 1))
    assert len(set(ids.tolist())) == 3
    assert len(set(index.keys(ids))) == 3


def test_a_sequence_that_grows_block_by_block_stays_one_node() -> None:
    index = make(3)
    for n in range(1, 40):
        fill(index, HBM, text(3, *range(n)))
    assert index.statistics().nodes == 1
    index.check()


def test_a_freed_id_is_used_again_and_its_old_key_is_not() -> None:
    index = make(3)
    old = index.insert(NS, text(3, 1))
    key = index.keys(old)
    index.forget(old)
    new = index.insert(NS, text(3, 2))
    assert new.tolist() == old.tolist()
    assert index.keys(new) != key
    index.check()


def test_state_survives_the_growth_of_the_arrays() -> None:
    index = make(1)
    ids = fill(index, HBM, text(1, *range(1000)))
    keys = index.keys(ids)
    index.pin(HBM, ids[:7])
    fill(index, HBM, text(1, *range(5000, 10_000)))
    assert index.slots(HBM, ids).tolist() == ids.tolist()
    assert index.keys(ids) == keys
    assert index.statistics().columns[HBM].pinned == 7
    index.check()


def test_an_index_that_has_forgotten_everything_is_empty() -> None:
    index = make(3)
    fill(index, HBM, text(3, 1, 2, 3))
    fill(index, HBM, text(3, 1, 5))
    evict(index, HBM, index.victims(HBM, 9))
    statistics = index.statistics()
    assert (statistics.blocks, statistics.nodes, statistics.leaves) == (0, 0, 0)
    index.check()


def test_forget_keeps_a_block_that_still_has_a_child() -> None:
    index = make(3)
    ids = index.insert(NS, text(3, 1, 2, 3))
    index.forget(ids[:2])
    assert index.match(NS, text(3, 1, 2, 3)).tolist() == ids.tolist()
    index.forget(ids[2:])
    assert index.statistics().blocks == 0


# ---- residency -----------------------------------------------------------------------------------


def test_a_block_evicted_from_a_pool_still_matches_while_another_holds_it() -> None:
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 2))
    fill(index, DRAM, text(3, 1, 2))
    evict(index, HBM, ids)
    assert index.match(NS, text(3, 1, 2)).tolist() == ids.tolist()
    assert index.slots(HBM, ids).tolist() == [-1, -1]
    evict(index, DRAM, ids)
    assert len(index.match(NS, text(3, 1, 2))) == 0


def test_a_fill_that_half_fails_leaves_the_contiguous_part_and_gives_back_its_slots() -> None:
    index = make(3)
    ids = index.insert(NS, text(3, 1, 2, 3, 4))
    index.begin_fill(HBM, ids, np.array([40, 41, 42, 43], np.int32))
    index.finish_fill(HBM, ids[:2])
    assert index.abort_fill(HBM, ids[2:]).tolist() == [42, 43]
    assert index.match(NS, text(3, 1, 2, 3, 4)).tolist() == ids[:2].tolist()
    assert index.statistics().columns[HBM].filling == 0
    index.check()


def test_blocks_behind_a_hole_can_be_evicted_and_go_first() -> None:
    index = make(3)
    ids = index.insert(NS, text(3, 1, 2, 3))
    index.begin_fill(HBM, ids, ids)
    index.finish_fill(HBM, ids[[0, 2]])
    index.abort_fill(HBM, ids[1:2])
    assert index.victims(HBM, 9).tolist() == ids[[2, 0]].tolist()


@pytest.mark.parametrize(
    "steps",
    [
        ["finish_fill"],
        ["abort_fill"],
        ["begin_leave"],
        ["cancel_leave"],
        ["finish_leave"],
        ["begin_fill", "begin_fill"],
        ["begin_fill", "begin_leave"],
        ["begin_fill", "finish_fill", "finish_fill"],
        ["begin_fill", "finish_fill", "finish_leave"],
        ["begin_fill", "finish_fill", "begin_leave", "begin_leave"],
        ["begin_fill", "finish_fill", "begin_leave", "abort_fill"],
    ],
    ids=lambda steps: "-".join(steps),
)
def test_a_step_the_automaton_does_not_know_is_refused_and_changes_nothing(
    steps: list[str],
) -> None:
    index = make(3)
    ids = index.insert(NS, text(3, 1, 2))

    def step(name: str) -> None:
        arguments = (HBM, ids, ids) if name == "begin_fill" else (HBM, ids)
        getattr(index, name)(*arguments)

    for name in steps[:-1]:
        step(name)
    before = index.statistics()
    with pytest.raises(IndexCorrupt):
        step(steps[-1])
    assert index.statistics() == before
    index.check()


def test_one_block_named_twice_in_a_call_is_refused() -> None:
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 2))
    twice = ids[[0, 1, 0]]
    index.pin(DRAM, ids)
    for col, call in ((HBM, index.begin_leave), (HBM, index.pin), (DRAM, index.unpin)):
        with pytest.raises(IndexCorrupt, match="twice"):
            call(col, twice)
    index.check()


@pytest.mark.parametrize("bad", [-1, 2, 5000])
def test_an_id_that_names_no_block_is_refused(bad: int) -> None:
    index = make(3)
    ids = index.insert(NS, text(3, 1, 2))
    wrong = np.array([int(ids[0]), bad], np.int32)
    with pytest.raises(IndexCorrupt, match=f"block {bad}"):
        index.pin(HBM, wrong)
    with pytest.raises(IndexCorrupt, match=f"block {bad}"):
        index.begin_fill(HBM, wrong, np.array([0, 1], np.int32))
    index.check()


# ---- pins ----------------------------------------------------------------------------------------


def test_a_pinned_leaf_keeps_its_ancestors_and_unpinning_restores_what_could_go() -> None:
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 2, 3))
    branch = fill(index, HBM, text(3, 1, 9))
    before = index.victims(HBM, 9).tolist()
    index.pin(HBM, ids[2:])
    index.pin(HBM, ids[2:])
    assert index.victims(HBM, 9).tolist() == branch[1:].tolist()
    index.unpin(HBM, ids[2:])
    assert index.victims(HBM, 9).tolist() == branch[1:].tolist()
    index.unpin(HBM, ids[2:])
    assert index.victims(HBM, 9).tolist() == before
    with pytest.raises(IndexCorrupt, match="not pinned"):
        index.unpin(HBM, ids[2:])


def test_a_pinned_block_does_not_leave_and_keeps_its_id() -> None:
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 2))
    index.pin(HBM, ids[:1])
    with pytest.raises(IndexCorrupt, match="pinned"):
        index.begin_leave(HBM, ids)
    absent = index.insert(NS, text(3, 7))
    index.pin(DRAM, absent)
    index.forget(absent)
    assert index.match(NS, text(3, 7)).tolist() == absent.tolist()
    index.unpin(DRAM, absent)
    assert len(index.match(NS, text(3, 7))) == 0


def test_a_pin_in_one_column_does_not_hold_the_block_in_another() -> None:
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 2))
    fill(index, DRAM, text(3, 1, 2))
    index.pin(DRAM, ids)
    assert index.victims(HBM, 9).tolist() == ids[::-1].tolist()
    assert len(index.victims(DRAM, 9)) == 0
    assert (index.evictable(HBM), index.evictable(DRAM)) == (2, 0)


# ---- eviction ------------------------------------------------------------------------------------


def test_a_long_leaf_is_trimmed_from_its_tail_by_as_many_blocks_as_are_wanted() -> None:
    index = make(3)
    ids = fill(index, HBM, text(3, *range(50)))
    assert index.victims(HBM, 7).tolist() == ids[::-1][:7].tolist()
    evict(index, HBM, index.victims(HBM, 7))
    assert index.match(NS, text(3, *range(50))).tolist() == ids[:43].tolist()
    index.check()


def test_a_leaf_whose_tail_has_left_the_column_already_is_trimmed_further_up() -> None:
    index = make(3)
    ids = fill(index, DRAM, text(3, *range(70)))
    fill(index, HBM, text(3, *range(30)))
    assert index.victims(HBM, 3).tolist() == ids[[29, 28, 27]].tolist()
    assert index.victims(HBM, 99).tolist() == ids[:30][::-1].tolist()


def test_the_least_recently_used_leaf_goes_first_and_a_parent_after_its_last_child() -> None:
    index = make(3)
    a = fill(index, HBM, text(3, 1, 2))
    b = fill(index, HBM, text(3, 1, 3))
    c = fill(index, HBM, text(3, 4))
    index.touch(HBM, a)
    order = [int(b[1]), int(c[0]), int(a[1]), int(a[0])]
    assert index.victims(HBM, 9).tolist() == order
    assert index.victims(HBM, 2).tolist() == order[:2]


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


def test_blocks_in_flight_below_keep_their_ancestors() -> None:
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 2, 3))
    index.begin_leave(HBM, ids[2:])
    assert len(index.victims(HBM, 9)) == 0
    index.cancel_leave(HBM, ids[2:])
    assert index.victims(HBM, 9).tolist() == ids[::-1].tolist()
    more = index.insert(NS, text(3, 1, 2, 8))
    index.begin_fill(HBM, more[2:], np.array([70], np.int32))
    assert index.victims(HBM, 9).tolist() == ids[2:].tolist()


def test_protected_blocks_are_passed_over_with_their_ancestors() -> None:
    index = make(3)
    a, b = fill(index, HBM, text(3, 1, 2)), fill(index, HBM, text(3, 3))
    assert index.victims(HBM, 9, protect=a[1:]).tolist() == b.tolist()
    assert index.victims(HBM, 9, protect=a[:1]).tolist() == [int(a[1]), int(b[0])]


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
    index.set_hint(NVME, ids)
    assert index.state(NVME, ids).tolist() == [Residency.RESIDENT, Residency.RESIDENT, 0]
    assert index.match(NS, text(3, 1, 2, 3)).tolist() == ids[:2].tolist()
    index.check()


def test_a_refusal_of_scattered_blocks_clears_below_each_of_them() -> None:
    index = make(3)
    ids = index.insert(NS, text(3, 1, 2, 3, 4))
    fork = index.insert(NS, text(3, 1, 2, 9))
    index.set_hint(NVME, ids)
    index.set_hint(NVME, fork)
    index.clear_hint(NVME, ids[[3, 1]])
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


# ---- check ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    ["state", "pins", "node", "parent", "depth", "busy", "hints", "keys"],
)
def test_check_finds_a_field_that_was_overwritten(field: str) -> None:
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 2, 3))
    fill(index, HBM, text(3, 1, 4))
    index.keys(ids)
    index.check()
    row = getattr(index._table, field)
    at = int(ids[1])
    if field in ("state", "pins"):
        row[HBM, at] += 1
    else:
        row[at] += 1
    with pytest.raises(IndexCorrupt):
        index.check()


def test_check_finds_one_slot_given_to_two_blocks() -> None:
    index = make(3)
    ids = index.insert(NS, text(3, 1, 2))
    index.begin_fill(HBM, ids, np.array([7, 7], np.int32))
    with pytest.raises(IndexCorrupt, match="slot used twice"):
        index.check()


def test_the_repr_shows_the_state() -> None:
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 2))
    index.pin(HBM, ids[:1])
    assert repr(index) == (
        "RadixIndex(2 blocks in 1 nodes; "
        "hbm 2+0-0 pinned 1, dram 0+0-0 pinned 0, nvme 0+0-0 pinned 0)"
    )


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
