"""Triton: one query a sequence over its paged context (flash-decoding). Knows block tables only.

Each (sequence, KV head, split of the context) is a program; the last of a (sequence, KV head) to
end merges the splits. Splits have a fixed size and are merged in their order, whoever comes last,
and every loop runs over this sequence's own length: its bits depend on its query and context, on
the model's shape and on the launch's sizes; not on its batch, the width of the block table, where
its blocks stand, or the order in which programs end.
"""

# mypy: allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.kernels.checks import check_decode, check_scales
from kvtier.kernels.configs import Launch, architecture, lookup
from kvtier.kernels.paged_tile import fold_tile
from kvtier.kernels.workspace import DecodeWorkspace, readable

LOG2_E = 1.4426950408889634


@triton.jit
def paged_decode_kernel(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    query_ptr: tl.tensor,
    key_pool_ptr: tl.tensor,
    value_pool_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    folded_lens_ptr: tl.tensor,
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
    GROUP_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    MERGE: tl.constexpr,
) -> None:
    """`softmax(q K^T) V` over one split, and over all of them in the last program; zeros if empty.

    out `[seqs, heads, HEAD_DIM]`, contiguous. partial float32 `[seqs, kv_heads, splits, GROUP,
    HEAD_DIM]`, each split's own result, and weight float32 `[seqs, kv_heads, splits, GROUP]`, its
    log2-sum-exp2; what lies past a context is left unwritten. arrived int32 `[seqs, kv_heads]`:
    zeros before and after. The GROUP query heads of one KV head are the rows of one `tl.dot`,
    padded to ROWS. Whole splits within `folded_lens` stand in partial and weight already.
    """
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(context_lens_ptr + seq)
    begin = split * SPLIT
    pair = seq * tl.num_programs(1) + kv_head
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    kept = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    out_offsets = (pair * GROUP + rows[:, None]) * HEAD_DIM + dims[None, :]
    if begin >= context:
        if split == 0:
            nothing = tl.zeros([ROWS, HEAD_DIM_PADDED], dtype=out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_offsets, nothing, kept)
        return
    used = tl.cdiv(context, SPLIT)
    waiting = used
    if folded_lens_ptr is not None:
        # The last split is always computed here, so that somebody merges.
        folded = tl.minimum(tl.load(folded_lens_ptr + seq) // SPLIT, used - 1)
        if split < folded:
            return
        waiting = used - folded
    heads = kv_head * GROUP + rows
    query_offsets = seq * query_seq_stride + heads[:, None] * query_head_stride + dims[None, :]
    query = tl.load(query_ptr + query_offsets, mask=kept, other=0.0)
    if key_scale_ptr is not None:
        scale_log2 *= tl.load(key_scale_ptr + kv_head)

    acc = tl.zeros([ROWS, HEAD_DIM_PADDED], dtype=tl.float32)
    high = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    end = tl.minimum(begin + SPLIT, context)
    whole = end // TILE * TILE
    limits = tl.zeros([ROWS], dtype=tl.int32) + (end - 1)
    table_ptr = block_tables_ptr + seq * table_stride
    key_ptr = key_pool_ptr + kv_head * pool_head_stride
    value_ptr = value_pool_ptr + kv_head * pool_head_stride
    for first in range(begin, whole, TILE):
        acc, high, total = fold_tile(
            acc,
            high,
            total,
            query,
            limits,
            first,
            end,
            table_ptr,
            key_ptr,
            value_ptr,
            pool_block_stride,
            pool_token_stride,
            scale_log2,
            BLOCK_SIZE,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            TILE,
            MASKED=False,
            EVICTION="evict_first",
        )
    for first in range(whole, end, TILE):  # once or never; as a branch it spills in float32
        acc, high, total = fold_tile(
            acc,
            high,
            total,
            query,
            limits,
            first,
            end,
            table_ptr,
            key_ptr,
            value_ptr,
            pool_block_stride,
            pool_token_stride,
            scale_log2,
            BLOCK_SIZE,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            TILE,
            MASKED=True,
            EVICTION="evict_first",
        )
    mixed = acc / total[:, None]
    if value_scale_ptr is not None:
        mixed *= tl.load(value_scale_ptr + kv_head)
    if used == 1:
        tl.store(out_ptr + out_offsets, mixed.to(out_ptr.dtype.element_ty), kept)
        return

    places = (pair * splits + split) * GROUP + rows
    tl.store(partial_ptr + places[:, None] * HEAD_DIM + dims[None, :], mixed, kept)
    tl.store(weight_ptr + places, high + tl.log2(total), rows < GROUP)
    tl.debug_barrier()  # every thread's stores, then the count that tells of them
    if tl.atomic_add(arrived_ptr + pair, 1, sem="acq_rel") == waiting - 1:
        tl.store(arrived_ptr + pair, 0)  # for the next launch: a graph replays without a memset
        merged = merge_splits(
            partial_ptr,
            weight_ptr,
            pair * splits,
            used,
            GROUP,
            GROUP_PADDED,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            MERGE,
        )
        own = tl.arange(0, GROUP_PADDED)
        own_offsets = (pair * GROUP + own[:, None]) * HEAD_DIM + dims[None, :]
        own_kept = (own < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(out_ptr + own_offsets, merged.to(out_ptr.dtype.element_ty), own_kept)


@triton.jit
def merge_splits(
    partial_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    place: tl.tensor,
    used: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    MERGE: tl.constexpr,
) -> tl.tensor:
    """`sum 2^(w - max w) partial / sum 2^(w - max w)` over `used` splits in order, MERGE at a time.

    `place` numbers the first split of a (sequence, KV head). Returns `[GROUP_PADDED,
    HEAD_DIM_PADDED]`. Reads past L1, which may hold what stood there before.
    """
    dims = tl.arange(0, HEAD_DIM_PADDED)
    # Padding rows repeat the last head: their sums are finite, and nobody stores them.
    rows = tl.minimum(tl.arange(0, GROUP_PADDED), GROUP - 1)
    acc = tl.zeros([GROUP_PADDED, HEAD_DIM_PADDED], dtype=tl.float32)
    high = tl.full([GROUP_PADDED], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_PADDED], dtype=tl.float32)
    for first in range(0, used, MERGE):
        parts = first + tl.arange(0, MERGE)
        present = parts < used
        places = (place + parts)[:, None] * GROUP + rows[None, :]
        weights = tl.load(
            weight_ptr + places, present[:, None], other=float("-inf"), cache_modifier=".cg"
        )
        offsets = places[:, :, None] * HEAD_DIM + dims[None, None, :]
        kept = present[:, None, None] & (dims < HEAD_DIM)[None, None, :]
        partial = tl.load(partial_ptr + offsets, kept, other=0.0, cache_modifier=".cg")
        new_high = tl.maximum(high, tl.max(weights, axis=0))
        shares = tl.exp2(weights - new_high[None, :])
        fade = tl.exp2(high - new_high)
        total = total * fade + tl.sum(shares, axis=0)
        acc = acc * fade[:, None] + tl.sum(shares[:, :, None] * partial, axis=0)
        high = new_high
    return acc / total[:, None]


def decode_constants(
    heads: int, kv_heads: int, head_dim: int, block_size: int, launch: Launch
) -> dict[str, int]:
    """The kernel's compile-time constants for one model, block size and launch."""
    group = heads // kv_heads
    group_padded = triton.next_power_of_2(group)
    head_dim_padded = max(16, triton.next_power_of_2(head_dim))
    return {
        "BLOCK_SIZE": block_size,
        "GROUP": group,
        "GROUP_PADDED": group_padded,
        "ROWS": max(launch.rows, group_padded),
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": head_dim_padded,
        "SPLIT": launch.split,
        "TILE": launch.tile,
        # 32 KB of partial results at a time: enough in flight, and 64 registers of 128 threads.
        "MERGE": min(16, max(2, 8192 // (group_padded * head_dim_padded))),
    }


def paged_decode(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """`softmax(scale * q K^T) V` of one query a sequence over its whole context.

    query `[seqs, heads, head_dim]`; pools `[num_blocks, kv_heads, block_size, head_dim]`, strided
    views of one layer, of query's dtype or e4m3; key_scale and value_scale float32 `[kv_heads]`
    are the factors of an e4m3 pool's elements (None: 1). block_tables int32
    `[seqs, max_blocks]`, whose entries past the context are never read; context_lens int32
    `[seqs]`, where 0 gives zeros. Lengths and block ids are not checked: that would wait for the
    device. `workspace` is scratch memory to use instead of a new one; a captured graph needs it
    only to save the memset. `launch` replaces the shipped sizes, which are part of the result's
    bits. Returns `[seqs, heads, head_dim]`. Raises ValueError on a shape or dtype that does not
    fit.
    """
    check_decode(query, key_pool, value_pool, block_tables, context_lens)
    check_scales(key_pool, key_scale, value_scale)
    if launch is None:
        machine = architecture(query.device)
        launch = lookup("paged_decode", machine, key_pool.dtype, query.shape[2])
    return launch_decode(
        query,
        key_pool,
        value_pool,
        block_tables,
        context_lens,
        None,
        scale,
        key_scale,
        value_scale,
        workspace,
        launch,
    )


def launch_decode(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    folded_lens: Tensor | None,
    scale: float,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    workspace: DecodeWorkspace | None,
    launch: Launch,
) -> Tensor:
    """Launch the kernel on checked arguments.

    folded_lens int32 `[seqs]`: positions from 0 whose whole splits stand in `workspace` already.
    """
    seqs, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_pool.shape
    out = torch.empty((seqs, heads, head_dim), dtype=query.dtype, device=query.device)
    if seqs == 0:
        return out
    splits = count_splits(block_tables, block_size, launch)
    if workspace is None:
        workspace = DecodeWorkspace(seqs, heads, head_dim, splits, query.device)
    workspace.require(seqs, heads, head_dim, splits)
    paged_decode_kernel[(seqs, kv_heads, splits)](
        out,
        workspace.partial,
        workspace.weight,
        workspace.arrived,
        query,
        readable(key_pool),
        readable(value_pool),
        key_scale,
        value_scale,
        block_tables,
        context_lens,
        folded_lens,
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
    return out


def count_splits(block_tables: Tensor, block_size: int, launch: Launch) -> int:
    """Splits that the table's width has room for; programs past a context return.

    The width bounds the contexts without asking the device, and is fixed in a captured graph.
    """
    return max(1, -(-block_tables.shape[1] * block_size // launch.split))
