"""Programs over the whole cache: what an engine with a GPU does with it, and what befalls it.

Nothing waits for compute: a kernel looks at the bytes of its blocks in its turn on the compute
stream, whatever has been decided about them meanwhile. Blocks hold a function of their key; a tail
(a private block that is not whole yet) holds a number.

A `rash` engine also tries what it may not: to launch on blocks that are not there yet, or not its
own. The launch guard has to refuse it; if it does not, the kernel runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.index.words import BlockKey, Slots, Tokens
from kvtier.tiers.errors import LaunchRefused, TierFull
from kvtier.tiers.lease import Lease, Ticket
from kvtier.tiers.pool import SlotState
from kvtier.tiers.simulated import places
from kvtier.tiers.table import BlockTable
from tests.prf import block_bytes
from tests.tiers.cache_rig import BLOCK_BYTES, NAMESPACE, doc, keys_of, stamped
from tests.tiers.sim_rig import GpuRig

MOST_LEASES = 4
MOST_TICKETS = 3

WEIGHTS = {
    "acquire": 10,
    "visit": 5,
    "compute": 14,
    "decode": 8,
    "sample": 5,
    "rash": 6,
    "release": 9,
    "fork": 4,
    "prefetch": 3,
    "flush": 3,
    "close": 4,
    "run": 20,
    "pass_time": 2,
    "shed": 6,
    "break_things": 2,
    "lose": 1,
    "hang": 1,
}

# Slots of HBM, DRAM and store; None: no such tier. No store right under HBM: the one that may stand
# there, a sidecar's, moves bytes by the mover, and the simulated one does not.
SIZES: tuple[tuple[int, int | None, int | None], ...] = (
    (6, 14, 40),
    (6, 8, 12),
    (7, 5, 24),
    (6, 14, None),
    (5, None, None),
)


@dataclass(eq=False)
class Running:
    """A lease, the tokens it is for, and what stands in its tail (None: it has none)."""

    lease: Lease
    tokens: Tokens
    tail: int | None = None


class CacheProgram:
    def __init__(self, choose: Callable[[int], int], size: int, *, on_cuda: bool = False) -> None:
        hbm, dram, store = SIZES[size % len(SIZES)]
        self.most_in_flight = BLOCK_BYTES * (2, 5)[size // 7 % 2]
        self.rig = GpuRig.make(
            hbm,
            dram,
            store,
            store=store is not None,
            async_compute=True,
            seed=choose,
            on_cuda=on_cuda,
            most_in_flight=self.most_in_flight,
            writeback_s=(None, 30.0)[size // 11 % 2],
        )
        self.choose = choose
        self.cache, self.sim, self.hbm = self.rig.cache, self.rig.device, self.rig.pools[0]
        self.has_store = store is not None
        self.running: list[Running] = []
        self.tickets: list[Ticket] = []
        self.num_tails = 0
        self.stale: tuple[Lease, BlockTable] | None = None

    def step(self, verb: str, a: int, b: int, c: int) -> None:
        act: Callable[[int, int, int], None] = getattr(self, verb)
        act(a, b, c)
        self.count()

    # ---- verbs -----------------------------------------------------------------------------------

    def acquire(self, a: int, b: int, c: int) -> None:
        if len(self.running) == MOST_LEASES:
            return
        tokens = prompt(a, b)
        deadline = self.cache.clock() + 2.0 if c % 4 == 0 else None
        self.running.append(
            Running(self.cache.acquire(NAMESPACE, tokens, deadline=deadline), tokens)
        )

    def compute(self, a: int, b: int, c: int) -> None:
        """Wait for what comes, or go on with what has; compute the rest, share it."""
        one = self._one(a)
        if one is None or not self._is_ready(one, patient=b % 2 > 0) or one.tail is not None:
            return
        keys, first = keys_of(one.tokens), len(one.lease.shared)
        if len(keys) < first:
            return
        try:
            wanted = max(0, len(keys) - first - len(one.lease.private))
            self.cache.extend(one.lease, wanted, deadline=self.cache.clock() + (0.0, 50.0)[c % 2])
        except TierFull:
            return
        self._launch(one, keys[first:])
        self.rig.committed.update(keys)
        self.cache.commit(one.lease, one.tokens)
        self.cache.guard.check([(one.lease, one.lease.table)])

    def decode(self, a: int, b: int, c: int) -> None:
        """Read all there is; write a tail where there is none, or write on behind its end."""
        one = self._one(a)
        if one is None or not self._is_ready(one, patient=b % 2 > 0):
            return
        if len(one.lease.shared) < len(keys_of(one.tokens)):
            return
        fresh = not len(one.lease.private)
        if fresh:
            try:
                self.cache.extend(one.lease, 1)
            except TierFull:
                return
            self.num_tails += 1
            one.tail = self.num_tails
        self._launch(one, [], writes_tail=fresh)

    def rash(self, a: int, b: int, c: int) -> None:
        """Launch on what may not be there, and on what is another's."""
        one = self._one(a)
        if one is None:
            return
        slots = self.cache.slots_of(one.lease.load.ids)
        known = slots >= 0
        keys = [key for key, here in zip(keys_of(one.tokens), known, strict=False) if here]
        slots = slots[known]
        if len(slots):
            try:
                table = stamped(self.cache, slots)
                self.cache.guard.check([(one.lease, table)])
            except LaunchRefused:
                pass
            else:
                self._look(one.lease, table, keys)
        is_whole = one.lease.ticket.is_done and not one.lease.ticket.failed
        if not is_whole:
            self._raises(ValueError, lambda: self.cache.commit(one.lease, one.tokens))
            self._raises(ValueError, lambda: self.cache.fork(one.lease))
            if len(one.lease.private):
                self._is_refused(one.lease, one.lease.private)
        other = self._one(b)
        if other is not None and other is not one and len(other.lease.private):
            self._is_refused(one.lease, other.lease.private)
        self._is_refused(one.lease, np.array([self.hbm.num_slots], np.int32))
        if self.stale is not None:
            gone, table = self.stale
            free = [s for s in table.slots.tolist() if self.hbm.state(s) is SlotState.FREE]
            if free:
                self._is_refused(gone, np.array(free, np.int32))
            if (self.cache.generations_of(table.slots) != table.generations).any():
                self._raises(LaunchRefused, lambda: self.cache.guard.check([(gone, table)]))

    def release(self, a: int, b: int, c: int) -> None:
        one = self._one(a)
        if one is not None:
            self.running.remove(one)
            self.stale = (one.lease, one.lease.table)
            self.cache.release(one.lease, again=b % 4 == 3)

    def fork(self, a: int, b: int, c: int) -> None:
        one = self._one(a)
        if one is None or len(self.running) == MOST_LEASES:
            return
        if not one.lease.ticket.is_done or one.lease.ticket.failed:
            return
        if len(one.lease.private) and one.tail is None:
            return  # nothing has been written there
        try:
            twin = self.cache.fork(one.lease)
        except TierFull:
            return
        self.running.append(Running(twin, one.tokens, one.tail))

    def sample(self, a: int, b: int, c: int) -> None:
        """Several answers to one prompt: compute it, write a tail, fork."""
        if self.running:
            at = a % len(self.running)
            self.compute(at, 1, 1)
            self.decode(at, 1, 0)
            self.fork(at, 0, 0)

    def prefetch(self, a: int, b: int, c: int) -> None:
        deadline = self.cache.clock() + 2.0 if c % 3 == 0 else None
        self._open(self.cache.prefetch(NAMESPACE, prompt(a, b), deadline=deadline))

    def flush(self, a: int, b: int, c: int) -> None:
        self._open(self.cache.flush(NAMESPACE, prompt(a, b)))

    def close(self, a: int, b: int, c: int) -> None:
        if self.tickets:
            self.tickets.pop(a % len(self.tickets)).close()

    def run(self, a: int, b: int, c: int) -> None:
        for _ in range(1 + a % 9):
            self.sim.run_one()
        self.cache.poll()

    def pass_time(self, a: int, b: int, c: int) -> None:
        self.sim.advance((0.5, 3.0, 31.0)[a % 3])
        self.cache.poll()

    def shed(self, a: int, b: int, c: int) -> None:
        tier = self.rig.pools[a % 3 % len(self.rig.pools)].tier
        self.cache.shed(tier, self.cache.clock() + (0.0, 5.0)[b % 2])

    def visit(self, a: int, b: int, c: int) -> None:
        """A request from its beginning to its end."""
        if len(self.running) < MOST_LEASES:
            self.acquire(a, b, c)
            last = len(self.running) - 1
            self.compute(last, 1, 1)
            self.release(last, b, 0)

    def break_things(self, a: int, b: int, c: int) -> None:
        """From now on nothing fails, or all copies within HBM, or one in `share` of anything."""
        if a % 4 == 3:
            self.rig.broken = lambda name: " hbm" in name and " to hbm" in name
        else:
            share = (0, 3, 8)[a % 4]
            self.rig.broken = lambda name: share > 0 and self.choose(share) == 1

    def lose(self, a: int, b: int, c: int) -> None:
        """The store loses a block, and all behind it."""
        keys = sorted(self.rig.committed)
        if keys and self.has_store:
            self.rig.store.forget(NAMESPACE, keys[a % len(keys)])

    def hang(self, a: int, b: int, c: int) -> None:
        if self.has_store:
            self.rig.store.hang()

    # ---- what holds ------------------------------------------------------------------------------

    def count(self) -> None:
        """Every slot is used for one thing, and no link carries more than it may."""
        for pool in self.cache.statistics().pools:
            used = pool.resident + pool.private + pool.filling + pool.leaving + pool.limbo
            assert pool.free + used == pool.total, pool
        carried = {True: 0, False: 0}
        for move in self.cache._ledger._moves:
            if max(move.src, move.dst) < len(self.rig.pools):
                carried[move.src < move.dst] += move.flight.pending
        assert max(carried.values()) * BLOCK_BYTES <= self.most_in_flight, carried

    def come_to_rest(self) -> None:
        """Everybody goes: every slot is free or holds a block that may leave, and is right."""
        self.rig.broken = lambda name: False
        while self.running:
            self.release(0, 0, 0)
        while self.tickets:
            self.close(0, 0, 0)
        self.rig.come_to_rest()
        for count in self.cache.statistics().pools:
            assert count.free + count.resident == count.total, count
            assert count.pinned == 0, count
        if self.has_store:
            self.rig.store.check()
        self.rig.mover.device.close()
        for tokens in (prompt(a, b) for a in range(4) for b in range(6)):
            ids = self.cache._index.match(NAMESPACE, tokens)
            for col, pool in enumerate(self.rig.pools):
                here = self.cache._ledger.holds(col, ids)
                for key, slot in zip(
                    np.array(keys_of(tokens), object)[: len(ids)][here],
                    self.cache._index.slots(col, ids[here]),
                    strict=True,
                ):
                    _expect(pool.view(int(slot)), key)

    # ---- inside ----------------------------------------------------------------------------------

    def _one(self, a: int) -> Running | None:
        return self.running[a % len(self.running)] if self.running else None

    def _is_ready(self, one: Running, *, patient: bool) -> bool:
        ticket = one.lease.ticket
        if not ticket.wait(self.cache.clock() + (50.0 if patient else 0.0)):
            ticket.settle()
        return ticket.is_done and not ticket.failed

    def _launch(self, one: Running, missing: Sequence[bytes], *, writes_tail: bool = False) -> None:
        """A kernel that reads the shared blocks and the tail, and writes what is missing."""
        lease, table = one.lease, one.lease.table
        self.cache.guard.check([(lease, table)])
        first = len(lease.shared)
        tail = [] if one.tail is None else [b"tail %d" % one.tail]
        wanted = [*keys_of(one.tokens)[:first], *([] if writes_tail else tail)]
        made = [*missing, *(tail if writes_tail else [])]
        end = len(wanted) + len(made)
        read, written = table.slots[: len(wanted)], table.slots[len(wanted) : end]

        def attend() -> None:
            for slot, key in zip(read.tolist(), wanted, strict=True):
                _expect(self.hbm.view(slot), key)
            for slot, key in zip(written.tolist(), made, strict=True):
                self.hbm.view(slot)[:] = block_bytes(key, BLOCK_BYTES)

        self.sim.launch(
            f"attend for {lease.id}",
            attend,
            reads=places(self.hbm, read),
            writes=places(self.hbm, written),
        )
        self.cache.guard.launched([(lease, table)])

    def _look(self, lease: Lease, table: BlockTable, keys: list[BlockKey]) -> None:
        def look() -> None:
            for slot, key in zip(table.slots.tolist(), keys, strict=True):
                _expect(self.hbm.view(slot), key)

        self.sim.launch(f"look for {lease.id}", look, reads=places(self.hbm, table.slots))
        self.cache.guard.launched([(lease, table)])

    def _is_refused(self, lease: Lease, slots: Slots) -> None:
        table = stamped(self.cache, slots)
        self._raises(LaunchRefused, lambda: self.cache.guard.check([(lease, table)]))

    def _raises(self, error: type[Exception], act: Callable[[], object]) -> None:
        try:
            act()
        except error:
            return
        raise AssertionError(f"a rash engine is not stopped by a {error.__name__}")

    def _open(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)
        if len(self.tickets) > MOST_TICKETS:
            self.close(0, 0, 0)


def prompt(a: int, b: int) -> Tokens:
    """One of some documents: prefixes of each other, and a branch."""
    if a % 4 == 3:
        return np.concatenate([doc(1, 2), doc(9, 1 + b % 3)])
    return doc(1 + a % 3, 1 + b % 5)


def _expect(found: np.ndarray, key: bytes) -> None:
    wanted = block_bytes(key, BLOCK_BYTES)
    assert np.array_equal(found, wanted), f"wrong bytes for {key.hex()[:8]}"
