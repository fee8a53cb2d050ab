"""Copies on a GPU: the same promises as on CPU threads. Skipped where there is none."""

import re
import resource
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TypeVar

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from kvtier.index.errors import KvtierError
from kvtier.index.namespace import BlockLayout
from kvtier.index.words import Slots, TierId
from kvtier.tiers.contracts import Flight, Signal
from kvtier.tiers.cuda import CudaDevice, pci_address, register_cuda, runs_within
from kvtier.tiers.device import Copy
from kvtier.tiers.dram import DramSlab
from kvtier.tiers.hbm import HbmPool
from kvtier.tiers.memory import PAGE
from kvtier.tiers.mover import Mover
from kvtier.tiers.pool import ArrayPool, SlotPool
from tests.prf import block_bytes

Test = TypeVar("Test", bound=Callable[..., None])


def gpu(test: Test) -> Test:
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    marked: Test = pytest.mark.gpu(skip(test))
    return marked


DENSE = BlockLayout(4, 2, 16, 64, "bfloat16")  # 64 KiB: slots without padding
PADDED = BlockLayout(3, 3, 5, 40, "float16")


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    made = CudaDevice(Signal(), 0)
    yield made
    made.close()


def wait_for(flight: Flight, signal: Signal) -> None:
    while True:
        ticks = signal.ticks
        if flight.done:
            return
        signal.wait(ticks, 30.0)


def gpu_bytes(pool: HbmPool, slot: int) -> np.ndarray:
    torch.cuda.synchronize()
    found: np.ndarray = pool.flat[slot].cpu().numpy()
    return found


@gpu
@pytest.mark.parametrize("layout", [DENSE, PADDED])
@pytest.mark.parametrize("n", [1, 7, 37])
def test_blocks_go_up_and_down_whole_with_their_checksums(
    device: CudaDevice, layout: BlockLayout, n: int
) -> None:
    hbm, dram = HbmPool(layout, 50, "cuda:0"), DramSlab.create(100, layout.nbytes)
    device.register(dram)
    mover = Mover(device)
    low: Slots = np.random.default_rng(n).permutation(dram.alloc(n))
    for slot in low.tolist():
        dram.view(slot)[:] = block_bytes(b"%d" % slot, layout.nbytes)
    top = hbm.alloc(n)
    up = mover.promote(dram, low, hbm, top)
    back = dram.alloc(n)
    down = mover.demote(hbm, top, dram, back)
    wait_for(up, device.signal)
    wait_for(down, device.signal)
    for at in range(n):
        wanted = block_bytes(b"%d" % low[at], layout.nbytes)
        assert (gpu_bytes(hbm, int(top[at])) == wanted).all()
        assert (dram.view(int(back[at])) == wanted).all()
        assert int(down.checksums[at]) == xxh3_64_intdigest(wanted.data)
    assert mover.idle(hbm, top) and mover.idle(dram, back)
    device.forget(dram)
    dram.close()


@gpu
def test_a_demotion_waits_for_the_kernels_that_fill_its_blocks(device: CudaDevice) -> None:
    hbm, dram = HbmPool(DENSE, 5, "cuda:0"), DramSlab.create(5, DENSE.nbytes)
    device.register(dram)
    mover = Mover(device)
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    hbm.flat[2].fill_(7)
    slots = np.array([2], np.int32)
    mover.computed(hbm, slots)
    assert not mover.idle(hbm, slots)
    flight = mover.demote(hbm, slots, dram, slots)
    wait_for(flight, device.signal)
    assert (dram.view(2) == 7).all()
    device.forget(dram)
    dram.close()


@gpu
def test_what_is_copied_into_a_freed_slot_is_not_poisoned_afterwards(device: CudaDevice) -> None:
    """Poison is queued behind all compute; `free` returns when it is over."""
    hbm, dram = HbmPool(DENSE, 5, "cuda:0", debug=True), DramSlab.create(5, DENSE.nbytes)
    device.register(dram)
    dram.array[:] = 7
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    slots = hbm.alloc(5)
    hbm.free(slots)
    flight = Mover(device).promote(dram, np.arange(5, dtype=np.int32), hbm, hbm.alloc(5))
    wait_for(flight, device.signal)
    assert all((gpu_bytes(hbm, slot) == 7).all() for slot in range(5))
    device.forget(dram)
    dram.close()


@gpu
def test_compute_behind_a_fence_sees_what_was_promoted(device: CudaDevice) -> None:
    layout = BlockLayout(32, 8, 16, 128, "bfloat16")
    hbm, dram = HbmPool(layout, 64, "cuda:0"), DramSlab.create(64, layout.nbytes)
    device.register(dram)
    mover = Mover(device)
    dram.array[:] = 3
    slots = np.arange(64, dtype=np.int32)
    mover.promote(dram, slots, hbm, slots)
    mover.fence_compute(hbm, slots)
    total = hbm.flat.sum(dtype=torch.int64)
    assert int(total.item()) == 3 * hbm.flat.numel()
    device.forget(dram)
    dram.close()


@gpu
def test_a_copy_never_crosses_two_registered_chunks(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.cuda.CHUNK_BYTES", 3 * DENSE.nbytes)
    hbm, dram = HbmPool(DENSE, 11, "cuda:0"), DramSlab.create(11, DENSE.nbytes)
    device.register(dram)
    for slot in range(11):
        dram.view(slot)[:] = slot
    slots = np.arange(11, dtype=np.int32)
    flight = Mover(device).promote(dram, slots, hbm, slots)
    wait_for(flight, device.signal)
    assert [int(gpu_bytes(hbm, slot)[0]) for slot in range(11)] == list(range(11))
    device.forget(dram)
    dram.close()


@gpu
def test_a_pool_that_is_not_registered_is_refused(device: CudaDevice) -> None:
    hbm, dram = HbmPool(DENSE, 3, "cuda:0"), DramSlab.create(3, DENSE.nbytes)
    slots = np.array([1], np.int32)
    with pytest.raises(ValueError, match="not registered"):
        Mover(device).promote(dram, slots, hbm, slots)
    dram.close()


@gpu
def test_the_gpus_address_is_one_that_sysfs_has() -> None:
    address = pci_address(0)
    assert address is None or re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0", address)


def test_an_address_is_spelt_as_sysfs_spells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xE3, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    assert pci_address(0) == "0000:e3:00.0"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    assert pci_address(0) is None


@gpu
def test_registering_twice_is_an_error_that_names_the_cure() -> None:
    dram = DramSlab.create(3, DENSE.nbytes)
    registration = register_cuda(dram)
    with pytest.raises(KvtierError, match="page-locking"):
        register_cuda(dram)
    registration.close()
    registration.close()
    dram.close()


@pytest.mark.parametrize(
    ("pairs", "chunk", "runs"),
    [
        ([(i, i) for i in range(7)], 3, [3, 3, 1]),
        ([(2 + i, i) for i in range(7)], 3, [1, 3, 3]),
        ([(i, 1 + i) for i in range(5)], 1, [1] * 5),
        ([(3 + i, i) for i in range(5)], 100, [5]),
        ([(4, 0), (5, 1), (9, 2)], 5, [1, 1, 1]),
        ([], 3, []),
    ],
)
def test_runs_end_at_the_borders_of_chunks(
    pairs: list[tuple[int, int]], chunk: int, runs: list[int]
) -> None:
    host, gpu_side = ArrayPool(TierId.DRAM, 12, 64), SlotPool(TierId.HBM, 12, 64)
    copies = [Copy(host, s, gpu_side, d) for s, d in pairs]
    found = runs_within(copies, {host: chunk})
    assert [len(run) for run in found] == runs
    assert [at for run in found for at in run] == list(range(len(pairs)))
    back = [Copy(gpu_side, d, host, s) for s, d in pairs]
    assert runs_within(back, {host: chunk}) == found


class Runtime:
    """CUDA's page-locking without CUDA: which regions are locked. `refuse` ends the luck."""

    def __init__(self, refuse: int | None = None) -> None:
        self.locked: dict[int, int] = {}
        self.refuse = refuse
        self.calls: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if len(self.calls) == self.refuse:
            return 2
        assert flags == 1 and nbytes > 0
        self.calls.append((address, nbytes))
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.mark.parametrize(
    ("num_slots", "chunk_bytes", "chunks"),
    [
        (6, 2 * PAGE, [2, 2, 2]),  # a multiple
        (7, 2 * PAGE, [2, 2, 2, 1]),  # one more
        (7, 3 * PAGE - 1, [2, 2, 2, 1]),  # chunks are whole slots
        (3, PAGE - 1, [1, 1, 1]),  # a slot larger than a chunk
        (3, 3 * PAGE, [3]),
        (3, 99 * PAGE, [3]),
    ],
)
def test_chunks_are_whole_slots_that_cover_the_pool_once(
    num_slots: int, chunk_bytes: int, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime()
    monkeypatch.setattr("kvtier.tiers.cuda._cudart", lambda: runtime)
    monkeypatch.setattr("kvtier.tiers.cuda.CHUNK_BYTES", chunk_bytes)
    pool = ArrayPool(TierId.DRAM, num_slots, 5 * PAGE // 6)
    registration = register_cuda(pool)
    assert [nbytes // PAGE for _, nbytes in runtime.calls] == chunks
    at = pool.array.ctypes.data
    for address, nbytes in runtime.calls:
        assert address == at
        at += nbytes
    assert at == pool.array.ctypes.data + pool.array.nbytes
    assert registration.chunk_slots == max(1, chunk_bytes // PAGE)
    registration.close()
    registration.close()
    assert not runtime.locked


def test_a_refused_chunk_leaves_nothing_locked_and_the_error_has_numbers_and_cures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime(refuse=2)
    monkeypatch.setattr("kvtier.tiers.cuda._cudart", lambda: runtime)
    monkeypatch.setattr("kvtier.tiers.cuda.CHUNK_BYTES", PAGE)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    pool = ArrayPool(TierId.DRAM, 20, PAGE)
    with pytest.raises(
        KvtierError,
        match=r"error 2 page-locking 4,096 bytes at 8,192 of 81,920; .*is 65,536 bytes, 81,920",
    ):
        register_cuda(pool)
    assert len(runtime.calls) == 2 and not runtime.locked
