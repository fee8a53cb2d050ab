"""Decode where the grid is not: uneven lengths, blocks in a row, FP8, and a document in common.

Bound by reading K and V once, as in `bench.gpu_attention`. Uneven lengths show whether short
sequences leave multiprocessors idle; blocks in a row show what following a table costs. FP8 halves
the bytes and adds a conversion. With a shared prefix, what is read once a request need be read once
a batch only; the plain kernel beside it has the same tables, so some of it comes from L2 there.

    python -m bench.gpu_lengths [--budget SECONDS] [--dry]
"""

from dataclasses import replace

import torch
from torch import Tensor

from bench.gpu import Gpu
from bench.gpu_bandwidth import measure_read
from bench.gpu_part import Report, Setting, run_part
from bench.gpu_pool import (
    Pool,
    Shape,
    Step,
    blocks_of,
    check_decode,
    check_rows,
    decode,
    decode_bytes,
    make_step,
    shapes,
)
from kvtier.kernels.prefixes import SharedPrefixes
from kvtier.kernels.shared_decode import shared_decode

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


def measure_fp8(gpu: Gpu, shape: Shape, read: float) -> float:
    """Percent of the read bandwidth `read`, in GB/s, with e4m3 K and V and their scales."""
    small = replace(shape, dtype=torch.float8_e4m3fn)
    contexts = (40, 21) if gpu.dry else (8 << 10,) * 16
    pool = make_pool(gpu, small, sum(contexts) + len(contexts) * shape.block_size)
    step = make_step(gpu, small, contexts, pool.num_blocks, query_dtype=shape.dtype)
    check_decode(pool, step)
    time_s = gpu.interleave([lambda: decode(pool, step)], 0.5)[0].median
    return 100 * decode_bytes(small, contexts) / time_s / 1e9 / read


def share(step: Step, positions: int, block_size: int) -> tuple[Step, SharedPrefixes]:
    """The step with the first sequence's blocks of these positions in every table."""
    tables = step.tables.clone()
    tables[:, : positions // block_size] = tables[0, : positions // block_size]
    seqs = len(step.contexts)
    prefixes = SharedPrefixes.of([(range(seqs), positions)], seqs, tables.device)
    return replace(step, tables=tables), prefixes


def measure_shared(gpu: Gpu, shape: Shape) -> float:
    """Plain decode's time over the shared-prefix kernel's."""
    batch, document, question = (3, 32, 9) if gpu.dry else (32, 16 << 10, 256)
    contexts = (document + question,) * batch
    pool = make_pool(gpu, shape, sum(contexts) + batch * shape.block_size)
    alone = make_step(gpu, shape, contexts, pool.num_blocks)
    step, prefixes = share(alone, document, shape.block_size)

    def shared() -> Tensor:
        return shared_decode(
            step.query,
            pool.keys(0),
            pool.values(0),
            step.tables,
            step.lens,
            prefixes,
            shape.scale,
            workspace=step.workspace,
        )

    check_rows(shared(), pool, step)
    ours, plain = gpu.interleave([shared, lambda: decode(pool, step)], 0.5)
    return plain.median / ours.median


def measure(setting: Setting) -> Report:
    gpu = setting.gpu
    shape = shapes(dry=gpu.dry)[0]
    read, _ = measure_read(gpu)
    parts = {
        "decode_spread": lambda: measure_spread(gpu, shape, read),
        "decode_random_loss": lambda: measure_random_loss(gpu, shape),
        "shared_speedup": lambda: measure_shared(gpu, shape),
        "decode_fp8": lambda: measure_fp8(gpu, shape, read),
    }
    figures = {name: parts[name]() for name in setting.budget.walk(parts, lambda _: 4.0)}
    skips = dict.fromkeys(parts.keys() - figures.keys(), "no time was left")
    return Report(figures, skips, notes={"read_gb_s": read})


if __name__ == "__main__":
    run_part("lengths", __doc__, measure)
