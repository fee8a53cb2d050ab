"""The whole cache against a plain dictionary, on the simulated device, with faults in every copy.

The model is a set of block keys that were ever computed. Whatever order copies, lookups, fetches
and puts run in, and whichever of them fail: a lease names only blocks of that set, each holding the
bytes of its key; every slot is accounted for; and in the end everything comes to rest.
"""

from collections.abc import Callable

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from kvtier.index.admission import Admission, Marks, Mask
from kvtier.index.lookahead import Waiting
from kvtier.index.words import TierId, Tokens
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.errors import TierFull
from kvtier.tiers.lease import FlushTicket, Lease, Ticket
from kvtier.tiers.mover import Mover
from kvtier.tiers.pool import ArrayPool
from kvtier.tiers.simulated import SimDevice, SimStore
from tests.tiers.cache_rig import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    NAMESPACE,
    OTHER_NAMESPACE,
    Rig,
    doc,
)

HBM_SLOTS = 6

shapes = st.sampled_from(
    [
        # (DRAM slots or None, store or None, store capacity)
        (14, TierId.NVME, None),
        (8, TierId.NVME, 9),
        (7, TierId.NVME, None),
        (6, TierId.NVME, None),
        (5, TierId.NVME, 20),
        (12, None, None),
        (None, TierId.SIDECAR, 16),
        (None, None, None),
    ]
)
documents = st.one_of(
    st.builds(doc, st.integers(1, 3), st.integers(0, 6)),
    st.builds(
        lambda stem, root, branch, rest: np.concatenate([doc(stem, root), doc(branch, rest)]),
        st.integers(1, 2),
        st.integers(1, 3),
        st.integers(1, 4),
        st.integers(1, 4),
    ),
)
namespaces = st.sampled_from([NAMESPACE, OTHER_NAMESPACE])


class Whimsical(Admission):
    """Changes its mind about every block every time."""

    def __init__(self, device: SimDevice) -> None:
        super().__init__(8, 8)
        self._device = device

    def worth(self, marks: Marks) -> Mask:
        return np.array([self._device.choose(2) > 0 for _ in marks], np.bool_)


class CacheMachine(RuleBasedStateMachine):
    leases: Bundle[Lease] = Bundle("leases")
    tickets: Bundle[Ticket] = Bundle("tickets")

    @initialize(
        shape=shapes,
        seed=st.integers(0, 2**16),
        eager=st.sampled_from([None, True, False]),
        writeback_s=st.sampled_from([None, None, 30.0, 0.0]),
        policy=st.sampled_from(["lru", "lru", "arc", "adaptive"]),
        choosy=st.sampled_from([False, False, True]),
    )
    def build(
        self,
        shape: tuple[int | None, TierId | None, int | None],
        seed: int,
        eager: bool | None,
        writeback_s: float | None,
        policy: str,
        choosy: bool,
    ) -> None:
        dram_slots, store_tier, capacity = shape
        self.broken: Callable[[str], bool] = lambda name: False
        self.device = SimDevice(seed, faults=lambda name: self.broken(name))
        pools = [ArrayPool(TierId.HBM, HBM_SLOTS, BLOCK_BYTES, debug=True)]
        if dram_slots is not None:
            pools.append(ArrayPool(TierId.DRAM, dram_slots, BLOCK_BYTES, debug=True))
        self.store = SimStore(store_tier, self.device, capacity=capacity) if store_tier else None
        stores = [self.store] if self.store is not None else []
        cache = TieredCache(
            BLOCK_SIZE,
            pools,
            stores,
            Mover(self.device),
            self.device.signal,
            clock=self.device.clock,
            eager_copy_down=eager,
            writeback_s=writeback_s,
            policies={pool.tier: policy for pool in pools},
            admission=Whimsical(self.device) if choosy else None,
        )
        self.choosy = choosy
        self.writes_back = writeback_s is not None and dram_slots is not None
        self.store_forgets = capacity is not None
        self.rig = Rig(cache, pools, stores)
        self.tokens: dict[int, Tokens] = {}
        self.tickets_made: list[Ticket] = []
        self.prefetches: list[tuple[Ticket, float | None]] = []

    @rule(
        target=leases,
        namespace=namespaces,
        tokens=documents,
        patience=st.sampled_from([None, None, 0.0, 1.0]),
    )
    def acquire(self, namespace: bytes, tokens: Tokens, patience: float | None) -> Lease:
        cache = self.rig.cache
        deadline = None if patience is None else cache.clock() + patience
        lease = cache.acquire(namespace, tokens, deadline=deadline)
        self.tokens[lease.id] = tokens
        return lease

    @rule(lease=leases, patience=st.sampled_from([0.0, 100.0]))
    def settle_and_compute(self, lease: Lease, patience: float) -> None:
        if lease.released:
            return
        cache = self.rig.cache
        if not lease.ticket.wait(cache.clock() + patience):
            lease.ticket.settle()
        try:
            self.rig.compute(lease, self.tokens[lease.id], cache.clock() + patience)
        except TierFull:
            pass

    @rule(namespace=namespaces, tokens=documents)
    def visit(self, namespace: bytes, tokens: Tokens) -> None:
        lease = self.rig.cache.acquire(namespace, tokens)
        self.tokens[lease.id] = tokens
        self.settle_and_compute(lease, 100.0)
        self.rig.cache.release(lease)

    @rule(lease=consumes(leases), again=st.booleans())
    def release(self, lease: Lease, again: bool) -> None:
        self.rig.cache.release(lease, again=again)

    @rule(waiting=st.lists(st.builds(Waiting, namespaces, documents), max_size=3))
    def expect(self, waiting: list[Waiting]) -> None:
        """From now on these requests wait; nobody may notice but by what is evicted."""
        self.rig.cache.expect(waiting)

    @rule(target=leases, lease=leases)
    def fork(self, lease: Lease) -> Lease:
        if lease.released or not lease.ticket.is_done:
            return lease
        try:
            twin = self.rig.cache.fork(lease)
        except TierFull:
            return lease
        twin.ticket.wait(self.rig.cache.clock() + 100)
        self.tokens[twin.id] = self.tokens[lease.id]
        return twin

    @rule(
        target=tickets,
        namespace=namespaces,
        tokens=documents,
        patience=st.sampled_from([None, None, 0.0, 1.0, 40.0]),
    )
    def prefetch(self, namespace: bytes, tokens: Tokens, patience: float | None) -> Ticket:
        cache = self.rig.cache
        deadline = None if patience is None else cache.clock() + patience
        ticket = cache.prefetch(namespace, tokens, deadline=deadline)
        self.tickets_made.append(ticket)
        self.prefetches.append((ticket, deadline))
        return ticket

    @rule(target=tickets, namespace=namespaces, tokens=documents)
    def lookup(self, namespace: bytes, tokens: Tokens) -> Ticket:
        ticket = self.rig.cache.lookup(namespace, tokens)
        self.tickets_made.append(ticket)
        return ticket

    @rule(target=tickets, namespace=namespaces, tokens=documents)
    def flush(self, namespace: bytes, tokens: Tokens) -> Ticket:
        ticket = self.rig.cache.flush(namespace, tokens)
        self.tickets_made.append(ticket)
        return ticket

    @rule(ticket=consumes(tickets))
    def close(self, ticket: Ticket) -> None:
        ticket.close()

    @rule(n=st.integers(1, 12))
    def run(self, n: int) -> None:
        for _ in range(n):
            self.device.run_one()
        self.poll()

    @rule(seconds=st.sampled_from([0.5, 29.0, 31.0, 100.0]))
    def pass_time(self, seconds: float) -> None:
        self.device.advance(seconds)
        self.poll()

    @rule(tier=st.sampled_from([TierId.HBM, TierId.DRAM]))
    def shed(self, tier: TierId) -> None:
        if tier in [pool.tier for pool in self.rig.pools]:
            self.rig.cache.shed(tier, self.rig.cache.clock() + 5)

    @rule(share=st.sampled_from([0, 0, 2, 5]))
    def break_things(self, share: int) -> None:
        """From now on one in `share` copies, lookups, fetches and puts fails (0: none)."""
        choose = self.device.choose
        self.broken = lambda name: share > 0 and choose(share) == 0

    @rule(namespace=namespaces, tokens=documents)
    def corrupt(self, namespace: bytes, tokens: Tokens) -> None:
        """The store loses a block it held, and all behind it."""
        keys = sorted(self.rig.committed)
        if self.store is not None and keys:
            self.store_forgets = True
            self.store.forget(namespace, keys[self.device.choose(len(keys))])

    @rule()
    def hang(self) -> None:
        """The store's drive stops answering; what is being read comes late."""
        if self.store is not None:
            self.store.hang()

    @invariant()
    def every_slot_is_accounted_for_and_every_byte_is_right(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.cache.check()
        statistics = self.rig.cache.statistics()
        assert statistics.writeback_waiting <= 3 * statistics.pools[-1].total
        for lease in list(self.rig.cache._leases.values()):
            if lease.id in self.tokens:
                self.rig.expect_bytes(lease, self.tokens[lease.id], lease.landed_blocks)

    @invariant()
    def prefetches_hold_half_of_the_pool_at_most(self) -> None:
        if hasattr(self, "rig"):
            held = sum(load.held for load in self.rig.cache._prefetches)
            assert held <= self.rig.pools[-1].num_slots // 2

    def poll(self) -> None:
        """Move the cache on; a prefetch is over by its deadline."""
        now = self.rig.cache.clock()
        self.rig.cache.poll()
        for ticket, deadline in self.prefetches:
            assert ticket.is_done or deadline is None or now < deadline

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        cache = self.rig.cache
        self.broken = lambda name: False
        for lease in list(cache._leases.values()):
            cache.release(lease)
        for ticket in self.tickets_made:
            ticket.close()
        assert cache.drain(cache.clock() + 1000), cache.statistics()
        if self.store is not None and self.writes_back:
            self.wait_for_write_back()
        self.device.run_all()
        cache.check()
        if self.store is not None:
            self.store.check()
        for pool in cache.statistics().pools:
            assert pool.free + pool.resident == pool.total, pool
            assert pool.pinned == 0, pool

    def wait_for_write_back(self) -> None:
        """With nobody else at work, all that can go down does, and then nothing waits."""
        cache = self.rig.cache
        for _ in range(10):
            self.device.advance(61)
            assert cache.drain(cache.clock() + 1000), cache.statistics()
        if self.store_forgets or self.store is None or self.choosy:
            return
        # The store itself is asked, not the hints: one that hung said no to what it holds.
        index, dram = cache._index, len(self.rig.pools) - 1
        for block in index.victims(dram, 1000).tolist():
            path = index.path(block)
            namespace, keys = index.namespace_of(block), index.keys(path)
            stored = np.array([self.store.holds(namespace, key) for key in keys])
            if (cache._ledger.holds(dram, path) | stored).all():
                assert stored.all(), f"block {block} was not written back"


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=300,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_flush_ticket_is_a_ticket() -> None:
    """The bundle above holds both kinds; closing either is one call."""
    assert issubclass(FlushTicket, Ticket)
