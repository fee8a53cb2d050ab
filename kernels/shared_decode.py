"""Triton: decoding whose sequences share prefixes; a shared part is read once a group.

One long document and many questions: a first kernel folds the splits that lie whole within a
group's prefix, with the queries of all members as rows of the same `tl.dot`, and leaves each
member's partial results where `paged_decode` would have left its own. Paged decode then does the
rest of each context and merges. (The split of attention into a shared and a private part, merged by
log-sum-exp: Hydragen, Juravsky et al., 2024; cascade inference, Ye et al., 2024.)

A member's bits depend on what paged decode's depend on, and on this launch's rows and sizes; not on
how many members there are, since tiles of rows have one size. They equal paged decode's where a
row of a dot does not depend on the number of rows, which the interpreter's tests show and a GPU
does not promise: so exact mode does not share.
"""

# mypy: allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from kvtier.kernels.checks import check_decode, check_scales, check_shared
from kvtier.kernels.configs import Launch, architecture, lookup
from kvtier.kernels.paged_decode import LOG2_E, count_splits, launch_decode
from kvtier.kernels.paged_tile import fold_tile
from kvtier.kernels.prefixes import SharedPrefixes
from kvtier.kernels.workspace import DecodeWorkspace, readable


@triton.jit
def shared_decode_kernel(
    partial_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    query_ptr: tl.tensor,
    key_pool_ptr: tl.tensor,
    value_pool_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    members_ptr: tl.tensor,
    shared_lens_ptr: tl.tensor,
    scale_log2: tl.tensor,
    splits: tl.tensor,
    width: tl.tensor,
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
    """`softmax(q K^T) V` over one whole split for `ROWS // GROUP` members of one group.

    members int32 `[groups, width]`, where -1 is nobody; shared_lens int32 `[groups]`. partial and
    weight are `paged_decode_kernel`'s. Row `r` of a tile is member `r // GROUP`, head `r % GROUP`
    of the KV head's group. The first member's block table is read for all. Programs of one split
    that differ in their members are neighbours, so that the second finds K and V in L2.
    """
    MEMBERS: tl.constexpr = ROWS // GROUP
    tiles = tl.cdiv(width, MEMBERS)
    gang = tl.program_id(0) // tiles
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    begin = split * SPLIT
    if begin + SPLIT > tl.load(shared_lens_ptr + gang):
        return
    rows = tl.arange(0, ROWS)
    places = tl.program_id(0) % tiles * MEMBERS + rows // GROUP
    inside = (rows < MEMBERS * GROUP) & (places < width)
    seqs = tl.load(members_ptr + gang * width + places, inside, other=-1).to(tl.int64)
    owned = seqs >= 0
    if tl.max(seqs, axis=0) < 0:
        return
    leader = tl.load(members_ptr + gang * width).to(tl.int64)

    dims = tl.arange(0, HEAD_DIM_PADDED)
    kept = owned[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + rows % GROUP
    query_offsets = seqs * query_seq_stride + heads * query_head_stride
    query = tl.load(query_ptr + query_offsets[:, None] + dims[None, :], mask=kept, other=0.0)
    if key_scale_ptr is not None:
        scale_log2 *= tl.load(key_scale_ptr + kv_head)

    acc = tl.zeros([ROWS, HEAD_DIM_PADDED], dtype=tl.float32)
    high = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    end = begin + SPLIT
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
            block_tables_ptr + leader * table_stride,
            key_pool_ptr + kv_head * pool_head_stride,
            value_pool_ptr + kv_head * pool_head_stride,
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
    mixed = acc / total[:, None]
    if value_scale_ptr is not None:
        mixed *= tl.load(value_scale_ptr + kv_head)
    pairs = seqs * tl.num_programs(1) + kv_head
    places_out = (pairs * splits + split) * GROUP + rows % GROUP
    tl.store(partial_ptr + places_out[:, None] * HEAD_DIM + dims[None, :], mixed, kept)
    tl.store(weight_ptr + places_out, high + tl.log2(total), owned)


def shared_constants(
    heads: int, kv_heads: int, head_dim: int, block_size: int, launch: Launch
) -> dict[str, int]:
    """The kernel's compile-time constants for one model, block size and launch."""
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


def shared_decode(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    shared: SharedPrefixes,
    scale: float,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    launch: Launch | None = None,
    tail_launch: Launch | None = None,
) -> Tensor:
    """As `paged_decode`, where sequences of a group share their first positions' blocks.

    `shared` vouches that its members' tables agree in the blocks of their shared positions, which
    lie within every member's context; only the first member's entries are read for the splits that
    lie whole within them. What is shared past the last whole split is read by each. `launch` and
    `tail_launch` replace the shipped sizes of `shared_decode` and `paged_decode`, whose splits are
    one. Returns `[seqs, heads, head_dim]`. Raises ValueError on a shape or dtype that does not fit.
    """
    check_decode(query, key_pool, value_pool, block_tables, context_lens)
    check_scales(key_pool, key_scale, value_scale)
    check_shared(shared.members, shared.lens, shared.seq_lens, query.shape[0])
    seqs, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_pool.shape
    machine = architecture(query.device)
    launch = launch or lookup("shared_decode", machine, key_pool.dtype, head_dim)
    tail = tail_launch or lookup("paged_decode", machine, key_pool.dtype, head_dim)
    if launch.split != tail.split:
        raise ValueError(f"launch: want paged_decode's split {tail.split}, got {launch.split}")
    splits = count_splits(block_tables, block_size, launch)
    if workspace is None:
        workspace = DecodeWorkspace(seqs, heads, head_dim, splits, query.device)
    workspace.require(seqs, heads, head_dim, splits)
    constants = shared_constants(heads, kv_heads, head_dim, block_size, launch)
    groups, width = shared.members.shape
    tiles = triton.cdiv(width, constants["ROWS"] // constants["GROUP"])
    if groups and width:
        shared_decode_kernel[(groups * tiles, kv_heads, splits)](
            workspace.partial,
            workspace.weight,
            query,
            readable(key_pool),
            readable(value_pool),
            key_scale,
            value_scale,
            block_tables,
            shared.members,
            shared.lens,
            scale * LOG2_E,
            splits,
            width,
            query.stride(0),
            query.stride(1),
            key_pool.stride(0),
            key_pool.stride(1),
            key_pool.stride(2),
            block_tables.stride(0),
            **constants,
            **launch.options,
        )
    return launch_decode(
        query,
        key_pool,
        value_pool,
        block_tables,
        context_lens,
        shared.seq_lens,
        scale,
        key_scale,
        value_scale,
        workspace,
        tail,
    )
