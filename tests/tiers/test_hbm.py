import numpy as np
import pytest
import torch

from kvtier.index.namespace import DTYPE_BYTES, BlockLayout
from kvtier.index.words import TierId
from kvtier.tiers.contracts import HostPool
from kvtier.tiers.errors import CapacityTooSmall
from kvtier.tiers.hbm import HbmPool
from kvtier.tiers.memory import NotEnoughMemory
from kvtier.tiers.pool import POISON

LAYOUTS = [
    BlockLayout(2, 3, 5, 7, "float32"),
    BlockLayout(3, 1, 16, 64, "bfloat16"),
    BlockLayout(1, 7, 3, 9, "float16"),
    BlockLayout(1, 2, 3, 5, "float8_e4m3fn"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_is_one_run_of_bytes_in_the_tensor(layout: BlockLayout) -> None:
    pool = HbmPool(layout, 5)
    host: HostPool = pool
    assert pool.tensor.shape == (5, *layout.shape)
    assert pool.tensor.dtype == getattr(torch, layout.dtype)
    pool.tensor[3].view(torch.uint8).fill_(7)
    assert (host.view(3) == 7).all() and host.view(3).shape == (layout.nbytes,)
    assert not host.view(2).any() and not host.view(4).any()
    assert pool.array.shape == (5, layout.nbytes)
    host.view(1)[:] = np.arange(layout.nbytes) % 251
    assert pool.tensor[1].contiguous().view(torch.uint8).flatten()[1].item() == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_debug_mode_what_is_free_is_nan(layout: BlockLayout) -> None:
    pool = HbmPool(layout, 3, debug=True)
    assert bool(pool.tensor.float().isnan().all())
    slots = pool.alloc(2)
    pool.tensor[slots.tolist()] = torch.zeros(layout.shape, dtype=pool.tensor.dtype)
    pool.free(slots[1:])
    assert not bool(pool.tensor[int(slots[0])].float().isnan().any())
    assert bool(pool.tensor[int(slots[1])].float().isnan().all())


def test_the_poison_is_nan_in_every_dtype_of_kv_and_in_nothing_smaller() -> None:
    """0xFF has all exponent and mantissa bits set: NaN in IEEE formats and in e4m3fn, which has no
    infinity and keeps only that pattern (with either sign) for NaN."""
    assert POISON == 0xFF
    for name, size in {**DTYPE_BYTES, "float8_e5m2": 1}.items():
        poisoned = torch.full((size,), POISON, dtype=torch.uint8).view(getattr(torch, name))
        assert poisoned.numel() == 1 and bool(poisoned.float().isnan().all())
    # One bit less in its only byte is a number in e4m3fn: the pattern cannot be any.
    spoilt = torch.full((1,), POISON - 1, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert not bool(spoilt.float().isnan().any())


def test_a_budget_in_bytes_is_rounded_down_to_whole_blocks() -> None:
    layout = LAYOUTS[0]
    pool = HbmPool.sized(layout, 4 * layout.nbytes - 1)
    assert pool.num_slots == pool.num_free == 3 and pool.tier is TierId.HBM
    with pytest.raises(CapacityTooSmall, match="less than one block"):
        HbmPool.sized(layout, layout.nbytes - 1)
    with pytest.raises(CapacityTooSmall, match="0 slots"):
        HbmPool(layout, 0)


def test_more_than_the_machine_has_is_refused_with_the_numbers() -> None:
    with pytest.raises(NotEnoughMemory, match="hbm pool of 1000000000 blocks: needs"):
        HbmPool(LAYOUTS[0], 1_000_000_000)
