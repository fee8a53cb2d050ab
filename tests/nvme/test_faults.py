"""Errors of the drive are states: writes stop, reads go on, recovery is automatic."""

import errno
import threading
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import pytest

from kvtier.index.words import TierId
from kvtier.tiers.contracts import FAILED, LANDED, Bytes
from kvtier.tiers.errors import StoreOut
from kvtier.tiers.nvme.catalogue import Catalogue, Change, Outcome
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.pool import ArrayPool
from tests.nvme.faults import ERRORS, WRITE_CALLS, FaultyFiles, ForgetfulFiles
from tests.nvme.rig import Rig, branch, disk_takes, num_landed


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", WRITE_CALLS)
def test_a_failing_write_call_fails_blocks_and_the_next_success_recovers(
    tmp_path: Path, call: str, error: int
) -> None:
    old, new = branch(4), branch(7, 1)
    for at in (0, 1):
        store, files = tmp_path / f"{at}", FaultyFiles(call, error, at=at)
        with Rig(store, files=files) as rig:
            if call not in ("open", "sync_directory"):
                rig.put(old)
            files.arm()
            flight = rig.put(new)
            files.arm(False)
            if files.fired:
                assert FAILED in flight.status
                assert rig.tier.statistics().state == (
                    "full" if error == errno.ENOSPC else "failing"
                )
                assert isinstance(flight.error, OSError)
            assert rig.landed(old) == (4 if call not in ("open", "sync_directory") else 0)
            assert rig.landed(new) == num_landed(flight)
            rig.pass_time()
            assert num_landed(rig.put(branch(5, 2))) == 5
            assert rig.tier.statistics().state == "ok"
            used = rig.tier.statistics().used_bytes
        report = check_store(store)
        assert report.ok, report.problems
        assert report.bytes == used and disk_takes(store, at_most=used)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_short_write_goes_on_where_it_stopped(tmp_path: Path, at: int) -> None:
    files = FaultyFiles("pwritev", "short", at=at)
    with Rig(tmp_path / "s", files=files) as rig:
        files.arm()
        assert num_landed(rig.put(branch(9))) == 9
        assert files.fired == 1
        assert rig.landed(branch(9)) == 9
    assert check_store(tmp_path / "s").ok


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_write_that_gets_no_further_is_a_full_disk(tmp_path: Path, at: int) -> None:
    files = FaultyFiles("pwritev", "none", at=at)
    with Rig(tmp_path / "s", files=files) as rig:
        files.arm()
        flight = rig.put(branch(9))
        assert files.fired == 1 and FAILED in flight.status
        assert rig.tier.statistics().state == "full"
        assert rig.tier.statistics().errors["short_write"] == 1
        assert rig.landed(branch(9)) == num_landed(flight)
        rig.pass_time()
        assert num_landed(rig.put(branch(9))) == 9
    assert check_store(tmp_path / "s").ok


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_failing_read_fails_its_block_and_what_is_behind_and_spares_the_data(
    tmp_path: Path, at: int
) -> None:
    files, blocks = FaultyFiles("preadv", errno.EIO, at=at), branch(12)
    with Rig(tmp_path / "s", files=files) as rig:
        rig.put(blocks)
        files.arm()
        assert rig.landed(blocks) < 12 and files.fired == 1
        assert rig.landed(blocks) == 12
        assert rig.tier.statistics().errors["eio"] == 1


def test_a_record_that_the_drive_fails_twice_is_forgotten(tmp_path: Path) -> None:
    files, blocks = FaultyFiles("preadv", errno.EIO, times=2), branch(3)
    with Rig(tmp_path / "s", files=files) as rig:
        rig.put(blocks)
        files.arm()
        assert rig.landed(blocks) == rig.landed(blocks) == 0
        assert rig.lookup(blocks) == 0
        assert num_landed(rig.put(blocks)) == rig.landed(blocks) == 3
        assert rig.tier.statistics().quarantined == 3


def test_a_short_read_goes_on_where_it_stopped(tmp_path: Path) -> None:
    files, blocks = FaultyFiles("preadv", "short"), branch(3)
    with Rig(tmp_path / "s", files=files) as rig:
        rig.put(blocks)
        files.arm()
        assert rig.landed(blocks) == 3 and files.fired == 1


def test_a_read_that_gets_no_further_is_a_miss_and_the_block_is_forgotten(tmp_path: Path) -> None:
    files, blocks = FaultyFiles("preadv", "none"), branch(3)
    with Rig(tmp_path / "s", files=files) as rig:
        rig.put(blocks)
        files.arm()
        assert rig.landed(blocks) == 0
        assert rig.lookup(blocks) == 0
        assert rig.tier.statistics().errors["short_read"] == 1
        assert rig.tier.statistics().state == "ok"


def test_a_hole_that_cannot_be_punched_is_punched_later(tmp_path: Path) -> None:
    files = FaultyFiles("punch", errno.EIO, times=2)
    with Rig(tmp_path / "s", files=files, capacity_bytes=160 << 10) as rig:
        files.arm()
        for seed in range(9):
            rig.put(branch(5, seed))
            assert disk_takes(tmp_path / "s", at_most=160 << 10)
        assert files.fired == 2
        assert rig.landed(branch(5, 8)) == 5
    assert check_store(tmp_path / "s").ok


@pytest.mark.parametrize("at", [0, 1])
def test_a_commit_that_fails_publishes_nothing_and_leaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    plain, calls = Catalogue.commit, []
    blocks = branch(18)  # two reservations, so two commits at least

    def commit(self: Catalogue, change: Change) -> Outcome:
        if change.additions:
            calls.append(change)
            if len(calls) == at + 1:
                raise OSError(errno.ENOSPC, "catalogue: full")
        return plain(self, change)

    monkeypatch.setattr(Catalogue, "commit", commit)
    with Rig(tmp_path / "s") as rig:
        flight = rig.put(blocks)
        assert FAILED in flight.status
        assert rig.landed(blocks) == num_landed(flight)
        assert rig.tier.statistics().state == "full"
        rig.pass_time()
        assert num_landed(rig.put(blocks)) == len(blocks.keys)
        assert rig.tier.statistics().state == "ok"
    report = check_store(tmp_path / "s")
    assert report.ok and report.leftover_bytes == 0
    assert disk_takes(tmp_path / "s", at_most=report.bytes)


def test_nothing_else_is_published_in_a_segment_whose_sync_failed(tmp_path: Path) -> None:
    written, failed = Event(), Event()

    class Files(FaultyFiles):
        """The first sync fails, and only once the second group's bytes are written."""

        def fdatasync(self, fd: int) -> None:
            if not failed.is_set():
                assert written.wait(20)
                failed.set()
                raise OSError(errno.EIO, "sync")
            super().fdatasync(fd)

        def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
            done = super().pwritev(fd, buffers, offset)
            if offset >= 57344:  # the first group: two records of three blocks
                written.set()
            return done

    with Rig(tmp_path / "s", files=Files("none", 0)) as rig:
        flights = [rig.begin_put(branch(6, seed)) for seed in (0, 1)]
        for flight in flights:
            rig.settle(flight)
            assert (flight.status == FAILED).all()
        rig.pass_time()
        assert num_landed(rig.put(branch(6, 1))) == rig.landed(branch(6, 1)) == 6
    assert check_store(tmp_path / "s").ok


def test_what_landed_survives_a_power_cut(tmp_path: Path) -> None:
    files = ForgetfulFiles()
    with Rig(tmp_path / "s", files=files) as rig:
        flights = [rig.begin_put(branch(9, seed)) for seed in range(4)]
        for flight in flights:
            rig.settle(flight)
        files.lose_power()
    with Rig(tmp_path / "s") as rig:
        assert all(rig.landed(branch(9, seed)) == 9 for seed in range(4))


def test_a_power_cut_that_loses_published_bytes_is_a_miss(tmp_path: Path) -> None:
    class NoSync(ForgetfulFiles):
        def fdatasync(self, fd: int) -> None:
            pass

    files = NoSync()
    with Rig(tmp_path / "s", files=files) as rig:
        assert (rig.put(branch(5)).status == LANDED).all()
        files.lose_power()
    with Rig(tmp_path / "s") as rig:
        assert rig.landed(branch(5)) == 0
        assert rig.lookup(branch(5)) == 0


def until(rig: Rig, state: str) -> None:
    """Wait until the watchdog has brought the tier to a state."""
    for _ in range(2000):
        if rig.tier.statistics().state == state:
            return
        rig.signal.wait(rig.signal.ticks, 0.01)
    raise TimeoutError(f"{rig.tier!r} did not become {state}")


def test_a_full_disk_is_left_alone_until_one_record_has_been_taken_again(tmp_path: Path) -> None:
    files, old = FaultyFiles("allocate", errno.ENOSPC, times=2), branch(4)
    with Rig(tmp_path / "s", files=files) as rig:
        rig.put(old)
        files.arm()
        rig.put(branch(4, 1))
        calls = dict(files.seen)
        for seed in range(2, 6):
            flight = rig.begin_put(branch(4, seed))
            assert flight.done and isinstance(flight.error, StoreOut)
        assert {**files.seen, "punch": 0} == {**calls, "punch": 0}  # but to give room back
        assert rig.landed(old) == rig.lookup(old) == 4
        rig.pass_time(1.0)
        assert num_landed(rig.put(branch(9, 6))) == 0  # the probe fails, and all behind it with it
        assert files.seen["allocate"] == calls["allocate"] + 1
        rig.pass_time(1.9)
        assert rig.begin_put(branch(9, 6)).done
        rig.pass_time(0.1)
        assert num_landed(rig.put(branch(9, 6))) == 9  # the probe works, and all behind it does
        statistics = rig.tier.statistics()
        assert (statistics.state, statistics.trips) == ("ok", 1)
        assert statistics.errors["enospc"] == 2
        assert statistics.refused_blocks == 4 + 4 * 4 + 9 + 9


def test_a_drive_that_reads_nothing_is_out_and_comes_back_by_itself(tmp_path: Path) -> None:
    files = FaultyFiles("preadv", errno.EIO, times=3 + 3)
    with Rig(tmp_path / "s", files=files, io_threads=1) as rig:
        for seed in range(3):
            rig.put(branch(3, seed))
        files.arm()
        for seed in range(3):
            assert rig.landed(branch(3, seed)) == 0
        assert rig.tier.statistics().state == "failing"
        calls = dict(files.seen)
        refused = [rig.begin_put(branch(3, 5)), rig.fetch(branch(3, 0))]
        assert all(isinstance(flight.error, StoreOut) for flight in refused)
        assert rig.lookup(branch(3, 0)) == 0 and dict(files.seen) == calls
        rig.pass_time(1.0)
        while files.fired < 6:  # the probe reads what had failed, and fails
            rig.signal.wait(rig.signal.ticks, 0.01)
        assert rig.tier.statistics().state == "failing"
        rig.pass_time(2.0)
        until(rig, "ok")
        for seed in range(3):
            assert rig.landed(branch(3, seed)) == 3
        assert rig.tier.statistics().trips == 1
        assert num_landed(rig.put(branch(3, 5))) == 3


def test_one_record_that_cannot_be_read_does_not_take_the_drive_out(tmp_path: Path) -> None:
    files = FaultyFiles("preadv", errno.EIO, times=99)
    with Rig(tmp_path / "s", files=files) as rig:
        rig.put(branch(3))
        rig.put(branch(3, 1))
        files.arm()
        assert rig.landed(branch(3)) == rig.landed(branch(3)) == 0  # then it is forgotten
        assert rig.tier.statistics().state == "ok"
        files.arm(False)
        assert rig.landed(branch(3, 1)) == 3


class Broken(ArrayPool):
    """Workers cannot look at its slots, the first time they try."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        super().__init__(TierId.DRAM, num_slots, block_bytes)
        self.tried = Event()

    def view(self, slot: int) -> Bytes:
        if threading.current_thread() is not threading.main_thread() and not self.tried.is_set():
            self.tried.set()
            raise MemoryError("no memory for a view")
        return super().view(slot)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_what_breaks_on_a_worker_fails_its_put_and_leaks_nothing(
    tmp_path: Path, codec: str
) -> None:
    with Rig(tmp_path / "s", codec=codec) as rig:
        broken = rig.put(branch(4), pool=Broken(4, rig.block_bytes))
        assert num_landed(broken) < 4 and isinstance(broken.error, MemoryError)
        assert num_landed(rig.put(branch(4))) == 4
        core = rig.tier._crew.core
        assert core.reserved == core.freeing == 0 and not core.anchors
