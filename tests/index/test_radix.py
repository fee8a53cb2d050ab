"""The tree, residency and pins, case by case. Random operations: `test_radix_model.py`."""

import numpy as np
import pytest

from kvtier.index.radix import IndexCorrupt
from tests.index.helpers import DRAM, HBM, NS, evict, fill, make, text

SIZES = pytest.mark.parametrize("size", [1, 3, 16])


# ---- match ---------------------------------------------------------------------------------------


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


# ---- structure -----------------------------------------------------------------------------------


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


def test_the_order_in_which_blocks_are_named_to_forget_does_not_matter() -> None:
    index = make(3)
    ids = index.insert(NS, text(3, 1, 2, 3))
    index.forget(ids[[0, 2, 1]])
    assert index.statistics().blocks == 0


# ---- residency -----------------------------------------------------------------------------------


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
