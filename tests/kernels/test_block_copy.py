"""All three implementations of `block_copy`: exact copies of named blocks, nothing else touched."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvtier.kernels import block_copy as triton_copy
from kvtier.kernels import cpu, reference
from tests.kernels.cases import SHAPES, Shape

BlockCopy = Callable[..., None]
ALL = [triton_copy.block_copy, cpu.block_copy, reference.block_copy]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def skip_what_has_no_cuda(copy: BlockCopy, device: torch.device) -> None:
    if device.type == "cuda" and copy is cpu.block_copy:
        pytest.skip("the CPU path has no CUDA case")


def random_pool(shape: Shape, blocks: int, dtype: torch.dtype, seed: int) -> Tensor:
    """`[blocks, 3 layers, 2, kv_heads, block_size, head_dim]` of random bytes, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    size = (blocks, 3, 2, shape.kv_heads, shape.block_size, shape.head_dim * dtype.itemsize)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("copy", ALL)
def test_named_blocks_are_copied_and_nothing_else_is_touched(
    copy: BlockCopy, shape: Shape, dtype: torch.dtype, device: torch.device
) -> None:
    skip_what_has_no_cuda(copy, device)
    source, target = random_pool(shape, 5, dtype, 1), random_pool(shape, 4, dtype, 2)
    source = source[:, :2]  # blocks with a gap between them
    target = target[:, 1:].contiguous()
    want = target.clone()
    pairs = [(4, 0), (1, 3), (1, 2)]
    for a, b in pairs:
        want[b] = source[a]
    got = target.to(device)
    copy(source.to(device), got, torch.tensor(pairs, dtype=torch.int32, device=device))
    assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("copy", ALL)
def test_of_a_tail_only_the_first_tokens_of_every_strip_are_copied(
    copy: BlockCopy, shape: Shape, dtype: torch.dtype, device: torch.device
) -> None:
    skip_what_has_no_cuda(copy, device)
    pool = random_pool(shape, 7, dtype, 3)
    pairs = [(0, 5), (2, 1), (2, 4), (6, 3)]
    counts = [shape.block_size, 0, 1, shape.block_size - 1]
    want = pool.clone()
    for (a, b), count in zip(pairs, counts, strict=True):
        want[b, :, :, :, :count] = pool[a, :, :, :, :count]
    got = pool.to(device)
    chosen = torch.tensor(pairs, dtype=torch.int32, device=device)
    copy(got, got, chosen, torch.tensor(counts, dtype=torch.int32, device=device))
    assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("copy", ALL)
def test_no_pair_changes_nothing(copy: BlockCopy, device: torch.device) -> None:
    skip_what_has_no_cuda(copy, device)
    pool = torch.ones((2, 1, 16, 8), device=device)
    nothing = torch.zeros((0, 2), dtype=torch.int32, device=device)
    copy(pool, pool, nothing)
    copy(pool, pool, nothing, nothing[:, 0].contiguous())
    assert bool((pool == 1).all())


@pytest.mark.parametrize("copy", [cpu.block_copy, reference.block_copy])
@pytest.mark.parametrize(
    ("pairs", "tokens", "message"),
    [
        ([(0, 1), (2, 1)], None, "pairs: a block is written twice"),
        ([(0, 1), (1, 2)], None, "pairs: a block is written twice"),
        ([(0, 1)], [17], "tokens: want 0 to 16"),
        ([(0, 1)], [-1], "tokens: want 0 to 16"),
    ],
)
def test_where_the_host_has_the_ids_overlapping_pairs_are_refused(
    copy: BlockCopy, pairs: list[tuple[int, int]], tokens: list[int] | None, message: str
) -> None:
    pool = torch.ones((3, 1, 16, 8))
    counts = None if tokens is None else torch.tensor(tokens, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^{message}"):
        copy(pool, pool, torch.tensor(pairs, dtype=torch.int32), counts)
    copy(pool, torch.zeros((3, 1, 16, 8)), torch.tensor([(0, 1), (1, 2)], dtype=torch.int32))
