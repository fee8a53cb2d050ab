"""Triton: rotate query and key, and put K and V into the pool, in one launch. Knows slots only.

Half-split rotary embedding (RoPE, Su et al., 2021, in the order of Hugging Face's Llama weights):
element `i` of a head pairs with `i + head_dim / 2`, `low' = low cos - high sin` and
`high' = high cos + low sin`, all in float32. Every product and every sum is rounded by itself (no
fused multiply-add), so the bits are those of `engine/rope.py` wherever that runs in float32.

FP8 pools hold e4m3 bytes: `x / scale` of a static scale a KV head, rounded once from float32 to the
nearest, ties to even, saturating at 448; NaN stays NaN. The bytes are made by integer arithmetic,
so that GPUs without the format (sm_80) and the interpreter write the same ones.
"""

# mypy: allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.kernels.checks import check_rope_write


@triton.jit
def encode_e4m3(x: tl.tensor) -> tl.tensor:
    """float32 to e4m3 bytes (OCP 8-bit floating point, 2023): nearest, ties to even, saturating."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    # From 2^-6 on: drop 20 of 23 bits of the fraction, and move the exponent's bias from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below, a step is 2^-9, which is the last bit of floats from 2^14 on.
    shifted = tl.minimum(size, 0x3C800000).to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (sign | code).to(tl.uint8)


@triton.jit
def rope_write_kernel(
    out_ptr: tl.tensor,
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    key_pool_ptr: tl.tensor,
    value_pool_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    angle_stride: tl.tensor,
    pool_block_stride: tl.tensor,
    pool_head_stride: tl.tensor,
    pool_token_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    FP8: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """One program for CHUNK heads of a token: query heads first, then those of K and V.

    `out = rotate(query)`; `pool[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = rotate(key), value`,
    unless slot is -1.
    """
    QUERY_CHUNKS: tl.constexpr = (HEADS + CHUNK - 1) // CHUNK
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    dims = tl.arange(0, HALF_PADDED)
    inside = dims < HALF
    cos = tl.load(cos_ptr + token * angle_stride + dims, mask=inside, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * angle_stride + dims, mask=inside, other=0.0)[None, :]
    if chunk < QUERY_CHUNKS:
        heads = (chunk * CHUNK + tl.arange(0, CHUNK))[:, None]
        kept = (heads < HEADS) & inside[None, :]
        source = query_ptr + token * query_token_stride + heads * query_head_stride + dims[None, :]
        low = tl.load(source, mask=kept).to(tl.float32)
        high = tl.load(source + HALF, mask=kept).to(tl.float32)
        target = out_ptr + token * out_token_stride + heads * out_head_stride + dims[None, :]
        kind = out_ptr.dtype.element_ty
        tl.store(target, (low * cos - high * sin).to(kind), mask=kept)
        tl.store(target + HALF, (high * cos + low * sin).to(kind), mask=kept)
        return
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    heads = ((chunk - QUERY_CHUNKS) * CHUNK + tl.arange(0, CHUNK))[:, None]
    kept = (heads < KV_HEADS) & inside[None, :]
    place = (slot // BLOCK_SIZE) * pool_block_stride + (slot % BLOCK_SIZE) * pool_token_stride
    places = place + heads * pool_head_stride + dims[None, :]

    source = key_ptr + token * key_token_stride + heads * key_head_stride + dims[None, :]
    low = tl.load(source, mask=kept).to(tl.float32)
    high = tl.load(source + HALF, mask=kept).to(tl.float32)
    _store_halves(
        key_pool_ptr + places,
        low * cos - high * sin,
        high * cos + low * sin,
        kept,
        key_scale_ptr + heads,
        heads < KV_HEADS,
        HALF,
        FP8,
        SCALED,
    )
    source = value_ptr + token * value_token_stride + heads * value_head_stride + dims[None, :]
    _store_halves(
        value_pool_ptr + places,
        tl.load(source, mask=kept),
        tl.load(source + HALF, mask=kept),
        kept,
        value_scale_ptr + heads,
        heads < KV_HEADS,
        HALF,
        FP8,
        SCALED,
    )


@triton.jit
def _store_halves(
    places: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    kept: tl.tensor,
    scale_places: tl.tensor,
    is_head: tl.tensor,
    HALF: tl.constexpr,
    FP8: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Two halves of heads `[CHUNK, HALF_PADDED]`, in the pool's dtype."""
    if FP8:
        low = low.to(tl.float32)
        high = high.to(tl.float32)
        if SCALED:
            scale = tl.load(scale_places, mask=is_head, other=1.0)
            low = tl.div_rn(low, scale)
            high = tl.div_rn(high, scale)
        tl.store(places, encode_e4m3(low), mask=kept)
        tl.store(places + HALF, encode_e4m3(high), mask=kept)
    else:
        kind = places.dtype.element_ty
        tl.store(places, low.to(kind), mask=kept)
        tl.store(places + HALF, high.to(kind), mask=kept)


OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
"""Launch options. One warp, so that few heads fill 16-byte accesses; fusion would change bits."""

_ELEMENTS = 512
"""Elements of one half a program holds: 16 a lane, two 16-byte loads of 16-bit numbers."""


def rope_write_constants(
    heads: int, kv_heads: int, head_dim: int, block_size: int, *, fp8: bool, scaled: bool
) -> dict[str, int]:
    """The kernel's compile-time constants for one model, block size and kind of pool."""
    padded = triton.next_power_of_2(head_dim // 2)
    return {
        "BLOCK_SIZE": block_size,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HALF": head_dim // 2,
        "HALF_PADDED": padded,
        "CHUNK": min(triton.next_power_of_2(heads), max(1, _ELEMENTS // padded)),
        "FP8": fp8,
        "SCALED": scaled,
    }


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
    """Rotate each token's query and key by its angles, and write its K and V into the pool.

    query `[tokens, heads, head_dim]`, key and value `[tokens, kv_heads, head_dim]`; cos, sin
    float32 `[tokens, head_dim / 2]`, a token's own angles; pools
    `[num_blocks, kv_heads, block_size, head_dim]`, strided views of one layer, of the same dtype
    (float32, float16, bfloat16) or float8_e4m3fn; slot_mapping int64 `[tokens]`, `block *
    block_size + offset`, where -1 writes no K and V. key_scale, value_scale float32 `[kv_heads]`,
    positive, for FP8 pools only (None: 1): the pool holds `x / scale`. `out` (query's shape and
    dtype) takes the rotated query; without it query is rotated in place. key is left as it is.
    Slots are not checked against the pool, and no two tokens may name one. Returns the rotated
    query. Raises ValueError on a shape or dtype that does not fit.
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
    tokens, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_pool.shape
    if tokens == 0:
        return out
    fp8 = key_pool.dtype == torch.float8_e4m3fn
    if fp8:
        key_pool, value_pool = key_pool.view(torch.uint8), value_pool.view(torch.uint8)
    constants = rope_write_constants(
        heads, kv_heads, head_dim, block_size, fp8=fp8, scaled=key_scale is not None
    )
    chunks = triton.cdiv(heads, constants["CHUNK"]) + triton.cdiv(kv_heads, constants["CHUNK"])
    rope_write_kernel[(tokens, chunks)](
        out,
        query,
        key,
        value,
        cos,
        sin,
        key_pool,
        value_pool,
        slot_mapping,
        cos if key_scale is None else key_scale,
        cos if value_scale is None else value_scale,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cos.stride(0),
        key_pool.stride(0),
        key_pool.stride(1),
        key_pool.stride(2),
        **constants,
        **OPTIONS,
    )
    return out
