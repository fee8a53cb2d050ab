"""Fetches: from catalogue rows to verified bytes in a pool's slots.

Every block is checked before it lands: the record's header against what the catalogue and the
request say (identity, generation, token ids), the payload against the header's checksum. Blocks
land in order. A failure is reported only when no read is in flight into that flight's slots.
"""

import asyncio
import logging
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from threading import Lock
from time import perf_counter

import numpy as np

from kvtier.tiers.contracts import LANDED, Bytes, Fetch, Pool
from kvtier.tiers.errors import RecordRefused, StoreCorrupt, StoreVersion
from kvtier.tiers.nvme.blocks import block_views, page_runs, page_views
from kvtier.tiers.nvme.catalogue import SWEEP_STEPS, Change
from kvtier.tiers.nvme.checksum import checksum
from kvtier.tiers.nvme.core import Core
from kvtier.tiers.nvme.files import ShortRead, read_whole
from kvtier.tiers.nvme.health import Fault
from kvtier.tiers.nvme.landing import Landing
from kvtier.tiers.nvme.pace import Meter
from kvtier.tiers.nvme.record import PAGE, RAW, RecordHeader, decode_header, padded
from kvtier.tiers.nvme.rows import Extent
from kvtier.tiers.nvme.segments import Segments
from kvtier.tiers.nvme.tables import Span
from kvtier.tiers.nvme.watch import Call
from kvtier.tiers.nvme.workers import Batch, Scratch

_log = logging.getLogger(__name__)

RUN_BYTES = 8 << 20
"""About what one read brings: long enough for the drive, short enough to land early."""

_MIN_RUN_BYTES = 512 << 10
_RUN_BLOCKS = 256
"""Well below the kernel's limit on buffers in one call."""

_HEADERS_KEPT = 4096
_STRIKES = 2
_WITNESSES = 4
_UNSAVED_USES = 16384


@dataclass(frozen=True)
class Run:
    """Neighbouring blocks of one extent: request positions from `first`, places from `position`."""

    extent: Extent
    first: int
    position: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Damage:
    """Why a run did not arrive. `position` (in the extent): from there on it is worthless; None:
    the drive failed, or the request is at odds with the record, and the record may be good."""

    extent: int
    position: int | None
    error: Exception

    @property
    def is_of_the_drive(self) -> bool:
        """Whether it was the drive that failed."""
        return self.position is None and isinstance(self.error, OSError)


class HeaderCache:
    """Verified headers of recently read extents. Thread-safe, bounded."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._headers: OrderedDict[int, RecordHeader] = OrderedDict()

    def get(self, id: int) -> RecordHeader | None:
        with self._lock:
            return self._headers.get(id)

    def keep(self, header: RecordHeader) -> None:
        with self._lock:
            self._headers[header.generation] = header
            if len(self._headers) > _HEADERS_KEPT:
                self._headers.popitem(last=False)

    def drop(self, id: int) -> None:
        with self._lock:
            self._headers.pop(id, None)


@dataclass(frozen=True)
class Errand:
    """What every run of one fetch needs. `tokens`: the request's, as records store them."""

    request: Fetch
    tokens: bytes
    landing: Landing
    segments: Segments
    headers: HeaderCache

    def told(self, block: int) -> bytes:
        """The token ids the request gives a block."""
        stride = len(self.tokens) // len(self.request.keys)
        return self.tokens[block * stride : (block + 1) * stride]


def read_run(run: Run, errand: Errand, scratch: Scratch) -> Damage | None:
    """Read, verify and land one run. Runs on a worker."""
    landing = errand.landing
    if not landing.begin(run.first, len(run.slots)):
        return None
    try:
        damage = _try_to_read(run, errand, scratch)
        if damage is not None:
            skipped = 0 if damage.position is None else max(0, damage.position - run.position)
            landing.cut(run.first + skipped)
    finally:
        landing.end(run.first)
    return damage


def _try_to_read(run: Run, errand: Errand, scratch: Scratch) -> Damage | None:
    try:
        return _read_verified(run, errand, scratch)
    except (RecordRefused, StoreVersion, FileNotFoundError) as error:
        errand.headers.drop(run.extent.id)
        return Damage(run.extent.id, 0, error)
    except OSError as error:
        return Damage(run.extent.id, None, error)


def _read_verified(run: Run, errand: Errand, scratch: Scratch) -> Damage | None:
    extent, pool, landing = run.extent, errand.request.pool, errand.landing
    start = extent.starts[run.position]
    buffers, pieces = _destinations(run, pool, scratch)
    views = block_views(pool, run.slots)  # now: a read that hangs may outlive the pool
    header = errand.headers.get(extent.id)
    raw = None if header else scratch.take("header", extent.header_pages * PAGE)
    files = errand.segments.files
    begin = perf_counter()
    with errand.segments.opened(extent.segment) as fd:
        if raw is not None and not run.position:  # the header stands right before the payload
            read_whole(files, fd, [raw, *buffers], extent.offset)
        else:
            if raw is not None:
                read_whole(files, fd, [raw], extent.offset)
            read_whole(files, fd, buffers, start)
    landing.pace.read(begin, perf_counter(), _nbytes(run))
    if header is None:
        assert raw is not None
        header = decode_header(raw.tobytes())
        check_identity(header, extent, errand.request.namespace)
        errand.headers.keep(header)
    size = pool.block_bytes
    checksums: list[int] = []
    damage: Damage | None = None
    for i, (slot, piece) in enumerate(zip(views, pieces, strict=True)):
        place = run.position + i
        if header.block_bytes != size or header.tokens_of(place) != errand.told(run.first + i):
            damage = Damage(extent.id, None, ValueError("fetch: the record holds other tokens"))
            break
        row = header.blocks[place]
        try:
            if row.codec != RAW:
                if piece is None:
                    raise RecordRefused("it is encoded, and has as many pages as a raw block")
                begin = perf_counter()
                scratch.coder.decode(row.codec, piece[: row.stored_bytes], slot)
                landing.pace.decoded(begin, perf_counter(), size)
            elif piece is not None:
                np.copyto(slot, piece[:size])
            digest = checksum(slot)
            if digest != row.checksum:
                raise RecordRefused("it fails its checksum")
        except RecordRefused as refusal:
            error = RecordRefused(f"record {extent.id:x}, block {place}: {refusal}")
            damage = Damage(extent.id, place, error)
            break
        checksums.append(digest)
    if damage is not None:
        landing.cut(run.first + len(checksums))
    landing.arrived(run.first, checksums)
    return damage


def _destinations(
    run: Run, pool: Pool, scratch: Scratch
) -> tuple[Sequence[Bytes], Sequence[Bytes | None]]:
    """Where to read the run to; and each block's part of that, None where it is its slot.

    Only a raw block takes as many pages as its slot. What is encoded, and what a slot does not hold
    in whole aligned pages, goes to memory of the thread's own first.
    """
    count, whole = len(run.slots), padded(pool.block_bytes)
    sizes = [PAGE * n for n in run.extent.pages[run.position : run.position + count]]
    if sizes == [whole] * count:
        runs = page_runs(pool, run.slots)
        if runs is not None:
            return runs, [None] * count
    slots: Sequence[Bytes | None] = page_views(pool, run.slots) or [None] * count
    ends = [*accumulate(sizes)]
    room = scratch.take("payload", ends[-1])
    buffers: list[Bytes] = []
    pieces: list[Bytes | None] = []
    for nbytes, slot, end in zip(sizes, slots, ends, strict=True):
        piece = room[end - nbytes : end]
        direct = slot is not None and nbytes == whole
        buffers.append(slot if slot is not None and direct else piece)
        pieces.append(None if direct else piece)
    return buffers, pieces


def check_identity(header: RecordHeader, extent: Extent, namespace: bytes) -> None:
    """Raises `RecordRefused` unless the header is of the very record the catalogue names."""
    if header.generation != extent.id:
        raise RecordRefused(f"record {extent.id:x}: another generation stands at its place")
    if (header.segment, header.page * PAGE) != (extent.segment, extent.offset):
        raise RecordRefused(f"record {extent.id:x}: it was written for another place")
    keys = tuple(block.key for block in header.blocks)
    if header.namespace != namespace or header.parent != extent.parent or keys != extent.keys:
        raise RecordRefused(f"record {extent.id:x}: its header names other blocks")
    starts = tuple(extent.offset + offset for offset in header.offsets)
    if starts != extent.starts[:-1] or extent.offset + header.record_bytes != extent.starts[-1]:
        raise RecordRefused(f"record {extent.id:x}: its header has other lengths")


class Reader:
    """Serves fetches on the tier's loop."""

    def __init__(self, core: Core, meter: Meter, threads: int) -> None:
        self._core = core
        self._meter = meter
        self._witnesses: deque[Extent] = deque(maxlen=_WITNESSES)
        self._threads = threads
        self._headers = HeaderCache()
        self._strikes: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, request: Fetch, landing: Landing) -> None:
        """Begin a fetch. Nothing raised here reaches the caller: it fails the flight.

        The first run is being read while the extents of the others are still looked up.
        """
        core, flight = self._core, landing.flight
        if flight.done:
            return
        tokens = request.tokens.astype("<i4", copy=False).tobytes()
        errand = Errand(request, tokens, landing, core.segments, self._headers)
        num_blocks = len(request.keys)
        nbytes = num_blocks * padded(request.pool.block_bytes)
        target = min(RUN_BYTES, max(_MIN_RUN_BYTES, nbytes // self._threads))
        slots = request.slots.tolist()
        runs: list[Run] = []
        reads: Batch[Damage | None] = Batch(
            core.workers, Call.READ, urgent=True, hurried=lambda: not flight.background
        )
        found, error = 0, None
        try:
            for span in core.catalogue.walk(request.namespace, request.keys, core.now()):
                for run in cut_runs(span, found, slots, target):
                    core.hold([run.extent.id])
                    runs.append(run)
                    reads.add(partial(read_run, run, errand))
                found += span.count
        except (OSError, StoreCorrupt) as failure:
            core.health.count(failure, Fault.CATALOGUE)
            error = failure
        finally:  # whatever broke: runs may have begun, and only their end ends the flight
            landing.cut(found)
            if runs:
                self._keep(asyncio.create_task(self._finish(landing, runs, reads)))
        if error is None:
            core.tally.misses += num_blocks - found
        flight.fail(range(found, num_blocks), error)
        core.used({run.extent.id for run in runs})

    def probe(self) -> None:
        """Try what the drive could not read lately; the verdict goes to the core's health."""
        self._keep(asyncio.create_task(self._probe()))

    async def drain(self) -> None:
        """Wait until every fetch has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _finish(
        self,
        landing: Landing,
        runs: Sequence[Run],
        reads: Batch[Damage | None],
    ) -> None:
        core, flight, error = self._core, landing.flight, None
        outcomes = await reads.results()
        core.let_go([run.extent.id for run in runs])
        self._meter.learn(landing.pace)
        try:
            core.tally.hits += int(np.count_nonzero(flight.status == LANDED))
            damages = []
            for run, outcome in zip(runs, outcomes, strict=True):
                if not landing.has_begun(run.first):
                    continue
                core.tally.read_bytes += _nbytes(run)
                if isinstance(outcome, BaseException):
                    _log.error("NVMe read broke", exc_info=outcome)
                    continue
                self._judge(run.extent, outcome)
                if outcome is not None:
                    damages.append(outcome)
            if damages:
                error = damages[0].error
                await self._quarantine(damages)
            elif core.num_unsaved_uses > _UNSAVED_USES:
                await core.commit(Change())
            await core.reclaim()
        except (OSError, StoreCorrupt) as failure:
            core.health.write_failed(failure, Fault.CATALOGUE)
        finally:
            flight.fail_rest(error)

    def _judge(self, extent: Extent, damage: Damage | None) -> None:
        """What a read tells about the drive."""
        health = self._core.health
        if damage is not None and damage.is_of_the_drive:
            self._witnesses.append(extent)
            health.read_failed(extent.id, damage.error)
            return
        health.read_worked()
        if damage is not None and isinstance(damage.error, ShortRead):
            health.count(damage.error)

    async def _probe(self) -> None:
        core = self._core
        jobs = (partial(_touch, core.segments, extent) for extent in self._witnesses)
        tried = [core.workers.submit(job, Call.READ, urgent=True) for job in jobs]
        errors = await asyncio.gather(*tried)
        core.health.reads_probed(None if None in errors or not errors else errors[0])

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _quarantine(self, damages: Sequence[Damage]) -> None:
        """Forget what is damaged and all that hangs off it; and what the drive failed twice."""
        core, rotten = self._core, []
        for damage in damages:
            _log.warning("NVMe read: %s", damage.error)
            if damage.is_of_the_drive:
                self._strikes[damage.extent] += 1
                if self._strikes[damage.extent] >= _STRIKES:
                    rotten.append((damage.extent, 0))
            elif damage.position is not None:
                rotten.append((damage.extent, damage.position))
        if rotten and not core.read_only:
            await core.commit(Change(quarantine=rotten, sweep=SWEEP_STEPS))
            for extent, _ in rotten:
                self._headers.drop(extent)
                del self._strikes[extent]


def cut_runs(span: Span, first: int, slots: Sequence[int], target: int) -> list[Run]:
    """Cut a span, whose first block is the request's block `first`, into runs of about `target`
    bytes, none too long for one call."""
    starts, end = span.extent.starts, span.position + span.count
    runs: list[Run] = []
    position = span.position
    while position < end:
        stop = min(position + _RUN_BLOCKS, end)
        stop = max(
            bisect_right(starts, starts[position] + target, position, stop + 1) - 1, position + 1
        )
        taken = tuple(slots[first : first + stop - position])
        runs.append(Run(span.extent, first, position, taken))
        first, position = first + stop - position, stop
    return runs


def _touch(segments: Segments, extent: Extent, scratch: Scratch) -> OSError | None:
    """Whether the drive reads an extent's first page again; one that has gone says nothing bad."""
    try:
        with segments.opened(extent.segment) as fd:
            segments.files.preadv(fd, [scratch.take("header", PAGE)], extent.offset)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None


def _nbytes(run: Run) -> int:
    return run.extent.starts[run.position + len(run.slots)] - run.extent.starts[run.position]
