"""Fetches: from catalogue rows to verified bytes in a pool's slots.

Every block is checked before it lands: the record's header against what the catalogue and the
request say (identity, generation, token ids), the payload against the header's checksum. Blocks
land in order. A failure is reported only when no read is in flight into that flight's slots.
"""

import asyncio
import logging
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from threading import Lock
from time import perf_counter

import numpy as np
from xxhash import xxh3_64_intdigest

from kvtier.index.words import TierId
from kvtier.tiers.contracts import LANDED, Bytes, Fetch, Flight, Pool
from kvtier.tiers.errors import RecordRefused, StoreCorrupt, StoreVersion
from kvtier.tiers.nvme.blocks import block_views, page_views
from kvtier.tiers.nvme.catalogue import Change
from kvtier.tiers.nvme.core import Core
from kvtier.tiers.nvme.pace import Meter, Pace
from kvtier.tiers.nvme.record import PAGE, RAW, RecordHeader, decode_header, padded
from kvtier.tiers.nvme.rows import Extent
from kvtier.tiers.nvme.segments import Segments
from kvtier.tiers.nvme.tables import Span
from kvtier.tiers.nvme.workers import Scratch

_log = logging.getLogger(__name__)

RUN_BYTES = 4 << 20
"""About what one read brings: long enough for the drive, short enough to land early."""

_MIN_RUN_BYTES = 512 << 10
_RUN_BLOCKS = 256
"""Well below the kernel's limit on buffers in one call."""

_HEADERS_KEPT = 4096
_STRIKES = 2
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


class Landing:
    """Lands a flight's blocks in order while runs finish in any order. Thread-safe.

    `pace`: what was read and decoded for it so far.
    """

    def __init__(self, flight: Flight, count: int) -> None:
        self._flight = flight
        self._lock = Lock()
        self._verified = np.zeros(count, np.bool_)
        self._checksums = np.zeros(count, np.uint64)
        self._frontier = 0
        self.limit = count
        self.pace = Pace()

    def arrived(self, first: int, checksums: Sequence[int]) -> None:
        """Blocks from `first` on are in their slots and verified."""
        with self._lock:
            last = first + len(checksums)
            self._checksums[first:last] = checksums
            self._verified[first:last] = True
            start = self._frontier
            gaps = np.flatnonzero(~self._verified[start : self.limit])
            self._frontier = start + int(gaps[0]) if len(gaps) else max(start, self.limit)
            fresh = np.arange(start, self._frontier)
            if len(fresh):
                self._flight.land(fresh, self._checksums[fresh], TierId.NVME)

    def cut(self, block: int) -> None:
        """Nothing from `block` on will land."""
        with self._lock:
            self.limit = min(self.limit, block)


def read_run(
    run: Run,
    request: Fetch,
    landing: Landing,
    segments: Segments,
    headers: HeaderCache,
    scratch: Scratch,
) -> Damage | None:
    """Read, verify and land one run. Runs on a worker."""
    if landing.limit <= run.first:
        return None
    try:
        damage = _read_verified(run, request, landing, segments, headers, scratch)
    except (RecordRefused, StoreVersion, FileNotFoundError) as error:
        headers.drop(run.extent.id)
        damage = Damage(run.extent.id, 0, error)
    except OSError as error:
        damage = Damage(run.extent.id, None, error)
    if damage is not None:
        skipped = 0 if damage.position is None else max(0, damage.position - run.position)
        landing.cut(run.first + skipped)
    return damage


def _read_verified(
    run: Run,
    request: Fetch,
    landing: Landing,
    segments: Segments,
    headers: HeaderCache,
    scratch: Scratch,
) -> Damage | None:
    extent = run.extent
    start = extent.starts[run.position]
    pieces, direct = _destinations(run, request.pool, scratch)
    header = headers.get(extent.id)
    raw = None if header else scratch.take("header", extent.header_pages * PAGE)
    begin = perf_counter()
    with segments.opened(extent.segment) as fd:
        if raw is not None and not run.position:  # the header stands right before the payload
            _read_fully(segments, fd, [raw, *pieces], extent.offset)
        else:
            if raw is not None:
                _read_fully(segments, fd, [raw], extent.offset)
            _read_fully(segments, fd, pieces, start)
    landing.pace.read(begin, perf_counter(), extent.starts[run.position + len(pieces)] - start)
    if header is None:
        assert raw is not None
        header = decode_header(raw.tobytes())
        check_identity(header, extent, request.namespace)
        headers.keep(header)
    size = request.pool.block_bytes
    tokens = request.tokens.astype("<i4", copy=False).tobytes()
    stride = len(tokens) // len(request.keys)
    views = block_views(request.pool, run.slots)
    checksums: list[int] = []
    damage: Damage | None = None
    for i, piece in enumerate(pieces):
        place, block = run.position + i, run.first + i
        told = tokens[block * stride : (block + 1) * stride]
        if header.block_bytes != size or header.tokens_of(place) != told:
            damage = Damage(extent.id, None, ValueError("fetch: the record holds other tokens"))
            break
        row, slot = header.blocks[place], views[i]
        try:
            if row.codec != RAW:
                begin = perf_counter()
                scratch.coder.decode(row.codec, piece[: row.stored_bytes], slot)
                landing.pace.decoded(begin, perf_counter(), size)
            elif not direct[i]:
                np.copyto(slot, piece[:size])
            digest = xxh3_64_intdigest(slot.data)
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


def _destinations(run: Run, pool: Pool, scratch: Scratch) -> tuple[list[Bytes], list[bool]]:
    """Where each block's pages are read to, and whether that is its slot.

    Only a raw block takes as many pages as its slot. What is encoded, and what a slot does not hold
    in whole aligned pages, goes to memory of the thread's own first.
    """
    slots = page_views(pool, run.slots)
    sizes = [PAGE * n for n in run.extent.pages[run.position : run.position + len(run.slots)]]
    direct = [slots is not None and nbytes == padded(pool.block_bytes) for nbytes in sizes]
    ends = [*accumulate(0 if slot else n for n, slot in zip(sizes, direct, strict=True))]
    room = scratch.take("payload", max(ends[-1], PAGE))
    pieces = [
        slots[i] if slots is not None and direct[i] else room[end - sizes[i] : end]
        for i, end in enumerate(ends)
    ]
    return pieces, direct


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
        self._threads = threads
        self._headers = HeaderCache()
        self._strikes: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, request: Fetch, flight: Flight) -> None:
        """Begin a fetch. Nothing raised here reaches the caller: it fails the flight."""
        if not request.keys:
            return
        try:
            now = self._core.now()
            spans = self._core.catalogue.find(request.namespace, request.keys, now)
        except (OSError, StoreCorrupt) as error:
            self._core.tally.failed(error)
            flight.fail_rest(error)
            return
        found = sum(span.count for span in spans)
        self._core.tally.misses += len(request.keys) - found
        flight.fail(range(found, len(request.keys)))
        if not found:
            return
        runs = cut_runs(spans, request, self._threads)
        extents = [run.extent.id for run in runs]
        self._core.used(set(extents))
        self._core.hold(extents)
        landing = Landing(flight, found)
        segments, headers = self._core.segments, self._headers
        jobs = (partial(read_run, r, request, landing, segments, headers) for r in runs)
        futures = [self._core.workers.submit(job, urgent=True) for job in jobs]
        task = asyncio.create_task(self._finish(flight, landing.pace, runs, futures))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Wait until every fetch has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _finish(
        self,
        flight: Flight,
        pace: Pace,
        runs: Sequence[Run],
        futures: "Sequence[asyncio.Future[Damage | None]]",
    ) -> None:
        core, error = self._core, None
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        core.let_go([run.extent.id for run in runs])
        self._meter.learn(pace)
        try:
            core.tally.hits += int(np.count_nonzero(flight.status == LANDED))
            core.tally.read_bytes += sum(_nbytes(run) for run in runs)
            damages = []
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    _log.error("NVMe read broke", exc_info=outcome)
                elif outcome is not None:
                    damages.append(outcome)
            if damages:
                error = damages[0].error
                await self._quarantine(damages)
            elif core.num_unsaved_uses > _UNSAVED_USES:
                await core.commit(Change())
            await core.reclaim()
        except (OSError, StoreCorrupt) as failure:
            core.tally.failed(failure)
        finally:
            flight.fail_rest(error)

    async def _quarantine(self, damages: Sequence[Damage]) -> None:
        """Forget what is damaged and all that hangs off it; and what the drive failed twice."""
        core, rotten = self._core, []
        for damage in damages:
            _log.warning("NVMe read: %s", damage.error)
            if isinstance(damage.error, OSError) and damage.position is None:
                core.tally.failed(damage.error)
                self._strikes[damage.extent] += 1
                if self._strikes[damage.extent] >= _STRIKES:
                    rotten.append((damage.extent, 0))
            elif damage.position is not None:
                rotten.append((damage.extent, damage.position))
        if rotten:
            outcome = await core.commit(Change(quarantine=rotten))
            core.tally.quarantined += outcome.num_removed
            for extent, _ in rotten:
                self._headers.drop(extent)
                del self._strikes[extent]


def cut_runs(spans: Sequence[Span], request: Fetch, threads: int) -> list[Run]:
    """Cut the spans into runs, enough to busy every thread, none too long for one call."""
    target = min(RUN_BYTES, max(_MIN_RUN_BYTES, sum(map(_span_bytes, spans)) // threads))
    slots = [int(slot) for slot in request.slots]
    runs: list[Run] = []
    first = 0
    for span in spans:
        starts, end = span.extent.starts, span.position + span.count
        position = span.position
        while position < end:
            stop = min(position + _RUN_BLOCKS, end)
            stop = max(
                bisect_right(starts, starts[position] + target, position, stop + 1) - 1,
                position + 1,
            )
            taken = tuple(slots[first : first + stop - position])
            runs.append(Run(span.extent, first, position, taken))
            first, position = first + stop - position, stop
    return runs


def _span_bytes(span: Span) -> int:
    return span.extent.starts[span.position + span.count] - span.extent.starts[span.position]


def _nbytes(run: Run) -> int:
    return run.extent.starts[run.position + len(run.slots)] - run.extent.starts[run.position]


def _read_fully(segments: Segments, fd: int, buffers: Sequence[Bytes], offset: int) -> None:
    wanted = sum(buffer.nbytes for buffer in buffers)
    if segments.files.preadv(fd, buffers, offset) != wanted:
        raise RecordRefused(f"segment: ends before {offset + wanted}; the record is cut short")
