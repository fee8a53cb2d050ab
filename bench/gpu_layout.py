"""Decode on the block-major pool against the same memory with layer-major strides.

A block of all layers in one run makes every move between tiers one copy; what it may cost is that
one layer's blocks lie 2 MiB apart, in ever other pages of the address translation. So the pool is
big (64 GiB, or what there is), and a launch reads several layers of blocks all over it. A loss over
3 % reopens the choice of layout.

    python -m bench.gpu_layout [--budget SECONDS] [--dry]
"""

from bench.gpu import Gpu
from bench.gpu_part import Report, Setting, run_part
from bench.gpu_pool import Pool, Shape, blocks_of, check_decode, decode, make_step, shapes

POOL_BYTES = 64 << 30
LAYERS = 32
READ = (0, 9, 18, 27)
"""Layers that one launch reads, one after another."""

POINTS = ((32, 8 << 10), (8, 8 << 10), (8, 32 << 10), (64, 2 << 10))


def measure_point(gpu: Gpu, pools: list[Pool], batch: int, context: int) -> tuple[float, float]:
    """Seconds a layer, block-major and layer-major."""
    pool = pools[0]
    step = make_step(gpu, pool.shape, [context] * batch, pool.num_blocks)
    layers = [layer for layer in READ if layer < pool.layers]

    def attend(pool: Pool) -> None:
        for layer in layers:
            decode(pool, step, layer)

    blocks, planes = gpu.interleave([lambda: attend(pools[0]), lambda: attend(pools[1])], 2.0)
    return blocks.median / len(layers), planes.median / len(layers)


def make_pools(gpu: Gpu, shape: Shape) -> list[Pool]:
    """The same memory, block-major and layer-major."""
    layers = 2 if gpu.dry else LAYERS
    most = 24 * layers * shape.block_bytes if gpu.dry else POOL_BYTES
    room = min(most, gpu.free_bytes() * 9 // 10)
    pool = Pool(gpu, shape, room // (layers * shape.block_bytes), layers)
    return [pool, pool.layer_major()]


def measure(setting: Setting) -> Report:
    gpu, budget = setting.gpu, setting.budget
    shape = shapes(dry=gpu.dry)[0]
    pools = make_pools(gpu, shape)
    for pool in pools:
        check_decode(pool, make_step(gpu, shape, (33, 50), pool.num_blocks), pool.layers - 1)
    rows: list[list[object]] = [["batch", "context", "block-major us", "layer-major us", "loss %"]]
    losses = []
    points = ((2, 40),) if gpu.dry else POINTS
    for batch, context in budget.walk(points, lambda _: 3.0):
        if batch * blocks_of(context, shape.block_size) > pools[0].num_blocks:
            budget.drop((batch, context), f"the pool has {pools[0].num_blocks} blocks")
            continue
        ours, theirs = measure_point(gpu, pools, batch, context)
        losses.append(100 * (ours / theirs - 1))
        rows.append([str(batch), str(context), 1e6 * ours, 1e6 * theirs, losses[-1]])
    gib = pools[0].nbytes / (1 << 30)
    figures = {"layout_pool_gib": gib} | ({"layout_loss": max(losses)} if losses else {})
    return Report(figures, {} if losses else {"layout_loss": "no point fits"}, rows)


if __name__ == "__main__":
    run_part("layout", __doc__, measure)
