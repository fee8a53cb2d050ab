"""The conformance list of a prefix index, case by case, in its order.

What needs slots, copies or a store stands in `tests/tiers/test_conformance.py`, which goes on with
the list. Cases that have their tests where the feature is are named here, and a test looks that
they are still there:

    pins cannot exceed a quota           nvme/test_custody.py::test_a_pin_beyond_the_quota_is_refused_and_changes_nothing
      (a client's, of the slab)          sidecar/test_server.py::test_one_client_may_hold_half_of_the_slab_and_no_more
    pins expire                          nvme/test_custody.py::test_a_pin_ends_at_its_time_and_a_second_word_moves_it
    a corrupted record is a miss         nvme/test_corruption.py::test_a_flipped_payload_bit_costs_its_block_and_what_is_behind
    a truncated record is a miss         nvme/test_corruption.py::test_a_segment_cut_short_or_gone_is_a_miss
    a foreign namespace's is a miss      nvme/test_corruption.py::test_a_record_of_another_namespace_is_refused
    ENOSPC drops, and serves on          nvme/test_full_disk.py::test_a_store_on_a_disk_that_fills_up_serves_on_and_takes_puts_again
    a crash between data and catalogue   nvme/test_crash_states.py::test_every_disk_a_power_cut_may_leave_is_right
      leaves no dangling hit, no leak    nvme/test_faults.py::test_a_commit_that_fails_publishes_nothing_and_leaks_nothing
    a restart gives the same hits        tiers/test_cache_nvme.py::test_flushed_blocks_are_hit_after_a_restart_with_the_right_bytes
    a smaller limit holds from the start nvme/test_capacity.py::test_a_smaller_capacity_is_honoured_before_serving
    freeing a slot twice is refused      tiers/test_pool.py::test_freeing_what_is_not_held_is_refused_and_frees_nothing
    free + evictable + pinned = total    index/test_fuzz.py::test_every_slot_is_accounted_for_after_each_of_a_hundred_thousand_steps
      (the whole cache)                  tiers/test_fuzz.py::test_every_slot_is_accounted_for_after_each_step
    a log replays to the exact state     tiers/test_fuzz.py::test_a_recorded_history_replays_to_the_exact_state
    equal answers from every tier        engine/test_llm.py::test_cold_hbm_dram_and_nvme_hits_give_transformers_answer
"""  # noqa: E501

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.index.policy import Harvest
from kvtier.index.radix import IndexCorrupt
from kvtier.index.tree import Node
from tests.index.helpers import (
    BASE,
    DRAM,
    HBM,
    NS,
    evict,
    fill,
    make,
    text,
    variants,
)

SIZES = pytest.mark.parametrize("size", [1, 3, 16])
TESTS = Path(__file__).parents[1]


def test_cases_that_stand_elsewhere_are_there() -> None:
    places = re.findall(r"(\S+\.py)::(\w+)", str(__doc__))
    assert len(places) >= 15
    for path, name in places:
        assert re.search(rf"^(async )?def {name}\(", (TESTS / path).read_text(), re.M), name


# ---- match ---------------------------------------------------------------------------------------


@SIZES
def test_an_empty_index_and_an_empty_prompt_match_nothing(size: int) -> None:
    """Empty: nothing is found in nothing, and an empty prompt finds nothing in anything."""
    index = make(size)
    assert len(index.match(NS, text(size, 1, 2))) == 0
    fill(index, HBM, text(size, 1, 2))
    assert len(index.match(NS, text(size))) == 0


@SIZES
def test_an_exact_prompt_matches_all_of_its_blocks(size: int) -> None:
    """Exact: the prompt is what is stored."""
    index = make(size)
    ids = fill(index, HBM, text(size, 1, 2, 3)).tolist()
    assert index.match(NS, text(size, 1, 2, 3)).tolist() == ids


@SIZES
def test_a_longer_prompt_matches_what_is_stored(size: int) -> None:
    """Longer: the prompt goes on behind what is stored."""
    index = make(size)
    ids = fill(index, HBM, text(size, 1, 2, 3)).tolist()
    assert index.match(NS, text(size, 1, 2, 3, 4, rest=size - 1)).tolist() == ids


@SIZES
def test_a_shorter_prompt_matches_its_whole_blocks_and_splits_nothing(size: int) -> None:
    """Shorter: the prompt ends inside what is stored, on a block's edge or before one."""
    index = make(size)
    ids = fill(index, HBM, text(size, 1, 2, 3)).tolist()
    assert index.match(NS, text(size, 1, 2)).tolist() == ids[:2]
    assert index.match(NS, text(size, 1, 2, rest=size - 1)).tolist() == ids[:2]
    assert index.statistics().nodes == 1


@pytest.mark.parametrize("at", [4, 5])
def test_a_divergence_inside_a_block_rounds_down(at: int) -> None:
    """Divergence inside a page: the block that holds it does not match, nor what is behind."""
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 2, 3)).tolist()
    tokens = text(3, 1, 2, 3)
    tokens[at] = 77
    assert index.match(NS, tokens).tolist() == ids[:1]


@pytest.mark.parametrize("at", [3, 6])
def test_a_divergence_on_an_edge_costs_nothing_before_it(at: int) -> None:
    """Divergence on a page's edge: every block before the edge matches."""
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 2, 3)).tolist()
    tokens = text(3, 1, 2, 3)
    tokens[at] = 77
    assert index.match(NS, tokens).tolist() == ids[: at // 3]


# ---- structure -----------------------------------------------------------------------------------


@SIZES
def test_a_split_keeps_totals_pins_tiers_slots_and_keys(size: int) -> None:
    """A split changes no block: counts, pins, residency in every tier, slots and digests stay."""
    index = make(size)
    ids = fill(index, HBM, text(size, 1, 2, 3, 4))
    fill(index, DRAM, text(size, 1, 2))
    index.pin(HBM, ids[:3])
    keys = index.keys(ids)

    def state() -> list[object]:
        columns = [index.state(c, ids).tolist() + index.slots(c, ids).tolist() for c in range(3)]
        return [columns, index.statistics().columns, index.evictable(HBM), index.evictable(DRAM)]

    before = state()
    other = index.insert(NS, text(size, 1, 2, 9))
    assert (index.statistics().nodes, index.statistics().leaves) == (3, 2)
    assert other[:2].tolist() == ids[:2].tolist()
    assert index.match(NS, text(size, 1, 2, 3, 4)).tolist() == ids.tolist()
    assert state() == before
    assert index.keys(ids) == keys
    index.check()


@SIZES
def test_what_is_inserted_again_is_the_same_blocks(size: int) -> None:
    """Re-insertion makes no second block; whose slots are duplicates is the cache's case."""
    index = make(size)
    ids = fill(index, HBM, text(size, 1, 2, 3))
    assert index.insert(NS, text(size, 1, 2, 3, rest=size - 1)).tolist() == ids.tolist()
    assert index.statistics().blocks == 3


def test_equal_blocks_at_different_depths_are_different_blocks_with_different_keys() -> None:
    """Repeated identical pages: the digest is chained, so that each has one of its own."""
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 1, 1))
    assert len(set(ids.tolist())) == 3
    assert len(set(index.keys(ids))) == 3


# ---- isolation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "other"), variants(), ids=lambda v: v if type(v) is str else "")
def test_namespaces_that_differ_in_one_field_share_nothing(name: str, other: Any) -> None:
    """Isolation per field of the fingerprint: no match, no block and no key in common."""
    index = make(3)
    ours = fill(index, HBM, text(3, 1, 2), BASE.digest)
    assert len(index.match(other.digest, text(3, 1, 2))) == 0
    theirs = fill(index, HBM, text(3, 1, 2), other.digest)
    assert not set(ours.tolist()) & set(theirs.tolist())
    assert index.namespace_of(int(theirs[0])) == other.digest
    assert not set(index.keys(ours)) & set(index.keys(theirs))


# ---- pins ----------------------------------------------------------------------------------------


def test_a_pinned_leaf_keeps_its_ancestors() -> None:
    """Pins protect ancestors, though none of them is pinned itself."""
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 2, 3))
    branch = fill(index, HBM, text(3, 1, 9))
    index.pin(HBM, ids[2:])
    assert index.victims(HBM, 9).tolist() == branch[1:].tolist()


def test_pins_survive_a_split_on_both_sides_of_it() -> None:
    """Pins survive splits: what was pinned as one run still is, above the cut and below."""
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 2, 3, 4))
    index.pin(HBM, ids)
    branch = fill(index, HBM, text(3, 1, 2, 9))
    assert index.victims(HBM, 9).tolist() == branch[2:].tolist()
    for part in (ids[:2], ids[2:]):
        with pytest.raises(IndexCorrupt, match="pinned"):
            index.begin_leave(HBM, part)
    index.unpin(HBM, ids)
    assert index.evictable(HBM) == 5
    index.check()


def test_unpinning_makes_evictable_exactly_what_was() -> None:
    """Pins count: the last of them gives back what the first took, in the same order."""
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 2, 3))
    fill(index, HBM, text(3, 1, 9))
    before = index.victims(HBM, 9).tolist(), index.evictable(HBM)
    index.pin(HBM, ids[1:])
    index.pin(HBM, ids[2:])
    assert index.evictable(HBM) == 2
    index.unpin(HBM, ids[1:])
    assert index.evictable(HBM) == 3
    index.unpin(HBM, ids[2:])
    assert (index.victims(HBM, 9).tolist(), index.evictable(HBM)) == before
    with pytest.raises(IndexCorrupt, match="not pinned"):
        index.unpin(HBM, ids[2:])


# ---- eviction ------------------------------------------------------------------------------------


def test_the_least_recently_used_leaf_goes_first() -> None:
    """Leaf order: leaves by last use, whatever the ages of what they hang from."""
    index = make(3)
    a = fill(index, HBM, text(3, 1, 2))
    b = fill(index, HBM, text(3, 1, 3))
    c = fill(index, HBM, text(3, 4))
    index.touch(HBM, a)
    assert index.victims(HBM, 2).tolist() == [int(b[1]), int(c[0])]


def test_a_parent_follows_its_last_child() -> None:
    """A parent may go once its last child is gone, and not before."""
    index = make(3)
    a = fill(index, HBM, text(3, 1, 2))
    b = fill(index, HBM, text(3, 1, 3))
    assert index.victims(HBM, 9).tolist() == [int(a[1]), int(b[1]), int(a[0])]
    evict(index, HBM, a[1:])
    assert index.victims(HBM, 9).tolist() == [int(b[1]), int(a[0])]


@pytest.mark.parametrize("k", [1, 3, 20, 21])
def test_k_tokens_from_a_long_leaf_free_as_few_tail_blocks_as_hold_them(k: int) -> None:
    """k tokens free ceil(k / block) blocks of a long leaf, from its tail, and no more."""
    index = make(3)
    ids = fill(index, HBM, text(3, *range(50)))
    blocks = -(-k // index.block_size)
    assert index.victims(HBM, blocks).tolist() == ids[::-1][:blocks].tolist()
    evict(index, HBM, index.victims(HBM, blocks))
    assert index.match(NS, text(3, *range(50))).tolist() == ids[: 50 - blocks].tolist()
    index.check()


def test_a_plan_looks_at_as_many_nodes_among_many_leaves_as_among_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eviction costs the same at any number of leaves. Counted here; timed in `bench/index.py`."""
    looked: list[Node] = []
    offer = Harvest.offer

    def counting(harvest: Harvest[Node], node: Node, keep: int = 0) -> None:
        looked.append(node)
        offer(harvest, node, keep)

    monkeypatch.setattr(Harvest, "offer", counting)
    counts = []
    for leaves in (200, 5_000):
        index = make(3)
        for leaf in range(leaves):
            fill(index, HBM, text(3, 1, 2, 100 + leaf, 3))
        looked.clear()
        assert len(index.victims(HBM, 64)) == 64
        counts.append(len(looked))
    assert counts[0] == counts[1] == 32


# ---- tiers ---------------------------------------------------------------------------------------


def test_a_block_evicted_from_a_pool_still_matches_while_another_holds_it() -> None:
    """What left the device still hits in the host; what left every tier does not."""
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 2))
    fill(index, DRAM, text(3, 1, 2))
    evict(index, HBM, ids)
    assert index.match(NS, text(3, 1, 2)).tolist() == ids.tolist()
    assert index.slots(HBM, ids).tolist() == [-1, -1]
    evict(index, DRAM, ids)
    assert len(index.match(NS, text(3, 1, 2))) == 0


def test_blocks_in_flight_stay_and_keep_their_ancestors() -> None:
    """A pending load or store is never evicted, nor what it hangs from."""
    index = make(3)
    ids = fill(index, HBM, text(3, 1, 2, 3))
    index.begin_leave(HBM, ids[2:])
    assert len(index.victims(HBM, 9)) == 0
    index.cancel_leave(HBM, ids[2:])
    assert index.victims(HBM, 9).tolist() == ids[::-1].tolist()
    more = index.insert(NS, text(3, 1, 2, 8))
    index.begin_fill(HBM, more[2:], np.array([70], np.int32))
    assert index.victims(HBM, 9).tolist() == ids[2:].tolist()
