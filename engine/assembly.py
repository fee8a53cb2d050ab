"""Builds the cache that one engine process uses: embedded tiers, a sidecar's, or HBM alone.

Knows sizes and paths; not models or requests. What it opens, its `close` closes.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtier.engine.errors import BadSettings
from kvtier.index.admission import ADMISSIONS, Admission, Allowance
from kvtier.index.namespace import DTYPE_BYTES, BlockLayout
from kvtier.index.policies import DEFAULT_POLICY, POLICIES
from kvtier.index.words import TierId
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.contracts import Pool, Signal
from kvtier.tiers.cuda import CudaDevice, pci_address
from kvtier.tiers.device import CpuDevice, Device
from kvtier.tiers.dram import DramSlab
from kvtier.tiers.errors import CapacityTooSmall
from kvtier.tiers.hbm import HbmPool
from kvtier.tiers.mover import Mover
from kvtier.tiers.numa import nearest, nodes
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.tiers.sidecar.tier import SidecarTier
from kvtier.tiers.sieve import unlimited
from kvtier.tiers.ticker import Ticker
from kvtier.tiers.writeback import WRITEBACK_S

MIB, GIB = 1 << 20, 1 << 30

# On the CPU the fast tier competes with everything else the machine does: no share of it is ours.
CPU_HBM_BYTES = 1 * GIB


NEAR = "near"


@dataclass(frozen=True)
class CacheSettings:
    """Where K and V may live. Sizes in bytes.

    `hbm_bytes` None: on CUDA `hbm_fraction` of what is free beside the model's weights, less what
    its largest launch takes (`kvtier.engine.sizing`); on the CPU `CPU_HBM_BYTES`.
    `store`: a directory for the NVMe tier, bounded by `nvme_bytes`. `socket`: a sidecar that owns
    DRAM and NVMe, so that `dram_bytes`, `nvme_bytes` and `store` are its business, not ours.
    `dram_node` says on which NUMA node the DRAM tier lies: "near" (the GPU's; without a GPU the
    process's, if its processors are of one), None (wherever the kernel likes), or a number.
    `dram_bytes` 0 leaves the DRAM tier out. `codec` ("raw", "zstd", "auto"): how the NVMe tier
    stores blocks. `hbm_policy`, `dram_policy`: which blocks leave first ("lru", "arc", "adaptive").
    `nvme_admission`: which blocks that leave DRAM, or are written back, go to the store ("all", or
    "learned": those whose reuse is worth it, within `write_budget_bytes`). `debug` poisons freed
    slots.

    What has been in DRAM for `writeback_s` is written to the store in the background (None: never),
    until `write_budget_bytes` were written on a UTC day (None: `nvme_bytes`). Closing writes
    nothing more: flush what must outlive the process.
    Raises `BadSettings` if `store` and `socket` are both given, if a number is negative, or for a
    policy there is not.
    """

    hbm_bytes: int | None = None
    hbm_fraction: float = 0.9
    dram_bytes: int = 2 * GIB
    dram_node: int | str | None = "near"
    store: Path | None = None
    nvme_bytes: int = 16 * GIB
    socket: Path | None = None
    codec: str = "raw"
    block_size: int = 16
    writeback_s: float | None = WRITEBACK_S
    write_budget_bytes: int | None = None
    hbm_policy: str = DEFAULT_POLICY
    dram_policy: str = DEFAULT_POLICY
    nvme_admission: str = "all"
    debug: bool = False

    def __post_init__(self) -> None:
        for name in ("hbm_policy", "dram_policy"):
            if getattr(self, name) not in POLICIES:
                raise BadSettings(
                    f"cache.{name}: {getattr(self, name)!r} given, want {', '.join(POLICIES)}"
                )
        if self.nvme_admission not in ADMISSIONS:
            raise BadSettings(
                f"cache.nvme_admission: {self.nvme_admission!r} given, want {', '.join(ADMISSIONS)}"
            )
        if not 0 < self.hbm_fraction <= 1:
            raise BadSettings(
                f"cache.hbm_fraction: {self.hbm_fraction} given, want more than 0 and at most 1"
            )
        if isinstance(self.dram_node, str) and self.dram_node != NEAR:
            raise BadSettings(
                f'cache.dram_node: {self.dram_node!r} given, want "near", a number, or None'
            )
        for name in ("writeback_s", "write_budget_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise BadSettings(f"cache.{name}: {value} given, want 0 or more, or None")
        if self.store and self.socket:
            raise BadSettings("cache: both a store and a socket are given; the sidecar owns stores")


@dataclass(frozen=True, eq=False)
class OpenCache:
    """A running cache and the parts an engine looks at. `close` ends them, innermost last."""

    cache: TieredCache
    hbm: HbmPool
    store: NvmeTier | SidecarTier | None
    resources: ExitStack

    def close(self) -> None:
        """Finish what is in flight, then let go of threads, files and memory. Idempotent."""
        self.resources.close()


def open_cache(settings: CacheSettings, layout: BlockLayout, device: str = "cpu") -> OpenCache:
    """Open every tier; `device` is "cpu" or a CUDA device.

    Raises what the tiers raise, and `BadSettings` on CUDA without `hbm_bytes`; nothing stays open
    then.
    """
    hbm_bytes = CPU_HBM_BYTES if settings.hbm_bytes is None else settings.hbm_bytes
    if settings.hbm_bytes is None and device != "cpu":
        raise BadSettings(
            f"cache.hbm_bytes: none given for {device}; measure it (kvtier.engine.sizing) or set it"
        )
    with ExitStack() as stack:
        signal = Signal()
        cuda = None if device == "cpu" else CudaDevice(signal, torch.device(device).index or 0)
        copies: Device = CpuDevice(signal) if cuda is None else cuda
        stack.callback(copies.close)
        mover = Mover(copies)
        hbm = HbmPool.sized(layout, hbm_bytes, device=device, debug=settings.debug)
        pools: list[Pool] = [hbm]
        store: NvmeTier | SidecarTier | None = None
        admission: Admission | None = None
        allowance: Callable[[], Allowance | None] = unlimited
        if settings.socket:
            store = SidecarTier.connect(
                settings.socket, layout, mover=mover, signal=signal, registrar=cuda
            )
        else:
            if settings.dram_bytes:
                slab = _slab(settings, layout, device)
                stack.callback(slab.close)
                pools.append(slab)
                if cuda is not None:
                    cuda.register(slab)
            if settings.store:
                _refuse_less_than_a_block("nvme_bytes", settings.nvme_bytes, layout)
                store = NvmeTier.open(
                    settings.store,
                    capacity_bytes=settings.nvme_bytes,
                    write_budget_bytes=settings.write_budget_bytes,
                    signal=signal,
                    codec=settings.codec,
                    element_bytes=DTYPE_BYTES[layout.dtype],
                )
                if settings.nvme_admission == "learned":
                    kept = max(1, settings.nvme_bytes // layout.nbytes)
                    admission = Admission(pools[-1].num_slots, kept)
                    allowance = store.allowance
        stores = [] if store is None else [store]
        for each in stores:
            stack.callback(each.close)
        cache = TieredCache(
            layout.block_size,
            pools,
            stores,
            mover,
            signal,
            writeback_s=settings.writeback_s,
            admission=admission,
            allowance=allowance,
            policies={TierId.HBM: settings.hbm_policy, TierId.DRAM: settings.dram_policy},
        )
        stack.callback(cache.close)
        stack.callback(Ticker(cache).close)
        return OpenCache(cache, hbm, store, stack.pop_all())


def _slab(settings: CacheSettings, layout: BlockLayout, device: str) -> DramSlab:
    _refuse_less_than_a_block("dram_bytes", settings.dram_bytes, layout)
    num_slots = settings.dram_bytes // layout.nbytes
    return DramSlab.create(num_slots, layout.nbytes, node=_node(settings.dram_node, device))


def _node(wanted: int | str | None, device: str) -> int | None:
    """The number behind `dram_node`. Raises `BadSettings` for a node that is not there."""
    if wanted is None:
        return None
    if isinstance(wanted, str):
        gpu = None if device == "cpu" else pci_address(torch.device(device).index or 0)
        return nearest(gpu)
    known = nodes()
    if known and wanted not in known:
        raise BadSettings(f"cache.dram_node: {wanted} given, this machine has {known}")
    return wanted


def _refuse_less_than_a_block(name: str, nbytes: int, layout: BlockLayout) -> None:
    if nbytes < layout.nbytes:
        raise CapacityTooSmall(
            f"{name}: {nbytes} is less than one block, which takes {layout.nbytes} bytes in this "
            "model; raise it, or leave that tier out"
        )
