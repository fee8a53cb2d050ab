"""The model behind the static report, and that each part of its budget can be broken."""

from dataclasses import replace

import pytest
import torch

from bench.kernels_compile import Code
from bench.kernels_roofline import MACHINES, buffered, decode_roofline, occupancy
from bench.kernels_static import INTENDED, attention, judged, launches, writing
from kvtier.kernels import configs

GOOD = Code(registers=111, stack=0, shared=71712, mma=32, wide_loads=34, cubin_bytes=1)


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs"),
    [
        (32, 0, 1, 32),  # programs an SM
        (32, 0, 4, 16),  # warps
        (128, 0, 4, 4),  # registers: 4,096 a warp, four warps a partition
        (129, 0, 4, 3),  # a register more takes a whole unit more
        (255, 0, 8, 1),
        (255, 0, 16, 0),
        (32, 75 << 10, 4, 3),  # shared memory: 76 KB with the system's
        (32, (75 << 10) + 1, 4, 2),
        (32, 227 << 10, 4, 1),
        (32, 228 << 10, 4, 0),
    ],
)
def test_occupancy_is_the_least_that_any_resource_allows(
    registers: int, shared: int, warps: int, programs: int
) -> None:
    assert occupancy(MACHINES[90], registers, shared, warps) == programs


def test_half_of_the_stages_hold_tiles() -> None:
    assert [buffered(stages) for stages in (1, 2, 3, 4, 5, 6, 7)] == [1, 1, 1, 1, 2, 2, 3]


def test_the_share_is_what_is_in_flight_over_what_little_asks_for_or_the_balance() -> None:
    machine = MACHINES[90]
    few = decode_roofline(machine, programs=1, stages=3, tile_bytes=8192, flops=1.0, tensor=True)
    assert few.in_flight == 4096
    assert few.share == pytest.approx(4096 * 132 / (4.8e12 * 0.65e-6))
    many = decode_roofline(
        machine, programs=1, stages=3, tile_bytes=1 << 20, flops=1.0, tensor=True
    )
    assert many.share == 1
    busy = decode_roofline(
        machine, programs=9, stages=5, tile_bytes=1 << 20, flops=(1 << 20) * 28, tensor=False
    )
    assert busy.share == pytest.approx(67e12 / 4.8e12 / 28)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stack": 8}, "8 bytes of stack"),
        ({"registers": 255}, ""),  # two programs of four warps
        ({"shared": 200 << 10}, "1 programs an SM, want 2"),
        ({"wide_loads": 0}, "no 16-byte loads"),
        ({"mma": 0}, "no tensor cores"),
        ({"shared": 39168}, "39168 bytes hold fewer tiles than 5 stages promise"),
    ],
)
def test_each_part_of_the_budget_is_noticed(change: dict[str, int], message: str) -> None:
    launch = attention("paged_decode", 90, torch.bfloat16, 32, 8, 128)
    assert judged(launch, GOOD).broken == ()
    assert judged(launch, replace(GOOD, **change)).broken == ((message,) if message else ())


def test_too_little_in_flight_is_noticed() -> None:
    launch = attention("paged_decode", 100, torch.bfloat16, 32, 8, 64)
    assert launch.row is not None
    starved = replace(launch, row=replace(launch.row, tile=16, stages=3))
    (broken,) = judged(starved, replace(GOOD, shared=32 << 10, registers=128)).broken
    assert broken.startswith("predicted share 0.")


def test_float32_needs_no_tensor_cores_and_small_kernels_no_tile() -> None:
    wide = attention("paged_prefill", 90, torch.float32, 32, 8, 128)
    assert judged(wide, replace(GOOD, mma=0)).broken == ()
    small = replace(GOOD, mma=0, shared=0, registers=60)
    assert judged(writing("rope_write", 80, torch.bfloat16, 7, 1, 80), small).broken == ()


def test_the_report_covers_every_row_of_the_table() -> None:
    covered = {
        (each.kernel, each.architecture, each.dtype.itemsize, each.head_dim)
        for each in launches(quick=False)
        if each.in_table
    }
    assert covered == {(*key, head) for key in configs.TABLE for head in configs.HEAD_DIMS}
    assert {each.kernel for each in launches(quick=True)} == set(INTENDED)
