"""Every launch of the shipped table compiled for sm_80, sm_90 and sm_100, and judged without a GPU.

What bounds a kernel is partly decided before it runs: registers, stack and shared memory say how
many programs fit an SM, and with the bytes each of them has in flight what share of the read
bandwidth decode can draw at best (`bench.kernels_roofline`, which is a model and no measurement).
Llama-3-8B's 32 heads on 8, blocks of 16, one head size for each class of the table, plus the
smaller kernels and an odd model. The budget, which every launch must keep:

- no stack: no register is spilled to memory;
- as many programs on an SM as INTENDED says;
- 16-byte accesses, and tensor-core instructions in attention on 16-bit and FP8 pools;
- decode's shared memory holds the tiles that its stages promise, so that they are in flight;
- decode's predicted share of the peak read bandwidth is at least SHARE.

    python -m bench.kernels_static [--quick]

The whole takes minutes; `--quick` is sm_90 at a head size of 128 and the odd model. Exits 1 if a
launch breaks the budget.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.harness import emit, note, table
from bench.kernels_compile import Build, Code, compiled
from bench.kernels_roofline import MACHINES, Roofline, buffered, decode_roofline, occupancy
from kvtier.kernels import (
    block_copy,
    configs,
    paged_decode,
    paged_prefill,
    rope_write,
    shared_decode,
    write_kv,
)

HEADS, KV_HEADS, BLOCK_SIZE = 32, 8, 16
ODD = (7, 1, 80)
"""(heads, kv_heads, head_dim): a group and a head size that are no powers of two."""

DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)
POOL_TYPES = {torch.float8_e4m3fn: "u8", torch.bfloat16: "bf16", torch.float32: "fp32"}

INTENDED = {
    "paged_decode": 2,
    "shared_decode": 1,
    "paged_prefill": 1,
    "rope_write": 16,
    "write_kv": 16,
    "block_copy": 8,
}
"""Programs that must fit an SM. One of attention's may be all there is where it reads ahead by
itself; decode also hides a program's end behind another."""

SHARE = 0.9
"""Of the peak read bandwidth, for decode: the design's target."""


@dataclass(frozen=True)
class Launch:
    """One kernel for one architecture and model. `row` is None for kernels without a table."""

    kernel: str
    architecture: int
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    row: configs.Launch | None
    build: Build

    @property
    def name(self) -> str:
        model = f"{self.heads}/{self.kv_heads} x {self.head_dim}"
        return f"{self.kernel} sm_{self.architecture} {POOL_TYPES[self.dtype]} {model}"

    @property
    def in_table(self) -> bool:
        return self.row is not None and self.head_dim in configs.HEAD_DIMS


@dataclass(frozen=True)
class Verdict:
    """What was found; `broken` names each part of the budget that is not kept."""

    launch: Launch
    code: Code
    programs: int
    roofline: Roofline | None
    broken: tuple[str, ...]


def attention(
    kernel: str, architecture: int, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> Launch:
    """One of the kernels that the table has rows for, with its row."""
    row = configs.lookup(kernel, architecture, dtype, head_dim)
    model = (heads, kv_heads, head_dim, BLOCK_SIZE)
    constants: dict[str, Any]
    if kernel == "paged_decode":
        function, constants = (
            paged_decode.paged_decode_kernel,
            paged_decode.decode_constants(*model, launch=row),
        )
    elif kernel == "shared_decode":
        function, constants = (
            shared_decode.shared_decode_kernel,
            shared_decode.shared_constants(*model, launch=row),
        )
    else:
        function, constants = (
            paged_prefill.paged_prefill_kernel,
            paged_prefill.prefill_constants(*model, seqs=5, launch=row),
        )
    if dtype != torch.float8_e4m3fn:
        constants = constants | {"key_scale_ptr": None, "value_scale_ptr": None}
    build = Build(function, constants, row.options, data_type(dtype), POOL_TYPES[dtype])
    return Launch(kernel, architecture, dtype, heads, kv_heads, head_dim, row, build)


def writing(
    kernel: str, architecture: int, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> Launch:
    """One of the kernels whose launch is the same everywhere."""
    options: dict[str, Any]
    function: Any
    if kernel == "rope_write":
        fp8 = dtype == torch.float8_e4m3fn
        constants = rope_write.rope_write_constants(
            heads, kv_heads, head_dim, BLOCK_SIZE, fp8=fp8, scaled=fp8
        )
        function, options = rope_write.rope_write_kernel, rope_write.OPTIONS
    elif kernel == "write_kv":
        constants = write_kv.write_kv_constants(kv_heads, head_dim, BLOCK_SIZE)
        function, options = write_kv.write_kv_kernel, write_kv.OPTIONS
    else:
        token_bytes = head_dim * dtype.itemsize
        constants = block_copy.block_copy_constants(
            2 * kv_heads * BLOCK_SIZE * token_bytes, BLOCK_SIZE, token_bytes, partial=True
        )
        function, options = block_copy.block_copy_kernel, block_copy.OPTIONS
    build = Build(function, constants, options, data_type(dtype), POOL_TYPES[dtype])
    return Launch(kernel, architecture, dtype, heads, kv_heads, head_dim, None, build)


def data_type(dtype: torch.dtype) -> str:
    """Triton's type of queries beside a pool of `dtype`."""
    return "fp32" if dtype == torch.float32 else "bf16"


def launches(*, quick: bool) -> Iterator[Launch]:
    """All of the table's, then the smaller kernels', then an odd model's."""
    architectures = (90,) if quick else configs.ARCHITECTURES
    head_dims = (128,) if quick else configs.HEAD_DIMS
    dtypes = DTYPES[:2] if quick else DTYPES
    kernels = sorted({kernel for kernel, _, _ in configs.TABLE})
    for architecture in architectures:
        for dtype in dtypes:
            for head_dim in head_dims:
                for kernel in kernels:
                    yield attention(kernel, architecture, dtype, HEADS, KV_HEADS, head_dim)
                yield writing("rope_write", architecture, dtype, HEADS, KV_HEADS, head_dim)
        half = torch.bfloat16
        for kernel in ("write_kv", "block_copy"):
            yield writing(kernel, architecture, half, HEADS, KV_HEADS, 128)
        for kernel in kernels:
            yield attention(kernel, architecture, half, *ODD)
        for kernel in ("rope_write", "block_copy"):
            yield writing(kernel, architecture, half, *ODD)


def judged(launch: Launch, code: Code) -> Verdict:
    machine, row = MACHINES[launch.architecture], launch.row
    programs = occupancy(machine, code.registers, code.shared, launch.build.options["num_warps"])
    broken = []
    if code.stack:
        broken.append(f"{code.stack} bytes of stack")
    if programs < INTENDED[launch.kernel]:
        broken.append(f"{programs} programs an SM, want {INTENDED[launch.kernel]}")
    if not code.wide_loads:
        broken.append("no 16-byte loads")
    if row is not None and launch.dtype.itemsize < 4 and not code.mma:
        broken.append("no tensor cores")
    roofline = None
    if row is not None and launch.kernel == "paged_decode":
        # Padded dimensions are computed with, but not read.
        constants = launch.build.constants
        tile_bytes = 2 * row.tile * launch.head_dim * launch.dtype.itemsize
        flops = 4.0 * constants["ROWS"] * row.tile * constants["HEAD_DIM_PADDED"]
        roofline = decode_roofline(
            machine,
            programs=programs,
            stages=row.stages,
            tile_bytes=tile_bytes,
            flops=flops,
            tensor=launch.dtype.itemsize < 4,
        )
        if code.shared < buffered(row.stages) * tile_bytes:
            broken.append(f"{code.shared} bytes hold fewer tiles than {row.stages} stages promise")
        if launch.in_table and roofline.share < SHARE:
            broken.append(f"predicted share {roofline.share:.2f}, want {SHARE}")
    return Verdict(launch, code, programs, roofline, tuple(broken))


def row_of(verdict: Verdict) -> dict[str, object]:
    """One launch for the JSON line. Bytes; `share` of the peak read bandwidth, a model's."""
    launch, roofline = verdict.launch, verdict.roofline
    sizes = {} if launch.row is None else asdict(launch.row)
    return {
        "name": launch.name,
        **sizes,
        **asdict(verdict.code),
        "programs": verdict.programs,
        "in_flight": None if roofline is None else round(roofline.in_flight),
        "flop_per_byte": None if roofline is None else round(roofline.intensity, 1),
        "share": None if roofline is None else round(roofline.share, 3),
        "broken": list(verdict.broken),
    }


def show(verdicts: list[Verdict]) -> None:
    heading = ("launch", "tile", "warps", "stages", "regs", "shared", "an SM", "in flight", "share")
    rows: list[tuple[object, ...]] = [heading]
    for each in verdicts:
        row, line = each.launch.row, each.roofline
        sizes = ("", "", "") if row is None else (str(row.tile), str(row.warps), str(row.stages))
        drawn = ("", "") if line is None else (f"{line.in_flight / 1024:.0f} KB", line.share)
        code = (str(each.code.registers), str(each.code.shared), str(each.programs))
        rows.append((each.launch.name, *sizes, *code, *drawn))
    table(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="sm_90, head size 128, an odd model")
    quick = parser.parse_args().quick
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("bench.kernels_static: TRITON_INTERPRET is set; unset it, this compiles")
    verdicts = []
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TRITON_CACHE_DIR"] = directory
        for launch in launches(quick=quick):
            note(launch.name)
            verdicts.append(judged(launch, compiled(launch.build, launch.architecture)))
    show(verdicts)
    for each in verdicts:
        for what in each.broken:
            print(f"BROKEN {each.launch.name}: {what}")
    shares = [v.roofline.share for v in verdicts if v.roofline is not None and v.launch.in_table]
    emit(
        {
            "bench": "kernels_static",
            "configs": sum(each.launch.in_table for each in verdicts),
            "archs": sorted({each.launch.architecture for each in verdicts}),
            "spills": sum(each.code.stack > 0 for each in verdicts),
            "max_regs": max(each.code.registers for each in verdicts),
            "max_shared": max(each.code.shared for each in verdicts),
            "worst_predicted_bw_share": round(min(shares), 3),
            "broken": sum(bool(each.broken) for each in verdicts),
            "launches": [row_of(each) for each in verdicts],
        }
    )
    return 1 if any(each.broken for each in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
