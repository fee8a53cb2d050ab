"""Prefill of a chunk of queries over cached blocks and its own, against torch's SDPA.

Bound by arithmetic: 4 x heads x head_dim operations for each query and position it sees. SDPA has K
and V contiguous and already repeated for every head of a group, which its memory pays for; ours
follows a block table. Pairs are interleaved; TFLOP/s count what the causal mask leaves.

    python -m bench.gpu_prefill [--budget SECONDS] [--dry]
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from bench.gpu import Gpu, same_rows
from bench.gpu_part import Report, Setting, run_part
from bench.gpu_pool import Pool, Shape, blocks_of, make_step, prefill_flops
from bench.gpu_pool import shapes as model_shapes
from kvtier.kernels.paged_prefill import paged_prefill
from kvtier.kernels.reference import attention, gather_context

LAYERS = 4


@dataclass(frozen=True)
class Point:
    """`batch` sequences, each with `chunk` queries at the end of `context` positions."""

    group: int
    batch: int
    chunk: int
    context: int

    def __str__(self) -> str:
        return f"group {self.group}, batch {self.batch}, {self.chunk} of {self.context}"


PLACES = (
    (1, 2048, 8 << 10),
    (1, 8192, 8 << 10),
    (4, 2048, 2 << 10),
    (1, 2048, 32 << 10),
    (4, 512, 8 << 10),
    (1, 512, 128 << 10),
)
"""Batch, chunk and context; the first are measured first."""


def grid(groups: list[int], *, dry: bool) -> list[Point]:
    places = ((2, 5, 21), (1, 8, 8)) if dry else PLACES
    return [Point(group, *place) for place in places for group in groups]


def ours(gpu: Gpu, pool: Pool, point: Point) -> tuple[Callable[[], Tensor], Tensor, Tensor]:
    """The call, its queries `[batch * chunk, heads, head_dim]`, and its tables."""
    shape, rows = pool.shape, point.batch * point.chunk
    step = make_step(gpu, shape, [point.context] * point.batch, pool.num_blocks)
    starts = torch.arange(0, rows, point.chunk, dtype=torch.int32, device=gpu.device)
    lens = torch.full_like(starts, point.chunk)
    query = torch.randn((rows, shape.heads, shape.head_dim), device=gpu.device).to(shape.dtype)
    keys, values = pool.keys(0), pool.values(0)
    return (
        lambda: paged_prefill(
            query, keys, values, step.tables, starts, lens, step.lens, shape.scale
        ),
        query,
        step.tables,
    )


def sdpa(pool: Pool, query: Tensor, point: Point) -> Callable[[], Tensor]:
    """SDPA on contiguous random K and V of the same shape, repeated for each query head."""
    shape = pool.shape
    size = (point.batch, shape.heads, point.context, shape.head_dim)
    keys, values = (torch.randn(size, device=query.device).to(shape.dtype) for _ in range(2))
    rows = query.view(point.batch, point.chunk, shape.heads, shape.head_dim).transpose(1, 2)
    rows = rows.contiguous()
    if point.chunk == point.context:
        return lambda: F.scaled_dot_product_attention(rows, keys, values, is_causal=True)
    mask = causal_lower_right(point.chunk, point.context)
    return lambda: F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)


def check(pool: Pool, point: Point, out: Tensor, query: Tensor, tables: Tensor) -> float:
    """Largest difference of the last sequence's last queries from the reference.

    Raises RuntimeError if that is more than the dtype allows.
    """
    few = min(16, point.chunk)
    keys = gather_context(pool.keys(0), tables[-1], point.context)
    values = gather_context(pool.values(0), tables[-1], point.context)
    want = attention(query[-few:], keys, values, point.context - few, pool.shape.scale)
    return same_rows(out[-few:], want, 2e-2)


def measure_point(gpu: Gpu, pool: Pool, point: Point) -> dict[str, float]:
    call, query, tables = ours(gpu, pool, point)
    error = check(pool, point, call(), query, tables)
    mine, theirs = gpu.interleave([call, sdpa(pool, query, point)], 0.5)
    flops = prefill_flops(pool.shape, [point.context] * point.batch, point.chunk)
    return {
        "us": 1e6 * mine.median,
        "tflops": flops / mine.median / 1e12,
        "vs_sdpa": theirs.median / mine.median,
        "error": error,
    }


def measure(setting: Setting) -> Report:
    gpu, budget = setting.gpu, setting.budget
    shapes = {shape.group: shape for shape in model_shapes(dry=gpu.dry)}
    first: Shape = next(iter(shapes.values()))
    points = grid(list(shapes), dry=gpu.dry)
    blocks = max(p.batch * blocks_of(p.context, first.block_size) for p in points)
    shared = Pool(gpu, first, 2 * blocks, 1 if gpu.dry else LAYERS)
    rows: list[list[object]] = [["group", "batch", "chunk", "context", "us", "TFLOP/s", "vs SDPA"]]
    found = []
    for point in budget.walk(points, lambda _: 1.5):
        values = measure_point(gpu, shared.seen_as(shapes[point.group]), point)
        found.append(values)
        place = [str(each) for each in (point.group, point.batch, point.chunk, point.context)]
        rows.append([*place, values["us"], values["tflops"], values["vs_sdpa"]])
    figures = {}
    if found:
        figures["prefill_vs_sdpa"] = min(each["vs_sdpa"] for each in found)
        figures["prefill_tflops"] = max(each["tflops"] for each in found)
    return Report(figures, rows=rows)


if __name__ == "__main__":
    run_part("prefill", __doc__, measure)
