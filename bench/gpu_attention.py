"""Decode attention over batch 1 to 64, context 1k to 128k, groups of 4 and 8 query heads.

A step's time is bound by reading K and V once, so a figure is the bytes it needs over its time, in
percent of the read bandwidth measured in the same run. L2 flushed, launched as a graph, median.
Blocks lie anywhere in a pool of as many layers as the card has room for. Beside it, interleaved
with it: torch's SDPA on contiguous K and V, FlashInfer and FlashAttention where installed.

Corners of the grid are measured first, then the points whose figures have a target, then the rest;
each of the three by size. What no longer fits the budget is left out and named.

    python -m bench.gpu_attention [--budget SECONDS] [--dry]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.gpu import Gpu
from bench.gpu_bandwidth import measure_read
from bench.gpu_baselines import PEERS, Dense, peer_decode, sdpa_decode
from bench.gpu_part import Report, Setting, run_part
from bench.gpu_pool import Pool, Shape, blocks_of, check_decode, decode, decode_bytes, make_step
from bench.gpu_pool import shapes as model_shapes

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10)
CORNERS = ((1, 1 << 10), (8, 8 << 10), (64, 8 << 10), (1, 128 << 10), (64, 128 << 10))
SPEED = 1e12
"""Bytes a second that a point's cost is estimated with: well below what the card does."""


@dataclass(frozen=True)
class Point:
    group: int
    batch: int
    context: int

    def __str__(self) -> str:
        return f"group {self.group}, batch {self.batch}, context {self.context}"


def grid(groups: Sequence[int], batches: Sequence[int], contexts: Sequence[int]) -> list[Point]:
    """Every point, the most telling first: corners, then what a target speaks of, then the rest."""

    def rank(point: Point) -> tuple[int, int]:
        place = (point.batch, point.context)
        corner = place in CORNERS
        judged = has_target(point) is not None
        return (0 if corner else 1 if judged else 2, point.batch * point.context)

    points = [Point(g, b, c) for g in groups for b in batches for c in contexts]
    return sorted(points, key=rank)


def has_target(point: Point) -> str | None:
    """The figure that this point counts for."""
    if point.batch >= 8 and point.context >= 8 << 10:
        return "decode_b8_8k"
    if point.batch == 1 and point.context >= 32 << 10:
        return "decode_b1_32k"
    return None


def fitting(free_bytes: int, shape: Shape, tokens: int) -> tuple[int, int]:
    """Tokens and layers of a pool that leaves as many contiguous tokens their room.

    One layer's K and V in the pool, the same again contiguous, a tenth to spare; what is left buys
    layers, to 32, so that blocks lie as far apart as they do in an engine.
    """
    room = free_bytes * 9 // 10
    tokens = min(tokens, room // 2 // shape.token_bytes) // shape.block_size * shape.block_size
    dense = tokens * shape.token_bytes
    return tokens, max(1, min(32, (room - dense) // max(1, dense)))


def measure_point(
    gpu: Gpu, pool: Pool, dense: Dense, point: Point, read: float, skips: dict[str, str]
) -> dict[str, float]:
    """`of_read` in percent, and each baseline's time over ours; ours in µs."""
    shape = pool.shape
    contexts = [point.context] * point.batch
    step = make_step(gpu, shape, contexts, pool.num_blocks)
    names, calls = ["ours"], list[Callable[[], object]]([lambda: decode(pool, step)])
    names.append("sdpa")
    calls.append(sdpa_decode(dense, pool, step))
    for peer in PEERS:
        call, why = peer_decode(gpu, peer, dense, pool, step)
        if call is None:
            skips[f"decode_vs_{peer}"] = why
        else:
            names.append(peer)
            calls.append(call)
    samples = dict(zip(names, gpu.interleave(calls, 0.25), strict=True))
    ours = samples.pop("ours")
    rate = decode_bytes(shape, contexts) / ours.median / 1e9
    values = {"us": 1e6 * ours.median, "of_read": 100 * rate / read}
    return values | {f"vs_{k}": each.median / ours.median for k, each in samples.items()}


def measure(setting: Setting) -> Report:
    gpu, budget = setting.gpu, setting.budget
    read, _ = measure_read(gpu)
    batches, contexts = ((1, 2), (16, 48)) if gpu.dry else (BATCHES, CONTEXTS)
    shapes = {shape.group: shape for shape in model_shapes(dry=gpu.dry)}
    first = next(iter(shapes.values()))
    tokens, layers = fitting(gpu.free_bytes(), first, max(batches) * max(contexts))
    if gpu.dry:
        layers = 1
    shared = Pool(gpu, first, tokens // first.block_size, layers)
    dense = Dense(shared, tokens * first.token_bytes)
    pools = {group: shared.seen_as(shape) for group, shape in shapes.items()}
    errors = [
        check_decode(pool, make_step(gpu, pool.shape, (min(contexts), 17), pool.num_blocks))
        for pool in pools.values()
    ]
    found: list[tuple[Point, dict[str, float]]] = []
    skips: dict[str, str] = {}
    points = []
    for point in grid(list(pools), batches, contexts):
        if point.batch * blocks_of(point.context, first.block_size) > shared.num_blocks:
            budget.drop(point, f"the pool has {shared.num_blocks} blocks")
        else:
            points.append(point)
    for point in budget.walk(points, lambda p: cost(first, p)):
        found.append((point, measure_point(gpu, pools[point.group], dense, point, read, skips)))
    notes: dict[str, object] = {"read_gb_s": read, "layers": layers, "largest_error": max(errors)}
    return Report(figures_of(found), skips, rows_of(found), notes)


def cost(shape: Shape, point: Point) -> float:
    """Seconds, about: at least ten repeats of four calls, and what it takes to get ready."""
    return 0.6 + 40 * decode_bytes(shape, [point.context] * point.batch) / SPEED


def figures_of(found: Sequence[tuple[Point, dict[str, float]]]) -> dict[str, float]:
    """The worst of each figure's points; a figure without points is left out."""
    figures: dict[str, float] = {}

    def worst(name: str, value: float) -> None:
        figures[name] = min(value, figures.get(name, value))

    for point, values in found:
        target = has_target(point)
        if target is not None:
            worst(target, values["of_read"])
        for name, value in values.items():
            if name.startswith("vs_"):
                worst(f"decode_{name}", value)
    return figures


def rows_of(found: Sequence[tuple[Point, dict[str, float]]]) -> list[list[object]]:
    columns = ["us", "of_read", "vs_sdpa", *(f"vs_{peer}" for peer in PEERS)]
    rows: list[list[object]] = [["group", "batch", "context", *columns]]
    for point, values in sorted(found, key=lambda each: (each[0].group, each[0].context)):
        place = [str(point.group), str(point.batch), str(point.context)]
        rows.append([*place, *(values.get(name, "") for name in columns)])
    return rows


if __name__ == "__main__":
    run_part("attention", __doc__, measure)
