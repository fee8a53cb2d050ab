"""Copies on a GPU: the same promises as on CPU threads. Skipped where there is none."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from kvtier.index.errors import KvtierError
from kvtier.index.namespace import BlockLayout
from kvtier.index.words import Slots, TierId
from kvtier.tiers.contracts import Flight, Signal
from kvtier.tiers.cuda import CudaDevice, register_cuda, runs_within
from kvtier.tiers.device import Copy
from kvtier.tiers.dram import DramSlab
from kvtier.tiers.hbm import HbmPool
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
