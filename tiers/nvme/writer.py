"""Puts: from slots of a pool to published records, in lots and their groups.

Order of a lot: blocks encoded, if they are to be -> space reserved (evicting if need be) -> group
by group: payload and header written -> fdatasync -> one catalogue transaction -> landed. Sync and
commit of a group overlap the writes of those behind it; commits keep the order of allocation, so
that a segment holds nothing unpublished before its published end.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from kvtier.tiers.errors import StoreCorrupt, TierFull
from kvtier.tiers.nvme.catalogue import Addition, Change
from kvtier.tiers.nvme.core import Core
from kvtier.tiers.nvme.encoder import Encoder
from kvtier.tiers.nvme.health import Admission, Fault
from kvtier.tiers.nvme.outgoing import Forsaken, Record, write_record
from kvtier.tiers.nvme.pace import Meter
from kvtier.tiers.nvme.puts import Puts
from kvtier.tiers.nvme.rows import Freed
from kvtier.tiers.nvme.segments import Allocation
from kvtier.tiers.nvme.watch import Call
from kvtier.tiers.nvme.workers import Batch, Scratch

_log = logging.getLogger(__name__)

GROUP_BYTES = 256 << 20
"""About what one fdatasync and one commit cover."""


class Writer:
    """Writes what `puts` holds, on the tier's loop. `group_bytes`: about what one commit covers."""

    def __init__(self, core: Core, puts: Puts, meter: Meter, group_bytes: int) -> None:
        self._core = core
        self._puts = puts
        self._meter = meter
        self._group_bytes = group_bytes
        self._encoder = Encoder(core.workers, meter, group_bytes)
        self._resting = asyncio.Event()
        self._unsyncable: dict[int, Exception] = {}
        self._settling: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Write groups until closed and empty.

        A call that fails, whatever it raises, fails its records, and their space is given back. If
        this itself breaks, what is settling has settled, and what was written, or even published,
        of the rest is unknown: see `Crew`.
        """
        try:
            await self._run()
        finally:
            if self._settling is not None:
                await asyncio.gather(self._settling, return_exceptions=True)
                self._settling = None

    async def _run(self) -> None:
        health = self._core.health
        while True:
            waiting = self._puts.waiting
            if waiting and not health.admits_all:
                await self._settled()  # a probe's verdict is to be its own
            admission = health.admission() if waiting else Admission.NONE
            lot = self._puts.next_lot(admission)
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
            elif self._puts.closing:
                self._resting.set()
                return
            else:
                self._puts.wake.clear()
                self._resting.set()
                await self._puts.wake.wait()
                self._resting.clear()

    async def _settled_or_woken(self) -> None:
        """Wait until the last group has settled, or another can begin meanwhile."""
        assert self._settling is not None
        self._puts.wake.clear()
        woken = asyncio.ensure_future(self._puts.wake.wait())
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
        while self._puts.unfinished:
            await self._resting.wait()
            await asyncio.sleep(0)  # it may have been woken and not have come to it

    async def _probe(self, lot: list[Record]) -> None:
        """Write the one record that tells whether the drive takes writes again."""
        try:
            allocation = await self._admit(lot)
            if allocation is not None:
                await self._write(allocation, lot)
                await self._settled()
        finally:
            self._core.health.write_undecided()

    async def _admit(self, lot: list[Record]) -> Allocation | None:
        """Encode, then reserve space for as many of `lot` as fit; the rest fail and leave it."""
        core = self._core
        await self._encoder.encode(lot)
        for record in lot:
            if record.error is not None:
                self._puts.fail(record, record.error)
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
        full = TierFull("NVMe store: no room, and nothing that may be evicted")
        for record in lot[fit:]:
            self._puts.fail(record, full)
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
                self._puts.fail(record, record.error)
        await core.reclaim()

    def _land(self, record: Record) -> None:
        self._core.tally.written_bytes += record.nbytes
        self._meter.published(record.sizes, record.pool.block_bytes)
        self._puts.land(record)


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


def _attempt(action: Callable[[], None], _: Scratch) -> Exception | None:
    """What went wrong: whatever it is, it must not keep the lot from giving its space back."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - goes to the put's flights
        if not isinstance(error, OSError):
            _log.error("NVMe write broke", exc_info=error)
        return error
    return None
