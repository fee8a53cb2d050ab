from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.index.words import BlockKey, TierId
from kvtier.tiers.contracts import HostPool
from kvtier.tiers.errors import CapacityTooSmall, TierFull
from kvtier.tiers.pool import POISON, SLOT_ROW, ArrayPool, SlotPool, SlotState


@given(
    st.integers(1, 70),
    st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.randoms(use_true_random=False))),
)
@settings(max_examples=150, deadline=None)
def test_slots_are_held_by_one_user_at_a_time_and_none_is_lost(
    num_slots: int, steps: list[tuple[bool, int, Random]]
) -> None:
    pool = SlotPool(TierId.DRAM, num_slots, 8)
    held: list[int] = []
    frees = dict.fromkeys(range(num_slots), 0)
    for is_alloc, n, random in steps:
        if is_alloc and n > pool.num_free:
            with pytest.raises(TierFull):
                pool.alloc(n)
        elif is_alloc:
            got = pool.alloc(n).tolist()
            assert len(got) == n and got == sorted(got)
            assert not set(got) & set(held)
            held += got
        else:
            random.shuffle(held)
            gone, held = held[:n], held[n:]
            pool.free(np.array(gone, np.int32))
            for slot in gone:
                frees[slot] += 1
        assert pool.num_free == num_slots - len(held)
    everything = np.arange(num_slots, dtype=np.int32)
    assert pool.generations(everything).tolist() == list(frees.values())
    assert sorted(held + pool.alloc(pool.num_free).tolist()) == everything.tolist()


def test_a_fresh_pool_is_handed_out_as_one_ascending_run() -> None:
    pool = SlotPool(TierId.HBM, 37, 8)
    assert [pool.alloc(n).tolist() for n in (5, 1, 3)] == [[0, 1, 2, 3, 4], [5], [6, 7, 8]]


def test_a_run_is_preferred_to_scattered_lower_slots() -> None:
    pool = SlotPool(TierId.HBM, 32, 8)
    pool.alloc(32)
    pool.free(np.array([20, 3, 9, 22, 21, 14, 23], np.int32))
    assert pool.alloc(4).tolist() == [20, 21, 22, 23]
    assert pool.alloc(2).tolist() == [3, 9]


def test_after_everything_was_freed_in_random_order_runs_are_whole_again() -> None:
    pool = SlotPool(TierId.HBM, 9001, 8)
    slots = pool.alloc(9001)
    for part in np.array_split(np.random.default_rng(3).permutation(slots), 97):
        pool.free(part)
    assert (np.diff(pool.alloc(4500)) == 1).all()


@pytest.mark.parametrize("slots", [[1], [0, 0], [2, 1], [-1], [7], [0, 99]])
def test_freeing_what_is_not_held_is_refused_and_frees_nothing(slots: list[int]) -> None:
    pool = SlotPool(TierId.DRAM, 7, 8)
    kept = pool.alloc(1)
    pool.alloc(2)
    pool.free(np.array([1], np.int32))
    with pytest.raises(ValueError, match="dram pool"):
        pool.free(np.array(slots, np.int32))
    assert pool.num_free == 5
    assert pool.state(int(kept[0])) is SlotState.HELD


def test_a_slot_forgets_its_description_when_it_is_freed() -> None:
    pool = ArrayPool(TierId.DRAM, 3, 100)
    slots = pool.alloc(2)
    keys = [BlockKey(b"a" * 32), BlockKey(b"b" * 32)]
    pool.describe(slots, keys, np.array([7, 9], np.uint64))
    assert [pool.key(int(s)) for s in slots] == keys
    assert pool.checksums(slots).tolist() == [7, 9]
    assert pool.state(int(slots[1])) is SlotState.VALID
    pool.free(slots[1:])
    assert pool.checksums(slots).tolist() == [7, 0]
    assert pool.key(int(slots[1])) == bytes(32)
    with pytest.raises(ValueError, match="free already"):
        pool.describe(slots[1:], keys[1:], None)


def test_asking_for_nothing_and_giving_nothing_back_is_fine() -> None:
    pool = SlotPool(TierId.HBM, 3, 8)
    pool.alloc(3)
    nothing = pool.alloc(0)
    pool.describe(nothing, [], None)
    pool.free(nothing)
    assert nothing.dtype == np.int32 and pool.num_free == len(nothing) == 0


def test_describing_with_too_few_keys_is_refused() -> None:
    pool = SlotPool(TierId.HBM, 3, 8)
    with pytest.raises(ValueError, match="1 keys for 2 slots"):
        pool.describe(pool.alloc(2), [BlockKey(bytes(32))], None)


@pytest.mark.parametrize("block_bytes", [1, 96, 4096, 5000])
def test_views_are_page_aligned_disjoint_and_as_long_as_a_block(block_bytes: int) -> None:
    pool: HostPool = ArrayPool(TierId.DRAM, 3, block_bytes)
    for slot in range(3):
        pool.view(slot)[:] = slot + 1
    for slot in range(3):
        view = pool.view(slot)
        assert view.ctypes.data % 4096 == 0
        assert view.shape == (block_bytes,) and (view == slot + 1).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_in_debug_mode_free_slots_are_nan(dtype: type[np.floating]) -> None:
    pool = ArrayPool(TierId.HBM, 3, 96, debug=True)
    slots = pool.alloc(2)
    assert np.isnan(pool.view(int(slots[0])).view(dtype)).all()
    pool.view(int(slots[0]))[:] = 0
    pool.view(int(slots[1]))[:] = 1
    pool.free(slots[:1])
    assert (pool.view(int(slots[0])) == POISON).all()
    assert (pool.view(int(slots[1])) == 1).all()


def test_a_pool_without_room_is_refused_by_name() -> None:
    with pytest.raises(CapacityTooSmall, match="hbm pool: 0 slots"):
        SlotPool(TierId.HBM, 0, 8)
    with pytest.raises(CapacityTooSmall, match="0 bytes"):
        SlotPool(TierId.HBM, 8, 0)


def test_a_table_row_is_64_bytes_with_the_documented_offsets() -> None:
    assert SLOT_ROW.itemsize == 64
    fields: Mapping[str, tuple[Any, ...]] = SLOT_ROW.fields or {}
    offsets = {name: field[1] for name, field in fields.items()}
    assert offsets == {
        "key": 0,
        "generation": 32,
        "state": 40,
        "zero": 44,
        "checksum": 48,
        "zeros": 56,
    }


def test_its_text_shows_how_full_it_is() -> None:
    pool = SlotPool(TierId.DRAM, 5, 8)
    pool.alloc(2)
    assert repr(pool) == "<SlotPool dram: 3 of 5 slots free>"
