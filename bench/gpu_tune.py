"""Which launch sizes of decode are fastest on this card: what the shipped table should hold for it.

Every candidate is timed on two steps, a full card (batch 16, context 8k) and one long sequence
(32k), and scored by the geometric mean of its time over the shipped row's, pair by pair. Sizes are
part of the result's bits, so a better row is a change of the kernels' version, made by hand. No
part of the suite: it compiles each candidate, which takes a second or two.

    python -m bench.gpu_tune [--budget SECONDS] [--dry]
"""

from dataclasses import replace
from itertools import product

import torch
from triton.runtime.errors import OutOfResources

from bench.gpu import Gpu
from bench.gpu_part import Report, Setting, run_part
from bench.gpu_pool import Pool, Shape, Step, blocks_of, check_rows, decode, make_step, shapes
from kvtier.kernels.configs import Launch, architecture, lookup

TILES, WARPS, STAGES, SPLITS = (32, 64, 128), (2, 4, 8), (2, 3, 4, 5), (256, 1024, 2048)
POINTS = ((16, 8 << 10), (1, 32 << 10))
LAYERS = 8


def candidates(shipped: Launch) -> list[Launch]:
    """The shipped row first, then other splits of it, then other tiles, warps and stages."""
    found = [shipped, *(replace(shipped, split=split) for split in SPLITS)]
    for tile, warps, stages in product(TILES, WARPS, STAGES):
        found.append(replace(shipped, tile=tile, warps=warps, stages=stages))
    return list(dict.fromkeys(each for each in found if each.tile <= each.split))


def score(gpu: Gpu, pool: Pool, steps: list[Step], launch: Launch, shipped: Launch) -> float:
    """Time over the shipped row's: below 1 is faster. Raises RuntimeError if its result is off."""
    total = 1.0
    for step in steps:
        check_rows(decode(pool, step, launch=launch), pool, step)
        mine, theirs = gpu.interleave(
            [
                lambda step=step: decode(pool, step, launch=launch),  # type: ignore[misc]
                lambda step=step: decode(pool, step, launch=shipped),  # type: ignore[misc]
            ],
            0.2,
        )
        total *= mine.median / theirs.median
    return float(total ** (1 / len(steps)))


def tune(setting: Setting, shape: Shape, query_dtype: torch.dtype) -> list[tuple[float, Launch]]:
    """Candidates by score, best first; those that do not fit the card or the time are dropped."""
    gpu, budget = setting.gpu, setting.budget
    shipped = lookup("paged_decode", architecture(gpu.device), shape.dtype, shape.head_dim)
    points = ((2, 40),) if gpu.dry else POINTS
    blocks = max(batch * blocks_of(context, shape.block_size) for batch, context in points)
    pool = Pool(gpu, shape, 2 * blocks, 1 if gpu.dry else LAYERS)
    steps = [
        make_step(gpu, shape, [context] * batch, pool.num_blocks, query_dtype=query_dtype)
        for batch, context in points
    ]
    found = []
    wanted = candidates(shipped)[:3] if gpu.dry else candidates(shipped)
    for launch in budget.walk(wanted, lambda _: 4.0):
        try:
            found.append((score(gpu, pool, steps, launch, shipped), launch))
        except OutOfResources as error:
            budget.drop(launch, str(error))
    return sorted(found, key=lambda each: each[0])


def measure(setting: Setting) -> Report:
    gpu = setting.gpu
    shape = shapes(dry=gpu.dry)[0]
    rows: list[list[object]] = [["dtype", "tile", "warps", "stages", "split", "of shipped"]]
    best: dict[str, object] = {}
    for dtype in (shape.dtype, torch.float8_e4m3fn):
        for value, launch in tune(setting, replace(shape, dtype=dtype), shape.dtype):
            name = str(dtype).removeprefix("torch.")
            sizes = (launch.tile, launch.warps, launch.stages, launch.split)
            rows.append([name, *(str(size) for size in sizes), value])
            best.setdefault(name, {"launch": sizes, "of_shipped": value})
    return Report({}, rows=rows, notes={"best": best})


if __name__ == "__main__":
    run_part("tune", __doc__, measure)
