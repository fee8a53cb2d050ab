"""Triton: one query a sequence over its paged context (flash-decoding). Knows block tables only.

A first kernel gives each (sequence, KV head, split of the context) its own program, a second one
merges the splits. The split size is fixed, and every loop runs over this sequence's own length, so
a sequence's bits do not depend on its batch or on the width of the block table.
"""

# mypy: allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.kernels.checks import check_decode
from kvtier.kernels.configs import Launch, architecture, lookup
from kvtier.kernels.paged_tile import fold_tile

LOG2_E = 1.4426950408889634


@triton.jit
def paged_decode_kernel(
    partial_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    query_ptr: tl.tensor,
    key_pool_ptr: tl.tensor,
    value_pool_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    scale_log2: tl.tensor,
    splits: tl.tensor,
    query_seq_stride: tl.tensor,
    query_head_stride: tl.tensor,
    pool_block_stride: tl.tensor,
    pool_head_stride: tl.tensor,
    pool_token_stride: tl.tensor,
    table_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """`softmax(q K^T) V` over one split, and the split's log2-sum-exp2.

    partial float32 `[seqs, heads, splits, HEAD_DIM]`, weight float32 `[seqs, heads, splits]`; what
    lies past a context is left unwritten. The GROUP query heads of one KV head are the rows of one
    `tl.dot`, padded to ROWS.
    """
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(context_lens_ptr + seq)
    begin = split * SPLIT
    if begin >= context:
        return
    end = tl.minimum(begin + SPLIT, context)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    heads = kv_head * GROUP + rows
    kept = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = seq * query_seq_stride + heads[:, None] * query_head_stride + dims[None, :]
    query = tl.load(query_ptr + query_offsets, mask=kept, other=0.0)

    acc = tl.zeros([ROWS, HEAD_DIM_PADDED], dtype=tl.float32)
    high = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    limits = tl.zeros([ROWS], dtype=tl.int32) + (end - 1)
    for first in range(begin, end, TILE):
        acc, high, total = fold_tile(
            acc,
            high,
            total,
            query,
            limits,
            first,
            end,
            block_tables_ptr + seq * table_stride,
            key_pool_ptr + kv_head * pool_head_stride,
            value_pool_ptr + kv_head * pool_head_stride,
            pool_block_stride,
            pool_token_stride,
            scale_log2,
            BLOCK_SIZE,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            TILE,
            MASKED=True,
        )
    heads_total = tl.num_programs(1) * GROUP
    places = (seq * heads_total + heads) * splits + split
    tl.store(partial_ptr + places[:, None] * HEAD_DIM + dims[None, :], acc / total[:, None], kept)
    tl.store(weight_ptr + places, high + tl.log2(total), rows < GROUP)


@triton.jit
def merge_splits_kernel(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGE: tl.constexpr,
) -> None:
    """`sum 2^(w - max w) partial / sum 2^(w - max w)` for one (sequence, head); zeros if empty."""
    seq = tl.program_id(0).to(tl.int64)
    place = seq * tl.num_programs(1) + tl.program_id(1)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    inside = dims < HEAD_DIM
    used = tl.cdiv(tl.load(context_lens_ptr + seq), SPLIT)
    acc = tl.zeros([HEAD_DIM_PADDED], dtype=tl.float32)
    high = tl.full([], float("-inf"), dtype=tl.float32)
    total = tl.zeros([], dtype=tl.float32)
    for first in range(0, used, MERGE):
        parts = first + tl.arange(0, MERGE)
        present = parts < used
        weights = tl.load(weight_ptr + place * splits + parts, present, other=float("-inf"))
        offsets = (place * splits + parts)[:, None] * HEAD_DIM + dims[None, :]
        partial = tl.load(partial_ptr + offsets, present[:, None] & inside[None, :], other=0.0)
        new_high = tl.maximum(high, tl.max(weights, axis=0))
        shares = tl.exp2(weights - new_high)
        fade = tl.exp2(high - new_high)
        total = total * fade + tl.sum(shares, axis=0)
        acc = acc * fade + tl.sum(shares[:, None] * partial, axis=0)
        high = new_high
    mixed = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + place * HEAD_DIM + dims, mixed.to(out_ptr.dtype.element_ty), inside)


MERGE_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
"""Launch options. They order the sums, so they may depend on the model but never on the batch;
fusion is named because Triton's default changes between releases, and bits with it."""


def decode_constants(
    heads: int, kv_heads: int, head_dim: int, block_size: int, launch: Launch
) -> dict[str, int]:
    """`paged_decode_kernel`'s compile-time constants for one model, block size and launch."""
    group = heads // kv_heads
    return {
        "BLOCK_SIZE": block_size,
        "GROUP": group,
        "ROWS": max(launch.rows, triton.next_power_of_2(group)),
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": max(16, triton.next_power_of_2(head_dim)),
        "SPLIT": launch.split,
        "TILE": launch.tile,
    }


def merge_constants(head_dim: int, launch: Launch) -> dict[str, int]:
    """`merge_splits_kernel`'s compile-time constants. MERGE is fixed: it orders the sums."""
    return {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": max(16, triton.next_power_of_2(head_dim)),
        "SPLIT": launch.split,
        "MERGE": 16,
    }


def paged_decode(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    launch: Launch | None = None,
) -> Tensor:
    """`softmax(scale * q K^T) V` of one query a sequence over its whole context.

    query `[seqs, heads, head_dim]`; pools `[num_blocks, kv_heads, block_size, head_dim]`, strided
    views of one layer; block_tables int32 `[seqs, max_blocks]`, whose entries past the context are
    never read; context_lens int32 `[seqs]`, where 0 gives zeros. Lengths and block ids are not
    checked: that would wait for the device. `launch` replaces the shipped sizes, which are part of
    the result's bits. Returns `[seqs, heads, head_dim]`. Raises ValueError on a shape or dtype that
    does not fit.
    """
    check_decode(query, key_pool, value_pool, block_tables, context_lens)
    seqs, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_pool.shape
    out = torch.empty((seqs, heads, head_dim), dtype=query.dtype, device=query.device)
    if seqs == 0:
        return out
    launch = launch or lookup("paged_decode", architecture(query.device), key_pool.dtype, head_dim)
    # The table's width bounds the contexts without asking the device; surplus programs return.
    splits = max(1, triton.cdiv(block_tables.shape[1] * block_size, launch.split))
    partial = torch.empty((seqs, heads, splits, head_dim), device=query.device)
    weight = torch.empty((seqs, heads, splits), device=query.device)
    paged_decode_kernel[(seqs, kv_heads, splits)](
        partial,
        weight,
        query,
        key_pool,
        value_pool,
        block_tables,
        context_lens,
        scale * LOG2_E,
        splits,
        query.stride(0),
        query.stride(1),
        key_pool.stride(0),
        key_pool.stride(1),
        key_pool.stride(2),
        block_tables.stride(0),
        **decode_constants(heads, kv_heads, head_dim, block_size, launch),
        **launch.options,
    )
    merge_splits_kernel[(seqs, heads)](
        out,
        partial,
        weight,
        context_lens,
        splits,
        **merge_constants(head_dim, launch),
        **MERGE_OPTIONS,
    )
    return out
