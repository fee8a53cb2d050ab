"""Triton: copy many small blocks, or the first tokens of some, inside GPU memory in one launch.

For copies that a copy engine does badly: many pairs of blocks below about 30 KB, each of which
would be an entry of its own, and tails of blocks, whose tokens lie in a strip for every layer, K or
V, and head. Whole blocks between tiers are the mover's and its copy engines', which this
kernel does not replace. Knows block ids; not who owns them.
"""

# mypy: allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.kernels.checks import check_block_copy


@triton.jit
def block_copy_kernel(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    source_block_stride: tl.tensor,
    target_block_stride: tl.tensor,
    BLOCK_WORDS: tl.constexpr,
    STRIP_WORDS: tl.constexpr,
    TOKEN_WORDS: tl.constexpr,
    PARTIAL: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """`target[b, :, :n] = source[a, :, :n]` for pair `(a, b)`, `n` tokens of every strip.

    Blocks are `BLOCK_WORDS` 4-byte words in strips of `STRIP_WORDS`. A program copies TILE words of
    one pair; neighbours in a tile are neighbours in memory, so accesses are 16 bytes.
    """
    pair = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * TILE + tl.arange(0, TILE)
    kept = words < BLOCK_WORDS
    if PARTIAL:
        kept &= words % STRIP_WORDS < tl.load(tokens_ptr + pair) * TOKEN_WORDS
    # int64: 2 MiB blocks are 2^19 words, and an int32 offset overflows at block 4,096.
    source = tl.load(pairs_ptr + 2 * pair).to(tl.int64) * source_block_stride
    target = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64) * target_block_stride
    tl.store(target_ptr + target + words, tl.load(source_ptr + source + words, mask=kept), kept)


OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
"""Launch options: 128 lanes of two 16-byte accesses. Fusion is named as everywhere."""

_TILE = 1024
"""Words of a program: 4 KiB, so that one block of 2 MiB is work for every SM."""


def block_copy_constants(
    block_bytes: int, block_size: int, token_bytes: int, *, partial: bool
) -> dict[str, int]:
    """The kernel's compile-time constants; `token_bytes` of one token in one strip."""
    return {
        "BLOCK_WORDS": block_bytes // 4,
        "STRIP_WORDS": block_size * token_bytes // 4,
        "TOKEN_WORDS": token_bytes // 4,
        "PARTIAL": partial,
        "TILE": _TILE,
    }


def block_copy(
    source_pool: Tensor, target_pool: Tensor, pairs: Tensor, tokens: Tensor | None = None
) -> None:
    """Copy block `pairs[i, 0]` of the source to block `pairs[i, 1]` of the target.

    pools `[num_blocks, ..., block_size, head_dim]`, each block contiguous, alike but in number;
    they may be one tensor. pairs int32 `[n, 2]`. tokens int32 `[n]`: copy only the first so many
    tokens of every strip and leave the target's others as they are (None: all).

    Pairs run in no order: the caller vouches that no block is a target twice, nor both source and
    target where the pools are one. Ids are not checked against the pools: that would wait for the
    device. Raises ValueError on a shape or dtype that does not fit.
    """
    check_block_copy(source_pool, target_pool, pairs, tokens)
    count = pairs.shape[0]
    if count == 0:
        return
    block_size, head_dim = source_pool.shape[-2:]
    source = source_pool.flatten(1).view(torch.int32)
    target = target_pool.flatten(1).view(torch.int32)
    constants = block_copy_constants(
        4 * source.shape[1],
        block_size,
        head_dim * source_pool.element_size(),
        partial=tokens is not None,
    )
    block_copy_kernel[(count, triton.cdiv(constants["BLOCK_WORDS"], _TILE))](
        source,
        target,
        pairs,
        pairs if tokens is None else tokens,
        source.stride(0),
        target.stride(0),
        **constants,
        **OPTIONS,
    )
