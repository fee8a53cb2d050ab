"""What reader and writer share on the tier's loop: the account of space, commits, reclaiming.

Knows no flight and no request. Everything here but `Tally`'s readers runs on the loop's thread, so
that nothing is locked; blocking work goes to the workers or to the catalogue's own thread.

    used      bytes of published records
    reserved  bytes of records being written, or written in vain and not yet queued as freed
    freeing   bytes no longer named, and not yet given back to the file system
    used + reserved + freeing <= capacity, always
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import aiofiles.os

from kvtier.tiers.errors import StoreCorrupt
from kvtier.tiers.nvme.budget import WriteBudget
from kvtier.tiers.nvme.catalogue import Catalogue, Change, Outcome
from kvtier.tiers.nvme.daemons import DaemonExecutor
from kvtier.tiers.nvme.health import Fault, Health
from kvtier.tiers.nvme.recovery import Opened
from kvtier.tiers.nvme.rows import Counters, Freed
from kvtier.tiers.nvme.segments import Segments
from kvtier.tiers.nvme.watch import Call, Watch
from kvtier.tiers.nvme.workers import Scratch, Workers


@dataclass
class Tally:
    """Counts since the tier was opened. Written by the loop only; a reader may see it a bit old."""

    read_bytes: int = 0
    written_bytes: int = 0
    hits: int = 0
    misses: int = 0
    quarantined: int = 0
    expired_blocks: int = 0
    evicted_blocks: int = 0
    pins_lost: int = 0
    rebuilds: int = 0
    budget_refused_blocks: int = 0


class Core:
    """The store's account and its one commit queue."""

    def __init__(
        self,
        catalogue: Catalogue,
        segments: Segments,
        workers: Workers,
        watch: Watch,
        health: Health,
        *,
        capacity_bytes: int,
        totals: Counters,
        clock: Callable[[], float],
        tally: Tally,
        budget: WriteBudget,
        read_only: bool,
    ) -> None:
        self.catalogue = catalogue
        self.segments = segments
        self.workers = workers
        self.health = health
        self.tally = tally
        self.budget = budget
        self.read_only = read_only
        self.capacity_bytes = capacity_bytes
        self.totals = totals
        self.reserved = 0
        self.freeing = 0
        self.anchors: Counter[int] = Counter()
        self.next_due: int | None = None
        self.due_changed = asyncio.Event()
        self._readers: Counter[int] = Counter()
        self._uses: dict[int, int] = {}
        self._abandoned: list[Freed] = []
        self._waiting: list[Freed] = []
        self._punched: list[Freed] = []
        self._clock = clock
        self._lock = asyncio.Lock()
        self._reclaims = 0
        self._reclaimed = asyncio.Event()
        self._watch = watch
        self._thread = DaemonExecutor(1, "kvtier-nvme-catalogue")
        self._commit = aiofiles.os.wrap(self._commit_watched)

    @property
    def room(self) -> int:
        """Bytes that may still be reserved."""
        return self.capacity_bytes - self.totals.used_bytes - self.reserved - self.freeing

    def used(self, extents: Collection[int]) -> None:
        """Note that these extents were wanted now; written with the next commit."""
        if self.read_only:
            return
        self._uses.update(dict.fromkeys(extents, self.now()))

    @property
    def num_unsaved_uses(self) -> int:
        return len(self._uses)

    def now(self) -> int:
        """Microseconds of the tier's clock."""
        return int(self._clock() * 1e6)

    def hold(self, extents: Collection[int]) -> None:
        """Reads of these extents begin: their bytes stay on disk until `let_go`."""
        self._readers.update(extents)

    def let_go(self, extents: Collection[int]) -> None:
        self._readers.subtract(extents)
        self._readers += Counter()  # drops the zeros

    def abandon(self, freed: Freed) -> None:
        """A reserved range will not be published. Stays reserved until a commit queues it."""
        self._abandoned.append(freed)

    async def commit(self, change: Change) -> Outcome:
        """Run one catalogue transaction with all that is due, and take its totals.

        Raises `OSError` or `StoreCorrupt` and changes nothing.
        """
        async with self._lock:
            if self.health.is_out:
                raise StoreCorrupt("catalogue: is being made anew")
            cleared = await self._durable_holes()
            abandoned, uses = tuple(self._abandoned), self._uses
            written = self.budget.unsaved
            self._uses = {}
            change = replace(
                change,
                now=self.now(),
                cleared=cleared,
                abandoned=abandoned,
                uses=uses,
                written=written,
            )
            done = False
            try:
                outcome: Outcome = await self._commit(change, executor=self._thread)
                done = True
            finally:
                if not done:
                    self._uses = uses | self._uses
            if written is not None:
                self.budget.saved(written)
            done_with = set(cleared)
            self._punched = [freed for freed in self._punched if freed not in done_with]
            del self._abandoned[: len(abandoned)]
            self.reserved -= sum(freed.length for freed in abandoned)
            self.freeing += sum(freed.length for freed in outcome.freed)
            self._waiting += outcome.freed
            self.totals = outcome.totals
            self._note(outcome)
            return outcome

    async def renew(self, reopen: Callable[[], Opened]) -> None:
        """Take another catalogue, which `reopen` makes on the catalogue's thread, and its totals.

        Nothing may be read or written meanwhile; ranges that were to be given back are by then.
        """
        while self._reclaims:
            self._reclaimed.clear()
            await self._reclaimed.wait()
        async with self._lock:
            self.segments.restart()
            opened: Opened = await aiofiles.os.wrap(reopen)(executor=self._thread)
            self.catalogue, self.totals = opened.catalogue, opened.totals
            self.reserved = self.freeing = 0
            self._uses = {}
            self.budget.saved(opened.written)
            self._abandoned, self._waiting, self._punched = [], [], []
            self.next_due = self.catalogue.next_due()
            self.due_changed.set()
            self.tally.rebuilds += opened.rebuilt is not None

    async def make_room(self, nbytes: int) -> None:
        """Evict until `nbytes` may be reserved, or nothing more can go. Raises like `commit`."""
        await self.reclaim()
        short = nbytes - self.room
        if short <= 0:
            return
        protected = set(self.anchors) | set(self._readers)
        await self.commit(Change(evict_bytes=short, protected=protected))
        await self.reclaim()

    async def reclaim(self) -> None:
        """Punch what is freed and no longer read. What cannot be punched now waits."""
        if self.health.is_out:
            return  # a catalogue made anew knows by itself what is to be given back
        self._reclaims += 1
        try:
            await self._reclaim()
        finally:
            self._reclaims -= 1
            self._reclaimed.set()

    async def _reclaim(self) -> None:
        for whole_files in (False, True):  # a file goes after the last range of it
            ready = [f for f in self._waiting if f.whole_file is whole_files and self._idle(f)]
            taken = set(ready)
            self._waiting = [freed for freed in self._waiting if freed not in taken]
            holes = _holes(ready)
            jobs = [partial(_reclaim, self.segments, ranges) for ranges in holes]
            punched = (self.workers.submit(job, Call.SPACE, urgent=True) for job in jobs)
            errors = await asyncio.gather(*punched)
            for ranges, error in zip(holes, errors, strict=True):
                if error is None:
                    self.freeing -= sum(freed.length for freed in ranges)
                    self._punched += ranges
                else:
                    self.health.count(error)  # its bytes stay counted, so nothing need stop
                    self._waiting += ranges

    async def close(self, *, save: bool) -> None:
        """Save what is known of last uses; then end the catalogue's thread."""
        try:
            if save and (self._uses or self._punched or self._abandoned or self.budget.unsaved):
                await self.commit(Change())
        except (OSError, StoreCorrupt) as error:
            self.health.write_failed(error, Fault.CATALOGUE)
        finally:
            self._thread.shutdown()

    def _commit_watched(self, change: Change) -> Outcome:
        with self._watch.during(Call.COMMIT):
            return self.catalogue.commit(change)

    def _note(self, outcome: Outcome) -> None:
        self.tally.evicted_blocks += outcome.num_evicted
        self.tally.quarantined += outcome.num_quarantined
        self.tally.expired_blocks += outcome.num_expired
        self.tally.pins_lost += outcome.num_pins_lost
        if outcome.next_due != self.next_due:
            self.next_due = outcome.next_due
            self.due_changed.set()

    def _idle(self, freed: Freed) -> bool:
        if not freed.whole_file:
            return not self._readers[freed.extent]
        return not any(
            other.segment == freed.segment and not other.whole_file for other in self._waiting
        )

    async def _durable_holes(self) -> tuple[Freed, ...]:
        """What has been punched, once it is known to survive a power cut."""
        punched = tuple(self._punched)
        segments = sorted({freed.segment for freed in punched if not freed.whole_file})
        jobs = (partial(_sync_punched, self.segments, segment) for segment in segments)
        synced = (self.workers.submit(job, Call.SYNC, urgent=True) for job in jobs)
        failed = [error for error in await asyncio.gather(*synced) if error is not None]
        for error in failed:
            self.health.count(error)
        return () if failed else punched


def _holes(freed: Sequence[Freed]) -> list[list[Freed]]:
    """What follows each other in a segment, together: one call gives it all back."""
    holes: list[list[Freed]] = []
    for each in sorted(freed, key=lambda freed: (freed.segment, freed.offset)):
        last = holes[-1][-1] if holes else None
        follows = last is not None and last.segment == each.segment
        if last is not None and follows and last.offset + last.length == each.offset:
            holes[-1].append(each)
        else:
            holes.append([each])
    return holes


def _reclaim(segments: Segments, ranges: Sequence[Freed], _: Scratch) -> Exception | None:
    first, nbytes = ranges[0], sum(freed.length for freed in ranges)
    try:
        segments.reclaim(replace(first, length=nbytes))
    except Exception as error:  # noqa: BLE001 - it is tried again, and counted
        return error
    return None


def _sync_punched(segments: Segments, id: int, _: Scratch) -> Exception | None:
    try:
        segments.sync(id)
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - it is tried again, and counted
        return error
    return None
