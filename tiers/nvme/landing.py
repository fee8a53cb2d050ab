"""One fetch on its way: which of its reads may begin, and its blocks landing in order.

Thread-safe. A slot belongs to the fetch from the moment a read into it begins until that read has
ended, however late; so a block can be given up only before its read begins or after it has ended.
"""

from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np

from kvtier.index.words import TierId
from kvtier.tiers.contracts import Flight
from kvtier.tiers.nvme.pace import Pace


class Landing:
    """Lands a flight's blocks in order while runs finish in any order.

    No read begins after the flight's deadline (of `clock`). `pace`: what was read and decoded so
    far.
    """

    def __init__(self, flight: Flight, clock: Callable[[], float]) -> None:
        self.flight = flight
        self.pace = Pace()
        self._clock = clock
        self._lock = Lock()
        self._verified = np.zeros(len(flight), np.bool_)
        self._checksums = np.zeros(len(flight), np.uint64)
        self._behind: dict[int, int] = {}
        self._frontier = 0
        self._limit = len(flight)
        self._reading: dict[int, int] = {}
        self._begun: set[int] = set()

    def begin(self, first: int, num_blocks: int) -> bool:
        """Whether the blocks from `first` on may be read into their slots now; pairs with `end`."""
        self.expire()
        with self._lock:
            if first >= self._limit:
                return False
            self._reading[first] = num_blocks
            self._begun.add(first)
            return True

    def end(self, first: int) -> None:
        """The read from `first` on is over; nothing touches its slots any more."""
        with self._lock:
            del self._reading[first]

    def has_begun(self, first: int) -> bool:
        """Whether the run from `first` on was read, rather than dropped."""
        return first in self._begun

    def arrived(self, first: int, checksums: Sequence[int]) -> None:
        """Blocks from `first` on are in their slots and verified."""
        with self._lock:
            last = first + len(checksums)
            self._checksums[first:last] = checksums
            self._verified[first:last] = True
            self._behind[first] = last
            start = end = self._frontier
            while end < self._limit and (stop := self._behind.pop(end, end)) > end:
                end = min(stop, self._limit)
            self._frontier = end
            if end > start:
                self.flight.land(range(start, end), self._checksums[start:end], TierId.NVME)

    def cut(self, block: int) -> None:
        """Nothing from `block` on will land."""
        with self._lock:
            self._limit = min(self._limit, block)

    def give_up(self, error: Exception) -> bool:
        """Fail blocks whose reads have not begun. True if that stalls the flight: others have."""
        self._drop(error)
        if self.flight.done or self.flight.stalled:
            return False
        self.flight.stall()
        return True

    def expire(self) -> None:
        """Drop the reads that have not begun, if the deadline has passed or nobody wants them."""
        deadline = self.flight.deadline
        late = deadline is not None and self._clock() >= deadline
        if late or self.flight.cancelled:
            self._drop(None)

    def _drop(self, error: Exception | None) -> None:
        with self._lock:
            theirs = np.zeros(len(self.flight), np.bool_)
            theirs[: self._frontier] = True
            for first, num_blocks in self._reading.items():
                theirs[first : first + num_blocks] = True
            lost = np.flatnonzero(~(theirs | self._verified))
            if len(lost):
                self._limit = min(self._limit, int(lost[0]))
                behind = np.arange(len(theirs)) >= lost[0]
                self.flight.fail(np.flatnonzero(behind & ~theirs), error)
