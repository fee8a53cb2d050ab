"""Blocks on their way between the engine's pool and a sidecar's slab, as small state machines.

A job belongs to one `Link`: the slots it is told of mean something only in that connection's slab.
Everything after `start` runs on the tier's thread: a method with each reply, `advance` at every
news. Nothing here waits. The mover copies; a job never ends while a copy of its own may touch a
slot, and gives every slot back when it ends.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.index.words import Slots
from kvtier.tiers.contracts import LANDED, Fetch, Flight, Put, Signal
from kvtier.tiers.dram import DramSlab
from kvtier.tiers.mover import Mover
from kvtier.tiers.sidecar import wire
from kvtier.tiers.sidecar.client import SidecarClient

log = logging.getLogger(__name__)

PUT_GROUP = 64
"""Blocks that a put reserves at a time, at most; an eighth of the slab if that is less."""
RESERVE_WAIT_S = 5.0
"""How long the server may wait for room before it refuses a reserve."""

Reply = wire.Reply | None
"""None: no more will come, the connection is over or the deadline has passed."""


class SidecarFailed(Exception):
    """Why blocks failed; kept in their flight, never raised to a request."""


@dataclass
class Link:
    """One connection and its slab. `post` hands work to the tier's thread.

    The slab stays mapped after the connection has ended, until the last job is over.
    """

    client: SidecarClient
    slab: DramSlab
    timeout_s: float
    post: Callable[[Callable[[], None]], None]

    def send(self, request: wire.Request, heard: Callable[[Reply], None]) -> None:
        """`heard` is called on the tier's thread."""
        self.client.send(
            request,
            lambda reply: self.post(lambda: self._hear(heard, reply)),
            timeout_s=self.timeout_s,
        )

    def _hear(self, heard: Callable[[Reply], None], reply: Reply) -> None:
        """A reply that makes no sense counts as none, and ends the connection."""
        try:
            heard(reply)
        except wire.WireError as error:
            log.warning("sidecar: closed the connection, the server sent %s", error)
            heard(None)
            self.client.close()
        except Exception:
            log.exception("sidecar: could not use a reply; its blocks fail")
            heard(None)

    def tell(self, request: wire.Request) -> None:
        """Send what needs no answer."""
        self.client.send(request, lambda _: None, timeout_s=self.timeout_s)

    def slots(self, data: bytes) -> Slots:
        """Slots of this slab. Raises `WireError` if the slab has no such slots."""
        slots = wire.ints_from_bytes(data)
        if len(slots) and int(slots.max()) >= self.slab.num_slots:
            raise wire.WireError(f"slot {int(slots.max())} of {self.slab.num_slots}")
        return slots


class Job(Protocol):
    """What the tier's thread drives."""

    link: Link
    flight: Flight

    def start(self) -> None:
        """Send the first request."""
        ...

    def advance(self) -> bool:
        """Pass on what copies have done; True once everything has ended."""
        ...

    def cut(self) -> None:
        """Ask for nothing more: end as soon as the copies under way have."""
        ...


@dataclass(frozen=True)
class _Landing:
    """A copy out of the slab: its blocks are `first…` of the job, each found in `sources`."""

    copy: Flight
    first: int
    sources: npt.NDArray[np.uint8]


class Fetching:
    """Slab to pool: acquire, copy what arrives as it arrives, release."""

    def __init__(self, link: Link, request: Fetch, mover: Mover, signal: Signal) -> None:
        self.link = link
        self.flight = Flight(len(request.keys), signal)
        self._request = request
        self._mover = mover
        self._lease = link.client.new_id()
        block_size = len(request.tokens) // len(request.keys)
        self._start_block = len(request.prefix) // block_size
        self._told = 0  # blocks that the server has reported, from the first
        self._limit = len(request.keys)  # the first block that failed: nothing behind it lands
        self._landings: list[_Landing] = []
        self._error: Exception | None = None
        self._over = False

    def start(self) -> None:
        request = self._request
        path = np.concatenate([request.prefix, request.tokens])
        self.link.send(
            wire.Acquire(
                self._lease, request.namespace, wire.ints_to_bytes(path), self._start_block
            ),
            self._heard,
        )

    def _heard(self, reply: Reply) -> None:
        if self._over:
            return
        if not isinstance(reply, wire.Progress):
            self._fail_from(self._told, _reason(reply))
            return
        slots = self.link.slots(reply.slots)
        first = reply.first - self._start_block
        if first != self._told or len(slots) != len(reply.sources):
            raise wire.WireError(f"progress from block {reply.first} with {len(slots)} slots")
        slots = slots[: len(self.flight) - first]
        if len(slots):
            copy = self._mover.promote(
                self.link.slab,
                slots,
                self._request.pool,
                self._request.slots[first : first + len(slots)],
            )
            sources = np.frombuffer(reply.sources, np.uint8)[: len(slots)]
            self._landings.append(_Landing(copy, first, sources))
            self._told += len(slots)
        self._over = reply.done

    def advance(self) -> bool:
        self._landings = [landing for landing in self._landings if not self._pass_on(landing)]
        if self.flight.cancelled and not self._over:  # the lease's end calls off the server's reads
            self._fail_from(self._told, SidecarFailed("nobody wants these blocks any more"))
        if not self._over or self._landings:
            return False
        if not self.flight.done:
            gone = SidecarFailed("the sidecar no longer holds these blocks")
            self.flight.fail_rest(self._error or gone)
        self.link.tell(wire.Release(self.link.client.new_id(), self._lease))
        return True

    def _pass_on(self, landing: _Landing) -> bool:
        """Land what the copy has; True if there is no more to come of it."""
        done = landing.copy.done  # before the news, which then are the last
        landed, failed = landing.copy.news()
        if len(failed):
            self._fail_from(landing.first + int(failed[0]), landing.copy.error)
        for number, tier in wire.SOURCE_TIERS.items():
            blocks = landing.first + landed[landing.sources[landed] == number]
            blocks = blocks[blocks < self._limit]
            if len(blocks):
                self.flight.land(blocks, source=tier)
        return done

    def _fail_from(self, block: int, error: Exception | None) -> None:
        """Nothing from `block` on will land, not even what is being copied just now."""
        self._limit = min(self._limit, block)
        self._error = self._error or error
        self._over = True

    def cut(self) -> None:
        self._over = True


class Putting:
    """Pool to slab, a group at a time: reserve, copy, commit."""

    def __init__(self, link: Link, request: Put, mover: Mover, signal: Signal) -> None:
        self.link = link
        self.flight = Flight(len(request.keys), signal)
        self._request = request
        self._mover = mover
        self._block_size = len(request.tokens) // len(request.keys)
        self._start_block = len(request.prefix) // self._block_size
        self._path = np.concatenate([request.prefix, request.tokens])
        self._at = 0  # first block of the group under way
        self._slots: Slots = np.empty(0, np.int32)  # reserved for it
        self._copy: Flight | None = None
        self._asked = False  # a reply is owed
        self._over = False

    def start(self) -> None:
        most = min(PUT_GROUP, max(1, self.link.slab.num_slots // 8))
        group = min(most, len(self.flight) - self._at)
        wait_ms = int(min(RESERVE_WAIT_S, self.link.timeout_s / 2) * 1000)
        self._asked = True
        self.link.send(wire.Reserve(self.link.client.new_id(), group, wait_ms), self._reserved)

    def _reserved(self, reply: Reply) -> None:
        self._asked = False
        if not isinstance(reply, wire.Reserved):
            self._end(_reason(reply))
            return
        self._slots = self.link.slots(reply.slots)
        stop = self._at + len(self._slots)
        if not self._at < stop <= len(self.flight):
            raise wire.WireError(f"{len(self._slots)} slots reserved, another number was asked for")
        if self._over:
            self._end(_closed())
            return
        self._copy = self._mover.demote(
            self._request.pool,
            self._request.slots[self._at : stop],
            self.link.slab,
            self._slots,
        )

    def advance(self) -> bool:
        if self._copy is not None and self._copy.done:
            copy, self._copy = self._copy, None
            self._commit(copy)
        return self._over and self._copy is None and not self._asked

    def _commit(self, copy: Flight) -> None:
        """Offer the leading blocks whose bytes arrived as they should."""
        good = copy.status == LANDED
        if self._request.checksums is not None:
            good &= copy.checksums == self._request.checksums[self._at : self._at + len(copy)]
        n = len(copy) if good.all() else int(np.argmin(good))
        if n == 0 or self._over:
            damaged = SidecarFailed("blocks arrived damaged in the slab")
            self._end(copy.error or (damaged if n == 0 else _closed()))
            return
        offered, self._slots = self._slots[:n], self._slots[n:]
        self._give_back()
        blocks = self._start_block + self._at + n
        commit = wire.Commit(
            self.link.client.new_id(),
            self._request.namespace,
            wire.ints_to_bytes(self._path[: blocks * self._block_size]),
            self._start_block + self._at,
            wire.ints_to_bytes(offered),
            wire.checksums_to_bytes(copy.checksums[:n]),
        )
        self._asked = True
        self.link.send(commit, lambda reply: self._committed(reply, copy, n))

    def _committed(self, reply: Reply, copy: Flight, offered: int) -> None:
        self._asked = False
        if not isinstance(reply, wire.Committed):
            self._end(_reason(reply))
            return
        stored = min(reply.stored, offered)
        self.flight.land(np.arange(self._at, self._at + stored), copy.checksums)
        self._at += stored
        if stored < len(copy):
            self._end(SidecarFailed("the sidecar has no place for these blocks"))
        elif self._at == len(self.flight):
            self._over = True
        elif self._over:
            self._end(_closed())
        else:
            self.start()

    def _give_back(self) -> None:
        slots, self._slots = self._slots, self._slots[:0]
        if len(slots):
            self.link.tell(wire.GiveBack(self.link.client.new_id(), wire.ints_to_bytes(slots)))

    def _end(self, error: Exception | None) -> None:
        self._give_back()
        self.flight.fail_rest(error)
        self._over = True

    def cut(self) -> None:
        self._over = True
        if self._copy is None and not self._asked:
            self._end(_closed())


def _closed() -> SidecarFailed:
    return SidecarFailed("the tier was closed")


def _reason(reply: Reply) -> SidecarFailed:
    if reply is None:
        return SidecarFailed("the sidecar gave no answer in time, or is gone")
    if isinstance(reply, wire.Refused):
        return SidecarFailed(f"the sidecar refused: {reply.text}")
    return SidecarFailed(f"the sidecar answered with {type(reply).__name__}")
