"""What others make of the same decode step: torch's SDPA, FlashInfer, FlashAttention.

Each has K and V as it likes them best: SDPA and FlashAttention contiguous (no table to follow),
FlashInfer in pages of its own. A peer that is not installed, or refuses the step, is a reason and
not an error: its interfaces change, and none could be tried where this was written.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu import Gpu
from bench.gpu_pool import Pool, Step, blocks_of, fill

PEERS = {"flashinfer": "flashinfer", "flash_attn": "flash_attn"}
"""By the name in a figure: the module."""

WORKSPACE_BYTES = 256 << 20


class Dense:
    """Memory for contiguous K and V of any step that fits, filled once."""

    def __init__(self, pool: Pool, nbytes: int) -> None:
        shape = pool.shape
        self._shape = shape
        elements = nbytes // 2 // shape.dtype.itemsize
        self._side = torch.empty(elements, dtype=shape.dtype, device=pool.keys(0).device)
        self._other = torch.empty_like(self._side)
        fill(self._side)
        fill(self._other)

    def by_head(self, seqs: int, context: int) -> tuple[Tensor, Tensor]:
        """K and V, each `[seqs, kv_heads, context, head_dim]`."""
        shape = (seqs, self._shape.kv_heads, context, self._shape.head_dim)
        return self._view(self._side, shape), self._view(self._other, shape)

    def by_token(self, seqs: int, context: int) -> tuple[Tensor, Tensor]:
        """K and V, each `[seqs, context, kv_heads, head_dim]`."""
        shape = (seqs, context, self._shape.kv_heads, self._shape.head_dim)
        return self._view(self._side, shape), self._view(self._other, shape)

    def _view(self, memory: Tensor, shape: tuple[int, ...]) -> Tensor:
        count = shape[0] * shape[1] * shape[2] * shape[3]
        return memory[:count].view(shape)


def sdpa_decode(dense: Dense, pool: Pool, step: Step) -> Callable[[], object]:
    """One query a sequence. The group's heads are rows of one KV head: nothing is repeated."""
    seqs, context = len(step.contexts), step.contexts[0]
    keys, values = dense.by_head(seqs, context)
    shape = pool.shape
    query = step.query.view(seqs, shape.kv_heads, shape.group, shape.head_dim)
    return lambda: F.scaled_dot_product_attention(query, keys, values, scale=shape.scale)


def peer_decode(
    gpu: Gpu, peer: str, dense: Dense, pool: Pool, step: Step
) -> tuple[Callable[[], object] | None, str]:
    """The peer's call for a step of equal contexts, or None and why there is none."""
    if find_spec(PEERS[peer]) is None:
        return None, f"{PEERS[peer]} is not installed"
    try:
        make = _flashinfer if peer == "flashinfer" else _flash_attn
        call = make(import_module(PEERS[peer]), dense, pool, step)
        gpu.prepare([call])
    except (ImportError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        return None, f"{PEERS[peer]}: {type(error).__name__}: {error}"
    return call, ""


def _flash_attn(module: Any, dense: Dense, pool: Pool, step: Step) -> Callable[[], object]:
    keys, values = dense.by_token(len(step.contexts), step.contexts[0])
    query, scale = step.query.unsqueeze(1), pool.shape.scale
    return lambda: module.flash_attn_with_kvcache(
        query, keys, values, cache_seqlens=step.lens, softmax_scale=scale, causal=True
    )


def _flashinfer(module: Any, dense: Dense, pool: Pool, step: Step) -> Callable[[], object]:
    shape, seqs, context = pool.shape, len(step.contexts), step.contexts[0]
    device = step.query.device
    each = blocks_of(context, shape.block_size)
    used = torch.full((seqs,), (context - 1) % shape.block_size + 1, dtype=torch.int32)
    pages = torch.randperm(seqs * each).to(torch.int32)
    keys, values = dense.by_head(seqs * each, shape.block_size)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(seqs + 1, dtype=torch.int32, device=device) * each,
        pages.to(device),
        used.to(device),
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.block_size,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
        sm_scale=shape.scale,
    )
    return lambda: wrapper.run(step.query, (keys, values))
