"""A world without bytes for the real cache: pools, a device, a store and time that obey at once.

What is decided here is what the store decides: it keeps blocks by path and gives up least recently
used leaves at its capacity. All else is `TieredCache`'s own business. Copies and puts have landed
when they are started; the cache hears of it at its next step, as it does of real ones. Knows no
traces.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier.index.admission import Admission, Allowance
from kvtier.index.radix import RadixIndex
from kvtier.index.words import BlockIds, BlockKey, TierId, Tokens
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.contracts import Answer, Fetch, Flight, Pool, Put, Signal
from kvtier.tiers.device import PAST, Copy, Event
from kvtier.tiers.mover import Mover
from kvtier.tiers.nvme.budget import WriteBudget
from kvtier.tiers.pool import SlotPool
from kvtier.tiers.sieve import unlimited

COL = 0


class Timeline(Signal):
    """The world's clock and signal in one: waiting in vain is what makes time pass."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def clock(self) -> float:
        return self._now_s

    def reach(self, moment_s: float) -> None:
        """Go on to this moment. Time never goes back."""
        self._now_s = max(self._now_s, moment_s)

    def wait(self, ticks: int, timeout_s: float) -> None:
        if self.ticks == ticks:
            self._now_s += timeout_s


class InstantDevice:
    """A `Device` whose copies have landed as soon as they are submitted. It touches no memory."""

    def __init__(self, signal: Signal) -> None:
        self.signal = signal

    def submit(
        self,
        stream: str,
        copies: Sequence[Copy],
        after: Sequence[Event],
        flight: Flight,
        *,
        checksum: bool,
    ) -> Event:
        flight.land(range(len(flight)))
        return PAST

    def record(self, stream: str) -> Event:
        return PAST

    def wait_for(self, stream: str, events: Sequence[Event]) -> None:
        """Whatever was submitted is over."""

    def close(self) -> None:
        """There is nothing to finish."""


class LeafStore:
    """A `Store` of at most `capacity` blocks that remembers only which; least recent leaves go.

    Puts and fetches are uses, lookups are not. A put never pushes out its own path; what finds no
    room is refused. Background puts keep to `budget`.
    """

    def __init__(
        self,
        capacity: int,
        block_size: int,
        block_bytes: int,
        signal: Signal,
        budget: WriteBudget,
    ) -> None:
        self.tier = TierId.NVME
        self.capacity = capacity
        self.num_written = 0
        self.num_written_back = 0
        self.num_fetched = 0
        self.num_evicted = 0
        self.num_lost = 0
        """Blocks asked for that had been evicted."""
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._signal = signal
        self._budget = budget
        self._index = RadixIndex(block_size, (TierId.NVME,))
        self._used = 0

    def __len__(self) -> int:
        return self._used

    def lookup(
        self,
        namespace: bytes,
        keys: Sequence[BlockKey],
        tokens: Tokens,
        *,
        asks: bool = False,
    ) -> Answer:
        before = len(tokens) // self._block_size - len(keys)
        answer = Answer(self._signal)
        answer.give(max(0, len(self._index.match(namespace, tokens)) - before))
        return answer

    def persist(self, namespace: bytes, keys: Sequence[BlockKey], tokens: Tokens) -> Answer:
        return self.lookup(namespace, keys, tokens)

    def fetch(self, request: Fetch) -> Flight:
        ids, before = self._find(request)
        held = max(0, len(ids) - before)
        self.num_fetched += held
        self.num_lost += len(request.keys) - held
        if held:
            self._index.touch(COL, ids)
        return self._flight(len(request.keys), held)

    def put(self, request: Put) -> Flight:
        n = len(request.keys)
        ids, before = self._find(request)
        held = len(ids) - before
        if held < 0:
            return self._flight(n, 0)
        if request.background and not self._budget.allows((n - held) * self._block_bytes):
            return self._flight(n, held, self._budget.refusal())
        written = self._write(request, ids, n - held)
        self.num_written += written
        self.num_written_back += written * request.background
        self._budget.charge(written * self._block_bytes)
        return self._flight(n, held + written)

    def check(self) -> None:
        """Raise `AssertionError` or `IndexCorrupt` unless its count and its tree are right."""
        self._index.check()
        assert self._used == self._index.statistics().blocks <= self.capacity

    def close(self) -> None:
        """Nothing is ever in flight."""

    def _find(self, request: Fetch | Put) -> tuple[BlockIds, int]:
        """Which leading blocks of the path it has, and how many stand before those asked for."""
        path = np.concatenate([request.prefix, request.tokens])
        before = len(request.prefix) // self._block_size
        return self._index.match(request.namespace, path), before

    def _write(self, request: Put, held: BlockIds, n: int) -> int:
        """Take in the `n` blocks behind those held, as far as there is room; how many."""
        short = self._used + n - self.capacity
        if short > 0:
            self._index.pin(COL, held)
            victims = self._index.victims(COL, short)
            self._index.unpin(COL, held)
            self._index.begin_leave(COL, victims)
            self._index.finish_leave(COL, victims)
            self._used -= len(victims)
            self.num_evicted += len(victims)
        n = min(n, self.capacity - self._used)
        path = np.concatenate([request.prefix, request.tokens])
        ids = self._index.insert(request.namespace, path[: (len(held) + n) * self._block_size])
        new = ids[len(held) :]
        self._index.begin_fill(COL, new, new)  # a slot is a number of its own: the id will do
        self._index.finish_fill(COL, new)
        self._index.touch(COL, ids)
        self._used += n
        return n

    def _flight(self, n: int, landed: int, error: Exception | None = None) -> Flight:
        flight = Flight(n, self._signal)
        flight.land(range(landed), source=self.tier)
        if landed < n:
            flight.fail(range(landed, n), error)
        return flight


@dataclass(frozen=True)
class Setup:
    """What is to be replayed on. Capacities in blocks, 0 leaves a tier out; at least one pool.

    `block_bytes`: what one block counts in bytes. `policies`, `writeback_s`: as `TieredCache` has
    them. `write_budget_bytes`: of the store, a day; None for all it holds. `nvme_admission`: "all",
    or "learned" (`kvtier.index.admission`), which keeps to the budget if there is one.
    """

    hbm: int
    dram: int
    nvme: int
    block_bytes: int = 1
    policies: Mapping[TierId, str] = field(default_factory=dict)
    writeback_s: float | None = None
    write_budget_bytes: int | None = None
    nvme_admission: str = "all"

    @property
    def blocks(self) -> int:
        """What all tiers hold together."""
        return self.hbm + self.dram + self.nvme


class World:
    """The cache of a `Setup`, and what stands around it."""

    def __init__(
        self, setup: Setup, block_size: int = 1, *, admission: Admission | None = None
    ) -> None:
        """`admission` takes the place of the one that `setup` names."""
        self.time = Timeline()
        self.mover = Mover(InstantDevice(self.time))
        sizes = ((TierId.HBM, setup.hbm), (TierId.DRAM, setup.dram))
        self.pools: Sequence[Pool] = [SlotPool(t, n, setup.block_bytes) for t, n in sizes if n]
        self.store: LeafStore | None = None
        allowance: Callable[[], Allowance | None] = unlimited
        if setup.nvme:
            if setup.nvme_admission == "learned" and admission is None:
                admission = Admission(self.pools[-1].num_slots, setup.nvme)
            limit = setup.write_budget_bytes
            limit = setup.nvme * setup.block_bytes if limit is None else limit
            budget = WriteBudget(limit, None, self.time.clock)
            if setup.write_budget_bytes:
                allowance = budget.allowance
            self.store = LeafStore(setup.nvme, block_size, setup.block_bytes, self.time, budget)
        self.cache = TieredCache(
            block_size,
            self.pools,
            [] if self.store is None else [self.store],
            self.mover,
            self.time,
            clock=self.time.clock,
            writeback_s=setup.writeback_s,
            policies=setup.policies,
            admission=admission,
            allowance=allowance,
        )
