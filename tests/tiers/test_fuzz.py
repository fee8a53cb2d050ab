"""Random steps over the whole cache, every slot counted after each of them.

The equation, for each pool, from counts that are kept apart from each other (the pool's free list,
the index's columns, the slot book, the ledger's lists):

    free + evictable + pinned + in flight == total

    evictable   RESIDENT and unpinned
    pinned      RESIDENT and pinned, and slots private to one lease
    in flight   FILLING, LEAVING, and in limbo (freed, but still read by queued work)

Every thousand steps all counts are made anew from scratch. Bytes are looked at in every block that
a request gets. A step is a name and numbers, drawn without looking at the cache: so a list of steps
is a log, and what it leads to is a matter of the log alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest

from kvtier.index.lookahead import Waiting
from kvtier.index.radix import RadixIndex
from kvtier.index.words import TierId, Tokens
from kvtier.tiers import cache as cache_module
from kvtier.tiers.device import COMPUTE, H2D
from kvtier.tiers.errors import TierFull
from kvtier.tiers.lease import Lease, Ticket
from tests.tiers.cache_rig import NAMESPACE, OTHER_NAMESPACE, doc
from tests.tiers.sim_rig import GpuRig

NAMESPACES = (NAMESPACE, OTHER_NAMESPACE)
MOST_LEASES = 4
MOST_TICKETS = 4

Step = tuple[str, int, int, int]
"""A verb and three numbers, to be read as the verb likes."""

# How often each verb is drawn.
WEIGHTS = {
    "acquire": 10,
    "compute": 14,
    "release": 10,
    "visit": 8,
    "fork": 3,
    "prefetch": 5,
    "lookup": 2,
    "flush": 5,
    "close": 8,
    "run": 25,
    "pass_time": 2,
    "shed": 2,
    "break_things": 2,
    "lose": 1,
    "hang": 1,
    "expect": 3,
}


@dataclass(frozen=True)
class World:
    """Slots of each tier (None: no such tier), and what the cache is told."""

    hbm: int
    dram: int | None
    store: int | None
    policy: str
    async_compute: bool
    writeback_s: float | None = None


WORLDS = {
    "lru": World(6, 14, 40, "lru", async_compute=True),
    "adaptive": World(6, 14, 40, "adaptive", async_compute=False, writeback_s=30.0),
    "arc, little DRAM": World(7, 6, 24, "arc", async_compute=True),
    "no DRAM, no store": World(6, None, None, "lru", async_compute=True),
}
EVERY_WORLD = pytest.mark.parametrize("world", WORLDS.values(), ids=list(WORLDS))


def draw(seed: int, n: int) -> list[Step]:
    """`n` steps."""
    rng = Random(seed)
    verbs = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=n)
    numbers = [[rng.randrange(1 << 16) for _ in range(3)] for _ in verbs]
    return [(verb, a, b, c) for verb, (a, b, c) in zip(verbs, numbers, strict=True)]


def prompt(a: int, b: int) -> Tokens:
    """One of some thirty documents: prefixes of each other, and branches off the middle of them."""
    if a % 3:
        return doc(1 + a % 3, b % 6)
    return np.concatenate([doc(1 + b % 2, 1 + b % 3), doc(1 + a % 4, 1 + (a + b) % 3)])


class Fuzz:
    """One world, and the verbs."""

    def __init__(self, world: World, seed: int) -> None:
        self.rig = GpuRig.make(
            world.hbm,
            world.dram,
            world.store,
            store=world.store is not None,
            async_compute=world.async_compute,
            seed=seed,
            writeback_s=world.writeback_s,
            policies=dict.fromkeys((TierId.HBM, TierId.DRAM), world.policy),
        )
        self.cache, self.device = self.rig.cache, self.rig.device
        self.world = world
        self.leases: list[tuple[Lease, Tokens]] = []
        self.tickets: list[Ticket] = []
        self.num_hits = 0

    def step(self, step: Step) -> None:
        verb, *numbers = step
        act: Callable[[int, int, int], None] = getattr(self, verb)
        act(*numbers)

    # ---- verbs -----------------------------------------------------------------------------------

    def acquire(self, a: int, b: int, c: int) -> None:
        if len(self.leases) == MOST_LEASES:
            return
        tokens = prompt(a, b)
        self.leases.append((self.cache.acquire(NAMESPACES[c % 2], tokens), tokens))

    def compute(self, a: int, b: int, c: int) -> None:
        """Wait for what comes, or start with what has; look at every byte; fill in the rest."""
        if not self.leases:
            return
        lease, tokens = self.leases[a % len(self.leases)]
        patience = 100.0 if b % 2 else 0.0
        if not lease.ticket.wait(self.cache.clock() + patience):
            lease.ticket.settle()
        if lease.ticket.failed:
            return
        self.num_hits += lease.landed_blocks
        self.device.record(COMPUTE).wait(None)
        self.rig.expect_bytes(lease, tokens)
        try:
            if self.world.async_compute:
                # A fork's copy reads a slot that this lease writes on: behind what is copied on a
                # device, all of it here.
                self.device.record(H2D).wait(None)
                self.rig.launch(lease, tokens, self.cache.clock() + patience)
                self.cache.commit(lease, tokens)
            else:
                self.rig.compute(lease, tokens, self.cache.clock() + patience)
        except TierFull:
            return

    def release(self, a: int, b: int, c: int) -> None:
        if self.leases:
            lease, _ = self.leases.pop(a % len(self.leases))
            self.cache.release(lease, again=b % 4 == 3)

    def visit(self, a: int, b: int, c: int) -> None:
        self.acquire(a, b, c)
        last = len(self.leases) - 1
        self.compute(last, 1, 0)
        self.release(last, 0, 0)

    def fork(self, a: int, b: int, c: int) -> None:
        if not self.leases or len(self.leases) == MOST_LEASES:
            return
        lease, tokens = self.leases[a % len(self.leases)]
        if not lease.ticket.is_done or lease.ticket.failed:
            return
        try:
            self.leases.append((self.cache.fork(lease), tokens))
        except TierFull:
            return

    def prefetch(self, a: int, b: int, c: int) -> None:
        self._open(self.cache.prefetch(NAMESPACES[c % 2], prompt(a, b)))

    def lookup(self, a: int, b: int, c: int) -> None:
        self._open(self.cache.lookup(NAMESPACES[c % 2], prompt(a, b)))

    def flush(self, a: int, b: int, c: int) -> None:
        self._open(self.cache.flush(NAMESPACES[c % 2], prompt(a, b)))

    def _open(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)
        if len(self.tickets) > MOST_TICKETS:
            self.close(0, 0, 0)

    def close(self, a: int, b: int, c: int) -> None:
        if self.tickets:
            self.tickets.pop(a % len(self.tickets)).close()

    def run(self, a: int, b: int, c: int) -> None:
        for _ in range(1 + a % 8):
            self.device.run_one()
        self.cache.poll()

    def pass_time(self, a: int, b: int, c: int) -> None:
        self.device.advance((0.5, 31.0)[a % 2])
        self.cache.poll()

    def shed(self, a: int, b: int, c: int) -> None:
        tier = self.rig.pools[a % len(self.rig.pools)].tier
        self.cache.shed(tier, self.cache.clock() + (0.0, 5.0)[b % 2])

    def break_things(self, a: int, b: int, c: int) -> None:
        """From now on one in `share` copies, lookups, fetches and puts fails (0: none)."""
        share, choose = (0, 0, 3, 8)[a % 4], self.device.choose
        self.rig.broken = lambda name: share > 0 and choose(share) == 0

    def lose(self, a: int, b: int, c: int) -> None:
        """The store loses a block, and all behind it."""
        keys = sorted(self.rig.committed)
        if keys and self.world.store is not None:
            self.rig.store.forget(NAMESPACES[c % 2], keys[a % len(keys)])

    def hang(self, a: int, b: int, c: int) -> None:
        if self.world.store is not None:
            self.rig.store.hang()

    def expect(self, a: int, b: int, c: int) -> None:
        """Other requests wait now."""
        queue = [prompt(a + i, b) for i in range(c % 3)]
        self.cache.expect([Waiting(NAMESPACES[c % 2], tokens) for tokens in queue])

    # ---- what holds ------------------------------------------------------------------------------

    def count(self) -> None:
        """Every slot of every tier is used for one thing."""
        for pool in self.cache.statistics().pools:
            evictable = pool.resident - pool.pinned
            pinned = pool.pinned + pool.private
            in_flight = pool.filling + pool.leaving + pool.limbo
            assert min(pool.free, evictable, pool.pinned, pool.private, in_flight) >= 0, pool
            assert pool.free + evictable + pinned + in_flight == pool.total, pool
        if self.world.store is not None:
            assert len(self.rig.store) <= self.world.store

    def check(self) -> None:
        """Everything counted anew."""
        self.cache.check()
        if self.world.store is not None:
            self.rig.store.check()

    def come_to_rest(self) -> None:
        """Everybody goes: every slot is free or holds a block that may leave."""
        self.rig.broken = lambda name: False
        while self.leases:
            self.release(0, 0, 0)
        while self.tickets:
            self.close(0, 0, 0)
        self.rig.come_to_rest()
        for pool in self.cache.statistics().pools:
            assert pool.free + pool.resident == pool.total, pool
            assert pool.pinned == 0, pool


def snapshot(index: RadixIndex) -> dict[str, Any]:
    """All there is to an index: the tree, every column, pins, keys, and every eviction order."""
    tree, lanes = index._tree, index._lanes
    nodes = {
        node.number: (
            node.namespace,
            node.data,
            node.ids.tolist(),
            sorted(child.number for child in node.children.values()),
            [index.state(col, node.ids).tolist() for col in range(len(index.columns))],
            [index.slots(col, node.ids).tolist() for col in range(len(index.columns))],
            [index._table.pins[col, node.ids].tolist() for col in range(len(index.columns))],
            index._table.keyed[node.ids].tolist(),
        )
        for node in tree.walk_nodes()
    }
    orders = {lane: [n.number for n in policy] for lane, policy in lanes.policies.items()}
    pools = [c for c, tier in enumerate(index.columns) if tier not in index.stores]
    plans = {col: index.victims(col, 1000).tolist() for col in pools}
    return {
        "nodes": nodes,
        "orders": orders,
        "plans": plans,
        "statistics": index.statistics(),
        "freed": index._table.freed().tolist(),
    }


def walk(world: World, seed: int, steps: int) -> Fuzz:
    fuzz = Fuzz(world, seed)
    for number, step in enumerate(draw(seed, steps)):
        fuzz.step(step)
        fuzz.count()
        if number % 1000 == 999:
            fuzz.check()
    fuzz.come_to_rest()
    return fuzz


@EVERY_WORLD
def test_every_slot_is_accounted_for_after_each_step(world: World) -> None:
    assert walk(world, seed=1, steps=2_000).num_hits > 100  # it did find something


@pytest.mark.stress
@pytest.mark.timeout(1200)
@EVERY_WORLD
def test_every_slot_is_accounted_for_after_each_of_a_hundred_thousand_steps(world: World) -> None:
    assert walk(world, seed=2, steps=100_000).num_hits > 5_000


@EVERY_WORLD
def test_a_recorded_history_replays_to_the_exact_state(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call on the index, with its answer: a fresh index gives the same answers to the same
    calls, and ends as the live one did."""
    log: list[tuple[str, tuple[Any, ...], dict[str, Any], object]] = []
    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    class Logged(RadixIndex):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append((args, kwargs))
            super().__init__(*args, **kwargs)

        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name.startswith("_") or not callable(found):
                return found

            def call(*args: Any, **kwargs: Any) -> Any:
                given = tuple(a.copy() if isinstance(a, np.ndarray) else a for a in args)
                answer = found(*args, **kwargs)
                log.append((name, given, kwargs, repr(answer)))
                return answer

            return call

    monkeypatch.setattr(cache_module, "RadixIndex", Logged)
    fuzz = Fuzz(world, seed=2)
    for step in draw(2, 800):
        fuzz.step(step)
    (args, kwargs), recorded = made[0], list(log)
    twin = RadixIndex(*args, **kwargs)
    for name, given, keywords, answer in recorded:
        assert repr(getattr(twin, name)(*given, **keywords)) == answer, name
    assert snapshot(twin) == snapshot(fuzz.cache._index)
    twin.check()


def test_the_same_steps_lead_to_the_same_state_bytes_and_all() -> None:
    """Nothing but the steps and the seed decides: no clock, no address, no order of a set."""
    ends = []
    for _ in range(2):
        fuzz = Fuzz(WORLDS["adaptive"], seed=3)
        for step in draw(3, 1500):
            fuzz.step(step)
        arrays = [
            pool.view(slot).tobytes() for pool in fuzz.rig.pools for slot in range(pool.num_slots)
        ]
        ends.append((snapshot(fuzz.cache._index), fuzz.cache.statistics(), arrays))
    assert ends[0] == ends[1]
