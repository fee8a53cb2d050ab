"""Write-back into the real NVMe tier: its budget, its priorities, and a crash."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtier.index.words import TierId
from kvtier.tiers.nvme.budget import DAY_S
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.ticker import Ticker
from tests.tiers import writeback_child
from tests.tiers.cache_rig import NAMESPACE, doc, keys_of
from tests.tiers.nvme_rig import GatedFiles, NvmeRig, opened

BLOCK = 4096
"""A stored block; a record has a page of header besides."""


def held(rig: NvmeRig, seed: int, blocks: int) -> int:
    return rig.store.holds(NAMESPACE, keys_of(doc(seed, blocks)))


def test_when_the_budget_is_spent_write_back_goes_on_the_next_day(tmp_path: Path) -> None:
    with opened(tmp_path / "s", dram=80, write_budget_bytes=2 * (BLOCK + 5 * BLOCK)) as rig:
        for seed in (1, 2, 3):
            rig.visit(doc(seed, 5))
        rig.settle()
        rig.clock.now += 31
        rig.wait_until(lambda: rig.store.statistics().budget_refused_blocks > 0)
        rig.settle()
        assert sorted(held(rig, seed, 5) for seed in (1, 2, 3)) == [0, 5, 5]
        rig.clock.now += DAY_S / 2
        rig.cache.poll()
        rig.settle()
        assert rig.cache.statistics().written_back == 10
        rig.clock.now += DAY_S / 2
        rig.wait_until(lambda: rig.cache.statistics().written_back == 15)
        assert [held(rig, seed, 5) for seed in (1, 2, 3)] == [5, 5, 5]
    assert check_store(tmp_path / "s").ok


def test_without_any_budget_demotion_and_flush_still_go(tmp_path: Path) -> None:
    with opened(tmp_path / "s", write_budget_bytes=0) as rig:
        rig.visit(doc(1, 6))
        rig.visit(doc(2, 6))
        rig.settle()
        rig.clock.now += 31
        rig.wait_until(lambda: rig.store.statistics().budget_refused_blocks > 0)
        rig.settle()
        ticket = rig.cache.flush(NAMESPACE, doc(1, 6))
        assert ticket.wait(None)
        assert (ticket.blocks, held(rig, 2, 6)) == (6, 0)
        for tier in (TierId.HBM, TierId.DRAM):
            rig.cache.shed(tier)
        assert held(rig, 2, 6) == 6
        assert rig.cache.statistics().dropped == 0


def test_what_has_to_leave_while_it_is_written_back_is_written_once(tmp_path: Path) -> None:
    files = GatedFiles()
    with opened(tmp_path / "s", files=files) as rig:
        rig.visit(doc(1, 6))
        rig.settle()
        rig.cache.shed(TierId.HBM)
        rig.clock.now += 31
        files.gate.clear()
        rig.wait_until(files.stopped.is_set)
        rig.clock.now += 1000
        rig.visit(doc(1, 8))  # two more, which hang off what is under way
        ticket = rig.cache.flush(NAMESPACE, doc(1, 8))
        rig.cache.poll()
        files.gate.set()
        assert ticket.wait(None)
        assert ticket.blocks == 8
        rig.settle()
        for tier in (TierId.HBM, TierId.DRAM):
            rig.cache.shed(tier)
        statistics = rig.store.statistics()
        assert statistics.blocks == 8
        assert statistics.used_bytes == statistics.written_today_bytes
    assert check_store(tmp_path / "s").ok


@pytest.mark.parametrize("blocks", [3, 6])
def test_somebody_ticks_for_an_engine_that_does_nothing(tmp_path: Path, blocks: int) -> None:
    with opened(tmp_path / "s") as rig:
        rig.visit(doc(1, blocks))
        rig.settle()
        rig.clock.now += 31
        ticker = Ticker(rig.cache)
        try:
            for _ in range(600):
                ticks = rig.cache.signal.ticks
                if held(rig, 1, blocks) == blocks:
                    break
                rig.cache.signal.wait(ticks, 0.1)
            assert held(rig, 1, blocks) == blocks
        finally:
            ticker.close()
        assert "kvtier-ticker" not in [thread.name for thread in threading.enumerate()]


def test_after_a_crash_what_was_written_back_is_served(tmp_path: Path) -> None:
    root = Path(writeback_child.__file__).parents[2]
    command = [sys.executable, "-m", "tests.tiers.writeback_child", str(tmp_path / "s")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "written back\n"
        os.kill(child.pid, signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert check_store(tmp_path / "s").ok
    with opened(tmp_path / "s") as rig:
        hits = []
        for seed, blocks in ((1, 7), (2, 3), (3, 2)):
            rig.committed.update(keys_of(doc(seed, blocks)))
            lease = rig.cache.acquire(NAMESPACE, doc(seed, blocks))
            assert lease.ticket.wait(None)
            rig.expect_bytes(lease, doc(seed, blocks))
            hits.append(lease.landed_blocks)
            rig.cache.release(lease)
        assert hits == [7, 3, 0]
