"""The last look before a kernel runs: every slot in its block tables may be read by this lease.

A slot of the top pool may be named in a launch if it is RESIDENT, or private to the very lease
that launches (being filled by its own compute). A slot that a copy is filling, that is free, or
that another lease fills, never. Knows nothing of tokens, keys or other tiers.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.index.words import Slots
from kvtier.tiers.contracts import Pool
from kvtier.tiers.device import COMPUTE
from kvtier.tiers.errors import LaunchRefused
from kvtier.tiers.mover import Mover


class SlotUse(IntEnum):
    FREE = 0
    FILLING = 1  # a copy writes it
    PRIVATE = 2  # compute writes it, under one lease
    RESIDENT = 3
    COPYING = 4  # a copy writes it, for one lease (the tail of a fork)


class SlotBook:
    """What each slot of the top pool is used for, as two arrays: use and owning lease."""

    def __init__(self, num_slots: int) -> None:
        self._use = np.zeros(num_slots, np.uint8)
        self._owner = np.full(num_slots, -1, np.int64)

    def mark(self, slots: Slots, use: SlotUse, owner: int = -1) -> None:
        self._use[slots] = use
        self._owner[slots] = owner

    def count(self, use: SlotUse) -> int:
        return int(np.count_nonzero(self._use == use))

    def is_used(self, slots: Slots, use: SlotUse, owner: int) -> npt.NDArray[np.bool_]:
        """Which of `slots` `owner` has in this use."""
        used: npt.NDArray[np.bool_] = (self._use[slots] == use) & (self._owner[slots] == owner)
        return used

    def refused(self, slots: Slots, owner: int) -> Slots:
        """Those of `slots` that a launch by `owner` may not name."""
        outside = (slots < 0) | (slots >= len(self._use))
        inside = np.where(outside, 0, slots)
        use = self._use[inside]
        fine = (use == SlotUse.RESIDENT) | (
            (use == SlotUse.PRIVATE) & (self._owner[inside] == owner)
        )
        bad: Slots = slots[outside | ~fine]
        return bad

    def describe(self, slot: int) -> str:
        if not 0 <= slot < len(self._use):
            return f"slot {slot} is outside the pool of {len(self._use)}"
        use = SlotUse(int(self._use[slot]))
        owned = use in (SlotUse.PRIVATE, SlotUse.COPYING)
        owner = f" by lease {int(self._owner[slot])}" if owned else ""
        return f"slot {slot} is {use.name}{owner}"


class Launches(Protocol):
    """Whose launch it is."""

    @property
    def id(self) -> int: ...


class LaunchGuard:
    """Checks block tables against the slot book.

    Call `check` before a launch, `launched` after it and before its blocks are committed.
    """

    def __init__(
        self, book: SlotBook, pool: Pool, mover: Mover | None, lock: AbstractContextManager[object]
    ) -> None:
        self._book = book
        self._pool = pool
        self._mover = mover
        self._lock = lock

    def check(self, tables: Sequence[tuple[Launches, Slots]]) -> None:
        """Raise `LaunchRefused` if any table names a slot its lease may not read."""
        with self._lock:
            for lease, slots in tables:
                bad = self._book.refused(slots, lease.id)
                if len(bad):
                    raise LaunchRefused(
                        f"launch by lease {lease.id} refused: {self._book.describe(int(bad[0]))}"
                    )

    def launched(self, tables: Sequence[tuple[Launches, Slots]]) -> None:
        """Remember that queued compute reads these slots, and writes those private to its lease.

        None is reused before it ran, and no copy reads what it writes before that.
        """
        if self._mover is None or self._mover.device.record(COMPUTE).done or not tables:
            return  # compute is over: on a CPU it always is
        with self._lock:
            private = [self._book.is_used(s, SlotUse.PRIVATE, lease.id) for lease, s in tables]
        slots, written = np.concatenate([s for _, s in tables]), np.concatenate(private)
        self._mover.computed(self._pool, slots[written])
        self._mover.reading(self._pool, slots[~written])
