"""The launch guard remembers what has passed, and is as strict as one that forgets."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from kvtier.index.words import TierId
from kvtier.tiers.contracts import Signal
from kvtier.tiers.device import CpuDevice, Event
from kvtier.tiers.errors import LaunchRefused
from kvtier.tiers.guard import LaunchGuard, SlotBook, SlotUse
from kvtier.tiers.mover import Mover
from kvtier.tiers.pool import SlotPool
from kvtier.tiers.table import BlockTable, Line
from tests.tiers.cache_rig import NAMESPACE, doc
from tests.tiers.sim_rig import GpuRig, SimRig

SLOTS = 12


@dataclass
class Owner:
    """A lease, as far as the guard knows."""

    id: int
    line: Line = field(default_factory=Line)


def make_guard(num_slots: int = SLOTS) -> tuple[SlotBook, LaunchGuard]:
    book = SlotBook(num_slots)
    return book, LaunchGuard(book, SlotPool(TierId.HBM, num_slots, 8), None, nullcontext())


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def table(book: SlotBook, *numbers: int) -> BlockTable:
    return BlockTable(slots(*numbers), book.generations(slots(*numbers)))


def first_refusal(
    book: SlotBook, tables: Sequence[tuple[Owner, BlockTable]]
) -> tuple[int, int] | None:
    """Lease and slot that a guard without a memory names."""
    for lease, wanted in tables:
        bad = book.refused(wanted, lease.id)
        if len(bad):
            return lease.id, int(wanted.slots[bad[0]])
    return None


@pytest.mark.parametrize("seed", range(0, 400, 100))
def test_it_refuses_exactly_what_a_look_at_every_slot_refuses(seed: int) -> None:
    """Any marks, in any order, of any slots: those of a sound cache are among them."""
    outcomes = [refused for each in range(seed, seed + 100) for refused in walk(Random(each))]
    assert len(outcomes) > 1000 and 0.1 < np.mean(outcomes) < 0.9


def walk(random: Random) -> list[bool]:
    """Random steps; for every check in them, whether it was refused."""
    book, guard = make_guard()
    outcomes: list[bool] = []
    owners = [Owner(number) for number in range(3)]
    for _ in range(120):
        owner = random.choice(owners)
        some = slots(*random.sample(range(SLOTS), random.randint(1, 2)))
        match random.choices(range(6), weights=[1, 4, 4, 1, 1, 4])[0]:
            case 0:
                book.mark(some, random.choice(list(SlotUse)), random.randint(-1, 2))
            case 1:
                book.mark(some, SlotUse.PRIVATE, owner.id)
                owner.line.append(some, book.generations(some))
            case 2:
                book.mark(some, SlotUse.RESIDENT)
                owner.line.append(some, book.generations(some))
            case 3:
                owner.line = owner.line.begun_like(random.randint(0, len(owner.line)))
            case 4:
                guard.ended(owner)
            case 5:
                asked = [
                    (each, any_table(random, each))
                    for each in random.choices(owners, k=random.randint(1, 3))
                ]
                refused = first_refusal(book, asked)
                outcomes.append(refused is not None)
                if refused is None:
                    guard.check(asked)
                else:
                    wanted = f"lease {refused[0]} refused: slot {refused[1]} "
                    with pytest.raises(LaunchRefused, match=wanted):
                        guard.check(asked)
    return outcomes


def any_table(random: Random, owner: Owner) -> BlockTable:
    """The beginning of the owner's line, or the same of no line."""
    found = owner.line.table().first(random.randint(0, len(owner.line)))
    return found if random.random() < 0.9 else BlockTable(found.slots, found.generations)


def test_a_table_from_before_a_slot_was_recycled_is_refused_though_the_slot_is_whole() -> None:
    book, guard = make_guard()
    owner = Owner(1)
    book.mark(slots(3, 4), SlotUse.RESIDENT)
    old = table(book, 3, 4)
    guard.check([(owner, old)])
    book.mark(slots(4), SlotUse.FREE)
    book.mark(slots(4), SlotUse.FILLING)
    book.mark(slots(4), SlotUse.RESIDENT)
    with pytest.raises(LaunchRefused, match="slot 4 is RESIDENT in generation 1, named in 0"):
        guard.check([(owner, old)])
    guard.check([(owner, table(book, 3, 4))])


def test_a_slot_that_its_own_lease_got_back_is_another_one() -> None:
    book, guard = make_guard()
    owner = Owner(1)
    book.mark(slots(2), SlotUse.PRIVATE, owner.id)
    old = table(book, 2)
    book.mark(slots(2), SlotUse.FREE)
    book.mark(slots(2), SlotUse.PRIVATE, owner.id)
    with pytest.raises(LaunchRefused, match="slot 2 is PRIVATE by lease 1 in generation 1"):
        guard.check([(owner, old)])


def test_what_has_passed_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    book, guard = make_guard()
    owner, other = Owner(1), Owner(2)
    looked: list[int] = []
    refused = book.refused

    def counted(wanted: BlockTable, lease: int) -> np.ndarray:
        looked.append(len(wanted))
        return refused(wanted, lease)

    monkeypatch.setattr(book, "refused", counted)
    book.mark(slots(*range(8)), SlotUse.RESIDENT)
    owner.line.append(slots(*range(5)), book.generations(slots(*range(5))))
    for n in (5, 5, 3):
        guard.check([(owner, owner.line.table().first(n))])
    owner.line.append(slots(6, 7), np.zeros(2, np.int64))
    guard.check([(owner, owner.line.table())])
    book.mark(slots(9), SlotUse.FREE)  # nobody's: no new epoch
    guard.check([(owner, owner.line.table())])
    assert looked == [5, 2]
    guard.check([(other, owner.line.table())])  # what passed for one has not for another
    book.mark(slots(6), SlotUse.RESIDENT)
    guard.check([(owner, owner.line.table())])
    assert looked == [5, 2, 7]
    book.mark(slots(6), SlotUse.FILLING)  # nobody should, while two leases name it: a new epoch
    book.mark(slots(6), SlotUse.RESIDENT)
    guard.check([(owner, owner.line.table())])
    guard.check([(owner, owner.line.table())])
    assert looked == [5, 2, 7, 7]
    book.mark(slots(6), SlotUse.FREE)
    with pytest.raises(LaunchRefused):
        guard.check([(owner, owner.line.table())])


def test_nothing_is_watched_once_the_leases_have_ended() -> None:
    book, guard = make_guard()
    book.mark(slots(*range(8)), SlotUse.RESIDENT)
    owners = [Owner(1), Owner(2)]
    for owner in owners:
        for some in (slots(0, 1), slots(2 + owner.id)):
            owner.line.append(some, book.generations(some))
            guard.check([(owner, owner.line.table())])
    assert book.num_watched == 4
    guard.ended(owners[0])
    assert book.num_watched == 3
    guard.ended(owners[0])
    guard.ended(owners[1])
    before = book.epoch
    book.mark(slots(*range(8)), SlotUse.FREE)
    assert (book.num_watched, book.epoch) == (0, before)


def test_a_launch_that_was_not_checked_has_not_passed() -> None:
    book, pool = SlotBook(SLOTS), SlotPool(TierId.HBM, SLOTS, 8)
    guard = LaunchGuard(book, pool, Mover(Busy(Signal())), nullcontext())
    owner = Owner(1)
    owner.line.append(slots(1), np.zeros(1, np.int64))
    wanted = owner.line.table()
    guard.launched([(owner, wanted)])
    with pytest.raises(LaunchRefused, match="slot 1 is FREE"):
        guard.check([(owner, wanted)])


class Busy(CpuDevice):
    """Compute that never ends."""

    def record(self, stream: str) -> Event:
        return Never()


class Never:
    done = False
    error = None

    def wait(self, timeout_s: float | None) -> bool:
        return False


@dataclass
class Books:
    """A guard over a device that is always computing, and what it tells the mover."""

    book: SlotBook
    guard: LaunchGuard
    written: list[list[int]]
    read: list[list[int]]


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Books:
    book, pool = SlotBook(SLOTS), SlotPool(TierId.HBM, SLOTS, 8)
    mover = Mover(Busy(Signal()))
    books = Books(book, LaunchGuard(book, pool, mover, nullcontext()), [], [])
    monkeypatch.setattr(mover, "computed", lambda _, s: books.written.append(s.tolist()))
    monkeypatch.setattr(mover, "reading", lambda _, s, event: books.read.append(s.tolist()))
    return books


def test_the_mover_hears_of_written_slots_at_each_launch_and_of_read_ones_at_the_end(
    busy: Books,
) -> None:
    owner = Owner(1)
    busy.book.mark(slots(1, 2), SlotUse.RESIDENT)
    busy.book.mark(slots(3, 4), SlotUse.PRIVATE, owner.id)
    owner.line.append(slots(1, 2, 3, 4), np.zeros(4, np.int64))
    for n in (3, 4):
        launch = [(owner, owner.line.table().first(n))]
        busy.guard.check(launch)
        busy.guard.launched(launch)
    busy.book.mark(slots(3), SlotUse.RESIDENT)  # committed
    busy.guard.launched(launch)
    busy.guard.launched(launch)
    assert busy.written == [[3], [3, 4], [4], [4]] and busy.read == []
    busy.guard.ended(owner)
    assert busy.read == [[1, 2, 3, 4]]


def test_of_a_launch_longer_than_what_was_checked_every_slot_counts_as_read(busy: Books) -> None:
    owner = Owner(1)
    busy.book.mark(slots(1, 2, 3), SlotUse.RESIDENT)
    owner.line.append(slots(1, 2, 3), np.zeros(3, np.int64))
    busy.guard.check([(owner, owner.line.table().first(1))])
    busy.guard.launched([(owner, owner.line.table())])
    busy.guard.ended(owner)
    assert busy.read == [[1, 2, 3]]


def test_slots_that_no_lease_may_hold_for_long_are_on_record_at_once(busy: Books) -> None:
    owner = Owner(1)
    busy.book.mark(slots(1, 2), SlotUse.RESIDENT)
    busy.guard.launched([(owner, table(busy.book, 1, 2))])
    assert busy.read == [[1, 2]]
    busy.guard.ended(owner)
    assert busy.read == [[1, 2]]


def test_what_a_lease_no_longer_names_was_read_all_the_same(busy: Books) -> None:
    """A launch of five blocks is under way; then the line is another one, of two."""
    owner = Owner(1)
    busy.book.mark(slots(*range(5)), SlotUse.RESIDENT)
    owner.line.append(slots(*range(5)), np.zeros(5, np.int64))
    busy.guard.check([(owner, owner.line.table())])
    busy.guard.launched([(owner, owner.line.table())])
    owner.line = owner.line.begun_like(2)
    busy.guard.check([(owner, owner.line.table())])
    assert busy.read == [[0, 1, 2, 3, 4]]


def test_a_lease_whose_block_was_taken_from_it_cannot_launch() -> None:
    """What no sound cache does: a pinned block is evicted, and its slot holds another block."""
    rig = SimRig.make(hbm=4, dram=8, store=False)
    lease, _ = rig.serve(doc(1, 2))
    mine = lease.table
    rig.cache.guard.check([(lease, mine)])
    book = rig.cache.guard._book
    book.mark(mine.slots[1:], SlotUse.FREE)
    book.mark(mine.slots[1:], SlotUse.RESIDENT)
    with pytest.raises(LaunchRefused, match=f"slot {mine.slots[1]} is RESIDENT in generation 1"):
        rig.cache.guard.check([(lease, lease.table)])


def test_a_table_goes_on_where_nothing_was_exchanged_and_begins_anew_where_it_was() -> None:
    rig = SimRig.make(hbm=12, dram=None, store=False)
    first, second = (rig.cache.acquire(NAMESPACE, doc(1, 3)) for _ in range(2))
    rig.cache.extend(first, 2)
    early = first.table
    rig.cache.extend(first, 1)
    assert first.table.line is early.line and len(early) == 2 and len(first.table) == 3
    rig.cache.release(second)
    twin = rig.cache.acquire(NAMESPACE, doc(1, 3))
    assert rig.compute(first, doc(1, 3)) == 3
    assert first.table.line is early.line and first.table is first.table
    before = twin.table
    rig.cache.extend(twin, 3)
    own = twin.table
    assert rig.compute(twin, doc(1, 3)) == 3  # adopts the blocks of the first
    assert twin.table.line is not own.line and len(before) == 0
    assert np.array_equal(twin.block_table, first.block_table)
    with pytest.raises(LaunchRefused, match="FREE"):
        rig.cache.guard.check([(twin, own)])
    rig.cache.release(first)
    rig.cache.release(twin)
    assert rig.cache.guard._book.num_watched == 0


def test_slots_of_a_released_lease_wait_for_the_compute_that_still_reads_them() -> None:
    rig = GpuRig.make(hbm=3, dram=6, store=False, async_compute=True)
    rig.use(doc(1, 2))
    rig.come_to_rest()
    reader = rig.cache.acquire(NAMESPACE, doc(1, 3))
    assert reader.ticket.wait(rig.cache.clock() + 100)
    rig.launch(reader, doc(1, 3))  # reads two blocks, writes one
    rig.launch(reader, doc(1, 3))
    rig.cache.release(reader)
    rig.cache.shed(TierId.HBM, rig.cache.clock())
    assert rig.cache.statistics().pools[0].free == 0
    rig.come_to_rest()
    assert rig.cache.statistics().pools[0].free >= 1
