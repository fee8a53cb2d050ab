"""The CPU path: the kernels' names and signatures in fast torch, and a contiguous mirror.

Knows blocks and positions, not requests. `paged_decode` and `paged_prefill` gather each sequence's
blocks anew on every call; an engine that attends to the same context in every layer and step keeps
a `ContextMirror` instead, which gathers once for each hit.
"""

import torch
from torch import Tensor

from kvtier.kernels.checks import (
    check_block_copy,
    check_context,
    check_decode,
    check_pairs,
    check_prefill,
    check_rope_write,
    check_rows,
    check_scales,
    check_shared,
    check_write,
)
from kvtier.kernels.cpu_attention import attend
from kvtier.kernels.mirror import ContextMirror
from kvtier.kernels.prefixes import SharedPrefixes
from kvtier.kernels.reference import lead, rotate, rounded

__all__ = [
    "ContextMirror",
    "block_copy",
    "paged_decode",
    "paged_prefill",
    "rope_write",
    "shared_decode",
    "write_kv",
]


def write_kv(
    key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slot_mapping: Tensor
) -> None:
    """`pool[slot // block_size, :, slot % block_size] = row` for each token; see the reference.

    No two tokens may name one slot. Raises ValueError on a shape or dtype that does not fit.
    """
    check_write(key, value, key_pool, value_pool, slot_mapping)
    _scatter(key, value, key_pool, value_pool, slot_mapping)


def rope_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate query and key, write K and V; see the reference for shapes and meaning.

    No two tokens may name one slot. Raises ValueError on a shape or dtype that does not fit.
    """
    out = query if out is None else out
    check_rope_write(
        query,
        key,
        value,
        cos,
        sin,
        key_pool,
        value_pool,
        slot_mapping,
        key_scale=key_scale,
        value_scale=value_scale,
        out=out,
    )
    out.copy_(rotate(query, cos, sin))
    keys = rounded(rotate(key, cos, sin), key_pool.dtype, key_scale)
    values = rounded(value, value_pool.dtype, value_scale)
    _scatter(keys, values, key_pool, value_pool, slot_mapping)
    return out


def block_copy(
    source_pool: Tensor, target_pool: Tensor, pairs: Tensor, tokens: Tensor | None = None
) -> None:
    """Copy blocks, or their first tokens; see the reference for shapes, meaning and errors."""
    check_block_copy(source_pool, target_pool, pairs, tokens)
    block_size = source_pool.shape[-2]
    same_pool = source_pool.data_ptr() == target_pool.data_ptr()
    check_pairs(pairs, tokens, block_size, same_pool=same_pool)
    if tokens is None:
        target_pool[pairs[:, 1]] = source_pool[pairs[:, 0]]
        return
    for (source, target), count in zip(pairs.tolist(), tokens.tolist(), strict=True):
        target_pool[target, ..., :count, :].copy_(source_pool[source, ..., :count, :])


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
) -> Tensor:
    """One query a sequence over its whole context; see the reference for shapes and meaning.

    Raises ValueError on a shape, dtype or length that does not fit.
    """
    check_decode(query, key_pool, value_pool, block_tables, context_lens)
    check_scales(key_pool, key_scale, value_scale)
    out = torch.zeros_like(query)
    for seq, context in enumerate(context_lens.tolist()):
        if context != 0:
            check_context(context, block_tables[seq], key_pool.shape[2])
            keys = _gather(key_pool, block_tables[seq], context, key_scale, query.dtype)
            values = _gather(value_pool, block_tables[seq], context, value_scale, query.dtype)
            out[seq] = attend(query[seq : seq + 1], keys, values, context - 1, scale)[0]
    return out


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
) -> Tensor:
    """As `paged_decode`, whose bits it gives: on the CPU a shared prefix is read by each member.

    Raises ValueError on a shape, dtype or length that does not fit.
    """
    check_shared(shared.members, shared.lens, shared.seq_lens, query.shape[0])
    return paged_decode(
        query,
        key_pool,
        value_pool,
        lead(block_tables, context_lens, shared, key_pool.shape[2]),
        context_lens,
        scale,
        key_scale=key_scale,
        value_scale=value_scale,
    )


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
) -> Tensor:
    """A chunk of queries a sequence, causal; see the reference for shapes and meaning.

    Raises ValueError on a shape, dtype or length that does not fit.
    """
    check_prefill(query, key_pool, value_pool, block_tables, query_starts, query_lens, context_lens)
    check_scales(key_pool, key_scale, value_scale)
    out = torch.zeros_like(query)
    chunks = zip(query_starts.tolist(), query_lens.tolist(), context_lens.tolist(), strict=True)
    for seq, (first, count, context) in enumerate(chunks):
        if count != 0:
            check_rows(first, count, query.shape[0])
            check_context(context, block_tables[seq], key_pool.shape[2], count=count)
            keys = _gather(key_pool, block_tables[seq], context, key_scale, query.dtype)
            values = _gather(value_pool, block_tables[seq], context, value_scale, query.dtype)
            rows = query[first : first + count]
            out[first : first + count] = attend(rows, keys, values, context - count, scale)
    return out


def _gather(
    pool: Tensor, table: Tensor, context: int, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The first `context` positions of one sequence: `[kv_heads, context, head_dim]` of `dtype`."""
    blocks = pool.index_select(0, table[: -(-context // pool.shape[2])])
    found = blocks.transpose(0, 1).flatten(1, 2)[:, :context]
    return (found if scale is None else found.float() * scale[:, None, None]).to(dtype)


def _scatter(
    key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slot_mapping: Tensor
) -> None:
    """Rows of the pools' dtype into their slots, skipping those whose slot is -1."""
    if bool((slot_mapping < 0).any()):
        kept = slot_mapping >= 0
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    blocks, offsets = slot_mapping // key_pool.shape[2], slot_mapping % key_pool.shape[2]
    key_pool[blocks, :, offsets] = key
    value_pool[blocks, :, offsets] = value
