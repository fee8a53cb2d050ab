"""Triton: new tokens' K and V into their places in the pool. Knows slots, not sequences."""

# mypy: allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from kvtier.kernels.checks import check_write


@triton.jit
def write_kv_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_pool_ptr: tl.tensor,
    value_pool_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    pool_block_stride: tl.tensor,
    pool_head_stride: tl.tensor,
    pool_token_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
) -> None:
    """One program a token: `pool[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = row`, unless -1."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    heads = tl.arange(0, KV_HEADS_PADDED)[:, None]
    dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    kept = (heads < KV_HEADS) & (dims < HEAD_DIM)
    target = (slot // BLOCK_SIZE) * pool_block_stride + (slot % BLOCK_SIZE) * pool_token_stride
    target += heads * pool_head_stride + dims
    source = token * key_token_stride + heads * key_head_stride + dims
    tl.store(key_pool_ptr + target, tl.load(key_ptr + source, mask=kept), mask=kept)
    source = token * value_token_stride + heads * value_head_stride + dims
    tl.store(value_pool_ptr + target, tl.load(value_ptr + source, mask=kept), mask=kept)


OPTIONS = {"num_warps": 1, "enable_fp_fusion": True}
"""Launch options. One warp a token: with more, small models' rows no longer fill 16-byte accesses.
Fusion is named because Triton's default changes between releases."""


def write_kv_constants(kv_heads: int, head_dim: int, block_size: int) -> dict[str, int]:
    """The kernel's compile-time constants for one model and block size."""
    return {
        "BLOCK_SIZE": block_size,
        "KV_HEADS": kv_heads,
        "KV_HEADS_PADDED": triton.next_power_of_2(kv_heads),
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": triton.next_power_of_2(head_dim),
    }


def write_kv(
    key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slot_mapping: Tensor
) -> None:
    """Write each token's K and V at `slot = block * block_size + offset`; -1 skips the token.

    key, value `[tokens, kv_heads, head_dim]`; pools `[num_blocks, kv_heads, block_size, head_dim]`,
    strided views of one layer; slot_mapping int64 `[tokens]`. Slots are not checked against the
    pool, and no two tokens may name one slot. Raises ValueError on a shape or dtype that does not
    fit.
    """
    check_write(key, value, key_pool, value_pool, slot_mapping)
    tokens, kv_heads, head_dim = key.shape
    if tokens == 0:
        return
    write_kv_kernel[(tokens,)](
        key,
        value,
        key_pool,
        value_pool,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_pool.stride(0),
        key_pool.stride(1),
        key_pool.stride(2),
        **write_kv_constants(kv_heads, head_dim, key_pool.shape[2]),
        **OPTIONS,
    )
