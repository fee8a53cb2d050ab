"""The shipped table of launch sizes. Knows kernels and architectures by name, and no tensors.

A row is chosen by kernel, architecture, bytes of a stored element and head size: by the model and
the machine, never by the batch, because tile, warps and split order the sums and so make the bits.
Nothing is tuned at run time.

How the sizes were reasoned (no GPU was at hand; the GPU suite may replace any row). Decode is bound
by memory: it needs bandwidth x latency bytes in flight, which is 11 KB an SM on sm_80 (2.0 TB/s x
0.6 us / 108), 24 KB on sm_90 (4.8 x 0.65 / 132) and 38 KB on sm_100 (8 x 0.7 / 148). A tile of
`tile` positions is `2 * tile * head_dim * bytes` of K and V. Triton's pipeline gives half of
`stages - 1` to the block table's load and half to K and V, whose addresses hang on it: 3 and 4
stages hold one tile, so that a program waits for each; 5 hold two and 7 three. So 64 positions of
128 in bf16 at 5 stages are 64 KB a program, of which two or three fit an SM (163 KB of shared
memory on sm_80, 227 above). Tiles shrink as rows of K grow (256 wide, float32), and stages grow as
they shrink (FP8). Prefill is bound by arithmetic: as many query rows as leave room for the running
sums in registers, since rows share every tile. A shared prefix takes the rows of several sequences
at decode's tile. All rows compile for their architecture without spills at groups of four heads.
"""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Launch:
    """One row of the table.

    tile: positions a loop step reads. rows: query rows of one `tl.dot`; a decode launch has more
    where one KV head's group has more. split: positions one decode program reads at most, counted
    from position 0. warps, stages: of one program. Raises ValueError unless tile and rows are
    powers of two from 16 and split a power of two from tile.
    """

    tile: int
    warps: int
    stages: int
    rows: int = 16
    split: int = 512

    def __post_init__(self) -> None:
        for name, value, least in (
            ("tile", self.tile, 16),
            ("rows", self.rows, 16),
            ("split", self.split, self.tile),
        ):
            if value < least or value & (value - 1):
                raise ValueError(f"{name}: want a power of two from {least}, got {value}")

    @property
    def options(self) -> dict[str, int | bool]:
        """Triton's launch options. Fusion is named because Triton's default changes between
        releases, and bits with it."""
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,
        }


HEAD_DIMS = (64, 128, 256)
"""Classes of head size: a head belongs to the first that holds it."""

ARCHITECTURES = (80, 90, 100)
"""Compute capability times ten. Others take the nearest below, or the first."""

TABLE: dict[tuple[str, int, int], tuple[Launch, Launch, Launch]] = {
    # (kernel, architecture, bytes of an element): one row for each of HEAD_DIMS
    ("paged_decode", 80, 1): (Launch(64, 4, 5), Launch(64, 4, 5), Launch(32, 4, 5)),
    ("paged_decode", 80, 2): (Launch(64, 4, 5), Launch(64, 4, 5), Launch(32, 4, 5)),
    ("paged_decode", 80, 4): (Launch(32, 4, 5), Launch(16, 4, 5), Launch(16, 8, 3)),
    ("paged_decode", 90, 1): (Launch(64, 4, 7), Launch(64, 4, 7), Launch(32, 4, 7)),
    ("paged_decode", 90, 2): (Launch(64, 4, 5), Launch(64, 4, 5), Launch(32, 4, 5)),
    ("paged_decode", 90, 4): (Launch(32, 4, 5), Launch(16, 4, 5), Launch(16, 4, 5)),
    ("paged_decode", 100, 1): (Launch(64, 4, 7), Launch(64, 4, 7), Launch(32, 4, 7)),
    ("paged_decode", 100, 2): (Launch(64, 4, 5), Launch(64, 4, 5), Launch(32, 4, 5)),
    ("paged_decode", 100, 4): (Launch(32, 4, 5), Launch(16, 4, 5), Launch(16, 4, 5)),
    ("shared_decode", 80, 1): (Launch(64, 4, 5, 64), Launch(64, 8, 5, 32), Launch(32, 4, 5, 32)),
    ("shared_decode", 80, 2): (Launch(64, 4, 5, 64), Launch(64, 4, 5, 32), Launch(32, 4, 5, 32)),
    ("shared_decode", 80, 4): (Launch(32, 4, 5), Launch(16, 4, 5), Launch(16, 4, 5)),
    ("shared_decode", 90, 1): (Launch(64, 4, 5, 64), Launch(64, 4, 5, 64), Launch(32, 4, 5, 64)),
    ("shared_decode", 90, 2): (Launch(64, 4, 5, 64), Launch(64, 4, 5, 64), Launch(32, 4, 5, 64)),
    ("shared_decode", 90, 4): (Launch(32, 4, 5), Launch(16, 4, 5), Launch(16, 4, 5)),
    ("shared_decode", 100, 1): (Launch(64, 4, 5, 64), Launch(64, 4, 5, 64), Launch(32, 4, 5, 64)),
    ("shared_decode", 100, 2): (Launch(64, 4, 5, 64), Launch(64, 4, 5, 64), Launch(32, 4, 5, 32)),
    ("shared_decode", 100, 4): (Launch(32, 4, 5), Launch(16, 4, 5), Launch(16, 4, 5)),
    ("paged_prefill", 80, 1): (Launch(64, 8, 5, 128), Launch(32, 8, 5, 128), Launch(32, 8, 5, 64)),
    ("paged_prefill", 80, 2): (Launch(64, 8, 5, 128), Launch(32, 8, 5, 128), Launch(32, 8, 5, 64)),
    ("paged_prefill", 80, 4): (Launch(32, 8, 3, 64), Launch(16, 8, 3, 64), Launch(16, 8, 3, 32)),
    ("paged_prefill", 90, 1): (Launch(64, 8, 5, 128), Launch(64, 8, 5, 128), Launch(32, 8, 5, 64)),
    ("paged_prefill", 90, 2): (Launch(64, 8, 5, 128), Launch(64, 8, 5, 128), Launch(32, 8, 5, 64)),
    ("paged_prefill", 90, 4): (Launch(32, 8, 3, 64), Launch(16, 8, 3, 64), Launch(16, 8, 3, 32)),
    ("paged_prefill", 100, 1): (Launch(64, 8, 5, 128), Launch(64, 8, 5, 128), Launch(32, 8, 5, 64)),
    ("paged_prefill", 100, 2): (Launch(64, 8, 5, 128), Launch(64, 8, 5, 128), Launch(32, 8, 5, 64)),
    ("paged_prefill", 100, 4): (Launch(32, 8, 3, 64), Launch(16, 8, 3, 64), Launch(16, 8, 3, 32)),
}


def lookup(kernel: str, architecture: int, kv_dtype: torch.dtype, head_dim: int) -> Launch:
    """The row for a kernel on this architecture (compute capability times ten).

    An architecture that the table lacks takes the nearest below it, or the lowest. Raises
    ValueError if no row holds the head or the element size.
    """
    known = max((a for a in ARCHITECTURES if a <= architecture), default=ARCHITECTURES[0])
    rows = TABLE.get((kernel, known, kv_dtype.itemsize))
    if rows is None:
        raise ValueError(f"{kernel}: no launch sizes for {kv_dtype}, want elements of 1, 2 or 4")
    for limit, row in zip(HEAD_DIMS, rows, strict=True):
        if head_dim <= limit:
            return row
    raise ValueError(f"{kernel}: head_dim {head_dim} given, want at most {HEAD_DIMS[-1]}")


@cache
def architecture(device: torch.device) -> int:
    """Compute capability times ten of a CUDA device; the lowest known for the interpreter."""
    if device.type != "cuda":
        return ARCHITECTURES[0]
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
