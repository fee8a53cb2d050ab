"""The step that all paged attention shares: a tile of positions into a running softmax.

Device code only. Knows rows of queries and positions of one sequence; who owns them is the
caller's business.

The running softmax (Milakov and Gimelshein, 2018; as tiled in FlashAttention) keeps for each row
the maximum `m` of the scores so far, the sum `l = sum exp(s - m)` and `acc = sum exp(s - m) v`.
Scores are in units of log2, so that `exp` is one `exp2`.
"""

# mypy: allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def fold_tile(
    acc: tl.tensor,
    high: tl.tensor,
    total: tl.tensor,
    query: tl.tensor,
    limits: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    table_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    pool_block_stride: tl.tensor,
    pool_token_stride: tl.tensor,
    scale_log2: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    EVICTION: tl.constexpr,
) -> tl.tensor:
    """Fold positions `first` to `first + TILE` into `acc`, `high` (m) and `total` (l).

    query `[ROWS, HEAD_DIM_PADDED]`; a row sees positions up to `limits[row]`, and none from `end`
    on, which are not read. Without MASKED the caller vouches that every row sees the whole tile.
    `first` is a multiple of TILE. `key_ptr` and `value_ptr` point at this KV head in block 0,
    `table_ptr` at this sequence's row. EVICTION ("evict_first" or "") is how K and V leave L2.
    Stored elements narrower than the query's are widened to it before the dots; a static scale of K
    is the caller's, in `scale_log2`, and one of V too, in what it makes of `acc`.
    """
    dims = tl.arange(0, HEAD_DIM_PADDED)
    positions = first + tl.arange(0, TILE)
    present = positions < end
    if BLOCK_SIZE % TILE == 0:  # one block holds the tile
        blocks = tl.load(table_ptr + first // BLOCK_SIZE)
    elif TILE % BLOCK_SIZE == 0:
        firsts = first // BLOCK_SIZE + tl.arange(0, TILE // BLOCK_SIZE)
        if MASKED:
            found = tl.load(table_ptr + firsts, mask=firsts * BLOCK_SIZE < end, other=0)
        else:
            found = tl.load(table_ptr + firsts)
        blocks = tl.reshape(
            tl.broadcast_to(found[:, None], (TILE // BLOCK_SIZE, BLOCK_SIZE)), (TILE,)
        )
    elif MASKED:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=present, other=0)
    else:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE)
    # int64: with 2 MiB bf16 blocks an int32 element offset overflows at block 2,048.
    strips = blocks.to(tl.int64) * pool_block_stride
    strips += (positions % BLOCK_SIZE) * pool_token_stride
    offsets = strips[:, None] + dims[None, :]
    if MASKED:
        kept = present[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(key_ptr + offsets, mask=kept, other=0.0, eviction_policy=EVICTION)
        value = tl.load(value_ptr + offsets, mask=kept, other=0.0, eviction_policy=EVICTION)
    elif HEAD_DIM == HEAD_DIM_PADDED:
        key = tl.load(key_ptr + offsets, eviction_policy=EVICTION)
        value = tl.load(value_ptr + offsets, eviction_policy=EVICTION)
    else:
        inside = (dims < HEAD_DIM)[None, :]
        key = tl.load(key_ptr + offsets, mask=inside, other=0.0, eviction_policy=EVICTION)
        value = tl.load(value_ptr + offsets, mask=inside, other=0.0, eviction_policy=EVICTION)
    key = widen(key, query.dtype)
    value = widen(value, query.dtype)
    # "ieee" keeps float32 inputs out of TF32; it changes nothing for 16-bit ones.
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
    if MASKED:
        seen = present[None, :] & (positions[None, :] <= limits[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_high = tl.maximum(high, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_high[:, None])
    fade = tl.exp2(high - new_high)
    total = total * fade + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(query.dtype), value, input_precision="ieee")
    return acc * fade[:, None] + mixed, new_high, total


@triton.jit
def widen(stored: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Stored elements as DTYPE; bytes are e4m3 numbers (OCP FP8, 2023), read by their bits.

    Machines before sm_89 have no e4m3: sign, 4 bits of exponent and 3 of mantissa are moved to
    where float16 has them, whose exponent's bias is 8 greater; all ones are NaN. Exact.
    """
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), half).to(DTYPE)
    return stored.to(DTYPE)
