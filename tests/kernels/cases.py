"""Paged attention cases whose pool is NaN wherever a kernel must not read."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 3e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
"""Largest difference from float64 of attention over unit normal values, absolute and relative."""

FP8 = torch.float8_e4m3fn

OUT_OF_RANGE = 1 << 30
"""A block id that no pool has."""


@dataclass(frozen=True)
class Shape:
    """A model's attention shape and a block size."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


SHAPES = [
    Shape(9, 3, 64, 16),
    Shape(8, 2, 80, 16),
    Shape(3, 3, 80, 32),
    Shape(7, 1, 64, 32),
    Shape(5, 1, 24, 7),
]

SHAPES_AND_DTYPES = [
    *((shape, torch.float32) for shape in SHAPES),
    *((shape, torch.float16) for shape in (SHAPES[1], SHAPES[4])),
]
"""What the interpreter runs by default: it takes 5 ms a loop iteration."""

STORED = [
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, FP8),
    (torch.bfloat16, FP8),
    (torch.float32, FP8),
]
"""(dtype of queries, dtype of the pool)."""


@dataclass(frozen=True)
class Case:
    """Arguments of one call; `pool` is `[num_blocks, 2, 2, kv_heads, block_size, head_dim]`."""

    shape: Shape
    pool: Tensor
    query: Tensor
    block_tables: Tensor
    context_lens: Tensor
    query_starts: Tensor
    query_lens: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def scales(self) -> dict[str, Tensor | None]:
        return {"key_scale": self.key_scale, "value_scale": self.value_scale}

    @property
    def key_pool(self) -> Tensor:
        return self.pool[:, 1, 0]

    @property
    def value_pool(self) -> Tensor:
        return self.pool[:, 1, 1]

    def doubled(self) -> "Case":
        """The same case in float64 on the CPU, scaled: what the reference is asked."""
        pool = self.pool.cpu().double()
        for which, scale in ((0, self.key_scale), (1, self.value_scale)):
            if scale is not None:
                pool[:, :, which] *= scale.cpu().double()[:, None, None]
        return Case(
            self.shape,
            pool,
            self.query.cpu().double(),
            self.block_tables.cpu(),
            self.context_lens.cpu(),
            self.query_starts.cpu(),
            self.query_lens.cpu(),
        )


def make_case(
    shape: Shape,
    contexts: Sequence[int],
    *,
    queries: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    spare_columns: int = 1,
    seed: int = 0,
) -> Case:
    """Sequences with these context lengths in randomly placed blocks of layer 1.

    `queries` counts each sequence's query rows (one each without it); their row ranges follow one
    another in reversed order of the sequences, with one row between them that nobody owns. The pool
    is of `kv_dtype`, or of `dtype`; one of e4m3 has scales.
    Everything but the contexts' own positions is NaN, layer 0 too; padding entries of the tables
    point at a block of NaN or at none.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // shape.block_size) for context in contexts]
    num_blocks = sum(counts) + 3
    kv_dtype = kv_dtype or dtype
    size = (num_blocks, 2, 2, shape.kv_heads, shape.block_size, shape.head_dim)
    pool = torch.full(size, torch.nan, dtype=torch.float64).to(kv_dtype)
    order = torch.randperm(num_blocks, generator=generator)
    nan_block, free = int(order[0]), order[1:].tolist()
    width = max([*counts, 1]) + spare_columns
    tables = torch.full((len(contexts), width), nan_block, dtype=torch.int32)
    tables[:, 1::2] = OUT_OF_RANGE
    for seq, context in enumerate(contexts):
        for column in range(counts[seq]):
            block = free.pop()
            tables[seq, column] = block
            used = min(shape.block_size, context - column * shape.block_size)
            content = torch.randn((2, shape.kv_heads, used, shape.head_dim), generator=generator)
            pool[block, 1, :, :, :used] = content.to(kv_dtype)
    starts, rows = [0] * len(contexts), 0
    if queries is None:
        starts, rows = list(range(len(contexts))), len(contexts)
    else:
        for seq in reversed(range(len(contexts))):
            starts[seq] = rows
            rows += queries[seq] + 1
    query = torch.randn((rows, shape.heads, shape.head_dim), generator=generator).to(dtype)
    lens = [1] * len(contexts) if queries is None else list(queries)
    return Case(
        shape,
        pool.to(device),
        query.to(device),
        tables.to(device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(lens, dtype=torch.int32, device=device),
        *(
            [torch.rand(shape.kv_heads, generator=generator).add(0.5).to(device) for _ in range(2)]
            if kv_dtype == FP8
            else []
        ),
    )


def assert_near(got: Tensor, want: Tensor, *, dtype: torch.dtype | None = None) -> None:
    """`got` agrees with the float64 `want` within its dtype's tolerance, NaN nowhere."""
    bound = TOLERANCE[dtype or got.dtype]
    torch.testing.assert_close(got.cpu().double(), want.double(), atol=bound, rtol=bound)
