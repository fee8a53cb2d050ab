"""What `CudaDevice` asks of CUDA, as a face that tests can wear, and torch behind it.

Streams, events and copies; no pools, no slots, and no opinion about what has to wait for what.
"""

from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from kvtier.tiers.cuda_batch import BATCHED_BELOW, BatchCopy, Span


class Mark(Protocol):
    """A CUDA event that takes the time. All raise `RuntimeError` once the context is lost."""

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this one to a later one; both are over."""
        ...


class Queue(Protocol):
    """A CUDA stream."""

    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


Pair = tuple[Tensor, Tensor]
"""Target and source: uint8, contiguous, of one size."""


class Runtime(Protocol):
    def here(self) -> AbstractContextManager[object]:
        """Make the device current."""
        ...

    def stream(self, *, urgent: bool) -> Queue: ...

    def compute(self) -> Queue:
        """The stream current in the calling thread."""
        ...

    def mark(self) -> Mark: ...

    def copy(self, queue: Queue, pairs: Sequence[Pair]) -> None:
        """Queue copies that don't depend on each other, in any order among themselves.

        Raises `RuntimeError` where CUDA refuses one; those before it are queued.
        """
        ...

    def worker(self, stream: str) -> Executor:
        """A thread that may wait for this device's events; one job after the other."""
        ...


class TorchRuntime:
    """CUDA device `index`, as torch drives it; batches by ctypes where CUDA has them."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._device = torch.device("cuda", index)
        major = (torch.version.cuda or "").split(".")[0]
        self._batch = BatchCopy.probe(f"libcudart.so.{major}") if major else None

    def here(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device)

    def stream(self, *, urgent: bool) -> torch.cuda.Stream:
        priority = -1 if urgent else 0
        made: torch.cuda.Stream = torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]
        return made

    def compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def mark(self) -> torch.cuda.Event:
        made: torch.cuda.Event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        return made

    def copy(self, queue: Any, pairs: Sequence[Pair]) -> None:
        small = [pair for pair in pairs if pair[0].numel() < BATCHED_BELOW]
        if self._batch is None or len(small) < 2:
            small = []
        with torch.cuda.stream(queue):
            if small and self._batch is not None:
                spans = [Span(t.data_ptr(), s.data_ptr(), t.numel()) for t, s in small]
                if not self._batch(spans, queue.cuda_stream):
                    self._batch, small = None, []
            for target, source in pairs:
                if not small or target.numel() >= BATCHED_BELOW:
                    target.copy_(source, non_blocking=True)

    def worker(self, stream: str) -> Executor:
        return ThreadPoolExecutor(1, f"kvtier-{stream}", torch.cuda.set_device, (self._index,))
