"""Puts: from slots of a pool to published records, in lots and their groups.

Order of a lot: blocks encoded, if they are to be -> space reserved (evicting if need be) -> group
by group: payload and header written -> fdatasync -> one catalogue transaction -> landed. Sync and
commit of a group overlap the writes of those behind it; commits keep the order of allocation, so
that a segment holds nothing unpublished before its published end.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from kvtier.index.words import ROOT_KEY, BlockKey, TierId
from kvtier.tiers.contracts import PENDING, Flight, Put
from kvtier.tiers.errors import BudgetSpent, CapacityTooSmall, StoreCorrupt, TierFull
from kvtier.tiers.nvme.catalogue import Addition, Change
from kvtier.tiers.nvme.codecs import CodecPolicy
from kvtier.tiers.nvme.core import Core
from kvtier.tiers.nvme.encoder import Encoder
from kvtier.tiers.nvme.health import Admission, Fault
from kvtier.tiers.nvme.outgoing import Forsaken, Record, Rider, write_record
from kvtier.tiers.nvme.pace import Meter
from kvtier.tiers.nvme.record import header_bytes, padded
from kvtier.tiers.nvme.rows import Freed
from kvtier.tiers.nvme.segments import Allocation
from kvtier.tiers.nvme.tables import Span
from kvtier.tiers.nvme.watch import Call
from kvtier.tiers.nvme.workers import Batch, Scratch

EXTENT_BYTES = 8 << 20
"""About what one record holds; no more than `EXTENT_BLOCKS` blocks, at least one."""

GROUP_BYTES = 256 << 20
"""About what one fdatasync and one commit cover."""

_LOT_GROUPS = 4
"""Groups whose space is reserved in one call: it waits for every write into the same file."""

EXTENT_BLOCKS = 52
"""More, and the extent's row in the catalogue would need pages of its own."""


class Writer:
    """Serves puts on the tier's loop."""

    def __init__(
        self,
        core: Core,
        next_id: Callable[[], int],
        meter: Meter,
        policy: CodecPolicy,
        *,
        extent_bytes: int,
        group_bytes: int,
    ) -> None:
        """`policy` may be replaced, from any thread: it holds for puts from then on."""
        self.policy = policy
        self._meter = meter
        self._core = core
        self._next_id = next_id
        self._extent_bytes = min(extent_bytes, core.capacity_bytes // 2)  # header not counted
        most = min(_LOT_GROUPS * group_bytes, max(group_bytes, core.segments.segment_bytes))
        self._lot_bytes = min(most, max(core.capacity_bytes // 4, 1))
        self._group_bytes = min(group_bytes, self._lot_bytes)
        self._encoder = Encoder(core.workers, meter, self._group_bytes)
        self._queue: deque[Record] = deque()
        self._background: deque[Record] = deque()
        self._pending: dict[tuple[bytes, BlockKey], tuple[Record, int]] = {}
        self._wake = asyncio.Event()
        self._resting = asyncio.Event()
        self._unsyncable: dict[int, OSError] = {}
        self._closing = False
        self._settling: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Take no more; `run` returns once the queue is empty."""
        self._closing = True
        self._wake.set()

    def plan(self, request: Put, flight: Flight) -> None:
        """Accept a put: land what is there, ride on what is under way, queue the rest."""
        core, keys = self._core, request.keys
        if self._closing or flight.done:
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
            (self._background if record.background else self._queue).append(record)
            after = record
        self._wake.set()

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
                self._queue.append(ancestor)

    async def run(self) -> None:
        """Write groups until closed and empty. If that breaks, what is settling has settled."""
        try:
            await self._run()
        finally:
            if self._settling is not None:
                await asyncio.gather(self._settling, return_exceptions=True)
                self._settling = None

    async def _run(self) -> None:
        health = self._core.health
        while True:
            waiting = bool(self._queue or self._background)
            if waiting and not health.admits_all:
                await self._settled()  # a probe's verdict is to be its own
            admission = health.admission() if waiting else Admission.NONE
            lot = self._next_lot(admission)
            if admission is Admission.ONE:
                await self._probe(lot)
            elif lot:
                allocation = await self._admit(lot)
                if allocation is not None:
                    before = self._settling
                    await self._write(allocation, lot)
                    if before is not None:
                        await before  # no more is reserved than this much and the next
            elif self._settling is not None:
                await self._settled_or_woken()
            elif self._closing:
                self._resting.set()
                return
            else:
                self._wake.clear()
                self._resting.set()
                await self._wake.wait()
                self._resting.clear()

    async def _settled_or_woken(self) -> None:
        """Wait until the last group has settled, or another can begin meanwhile."""
        assert self._settling is not None
        self._wake.clear()
        woken = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait([self._settling, woken], return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
        if self._settling.done():
            await self._settled()

    async def _settled(self) -> None:
        """Wait until everything that was written has settled. Raises what broke it."""
        if self._settling is not None:
            await self._settling
            self._settling = None

    async def rest(self) -> None:
        """Wait until nothing is queued or under way. New puts must be refused meanwhile."""
        while self._pending:
            await self._resting.wait()
            await asyncio.sleep(0)  # it may have been woken and not have come to it

    def fail_all(self, error: Exception) -> None:
        """Give up everything queued or under way (only after `run` has ended)."""
        for record, _ in list(self._pending.values()):
            if record.error is None:
                self._fail(record, error)
        self._queue.clear()
        self._background.clear()

    async def _probe(self, lot: list[Record]) -> None:
        """Write the one record that tells whether the drive takes writes again."""
        try:
            allocation = await self._admit(lot)
            if allocation is not None:
                await self._write(allocation, lot)
                await self._settled()
        finally:
            self._core.health.write_undecided()

    def _next_lot(self, admission: Admission) -> list[Record]:
        """The next records to write; those that can't be any more fail on the way.

        The background goes only when nobody waits for anything, and in small lots, so that who
        comes meanwhile waits for little. What may be encoded comes in lots of one group: they are
        encoded before space is reserved, and that takes memory.
        """
        raw = bool(self._queue) and self._queue[0].policy.codec == "raw"
        most = self._lot_bytes if raw else self._group_bytes
        lot = self._lot_of(self._queue, most, admission)
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
                self._fail(record, error)
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

    async def _admit(self, lot: list[Record]) -> Allocation | None:
        """Encode, then reserve space for as many of `lot` as fit; the rest fail and leave it."""
        core = self._core
        await self._encoder.encode(lot)
        for record in lot:
            if record.error is not None:
                self._fail(record, record.error)
        lot[:] = [record for record in lot if record.error is None]
        if not lot:
            return None
        try:
            await core.make_room(sum(record.nbytes for record in lot))
        except (OSError, StoreCorrupt) as error:
            core.health.write_failed(error, Fault.CATALOGUE)
        room, fit = core.room, 0
        while fit < len(lot) and lot[fit].nbytes <= room:
            room -= lot[fit].nbytes
            fit += 1
        for record in lot[fit:]:
            self._fail(record, TierFull("NVMe store: no room, and nothing that may be evicted"))
        del lot[fit:]
        if not lot:
            return None
        allocation = core.segments.allocate(sum(record.nbytes for record in lot))
        core.reserved += allocation.length
        offset = allocation.offset
        for record in lot:
            record.segment, record.offset = allocation.segment, offset
            offset += record.nbytes
        return allocation

    async def _write(self, allocation: Allocation, lot: Sequence[Record]) -> None:
        """Write records into space of their own. Returns when all are written; they settle as
        they come, group by group, after what was written before."""
        core, segments = self._core, self._core.segments
        prepare = partial(_attempt, partial(segments.prepare, allocation))
        error = await core.workers.submit(prepare, Call.SPACE, urgent=True)
        if error is not None:
            segments.retire()
            for record in lot:
                record.error = error
        groups = []
        for group in [lot] if error is not None else cut_groups(lot, self._group_bytes):
            writes: Batch[Exception | None] = Batch(core.workers, Call.WRITE, urgent=False)
            for record in group if error is None else ():
                writes.add(partial(write_record, record, segments))
            groups.append((group, asyncio.create_task(self._written(group, writes))))
        settling = self._settle_lot(allocation, groups, self._settling)
        self._settling = asyncio.create_task(settling)
        await asyncio.gather(*(written for _, written in groups))

    async def _written(self, group: Sequence[Record], writes: Batch[Exception | None]) -> None:
        """Wait until a group's records are written; what could not be has an `error`."""
        for record, outcome in zip(group, await writes.results(), strict=False):
            if outcome is not None and not isinstance(outcome, Exception):
                raise outcome
            record.error = outcome
            if outcome is None:
                self._core.budget.charge(record.nbytes)

    async def _settle_lot(
        self,
        allocation: Allocation,
        groups: "Sequence[tuple[Sequence[Record], asyncio.Task[None]]]",
        before: "asyncio.Task[None] | None",
    ) -> None:
        """Settle groups in order: as many at a time as are written by then."""
        if before is not None:
            await before  # if that broke, nothing behind it is published
        left = deque(groups)
        while left:
            records: list[Record] = []
            while left and (not records or left[0][1].done()):
                group, written = left.popleft()
                await written
                records += group
            await self._settle(allocation, records)

    async def _settle(self, allocation: Allocation, group: Sequence[Record]) -> None:
        """Sync and publish what was written; land or fail every block of the group."""
        core, segments = self._core, self._core.segments
        if any(record.error is None for record in group):
            sync = partial(_attempt, partial(segments.sync, allocation.segment))
            error = await core.workers.submit(sync, Call.SYNC, urgent=True)
            error = error or self._unsyncable.get(allocation.segment)
            if error is not None:  # what the kernel could not write it may have forgotten
                segments.retire()
                self._unsyncable[allocation.segment] = error
                for record in group:
                    record.error = record.error or error
        end = group[-1].offset + group[-1].nbytes
        if end == allocation.offset + allocation.length:
            segments.settled(allocation)
        for record in group:
            if record.error is None and record.is_forsaken:
                record.error = Forsaken("put: given up while it was being written")
            if record.error is None and record.after is not None:
                record.error = record.after.error
        good = [record for record in group if record.error is None]
        await self._publish({allocation.segment: end} if good else {}, group, good)

    async def _publish(
        self, ends: Mapping[int, int], group: Sequence[Record], good: Sequence[Record]
    ) -> None:
        core, segments = self._core, self._core.segments
        for record in group:
            if record.error is not None:
                core.abandon(Freed(record.id, record.segment, record.offset, record.nbytes))
        now = core.now()
        change = Change(
            additions=[Addition(record.namespace, record.extent(), now) for record in good],
            ends=ends,
            sealed=segments.sealable,
        )
        unpublished: Exception | None = None
        try:
            outcome = await core.commit(change)
        except (OSError, StoreCorrupt) as error:
            unpublished = error
            core.health.write_failed(error, Fault.CATALOGUE)
            for record in good:
                record.error = error
                core.abandon(Freed(record.id, record.segment, record.offset, record.nbytes))
        else:
            segments.sealed(change.sealed)
            core.reserved -= sum(record.nbytes for record in good)
            for record, accepted in zip(good, outcome.accepted, strict=True):
                if not accepted:
                    record.error = StoreCorrupt("put: the block's parent left the store meanwhile")
        errors = {id(record.error): record.error for record in group if not record.inherits}
        failed = [e for e in errors.values() if isinstance(e, OSError) and e is not unpublished]
        for failure in failed:
            core.health.write_failed(failure)
        if not failed and any(record.error is None for record in group):
            core.health.write_worked()
        for record in group:
            if record.error is None:
                self._land(record)
            else:
                self._fail(record, record.error)
        await core.reclaim()

    def _land(self, record: Record) -> None:
        self._core.tally.written_bytes += record.nbytes
        self._meter.published(record.sizes, record.pool.block_bytes)
        self._forget(record)
        checksums = np.array(record.checksums, np.uint64)
        for rider in record.riders:
            sums = checksums[rider.position : rider.position + rider.count]
            rider.flight.land(range(rider.first, rider.first + rider.count), sums, TierId.NVME)

    def _fail(self, record: Record, error: Exception) -> None:
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


def cut_groups(records: Sequence[Record], most: int) -> Iterator[Sequence[Record]]:
    """Neighbouring records in groups of no more than `most` bytes, at least one each."""
    start, nbytes = 0, 0
    for i, record in enumerate(records):
        if i > start and nbytes + record.nbytes > most:
            yield records[start:i]
            start, nbytes = i, 0
        nbytes += record.nbytes
    if start < len(records):
        yield records[start:]


def _attempt(action: Callable[[], None], _: Scratch) -> OSError | None:
    try:
        action()
    except OSError as error:
        return error
    return None
