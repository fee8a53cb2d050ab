"""Copies between GPU memory and host memory: CUDA streams, events and page-locked memory.

One stream each way, the copy engines only. A block that moves down lands after a host thread has
waited for its copy and hashed what arrived; one that moves up lands when a host thread has seen its
event. Host memory must be registered: a copy from pageable memory would run, slowly and
synchronously, and nothing would say so.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from kvtier.index.errors import KvtierError
from kvtier.tiers.contracts import Flight, Pool, Signal
from kvtier.tiers.cuda_runtime import Mark, Pair, Queue, Runtime, TorchRuntime
from kvtier.tiers.device import COMPUTE, D2H, H2D, LANDING_BYTES, Copy, Event, coalesce, rows
from kvtier.tiers.hbm import HbmPool
from kvtier.tiers.memory import memlock_advice
from kvtier.tiers.pool import ArrayPool

# Registering a whole arena has failed above 64 GB on some drivers (vLLM #51080, #52656).
CHUNK_BYTES = 4 << 30

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device
_POLL_S = 0.0002


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class Registration:
    """Host memory page-locked for CUDA, in chunks of whole slots. Close it before the pool.

    `chunk_slots`: a single copy must not cross a multiple of this many slots, for CUDA knows the
    chunks as separate regions.
    """

    def __init__(self, address: int, nbytes: int, chunk_bytes: int, chunk_slots: int) -> None:
        """Raises `KvtierError`, nothing left registered, if CUDA refuses a chunk."""
        self.chunk_slots = chunk_slots
        self._locked: list[int] = []
        for start in range(0, nbytes, chunk_bytes):
            length = min(chunk_bytes, nbytes - start)
            code = int(_cudart().cudaHostRegister(address + start, length, _PORTABLE))
            if code != 0:
                self.close()
                raise KvtierError(
                    f"dram: CUDA error {code} page-locking {length:,} bytes at {start:,} of "
                    f"{nbytes:,}; {memlock_advice(nbytes)}"
                )
            self._locked.append(address + start)

    def close(self) -> None:
        """Unlock what was locked. Idempotent."""
        while self._locked:
            _cudart().cudaHostUnregister(self._locked.pop())


def pci_address(index: int) -> str | None:
    """Of a CUDA device, as sysfs writes it ("0000:3b:00.0"); None where torch does not tell."""
    found: Any = torch.cuda.get_device_properties(index)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(found, name) for name in names):
        return None
    domain, bus, device = (getattr(found, name) for name in names)
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def register_cuda(pool: ArrayPool) -> Registration:
    """Page-lock all slots of a host pool for CUDA. Raises `KvtierError` where that fails."""
    num_slots, stride = pool.array.shape
    chunk_slots = max(1, CHUNK_BYTES // stride)
    return Registration(
        pool.array.ctypes.data, num_slots * stride, chunk_slots * stride, chunk_slots
    )


class CudaEvent:
    """A recorded CUDA event. A lost context ends it with an error: nothing is copied any more."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        try:
            return self._error is not None or self.mark.query()
        except RuntimeError as error:
            self._error = error
            return True

    @property
    def error(self) -> Exception | None:
        return self._error

    def wait(self, timeout_s: float | None) -> bool:
        """CUDA has no timed wait: with a timeout, asks every 0.2 ms."""
        if timeout_s is None:
            self.mark.synchronize()
            return True
        deadline = time.monotonic() + timeout_s
        while not self.done:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True


@dataclass(frozen=True)
class _Landing:
    """Blocks that are being copied between two marks."""

    began: Mark
    ended: Mark
    blocks: list[int]


class CudaDevice:
    """Copy streams beside the engine's. "compute" is the stream current in the calling thread.

    Promotion has the higher stream priority. What is submitted is handed to the copy engine at
    once, so a flight is called off when it is submitted or not at all. Raises `RuntimeError` from
    any call once the CUDA context is lost. Not to be called while a graph is captured.

    `runtime` and `register` are torch's CUDA device `index` unless given; `clock` is that of
    deadlines.
    """

    def __init__(
        self,
        signal: Signal,
        index: int = 0,
        *,
        runtime: Runtime | None = None,
        register: Callable[[ArrayPool], Registration] = register_cuda,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.signal = signal
        self._runtime: Runtime = TorchRuntime(index) if runtime is None else runtime
        self._register = register
        self._clock = clock
        self._streams: dict[str, Queue] = {
            stream: self._runtime.stream(urgent=stream == H2D) for stream in (H2D, D2H)
        }
        self._landers = {stream: self._runtime.worker(stream) for stream in self._streams}
        self._registered: dict[Pool, Registration] = {}
        self._lock = Lock()

    def register(self, pool: ArrayPool) -> None:
        """Page-lock a host pool, for as long as this device is open. Once is enough.

        Raises `KvtierError` where CUDA refuses.
        """
        with self._lock, self._runtime.here():
            if pool not in self._registered:
                self._registered[pool] = self._register(pool)

    def forget(self, pool: ArrayPool) -> None:
        """Finish what was submitted and unlock a pool, before it is closed."""
        with self._lock:
            registration = self._registered.pop(pool, None)
        if registration is not None:
            for stream in self._streams.values():
                stream.synchronize()
            registration.close()

    def submit(
        self,
        stream: str,
        copies: Sequence[Copy],
        after: Sequence[Event],
        flight: Flight,
        *,
        checksum: bool,
    ) -> Event:
        queue = self._streams[stream]
        runs = self._runs(copies)
        if not runs:
            return self.record(stream)
        landings: list[_Landing] = []
        with self._lock:
            self._fence(queue, after)
            # Whoever comes next waits for this move instead of those before it: also if it is
            # called off, its event stands behind them.
            began = last = self._mark(queue)
            if flight.is_off(self._clock()):
                flight.call_off(range(len(copies)))
                return CudaEvent(began)
            pairs: list[Pair] = []
            blocks: list[int] = []
            nbytes = 0
            try:
                for run in runs:
                    first = copies[run.start]
                    target = self._rows(first.dst, first.dst_slot, len(run))
                    pairs.append((target, self._rows(first.src, first.src_slot, len(run))))
                    blocks += run
                    nbytes += target.numel()
                    if nbytes >= LANDING_BYTES or run is runs[-1]:
                        self._runtime.copy(queue, pairs)
                        began, last = last, self._mark(queue)
                        landings.append(_Landing(began, last, blocks))
                        pairs, blocks, nbytes = [], [], 0
            except RuntimeError as error:
                flight.fail_rest(error)
                last = self._mark(queue)  # behind those that were queued before the one that failed
            # The event a block lands by is the event its slot is idle by, so no second wake-up is
            # needed.
            end = CudaEvent(last)
        self._landers[stream].submit(_land, landings, copies, flight, checksum=checksum)
        return end

    def record(self, stream: str) -> Event:
        return CudaEvent(self._mark(self._queue(stream)))

    def wait_for(self, stream: str, events: Sequence[Event]) -> None:
        self._fence(self._queue(stream), events)

    def close(self) -> None:
        for lander in self._landers.values():
            lander.shutdown()
        for stream in self._streams.values():
            stream.synchronize()
        for registration in self._registered.values():
            registration.close()
        self._registered.clear()

    def _queue(self, stream: str) -> Queue:
        return self._runtime.compute() if stream == COMPUTE else self._streams[stream]

    def _mark(self, queue: Queue) -> Mark:
        mark = self._runtime.mark()
        mark.record(queue)
        return mark

    def _fence(self, queue: Queue, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, CudaEvent):
                queue.wait_event(event.mark)
            elif not event.done:
                raise TypeError(f"{event!r} is an event of another device")

    def _runs(self, copies: Sequence[Copy]) -> list[range]:
        """Raises `ValueError` for a host pool that is not registered."""
        chunks: dict[Pool, int] = {}
        for pool in {copy.src for copy in copies} | {copy.dst for copy in copies}:
            if isinstance(pool, HbmPool):
                continue
            registration = self._registered.get(pool)
            if registration is None:
                raise ValueError(f"{pool!r} is not registered with CUDA: call register first")
            is_dense = int(rows(pool, 0, 1).strides[0]) == pool.block_bytes
            chunks[pool] = registration.chunk_slots if is_dense else 1
        return runs_within(copies, chunks)

    def _rows(self, pool: Pool, slot: int, n: int) -> torch.Tensor:
        """uint8 `[n, block_bytes]`, contiguous."""
        if isinstance(pool, HbmPool):
            return pool.flat[slot : slot + n]
        return torch.from_numpy(rows(pool, slot, n))


def runs_within(copies: Sequence[Copy], chunks: Mapping[Pool, int]) -> list[range]:
    """Neighbours to copy at once, none across a multiple of its pool's `chunks` slots.

    Such a multiple is the border of a registered chunk; with 1, slots have padding behind them and
    every block is a copy of its own.
    """
    runs: list[range] = []
    for run in coalesce(copies, LANDING_BYTES):
        first = copies[run.start]
        borders = {run.start, run.stop}
        for pool, slot in ((first.src, first.src_slot), (first.dst, first.dst_slot)):
            if pool in chunks:
                borders.update(range(run.start + -slot % chunks[pool], run.stop, chunks[pool]))
        runs += [range(a, b) for a, b in pairwise(sorted(borders))]
    return runs


def _land(
    landings: Sequence[_Landing], copies: Sequence[Copy], flight: Flight, *, checksum: bool
) -> None:
    try:
        for landing in landings:
            landing.ended.synchronize()
            busy_s = landing.began.elapsed_time(landing.ended) / 1000
            sums = None
            if checksum:
                targets = (copies[block] for block in landing.blocks)
                sums = np.array(
                    [xxh3_64_intdigest(rows(c.dst, c.dst_slot, 1).data) for c in targets],
                    np.uint64,
                )
            flight.land(landing.blocks, sums, busy_s=busy_s)
    except BaseException as error:
        flight.fail_rest(error if isinstance(error, Exception) else None)
        raise
