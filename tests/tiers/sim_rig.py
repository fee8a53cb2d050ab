"""The cache rig on the simulated device: failures, deadlines and time, in an order we choose."""

from collections.abc import Callable
from typing import Any, Self

from kvtier.index.words import TierId
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.mover import Mover
from kvtier.tiers.pool import ArrayPool
from kvtier.tiers.simulated import SimDevice, SimStore
from tests.tiers.cache_rig import BLOCK_BYTES, BLOCK_SIZE, NAMESPACE, Rig, doc


class SimRig(Rig):
    """A rig whose copies run when the test says so, and fail when it says so.

    `options` go to the cache.
    """

    device: SimDevice
    store: SimStore
    mover: Mover
    broken: Callable[[str], bool]

    @classmethod
    def make(
        cls,
        hbm: int = 8,
        dram: int | None = 24,
        capacity: int | None = None,
        *,
        store: bool = True,
        async_compute: bool = False,
        **options: Any,
    ) -> Self:
        device = SimDevice(7, async_compute=async_compute)
        pools = [ArrayPool(TierId.HBM, hbm, BLOCK_BYTES, debug=True)]
        if dram is not None:
            pools.append(ArrayPool(TierId.DRAM, dram, BLOCK_BYTES, debug=True))
        stores = [SimStore(TierId.NVME, device, capacity=capacity)] if store else []
        mover = Mover(device)
        cache = TieredCache(
            BLOCK_SIZE, pools, stores, mover, device.signal, clock=device.clock, **options
        )
        rig = cls(cache, pools, stores)
        rig.device, rig.mover = device, mover
        if stores:
            rig.store = stores[0]
        rig.broken = lambda name: False
        device.faults = lambda name: rig.broken(name)
        return rig

    def settle(self) -> None:
        assert self.cache.drain(self.cache.clock() + 1000)
        self.cache.check()

    def in_store_only(self, blocks: int) -> None:
        """Documents 1 of `blocks` blocks stands in the store and nowhere else."""
        self.visit(doc(1, blocks))
        self.cache.flush(NAMESPACE, doc(1, blocks)).wait(self.cache.clock() + 1000)
        for tier in (TierId.HBM, TierId.DRAM):
            self.cache.shed(tier, self.cache.clock() + 1000)
        assert self.cache.match(NAMESPACE, doc(1, blocks)).by_tier.keys() <= {TierId.NVME}
