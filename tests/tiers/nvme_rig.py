"""The cache rig over the real NVMe tier, with real threads and clocks that the test sets."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.index.words import TierId
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.contracts import Bytes, Signal
from kvtier.tiers.device import CpuDevice
from kvtier.tiers.dram import DramSlab
from kvtier.tiers.mover import Mover
from kvtier.tiers.nvme.budget import DAY_S
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.tiers.pool import ArrayPool
from tests.tiers.cache_rig import BLOCK_BYTES, BLOCK_SIZE, Rig


class GatedFiles(Files):
    """Holds every write back while the gate is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.stopped = threading.Event()

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        if not self.gate.is_set():
            self.stopped.set()
            assert self.gate.wait(30)
        return super().pwritev(fd, buffers, offset)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class NvmeRig(Rig):
    """`clock` is the cache's; the store's runs along with it, from a midnight on."""

    store: NvmeTier
    clock: Clock

    def settle(self) -> None:
        """Wait until nothing is in flight. The cache's clock stands still meanwhile."""
        self.wait_until(lambda: self.cache.statistics().in_flight == 0)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Poll at every news until it holds."""
        for _ in range(600):
            ticks = self.cache.signal.ticks
            self.cache.poll()
            if condition():
                return
            self.cache.signal.wait(ticks, 0.1)
        raise TimeoutError(f"{self.cache.statistics()}")


@contextmanager
def opened(
    path: Path, *, hbm: int = 8, dram: int = 48, files: Files | None = None, **options: Any
) -> Iterator[NvmeRig]:
    """A fresh process, as far as memory goes, on this store. `options`: see `NvmeTier.open`."""
    signal = Signal()
    pools = [ArrayPool(TierId.HBM, hbm, BLOCK_BYTES), DramSlab.create(dram, BLOCK_BYTES)]
    clock = Clock()
    store = NvmeTier.open(
        path,
        capacity_bytes=4 << 20,
        signal=signal,
        files=files,
        clock=lambda: 20_000 * DAY_S + clock.now,
        **options,
    )
    mover = Mover(CpuDevice(signal))
    cache = TieredCache(BLOCK_SIZE, pools, [store], mover, signal, clock=clock)
    rig = NvmeRig(cache, pools, [store])
    rig.store, rig.clock = store, clock
    try:
        yield rig
        rig.settle()
        cache.check()
    finally:
        cache.close()
        mover.device.close()
