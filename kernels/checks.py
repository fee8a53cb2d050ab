"""Shape checks shared by the Triton launchers, the torch reference and the CPU path.

Every implementation of a kernel refuses the same calls with the same words. Values on the device
(block ids, lengths) are not read here: that would make each launch wait for the device. The caller
vouches for them.
"""

import torch
from torch import Tensor


def check_write(
    key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slot_mapping: Tensor
) -> None:
    """Raise ValueError naming the argument of `write_kv` that does not fit the others."""
    _check_pools(key_pool, value_pool)
    if key.dim() != 3 or key.shape[1] != key_pool.shape[1] or key.shape[2] != key_pool.shape[3]:
        want = f"[tokens, {key_pool.shape[1]}, {key_pool.shape[3]}]"
        raise ValueError(f"key: want {want}, got {list(key.shape)}")
    if value.shape != key.shape:
        raise ValueError(f"value: want key's shape {list(key.shape)}, got {list(value.shape)}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != key_pool.dtype:
            raise ValueError(f"{name}: want the pool's {key_pool.dtype}, got {tensor.dtype}")
    for name, tensor in (("key", key), ("value", value)):
        _check_contiguous_heads(name, tensor)
    _check_integers("slot_mapping", slot_mapping, (key.shape[0],), 8)


def check_decode(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
) -> None:
    """Raise ValueError naming the argument of `paged_decode` that does not fit the others."""
    _check_pools(key_pool, value_pool)
    _check_query(query, key_pool)
    _check_tables(block_tables, query.shape[0])
    _check_integers("context_lens", context_lens, (query.shape[0],), 4)


def check_prefill(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    query_lens: Tensor,
    context_lens: Tensor,
) -> None:
    """Raise ValueError naming the argument of `paged_prefill` that does not fit the others."""
    _check_pools(key_pool, value_pool)
    _check_query(query, key_pool)
    seqs = context_lens.shape[0] if context_lens.dim() == 1 else -1
    _check_integers("context_lens", context_lens, (max(seqs, 0),), 4)
    _check_tables(block_tables, seqs)
    _check_integers("query_starts", query_starts, (seqs,), 4)
    _check_integers("query_lens", query_lens, (seqs,), 4)


def check_scales(pool: Tensor, key_scale: Tensor | None, value_scale: Tensor | None) -> None:
    """Raise ValueError naming the scale that does not fit a pool of this shape and dtype."""
    fp8 = pool.dtype == torch.float8_e4m3fn
    _check_scales(key_scale, value_scale, pool.shape[1], fp8=fp8)


def check_shared(members: Tensor, lens: Tensor, seq_lens: Tensor, seqs: int) -> None:
    """Raise ValueError naming the part of `SharedPrefixes` that does not fit `seqs` sequences."""
    if members.dim() != 2:
        raise ValueError(f"members: want [groups, width], got {list(members.shape)}")
    _check_integers("members", members, tuple(members.shape), 4)
    _check_integers("lens", lens, (members.shape[0],), 4)
    _check_integers("seq_lens", seq_lens, (seqs,), 4)
    if not members.is_contiguous():
        raise ValueError("members: want a contiguous table")


def check_context(context: int, table: Tensor, block_size: int, *, count: int = 1) -> None:
    """Raise ValueError if a context cannot hold its `count` queries or passes its block table.

    For implementations that have the lengths on the host anyway; the Triton launchers do not.
    """
    if context < count:
        raise ValueError(f"context_lens: {context} tokens cannot end in {count} queries")
    if context > table.shape[0] * block_size:
        raise ValueError(
            f"context_lens: {context} tokens pass the table's {table.shape[0]} blocks "
            f"of {block_size}"
        )


def check_rows(first: int, count: int, tokens: int) -> None:
    """Raise ValueError if a sequence's query rows lie outside `query`."""
    if not 0 <= first <= first + count <= tokens:
        raise ValueError(f"query_starts: rows {first} to {first + count} pass the {tokens} given")


def _check_pools(key_pool: Tensor, value_pool: Tensor) -> None:
    if key_pool.dim() != 4:
        want = "[num_blocks, kv_heads, block_size, head_dim]"
        raise ValueError(f"key_pool: want {want}, got {list(key_pool.shape)}")
    if value_pool.shape != key_pool.shape or value_pool.stride() != key_pool.stride():
        raise ValueError(
            f"value_pool: want key_pool's shape {list(key_pool.shape)} and strides "
            f"{list(key_pool.stride())}, got {list(value_pool.shape)} and "
            f"{list(value_pool.stride())}"
        )
    if value_pool.dtype != key_pool.dtype:
        raise ValueError(f"value_pool: want key_pool's {key_pool.dtype}, got {value_pool.dtype}")
    if key_pool.stride(3) != 1:
        raise ValueError(f"key_pool: head_dim must be contiguous, stride is {key_pool.stride(3)}")


def _check_query(query: Tensor, key_pool: Tensor) -> None:
    kv_heads, head_dim = key_pool.shape[1], key_pool.shape[3]
    if query.dim() != 3 or query.shape[2] != head_dim or query.shape[1] % kv_heads:
        want = f"[rows, multiple of {kv_heads} heads, {head_dim}]"
        raise ValueError(f"query: want {want}, got {list(query.shape)}")
    if key_pool.dtype == torch.float8_e4m3fn:
        if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"query: want a 16- or 32-bit float, got {query.dtype}")
    elif query.dtype != key_pool.dtype:
        raise ValueError(f"query: want the pool's {key_pool.dtype}, got {query.dtype}")
    _check_contiguous_heads("query", query)


def _check_tables(block_tables: Tensor, seqs: int) -> None:
    if block_tables.dim() != 2 or block_tables.shape[0] != seqs:
        raise ValueError(f"block_tables: want [{seqs}, max_blocks], got {list(block_tables.shape)}")
    _check_integers("block_tables", block_tables, tuple(block_tables.shape), 4)


def _check_integers(name: str, tensor: Tensor, shape: tuple[int, ...], nbytes: int) -> None:
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    if not whole or tensor.element_size() != nbytes:
        raise ValueError(f"{name}: want int{8 * nbytes}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: want shape {list(shape)}, got {list(tensor.shape)}")


def check_rope_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    out: Tensor,
) -> None:
    """Raise ValueError naming the argument of `rope_write` that does not fit the others."""
    _check_pools(key_pool, value_pool)
    _, kv_heads, _, head_dim = key_pool.shape
    if head_dim % 2:
        raise ValueError(f"key_pool: want an even head_dim, got {head_dim}")
    if query.dim() != 3 or query.shape[2] != head_dim:
        raise ValueError(f"query: want [tokens, heads, {head_dim}], got {list(query.shape)}")
    tokens = query.shape[0]
    for name, tensor in (("key", key), ("value", value)):
        if tuple(tensor.shape) != (tokens, kv_heads, head_dim):
            want = f"[{tokens}, {kv_heads}, {head_dim}]"
            raise ValueError(f"{name}: want {want}, got {list(tensor.shape)}")
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name}: want query's {query.dtype}, got {tensor.dtype}")
    fp8 = key_pool.dtype == torch.float8_e4m3fn
    if not fp8 and key_pool.dtype != query.dtype:
        raise ValueError(f"query: want the pool's {key_pool.dtype}, got {query.dtype}")
    if out.shape != query.shape or out.dtype != query.dtype:
        want = f"query's {list(query.shape)} of {query.dtype}"
        raise ValueError(f"out: want {want}, got {list(out.shape)} of {out.dtype}")
    for name, tensor in (("query", query), ("key", key), ("value", value), ("out", out)):
        _check_contiguous_heads(name, tensor)
    work = torch.promote_types(query.dtype, torch.float32)
    for name, tensor in (("cos", cos), ("sin", sin)):
        if tuple(tensor.shape) != (tokens, head_dim // 2) or tensor.dtype != work:
            want = f"[{tokens}, {head_dim // 2}] of {work}"
            raise ValueError(f"{name}: want {want}, got {list(tensor.shape)} of {tensor.dtype}")
    if cos.stride() != sin.stride() or cos.stride(1) != 1:
        raise ValueError("cos: want sin's strides, angles contiguous")
    _check_integers("slot_mapping", slot_mapping, (tokens,), 8)
    _check_scales(key_scale, value_scale, kv_heads, fp8=fp8)


def _check_scales(
    key_scale: Tensor | None, value_scale: Tensor | None, kv_heads: int, *, fp8: bool
) -> None:
    if (key_scale is None) != (value_scale is None):
        raise ValueError("key_scale: give both scales, or none")
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is None:
            continue
        if not fp8:
            raise ValueError(f"{name}: only FP8 pools are scaled")
        if tuple(scale.shape) != (kv_heads,) or scale.dtype != torch.float32:
            want = f"float32 [{kv_heads}]"
            raise ValueError(f"{name}: want {want}, got {scale.dtype} {list(scale.shape)}")
        if not scale.is_contiguous():
            raise ValueError(f"{name}: must be contiguous")


def _check_contiguous_heads(name: str, tensor: Tensor) -> None:
    if tensor.stride(2) != 1:
        raise ValueError(f"{name}: head_dim must be contiguous, stride is {tensor.stride(2)}")


def check_block_copy(
    source_pool: Tensor, target_pool: Tensor, pairs: Tensor, tokens: Tensor | None
) -> None:
    """Raise ValueError naming the argument of `block_copy` that does not fit the others."""
    if source_pool.dim() < 3:
        want = "[num_blocks, ..., block_size, head_dim]"
        raise ValueError(f"source_pool: want {want}, got {list(source_pool.shape)}")
    if target_pool.shape[1:] != source_pool.shape[1:] or target_pool.dtype != source_pool.dtype:
        raise ValueError(
            f"target_pool: want source_pool's blocks {list(source_pool.shape[1:])} of "
            f"{source_pool.dtype}, got {list(target_pool.shape[1:])} of {target_pool.dtype}"
        )
    for name, pool in (("source_pool", source_pool), ("target_pool", target_pool)):
        if not pool[:1].is_contiguous():
            raise ValueError(f"{name}: blocks must be contiguous, strides are {pool.stride()}")
    token_bytes = source_pool.shape[-1] * source_pool.element_size()
    if token_bytes % 4:
        raise ValueError(f"source_pool: want heads of a multiple of 4 bytes, got {token_bytes}")
    if pairs.dim() != 2:
        raise ValueError(f"pairs: want [n, 2], got {list(pairs.shape)}")
    _check_integers("pairs", pairs, (pairs.shape[0], 2), 4)
    if not pairs.is_contiguous():
        raise ValueError(f"pairs: must be contiguous, strides are {pairs.stride()}")
    if tokens is not None:
        _check_integers("tokens", tokens, (pairs.shape[0],), 4)
        if not tokens.is_contiguous():
            raise ValueError(f"tokens: must be contiguous, strides are {tokens.stride()}")


def check_pairs(pairs: Tensor, tokens: Tensor | None, block_size: int, *, same_pool: bool) -> None:
    """Raise ValueError if pairs overlap or a token count passes the block.

    For implementations that have them on the host anyway; the Triton launcher does not.
    """
    sources, targets = pairs[:, 0].tolist(), pairs[:, 1].tolist()
    if len(set(targets)) < len(targets) or (same_pool and not set(targets).isdisjoint(sources)):
        raise ValueError("pairs: a block is written twice, or both read and written")
    counts = [] if tokens is None else tokens.tolist()
    if counts and not 0 <= min(counts) <= max(counts) <= block_size:
        raise ValueError(f"tokens: want 0 to {block_size}, got {min(counts)} to {max(counts)}")
