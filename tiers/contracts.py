"""The seams of the storage service: what the cache asks of pools, stores and waiting.

A *pool* (HBM, DRAM) is memory this process owns, cut into slots; the index is the truth about it.
A *store* (NVMe, sidecar) keeps its own catalogue and evicts as it likes; the index holds hints.
Nothing here copies or decides. Bytes move only through a `Mover` or inside a store.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.index.words import BlockKey, Slots, TierId, Tokens
from kvtier.tiers.errors import CalledOff

Bytes = npt.NDArray[np.uint8]
Checksums = npt.NDArray[np.uint64]

PENDING, LANDED, FAILED = 0, 1, 2
"""What a `Flight` knows about one block."""


class Signal:
    """Wakes whoever waits for progress. Set from any thread; it carries no news by itself.

    A waiter reads `ticks` before it looks at the state and passes it to `wait`, so a wake-up
    between looking and sleeping is not lost. `listener` (if given) is called from the notifying
    thread and must only forward the wake-up (write to an eventfd, `call_soon_threadsafe`).
    """

    def __init__(self) -> None:
        self._condition = Condition()
        self._ticks = 0
        self._listeners: list[Callable[[], None]] = []

    @property
    def ticks(self) -> int:
        return self._ticks

    def listen(self, listener: Callable[[], None]) -> None:
        with self._condition:
            self._listeners.append(listener)

    def notify(self) -> None:
        with self._condition:
            self._ticks += 1
            self._condition.notify_all()
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()

    def wait(self, ticks: int, timeout_s: float) -> None:
        """Return once something was notified after `ticks` was read, or after `timeout_s`."""
        with self._condition:
            self._condition.wait_for(lambda: self._ticks != ticks, timeout_s)


class Flight:
    """The outcome of moving `n` blocks, block by block, as it becomes known.

    Worker threads report with `land` and `fail`; the cache reads with `news`. Completion is polled:
    no worker calls into the cache, it only wakes `signal`. Every block ends LANDED or FAILED, once.
    A block that was called off before anything was done about it ends FAILED as well.
    """

    def __init__(
        self,
        n: int,
        signal: Signal,
        *,
        deadline: float | None = None,
        background: bool = False,
    ) -> None:
        self.status = np.zeros(n, np.uint8)
        self.checksums: Checksums = np.zeros(n, np.uint64)
        self.sources: list[TierId | None] = [None] * n
        self.error: Exception | None = None
        self.busy_s = 0.0
        self.called_off = 0
        self._signal = signal
        self._open = n
        self._seen = np.zeros(n, np.bool_)
        self._stalled = False
        self._cancelled = False
        self._deadline = deadline
        self._background = background
        self._lock = Condition()

    def __len__(self) -> int:
        return len(self.status)

    @property
    def done(self) -> bool:
        """True once every block has landed or failed."""
        return self._open == 0

    @property
    def pending(self) -> int:
        """Blocks whose outcome is not known yet."""
        return self._open

    @property
    def landed(self) -> int:
        """Blocks that have arrived."""
        return int(np.count_nonzero(self.status == LANDED))

    @property
    def stalled(self) -> bool:
        """True if what is pending will not be known soon, because a call does not return.

        Its bytes may still come: the destination of pending blocks is not free before `done`.
        """
        return self._stalled and not self.done

    def stall(self) -> None:
        """Tell whoever waits to go on without the pending blocks."""
        self._stalled = True
        self._signal.notify()

    @property
    def cancelled(self) -> bool:
        """True if the caller has lost interest: what is not begun yet may be dropped, and fail."""
        return self._cancelled

    def cancel(self) -> None:
        """Lose interest. The flight still ends by itself: until then its slots are in use."""
        self._cancelled = True

    @property
    def deadline(self) -> float | None:
        """`Fetch.deadline`, as whoever wants it longest gives it."""
        return self._deadline

    def is_off(self, now: float) -> bool:
        """Whether what is not begun by `now` (the clock of `deadline`) is to be dropped."""
        return self._cancelled or (self._deadline is not None and now >= self._deadline)

    @property
    def background(self) -> bool:
        """True while nobody waits for it."""
        return self._background

    def agree(self, deadline: float | None, *, background: bool) -> None:
        """These are the terms now of all who want it together: another came, or one has gone.

        If it was cancelled, it is wanted again; what was dropped by then stays failed.
        """
        self._cancelled = False
        self._deadline = deadline
        self._background = background

    @property
    def unread(self) -> int:
        """Blocks whose outcome `news` has not told yet."""
        return int(np.count_nonzero(~self._seen))

    @property
    def untold(self) -> npt.NDArray[np.intp]:
        """The positions of those blocks."""
        return np.flatnonzero(~self._seen)

    def land(
        self,
        blocks: Sequence[int] | npt.NDArray[np.integer],
        checksums: Checksums | None = None,
        source: TierId | None = None,
        busy_s: float = 0.0,
    ) -> None:
        """These blocks' bytes are at the destination and verified.

        `checksums`: xxh3-64 of each; `busy_s`: how long the link was busy with them, if known.
        """
        with self._lock:
            self.busy_s += busy_s
            if isinstance(blocks, range) and self._is_pending(blocks):
                where = slice(blocks.start, blocks.stop)
                if checksums is not None:
                    self.checksums[where] = checksums
                self.sources[where] = [source] * len(blocks)
                self.status[where] = LANDED
                self._open -= len(blocks)
                blocks = ()
            for position, block in enumerate(blocks):
                if self.status[block] != PENDING:
                    continue
                if checksums is not None:
                    self.checksums[block] = checksums[position]
                self.sources[block] = source
                self.status[block] = LANDED
                self._open -= 1
        self._signal.notify()

    def fail(
        self, blocks: Sequence[int] | npt.NDArray[np.integer], error: Exception | None = None
    ) -> None:
        """These blocks did not arrive. Nothing is known about the destination's bytes."""
        with self._lock:
            for block in blocks:
                if self.status[block] == PENDING:
                    self.status[block] = FAILED
                    self._open -= 1
            self.error = self.error or error
        self._signal.notify()

    def call_off(self, blocks: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """These blocks were not begun, and will not be: see `is_off`."""
        self.called_off += len(blocks)
        self.fail(blocks, CalledOff("called off, or too late, before the copy began"))

    def _is_pending(self, blocks: range) -> bool:
        return blocks.step == 1 and not self.status[blocks.start : blocks.stop].any()

    def fail_rest(self, error: Exception | None = None) -> None:
        """Fail every block that is still pending."""
        self.fail(np.flatnonzero(self.status == PENDING), error)

    def news(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """`(landed, failed)`: positions whose outcome became known since the last call."""
        with self._lock:
            fresh = (self.status != PENDING) & ~self._seen
            self._seen |= fresh
            return (
                np.flatnonzero(fresh & (self.status == LANDED)),
                np.flatnonzero(fresh & (self.status == FAILED)),
            )


@dataclass(eq=False)
class Answer:
    """A number that a store's thread is still finding out. The first one given stands."""

    signal: Signal
    value: int | None = field(default=None)
    _lock: Lock = field(default_factory=Lock, repr=False)

    @property
    def done(self) -> bool:
        return self.value is not None

    def give(self, value: int) -> None:
        with self._lock:
            if self.value is not None:
                return
            self.value = value
        self.signal.notify()


class Pool(Protocol):
    """Memory cut into `num_slots` slots of `block_bytes`, guarded by the cache's lock.

    `alloc` and `free` pair up. A slot handed out holds whatever the last user left (NaN in debug).
    """

    @property
    def tier(self) -> TierId: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def num_free(self) -> int: ...

    def alloc(self, n: int) -> Slots:
        """`n` slots, in runs where possible. Raises `TierFull`, and takes none, if too few."""
        ...

    def free(self, slots: Slots) -> None:
        """Give slots back. Raises `ValueError` on a slot that is free already."""
        ...

    def describe(self, slots: Slots, keys: Sequence[BlockKey], checksums: Checksums | None) -> None:
        """Write down what now stands in these slots (key, checksum, generation)."""
        ...

    def checksums(self, slots: Slots) -> Checksums:
        """The xxh3-64 written down for each slot."""
        ...


class HostPool(Pool, Protocol):
    """A pool whose bytes the CPU can address."""

    def view(self, slot: int) -> Bytes:
        """The `block_bytes` bytes of one slot, writable, contiguous; valid while it is held."""
        ...


@dataclass(frozen=True)
class Fetch:
    """Bring blocks from a store into slots of a pool. Blocks are one branch, root first."""

    namespace: bytes
    parent: BlockKey
    tokens: Tokens
    keys: tuple[BlockKey, ...]
    prefix: Tokens
    """The tokens before `tokens`, from the root (a sidecar matches whole paths)."""
    pool: Pool
    slots: Slots
    deadline: float | None = None
    """`time.monotonic` seconds: reads not begun by then are dropped, and fail. None: no limit."""
    background: bool = False
    """Nobody waits for it: reads that somebody waits for go first, and it takes part of the threads
    only. `Flight.agree` changes both for the fetch under way, either way."""


@dataclass(frozen=True)
class Put:
    """Copy blocks from slots of a pool into a store. Blocks are one branch, root first.

    The caller keeps the slots unchanged until the flight is done. `checksums` (xxh3-64 of each
    block, None where the pool has none) are checked against the bytes on the way down.
    `background`: nobody waits for it, so all others go first, and a store may refuse it for the
    sake of the drive's life.
    `codec`: "raw", "zstd" or "auto" instead of what the store was opened with; a store that has no
    codecs takes no notice.
    """

    namespace: bytes
    parent: BlockKey
    tokens: Tokens
    keys: tuple[BlockKey, ...]
    prefix: Tokens
    pool: Pool
    slots: Slots
    checksums: Checksums | None
    background: bool = False
    codec: str | None = None


class Store(Protocol):
    """A lower level with its own catalogue. Every call returns at once; threads are the store's.

    Prefix-closed: it keeps a block only after its parent. A refusal is a FAILED block, never an
    exception on this face.
    """

    @property
    def tier(self) -> TierId: ...

    def lookup(
        self,
        namespace: bytes,
        keys: Sequence[BlockKey],
        tokens: Tokens,
        *,
        asks: bool = False,
    ) -> Answer:
        """How many leading `keys` it holds now.

        `tokens` is the whole path from the root and ends with the blocks that `keys` name; blocks
        before them are the caller's already. `asks`: a request asks for this path. Said once a
        request, also where the caller has all of it (no `keys`): for a store that learns from it.
        """
        ...

    def fetch(self, request: Fetch) -> Flight:
        """Land blocks in order as far as it can; a block that is gone or corrupt fails, as does
        everything behind it."""
        ...

    def put(self, request: Put) -> Flight:
        """Publish durably, then land. Blocks it holds already land at once, not written again."""
        ...

    def persist(self, namespace: bytes, keys: Sequence[BlockKey], tokens: Tokens) -> Answer:
        """Make durable what it holds of `keys`; how many leading ones would survive a power cut.

        `keys` and `tokens` as in `lookup`. A store whose `put` is durable just looks them up.
        """
        ...

    def close(self) -> None:
        """Finish or fail what is in flight, then let go of files and threads. Idempotent."""
        ...
