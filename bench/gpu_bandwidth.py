"""The two limits that GPU figures are shares of: reading device memory, and the host link.

Reading is a Triton kernel that loads and adds and stores one number a program, so that nothing but
loads is in its way; the best of a few grids counts. A vendor's figure is a peak that nothing
reaches. The link is plain asynchronous copies of page-locked memory, one way and both ways at once.

    python -m bench.gpu_bandwidth [--budget SECONDS] [--dry]
"""

# mypy: allow-untyped-decorators

import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.gpu import Gpu
from bench.gpu_part import Report, Setting, run_part

READ_BYTES = 4 << 30
LINK_BYTES = 1 << 30
DRY_BYTES = 1 << 16
TILE = 4096
"""Int32 elements a program loads at once: 16 KiB, 32 of 128 bytes a warp of four."""


@triton.jit
def read_kernel(
    sums_ptr: tl.tensor, data_ptr: tl.tensor, rounds: tl.tensor, TILE: tl.constexpr
) -> None:
    """`sums[p] = sum of data[(r * programs + p) * TILE + i]` over rounds r and i, wrapping."""
    lanes = tl.arange(0, TILE)
    total = tl.zeros([TILE], dtype=tl.int32)
    program = tl.program_id(0).to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64) * TILE
    place = program * TILE
    for _ in range(rounds):
        total += tl.load(data_ptr + place + lanes, eviction_policy="evict_first")
        place += stride
    tl.store(sums_ptr + program, tl.sum(total))


def read_all(data: Tensor, programs: int) -> Tensor:
    """The programs' sums of int32 `data`, whose length is a multiple of `programs * TILE`."""
    sums = torch.empty(programs, dtype=torch.int32, device=data.device)
    rounds = len(data) // (programs * TILE)
    read_kernel[(programs,)](sums, data, rounds, TILE=TILE, num_warps=4, num_stages=4)
    return sums


def measure_read(gpu: Gpu, seconds: float = 1.0) -> tuple[float, int]:
    """GB/s of the fastest grid, and that grid. Raises RuntimeError if the sums are wrong."""
    nbytes = min(READ_BYTES, gpu.free_bytes() // 2)
    grids = [2] if gpu.dry else [1024, 2048, 4096, 8192]
    whole = grids[-1] * TILE * 4
    nbytes = 2 * whole if gpu.dry else nbytes // whole * whole
    data = torch.randint(-(1 << 30), 1 << 30, (nbytes // 4,), dtype=torch.int32, device=gpu.device)
    for grid in grids:
        # In 32-bit numbers that wrap, whatever the order.
        got, want = int(read_all(data, grid).sum().item()), int(data.sum().item())
        if (got - want) % (1 << 32):
            raise RuntimeError(f"reading with {grid} programs lost something: {got}, want {want}")
    calls: list[Callable[[], object]] = [lambda grid=grid: read_all(data, grid) for grid in grids]  # type: ignore[misc]
    rates = [nbytes / each.median / 1e9 for each in gpu.interleave(calls, seconds)]
    best = max(range(len(grids)), key=rates.__getitem__)
    return rates[best], grids[best]


def measure_link(gpu: Gpu, repeats: int) -> dict[str, float]:
    """GB/s of page-locked copies by direction; "both" is the sum of two at once."""
    nbytes = DRY_BYTES if gpu.dry else LINK_BYTES
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=not gpu.dry) for _ in range(2)]
    on_card = [torch.empty(nbytes, dtype=torch.uint8, device=gpu.device) for _ in range(2)]
    for host in hosts:
        host.view(-1, 256)[:] = torch.arange(256, dtype=torch.uint8)

    def up() -> None:
        on_card[0].copy_(hosts[0], non_blocking=True)

    def down() -> None:
        hosts[1].copy_(on_card[1], non_blocking=True)

    ways = {"up": [up], "down": [down], "both": [up, down]}
    best = dict.fromkeys(ways, 0.0)
    for turn in range(repeats + 1):
        for name, jobs in ways.items():
            begin = time.perf_counter()
            gpu.together(jobs)
            rate = len(jobs) * nbytes / (time.perf_counter() - begin) / 1e9
            if turn:  # the first one makes streams
                best[name] = max(best[name], rate)
    return best


def measure(setting: Setting) -> Report:
    gpu = setting.gpu
    read, grid = measure_read(gpu)
    link = measure_link(gpu, 1 if gpu.dry else 8)
    rows: list[list[object]] = [["what", "GB/s"], [f"read, {grid} programs", read]]
    rows += [[f"pinned memcpy, {way}", rate] for way, rate in link.items()]
    figures = {"read_gb_s": read} | {f"pinned_{way}_gb_s": rate for way, rate in link.items()}
    return Report(figures, rows=rows, notes={"grid": grid})


if __name__ == "__main__":
    run_part("bandwidth", __doc__, measure)
