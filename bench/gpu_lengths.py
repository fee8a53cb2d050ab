"""Decode where the grid is not: contexts of uneven length, and blocks that lie in a row.

Bound by reading K and V once, as in `bench.gpu_attention`. Uneven lengths show whether short
sequences leave multiprocessors idle; blocks in a row show what following a table costs.

    python -m bench.gpu_lengths [--budget SECONDS] [--dry]
"""

from bench.gpu import Gpu
from bench.gpu_bandwidth import measure_read
from bench.gpu_part import Report, Setting, run_part
from bench.gpu_pool import (
    Pool,
    Shape,
    blocks_of,
    check_decode,
    decode,
    decode_bytes,
    make_step,
    shapes,
)

LAYERS = 8


def spread(batch: int, middle: int, ratio: float) -> tuple[int, ...]:
    """Lengths from `middle / sqrt(ratio)` to `middle * sqrt(ratio)`, in equal steps of ratio."""
    least = middle / ratio**0.5
    return tuple(round(least * ratio ** (i / (batch - 1))) for i in range(batch))


def make_pool(gpu: Gpu, shape: Shape, tokens: int) -> Pool:
    layers = 1 if gpu.dry else LAYERS
    return Pool(gpu, shape, blocks_of(tokens, shape.block_size), layers)


def measure_spread(gpu: Gpu, shape: Shape, read: float) -> float:
    """Percent of the read bandwidth `read`, in GB/s."""
    contexts = spread(3, 24, 4) if gpu.dry else spread(32, 2048, 10)
    pool = make_pool(gpu, shape, sum(contexts) + len(contexts) * shape.block_size)
    step = make_step(gpu, shape, contexts, pool.num_blocks)
    check_decode(pool, step)
    time_s = gpu.interleave([lambda: decode(pool, step)], 0.5)[0].median
    return 100 * decode_bytes(shape, contexts) / time_s / 1e9 / read


def measure_random_loss(gpu: Gpu, shape: Shape) -> float:
    """Percent that blocks anywhere take longer than blocks in a row."""
    contexts = (40, 40) if gpu.dry else (8 << 10,) * 16
    pool = make_pool(gpu, shape, 2 * sum(contexts) + len(contexts) * shape.block_size)
    anywhere = make_step(gpu, shape, contexts, pool.num_blocks)
    in_a_row = make_step(gpu, shape, contexts, pool.num_blocks, scattered=False)
    check_decode(pool, in_a_row)
    calls = [lambda: decode(pool, anywhere), lambda: decode(pool, in_a_row)]
    slow, fast = gpu.interleave(calls, 1.0)
    return 100 * (slow.median / fast.median - 1)


def measure(setting: Setting) -> Report:
    gpu = setting.gpu
    shape = shapes(dry=gpu.dry)[0]
    read, _ = measure_read(gpu)
    figures = {
        "decode_spread": measure_spread(gpu, shape, read),
        "decode_random_loss": measure_random_loss(gpu, shape),
    }
    skips = {
        "decode_fp8": "paged_decode takes no FP8 K and V",
        "shared_speedup": "there is no shared-prefix kernel",
    }
    return Report(figures, skips, notes={"read_gb_s": read})


if __name__ == "__main__":
    run_part("lengths", __doc__, measure)
