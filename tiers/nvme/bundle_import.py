"""`import_bundle`: what a bundle holds, verified, into an open store by its ordinary puts.

So capacity, eviction order and crash safety are the store's. Blocks that are there already are not
read: running an import again is how it resumes. Memory holds `_POOL_BYTES` of blocks, or one block,
and the headers of one branch.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier.index.errors import KvtierError
from kvtier.index.words import Slots, TierId
from kvtier.tiers.contracts import LANDED, Flight, Put
from kvtier.tiers.errors import RecordRefused, TierFull
from kvtier.tiers.nvme.bundle_reader import (
    INCOMPLETE,
    Bundle,
    Damage,
    Problems,
    Record,
    Step,
    Trail,
)
from kvtier.tiers.nvme.custody import NamespaceUse
from kvtier.tiers.nvme.record import PAGE, header_bytes, padded
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.tiers.pool import ArrayPool

_POOL_BYTES = 64 << 20
_WAIT_S = 1.0


@dataclass(frozen=True)
class ImportReport:
    """What an import did. `records`, `blocks` and `nbytes` (decoded) are what the bundle holds of
    the namespaces wanted; the blocks are `imported`, `already_there`, `refused` by the store (no
    room, drive failing) or `damaged` (themselves, or what they hang off). `pinned`: paths.
    `foreign`: namespaces (hex) that were not wanted, with their blocks. Not `complete`: the file is
    cut short or lacks records.
    """

    records: int
    blocks: int
    nbytes: int
    imported: int
    already_there: int
    refused: int
    damaged: int
    pinned: int
    foreign: tuple[tuple[str, int], ...]
    complete: bool
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.complete and not self.problems


def import_bundle(
    path: Path,
    store: NvmeTier,
    *,
    namespaces: Collection[bytes] | None = None,
    pin_label: str | None = None,
    expires_at: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ImportReport:
    """Put what the bundle at `path` holds into `store`, parents first; return once it is durable.

    `namespaces`: digests of those wanted (None: all). With `pin_label`, every path of the bundle
    that is in the store at the end is pinned under it, until `expires_at` (the tier's clock,
    seconds; None: until it is lifted). `progress` is told `(bytes done, bytes in all)`. What the
    bundle brings never pushes out what it brought before: once the store is full of it, the rest is
    refused.

    Raises `BundleRefused` if the file is no bundle or cannot be read, `StoreVersion`. Whatever else
    goes wrong is in the report.
    """
    with Bundle(path) as bundle:
        return _Import(bundle, store, namespaces, pin_label, expires_at, progress).run()


@dataclass(frozen=True)
class _Flying:
    """A put under way: `slots` hold the blocks of `step` from `first` on."""

    step: Step
    first: int
    slots: Slots
    flight: Flight
    estimate: int


class _Import:
    def __init__(
        self,
        bundle: Bundle,
        store: NvmeTier,
        namespaces: Collection[bytes] | None,
        label: str | None,
        expires_at: float | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._bundle = bundle
        self._store = store
        self._wanted = namespaces
        self._label = label
        self._expires_at = expires_at
        self._progress = progress
        self._problems = Problems()
        self._count: Counter[str] = Counter()
        self._foreign: Counter[bytes] = Counter()
        self._trail = Trail()
        self._pool: ArrayPool | None = None
        self._flying: deque[_Flying] = deque()
        self._written_before = store.statistics().written_bytes
        self._average = {use.namespace: use.nbytes // use.blocks for use in self._uses()}
        self._found_bytes = 0

    def run(self) -> ImportReport:
        count = self._count
        for item in self._bundle.records():
            if isinstance(item, Damage):
                self._problems.add(f"page {item.offset // PAGE}: {item.reason}")
                continue
            header = item.header
            if not self._wants(header.namespace):
                self._foreign[header.namespace] += len(header.blocks)
            else:
                count["records"] += 1
                count["blocks"] += len(header.blocks)
                count["nbytes"] += len(header.blocks) * header.block_bytes
                self._bring(item, self._trail.enter(header))
            if self._progress is not None:
                total = self._bundle.nbytes
                self._progress(min(item.offset + header.record_bytes, total), total)
        self._land_all()
        complete = self._bundle.complete
        if not complete:
            self._problems.add(INCOMPLETE)
        self._recount()
        return ImportReport(
            records=count["records"],
            blocks=count["blocks"],
            nbytes=count["nbytes"],
            imported=count["imported"],
            already_there=count["already_there"],
            refused=count["refused"],
            damaged=count["damaged"],
            pinned=count["pinned"],
            foreign=tuple((name.hex(), n) for name, n in sorted(self._foreign.items())),
            complete=complete,
            problems=self._problems.told(),
        )

    def _uses(self) -> list[NamespaceUse]:
        try:
            return self._store.namespaces()
        except (KvtierError, OSError) as error:
            self._problems.add(f"what the store holds is not known: {error}")
            return []

    def _wants(self, namespace: bytes) -> bool:
        return self._wanted is None or namespace in self._wanted

    def _bring(self, record: Record, step: Step) -> None:
        """Put what the store lacks of a record."""
        header, store = record.header, self._store
        keys = [block.key for block in header.blocks]
        there = store.holds(header.namespace, keys)
        if there:
            self._count["already_there"] += there
            self._found_bytes += there * self._average.get(header.namespace, 0)
            step.kept = there
        elif not step.hangs and not self._parent_is_there(step):
            refused = step.above is not None and step.above.refused
            why = "no room for what it hangs off" if refused else "what it hangs off is missing"
            self._give_up(step, 0, refused=refused, why=why)
            return
        first = there
        while first < len(keys):
            fit = self._num_fitting(header.block_tokens, header.block_bytes, len(keys) - first)
            if not fit:
                self._give_up(step, first, refused=True, why="no room in the store")
                return
            pool = self._room_for(header.block_bytes, fit)
            slots = pool.alloc(min(fit, pool.num_free))
            sound = self._read(record, first, pool, slots)
            if sound:
                self._put(step, first, pool, slots[:sound])
            step.kept = first = first + sound
            if sound < len(slots):
                pool.free(slots[sound:])
                self._give_up(step, first, refused=False, why="")
                return

    def _parent_is_there(self, step: Step) -> bool:
        header = step.header
        return not step.above and self._store.holds(header.namespace, [header.parent]) == 1

    def _give_up(self, step: Step, first: int, *, refused: bool, why: str) -> None:
        """The blocks from `first` on will not be in the store."""
        step.refused = refused
        self._count["refused" if refused else "damaged"] += len(step.header.blocks) - first
        if why:
            self._problems.add(f"page {step.header.page}: {why}")

    def _num_fitting(self, block_tokens: int, block_bytes: int, wanted: int) -> int:
        """How many of the next `wanted` blocks the store has room for beside what it got from here.

        Estimates what is under way; waits for it before it says that there is too little room.
        """
        size, capacity = padded(block_bytes), self._store.statistics().capacity_bytes
        while True:
            written = self._store.statistics().written_bytes - self._written_before
            flying = sum(each.estimate for each in self._flying)
            room = capacity - written - flying - self._found_bytes
            fit = max(0, room - header_bytes(wanted, block_tokens)) // size
            if fit >= wanted or not self._flying:
                return min(fit, wanted)
            self._land_oldest()

    def _room_for(self, block_bytes: int, wanted: int) -> ArrayPool:
        """A pool of that block size with a free slot: for `wanted` blocks, if it is that large."""
        pool = self._pool
        if pool is None or pool.block_bytes != block_bytes:
            self._land_all()
            num_slots = max(1, _POOL_BYTES // padded(block_bytes))
            pool = self._pool = ArrayPool(TierId.DRAM, num_slots, block_bytes)
        while pool.num_free < min(wanted, pool.num_slots):
            self._land_oldest()
        return pool

    def _read(self, record: Record, first: int, pool: ArrayPool, slots: Slots) -> int:
        """Fill `slots` with the blocks from `first` on; how many leading ones are sound."""
        for i, slot in enumerate(slots):
            try:
                self._bundle.read_block(record, first + i, pool.view(int(slot)))
            except RecordRefused as error:
                self._problems.add(f"page {record.header.page}: {error}")
                return i
        return len(slots)

    def _put(self, step: Step, first: int, pool: ArrayPool, slots: Slots) -> None:
        header, last = step.header, first + len(slots)
        blocks = header.blocks[first:last]
        stride = 4 * header.block_tokens
        tokens = np.frombuffer(header.tokens[first * stride : last * stride], "<i4")
        flight = self._store.put(
            Put(
                namespace=header.namespace,
                parent=header.blocks[first - 1].key if first else header.parent,
                tokens=tokens.astype(np.int32, copy=False),
                keys=tuple(block.key for block in blocks),
                prefix=np.empty(0, np.int32),
                pool=pool,
                slots=slots,
                checksums=np.array([block.checksum for block in blocks], np.uint64),
            )
        )
        estimate = header_bytes(len(slots), header.block_tokens)
        estimate += len(slots) * padded(header.block_bytes)
        self._flying.append(_Flying(step, first, slots, flight, estimate))

    def _land_oldest(self) -> None:
        """Wait for the oldest put, count its blocks, and free its slots."""
        flying, signal = self._flying.popleft(), self._store.signal
        flight, step = flying.flight, flying.step
        while True:
            ticks = signal.ticks
            if flight.done:
                break
            signal.wait(ticks, _WAIT_S)
        landed = int(np.count_nonzero(flight.status == LANDED))
        self._count["imported"] += landed
        lost = len(flight) - landed
        if lost:
            self._count["refused"] += lost
            step.kept, step.refused = min(step.kept, flying.first + landed), True
            self._problems.add(f"page {step.header.page}: {flight.error or TierFull('refused')}")
        assert self._pool is not None
        self._pool.free(flying.slots)

    def _land_all(self) -> None:
        while self._flying:
            self._land_oldest()

    def _recount(self) -> None:
        """Look again: the store may have given up early blocks for later ones, or for others. Pin
        what is there."""
        held, trail = 0, Trail(self._leave)
        for item in self._bundle.records():
            if isinstance(item, Record) and self._wants(item.header.namespace):
                keys = [block.key for block in item.header.blocks]
                step = trail.enter(item.header)
                step.kept = self._store.holds(item.header.namespace, keys)
                held += step.kept
        trail.end()
        gone = self._count["imported"] + self._count["already_there"] - held
        if gone > 0:
            again = min(gone, self._count["imported"])
            self._count["imported"] -= again
            self._count["already_there"] -= gone - again
            self._count["refused"] += gone
            self._problems.add(f"{gone} blocks were evicted again; give the store more room")

    def _leave(self, step: Step) -> None:
        """Pin the path that ends in this record, if its last kept block has nothing behind it."""
        if self._label is None or not step.kept or step.followed:
            return
        header, leaf = step.header, step.header.blocks[step.kept - 1].key
        try:
            self._store.pin(header.namespace, [leaf], self._label, self._expires_at)
            self._count["pinned"] += 1
        except (KvtierError, OSError) as error:
            self._problems.add(f"page {header.page}: not pinned: {error}")
