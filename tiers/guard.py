"""The last look before a kernel runs: every slot in its block tables may be read by this lease.

A slot of the top pool may be named in a launch if it is RESIDENT, or private to the very lease
that launches (being filled by its own compute), and was not recycled since the table was made. A
slot that a copy is filling, that is free, or that another lease fills, never. Knows nothing of
tokens, keys or other tiers.

The guard stays on, so it must cost a launch next to nothing, however long the contexts are. What
has passed for a lease is remembered, and only what its table has gained since is looked at:

    line of the lease   0 ................ blocks ........ len(table)
                        passed, watched      looked at now

That is as strict as looking at everything. A slot that has passed stays allowed until it is marked
as anything but RESIDENT. The book knows which slots have passed for somebody (it *watches* them),
and such a mark on one of them begins a new epoch, in which all is looked at again. A slot is
watched until its lease has ended, so that in a cache without bugs epochs hardly ever change.
"""

from collections.abc import Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.index.words import Slots
from kvtier.tiers.contracts import Pool
from kvtier.tiers.device import COMPUTE, Event
from kvtier.tiers.errors import LaunchRefused
from kvtier.tiers.mover import Mover
from kvtier.tiers.table import BlockTable, Generations

Owners = npt.NDArray[np.int64]
"""Lease numbers, one a slot."""

# No epoch is: the table of a launch that was not checked has not passed.
_NEVER = -1


class SlotUse(IntEnum):
    FREE = 0
    FILLING = 1  # a copy writes it
    PRIVATE = 2  # compute writes it, under one lease
    RESIDENT = 3
    COPYING = 4  # a copy writes it, for one lease (the tail of a fork)


class SlotBook:
    """What each slot of the top pool is used for: use, owning lease, generation.

    `epoch` changes when a slot that is watched may have become forbidden to whom it passed for.
    """

    def __init__(self, num_slots: int) -> None:
        self._use = np.zeros(num_slots, np.uint8)
        self._owner = np.full(num_slots, -1, np.int64)
        self._generation = np.zeros(num_slots, np.int64)
        self._watched = np.zeros(num_slots, np.int32)
        self.epoch = 0

    def mark(self, slots: Slots, use: SlotUse, owner: int = -1) -> None:
        """What the slots are used for from now on. FREE ends their generation."""
        if use is not SlotUse.RESIDENT and self._watched[slots].any():
            self.epoch += 1
        if use is SlotUse.FREE:
            self._generation[slots] += 1
        self._use[slots] = use
        self._owner[slots] = owner

    def count(self, use: SlotUse) -> int:
        return int(np.count_nonzero(self._use == use))

    def is_used(self, slots: Slots, use: SlotUse, owner: int | Owners) -> npt.NDArray[np.bool_]:
        """Which of `slots` `owner` (each its own, in an array) has in this use."""
        used: npt.NDArray[np.bool_] = (self._use[slots] == use) & (self._owner[slots] == owner)
        return used

    def generations(self, slots: Slots) -> Generations:
        """int64 `[n]`: how often each slot was given up; 0 for what is outside the pool."""
        outside = self._outside(slots)
        found: Generations = np.where(outside, 0, self._generation[np.where(outside, 0, slots)])
        return found

    def watch(self, slots: Slots) -> None:
        """These slots, inside the pool, have passed for someone."""
        np.add.at(self._watched, slots, 1)

    def unwatch(self, slots: Slots) -> None:
        """Undoes `watch`."""
        np.subtract.at(self._watched, slots, 1)

    @property
    def num_watched(self) -> int:
        return int(np.count_nonzero(self._watched))

    def refused(self, table: BlockTable, owner: int | Owners) -> npt.NDArray[np.intp]:
        """Where `table` names what a launch by `owner` may not, looking at every slot of it.

        `owner`: of the whole table, or of each of its slots.
        """
        outside = self._outside(table.slots)
        inside = np.where(outside, 0, table.slots)
        use = self._use[inside]
        fine = use == SlotUse.RESIDENT
        fine |= (use == SlotUse.PRIVATE) & (self._owner[inside] == owner)
        fine &= self._generation[inside] == table.generations
        return np.flatnonzero(outside | ~fine)

    def describe(self, slot: int, generation: int) -> str:
        """What is wrong with a slot that a table names with this generation."""
        if not 0 <= slot < len(self._use):
            return f"slot {slot} is outside the pool of {len(self._use)}"
        use = SlotUse(int(self._use[slot]))
        owned = use in (SlotUse.PRIVATE, SlotUse.COPYING)
        owner = f" by lease {int(self._owner[slot])}" if owned else ""
        found = int(self._generation[slot])
        stale = "" if found == generation else f" in generation {found}, named in {generation}"
        return f"slot {slot} is {use.name}{owner}{stale}"

    def _outside(self, slots: Slots) -> npt.NDArray[np.bool_]:
        outside: npt.NDArray[np.bool_] = (slots < 0) | (slots >= len(self._use))
        return outside


class Launches(Protocol):
    """Whose launch it is."""

    @property
    def id(self) -> int: ...


@dataclass
class _Passed:
    """What is known of one lease: this table passed in `epoch`, and its last launch."""

    table: BlockTable
    epoch: int
    settled: int = 0
    """So many leading blocks are shared: no compute of this lease writes them any more."""
    launch: Event | None = None


class LaunchGuard:
    """Checks block tables against the slot book.

    Call `check` before a launch, `launched` after it and before its blocks are committed, `ended`
    before the lease lets go of its blocks.
    """

    def __init__(
        self, book: SlotBook, pool: Pool, mover: Mover | None, lock: AbstractContextManager[object]
    ) -> None:
        self._book = book
        self._pool = pool
        self._mover = mover
        self._lock = lock
        self._passed: dict[int, _Passed] = {}
        self._latest: Event | None = None

    def check(self, tables: Sequence[tuple[Launches, BlockTable]]) -> None:
        """Raise `LaunchRefused` if any table names a slot its lease may not read.

        A lease's table costs what it has gained since the last check, or all of it in a new epoch.
        """
        with self._lock:
            epoch = self._book.epoch
            gained: list[tuple[Launches, BlockTable]] = []
            unknown: list[BlockTable] = []
            for lease, table in tables:
                passed = self._passed.get(lease.id)
                known = 0
                if passed is not None and passed.epoch == epoch and passed.table.line is table.line:
                    known = len(passed.table)
                if known < len(table):
                    gained.append((lease, table))
                    unknown.append(table.after(known))
            if gained:
                self._require([lease.id for lease, _ in gained], unknown)
                for lease, table in gained:
                    if table.line is not None:
                        self._remember(lease.id, table, epoch)

    def launched(self, tables: Sequence[tuple[Launches, BlockTable]]) -> None:
        """Remember that queued compute reads these slots, and writes those private to its lease.

        None is reused before it ran, and no copy reads what it writes before that. What is shared
        on a lease's line stays as long as the lease does, so that the mover is told of it when the
        lease has `ended`; of a table of no line it is told at once.
        """
        if self._mover is None or not tables:
            return
        launch = self._mover.device.record(COMPUTE)
        if launch.done:
            return  # compute is over: on a CPU it always is
        with self._lock:
            self._latest = launch
            launching = [self._launching(lease.id, table, launch) for lease, table in tables]
            tails = [t.slots[p.settled :] for p, (_, t) in zip(launching, tables, strict=True)]
            slots, owners = np.concatenate(tails), _owners([lease.id for lease, _ in tables], tails)
            private = self._book.is_used(slots, SlotUse.PRIVATE, owners)
            if not private.all():
                start = 0
                for passed, tail in zip(launching, tails, strict=True):
                    own = private[start : start + len(tail)]
                    passed.settled += int(np.argmax(own)) if own.any() else len(tail)
                    start += len(tail)
        self._mover.computed(self._pool, slots[private])

    def ended(self, lease: Launches) -> None:
        """A lease is about to let go of its blocks: none is reused before its last launch ran."""
        with self._lock:
            passed = self._passed.pop(lease.id, None)
            if passed is not None:
                self._forget(passed)

    def _require(self, leases: Sequence[int], tables: Sequence[BlockTable]) -> None:
        table = BlockTable.joined(tables)
        owners = _owners(leases, tables)
        bad = self._book.refused(table, owners)
        if len(bad):
            first = int(bad[0])
            what = self._book.describe(int(table.slots[first]), int(table.generations[first]))
            raise LaunchRefused(f"launch by lease {owners[first]} refused: {what}")

    def _launching(self, lease: int, table: BlockTable, launch: Event) -> _Passed:
        if table.line is None:
            self._reading(table, launch)
            return _Passed(table, _NEVER)
        passed = self._passed.get(lease)
        if passed is None or passed.table.line is not table.line or len(passed.table) < len(table):
            passed = self._remember(lease, table, _NEVER)
        passed.launch = launch
        return passed

    def _remember(self, lease: int, table: BlockTable, epoch: int) -> _Passed:
        passed = self._passed.get(lease)
        if passed is not None:
            if passed.epoch == epoch and passed.table.line is table.line:
                if len(table) > len(passed.table):
                    self._book.watch(table.slots[len(passed.table) :])
                    passed.table = table
                return passed
            self._forget(passed)
        self._book.watch(table.slots)
        passed = self._passed[lease] = _Passed(table, epoch)
        return passed

    def _forget(self, passed: _Passed) -> None:
        self._book.unwatch(passed.table.slots)
        if self._latest is not None and passed.launch is not None and not passed.launch.done:
            # Not its own launch: others may have told of a later one that reads the same slots,
            # and of one stream the mover keeps the last event it is told, which must be the last.
            self._reading(passed.table, self._latest)

    def _reading(self, table: BlockTable, launch: Event) -> None:
        if self._mover is not None:
            self._mover.reading(self._pool, table.slots, launch)


def _owners(leases: Sequence[int], parts: Sequence[Sized]) -> Owners:
    """Whose each slot is, of parts laid end to end."""
    return np.repeat(np.array(leases, np.int64), [len(part) for part in parts])
