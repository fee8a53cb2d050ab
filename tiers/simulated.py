"""A device, a signal and a store without threads, for tests: every order that events allow.

`SimDevice` holds submitted work and runs one piece at a time, picked by a seed or by the test
(hypothesis) among all that streams and events allow. Two things make a missing edge show:

- each piece says which slots it reads and writes; one that is not ordered behind the earlier users
  of its slots raises `HazardError` (see `kvtier.tiers.hazards`) when it is submitted;
- a copy takes place as a whole when it runs, and half of the destinations (picked the same way) are
  filled with garbage as soon as the copy is submitted, so that who reads early reads garbage.

Knows nothing of residency. Nothing here is thread-safe.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from xxhash import xxh3_64_intdigest

from kvtier.index.words import ROOT_KEY, BlockKey, Slots, TierId, Tokens
from kvtier.tiers.contracts import LANDED, Answer, Bytes, Fetch, Flight, Pool, Put, Signal
from kvtier.tiers.device import COMPUTE, PAST, Copy, Event, rows
from kvtier.tiers.hazards import Hazards, Operation, Place

GARBAGE = 0xA5


class FaultInjected(Exception):
    """The test asked for this piece of work to fail."""


class SimSignal(Signal):
    """A signal whose waiter does the work: waiting runs operations until one of them notifies."""

    def __init__(self) -> None:
        super().__init__()
        self.device: SimDevice | None = None

    def wait(self, ticks: int, timeout_s: float) -> None:
        """Run operations until something is notified; with nothing to run, `timeout_s` passes."""
        if self.device is None:
            raise RuntimeError("a SimSignal waits only once it belongs to a SimDevice")
        while self.ticks == ticks:
            if not self.device.run_one():
                self.device.advance(timeout_s)
                return


class SimEvent:
    """The end of an operation."""

    def __init__(self, device: "SimDevice", operation: Operation) -> None:
        self._device = device
        self.operation = operation

    @property
    def done(self) -> bool:
        return self.operation.done

    @property
    def error(self) -> Exception | None:
        return self.operation.error

    def wait(self, timeout_s: float | None) -> bool:
        """Run operations until this one is over. Simulated work takes no time: never times out."""
        while not self.operation.done:
            if not self._device.run_one():
                raise RuntimeError(f"{self.operation.name!r} waits for what will never run")
        return True


class SimDevice:
    """Runs submitted work in some order that streams and events allow.

    `choose(n)` picks one of `range(n)`: pass a seed, or a function of the test. `faults(name)` is
    asked before each copy of a block whether it fails; names read "copy hbm[3] to dram[5] on d2h".

    `copy_s`: virtual seconds that each block's copy takes while it runs.

    With `async_compute`, "compute" is a stream like the others, to be fed by `launch`, as on a GPU.
    Without, it is the calling thread, as on a CPU: its events are past, and `wait_for` runs what
    it waits for.
    """

    def __init__(
        self,
        choose: int | Callable[[int], int] = 0,
        signal: SimSignal | None = None,
        *,
        faults: Callable[[str], bool] | None = None,
        async_compute: bool = False,
        copy_s: float = 0.0,
    ) -> None:
        self.copy_s = copy_s
        self.choose = Random(choose).randrange if isinstance(choose, int) else choose
        self.signal = SimSignal() if signal is None else signal
        self.signal.device = self
        self.faults = faults if faults is not None else _never
        self._async_compute = async_compute
        self._pending: list[Operation] = []
        self._last: dict[str, Operation] = {}
        self._fences: dict[str, list[Operation]] = {}
        self._hazards = Hazards()
        self._now_s = 0.0

    # ---- time -------------------------------------------------------------------------------

    def clock(self) -> float:
        """Virtual seconds. Only waiting in vain, and `advance`, make them pass."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def run_one(self) -> bool:
        """Run one operation that may run now; False if nothing is pending."""
        ready = [o for o in self._pending if all(b.done for b in o.before)]
        if not ready:
            return False
        operation = ready[self.choose(len(ready)) if len(ready) > 1 else 0]
        self._pending.remove(operation)
        try:
            operation.action()
        except FaultInjected as error:
            operation.error = error
        operation.done = True
        operation.before = ()
        return True

    def run_all(self) -> None:
        """Run until nothing is pending."""
        while self.run_one():
            pass

    # ---- work -------------------------------------------------------------------------------

    def touch(
        self, name: str, *, reads: Iterable[Place] = (), writes: Iterable[Place] = ()
    ) -> None:
        """The calling thread reads and writes these places itself, now.

        Raises `HazardError` while work that is still queued has business with them.
        """
        operation = Operation(name, _nothing, ())
        for place in reads:
            self._hazards.read(operation, place)
        for place in writes:
            self._hazards.write(operation, place)
        operation.done = True

    def schedule(
        self,
        name: str,
        action: Callable[[], None],
        after: Sequence[Event] = (),
        *,
        stream: str | None = None,
        reads: Iterable[Place] = (),
        writes: Iterable[Place] = (),
    ) -> Event:
        """Queue `action`, in order with its `stream` if it names one (any name opens a stream).

        Raises `HazardError`, naming slot and both operations, if it is not ordered behind the
        earlier users of what it reads and writes.
        """
        before = [operation for event in after for operation in _operations(event)]
        if stream is not None:
            before += self._fences.pop(stream, [])
            if stream in self._last:
                before.append(self._last[stream])
        operation = Operation(name, action, tuple(before))
        for place in reads:
            self._hazards.read(operation, place)
        for place in writes:
            self._hazards.write(operation, place)
        self._pending.append(operation)
        if stream is not None:
            self._last[stream] = operation
        return SimEvent(self, operation)

    def launch(
        self,
        name: str,
        action: Callable[[], None],
        *,
        reads: Iterable[Place] = (),
        writes: Iterable[Place] = (),
    ) -> Event:
        """Queue a kernel on the compute stream (with `async_compute`)."""
        return self.schedule(name, action, stream=COMPUTE, reads=reads, writes=writes)

    def submit(
        self,
        stream: str,
        copies: Sequence[Copy],
        after: Sequence[Event],
        flight: Flight,
        *,
        checksum: bool,
    ) -> Event:
        """Queue each block's copy as an operation of its own; the event is that of the last."""
        event = self.record(stream)
        for block, copy in enumerate(copies):
            event = self._submit_one(stream, block, copy, after, flight, checksum=checksum)
        return event

    def record(self, stream: str) -> Event:
        if stream == COMPUTE and not self._async_compute:
            return PAST
        last = self._last.get(stream)
        return PAST if last is None else SimEvent(self, last)

    def wait_for(self, stream: str, events: Sequence[Event]) -> None:
        if stream == COMPUTE and not self._async_compute:
            for event in events:
                event.wait(None)
        else:
            fences = self._fences.setdefault(stream, [])
            fences += [operation for event in events for operation in _operations(event)]

    def close(self) -> None:
        self.run_all()

    def _submit_one(
        self,
        stream: str,
        block: int,
        copy: Copy,
        after: Sequence[Event],
        flight: Flight,
        *,
        checksum: bool,
    ) -> Event:
        name = (
            f"copy {copy.src.tier}[{copy.src_slot}] to {copy.dst.tier}[{copy.dst_slot}] on {stream}"
        )
        target = rows(copy.dst, copy.dst_slot, 1)[0]

        def move() -> None:
            if flight.is_off(self.clock()):
                flight.call_off([block])
                return
            self.advance(self.copy_s)
            if self.faults(name):
                target[:] = GARBAGE
                error = FaultInjected(name)
                flight.fail([block], error)
                raise error
            target[:] = rows(copy.src, copy.src_slot, 1)[0]
            digest = np.array([xxh3_64_intdigest(target)], np.uint64) if checksum else None
            flight.land([block], digest, busy_s=self.copy_s)

        self.spoil((copy.dst, copy.dst_slot))
        return self.schedule(
            name,
            move,
            after,
            stream=stream,
            reads=[(copy.src, copy.src_slot)],
            writes=[(copy.dst, copy.dst_slot)],
        )

    def spoil(self, place: Place) -> None:
        """Half of the time, fill a slot that is about to be overwritten as a whole with garbage,
        if nobody queued has still business with it."""
        if self.choose(2) and not self._hazards.is_busy(place):
            rows(*place, 1)[0] = GARBAGE


@dataclass
class _Kept:
    parent: BlockKey
    data: Bytes
    checksum: int
    used: int
    children: int = 0


class SimStore:
    """A `Store` in a dictionary: prefix-closed, leaves leave first, every answer comes later.

    Keeps real bytes by (namespace, key). Its work runs on `device`, in streams of its own.

    `capacity`: most blocks it keeps, over all namespaces (None: no limit); a put evicts the least
    recently used leaf that is not of its own path. The device's `faults` are asked with the names
    "lookup", "persist", "fetch KEY" and "put KEY" (hex): a failing lookup answers 0.
    """

    def __init__(self, tier: TierId, device: SimDevice, *, capacity: int | None = None) -> None:
        self.tier = tier
        self.capacity = capacity
        self._device = device
        self._kept: dict[tuple[bytes, BlockKey], _Kept] = {}
        self._uses = 0
        self._streams = 0
        self._answers: list[Answer] = []
        self._flights: list[Flight] = []
        self._fetches: list[Flight] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._kept)

    def holds(self, namespace: bytes, key: BlockKey) -> bool:
        return (namespace, key) in self._kept

    def forget(self, namespace: bytes, key: BlockKey) -> None:
        """Lose a block and all behind it, as a store does that found it corrupt."""
        for other, kept in list(self._kept.items()):
            if other[0] == namespace and kept.parent == key:
                self.forget(namespace, other[1])
        self._remove((namespace, key))

    def lookup(
        self,
        namespace: bytes,
        keys: Sequence[BlockKey],
        tokens: Tokens,
        *,
        asks: bool = False,
    ) -> Answer:
        if asks and not keys:
            return Answer(self._device.signal, 0)
        return self._count("lookup", namespace, keys)

    def persist(self, namespace: bytes, keys: Sequence[BlockKey], tokens: Tokens) -> Answer:
        return self._count("persist", namespace, keys)

    def fetch(self, request: Fetch) -> Flight:
        flight, stream = self._open(
            len(request.keys), deadline=request.deadline, background=request.background
        )
        self._fetches = [f for f in self._fetches if not f.done] + [flight]
        for block, (key, slot) in enumerate(zip(request.keys, request.slots.tolist(), strict=True)):
            target = rows(request.pool, slot, 1)[0]
            self._device.spoil((request.pool, slot))
            self._device.schedule(
                f"fetch {key.hex()[:8]}",
                self._fetching(request, block, key, target, flight),
                stream=stream,
                writes=[(request.pool, slot)],
            )
        return flight

    def put(self, request: Put) -> Flight:
        flight, stream = self._open(len(request.keys))
        for block, (key, slot) in enumerate(zip(request.keys, request.slots.tolist(), strict=True)):
            self._device.schedule(
                f"put {key.hex()[:8]}",
                self._putting(request, block, key, rows(request.pool, slot, 1)[0], flight),
                stream=stream,
                reads=[(request.pool, slot)],
            )
        return flight

    def hang(self) -> None:
        """As a drive that does not answer any more: lookups give 0, fetches stall and land late."""
        for answer in self._answers:
            answer.give(0)
        for flight in self._fetches:
            if not flight.done:
                flight.stall()

    def close(self) -> None:
        """Fail what is in flight and answer 0 to what was asked."""
        self._closed = True
        for answer in self._answers:
            if not answer.done:
                answer.give(0)
        for flight in self._flights:
            flight.fail_rest()

    def check(self) -> None:
        """Raise `AssertionError` unless every block's parent is kept and every count is right."""
        children = dict.fromkeys(self._kept, 0)
        for (namespace, key), kept in self._kept.items():
            if kept.parent != ROOT_KEY:
                assert (namespace, kept.parent) in self._kept, f"{key.hex()} lost its parent"
                children[namespace, kept.parent] += 1
        for name, kept in self._kept.items():
            assert kept.children == children[name], f"{name[1].hex()}: wrong number of children"
        assert self.capacity is None or len(self._kept) <= self.capacity

    def _open(
        self, n: int, *, deadline: float | None = None, background: bool = False
    ) -> tuple[Flight, str]:
        self._streams += 1
        flight = Flight(n, self._device.signal, deadline=deadline, background=background)
        self._flights = [f for f in self._flights if not f.done] + [flight]
        if self._closed:
            flight.fail_rest()
        return flight, f"{self.tier} {self._streams}"

    def _count(self, name: str, namespace: bytes, keys: Sequence[BlockKey]) -> Answer:
        answer = Answer(self._device.signal)
        self._answers = [a for a in self._answers if not a.done] + [answer]

        def look() -> None:
            if answer.done:
                return
            found = 0
            if not self._closed and not self._device.faults(name):
                while found < len(keys) and (namespace, keys[found]) in self._kept:
                    found += 1
            answer.give(found)

        self._device.schedule(name, look)
        return answer

    def _fetching(
        self, request: Fetch, block: int, key: BlockKey, target: Bytes, flight: Flight
    ) -> Callable[[], None]:
        def read() -> None:
            kept = self._kept.get((request.namespace, key))
            behind_a_gap = block > 0 and flight.status[block - 1] != LANDED
            name = f"fetch {key.hex()}"
            late = flight.deadline is not None and self._device.clock() >= flight.deadline
            over = self._closed or flight.cancelled or behind_a_gap or late
            if over or kept is None or self._device.faults(name):
                flight.fail([block], FaultInjected(name))
                return
            target[:] = kept.data
            kept.used = self._tick()
            flight.land([block], np.array([kept.checksum], np.uint64), self.tier)

        return read

    def _putting(
        self, request: Put, block: int, key: BlockKey, source: Bytes, flight: Flight
    ) -> Callable[[], None]:
        namespace = request.namespace
        parent = request.keys[block - 1] if block else request.parent

        def write() -> None:
            name = f"put {key.hex()}"
            if self._closed or self._device.faults(name):
                flight.fail([block], FaultInjected(name))
                return
            if (namespace, key) in self._kept:
                self._kept[namespace, key].used = self._tick()
                flight.land([block])
                return
            checksum = xxh3_64_intdigest(source.data)
            expected = checksum if request.checksums is None else int(request.checksums[block])
            has_parent = parent == ROOT_KEY or (namespace, parent) in self._kept
            if expected != checksum or not has_parent or not self._make_room(request):
                flight.fail([block], None)
                return
            self._kept[namespace, key] = _Kept(parent, source.copy(), checksum, self._tick())
            if parent != ROOT_KEY:
                self._kept[namespace, parent].children += 1
            flight.land([block], np.array([checksum], np.uint64))

        return write

    def _make_room(self, request: Put) -> bool:
        if self.capacity is None or len(self._kept) < self.capacity:
            return True
        own = {(request.namespace, key) for key in (request.parent, *request.keys)}
        leaves = [n for n, kept in self._kept.items() if kept.children == 0 and n not in own]
        if not leaves or self.capacity < 1:
            return False
        self._remove(min(leaves, key=lambda name: self._kept[name].used))
        return True

    def _remove(self, name: tuple[bytes, BlockKey]) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None and (name[0], kept.parent) in self._kept:
            self._kept[name[0], kept.parent].children -= 1

    def _tick(self) -> int:
        self._uses += 1
        return self._uses


def places(pool: Pool, slots: Slots) -> list[Place]:
    """What `schedule` and `launch` take as `reads` and `writes`."""
    return [(pool, slot) for slot in slots.tolist()]


def _operations(event: Event) -> list[Operation]:
    return [event.operation] if isinstance(event, SimEvent) else []


def _nothing() -> None:
    """What the calling thread does is done."""


def _never(name: str) -> bool:
    return False
