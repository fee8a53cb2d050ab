"""Compile the kernels ahead of time for one architecture and report on the machine code.

A program of its own, run without Triton's interpreter: `python tests/kernels/aot.py 90`. Needs no
GPU. Compiles what the launchers would launch for each model below and prints one JSON object,
`"kernel/head_dim"` to its report.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtier.kernels import configs, paged_decode, paged_prefill, rope_write, shared_decode, write_kv

BLOCK_SIZE = 16
MODELS = [(32, 8, 128), (7, 1, 80)]
"""(heads, kv_heads, head_dim): Llama-3-8B and an odd one."""

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
}
"""Every other pointer is to bf16."""


def argument_type(name: str) -> str:
    if name.endswith("_ptr"):
        return POINTERS.get(name, "*bf16")
    return "fp32" if name == "scale_log2" else "i32"


def report(kernel: Any, constants: dict[str, Any], options: dict[str, Any], arch: int) -> Any:
    """Compile one kernel; count what matters in its PTX, and read the stack from its cubin."""
    names: list[str] = kernel.arg_names
    signature = {name: "constexpr" if name in constants else argument_type(name) for name in names}
    # What the launcher finds at run time: pointers and strides divisible by 16. Without it there
    # are no vector loads.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name not in constants and name.endswith(("_ptr", "stride"))
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    usage = resource_usage(cubin)
    return {
        "cubin_bytes": len(cubin),
        "registers": usage["REG"],
        "stack": usage["STACK"],
        "shared": compiled.metadata.shared,
        "mma": len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx)),
        "wide_loads": len(re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\.cg\S* .*0x10", ptx)),
    }


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes of a cubin. Spills show in the stack, not in the registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}


def main(arch: int) -> None:
    reports = {}
    for heads, kv_heads, head_dim in MODELS:
        model = (heads, kv_heads, head_dim, BLOCK_SIZE)
        decode = configs.lookup("paged_decode", arch, torch.bfloat16, head_dim)
        prefill = configs.lookup("paged_prefill", arch, torch.bfloat16, head_dim)
        shared = configs.lookup("shared_decode", arch, torch.bfloat16, head_dim)
        unscaled = {"key_scale_ptr": None, "value_scale_ptr": None}
        builds: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
            "write_kv": (
                write_kv.write_kv_kernel,
                write_kv.write_kv_constants(kv_heads, head_dim, BLOCK_SIZE),
                write_kv.OPTIONS,
            ),
            "rope_write": (
                rope_write.rope_write_kernel,
                rope_write.rope_write_constants(*model, fp8=False, scaled=False),
                rope_write.OPTIONS,
            ),
            "paged_decode": (
                paged_decode.paged_decode_kernel,
                paged_decode.decode_constants(*model, launch=decode) | unscaled,
                decode.options,
            ),
            "shared_decode": (
                shared_decode.shared_decode_kernel,
                shared_decode.shared_constants(*model, launch=shared) | unscaled,
                shared.options,
            ),
            "paged_prefill": (
                paged_prefill.paged_prefill_kernel,
                paged_prefill.prefill_constants(*model, seqs=5, launch=prefill) | unscaled,
                prefill.options,
            ),
        }
        for name, (kernel, constants, options) in builds.items():
            reports[f"{name}/{head_dim}"] = report(kernel, constants, options, arch)
    sys.stdout.write(json.dumps(reports) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
