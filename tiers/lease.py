"""What the cache hands out: leases on blocks, and tickets for what is on its way.

A lease belongs to one request. Its blocks stay where they are until `TieredCache.release`; it
ends by release, never by a timer. These are faces: the cache does the work, under its lock.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvtier.index.words import BlockIds, Slots, TierId
from kvtier.tiers.load import Load
from kvtier.tiers.moves import TailCopy
from kvtier.tiers.sieve import SieveStatistics
from kvtier.tiers.sink import Sink
from kvtier.tiers.table import BlockTable, Generations, Line


class Driver(Protocol):
    """What a ticket needs of the cache."""

    @property
    def lock(self) -> AbstractContextManager[object]: ...
    @property
    def block_size(self) -> int: ...
    def poll(self) -> None: ...
    def wait_until_done(self, ticket: "Ticket", deadline: float | None) -> bool: ...
    def slots_of(self, ids: BlockIds) -> Slots: ...
    def generations_of(self, slots: Slots) -> Generations: ...
    def fence_compute(self, slots: Slots) -> None: ...


class Ticket:
    """A handle on moves in flight. Polled or awaited; nothing calls back.

    A deadline ends the waiting, not the copying: what still flies lands for others.
    """

    def __init__(self, driver: Driver, load: Load | None) -> None:
        self._driver = driver
        self._load = load

    @property
    def is_idle(self) -> bool:
        """Whether there was nothing it could begin; asking again later may begin something."""
        return self._load is None

    def done(self) -> bool:
        """Move the cache on, then say whether nothing more will arrive for this ticket."""
        self._driver.poll()
        return self.is_done

    @property
    def is_done(self) -> bool:
        """As `done`, without moving anything on."""
        return self._load is None or self._load.done

    def wait(self, deadline: float | None) -> bool:
        """Drive the cache until done or until `deadline` (the cache's clock; None: no limit)."""
        return self._driver.wait_until_done(self, deadline)

    @property
    def failed(self) -> bool:
        """True if it ended without what it was for. Never for a load: what is missing is a miss."""
        return False

    def settle(self) -> None:
        """Stop waiting: keep the contiguous part that has arrived."""
        if self._load is not None:
            with self._driver.lock:
                self._load.settle()

    def close(self) -> None:
        """Settle and drop what this ticket pins. Idempotent."""
        if self._load is not None:
            with self._driver.lock:
                self._load.close()

    def gate(self, stream: str) -> None:
        """Make work queued later on the compute stream wait for the copies of this ticket.

        Legal only once the host-side hops have landed; raises `ValueError` before that.
        """
        if stream != "compute":
            raise ValueError(f"gate: only the compute stream reads blocks, not {stream!r}")
        if self._load is None:
            return
        with self._driver.lock:
            if not self._load.done:
                raise ValueError("gate: blocks are still on their way to host memory")
            self._driver.fence_compute(self._driver.slots_of(self._load.ids))

    @property
    def sources(self) -> list[TierId]:
        """The tier each block was found in, root first."""
        return [] if self._load is None else list(self._load.sources)

    @property
    def hit_tokens(self) -> Mapping[TierId, int]:
        """Tokens found, by the tier they were found in."""
        size = self._driver.block_size
        return {tier: n * size for tier, n in Counter(self.sources).items()}


class LeaseTicket(Ticket):
    """A ticket for the blocks of a lease, which keeps them pinned until it is released."""

    def close(self) -> None:
        self.settle()


class CopyTicket(Ticket):
    """A ticket for the copied tail of a fork. If it `failed`, release the fork."""

    def __init__(self, driver: Driver, tail: TailCopy) -> None:
        super().__init__(driver, None)
        self._tail = tail

    @property
    def is_done(self) -> bool:
        return self._tail.settled

    @property
    def failed(self) -> bool:
        return self._tail.failed


class FlushTicket(Ticket):
    """A ticket for a path on its way into the store."""

    def __init__(self, driver: Driver, sink: Sink) -> None:
        super().__init__(driver, None)
        self._sink = sink

    @property
    def is_done(self) -> bool:
        return self._sink.done

    @property
    def blocks(self) -> int:
        """How many leading blocks are durable in the store, once done."""
        return self._sink.stored

    @property
    def failed(self) -> bool:
        """True if not the whole path could be stored."""
        return self._sink.failed

    def settle(self) -> None:
        with self._driver.lock:
            self._sink.close()

    def close(self) -> None:
        self.settle()


class Lease:
    """One request's hold on blocks of the top pool. Made by `TieredCache` only.

    `again`: the request had one before, whose hits were counted.
    """

    def __init__(
        self, driver: Driver, number: int, namespace: bytes, load: Load, *, again: bool
    ) -> None:
        self._driver = driver
        self.id = number
        self.namespace = namespace
        self.load = load
        self.again = again
        self.ticket: Ticket = LeaseTicket(driver, load)
        self.committed: BlockIds = np.empty(0, np.int32)
        self.private: Slots = np.empty(0, np.int32)
        self.released = False
        self._line = Line()
        self._table = self._line.table()
        self._of = (0, self.committed, self.private)  # what the table was made from
        self._num_shared = 0

    @property
    def shared(self) -> BlockIds:
        """Blocks others may use too: those that arrived, then those committed."""
        return np.concatenate([self.load.ids[: self.load.arrived], self.committed])

    @property
    def block_table(self) -> Slots:
        """int32 slots of the top pool, root first: shared blocks, then private ones.

        Not to be written. Valid until the next `commit` (which may exchange slots) or `release`.
        """
        return self.table.slots

    @property
    def table(self) -> BlockTable:
        """`block_table` for the launch guard: every slot with its generation.

        O(1) if nothing has changed. Blocks are written down when they are first asked for; what
        was written down stays, unless a commit exchanged slots.
        """
        with self._driver.lock:
            arrived, committed, private = self._of
            if (
                arrived != self.load.arrived
                or committed is not self.committed
                or private is not self.private
            ):
                self._write_down()
            return self._table

    def _write_down(self) -> None:
        """Go on with the line, or begin another where it says what is no longer so."""
        self._of = (self.load.arrived, self.committed, self.private)
        shared = self.shared
        first = min(self._num_shared, len(shared))
        slots = np.concatenate([self._driver.slots_of(shared[first:]), self.private])
        written = self._table.slots[first:]
        if not np.array_equal(written, slots[: len(written)]):
            self._line, written = self._line.begun_like(first), written[:0]
        new = slots[len(written) :]
        self._line.append(new, self._driver.generations_of(new))
        self._table, self._num_shared = self._line.table(), len(shared)

    @property
    def landed_blocks(self) -> int:
        """Contiguous blocks from the root that can be read now; grows until the ticket is done."""
        return self.load.arrived

    @property
    def cached_tokens(self) -> int:
        """Tokens whose KV came from the cache; final once the ticket is done."""
        return self.load.arrived * self._driver.block_size

    @property
    def sources(self) -> list[TierId]:
        """The tier each landed block was found in, root first."""
        return self.load.sources[: self.load.arrived]

    @property
    def hit_tokens(self) -> Mapping[TierId, int]:
        """`cached_tokens`, by the tier they were found in."""
        size = self._driver.block_size
        return {tier: n * size for tier, n in Counter(self.sources).items()}

    def __repr__(self) -> str:
        state = "released" if self.released else "open" if self.load.done else "loading"
        return (
            f"Lease({self.id}, {state}, landed={self.load.arrived}, "
            f"committed={len(self.committed)}, private={len(self.private)})"
        )


@dataclass(frozen=True)
class Match:
    """What memory knows of a prompt: tokens reachable, by the fastest tier that has them."""

    tokens: int
    by_tier: Mapping[TierId, int]


@dataclass(frozen=True)
class PoolStatistics:
    """One pool's slots, by what they are used for. They add up to `total`."""

    tier: TierId
    total: int
    free: int
    resident: int
    filling: int
    leaving: int
    private: int
    limbo: int
    pinned: int
    """Of `resident`: those that can't be evicted now."""


@dataclass(frozen=True)
class CacheStatistics:
    pools: tuple[PoolStatistics, ...]
    blocks: int
    """Blocks the index knows, hints included."""
    hit_tokens: Mapping[TierId, int]
    asked_tokens: int
    in_flight: int
    loads: int
    sinks: int
    leases: int
    evicted: Mapping[TierId, int]
    """Blocks that have left each pool, with or without a copy below."""
    dropped: int
    """Of those: blocks given up without one."""
    written_back: int
    """Blocks put into the store before they had to leave the last pool."""
    writeback_waiting: int
    """Blocks whose turn is still to come; some may have left the pool meanwhile."""
    sieve: SieveStatistics | None
    """What was let into the store and what was not; None where everything is."""
