"""All three implementations of `write_kv`: exact copies into named slots, nothing else touched."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvtier.kernels import cpu, reference
from kvtier.kernels import write_kv as triton_write
from tests.kernels.cases import SHAPES, Shape

WriteKv = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def written(
    write: WriteKv, shape: Shape, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """The pool after writing 9 tokens, one of them skipped, and what it should hold."""
    generator = torch.Generator().manual_seed(1)
    blocks = 6
    pool = torch.full(
        (blocks, 2, 2, shape.kv_heads, shape.block_size, shape.head_dim), torch.nan, dtype=dtype
    )
    # Rows of one wider projection, as an engine has them: strided, K and V side by side.
    both = torch.randn((9, 2 * shape.kv_heads, shape.head_dim), generator=generator).to(dtype)
    slots = torch.randperm(blocks * shape.block_size, generator=generator)[:9]
    slots[4] = -1
    want = pool.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, shape.block_size)
            want[block, 1, 0, :, offset] = both[token, : shape.kv_heads]
            want[block, 1, 1, :, offset] = both[token, shape.kv_heads :]
    got, both = pool.to(device), both.to(device)
    key, value = both[:, : shape.kv_heads], both[:, shape.kv_heads :]
    write(key, value, got[:, 1, 0], got[:, 1, 1], slots.to(device))
    return got.cpu(), want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_triton_writes_exactly_the_named_slots(
    shape: Shape, dtype: torch.dtype, device: torch.device
) -> None:
    got, want = written(triton_write.write_kv, shape, dtype, device)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("write", [cpu.write_kv, reference.write_kv])
def test_torch_writes_exactly_the_named_slots(
    write: WriteKv, shape: Shape, dtype: torch.dtype
) -> None:
    got, want = written(write, shape, dtype, "cpu")
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("write", [cpu.write_kv, reference.write_kv, triton_write.write_kv])
@pytest.mark.parametrize("slots", [[], [-1, -1, -1]])
def test_no_token_or_only_skipped_ones_change_nothing(
    write: WriteKv, slots: list[int], device: torch.device
) -> None:
    if device.type == "cuda" and write is cpu.write_kv:
        pytest.skip("the CPU path has no CUDA case")
    pool = torch.zeros((2, 1, 16, 8), device=device)
    rows = torch.ones((len(slots), 1, 8), device=device)
    write(rows, rows, pool, pool, torch.tensor(slots, dtype=torch.int64, device=device))
    assert not pool.any()
