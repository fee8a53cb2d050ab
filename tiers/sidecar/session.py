"""One client of the sidecar: what it holds, and what each of its requests does.

Runs on the server's one thread. Knows the cache and the messages, not the socket: replies go to
`send`. What a client holds (pinned blocks of its leases, reserved slots) is capped, and outlives
its connection until `free` is called: the server does that once the process is gone.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtier.index.errors import KvtierError
from kvtier.index.words import Slots, TierId, Tokens
from kvtier.tiers.contracts import Checksums
from kvtier.tiers.errors import TierFull
from kvtier.tiers.lease import Lease
from kvtier.tiers.sidecar import wire
from kvtier.tiers.sidecar.backend import Backend, Slab, Wait

MAX_UNANSWERED = 1024

Send = Callable[[wire.Reply], None]
Path = wire.Lookup | wire.Acquire | wire.Commit | wire.Flush


@dataclass
class _Held:
    """A lease, and how many of its blocks were reported. `charged`: what counts for the cap."""

    lease: Lease
    charged: int
    reported: int
    wait: int | None = None


class Session:
    """`max_blocks`: the most slots this client may hold, pinned and reserved together."""

    def __init__(self, backend: Backend, slab: Slab, send: Send, *, max_blocks: int) -> None:
        self._backend = backend
        self._cache = slab.cache
        self._block_size = slab.layout.block_size
        self._send = send
        self._max_blocks = max_blocks
        self._leases: dict[int, _Held] = {}
        self._reserved: set[int] = set()
        self._waits: set[int] = set()
        self._commits: set[asyncio.Future[int]] = set()

    @property
    def held_blocks(self) -> int:
        """Blocks counted against the cap: pinned by leases, and reserved."""
        return len(self._reserved) + sum(held.charged for held in self._leases.values())

    def handle(self, request: wire.Request) -> None:
        """Answer now or later. Raises `WireError` for a request that no sound client sends."""
        if len(self._waits) + len(self._commits) >= MAX_UNANSWERED:
            text = f"more than {MAX_UNANSWERED} unanswered requests on one connection"
            self._refuse(request.id, wire.Code.BUSY, text)
            return
        try:
            self._dispatch(request)
        except KvtierError as error:
            self._refuse(request.id, wire.Code.BAD_REQUEST, str(error))

    def _dispatch(self, request: wire.Request) -> None:
        match request:
            case wire.Lookup():
                self._lookup(request)
            case wire.Acquire():
                self._acquire(request)
            case wire.Release():
                self._release(request)
            case wire.Reserve():
                self._reserve(request)
            case wire.Commit():
                self._commit(request)
            case wire.GiveBack():
                self._give_back(request)
            case wire.Flush():
                self._flush(request)
            case wire.Hello() | wire.Stats():
                raise wire.WireError(f"{type(request).__name__} is not a client's request")

    def leave(self) -> None:
        """The connection has ended: answer nothing more, hold on to what may still be in use."""
        for handle in self._waits:
            self._backend.forget(handle)
        self._waits.clear()

    def free(self) -> None:
        """The process is gone (or the slab is about to go): give back all it held."""
        for held in self._leases.values():
            self._cache.release(held.lease)
        self._leases.clear()
        if self._reserved:
            self._cache.give_back(_slots(self._reserved))
            self._reserved.clear()
        self._backend.freed()

    # ---- reading ----------------------------------------------------------------------------

    def _lookup(self, request: wire.Lookup) -> None:
        tokens = self._tokens(request)
        match = self._cache.ask if request.asks else self._cache.match
        resident = match(request.namespace, tokens).by_tier.get(TierId.DRAM, 0)
        if len(tokens) - resident < self._block_size:
            # Nothing to ask the store for: five times cheaper than a lookup.
            self._send(wire.Found(request.id, resident, 0))
            return
        ticket = self._cache.lookup(request.namespace, tokens)

        def answer() -> bool:
            if not ticket.is_done:
                return False
            hits = ticket.hit_tokens
            found = wire.Found(request.id, hits.get(TierId.DRAM, 0), hits.get(TierId.NVME, 0))
            ticket.close()
            self._send(found)
            return True

        self._until(answer)

    def _acquire(self, request: wire.Acquire) -> None:
        if request.id == wire.NO_LEASE or request.id in self._leases:
            raise wire.WireError(f"lease {request.id} cannot be taken, or is")
        tokens = self._tokens(request)
        room = max(0, self._max_blocks - self.held_blocks) * self._block_size
        limit = min(len(tokens), room)
        # Whatever request this is for has asked already: see `Lookup.asks`.
        lease = self._cache.acquire(request.namespace, tokens, limit=limit, asks=False)
        held = _Held(lease, limit // self._block_size, request.start_block)
        self._leases[request.id] = held
        if not self._report(request.id, held, at_once=True):
            held.wait = self._until(lambda: self._report(request.id, held))

    def _report(self, lease_id: int, held: _Held, *, at_once: bool = False) -> bool:
        """Tell the client what has arrived since the last time; True once nothing more will."""
        lease = held.lease
        done = lease.ticket.is_done
        landed = lease.landed_blocks
        while True:
            first, stop = held.reported, min(landed, held.reported + wire.MAX_BLOCKS)
            last = done and stop >= landed
            if stop > first or last or at_once:
                slots = lease.block_table[first:stop]
                sources = bytes(wire.SOURCE_NUMBERS[tier] for tier in lease.sources[first:stop])
                self._send(wire.Progress(lease_id, first, wire.ints_to_bytes(slots), sources, last))
            held.reported = max(first, stop)
            at_once = False
            if stop >= landed:
                break
        if done:
            held.charged = len(lease.block_table)
        return done

    def _release(self, request: wire.Release) -> None:
        held = self._leases.pop(request.lease, None)
        if held is not None:
            if held.wait is not None:
                self._forget(held.wait)
            self._cache.release(held.lease)
            self._backend.freed()
        self._send(wire.Released(request.id))

    # ---- writing ----------------------------------------------------------------------------

    def _reserve(self, request: wire.Reserve) -> None:
        deadline = self._backend.clock() + request.wait_ms / 1000

        def answer() -> bool:
            if self.held_blocks + request.count > self._max_blocks:
                refusal = f"one client may hold {self._max_blocks} blocks; release some first"
            else:
                try:
                    slots = self._cache.reserve(request.count)
                except TierFull as error:
                    refusal = str(error)
                else:
                    self._reserved.update(slots.tolist())
                    self._send(wire.Reserved(request.id, wire.ints_to_bytes(slots)))
                    return True
            possible = request.count <= self._max_blocks
            if possible and self._backend.clock() < deadline:
                return False
            self._refuse(request.id, wire.Code.FULL, refusal)
            return True

        if self._until(answer) is not None:
            self._backend.poll_after(request.wait_ms / 1000)

    def _commit(self, request: wire.Commit) -> None:
        tokens = self._tokens(request)
        slots = self._own(request.slots)
        checksums = wire.checksums_from_bytes(request.checksums)
        blocks = request.start_block + len(slots)
        if len(checksums) != len(slots) or len(tokens) != blocks * self._block_size:
            raise wire.WireError(
                f"commit of {len(slots)} slots and {len(checksums)} checksums from block "
                f"{request.start_block} of {len(tokens)} tokens"
            )
        self._reserved.difference_update(slots.tolist())
        job = self._backend.verified(slots, checksums)
        self._commits.add(job)
        job.add_done_callback(lambda _: self._adopt(request, tokens, slots, checksums, job))

    def _adopt(
        self,
        request: wire.Commit,
        tokens: Tokens,
        slots: Slots,
        checksums: Checksums,
        job: "asyncio.Future[int]",
    ) -> None:
        self._commits.discard(job)
        good = job.result()
        if good < len(slots):
            self._backend.mismatched += 1
            self._cache.give_back(slots[good:])
        stored = 0
        if good:
            path = tokens[: (request.start_block + good) * self._block_size]
            stored = self._cache.adopt(
                request.namespace, path, request.start_block, slots[:good], checksums[:good]
            )
        self._send(wire.Committed(request.id, stored))
        self._backend.poll()

    def _give_back(self, request: wire.GiveBack) -> None:
        slots = self._own(request.slots)
        self._reserved.difference_update(slots.tolist())
        self._cache.give_back(slots)
        self._backend.freed()
        self._send(wire.Released(request.id))

    def _flush(self, request: wire.Flush) -> None:
        ticket = self._cache.flush(request.namespace, self._tokens(request))

        def answer() -> bool:
            if not ticket.is_done:
                return False
            self._send(wire.Flushed(request.id, ticket.blocks))
            ticket.close()
            return True

        self._until(answer)

    # ---- helpers ----------------------------------------------------------------------------

    def _until(self, wait: Wait) -> int | None:
        """Ask `wait` now, and at every news until it is finished; None if it was at once."""
        if wait():
            return None

        def and_forget() -> bool:
            finished = wait()
            if finished:
                self._waits.discard(handle)
            return finished

        handle = self._backend.wait(and_forget)
        self._waits.add(handle)
        return handle

    def _forget(self, handle: int) -> None:
        self._waits.discard(handle)
        self._backend.forget(handle)

    def _tokens(self, request: Path) -> Tokens:
        return wire.ints_from_bytes(request.tokens)

    def _own(self, data: bytes) -> Slots:
        """The slots named, all of which this client must have reserved."""
        slots = wire.ints_from_bytes(data)
        named = set(slots.tolist())
        if len(named) != len(slots) or not named <= self._reserved:
            raise wire.WireError("slots that this client has not reserved, or named twice")
        return slots

    def _refuse(self, request_id: int, code: wire.Code, text: str) -> None:
        self._send(wire.Refused(request_id, code, text[: wire.MAX_TEXT]))


def _slots(values: set[int]) -> Slots:
    return np.fromiter(sorted(values), np.int32, len(values))
