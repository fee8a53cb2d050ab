"""Puts on their way down: cut into records, which wait for their turn, and whoever waits for them.

Knows which records may be written next, and whom each owes an answer. Not how they are written.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable

import numpy as np

from kvtier.index.words import ROOT_KEY, BlockKey, TierId
from kvtier.tiers.contracts import PENDING, Flight, Put
from kvtier.tiers.errors import BudgetSpent, CapacityTooSmall, StoreCorrupt
from kvtier.tiers.nvme.codecs import CodecPolicy
from kvtier.tiers.nvme.core import Core
from kvtier.tiers.nvme.health import Admission, Fault
from kvtier.tiers.nvme.outgoing import Forsaken, Record, Rider
from kvtier.tiers.nvme.record import header_bytes, padded
from kvtier.tiers.nvme.tables import Span

EXTENT_BYTES = 8 << 20
"""About what one record holds; no more than `EXTENT_BLOCKS` blocks, at least one."""

EXTENT_BLOCKS = 52
"""More, and the extent's row in the catalogue would need pages of its own."""


class Puts:
    """Everything that was put and is not yet published. Belongs to the tier's loop.

    `lot_bytes`: about what is written into one reservation; `group_bytes`: of it, what may be held
    encoded. `wake` is set when there is something to do.
    """

    def __init__(
        self,
        core: Core,
        next_id: Callable[[], int],
        policy: CodecPolicy,
        *,
        extent_bytes: int,
        lot_bytes: int,
        group_bytes: int,
    ) -> None:
        """`policy` may be replaced, from any thread: it holds for puts from then on."""
        self.policy = policy
        self.wake = asyncio.Event()
        self.closing = False
        self._core = core
        self._next_id = next_id
        self._extent_bytes = min(extent_bytes, core.capacity_bytes // 2)  # header not counted
        self._lot_bytes = lot_bytes
        self._group_bytes = group_bytes
        self._foreground: deque[Record] = deque()
        self._background: deque[Record] = deque()
        self._pending: dict[tuple[bytes, BlockKey], tuple[Record, int]] = {}

    @property
    def waiting(self) -> bool:
        """Whether a record waits for its turn."""
        return bool(self._foreground or self._background)

    @property
    def unfinished(self) -> bool:
        """Whether anything waits or is being written."""
        return bool(self._pending)

    def close(self) -> None:
        """Take no more. What is there is still to be written."""
        self.closing = True
        self.wake.set()

    def plan(self, request: Put, flight: Flight) -> None:
        """Accept a put: land what is there, ride on what is under way, queue the rest."""
        core, keys = self._core, request.keys
        if self.closing or flight.done:
            flight.fail_rest()
            return
        try:
            now = core.now()
            spans = core.catalogue.find(request.namespace, keys, now)
            parent = [] if spans else core.catalogue.find(request.namespace, [request.parent], now)
        except (OSError, StoreCorrupt) as error:
            core.health.count(error, Fault.CATALOGUE)
            flight.fail_rest(error)
            return
        start = sum(span.count for span in spans)
        if spans:
            core.used({span.extent.id for span in spans})
            flight.land(range(start), source=TierId.NVME)
        while start < len(keys) and (way := self._on_its_way(request.namespace, keys[start])):
            record, position = way
            record.ride(flight, start, position)
            if not request.background:
                self._hasten(record)
            start += 1
        if start < len(keys):
            self._plan_new(request, flight, start, spans or parent)

    def _on_its_way(self, namespace: bytes, key: BlockKey) -> tuple[Record, int] | None:
        """The record that carries a block down, and the block's position, unless it is forsaken."""
        record, position = self._pending.get((namespace, key), (None, 0))
        if record is None:
            return None
        owner = record.riders[0]
        pending = owner.flight.status[owner.first + position] == PENDING
        return (record, position) if pending else None

    def _plan_new(self, request: Put, flight: Flight, start: int, before: list[Span]) -> None:
        keys, size = request.keys, request.pool.block_bytes
        parent = keys[start - 1] if start else request.parent
        way = self._on_its_way(request.namespace, parent)
        after = None if way is None else way[0]
        stride = len(request.tokens) // len(keys)
        if after is None and not before and parent != ROOT_KEY:
            error: Exception = StoreCorrupt("put: the block's parent is not in the store")
        elif header_bytes(1, stride) + padded(size) > self._core.capacity_bytes:
            error = CapacityTooSmall(
                f"NVMe store: a block takes {header_bytes(1, stride) + padded(size)} bytes, the "
                f"store holds {self._core.capacity_bytes}; raise its capacity"
            )
        else:
            if not request.background:
                self._hasten(after)
            self._cut(request, flight, start, after, before[-1].extent.id if before else 0)
            return
        self._core.health.refuse(len(keys) - start)
        flight.fail(range(start, len(keys)), error)

    def _cut(
        self, request: Put, flight: Flight, start: int, after: Record | None, anchor: int
    ) -> None:
        """Cut the blocks from `start` on into records and queue them."""
        keys, slots = request.keys, request.slots.tolist()
        size = padded(request.pool.block_bytes)
        count = max(1, min(self._extent_bytes // size, EXTENT_BLOCKS))
        stride = len(request.tokens) // len(keys)
        policy = self.policy.named(request.codec)
        for a in range(start, len(keys), count):
            b = min(a + count, len(keys))
            sums = request.checksums
            record = Record(
                id=self._next_id(),
                namespace=request.namespace,
                parent=keys[a - 1] if a else request.parent,
                anchor=after.id if after else anchor,
                after=after,
                keys=keys[a:b],
                tokens=request.tokens[a * stride : b * stride].astype("<i4").tobytes(),
                pool=request.pool,
                slots=tuple(slots[a:b]),
                expected=None if sums is None else tuple(int(s) for s in sums[a:b]),
                policy=policy,
                riders=[Rider(flight, a, 0, b - a)],
                background=request.background,
            )
            self._core.anchors[record.anchor] += 1
            for position, key in enumerate(record.keys):
                self._pending[record.namespace, key] = (record, position)
            (self._background if record.background else self._foreground).append(record)
            after = record
        self.wake.set()

    def _hasten(self, record: Record | None) -> None:
        """Somebody waits for a record now: it and its ancestors on their way are background no
        more, neither in their turn nor for the budget."""
        chain: list[Record] = []
        while record is not None and record.background:
            record.background = False
            chain.append(record)
            record = record.after
        for ancestor in reversed(chain):
            if ancestor in self._background:
                self._background.remove(ancestor)
                self._foreground.append(ancestor)

    def next_lot(self, admission: Admission) -> list[Record]:
        """The next records to write; those that can't be any more fail on the way.

        The background goes only when nobody waits for anything, and in small lots, so that who
        comes meanwhile waits for little. What may be encoded comes in lots of one group: they are
        encoded before space is reserved, and that takes memory.
        """
        raw = bool(self._foreground) and self._foreground[0].policy.codec == "raw"
        most = self._lot_bytes if raw else self._group_bytes
        lot = self._lot_of(self._foreground, most, admission)
        return lot or self._lot_of(self._background, self._group_bytes // 4, admission)

    def _lot_of(self, queue: deque[Record], most: int, admission: Admission) -> list[Record]:
        lot: list[Record] = []
        nbytes = 0
        while queue and (not lot or nbytes + queue[0].nbytes <= most):
            if lot and (admission is Admission.ONE or queue[0].policy != lot[0].policy):
                break
            record = queue.popleft()
            error = self._refusal(record, admission)
            if error is None and record.background:
                spent = not self._core.budget.allows(nbytes + record.nbytes)
                error = self._core.budget.refusal() if spent else None
            if error is not None:
                self.fail(record, error)
                continue
            lot.append(record)
            nbytes += record.nbytes
        return lot

    def _refusal(self, record: Record, admission: Admission) -> Exception | None:
        """Why a queued record can't be written any more, or not now."""
        if admission is Admission.NONE:
            return self._core.health.refusal()
        if record.after is not None and record.after.error is not None:
            return record.after.error
        if record.is_forsaken or record.is_unwanted:
            return Forsaken("put: given up before it was written")
        return None

    def land(self, record: Record) -> None:
        """A record is published: answer whoever waits for it."""
        self._forget(record)
        checksums = np.array(record.checksums, np.uint64)
        for rider in record.riders:
            sums = checksums[rider.position : rider.position + rider.count]
            rider.flight.land(range(rider.first, rider.first + rider.count), sums, TierId.NVME)

    def fail_all(self, error: Exception) -> None:
        """Give up everything. Nothing may be under way."""
        while self._pending:
            record, _ = next(iter(self._pending.values()))
            self.fail(record, record.error or error)
        self._foreground.clear()
        self._background.clear()

    def fail(self, record: Record, error: Exception) -> None:
        """A record will not be published: answer whoever waits for it."""
        record.error = error
        self._core.health.refuse(len(record.keys))
        if isinstance(error, BudgetSpent):
            self._core.tally.budget_refused_blocks += len(record.keys)
        self._forget(record)
        for rider in record.riders:
            rider.flight.fail(range(rider.first, rider.first + rider.count), error)

    def _forget(self, record: Record) -> None:
        anchors: Counter[int] = self._core.anchors
        anchors[record.anchor] -= 1
        if not anchors[record.anchor]:
            del anchors[record.anchor]
        for key in record.keys:
            if self._pending.get((record.namespace, key), (None, 0))[0] is record:
                del self._pending[record.namespace, key]
        record.after = None  # or a long branch's first records live as long as its last
