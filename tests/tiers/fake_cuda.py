"""CUDA as `CudaDevice` sees it, run by the simulated device: every order that CUDA allows.

Streams are streams of the simulation, an event is an operation on one, copies of one call run in
any order, and "GPU memory" is a tensor on the CPU. A copy across two registered pieces of host
memory, which CUDA refuses, is a failed assertion here: `CudaDevice` is there to avoid it.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from kvtier.index.namespace import BlockLayout
from kvtier.index.words import Slots, TierId
from kvtier.tiers.contracts import Bytes
from kvtier.tiers.cuda import Registration
from kvtier.tiers.cuda_runtime import Pair, Queue
from kvtier.tiers.device import COMPUTE, PAST, Event
from kvtier.tiers.hazards import Place
from kvtier.tiers.hbm import HbmPool
from kvtier.tiers.pool import ArrayPool
from kvtier.tiers.simulated import SimDevice, places
from tests.tiers.judged import JudgedPool, SimWorker

FakePool = HbmPool | ArrayPool


class FakeQueue:
    def __init__(self, sim: SimDevice, name: str) -> None:
        self.sim = sim
        self.name = name

    def wait_event(self, event: "FakeMark") -> None:
        self.sim.wait_for(self.name, [event.event])

    def synchronize(self) -> None:
        self.sim.record(self.name).wait(None)


class FakeMark:
    """Over at once until it is recorded, as a CUDA event."""

    event: Event = PAST

    def record(self, stream: FakeQueue) -> None:
        self.event = stream.sim.schedule("mark", _nothing, stream=stream.name)

    def query(self) -> bool:
        return self.event.done

    def synchronize(self) -> None:
        self.event.wait(None)

    def elapsed_time(self, end_event: "FakeMark") -> float:
        assert self.event.done and end_event.event.done, "the time of what is not over"
        return 1.0


class FakeCuda:
    """A `Runtime` over `pools`. `sim.faults` are asked "cuda SOURCE to TARGET" for every copy."""

    def __init__(self, sim: SimDevice, pools: Sequence[FakePool]) -> None:
        self._sim = sim
        self._pools = pools
        self._streams = 0

    def here(self) -> AbstractContextManager[object]:
        return nullcontext()

    def stream(self, *, urgent: bool) -> Queue:
        self._streams += 1
        return FakeQueue(self._sim, f"cuda {self._streams}")

    def compute(self) -> Queue:
        return FakeQueue(self._sim, COMPUTE)

    def mark(self) -> FakeMark:
        return FakeMark()

    def copy(self, queue: Any, pairs: Sequence[Pair]) -> None:
        first = self._sim.schedule("first", _nothing, stream=queue.name)
        copies: list[Event] = []
        try:
            for target, source in pairs:
                reads, writes = self._places(source), self._places(target)
                name = f"cuda {_name(reads)} to {_name(writes)}"
                if self._sim.faults(name):
                    raise RuntimeError(f"{name}: the test asked for this copy to fail")
                for place in writes:
                    self._sim.spoil(place)
                copy = partial(_copy, target, source)
                copies.append(self._sim.schedule(name, copy, [first], reads=reads, writes=writes))
        finally:
            self._sim.schedule("last", _nothing, copies, stream=queue.name)

    def worker(self, stream: str) -> Executor:
        return SimWorker(self._sim, stream)

    def register(self, pool: ArrayPool) -> Registration:
        return FakeRegistration(self._sim, pool)

    def _places(self, part: Tensor) -> list[Place]:
        assert part.is_contiguous(), "a copy with gaps"
        address, nbytes = part.data_ptr(), part.numel()
        for pool in self._pools:
            base, stride = pool.array.ctypes.data, pool.array.strides[0]
            first, offset = divmod(address - base, stride)
            if 0 <= first < pool.num_slots:
                assert offset == 0 and nbytes % pool.block_bytes == 0, "part of a block"
                n = nbytes // pool.block_bytes
                assert n == 1 or stride == pool.block_bytes, "over what lies between slots"
                if isinstance(pool, ArrayPool):
                    pieces = {slot // CHUNK_SLOTS for slot in range(first, first + n)}
                    assert len(pieces) == 1, "a copy across two registered pieces"
                return [(pool, slot) for slot in range(first, first + n)]
        raise AssertionError("a copy of what is in no pool")


CHUNK_SLOTS = 2


class FakeRegistration(Registration):
    """Host memory that nobody may copy to or from any more once this is closed."""

    def __init__(self, sim: SimDevice, pool: ArrayPool) -> None:
        self.chunk_slots = CHUNK_SLOTS
        self._sim = sim
        self._pool = pool

    def close(self) -> None:
        every = np.arange(self._pool.num_slots, dtype=np.int32)
        self._sim.touch("unlock", writes=places(self._pool, every))


class JudgedHbm(HbmPool):
    """`JudgedPool` over a tensor."""

    def __init__(self, sim: SimDevice, layout: BlockLayout, num_slots: int) -> None:
        self._sim = sim
        super().__init__(layout, num_slots, debug=True)

    def _poison(self, slots: Slots) -> None:
        self._sim.touch("poison", writes=places(self, slots))
        super()._poison(slots)


def dense(sim: SimDevice, num_slots: int, block_bytes: int) -> JudgedPool:
    """Host slots without gaps, of which neighbours are copied at once."""
    memory: Bytes = np.zeros((num_slots, block_bytes), np.uint8)
    return JudgedPool(sim, TierId.DRAM, num_slots, block_bytes, array=memory)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _name(some: Sequence[Place]) -> str:
    pool, slot = some[0]
    return f"{pool.tier}[{slot}]" + (f" and {len(some) - 1} more" if len(some) > 1 else "")


def _nothing() -> None:
    """A point in a stream."""
