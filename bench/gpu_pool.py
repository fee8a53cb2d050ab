"""Paged K and V for the GPU's attention benches: pools, tables, and what a step must read.

One pool serves many grid points, each of which takes a random share of its blocks. Knows kernels'
arguments, not kernels.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu import Gpu, same_rows
from kvtier.kernels import reference
from kvtier.kernels.configs import Launch, architecture, lookup
from kvtier.kernels.paged_decode import count_splits, paged_decode
from kvtier.kernels.workspace import DecodeWorkspace

FILL_BYTES = 1 << 30


@dataclass(frozen=True)
class Shape:
    """One model's attention: heads, their KV heads, and the blocks these are kept in."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    @property
    def token_bytes(self) -> int:
        """K and V of one position in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """K and V of one block in one layer."""
        return self.block_size * self.token_bytes


def shapes(*, dry: bool) -> tuple[Shape, Shape]:
    """Llama 8B's heads and 70B's on one card: groups of 4 and of 8."""
    if dry:  # the interpreter has no bf16 of its own
        return Shape(4, 1, 16, 16, torch.float16), Shape(8, 1, 16, 16, torch.float16)
    return Shape(32, 8, 128, 16), Shape(64, 8, 128, 16)


def decode_bytes(shape: Shape, contexts: Sequence[int]) -> int:
    """K and V that one decode step of one layer cannot do without; queries are not worth counting.

    A shared prefix counts for each of its sequences: what a plain kernel needs.
    """
    return sum(contexts) * shape.token_bytes


def prefill_flops(shape: Shape, contexts: Sequence[int], chunk: int) -> float:
    """Multiplications and additions of `chunk` causal queries at the end of each context."""
    seen = sum(chunk * (context - chunk) + chunk * (chunk + 1) / 2 for context in contexts)
    return 4 * shape.heads * shape.head_dim * seen


def blocks_of(context: int, block_size: int) -> int:
    return -(-context // block_size)


class Pool:
    """`keys`, `values`: one layer's `[num_blocks, kv_heads, block_size, head_dim]`, by strides.

    `[num_blocks, layers, 2, kv_heads, block_size, head_dim]`, one block after another.
    """

    def __init__(self, gpu: Gpu, shape: Shape, num_blocks: int, layers: int) -> None:
        size = (num_blocks, layers, 2, shape.kv_heads, shape.block_size, shape.head_dim)
        self.shape = shape
        self.num_blocks = num_blocks
        self.layers = layers
        self._block_major = True
        self.scale: Tensor | None = None  # of K and of V: static, one a head
        if shape.dtype.itemsize == 1:
            self.scale = torch.ones(shape.kv_heads, device=gpu.device)
        self._tensor = torch.empty(size, dtype=shape.dtype, device=gpu.device)
        fill(self._tensor)

    def seen_as(self, shape: Shape) -> "Pool":
        """The same memory for a model that differs in its query heads only."""
        other = copy(self)
        other.shape = shape
        return other

    def layer_major(self) -> "Pool":
        """The same memory with layer-major strides: other values in other places, as many."""
        other = copy(self)
        blocks, layers, sides, *inner = self._tensor.shape
        other._tensor = self._tensor.view(layers, sides, blocks, *inner)
        other._block_major = False
        return other

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    def keys(self, layer: int) -> Tensor:
        return self._side(layer, 0)

    def values(self, layer: int) -> Tensor:
        return self._side(layer, 1)

    def _side(self, layer: int, side: int) -> Tensor:
        return self._tensor[:, layer, side] if self._block_major else self._tensor[layer, side]


def fill(tensor: Tensor) -> None:
    """Unit normal values, a piece at a time; 8-bit floats by way of 16."""
    flat = tensor.view(-1)
    step = FILL_BYTES // tensor.element_size()
    for start in range(0, len(flat), step):
        piece = flat[start : start + step]
        if tensor.element_size() == 1:
            piece.copy_(torch.randn(len(piece), dtype=torch.float16, device=tensor.device))
        else:
            piece.normal_()


@dataclass(frozen=True)
class Step:
    """One decode step's arguments: query `[seqs, heads, head_dim]`, tables and lengths int32.

    `workspace` is there from the start, as in an engine.
    """

    query: Tensor
    tables: Tensor
    lens: Tensor
    contexts: tuple[int, ...]
    workspace: DecodeWorkspace


def make_step(
    gpu: Gpu,
    shape: Shape,
    contexts: Sequence[int],
    num_blocks: int,
    *,
    scattered: bool = True,
    query_dtype: torch.dtype | None = None,
) -> Step:
    """Sequences in blocks of their own, anywhere in the pool or one after another.

    Raises ValueError if the pool has too few.
    """
    counts = [blocks_of(context, shape.block_size) for context in contexts]
    if sum(counts) > num_blocks:
        raise ValueError(f"contexts: {sum(counts)} blocks wanted, the pool has {num_blocks}")
    order = torch.randperm(num_blocks) if scattered else torch.arange(num_blocks)
    tables = torch.zeros((len(contexts), max(counts)), dtype=torch.int32)
    used = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[used : used + count].to(torch.int32)
        used += count
    query = torch.randn((len(contexts), shape.heads, shape.head_dim), device=gpu.device)
    launch = lookup("paged_decode", architecture(gpu.device), shape.dtype, shape.head_dim)
    splits = count_splits(tables, shape.block_size, launch)
    return Step(
        query.to(query_dtype or shape.dtype),
        tables.to(gpu.device),
        torch.tensor(contexts, dtype=torch.int32, device=gpu.device),
        tuple(contexts),
        DecodeWorkspace(len(contexts), shape.heads, shape.head_dim, splits, gpu.device),
    )


def decode(pool: Pool, step: Step, layer: int = 0, *, launch: Launch | None = None) -> Tensor:
    """The kernel that is measured; with other sizes than the shipped ones if `launch` is given."""
    return paged_decode(
        step.query,
        pool.keys(layer),
        pool.values(layer),
        step.tables,
        step.lens,
        pool.shape.scale,
        key_scale=pool.scale,
        value_scale=pool.scale,
        # Made for the shipped sizes.
        workspace=step.workspace if launch is None else None,
        launch=launch,
    )


def check_decode(pool: Pool, step: Step, layer: int = 0) -> float:
    """`check_rows` of the kernel that is measured."""
    return check_rows(decode(pool, step, layer), pool, step, layer)


def check_rows(out: Tensor, pool: Pool, step: Step, layer: int = 0) -> float:
    """Largest difference of the first and the last sequence's rows from the reference.

    Raises RuntimeError if that is more than the dtype allows.
    """
    rows = [0, len(step.contexts) - 1]
    want = reference.paged_decode(
        step.query[rows],
        pool.keys(layer),
        pool.values(layer),
        step.tables[rows],
        step.lens[rows],
        pool.shape.scale,
        key_scale=pool.scale,
        value_scale=pool.scale,
    )
    return same_rows(out[rows], want, 2e-2)
