"""Compile a Triton kernel for an architecture that is not here, and read its machine code.

A part of `bench.kernels_static`. Needs no GPU; cannot compile where Triton interprets. Knows
kernels by their arguments' names, and nothing of models or launch tables.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    "partial_ptr": "*fp32",
    "weight_ptr": "*fp32",
    "cos_ptr": "*fp32",
    "sin_ptr": "*fp32",
    "key_scale_ptr": "*fp32",
    "value_scale_ptr": "*fp32",
    "slot_mapping_ptr": "*i64",
    "block_tables_ptr": "*i32",
    "context_lens_ptr": "*i32",
    "arrived_ptr": "*i32",
    "folded_lens_ptr": "*i32",
    "members_ptr": "*i32",
    "shared_lens_ptr": "*i32",
    "query_starts_ptr": "*i32",
    "query_lens_ptr": "*i32",
    "source_ptr": "*i32",
    "target_ptr": "*i32",
    "pairs_ptr": "*i32",
    "tokens_ptr": "*i32",
}
"""Pointers whose type is always the same."""


@dataclass(frozen=True)
class Build:
    """One kernel as a launcher would launch it.

    `data`, `pool`: Triton's types of the model's tensors ("bf16") and of the pools ("u8" for e4m3
    bytes). Constants may be None, for pointers that are not given.
    """

    kernel: Any
    constants: dict[str, Any]
    options: dict[str, Any]
    data: str
    pool: str


@dataclass(frozen=True)
class Code:
    """What the machine code takes and has. Bytes are a thread's (stack) or a program's (shared)."""

    registers: int
    stack: int
    shared: int
    mma: int
    wide_loads: int
    cubin_bytes: int


def compiled(build: Build, architecture: int) -> Code:
    """Compile for compute capability times ten; spills show as stack."""
    names: list[str] = build.kernel.arg_names
    signature = {name: _type(name, build) for name in names}
    # What the launcher finds at run time: pointers and strides divisible by 16. Without it there
    # are no vector loads.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name] != "constexpr" and name.endswith(("_ptr", "stride"))
    }
    places = {(names.index(name),): value for name, value in build.constants.items()}
    source = ASTSource(fn=build.kernel, signature=signature, constexprs=places, attrs=aligned)
    target = GPUTarget("cuda", architecture, 32)
    made = triton.compile(source, target=target, options=build.options)
    ptx, cubin = made.asm["ptx"], made.asm["cubin"]
    usage = _resource_usage(cubin)
    return Code(
        registers=usage["REG"],
        stack=usage["STACK"],
        shared=made.metadata.shared,
        mma=len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx)),
        wide_loads=len(re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\.cg\S* .*0x10", ptx)),
        cubin_bytes=len(cubin),
    )


def _type(name: str, build: Build) -> str:
    if name in build.constants:
        return "constexpr"
    if name in ("key_pool_ptr", "value_pool_ptr"):
        return f"*{build.pool}"
    if name.endswith("_ptr"):
        return POINTERS.get(name, f"*{build.data}")
    return "fp32" if name == "scale_log2" else "i32"


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes of a cubin. Spills show in the stack, not in the registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}
