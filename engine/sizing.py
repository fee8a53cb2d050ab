"""How large the HBM pool may be: what the device has free, less what a launch needs beside it.

A pool takes its memory once and for good, and the model's own needs come and go with each launch.
So the largest launch the scheduler may plan is run once before the pool is made, and the most it
held at once is kept free. Knows no tiers and no requests; what measures is passed in.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvtier.engine.assembly import CacheSettings
from kvtier.engine.batch import Span, lay_out
from kvtier.engine.model import Attention, LlamaModel
from kvtier.engine.scheduler import EngineSettings
from kvtier.index.namespace import BlockLayout
from kvtier.tiers.memory import NotEnoughMemory


class Meter(Protocol):
    """Looks at one device's memory. Bytes."""

    def free_bytes(self) -> int:
        """What could be taken now."""
        ...

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Do it, and say how much it held at most beyond what was held before."""
        ...


class CudaMeter:
    """Through torch's allocator; what that only keeps in reserve counts as free."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def peak_bytes(self, work: Callable[[], object]) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device)) - before


@dataclass(frozen=True)
class HbmBudget:
    """Bytes free beside the weights, the share of them to use, and what a launch takes of that."""

    free_bytes: int
    fraction: float
    launch_bytes: int

    @property
    def pool_bytes(self) -> int:
        """What is left for blocks; negative if the launch alone is too large."""
        return int(self.free_bytes * self.fraction) - self.launch_bytes

    def require(self, layout: BlockLayout) -> int:
        """`pool_bytes`. Raises `NotEnoughMemory` if that is less than a block."""
        if self.pool_bytes < layout.nbytes:
            raise NotEnoughMemory(
                f"hbm pool: {self.free_bytes:,} bytes are free beside the model; "
                f"cache.hbm_fraction {self.fraction} of them, less {self.launch_bytes:,} that the "
                f"largest launch takes, leave {self.pool_bytes:,}, and a block takes "
                f"{layout.nbytes:,}; lower engine.step_tokens or engine.max_running, raise "
                "cache.hbm_fraction, or free memory on the device"
            )
        return self.pool_bytes


def largest_launch(engine: EngineSettings, max_positions: int, block_size: int) -> list[Span]:
    """Spans of at least as many rows as any launch has, each at the end of the longest context.

    All of them name slot 0: what they compute is nothing.
    """
    slots = np.zeros(-(-max_positions // block_size), np.int32)

    def span(number: int, count: int, *, wants_logits: bool) -> Span:
        start = max_positions - count
        tokens = np.zeros(count, np.int32)
        return Span(number, tokens, start, slots, max_positions, wants_logits)

    spans = [span(number, 1, wants_logits=True) for number in range(engine.max_running)]
    rows = 2 * engine.step_tokens  # what the scheduler allows while nobody waits for a next token
    while rows:
        count = min(rows, max_positions)
        spans.append(span(len(spans), count, wants_logits=False))
        rows -= count
    return spans


def measured(
    settings: CacheSettings,
    engine: EngineSettings,
    layout: BlockLayout,
    model: LlamaModel,
    attention: Callable[[Tensor], Attention],
    max_positions: int,
    device: str,
    meter: Meter,
) -> CacheSettings:
    """`settings` with `hbm_bytes` that leave the model room, as they are if those are given.

    `attention` makes the backend for a pool. Raises `NotEnoughMemory` if no block fits.
    """
    if settings.hbm_bytes is not None:
        return settings
    dtype: torch.dtype = getattr(torch, layout.dtype)
    scratch = torch.zeros(1, *layout.shape, dtype=dtype, device=device)
    backend = attention(scratch)
    spans = largest_launch(engine, max_positions, layout.block_size)
    launch_bytes = meter.peak_bytes(
        lambda: model.forward(lay_out(spans, layout.block_size, device), backend)
    )
    for span in spans:
        backend.forget(span.sequence)
    budget = HbmBudget(meter.free_bytes(), settings.hbm_fraction, launch_bytes)
    return replace(settings, hbm_bytes=budget.require(layout))
