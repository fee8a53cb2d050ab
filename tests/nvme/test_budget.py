"""Background puts: behind everybody else, and within the day's write budget."""

import errno
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.index.words import ROOT_KEY, TierId
from kvtier.tiers.contracts import FAILED, Bytes, Fetch
from kvtier.tiers.errors import BudgetSpent
from kvtier.tiers.nvme.budget import DAY_S, WriteBudget
from kvtier.tiers.nvme.catalogue import Catalogue, Change, Outcome
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.rows import DayWritten
from kvtier.tiers.nvme.settings import Geometry
from kvtier.tiers.pool import ArrayPool
from tests.nvme.faults import FaultyFiles
from tests.nvme.rig import NAMESPACE, SMALL, Rig, branch, num_landed

RECORD = 4096 + 3 * 8192
"""A record of three blocks of 5000 bytes, as `SMALL` cuts them."""

WHOLE = Geometry(extent_bytes=3 * 8192, group_bytes=1 << 20)
"""As `SMALL`, with all that a test puts in one group, in the background too."""


class Days:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 20_000.25 * DAY_S

    def __call__(self) -> float:
        return self.now


class SlowFiles(Files):
    """Stops the first write until `go` is set, and notes which block each record begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped, self.go = threading.Event(), threading.Event()
        self.jobs: list[tuple[str, bytes]] = []

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        self.jobs.append(("write", buffers[0][128:160].tobytes()))
        self.stopped.set()
        assert self.go.wait(30)
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        self.jobs.append(("read", b""))
        return super().preadv(fd, buffers, offset)


# ---- the account ---------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 4097])
def test_a_day_takes_its_limit_to_the_byte_and_the_next_day_as_much_again(limit: int) -> None:
    clock = Days()
    budget = WriteBudget(limit, None, clock)
    for _ in range(2):
        assert budget.allows(limit) and not budget.allows(limit + 1)
        budget.charge(limit)
        assert budget.written_bytes == limit
        assert budget.allows(0) and not budget.allows(1)
        clock.now += DAY_S


def test_a_day_ends_at_midnight_utc() -> None:
    clock = Days()
    budget = WriteBudget(10, DayWritten(20_000, 10), clock)
    clock.now = 20_001 * DAY_S - 0.001
    assert not budget.allows(1)
    clock.now = 20_001 * DAY_S
    assert budget.allows(10)


def test_a_clock_that_was_a_year_ahead_does_not_close_the_budget_for_a_year() -> None:
    budget = WriteBudget(10, DayWritten(20_365, 10), Days())
    assert budget.allows(10)
    budget.charge(7)
    assert budget.written_bytes == 7


def test_what_is_written_down_is_asked_for_once() -> None:
    assert WriteBudget(10, None, Days()).unsaved is None
    budget = WriteBudget(10, None, Days())
    budget.charge(3)
    written = budget.unsaved
    assert written == DayWritten(20_000, 3)
    budget.charge(4)  # while the transaction runs
    budget.saved(written)
    assert budget.unsaved == DayWritten(20_000, 7)


# ---- the store -----------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", [SMALL, WHOLE])
def test_what_exceeds_the_budget_is_refused_until_the_next_day(
    tmp_path: Path, geometry: Geometry
) -> None:
    clock, budget = Days(), 2 * RECORD
    with Rig(tmp_path / "s", write_budget_bytes=budget, clock=clock, geometry=geometry) as rig:
        first = rig.put(branch(7), background=True)
        assert list(first.status[6:]) == [FAILED] and num_landed(first) == 6
        assert isinstance(first.error, BudgetSpent) and "renewed" in str(first.error)
        again = rig.put(branch(7), background=True)
        assert num_landed(again) == 6  # what is there lands, whatever the budget
        stats = rig.tier.statistics()
        assert (stats.written_today_bytes, stats.write_budget_bytes) == (2 * RECORD, 2 * RECORD)
        assert (stats.budget_refused_blocks, stats.refused_blocks, stats.state) == (2, 2, "ok")
        clock.now += DAY_S
        assert rig.tier.statistics().written_today_bytes == 0
        assert num_landed(rig.put(branch(7), background=True)) == 7
    assert check_store(tmp_path / "s").ok


def test_other_puts_go_on_and_count(tmp_path: Path) -> None:
    with Rig(tmp_path / "s", write_budget_bytes=RECORD, clock=Days()) as rig:
        for seed in range(3):
            assert num_landed(rig.put(branch(3, seed))) == 3
        assert rig.tier.statistics().written_today_bytes == 3 * RECORD
        assert num_landed(rig.put(branch(3, 9), background=True)) == 0
        assert num_landed(rig.put(branch(3, 9))) == 3


def test_a_store_without_a_budget_of_its_own_takes_its_capacity_a_day(tmp_path: Path) -> None:
    with Rig(tmp_path / "s", capacity_bytes=5 * RECORD, clock=Days()) as rig:
        assert rig.tier.statistics().write_budget_bytes == 5 * RECORD
        landed = [num_landed(rig.put(branch(3, seed), background=True)) for seed in range(7)]
        assert landed == [3] * 5 + [0] * 2


def test_the_account_survives_reopening_to_the_byte(tmp_path: Path) -> None:
    clock = Days()
    files = FaultyFiles("fdatasync", errno.EIO)
    with Rig(tmp_path / "s", files=files, clock=clock) as rig:
        rig.put(branch(4, 1))
        files.arm()
        assert num_landed(rig.put(branch(3, 2))) == 0  # written, and in vain
        written = rig.tier.statistics().written_today_bytes
        assert written == RECORD + (4096 + 8192) + RECORD
    for limit, allowed in [(written + RECORD - 1, 0), (written + RECORD, 3)]:
        with Rig(tmp_path / "s", write_budget_bytes=limit, clock=clock) as rig:
            assert rig.tier.statistics().written_today_bytes == written
            assert num_landed(rig.put(branch(3, 3), background=True)) == allowed
    clock.now += DAY_S
    with Rig(tmp_path / "s", clock=clock) as rig:
        assert rig.tier.statistics().written_today_bytes == 0


def test_the_account_is_written_by_the_transactions_that_publish_and_by_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, told = Catalogue.commit, list[tuple[int, DayWritten | None]]()

    def commit(self: Catalogue, change: Change) -> Outcome:
        told.append((len(change.additions), change.written))
        return plain(self, change)

    monkeypatch.setattr(Catalogue, "commit", commit)
    with Rig(tmp_path / "s", clock=Days()) as rig:
        for seed in range(3):
            rig.put(branch(3, seed))
            rig.landed(branch(3, seed))  # a use, to be saved when the tier closes
    published = [written for additions, written in told if additions]
    assert published == [DayWritten(20_000, n * RECORD) for n in (1, 2, 3)]
    others = [written for additions, written in told if not additions]
    assert others and set(others) == {None}


def test_a_read_only_tier_tells_the_account(tmp_path: Path) -> None:
    clock = Days()
    with Rig(tmp_path / "s", clock=clock) as rig:
        rig.put(branch(3))
    with Rig(tmp_path / "s", read_only=True, clock=clock) as rig:
        assert rig.tier.statistics().written_today_bytes == RECORD


# ---- who goes first ------------------------------------------------------------------------------


def test_puts_that_someone_waits_for_overtake_the_background(tmp_path: Path) -> None:
    files = SlowFiles()
    with Rig(tmp_path / "s", files=files) as rig:
        flights = [rig.begin_put(branch(3, 1))]
        assert files.stopped.wait(30)
        flights += [rig.begin_put(branch(3, seed), background=True) for seed in (2, 3)]
        flights += [rig.begin_put(branch(3, 4))]
        files.go.set()
        for flight in flights:
            rig.settle(flight)
            assert num_landed(flight) == 3
    order = [key for call, key in files.jobs if call == "write"]
    assert order[:2] == [branch(3, seed).keys[0] for seed in (1, 4)]
    assert set(order[2:]) == {branch(3, seed).keys[0] for seed in (2, 3)}


def test_reads_overtake_background_puts(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        rig.put(branch(3, 1))
    files = SlowFiles()
    with Rig(tmp_path / "s", files=files, geometry=WHOLE, io_threads=1) as rig:
        behind = rig.begin_put(branch(12, 2), background=True)  # four records, one group
        assert files.stopped.wait(30)
        pool = ArrayPool(TierId.DRAM, 3, rig.block_bytes)
        wanted, nothing = branch(3, 1), branch(3, 1).tokens[:0]
        ahead = rig.tier.fetch(
            Fetch(NAMESPACE, ROOT_KEY, wanted.tokens, wanted.keys, nothing, pool, pool.alloc(3))
        )
        for _ in range(3):  # the loop has dealt with the fetch as far as it can
            assert rig.lookup(wanted) == 3
        files.go.set()
        for flight in (ahead, behind):
            rig.settle(flight)
            assert num_landed(flight) == len(flight)
    calls = [call for call, _ in files.jobs]
    first, reads = calls[0], calls.count("read")
    assert (first, reads > 0, calls[1 : 1 + reads]) == ("write", True, ["read"] * reads)
    assert calls.count("write") == 4


@pytest.mark.parametrize("part", [(0, 5), (4, 7), (5, 7)])
def test_a_put_takes_its_ancestors_out_of_the_background(
    tmp_path: Path, part: tuple[int, int]
) -> None:
    """Else it would wait for, and be refused with, something that nobody waits for."""
    files = SlowFiles()
    with Rig(tmp_path / "s", files=files, write_budget_bytes=0) as rig:
        first = rig.begin_put(branch(3, 1))
        assert files.stopped.wait(30)
        lonely = rig.begin_put(branch(3, 2), background=True)
        behind = rig.begin_put(branch(7).part(0, 5), background=True)
        ahead = rig.begin_put(branch(7).part(*part))
        files.go.set()
        for flight in (first, lonely, behind, ahead):
            rig.settle(flight)
        assert [num_landed(f) for f in (first, lonely, behind)] == [3, 0, 5]
        assert num_landed(ahead) == len(ahead)
        assert rig.tier.statistics().budget_refused_blocks == 3
    assert check_store(tmp_path / "s").ok
