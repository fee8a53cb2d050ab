"""The cache rig on the simulated device: failures, deadlines and time, in an order we choose."""

from collections.abc import Callable, Sequence
from typing import Any, Self

from kvtier.index.namespace import BlockLayout
from kvtier.index.words import TierId, Tokens
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.cuda import CudaDevice
from kvtier.tiers.lease import Lease
from kvtier.tiers.mover import Mover
from kvtier.tiers.simulated import SimDevice, SimStore, places
from tests.prf import block_bytes
from tests.tiers.cache_rig import BLOCK_BYTES, BLOCK_SIZE, NAMESPACE, Rig, doc, keys_of
from tests.tiers.fake_cuda import FakeCuda, JudgedHbm
from tests.tiers.judged import JudgedPool

LAYOUT = BlockLayout(1, 1, BLOCK_SIZE, BLOCK_BYTES // BLOCK_SIZE // 4, "float16")


def _cuda(sim: SimDevice, pools: Sequence[JudgedPool | JudgedHbm]) -> CudaDevice:
    fake = FakeCuda(sim, pools)
    device = CudaDevice(sim.signal, runtime=fake, register=fake.register, clock=sim.clock)
    for pool in pools:
        if isinstance(pool, JudgedPool):
            device.register(pool)
    return device


class SimRig(Rig):
    """A rig whose copies run when the test says so, and fail when it says so.

    `seed` decides what the device does next (or a function does); `options` go to the cache. With
    `on_cuda` a `CudaDevice` makes the copies, on a fake of CUDA.
    """

    device: SimDevice
    pools: Sequence[JudgedPool | JudgedHbm]
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
        seed: int | Callable[[int], int] = 7,
        most_in_flight: int | None = None,
        on_cuda: bool = False,
        **options: Any,
    ) -> Self:
        device = SimDevice(seed, async_compute=async_compute)
        pools: list[JudgedPool | JudgedHbm] = [
            JudgedHbm(device, LAYOUT, hbm)
            if on_cuda
            else JudgedPool(device, TierId.HBM, hbm, BLOCK_BYTES)
        ]
        if dram is not None:
            pools.append(JudgedPool(device, TierId.DRAM, dram, BLOCK_BYTES))
        stores = [SimStore(TierId.NVME, device, capacity=capacity)] if store else []
        copies = _cuda(device, pools) if on_cuda else device
        mover = Mover(copies, clock=device.clock, most_in_flight=most_in_flight)
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


class GpuRig(SimRig):
    """As `SimRig`, but compute is a stream of its own that runs when the test says so."""

    def launch(self, lease: Lease, tokens: Tokens, deadline: float | None = None) -> None:
        """Queue what `Rig.compute` does, without the commit."""
        keys, first = keys_of(tokens, lease.namespace), len(lease.shared)
        wanted = max(0, len(keys) - first - len(lease.private))
        self.cache.extend(lease, wanted, deadline=deadline)
        table, slots = lease.table, lease.block_table

        def fill() -> None:
            for position in range(first, len(keys)):
                view = self.pools[0].view(int(slots[position]))
                view[:] = block_bytes(keys[position], BLOCK_BYTES)

        self.cache.guard.check([(lease, table)])
        read, written = places(self.pools[0], slots[:first]), places(self.pools[0], slots[first:])
        self.device.launch("fill", fill, reads=read, writes=written)
        self.cache.guard.launched([(lease, table)])
        self.committed.update(keys)

    def use(self, tokens: Tokens) -> None:
        """A request that has been answered, as far as the host knows."""
        lease = self.cache.acquire(NAMESPACE, tokens)
        assert lease.ticket.wait(self.cache.clock() + 100)
        self.launch(lease, tokens)
        self.cache.commit(lease, tokens)
        self.cache.release(lease)

    def come_to_rest(self) -> None:
        self.device.run_all()
        self.settle()
        self.device.run_all()
        self.cache.poll()
        self.cache.check()
        assert all(pool.leaving + pool.limbo == 0 for pool in self.cache.statistics().pools)
