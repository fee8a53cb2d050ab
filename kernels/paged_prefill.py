"""Triton: ragged chunks of queries over cached and own blocks, causal. Knows block tables only.

Tiles of positions are counted from position 0 and tiles of queries from the chunk's first. So a
query's bits depend on its context, on where its chunk begins, on the model's shape and on the
launch's sizes; not on the chunk's length, its batch, or where its blocks stand.
"""

# mypy: allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.kernels.checks import check_prefill, check_scales
from kvtier.kernels.configs import Launch, architecture, lookup
from kvtier.kernels.paged_tile import fold_tile
from kvtier.kernels.workspace import readable

LOG2_E = 1.4426950408889634


@triton.jit
def paged_prefill_kernel(
    out_ptr: tl.tensor,
    query_ptr: tl.tensor,
    key_pool_ptr: tl.tensor,
    value_pool_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    query_lens_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    scale_log2: tl.tensor,
    seqs: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    query_token_stride: tl.tensor,
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
    SEQS_PADDED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """`softmax(q K^T + causal) V` for `ROWS // GROUP` queries of one sequence and one KV head.

    Row `r` of the tile is query `r // GROUP`, head `r % GROUP` of the group; rows that a group not
    a power of two leaves over are masked. Programs are numbered over all sequences' tiles, so the
    host need not know the lengths.
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(1)
    ids = tl.arange(0, SEQS_PADDED)
    tiles = tl.cdiv(tl.load(query_lens_ptr + ids, ids < seqs, other=0), QUERIES)
    ends = tl.cumsum(tiles, axis=0)
    seq = tl.sum((ends <= tl.program_id(0)).to(tl.int32), axis=0)
    if seq >= seqs:
        return
    before = tl.sum(tl.where(ids == seq, ends - tiles, 0), axis=0)
    count = tl.load(query_lens_ptr + seq)
    context = tl.load(context_lens_ptr + seq)
    first_query = (tl.program_id(0) - before) * QUERIES

    #   0 ........ past ........ first_position ... last_position ... context
    #   |  tiles without a mask  |  tiles with one  |  later queries' own keys
    first_position = context - count + first_query
    last_position = tl.minimum(first_position + QUERIES, context) - 1

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    queries = first_query + rows // GROUP
    owned = (queries < count) & (rows < QUERIES * GROUP)
    kept = owned[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = tl.load(query_starts_ptr + seq).to(tl.int64) + queries
    heads = kv_head * GROUP + rows % GROUP
    query_offsets = tokens * query_token_stride + heads * query_head_stride
    query = tl.load(query_ptr + query_offsets[:, None] + dims[None, :], mask=kept, other=0.0)
    limits = first_position + rows // GROUP
    if key_scale_ptr is not None:
        scale_log2 *= tl.load(key_scale_ptr + kv_head)

    acc = tl.zeros([ROWS, HEAD_DIM_PADDED], dtype=tl.float32)
    high = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    key_ptr = key_pool_ptr + kv_head * pool_head_stride
    value_ptr = value_pool_ptr + kv_head * pool_head_stride
    unmasked = (first_position + 1) // TILE * TILE
    for first in range(0, unmasked, TILE):
        acc, high, total = fold_tile(
            acc,
            high,
            total,
            query,
            limits,
            first,
            unmasked,
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
            EVICTION="",
        )
    for first in range(unmasked, last_position + 1, TILE):
        acc, high, total = fold_tile(
            acc,
            high,
            total,
            query,
            limits,
            first,
            last_position + 1,
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
            EVICTION="",
        )
    out_offsets = tokens * out_token_stride + heads * out_head_stride
    mixed = acc / total[:, None]
    if value_scale_ptr is not None:
        mixed *= tl.load(value_scale_ptr + kv_head)
    stored = mixed.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offsets[:, None] + dims[None, :], stored, kept)


def prefill_constants(
    heads: int, kv_heads: int, head_dim: int, block_size: int, seqs: int, launch: Launch
) -> dict[str, int]:
    """The kernel's compile-time constants for one model, block size, batch and launch.

    `seqs` sets only the length of the vector in which a program finds its sequence.
    """
    group = heads // kv_heads
    return {
        "BLOCK_SIZE": block_size,
        "GROUP": group,
        "ROWS": max(launch.rows, triton.next_power_of_2(group)),
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": max(16, triton.next_power_of_2(head_dim)),
        "SEQS_PADDED": max(16, triton.next_power_of_2(seqs)),
        "TILE": launch.tile,
    }


def paged_prefill(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    query_lens: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """Causal attention of a chunk of queries a sequence over cached and own blocks.

    query `[tokens, heads, head_dim]`; sequence `s` owns rows `query_starts[s]` to
    `query_starts[s] + query_lens[s]`, at positions `context_lens[s] - query_lens[s]` to
    `context_lens[s] - 1`; its own K and V are already in the pool. Pools
    `[num_blocks, kv_heads, block_size, head_dim]`, strided views of one layer, of query's dtype or
    e4m3; key_scale and value_scale float32 `[kv_heads]` are the factors of an e4m3 pool's elements
    (None: 1). block_tables int32 `[seqs, max_blocks]`, whose entries past the context are never
    read; the others int32 `[seqs]`. Lengths and block ids are not checked: that would wait for the
    device. Rows that no sequence owns come back as zeros. `launch` replaces the shipped sizes, and
    with them the result's bits. Returns query's shape. Raises ValueError on a shape or dtype that
    does not fit.
    """
    check_prefill(query, key_pool, value_pool, block_tables, query_starts, query_lens, context_lens)
    check_scales(key_pool, key_scale, value_scale)
    tokens, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_pool.shape
    seqs = context_lens.shape[0]
    out = torch.zeros((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    if tokens == 0 or seqs == 0:
        return out
    launch = launch or lookup("paged_prefill", architecture(query.device), key_pool.dtype, head_dim)
    constants = prefill_constants(heads, kv_heads, head_dim, block_size, seqs, launch)
    # sum(ceil(len / queries)) is at most this, whatever the lengths; surplus programs return.
    tiles = tokens // (constants["ROWS"] // constants["GROUP"]) + seqs
    paged_prefill_kernel[(tiles, kv_heads)](
        out,
        query,
        readable(key_pool),
        readable(value_pool),
        key_scale,
        value_scale,
        block_tables,
        query_starts,
        query_lens,
        context_lens,
        scale * LOG2_E,
        seqs,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        key_pool.stride(0),
        key_pool.stride(1),
        key_pool.stride(2),
        block_tables.stride(0),
        **constants,
        **launch.options,
    )
    return out
