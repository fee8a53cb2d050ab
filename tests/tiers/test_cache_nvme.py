"""The cache over the real NVMe tier: what was flushed or demoted is there after a restart."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.index.words import TierId
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.contracts import Signal
from kvtier.tiers.device import CpuDevice
from kvtier.tiers.dram import DramSlab
from kvtier.tiers.mover import Mover
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.tiers.pool import ArrayPool
from kvtier.tiers.ticker import Ticker
from tests.nvme.faults import HangingFiles
from tests.tiers.cache_rig import BLOCK_BYTES, BLOCK_SIZE, NAMESPACE, Rig, doc, keys_of

CAPACITY = 4 << 20


@contextmanager
def opened(
    store: Path,
    *,
    hbm: int = 8,
    dram: int = 24,
    capacity: int = CAPACITY,
    files: Files | None = None,
) -> Iterator[Rig]:
    """A fresh process, as far as memory goes, on this store."""
    signal = Signal()
    pools = [ArrayPool(TierId.HBM, hbm, BLOCK_BYTES), DramSlab.create(dram, BLOCK_BYTES)]
    nvme = NvmeTier.open(store, capacity_bytes=capacity, signal=signal, files=files)
    mover = Mover(CpuDevice(signal))
    cache = TieredCache(BLOCK_SIZE, pools, [nvme], mover, signal)
    try:
        yield Rig(cache, pools, [nvme])
        assert cache.drain(cache.clock() + 30)
        cache.check()
    finally:
        cache.close()
        mover.device.close()


def flush(rig: Rig, seed: int, blocks: int) -> None:
    tokens = doc(seed, blocks)
    ticket = rig.cache.flush(NAMESPACE, tokens)
    assert ticket.wait(rig.cache.clock() + 30)
    assert (ticket.blocks, ticket.failed) == (blocks, False)
    ticket.close()


def test_flushed_blocks_are_hit_after_a_restart_with_the_right_bytes(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as rig:
        rig.visit(doc(1, 7))
        flush(rig, 1, 7)
    with opened(tmp_path / "store") as rig:
        rig.committed.update(keys_of(doc(1, 7)))
        lease, hits = rig.serve(doc(1, 7))
        assert (hits, dict(lease.hit_tokens)) == (7, {TierId.NVME: 28})
        rig.cache.release(lease)
        assert rig.visit(doc(1, 7)) == 7
    assert check_store(tmp_path / "store").ok


def test_what_overflows_dram_goes_to_nvme_and_comes_back(tmp_path: Path) -> None:
    with opened(tmp_path / "store", hbm=8, dram=16) as rig:
        for seed in range(1, 8):
            assert rig.visit(doc(seed, 6)) == 0
        rig.cache.drain()
        hits = [rig.visit(doc(seed, 6)) for seed in range(1, 8)]
        assert hits == [6] * 7
        assert rig.cache.statistics().hit_tokens[TierId.NVME] > 0


def test_flushing_twice_writes_once(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as rig:
        rig.visit(doc(1, 5))
        flush(rig, 1, 5)
        written = rig.stores[0].statistics().written_bytes  # type: ignore[attr-defined]
        flush(rig, 1, 5)
        assert rig.stores[0].statistics().written_bytes == written  # type: ignore[attr-defined]
    with opened(tmp_path / "store") as rig:
        flush(rig, 1, 5)  # nothing in memory: the store's own word is enough


def test_a_path_longer_than_dram_passes_through_it(tmp_path: Path) -> None:
    with opened(tmp_path / "store", hbm=24, dram=5) as rig:
        rig.visit(doc(1, 20))
        flush(rig, 1, 20)
    with opened(tmp_path / "store", hbm=24, dram=5) as rig:
        rig.committed.update(keys_of(doc(1, 20)))
        assert rig.visit(doc(1, 20)) == 20


def test_prefetch_brings_blocks_to_dram_and_the_lease_still_says_nvme(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as rig:
        rig.visit(doc(1, 6))
        flush(rig, 1, 6)
    with opened(tmp_path / "store") as rig:
        rig.committed.update(keys_of(doc(1, 6)))
        ticket = rig.cache.prefetch(NAMESPACE, doc(1, 6))
        assert ticket.wait(rig.cache.clock() + 30)
        assert dict(rig.cache.match(NAMESPACE, doc(1, 6)).by_tier) == {TierId.DRAM: 24}
        lease = rig.cache.acquire(NAMESPACE, doc(1, 6), prefetched=ticket)
        assert lease.ticket.wait(rig.cache.clock() + 30)
        assert dict(lease.hit_tokens) == {TierId.NVME: 24}
        rig.expect_bytes(lease, doc(1, 6))
        rig.cache.release(lease)


def test_a_prefetch_in_pieces_is_moved_on_in_an_idle_engine(tmp_path: Path) -> None:
    with opened(tmp_path / "store", hbm=12) as rig:
        rig.visit(doc(1, 12))
        flush(rig, 1, 12)
    with opened(tmp_path / "store", hbm=12) as rig:  # an eighth of the pool is three blocks
        ticker = Ticker(rig.cache)
        try:
            ticket = rig.cache.prefetch(NAMESPACE, doc(1, 12))
            for _ in range(100):
                ticks = rig.cache.signal.ticks
                if ticket.is_done:
                    break
                rig.cache.signal.wait(ticks, 0.1)
            assert ticket.hit_tokens == {TierId.NVME: 48}
            ticket.close()
        finally:
            ticker.close()


def stored(path: Path) -> None:
    """A store that holds document 1, of six blocks."""
    with opened(path) as rig:
        rig.visit(doc(1, 6))
        flush(rig, 1, 6)


def test_a_request_on_a_drive_that_hangs_is_computed_within_a_second(tmp_path: Path) -> None:
    stored(tmp_path / "store")
    files = HangingFiles("preadv")
    with opened(tmp_path / "store", files=files) as rig:
        rig.committed.update(keys_of(doc(1, 6)))
        files.arm()
        try:
            start = time.monotonic()
            assert rig.visit(doc(1, 6)) == 0
            assert time.monotonic() - start < 1.0
            assert files.entered.is_set()
            assert rig.visit(doc(1, 6)) == 6  # from memory
            start = time.monotonic()
            assert rig.visit(doc(2, 6)) == 0  # nobody asks the drive now
            rig.cache.flush(NAMESPACE, doc(2, 6)).wait(rig.cache.clock() + 30)
            assert time.monotonic() - start < 1.0
            rig.cache.check()
            dram = rig.cache.statistics().pools[1]
            assert dram.filling == 6
        finally:
            files.release()
        assert rig.cache.drain(rig.cache.clock() + 30)
        dram = rig.cache.statistics().pools[1]
        assert (dram.filling, dram.free + dram.resident) == (0, dram.total)
        statistics = rig.stores[0].statistics()  # type: ignore[attr-defined]
        assert (statistics.stalled_reads, statistics.errors["hung"]) == (1, 1)


def test_a_cache_closes_over_a_read_that_hangs_and_its_late_bytes_harm_nobody(
    tmp_path: Path,
) -> None:
    stored(tmp_path / "store")
    files, signal = HangingFiles("preadv"), Signal()
    dram = DramSlab.create(24, BLOCK_BYTES)
    nvme = NvmeTier.open(tmp_path / "store", capacity_bytes=CAPACITY, signal=signal, files=files)
    cache = TieredCache(BLOCK_SIZE, [dram], [nvme], None, signal)
    files.arm()
    lease = cache.acquire(NAMESPACE, doc(1, 6))
    assert lease.ticket.wait(cache.clock() + 30)
    assert files.entered.is_set() and lease.landed_blocks == 0
    nvme.close(deadline_s=0.1)
    cache.close()
    cache.release(lease)
    cache.check()
    dram.close()
    files.release()
    nvme.close()  # the late bytes have landed in memory that only they hold now
    assert check_store(tmp_path / "store").ok
