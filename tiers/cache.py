"""The tiered cache: pools and a store under one radix index.

Hands out leases on blocks of its fastest pool, brings blocks up for them, takes new blocks in, and
moves blocks down as room is needed. Synchronous and thread-safe; it decides under one lock, and
what it decides is carried out elsewhere: bytes move in the `Mover` and in the store, completion is
polled. Knows nothing of models, prompts or HTTP.

    [HBM, DRAM] + NVMe      embedded in the engine
    [HBM] + sidecar         the engine beside a sidecar
    [DRAM] + NVMe           the sidecar itself

Only methods with a `deadline` ever wait; deadlines are absolute values of `clock`.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from threading import RLock
from types import MappingProxyType

import numpy as np

from kvtier.index.admission import Admission, Allowance
from kvtier.index.lookahead import Waiting
from kvtier.index.policies import DEFAULT_POLICY, make_policy
from kvtier.index.policy import EvictionPolicy
from kvtier.index.radix import RadixIndex
from kvtier.index.tree import Node
from kvtier.index.words import BlockIds, Residency, Slots, TierId, Tokens
from kvtier.tiers.contracts import Checksums, Pool, Signal, Store
from kvtier.tiers.errors import TierFull
from kvtier.tiers.guard import LaunchGuard, SlotUse
from kvtier.tiers.lease import (
    CacheStatistics,
    CopyTicket,
    FlushTicket,
    Lease,
    Match,
    PoolStatistics,
    Ticket,
)
from kvtier.tiers.ledger import Ledger
from kvtier.tiers.load import Load, keys_behind, reachable
from kvtier.tiers.mover import Mover
from kvtier.tiers.moves import Terms, mask_runs
from kvtier.tiers.sieve import Sieve, unlimited
from kvtier.tiers.sink import Sink
from kvtier.tiers.table import Generations
from kvtier.tiers.writeback import WRITEBACK_S, WriteBack

# A waiter looks again at least this often, in case a signal's owner died.
LOOK_AGAIN_S = 0.5

# The end of compute is signalled to nobody: while slots wait for it, look this often.
LOOK_FOR_COMPUTE_S = 0.002

# Blocks are copied down ahead of eviction when the pool below is at least this many times larger.
EAGER_RATIO = 2

# Waiting requests may keep one block in so many of a pool from being evicted.
PROTECTABLE = 2


class TieredCache:
    """An ordered list of tiers under one index. `pools` fastest first; at most one store.

    `eager_copy_down` overrides the rule that new blocks are copied one level down at once when the
    next pool is at least twice as large, or when a sidecar is next.

    `writeback_s`: what has been in the last pool for so long is put into the store in the
    background (None: only when it has to leave). Off where HBM stands right above the store.

    `admission` decides which of the blocks that leave the last pool, or are written back, go to the
    store (None: all), within what `allowance` says may still be written (None: as much as one
    likes). A flush, and `shed`, write all.

    `policies` names the eviction policy of a pool's tier (`kvtier.index.policies`); leaf-LRU unless
    it does.
    """

    def __init__(
        self,
        block_size: int,
        pools: Sequence[Pool],
        stores: Sequence[Store],
        mover: Mover | None,
        signal: Signal,
        *,
        clock: Callable[[], float] = time.monotonic,
        eager_copy_down: bool | None = None,
        writeback_s: float | None = WRITEBACK_S,
        policies: Mapping[TierId, str] = MappingProxyType({}),
        admission: Admission | None = None,
        allowance: Callable[[], Allowance | None] = unlimited,
    ) -> None:
        if not pools:
            raise ValueError("pools: a cache needs at least one")
        if len(stores) > 1:
            raise ValueError("stores: one store below the pools, no more")
        self.block_size = block_size
        self.signal = signal
        self.clock = clock
        self._lock = RLock()
        store = stores[0] if stores else None
        columns = [pool.tier for pool in pools] + [s.tier for s in stores]
        slots = {pool.tier: pool.num_slots for pool in pools}

        def policy(tier: TierId) -> EvictionPolicy[Node]:
            return make_policy(policies.get(tier, DEFAULT_POLICY), slots[tier], block_size)

        index = RadixIndex(
            block_size,
            columns,
            stores=[s.tier for s in stores],
            policy=policy,
            protectable={tier: n // PROTECTABLE for tier, n in slots.items()},
        )
        eager = _is_eager(pools, store) if eager_copy_down is None else eager_copy_down
        sieve = None
        if admission is not None and store is not None:
            sieve = Sieve(index, admission, allowance, pools[-1].block_bytes, clock)
        self._ledger = Ledger(
            index, pools, store, mover, clock=clock, eager=eager and len(columns) > 1, sieve=sieve
        )
        self._index = index
        self._write_back: WriteBack | None = None
        if writeback_s is not None and store is not None and pools[-1].tier is not TierId.HBM:
            self._write_back = WriteBack(self._ledger, writeback_s, clock)
        self._retires = pools[0].tier is TierId.HBM and len(columns) > 1
        self._loads: list[Load] = []
        self._prefetches: list[Load] = []
        self._prefetching = False
        self._sinks: list[Sink] = []
        self._leases: dict[int, Lease] = {}
        self._next_lease = 1
        self._hits: Counter[TierId] = Counter()
        self._asked = 0
        self._closed = False
        self.guard = LaunchGuard(self._ledger.book, pools[0], mover, self._lock)

    @property
    def lock(self) -> AbstractContextManager[object]:
        return self._lock

    # ---- asking ----------------------------------------------------------------------------------

    def match(self, namespace: bytes, tokens: Tokens) -> Match:
        """What memory knows of this path. Touches no disk and changes nothing."""
        with self._lock:
            return self._match(reachable(self._ledger, namespace, tokens))

    def ask(self, namespace: bytes, tokens: Tokens) -> Match:
        """As `match`, for a request: the path counts as used, and who learns from requests learns.

        Once a request. One that has asked acquires with `asks=False`, if it acquires at all.
        """
        with self._lock:
            self._hear(namespace, tokens)
            ids = reachable(self._ledger, namespace, tokens)
            for col in range(len(self._ledger.pools)):
                self._index.touch(col, ids[self._ledger.holds(col, ids)])
            if self._ledger.sieve is not None:
                behind = keys_behind(self._index, namespace, ids, tokens)
                self._ledger.sieve.asked(ids, behind)
            return self._match(ids)

    def acquire(
        self,
        namespace: bytes,
        tokens: Tokens,
        *,
        limit: int | None = None,
        prefetched: Ticket | None = None,
        deadline: float | None = None,
        asks: bool = True,
        again: bool = False,
    ) -> Lease:
        """A lease on the longest cached prefix; loads begin for what lies below the top pool.

        At most `limit` tokens are taken from the cache. `prefetched` is the ticket of an earlier
        `prefetch` of these tokens: it is closed here, once the lease has its own pins. Loading ends
        at `deadline`, with the contiguous part that has arrived. The lease must be released. Never
        waits: see `Lease.ticket`. `asks`: False if the request was heard of already (`ask`).
        `again`: a request that had a lease before is back; it neither asks nor counts as a hit.
        """
        with self._lock:
            self._advance()
            asks = asks and not again
            if asks:
                self._hear(namespace, tokens)
            known = prefetched.sources if prefetched is not None else ()
            terms = Terms(deadline)
            load = Load(self._ledger, namespace, tokens[:limit], 0, known, terms, asks=asks)
            lease = Lease(self, self._next_lease, namespace, load, again=again)
            self._next_lease += 1
            self._leases[lease.id] = lease
            self._track(load)
        if prefetched is not None:
            prefetched.close()
        return lease

    def prefetch(
        self,
        namespace: bytes,
        tokens: Tokens,
        *,
        limit: int | None = None,
        deadline: float | None = None,
    ) -> Ticket:
        """A hint that these tokens, `limit` of them at most, will be asked for soon.

        Brings the path into the last pool, no further, behind whatever requests wait for: the reads
        of all prefetches together are bounded, and what a request wants of a prefetch under way it
        shares, and speeds up. No read begins after `deadline`; what has arrived stays. All open
        prefetches together pin half of the pool at most, and a path is cut to what that leaves, so
        close the ticket (or give it to `acquire`) when done with it. Never waits. Begins nothing
        (`Ticket.is_idle`) if they leave no room, and where HBM stands right above the store.
        """
        with self._lock:
            self._advance()
            pool = self._ledger.pools[-1]
            if pool.tier is TierId.HBM:
                return Ticket(self, None)
            self._prefetches = [load for load in self._prefetches if load.held]
            room = pool.num_slots // 2 - sum(load.held for load in self._prefetches)
            if room <= 0:
                return Ticket(self, None)
            wanted = tokens[:limit][: room * self.block_size]
            terms = Terms(deadline, background=True)
            load = Load(self._ledger, namespace, wanted, len(self._ledger.pools) - 1, terms=terms)
            self._prefetches.append(load)
            self._track(load)
        self.signal.notify()  # whoever polls an idle cache should know
        return Ticket(self, load)

    @property
    def is_prefetching(self) -> bool:
        """Whether a prefetch is under way, which every news may move on."""
        return self._prefetching

    def lookup(self, namespace: bytes, tokens: Tokens) -> Ticket:
        """Find out how much of the path memory and the store have; moves nothing.

        `Ticket.hit_tokens` tells, once done. Close the ticket afterwards.
        """
        with self._lock:
            load = Load(self._ledger, namespace, tokens, len(self._ledger.pools))
            self._loads.append(load)
            return Ticket(self, load)

    def expect(self, waiting: Sequence[Waiting]) -> None:
        """Requests that will be acquired soon, the next one first, in place of those named before.

        In every pool their blocks, up to half of its slots, are evicted after all others. Which
        blocks these are is looked up once, when something has to be evicted: say it again when
        others have come to hold blocks, or have let go of them.
        """
        with self._lock:
            self._index.expect(waiting)

    # ---- a request's life ------------------------------------------------------------------------

    def extend(self, lease: Lease, n: int, *, deadline: float | None = None) -> None:
        """Append `n` private slots to the lease's block table, evicting as needed.

        Waits for blocks to go down until `deadline` (None: not at all). Raises `TierFull` with
        nothing changed, `ValueError` if the lease was released meanwhile.
        """
        slots = self._take_all(n, deadline, f"lease {lease.id}", lease.id)
        with self._lock:
            if lease.released:
                self._ledger.free(0, slots)
                raise ValueError(f"extend: {lease!r} takes no slots")
            lease.private = np.concatenate([lease.private, slots])

    def commit(self, lease: Lease, tokens: Tokens) -> int:
        """Share the whole blocks of `tokens`, all of whose KV stands in the lease's blocks.

        A block that someone else has committed meanwhile is adopted: the lease's own slot for it is
        freed, and `block_table` names the other. Returns how many blocks became shared. Raises
        `ValueError`, nothing changed, while the lease is loading, for tokens other than its own,
        and for more of them than fit.
        """
        with self._lock:
            _require_whole(lease, "commit")
            shared = lease.shared
            whole = len(tokens) // self.block_size
            if whole <= len(shared):
                return 0
            if whole > len(shared) + len(lease.private):
                raise ValueError(f"commit: {len(tokens)} tokens do not fit in {lease!r}")
            ids = self._index.insert(lease.namespace, tokens[: whole * self.block_size])
            if not np.array_equal(ids[: len(shared)], shared):
                self._index.forget(ids)
                raise ValueError(f"commit: tokens differ from those {lease!r} was acquired for")
            new = ids[len(shared) :]
            usable = self._settle_new(new, lease.private[: len(new)])
            new, unusable = new[:usable], new[usable:]
            self._index.forget(unusable)
            self._index.pin(0, new)
            lease.committed = np.concatenate([lease.committed, new])
            lease.private = lease.private[usable:]
            self._index.touch(0, lease.shared)
            self._advance()
            return usable

    def fork(self, lease: Lease) -> Lease:
        """A second lease on the same blocks; private ones (the partial tail) are copied.

        Await `ticket` before using the copy; the guard refuses it until then, and for good if the
        ticket `failed`. Raises `TierFull` with nothing changed, `ValueError` while the lease itself
        is loading.
        """
        with self._lock:
            _require_whole(lease, "fork")
            slots = self._take_all(len(lease.private), None, f"a fork of lease {lease.id}")
            shared = lease.shared
            load = Load(self._ledger, lease.namespace, np.empty(0, np.int32), 0)
            twin = Lease(self, self._next_lease, lease.namespace, load, again=lease.again)
            self._next_lease += 1
            self._leases[twin.id] = twin
            self._index.pin(0, shared)
            twin.committed = shared
            twin.private = slots
            if len(slots):
                tail = self._ledger.copy_tail(lease.private, slots, twin.id)
                twin.ticket = CopyTicket(self, tail)
            return twin

    def release(self, lease: Lease, *, again: bool = False) -> None:
        """End a lease: unpin what is shared, free what is private. Idempotent.

        Blocks that it made and nobody else has found are the first to leave HBM, if there is a
        level below: most of them are never asked for again, and the rest not soon. Not if the same
        request will be back for them (`again`).
        """
        with self._lock:
            if lease.released:
                return
            lease.released = True
            self.guard.ended(lease)
            self._leases.pop(lease.id, None)
            committed, lease.committed = lease.committed, lease.committed[:0]
            private, lease.private = lease.private, lease.private[:0]
            if self._retires and not again:
                self._index.retire(0, committed)
            self._index.unpin(0, committed)
            lease.load.close()
            if not lease.again:
                self._hits.update(lease.sources)
            self._ledger.free(0, private)
            self._advance()

    # ---- taking in from a sidecar's client -------------------------------------------------------

    def reserve(self, n: int) -> Slots:
        """`n` slots of the top pool for someone else to fill. Raises `TierFull`.

        They end in `adopt` or `give_back`.
        """
        return self._take_all(n, None, "a reservation")

    def adopt(
        self,
        namespace: bytes,
        tokens: Tokens,
        start_block: int,
        slots: Slots,
        checksums: Checksums,
    ) -> int:
        """Take in reserved `slots` holding the blocks of `tokens` from `start_block` on.

        `tokens` is the whole path from the root. Refused (0, slots freed) when a block before them
        is unknown: it could never be matched. A block that is here already keeps its slot and frees
        the given one. Returns how many of the blocks are now resident.
        """
        with self._lock:
            before = reachable(self._ledger, namespace, tokens[: start_block * self.block_size])
            end = (start_block + len(slots)) * self.block_size
            if len(before) < start_block or len(tokens) < end:
                self._ledger.free(0, slots)
                return 0
            new = self._index.insert(namespace, tokens[:end])[start_block:]
            missing = self._ledger.lacks(0, new)
            usable = self._settle_new(new, slots)
            self._index.forget(new[usable:])
            self._ledger.free(0, slots[usable:])
            fresh = missing[:usable]
            self._describe(new[:usable][fresh], slots[:usable][fresh], checksums[:usable][fresh])
            self._index.touch(0, new[:usable])
            self._advance()
            return usable

    def give_back(self, slots: Slots) -> None:
        """Free reserved slots that were not adopted."""
        with self._lock:
            self._ledger.free(0, slots)

    # ---- down ------------------------------------------------------------------------------------

    def flush(self, namespace: bytes, tokens: Tokens) -> FlushTicket:
        """Write this path durably into the store. Await the ticket, then close it."""
        with self._lock:
            sink = Sink(self._ledger, namespace, tokens)
            self._sinks.append(sink)
            self._advance()
            return FlushTicket(self, sink)

    def shed(self, tier: TierId, deadline: float | None = None) -> int:
        """Evict every block of a pool that nothing pins, copying down first; how many went."""
        col = [pool.tier for pool in self._ledger.pools].index(tier)
        before = self._resident(col)
        while True:
            ticks = self.signal.ticks
            with self._lock:
                self._advance()
                self._ledger.evict(col, self._ledger.pools[col].num_slots, sift=False)
                evictable = len(self._index.victims(col, 1))
                idle = not self._ledger.in_flight
            if not evictable and idle:
                break
            if not self._wait(ticks, deadline):
                break
        return before - self._resident(col)

    def has_room(self, n: int) -> bool:
        """Whether `n` slots of the top pool are free, coming free, or can be evicted."""
        with self._lock:
            free = self._ledger.pools[0].num_free + self._ledger.vacating(0)
            return free >= n or free + self._index.evictable(0) >= n

    # ---- driving ---------------------------------------------------------------------------------

    def poll(self) -> None:
        """Move everything on as far as it goes. Cheap when nothing is in flight."""
        with self._lock:
            self._advance()

    def next_due(self) -> float | None:
        """The clock's value by which somebody should `poll` even if nothing happens until then.

        None: never, all there is to do follows from calls and signals.
        """
        with self._lock:
            dues = [load.terms.deadline for load in self._loads if load.terms.background]
            if self._write_back is not None:
                dues.append(self._write_back.next_due())
            return min((due for due in dues if due is not None), default=None)

    def drain(self, deadline: float | None = None) -> bool:
        """Poll until nothing is in flight; False if `deadline` came first."""
        while True:
            ticks = self.signal.ticks
            with self._lock:
                self._advance()
                idle = not (self._ledger.in_flight or self._loads or self._sinks)
            if idle:
                return True
            if not self._wait(ticks, deadline):
                return False

    def wait_until_done(self, ticket: Ticket, deadline: float | None) -> bool:
        """See `Ticket.wait`."""
        while True:
            ticks = self.signal.ticks
            self.poll()
            if ticket.is_done:
                return True
            if not self._wait(ticks, deadline):
                return False

    def slots_of(self, ids: BlockIds) -> Slots:
        """Top-pool slots of blocks that are RESIDENT there."""
        with self._lock:
            return self._index.slots(0, ids)

    def generations_of(self, slots: Slots) -> Generations:
        """How often each of these top-pool slots was given up."""
        with self._lock:
            return self._ledger.book.generations(slots)

    def fence_compute(self, slots: Slots) -> None:
        """Make later compute wait for the copies that filled these top-pool slots."""
        if self._ledger.mover is not None:
            self._ledger.mover.fence_compute(self._ledger.pools[0], slots)

    def close(self) -> None:
        """Close the store (finishing what is in flight there). Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._ledger.store is not None:
            self._ledger.store.close()
        self.poll()

    # ---- looking ---------------------------------------------------------------------------------

    def statistics(self) -> CacheStatistics:
        with self._lock:
            hits = self._hits.copy()
            for lease in self._leases.values():
                hits.update(lease.sources)
            index = self._index.statistics()
            return CacheStatistics(
                pools=tuple(self._pool_statistics(col) for col in range(len(self._ledger.pools))),
                blocks=index.blocks,
                hit_tokens={tier: n * self.block_size for tier, n in hits.items()},
                asked_tokens=self._asked,
                in_flight=self._ledger.in_flight,
                loads=len(self._loads),
                sinks=len(self._sinks),
                leases=len(self._leases),
                evicted={
                    pool.tier: n
                    for pool, n in zip(self._ledger.pools, self._ledger.evicted, strict=True)
                },
                dropped=self._ledger.dropped,
                written_back=0 if self._write_back is None else self._write_back.num_written,
                writeback_waiting=0 if self._write_back is None else self._write_back.num_waiting,
                sieve=None if self._ledger.sieve is None else self._ledger.sieve.statistics(),
            )

    def check(self) -> None:
        """Verify the index, and that every slot of every pool is accounted for once."""
        with self._lock:
            self._index.check()
            for col, pool in enumerate(self._ledger.pools):
                s = self._pool_statistics(col)
                used = s.resident + s.filling + s.leaving + s.private + s.limbo
                if used + s.free != s.total:
                    raise AssertionError(f"{pool.tier}: slots do not add up: {s}")

    # ---- inside ----------------------------------------------------------------------------------

    def _hear(self, namespace: bytes, tokens: Tokens) -> None:
        """A request asks for these tokens. Its path has not been touched yet."""
        self._index.request(namespace, tokens)
        self._asked += len(tokens)

    def _match(self, ids: BlockIds) -> Match:
        fastest = np.full(len(ids), self._ledger.store_col)
        for col in reversed(range(len(self._ledger.pools))):
            fastest[self._ledger.stands(col, ids)] = col
        counts = Counter(self._ledger.tier(int(col)) for col in fastest)
        by_tier = {tier: n * self.block_size for tier, n in counts.items()}
        return Match(len(ids) * self.block_size, by_tier)

    def _advance(self) -> None:
        self._ledger.advance()
        for load in sorted(self._loads, key=lambda load: load.terms.background):
            load.advance()  # who waits takes slots first
        self._loads = [load for load in self._loads if not load.done]
        self._prefetching = any(load.terms.background for load in self._loads)
        for sink in self._sinks:
            sink.advance()
        self._sinks = [sink for sink in self._sinks if not sink.done]
        filled = self._ledger.take_filled()
        if self._write_back is not None:
            self._write_back.advance(filled)

    def _track(self, load: Load) -> None:
        if not load.done:
            self._loads.append(load)
            self._prefetching = self._prefetching or load.terms.background

    def _settle_new(self, new: BlockIds, slots: Slots) -> int:
        """Make freshly filled blocks RESIDENT, or adopt those that are; how many leading could.

        A block that a copy is filling right now can be neither; it ends the run.
        """
        self._ledger.keep(0, new)
        filling = self._index.state(0, new) == Residency.FILLING
        usable = int(np.argmax(filling)) if filling.any() else len(new)
        missing = self._ledger.lacks(0, new[:usable])
        self._index.found(new[:usable][~missing])
        given = slots[:usable]
        for start, stop in mask_runs(missing):
            self._ledger.made(new[start:stop], given[start:stop])
        if not missing.all():
            self._ledger.free(0, given[~missing])
        return usable

    def _describe(self, ids: BlockIds, slots: Slots, checksums: Checksums) -> None:
        if len(ids):
            self._ledger.pools[0].describe(slots, self._index.keys(ids), checksums)

    def _take_all(self, n: int, deadline: float | None, who: str, owner: int = -1) -> Slots:
        """`n` slots of the top pool, PRIVATE to `owner`, or `TierFull` and none."""
        pool = self._ledger.pools[0]
        while True:
            ticks = self.signal.ticks
            with self._lock:
                self._advance()
                if pool.num_free < n:
                    self._ledger.evict(0, n - pool.num_free)
                if pool.num_free >= n:
                    slots = pool.alloc(n)
                    self._ledger.book.mark(slots, SlotUse.PRIVATE, owner)
                    return slots
                hopeless = self._ledger.is_quiet(0)
            if deadline is None or hopeless or not self._wait(ticks, deadline):
                raise TierFull(
                    f"{pool.tier}: no room for {n} blocks for {who}: "
                    f"{pool.num_free} of {pool.num_slots} are free, the rest is in use"
                )

    def _wait(self, ticks: int, deadline: float | None) -> bool:
        """Sleep until something happens; False once `deadline` has passed."""
        with self._lock:
            vacating = any(self._ledger.vacating(col) for col in range(len(self._ledger.pools)))
        longest = LOOK_FOR_COMPUTE_S if vacating else LOOK_AGAIN_S
        left = longest if deadline is None else deadline - self.clock()
        if left <= 0:
            return False
        self.signal.wait(ticks, min(left, longest))
        return True

    def _resident(self, col: int) -> int:
        with self._lock:
            return self._index.count(col, Residency.RESIDENT)

    def _pool_statistics(self, col: int) -> PoolStatistics:
        pool, index = self._ledger.pools[col], self._index
        resident = index.count(col, Residency.RESIDENT)
        return PoolStatistics(
            tier=pool.tier,
            total=pool.num_slots,
            free=pool.num_free,
            resident=resident,
            filling=index.count(col, Residency.FILLING),
            leaving=index.count(col, Residency.LEAVING),
            private=self._ledger.num_private if col == 0 else 0,
            limbo=self._ledger.limbo(col),
            pinned=resident - index.evictable(col),
        )


def _require_whole(lease: Lease, verb: str) -> None:
    """Raise `ValueError` unless every block in the lease's table is what it should be, for good."""
    if lease.released or not lease.ticket.is_done:
        raise ValueError(
            f"{verb}: {lease!r} is not ready; await or settle its ticket, release last"
        )
    if lease.ticket.failed:
        raise ValueError(f"{verb}: the copied tail of {lease!r} is lost; release it")


def _is_eager(pools: Sequence[Pool], store: Store | None) -> bool:
    if len(pools) > 1:
        return pools[1].num_slots >= EAGER_RATIO * pools[0].num_slots
    return store is not None and store.tier is TierId.SIDECAR
