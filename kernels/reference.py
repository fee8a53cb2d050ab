"""What the kernels mean, in plain torch: slow, any float dtype, any device.

The Triton kernels and the CPU path are tested against these functions, which share their names and
signatures; benches import them as the yardstick of correctness. Knows nothing of speed.

One layer's keys are `key_pool = pool[:, layer, 0]`, its values `value_pool = pool[:, layer, 1]`,
each `[num_blocks, kv_heads, block_size, head_dim]`. Position `p` of a sequence stands in block
`block_tables[s, p // block_size]` at offset `p % block_size`.
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
from kvtier.kernels.prefixes import SharedPrefixes


def write_kv(
    key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slot_mapping: Tensor
) -> None:
    """`pool[slot // block_size, :, slot % block_size] = row` for each token, in order.

    key, value `[tokens, kv_heads, head_dim]`; slot_mapping int64 `[tokens]`, where -1 skips the
    token. Raises ValueError on a shape or dtype that does not fit.
    """
    check_write(key, value, key_pool, value_pool, slot_mapping)
    block_size = key_pool.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        key_pool[slot // block_size, :, slot % block_size] = key[token]
        value_pool[slot // block_size, :, slot % block_size] = value[token]


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
    """`softmax(scale * q K^T) V` of one query a sequence over its whole context.

    query `[seqs, heads, head_dim]`; block_tables int32 `[seqs, max_blocks]`; context_lens int32
    `[seqs]`, where 0 gives zeros. Query head `h` reads KV head `h // (heads / kv_heads)`. An
    e4m3 pool's elements stand for themselves times key_scale and value_scale, float32
    `[kv_heads]`. Returns `[seqs, heads, head_dim]`. Raises ValueError on a shape, dtype or length
    that does not fit.
    """
    check_decode(query, key_pool, value_pool, block_tables, context_lens)
    check_scales(key_pool, key_scale, value_scale)
    out = torch.zeros_like(query)
    for seq, context in enumerate(context_lens.tolist()):
        if context != 0:
            check_context(context, block_tables[seq], key_pool.shape[2])
            keys = gather_context(key_pool, block_tables[seq], context, key_scale)
            values = gather_context(value_pool, block_tables[seq], context, value_scale)
            out[seq] = attention(query[seq : seq + 1], keys, values, context - 1, scale)[0]
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
    """As `paged_decode`; the blocks of shared positions are those of a group's first member.

    So it agrees with `paged_decode` where the members' tables agree. Raises ValueError on a shape,
    dtype or length that does not fit.
    """
    check_shared(shared.members, shared.lens, shared.seq_lens, query.shape[0])
    tables = lead(block_tables, context_lens, shared, key_pool.shape[2])
    return paged_decode(
        query,
        key_pool,
        value_pool,
        tables,
        context_lens,
        scale,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def lead(
    block_tables: Tensor, context_lens: Tensor, shared: SharedPrefixes, block_size: int
) -> Tensor:
    """The tables, each member's whole shared blocks replaced by those of its group's first.

    Raises ValueError if more is shared than a member's context holds.
    """
    tables = block_tables.clone()
    for members, length in zip(shared.members.tolist(), shared.lens.tolist(), strict=True):
        for member in members:
            if member >= 0:
                if length > int(context_lens[member]):
                    raise ValueError(
                        f"lens: {length} shared positions pass sequence {member}'s context"
                    )
                tables[member, : length // block_size] = tables[members[0], : length // block_size]
    return tables


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
    """Causal attention of a chunk of queries a sequence over cached and own blocks.

    query `[tokens, heads, head_dim]`; sequence `s` owns rows `query_starts[s]` to
    `query_starts[s] + query_lens[s]`, at positions `context_lens[s] - query_lens[s]` to
    `context_lens[s] - 1`; its own K and V are already in the pool. All int32 `[seqs]`. Rows that no
    sequence owns come back as zeros. Scales as in `paged_decode`. Raises ValueError on a shape,
    dtype or length that does not fit.
    """
    check_prefill(query, key_pool, value_pool, block_tables, query_starts, query_lens, context_lens)
    check_scales(key_pool, key_scale, value_scale)
    out = torch.zeros_like(query)
    chunks = zip(query_starts.tolist(), query_lens.tolist(), context_lens.tolist(), strict=True)
    for seq, (first, count, context) in enumerate(chunks):
        if count != 0:
            check_rows(first, count, query.shape[0])
            check_context(context, block_tables[seq], key_pool.shape[2], count=count)
            keys = gather_context(key_pool, block_tables[seq], context, key_scale)
            values = gather_context(value_pool, block_tables[seq], context, value_scale)
            rows = query[first : first + count]
            out[first : first + count] = attention(rows, keys, values, context - count, scale)
    return out


def gather_context(
    pool: Tensor, table: Tensor, context: int, scale: Tensor | None = None
) -> Tensor:
    """The first `context` positions of one sequence: `[kv_heads, context, head_dim]`, a copy.

    With a scale, float32 `[kv_heads]`, elements times that, in float32.
    """
    block_size = pool.shape[2]
    blocks = pool[table[: -(-context // block_size)].long()]
    found = blocks.transpose(0, 1).flatten(1, 2)[:, :context]
    return found if scale is None else found.float() * scale[:, None, None]


def attention(query: Tensor, key: Tensor, value: Tensor, start: int, scale: float) -> Tensor:
    """Causal attention of queries `[n, heads, head_dim]` at positions `start` and on.

    key, value `[kv_heads, context, head_dim]`, all contiguous positions from 0. Half precision is
    computed in float32. Returns query's shape and dtype.
    """
    rows, heads, head_dim = query.shape
    kv_heads, context, _ = key.shape
    work = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(work).view(rows, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("nkgd,ktd->kgnt", grouped, key.to(work)) * scale
    positions = torch.arange(context, device=query.device)
    queries = torch.arange(start, start + rows, device=query.device)
    scores = scores.masked_fill(positions[None, :] > queries[:, None], float("-inf"))
    mixed = torch.einsum("kgnt,ktd->nkgd", scores.softmax(dim=-1), value.to(work))
    return mixed.reshape(rows, heads, head_dim).to(query.dtype)


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
    """`out = rotate(query)`, and `pool[slot // block_size, :, slot % block_size]` is the token's.

    `rotate(x) = [low cos - high sin, high cos + low sin]` over the halves of head_dim. query
    `[tokens, heads, head_dim]`; key, value `[tokens, kv_heads, head_dim]`; cos, sin
    `[tokens, head_dim / 2]`, float32 (float64 for float64 queries), as is the arithmetic;
    slot_mapping int64 `[tokens]`, where -1 writes no K and V. A float8_e4m3fn pool holds
    `x / scale` (float32 `[kv_heads]`; None: 1), saturated at 448. `out` None rotates query in
    place; key stays as it is. Returns the rotated query. Raises ValueError on a shape or dtype that
    does not fit.
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
    block_size = key_pool.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_pool[slot // block_size, :, slot % block_size] = keys[token]
            value_pool[slot // block_size, :, slot % block_size] = values[token]
    return out


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`states [tokens, heads, head_dim]` rotated by cos, sin `[tokens, head_dim / 2]`; their dtype.

    Every product and sum is rounded by itself.
    """
    low, high = states.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def rounded(rows: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """`rows [tokens, kv_heads, head_dim]` as a pool of `dtype` holds them."""
    if dtype != torch.float8_e4m3fn:
        return rows.to(dtype)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if scale is not None:
        rows = rows / scale[:, None]
    return rows.clamp(-448.0, 448.0).to(dtype)


def block_copy(
    source_pool: Tensor, target_pool: Tensor, pairs: Tensor, tokens: Tensor | None = None
) -> None:
    """`target[b, ..., :n, :] = source[a, ..., :n, :]` for each pair `(a, b)`.

    pools `[num_blocks, ..., block_size, head_dim]`, each block contiguous, alike but in number;
    they may be one tensor. pairs int32 `[n, 2]`; tokens int32 `[n]` (None: the whole block). Raises
    ValueError on a shape or dtype that does not fit, if a block is written twice or both read and
    written, and for a count that passes the block.
    """
    check_block_copy(source_pool, target_pool, pairs, tokens)
    block_size = source_pool.shape[-2]
    same_pool = source_pool.data_ptr() == target_pool.data_ptr()
    check_pairs(pairs, tokens, block_size, same_pool=same_pool)
    counts = [block_size] * len(pairs) if tokens is None else tokens.tolist()
    for (source, target), count in zip(pairs.tolist(), counts, strict=True):
        target_pool[target, ..., :count, :] = source_pool[source, ..., :count, :]
