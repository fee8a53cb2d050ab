"""Dense causal attention on the CPU over contiguous K and V. Knows no blocks and no requests.

Built on torch's fused CPU kernel, called by its operator name because the public face
(`scaled_dot_product_attention`) keeps the log-sum-exp to itself, which merging needs. Three choices
make it faster than one masked call. Figures: 9 heads on 3 KV heads of 64, float32, 2 threads of a
shared AVX-512 machine, best of 25 interleaved, against one masked `enable_gqa` call.

1. Query heads that share a KV head become rows of one call instead of copies of K and V:
   one query at 4k 0.77 -> 0.63 ms.
2. The past needs no mask and the chunk itself only a causal flag; the two are merged by their
   log-sum-exp. 512 queries after 3,584: 26.2 ms masked, 23.8 masked and folded, 20.5 merged.
   Tiles of 256 or 128 queries skip more of the chunk's upper triangle and lose more than they win
   (22.4, 22.9). Folded scores through two plain GEMMs take 62 ms: they leave the cache.
3. Few rows would leave one unit of work for each KV head, three on two threads. Their past is cut
   into splits of 512 positions, counted from position 0: 0.63 -> 0.51 ms.

Splits are fixed in size and aligned to positions, so what a query row's result depends on is its
position and the chunk it came in, never the batch. How a context was cut into chunks changes
float32 rounding only.
"""

import torch
from torch import Tensor

_SPLIT = 512
"""Positions in one split of the past."""

_NARROW = 32
"""Rows up to which the fused kernel makes one unit of work for each KV head."""


def attend(query: Tensor, key: Tensor, value: Tensor, start: int, scale: float) -> Tensor:
    """`softmax(scale * q K^T) V` of queries at positions `start` and on, causal.

    query `[n, heads, head_dim]`, n at least 1; key and value `[kv_heads, start + n, head_dim]`,
    strided views are fine while head_dim is contiguous. Returns `[n, heads, head_dim]`.
    """
    count, heads, head_dim = query.shape
    kv_heads, end, _ = key.shape
    group = heads // kv_heads
    rows = query.reshape(count, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    narrow = group * count <= _NARROW
    cut = start // _SPLIT * _SPLIT if narrow else start
    mixed, weight = _recent(rows, key[:, cut:], value[:, cut:], start - cut, scale)
    if cut:
        splits = cut // _SPLIT if narrow else 1
        past, past_weight = _past(rows, key[:, :cut], value[:, :cut], splits, scale)
        mixed = torch.lerp(mixed, past, (past_weight - weight).sigmoid_().unsqueeze(-1))
    return mixed.permute(2, 0, 1, 3).reshape(count, heads, head_dim).to(query.dtype)


def _recent(
    rows: Tensor, key: Tensor, value: Tensor, start: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention up to each query's own position, and its log-sum-exp.

    rows `[kv_heads, group, n, head_dim]`; returns the same shape and `[kv_heads, group, n]`.
    """
    kv_heads, group, count, head_dim = rows.shape
    end = key.shape[1]
    if count == 1:  # the query sees every position: no mask, so its group may share the rows
        folded, key, value = rows.transpose(1, 2), key.unsqueeze(1), value.unsqueeze(1)
        mixed, weight = _fused(folded, key, value, scale)
        return mixed.transpose(1, 2), weight.transpose(1, 2)
    shape = (kv_heads, group, end, head_dim)
    mask = None
    if start:
        ahead = torch.ones((count, end), dtype=torch.bool).triu_(start + 1)
        mask = torch.zeros((count, end), dtype=rows.dtype).masked_fill_(ahead, float("-inf"))
    return _fused(
        rows,
        key.unsqueeze(1).expand(shape),
        value.unsqueeze(1).expand(shape),
        scale,
        causal=not start,
        mask=mask,
    )


def _past(
    rows: Tensor, key: Tensor, value: Tensor, splits: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention over positions that every query sees, in `splits` equal parts; as `_recent`."""
    kv_heads, group, count, head_dim = rows.shape
    length = key.shape[1] // splits
    parts = (kv_heads, splits, length, head_dim)
    strides = (key.stride(0), length * key.stride(1), key.stride(1), 1)
    folded = rows.flatten(1, 2).unsqueeze(1).expand(-1, splits, -1, -1)
    mixed, weight = _fused(
        folded,
        key.as_strided(parts, strides),
        value.as_strided(parts, strides),
        scale,
    )
    if splits > 1:
        total = weight.logsumexp(dim=1, keepdim=True)
        mixed = (mixed * (weight - total).exp_().unsqueeze(-1)).sum(dim=1)
        weight = total
    return mixed.reshape(rows.shape), weight.reshape(kv_heads, group, count)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """torch's fused attention: the result, in the precision of its log-sum-exp, and that."""
    mixed, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return mixed.to(weight.dtype), weight
