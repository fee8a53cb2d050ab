"""Every model shape, block size and dtype that the issue of attention names, for stress runs."""

from itertools import product

from tests.kernels.cases import STORED, Shape

HEADS = [(1, 1), (9, 3), (32, 8), (64, 8)]
HEAD_DIMS = [64, 80, 96, 128, 256]
BLOCK_SIZES = [16, 32, 64]

MATRIX = [
    (Shape(heads, kv_heads, head_dim, block_size), *stored)
    for (heads, kv_heads), head_dim, block_size, stored in product(
        HEADS, HEAD_DIMS, BLOCK_SIZES, STORED[:4]
    )
]
"""(shape, dtype of queries, dtype of the pool): 240."""
