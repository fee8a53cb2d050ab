"""The only place that copies bytes between pools, and the memory of who still uses a slot.

For each slot the mover keeps the event of its last writer and the last event of each stream that
read it since. From these it gives every copy the edges it needs:

| a copy | waits for | hazard without |
| --- | --- | --- |
| reads its source | the source's last writer | it copies what is not there yet |
| writes its destination | the destination's last writer | two writers end in any order |
| | and everybody who reads it | a reader sees the next owner's bytes |

It knows no keys and no residency, allocates nothing and holds nothing back: which blocks move
where is decided by the cache, which starts no more than there is `room` for, and may give a slot
back only when it is `idle` here. A flight that is cancelled, or too late, ends without the copies
that the device had not begun; what has begun ends by itself, and its slots are not idle before.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from weakref import WeakKeyDictionary

from kvtier.index.words import Slots
from kvtier.tiers.contracts import Flight, Pool
from kvtier.tiers.device import COMPUTE, D2H, H2D, Copy, Device, Event
from kvtier.tiers.link import Link, LinkStatistics

# Events that are over are dropped when a slot is touched, and everywhere after this many moves.
_TIDY_EVERY = 64


@dataclass(frozen=True)
class MoverStatistics:
    """What was started so far (a block that failed on the way counts too), and what the links did.

    `up` is the link of promotions, `down` that of demotions.
    """

    promotions: int = 0
    promoted_blocks: int = 0
    promoted_bytes: int = 0
    demotions: int = 0
    demoted_blocks: int = 0
    demoted_bytes: int = 0
    up: LinkStatistics = LinkStatistics()
    down: LinkStatistics = LinkStatistics()


@dataclass
class _Uses:
    """Who used the slots of one pool, by slot. A stream's later event implies its earlier ones."""

    writers: dict[int, Event] = field(default_factory=dict)
    readers: dict[int, dict[str, Event]] = field(default_factory=dict)

    def last_writer(self, slot: int) -> Iterable[Event]:
        writer = self.writers.get(slot)
        return () if writer is None else (writer,)

    def everybody(self, slot: int) -> Iterable[Event]:
        yield from self.last_writer(slot)
        yield from self.readers.get(slot, {}).values()

    def write(self, slot: int, event: Event) -> None:
        """A writer that waits for everybody stands for them all from now on."""
        self.readers.pop(slot, None)
        self.writers[slot] = event

    def write_beside(self, slot: int, event: Event) -> None:
        """A writer that does not wait for the readers: compute goes on behind what they read."""
        self.writers[slot] = event

    def read(self, slot: int, stream: str, event: Event) -> None:
        self.readers.setdefault(slot, {})[stream] = event

    def forget(self, slot: int) -> bool:
        """Drop the slot's events that are done; True if none is left."""
        if slot in self.writers and self.writers[slot].done:
            del self.writers[slot]
        readers = self.readers.get(slot)
        if readers is not None:
            for stream in [s for s, event in readers.items() if event.done]:
                del readers[stream]
            if not readers:
                del self.readers[slot]
        return slot not in self.writers and slot not in self.readers

    def tidy(self) -> None:
        for slot in [*self.writers, *self.readers]:
            self.forget(slot)


class Mover:
    """Starts copies in the order that events demand. Thread-safe; no call waits for a copy
    (`fence_compute` does where compute is the calling thread).

    `clock` dates what is measured. `most_in_flight`: bytes that each direction is asked to carry at
    once; None: what it carries in 20 ms as measured, and 64 MiB at least.
    """

    def __init__(
        self,
        device: Device,
        *,
        clock: Callable[[], float] = time.monotonic,
        most_in_flight: int | None = None,
    ) -> None:
        """Raises `ValueError` for a `most_in_flight` below one byte."""
        if most_in_flight is not None and most_in_flight < 1:
            raise ValueError(f"most_in_flight: {most_in_flight} bytes move nothing; give more")
        self.device = device
        self._lock = Lock()
        self._links = {stream: Link(clock, most_in_flight) for stream in (H2D, D2H)}
        self._pools: WeakKeyDictionary[Pool, _Uses] = WeakKeyDictionary()
        self._moves = 0
        self._statistics = MoverStatistics()

    def promote(
        self,
        src: Pool,
        src_slots: Slots,
        dst: Pool,
        dst_slots: Slots,
        *,
        deadline: float | None = None,
    ) -> Flight:
        """Copy blocks to a faster pool; block i of the flight is `src_slots[i]`.

        The caller keeps both ends held until `idle`. No copy begins at or after `deadline`, nor
        once the flight is cancelled (what a GPU's copy engine has been given counts as begun).
        Raises `ValueError` (nothing started) if the sides differ in number or in block size, or if
        one block's destination is another's source or destination: they run in any order.
        """
        flight = self._move(H2D, src, src_slots, dst, dst_slots, deadline=deadline, checksum=False)
        with self._lock:
            was = self._statistics
            self._statistics = replace(
                was,
                promotions=was.promotions + 1,
                promoted_blocks=was.promoted_blocks + len(flight),
                promoted_bytes=was.promoted_bytes + len(flight) * src.block_bytes,
            )
        return flight

    def demote(
        self,
        src: Pool,
        src_slots: Slots,
        dst: Pool,
        dst_slots: Slots,
        *,
        deadline: float | None = None,
    ) -> Flight:
        """Copy blocks to a slower pool, as `promote`, and take the xxh3-64 of what arrived."""
        flight = self._move(D2H, src, src_slots, dst, dst_slots, deadline=deadline, checksum=True)
        with self._lock:
            was = self._statistics
            self._statistics = replace(
                was,
                demotions=was.demotions + 1,
                demoted_blocks=was.demoted_blocks + len(flight),
                demoted_bytes=was.demoted_bytes + len(flight) * src.block_bytes,
            )
        return flight

    def computed(self, pool: Pool, slots: Slots) -> None:
        """Compute that has been launched writes these slots: copies of them come after it."""
        with self._lock:
            event = self.device.record(COMPUTE)
            uses = self._uses(pool)
            for slot in slots.tolist():
                uses.write_beside(slot, event)

    def reading(self, pool: Pool, slots: Slots, event: Event | None = None) -> None:
        """Compute that has been launched reads these slots: nobody overwrites them before.

        `event`: when that compute is over, if it was launched some time ago; not older than one
        that was given before, for the last one stands for all.
        """
        with self._lock:
            event = self.device.record(COMPUTE) if event is None else event
            if event.done:
                return
            uses = self._uses(pool)
            for slot in slots.tolist():
                uses.read(slot, COMPUTE, event)

    def idle(self, pool: Pool, slots: Slots) -> bool:
        """Whether every recorded reader and writer of these slots is done."""
        with self._lock:
            uses = self._uses(pool)
            return all(uses.forget(slot) for slot in slots.tolist())

    def fence_compute(self, pool: Pool, slots: Slots) -> None:
        """Compute launched after this call sees what was copied into these slots."""
        with self._lock:
            uses = self._uses(pool)
            events = _unfinished(e for slot in slots.tolist() for e in uses.last_writer(slot))
        if events:
            self.device.wait_for(COMPUTE, events)

    def room(self, stream: str) -> int:
        """Bytes that may be started on H2D or D2H now; more of them wait with the caller.

        Nothing enforces it here. It is 0 until a quarter of what may be under way has landed.
        """
        with self._lock:
            return self._links[stream].room

    def bandwidth(self, stream: str) -> float | None:
        """Bytes a second that H2D or D2H carries lately while it is busy; None: not measured."""
        with self._lock:
            return self._links[stream].bytes_per_s

    def statistics(self) -> MoverStatistics:
        with self._lock:
            up, down = (self._links[stream].statistics() for stream in (H2D, D2H))
            return replace(self._statistics, up=up, down=down)

    @property
    def num_tracked(self) -> int:
        """Slots with an event on record: how small the books are."""
        with self._lock:
            return sum(len({*uses.writers, *uses.readers}) for uses in self._pools.values())

    def _move(
        self,
        stream: str,
        src: Pool,
        src_slots: Slots,
        dst: Pool,
        dst_slots: Slots,
        *,
        deadline: float | None,
        checksum: bool,
    ) -> Flight:
        if len(src_slots) != len(dst_slots):
            raise ValueError(f"move: {len(src_slots)} sources for {len(dst_slots)} destinations")
        if src.block_bytes != dst.block_bytes:
            raise ValueError(f"move: blocks of {src.block_bytes} into slots of {dst.block_bytes}")
        flight = Flight(len(src_slots), self.device.signal, deadline=deadline)
        sources, targets = src_slots.tolist(), dst_slots.tolist()
        if not sources:
            return flight
        if len(set(targets)) < len(targets):
            raise ValueError("move: a destination is named twice")
        if src is dst and not set(sources).isdisjoint(targets):
            raise ValueError("move: a slot is both source and destination")
        copies = [Copy(src, s, dst, d) for s, d in zip(sources, targets, strict=True)]
        # One lock over look, submit and remember: two moves see each other in one order.
        with self._lock:
            above, below = self._uses(src), self._uses(dst)
            after = _unfinished(
                [
                    *(event for slot in sources for event in above.last_writer(slot)),
                    *(event for slot in targets for event in below.everybody(slot)),
                ]
            )
            event = self.device.submit(stream, copies, after, flight, checksum=checksum)
            for slot in sources:
                above.read(slot, stream, event)
            for slot in targets:
                below.write(slot, event)
            self._links[stream].carry(flight, src.block_bytes)
            self._tidy()
        return flight

    def _uses(self, pool: Pool) -> _Uses:
        uses = self._pools.get(pool)
        if uses is None:
            uses = self._pools[pool] = _Uses()
        return uses

    def _tidy(self) -> None:
        self._moves += 1
        if self._moves % _TIDY_EVERY == 0:
            for uses in self._pools.values():
                uses.tidy()
            for link in self._links.values():
                link.settle()


def _unfinished(events: Iterable[Event]) -> Sequence[Event]:
    """Each event once, without those that are done."""
    return [event for event in {id(e): e for e in events}.values() if not event.done]
