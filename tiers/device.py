"""Where copies run: streams, events, and the CPU's version of them.

A *stream* runs its work in order; an *event* is a point on a stream. Work that names events starts
after them. There are three streams: "compute" (the engine's kernels), "h2d" (promotion) and "d2h"
(demotion). A device moves the bytes it is told to, between the slots it is told; which edges are
needed is the mover's business, which blocks move is the cache's.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from xxhash import xxh3_64_intdigest

from kvtier.tiers.contracts import Bytes, Flight, Pool, Signal

COMPUTE, H2D, D2H = "compute", "h2d", "d2h"

# Blocks land in groups of about this many bytes: a waiter is woken some hundred times a second at
# full speed, not once a block.
LANDING_BYTES = 8 << 20

# With checksums a run is at most this long, so that the hash reads it from the cache.
_HASHED_BYTES = 1 << 20

# Copies yield to compute. Demotion is nobody's wait; a promotion is, but not the running batch's.
_NICENESS = {H2D: 5, D2H: 10}


class Event(Protocol):
    """A point on a stream. It tells order only: what became of each block is in its flight."""

    @property
    def done(self) -> bool:
        """True once everything before it on its stream has run or failed."""
        ...

    @property
    def error(self) -> Exception | None:
        """What broke the work it ends; None while it runs and when all went well."""
        ...

    def wait(self, timeout_s: float | None) -> bool:
        """Block the calling thread; True if the event is done, False after `timeout_s`."""
        ...


class Copy(NamedTuple):
    """One block from a slot to a slot; both pools have the same `block_bytes`."""

    src: Pool
    src_slot: int
    dst: Pool
    dst_slot: int


class Device(Protocol):
    """Thread-safe. No call waits for a copy, but `wait_for` on the CPU's compute stream."""

    @property
    def signal(self) -> Signal: ...

    def submit(
        self,
        stream: str,
        copies: Sequence[Copy],
        after: Sequence[Event],
        flight: Flight,
        *,
        checksum: bool,
    ) -> Event:
        """Queue copies behind the stream's earlier work and `after`.

        Copy i lands or fails as block i of `flight`, with the xxh3-64 of the bytes that arrived if
        `checksum`, and the time it took where the device can tell. Copies that have not begun when
        `flight.is_off` are called off. Errors go to the flight. The event is done when no copy
        touches memory any more.
        """
        ...

    def record(self, stream: str) -> Event:
        """A point behind everything submitted to this stream so far."""
        ...

    def wait_for(self, stream: str, events: Sequence[Event]) -> None:
        """Later work on this stream runs after these events."""
        ...

    def close(self) -> None:
        """Finish what was submitted, then end the device's threads. Idempotent."""
        ...


class _Past:
    """An event that is over: the compute stream of a CPU is the thread that asks."""

    @property
    def done(self) -> bool:
        return True

    @property
    def error(self) -> None:
        return None

    def wait(self, timeout_s: float | None) -> bool:
        return True


PAST: Event = _Past()


class JobEvent:
    """The end of a job on a worker thread."""

    def __init__(self, job: "Future[None]") -> None:
        self._job = job

    @property
    def done(self) -> bool:
        return self._job.done()

    @property
    def error(self) -> Exception | None:
        problem = self._job.exception() if self._job.done() else None
        return problem if isinstance(problem, Exception) else None

    def wait(self, timeout_s: float | None) -> bool:
        try:
            self._job.exception(timeout_s)
        except TimeoutError:
            return False
        return True


def coalesce(copies: Sequence[Copy], limit_bytes: int) -> list[range]:
    """Cut copies into runs that are neighbours on both sides, each of at most `limit_bytes`.

    Returns ranges of positions in `copies`; a run has at least one block.
    """
    if not copies:
        return []
    most = max(1, limit_bytes // copies[0].src.block_bytes)
    starts = [0]
    src, src_slot, dst, dst_slot = copies[0]
    for at, copy in enumerate(copies):
        ahead = at - starts[-1]
        if ahead == most or copy != (src, src_slot + ahead, dst, dst_slot + ahead):
            src, src_slot, dst, dst_slot = copy
            starts.append(at)
    return [range(a, b) for a, b in pairwise([*starts, len(copies)])]


class _Run(NamedTuple):
    """Neighbours to copy at once: uint8 `[len(blocks), block_bytes]` on both sides."""

    blocks: range
    src: Bytes
    dst: Bytes


class CpuDevice:
    """One worker thread for each copy stream, so that copies run beside compute without a GPU.

    Compute is synchronous: its events are past when recorded, and fencing it blocks the caller.
    Pools must show their bytes as `array`, uint8 `[num_slots, stride]`. A job that fails ends its
    flight and its event; the thread goes on with the next. `clock` is that of deadlines; `worker`
    makes what runs a stream's jobs, one after the other.
    """

    def __init__(
        self,
        signal: Signal,
        *,
        clock: Callable[[], float] = time.monotonic,
        worker: Callable[[str], Executor] | None = None,
    ) -> None:
        self.signal = signal
        self._clock = clock
        self._threads = {stream: (worker or _thread)(stream) for stream in _NICENESS}

    def submit(
        self,
        stream: str,
        copies: Sequence[Copy],
        after: Sequence[Event],
        flight: Flight,
        *,
        checksum: bool,
    ) -> Event:
        limit = _HASHED_BYTES if checksum else LANDING_BYTES
        runs = _lay_out(copies, coalesce(copies, limit))
        job = partial(_carry_out, runs, after, flight, self._clock, checksum=checksum)
        return self._start(stream, job)

    def record(self, stream: str) -> Event:
        return PAST if stream == COMPUTE else self._start(stream, lambda: None)

    def wait_for(self, stream: str, events: Sequence[Event]) -> None:
        if stream == COMPUTE:
            _await(events)
        else:
            self._start(stream, lambda: _await(events))

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()

    def _start(self, stream: str, job: Callable[[], None]) -> Event:
        future = self._threads[stream].submit(job)
        # The last block lands a moment before the event is done; who waits for a slot to come idle
        # must hear of that too.
        future.add_done_callback(lambda _: self.signal.notify())
        return JobEvent(future)


def _carry_out(
    runs: Sequence[_Run],
    after: Sequence[Event],
    flight: Flight,
    clock: Callable[[], float],
    *,
    checksum: bool,
) -> None:
    try:
        _await(after)
        began = clock()
        waiting: list[int] = []
        sums: list[int] = []
        nbytes = 0
        for at, run in enumerate(runs):
            is_off = flight.is_off(clock())
            if not is_off:
                np.copyto(run.dst, run.src)
                waiting += run.blocks
                if checksum:
                    sums += [xxh3_64_intdigest(block) for block in run.dst]
                nbytes += run.dst.size
            if nbytes >= LANDING_BYTES or run is runs[-1] or is_off:
                now = clock()
                digests = np.array(sums, np.uint64) if checksum else None
                flight.land(waiting, digests, busy_s=now - began)
                began, waiting, sums, nbytes = now, [], [], 0
            if is_off:
                flight.call_off([block for rest in runs[at:] for block in rest.blocks])
                break
    except BaseException as error:
        flight.fail_rest(error if isinstance(error, Exception) else None)
        raise


def _lay_out(copies: Sequence[Copy], ranges: Sequence[range]) -> list[_Run]:
    arrays: dict[Pool, Bytes] = {}
    runs = []
    for blocks in ranges:
        src, src_slot, dst, dst_slot = copies[blocks.start]
        for pool in (src, dst):
            if pool not in arrays:
                arrays[pool] = rows(pool, 0, pool.num_slots)
        n = len(blocks)
        source, target = arrays[src][src_slot : src_slot + n], arrays[dst][dst_slot : dst_slot + n]
        if min(src_slot, dst_slot) < 0 or not len(source) == len(target) == n:
            raise IndexError(
                f"copy of {n} blocks: no slots {src!r}[{src_slot}], {dst!r}[{dst_slot}]"
            )
        runs.append(_Run(blocks, source, target))
    return runs


def rows(pool: Pool, slot: int, n: int) -> Bytes:
    """uint8 `[n, block_bytes]`: neighbouring slots of a pool the CPU can address.

    Raises `TypeError` for a pool whose bytes are elsewhere, `IndexError` for slots it has not.
    """
    array: Bytes | None = getattr(pool, "array", None)
    if array is None:
        raise TypeError(f"{pool!r} has no bytes that the CPU can address")
    if not 0 <= slot <= slot + n <= len(array):
        raise IndexError(f"{pool!r} has no slots {slot} to {slot + n - 1}")
    return array[slot : slot + n, : pool.block_bytes]


def _await(events: Sequence[Event]) -> None:
    for event in events:
        event.wait(None)


def _thread(stream: str) -> Executor:
    return ThreadPoolExecutor(1, f"kvtier-{stream}", _be_nice, (_NICENESS[stream],))


def _be_nice(niceness: int) -> None:
    thread = threading.get_native_id()
    own = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, min(19, own + niceness))
