"""A drive that does not answer: nobody waits for it, no late byte is served wrong, it recovers."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.index.words import TierId
from kvtier.tiers.contracts import FAILED, LANDED, PENDING, Answer, Fetch, Flight
from kvtier.tiers.errors import StoreInUse, StoreOut
from kvtier.tiers.nvme.catalogue import Catalogue
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.health import Patience
from kvtier.tiers.nvme.settings import Geometry
from kvtier.tiers.pool import ArrayPool
from tests.nvme.faults import HangingFiles
from tests.nvme.rig import NAMESPACE, Branch, Rig, branch, num_landed

QUICK = Patience(stall_s=0.1, first_s=0.05, most_s=0.2)
SECOND = 1.0
ROOMY, TIGHT = 4 << 20, 160 << 10
CALLS = [
    ("open", ROOMY, 0),
    ("sync_directory", ROOMY, 0),
    ("allocate", ROOMY, 0),
    ("pwritev", ROOMY, 0),
    ("pwritev", ROOMY, 2),
    ("fdatasync", ROOMY, 0),
    ("preadv", ROOMY, 0),
    ("punch", TIGHT, 0),
    ("unlink", TIGHT, 0),
    ("commit", ROOMY, 0),
    ("commit", TIGHT, 0),
    ("find", ROOMY, 0),
    ("walk", ROOMY, 0),
    ("count", ROOMY, 0),
]


def hang_in_catalogue(files: HangingFiles, patch: pytest.MonkeyPatch) -> None:
    """LMDB's calls hang as `files` says, too: `commit` on its thread, the others on the loop."""

    def hanging(name: str) -> Callable[..., Any]:
        plain = getattr(Catalogue, name)

        def call(*args: Any, **options: Any) -> Any:
            files.hang(name)
            return plain(*args, **options)

        return call

    for name in ("commit", "find", "walk", "count"):
        patch.setattr(Catalogue, name, hanging(name))


def fetch(rig: Rig, blocks: Branch, pool: ArrayPool) -> Flight:
    """Begin a fetch into the first slots of a pool."""
    count = len(blocks.keys)
    slots = pool.alloc(count)
    return rig.tier.fetch(
        Fetch(NAMESPACE, blocks.parent, blocks.tokens, blocks.keys, blocks.tokens[:0], pool, slots)
    )


def until(rig: Rig, true: Callable[[], bool], seconds: float = 20.0) -> float:
    """Wait for something to become true; how long it took."""
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < seconds, f"{rig.tier!r} did not come to it"
        rig.signal.wait(rig.signal.ticks, 0.01)
    return time.monotonic() - start


@pytest.fixture(params=CALLS, ids=lambda p: f"{p[0]}-{p[1]}-{p[2]}")
def hanging(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Rig, HangingFiles]]:
    """A store of one old branch, whose next call of some kind will not return."""
    call, capacity, at = request.param
    files = HangingFiles(call, at=at)
    hang_in_catalogue(files, monkeypatch)
    geometry = Geometry(extent_bytes=3 * 8192, group_bytes=64 << 10, segment_bytes=50 << 10)
    with Rig(
        tmp_path / "s",
        files=files,
        capacity_bytes=capacity,
        geometry=geometry,
        monotonic=time.monotonic,
        patience=QUICK,
    ) as rig:
        for seed in range(5 if capacity == TIGHT else 1):
            assert num_landed(rig.put(branch(4, seed))) == 4
        try:
            yield rig, files
        finally:
            files.release()


def test_whoever_waits_for_a_call_that_hangs_is_answered_and_the_tier_comes_back(
    hanging: tuple[Rig, HangingFiles],
) -> None:
    rig, files = hanging
    old, new = branch(4, 0), branch(9, 7)
    reading = ArrayPool(TierId.DRAM, 4, rig.block_bytes)
    writing = ArrayPool(TierId.DRAM, 9, rig.block_bytes)
    files.arm()
    put = rig.begin_put(new, pool=writing)
    waiting: list[Answer | Flight] = [put, rig.tier.lookup(NAMESPACE, old.keys, old.tokens)]
    read = fetch(rig, old, reading)
    assert files.entered.wait(20)
    waiting.append(rig.tier.persist(NAMESPACE, old.keys, old.tokens))
    took = until(rig, lambda: all(w.done for w in waiting) and (read.done or read.stalled))
    assert took < SECOND
    until(rig, lambda: rig.tier.statistics().state == "hung")
    writing.array[:] = 0xEE  # the slots of the put are the caller's again
    assert rig.tier.lookup(NAMESPACE, old.keys, old.tokens).value == 0
    for refused in (rig.begin_put(branch(2, 9)), fetch(rig, old, ArrayPool(TierId.DRAM, 4, 5000))):
        assert (refused.status == FAILED).all() and isinstance(refused.error, StoreOut)
    statistics = rig.tier.statistics()
    assert statistics.errors["hung"] == statistics.trips == 1
    assert statistics.stalled_reads == read.stalled
    files.release()
    until(rig, lambda: rig.tier.statistics().state == "ok")
    until(rig, lambda: read.done)
    kept = [int(slot) for slot, told in enumerate(read.status) if told == LANDED]
    assert kept == list(range(len(kept)))
    rig.landed(new)  # the rig compares every byte: nothing of the reused slots was published
    assert num_landed(rig.put(new)) == rig.landed(new) == 9
    used = rig.tier.statistics().used_bytes
    rig.tier.close()
    report = check_store(rig.path)
    assert report.ok, report.problems
    assert report.bytes == used


def test_blocks_being_read_keep_their_slots_and_those_not_begun_fail(tmp_path: Path) -> None:
    files, blocks = HangingFiles("preadv", at=1), branch(9)
    with Rig(
        tmp_path / "s", files=files, monotonic=time.monotonic, patience=QUICK, io_threads=1
    ) as rig:
        rig.put(blocks)
        pool = ArrayPool(TierId.DRAM, 9, rig.block_bytes)
        files.arm()
        flight = fetch(rig, blocks, pool)
        until(rig, lambda: flight.stalled)
        assert flight.status.tolist() == [LANDED] * 3 + [PENDING] * 3 + [FAILED] * 3
        files.release()
        until(rig, lambda: flight.done)
        assert flight.status.tolist() == [LANDED] * 6 + [FAILED] * 3
        until(rig, lambda: rig.tier.statistics().state == "ok")
        assert rig.landed(blocks) == 9


@pytest.mark.parametrize("call", ["preadv", "pwritev", "walk"])
def test_closing_does_not_wait_for_a_call_that_hangs(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, blocks = HangingFiles(call), branch(4)
    hang_in_catalogue(files, monkeypatch)
    rig = Rig(tmp_path / "s", files=files)  # its clock stands: only closing ends the waiting
    rig.put(blocks)
    files.arm()
    flights = [rig.begin_put(branch(4, 1)), fetch(rig, blocks, ArrayPool(TierId.DRAM, 4, 5000))]
    assert files.entered.wait(20)
    start = time.monotonic()
    rig.tier.close(deadline_s=0.2)
    rig.tier.close(deadline_s=0.2)
    assert time.monotonic() - start < 6
    assert all(flight.done or flight.stalled for flight in flights)
    with pytest.raises(StoreInUse):  # a late write may still land
        Rig(tmp_path / "s")
    files.release()
    rig.tier.close()
    with Rig(tmp_path / "s") as again:
        assert again.landed(blocks) == 4
    assert check_store(tmp_path / "s").ok


CHILD = """
import os, sys
from pathlib import Path
from kvtier.tiers.contracts import Signal
from kvtier.tiers.nvme.files import Files
from tests.nvme.rig import Rig, branch

class Stuck(Files):
    def {call}(self, *args, **options):
        if stuck:
            os.read(pipe, 1)  # nobody writes: never returns
        return Files.{call}(self, *args, **options)

stuck, (pipe, _) = False, os.pipe()
rig = Rig(Path(sys.argv[1]), files=Stuck())
rig.put(branch(4))
stuck = True
rig.begin_put(branch(4, 1))
rig.tier.close(deadline_s=0.2)
print("closed", flush=True)
"""


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_a_process_ends_though_a_call_never_returns(tmp_path: Path, call: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD.format(call=call), str(tmp_path / "s")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (child.returncode, child.stdout) == (0, "closed\n"), child.stderr
    with Rig(tmp_path / "s") as rig:
        assert rig.landed(branch(4)) == 4


def test_reads_not_begun_by_their_deadline_are_dropped(tmp_path: Path) -> None:
    files, blocks = HangingFiles("preadv", at=1), branch(9)
    with Rig(tmp_path / "s", files=files, io_threads=1) as rig:
        rig.put(blocks)
        pool = ArrayPool(TierId.DRAM, 9, rig.block_bytes)
        request = Fetch(
            NAMESPACE,
            blocks.parent,
            blocks.tokens,
            blocks.keys,
            blocks.tokens[:0],
            pool,
            pool.alloc(9),
            deadline=rig.now_s + 5,
        )
        files.arm()
        flight = rig.tier.fetch(request)
        assert files.entered.wait(20)
        rig.pass_time(10)
        files.release()
        rig.settle(flight)
        assert flight.status.tolist() == [LANDED] * 6 + [FAILED] * 3
        assert rig.landed(blocks) == 9


def test_a_fetch_that_is_cancelled_ends_early(tmp_path: Path) -> None:
    files, blocks = HangingFiles("preadv", at=1), branch(9)
    with Rig(tmp_path / "s", files=files, io_threads=1) as rig:
        rig.put(blocks)
        files.arm()
        flight = fetch(rig, blocks, ArrayPool(TierId.DRAM, 9, rig.block_bytes))
        assert files.entered.wait(20)
        flight.cancel()
        files.release()
        rig.settle(flight)
        assert flight.status.tolist() == [LANDED] * 6 + [FAILED] * 3


def test_a_put_that_is_cancelled_is_written_no_further(tmp_path: Path) -> None:
    files = HangingFiles("pwritev")
    with Rig(tmp_path / "s", files=files) as rig:
        files.arm()
        first = rig.begin_put(branch(4))
        assert files.entered.wait(20)
        second, third = rig.begin_put(branch(4, 1)), rig.begin_put(branch(4, 2))
        second.cancel()
        files.release()
        for flight in (first, second, third):
            rig.settle(flight)
        assert [num_landed(flight) for flight in (first, second, third)] == [4, 0, 4]
        assert rig.landed(branch(4, 1)) == 0
    assert check_store(tmp_path / "s").ok


def test_a_slow_drive_is_no_hung_one(tmp_path: Path) -> None:
    """A write may take longer than a read; and where all stood still, nothing hung."""
    files = HangingFiles("pwritev")
    with Rig(tmp_path / "s", files=files) as rig:
        files.arm()
        flight = rig.begin_put(branch(4))
        assert files.entered.wait(20)
        rig.pass_time(1.9)
        assert rig.tier._crew.watch.overdue() is None
        rig.pass_time(0.2)
        assert rig.tier._crew.watch.overdue() is not None
        files.release()
        rig.settle(flight)
