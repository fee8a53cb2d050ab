"""`NvmeTier`: the store on NVMe behind the `Store` protocol. Knows no model and no other tier.

It owns one thread with an asyncio loop (requests, accounting), `io_threads` workers (segment I/O,
checksums) and one catalogue thread (LMDB writes). Reads that someone waits for go before writes.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TypeVar

from kvtier.index.words import BlockKey, TierId, Tokens
from kvtier.tiers.contracts import Answer, Fetch, Flight, Put, Signal
from kvtier.tiers.errors import CapacityTooSmall, StoreCorrupt, StoreUnsupported
from kvtier.tiers.nvme.budget import WriteBudget
from kvtier.tiers.nvme.catalogue import Catalogue
from kvtier.tiers.nvme.codecs import CodecPolicy
from kvtier.tiers.nvme.core import Core, Tally
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.lock import StoreLock
from kvtier.tiers.nvme.pace import CodecStatistics, Meter
from kvtier.tiers.nvme.reader import Reader
from kvtier.tiers.nvme.record import PAGE
from kvtier.tiers.nvme.recovery import prepare_directory, recover
from kvtier.tiers.nvme.rows import Counters, DayWritten
from kvtier.tiers.nvme.segments import SEGMENT_BYTES, Segments
from kvtier.tiers.nvme.workers import Workers
from kvtier.tiers.nvme.writer import EXTENT_BYTES, GROUP_BYTES, Writer

_log = logging.getLogger(__name__)

Request = TypeVar("Request", Fetch, Put)


@dataclass(frozen=True)
class NvmeStatistics:
    """What the store holds, and what happened since it was opened.

    `hits` and `misses` count blocks asked of `fetch`; `quarantined` blocks were forgotten because
    they or an ancestor failed verification; `refused_blocks` of puts were not published, of them
    `budget_refused_blocks` of background puts because the day's budget is spent.
    `written_today_bytes` (UTC) count every put, also from before the last opening. `state`: "ok";
    "full" or "failing" since a write failed, until one succeeds.
    """

    blocks: int
    extents: int
    used_bytes: int
    capacity_bytes: int
    read_bytes: int
    written_bytes: int
    hits: int
    misses: int
    quarantined: int
    evicted_blocks: int
    refused_blocks: int
    budget_refused_blocks: int
    written_today_bytes: int
    write_budget_bytes: int
    io_errors: int
    direct: bool
    state: str
    codec: CodecStatistics


@dataclass(frozen=True)
class Geometry:
    """Sizes the writer cuts by, in bytes: a record, a commit's worth of records, a file."""

    extent_bytes: int = EXTENT_BYTES
    group_bytes: int = GROUP_BYTES
    segment_bytes: int = SEGMENT_BYTES


@dataclass(frozen=True)
class Settings:
    """How a tier was opened."""

    capacity_bytes: int
    write_budget_bytes: int
    read_only: bool
    io_threads: int
    clock: Callable[[], float]
    geometry: Geometry
    policy: CodecPolicy


class NvmeTier:
    """A `Store` in a directory. Made by `open`; every method may be called from any thread."""

    def __init__(
        self,
        lock: StoreLock,
        catalogue: Catalogue,
        segments: Segments,
        next_id: Callable[[], int],
        totals: Counters,
        written: DayWritten | None,
        signal: Signal,
        settings: Settings,
    ) -> None:
        self._lock = lock
        self._catalogue = catalogue
        self._segments = segments
        self._next_id = next_id
        self._totals = totals
        self._signal = signal
        self._settings = settings
        self._budget = WriteBudget(settings.write_budget_bytes, written, settings.clock)
        self._tally = Tally()
        self._face = threading.Lock()
        self._closed = False
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="kvtier-nvme", daemon=True
        )
        self._thread.start()
        started.wait()

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        capacity_bytes: int,
        signal: Signal,
        write_budget_bytes: int | None = None,
        read_only: bool = False,
        io_threads: int = 8,
        clock: Callable[[], float] = time.time,
        files: Files | None = None,
        geometry: Geometry | None = None,
        codec: str = "raw",
        element_bytes: int = 1,
    ) -> "NvmeTier":
        """Open the store at `path`, creating it unless `read_only`.

        `capacity_bytes` bounds everything under `segments/`, padding included; the catalogue comes
        on top (about 400 bytes a block). A store that holds more is evicted down to it first. A
        read-only tier refuses every put, and does not save last uses. `codec` ("raw", "zstd",
        "auto") is how blocks are stored unless a put says otherwise; `element_bytes` (1, 2, 4) is
        the size of the numbers in a block, by which zstd cuts it into planes. What is there is read
        whatever its codec.

        `write_budget_bytes` (None: as many as `capacity_bytes`): once that many record bytes were
        written on a UTC day, background puts are refused until the next. All puts count.

        Raises `StoreInUse`, `StoreVersion`, `StoreUnsupported` (a full disk too),
        `CapacityTooSmall`, `StoreCorrupt`, `CodecUnknown`.
        """
        policy = CodecPolicy(codec, element_bytes)
        if capacity_bytes < 2 * PAGE:
            raise CapacityTooSmall(
                f"{path}: a capacity of {capacity_bytes} bytes holds no block; "
                f"give at least {2 * PAGE}"
            )
        if read_only and not (path / "catalog").is_dir():
            raise StoreUnsupported(f"{path}: there is no store here; check the path")
        if not read_only:
            prepare_directory(path)
        budget_bytes = capacity_bytes if write_budget_bytes is None else write_budget_bytes
        settings = Settings(
            capacity_bytes,
            budget_bytes,
            read_only,
            io_threads,
            clock,
            geometry or Geometry(),
            policy,
        )
        lock = StoreLock(path, read_only=read_only)
        try:
            parts = _open_parts(path, files or Files(), settings)
        except OSError as error:
            lock.release()
            raise StoreUnsupported(
                f"{path}: cannot be opened ({error}); mend the disk or choose another directory"
            ) from error
        except BaseException:
            lock.release()
            raise
        return cls(lock, *parts, signal, settings)

    @property
    def tier(self) -> TierId:
        return TierId.NVME

    @property
    def signal(self) -> Signal:
        """Notified whenever a flight or an answer of this tier moves on."""
        return self._signal

    def lookup(self, namespace: bytes, keys: Sequence[BlockKey], tokens: Tokens) -> Answer:
        """How many leading `keys` are published. Does not count as a use."""
        answer = Answer(self._signal)
        wanted = tuple(keys)
        if not self._enqueue(lambda: answer.give(self._count(namespace, wanted))):
            answer.give(0)
        return answer

    def fetch(self, request: Fetch) -> Flight:
        """Read blocks into the pool's slots, verified, landing in order.

        A block fails if it is not published, if its bytes or its record's header are not what was
        written for exactly these keys and tokens (then it and its descendants are forgotten), or
        if the drive fails; every block behind it fails too. The checksums are of the bytes landed.
        """
        flight = Flight(len(request.keys), self._signal)
        if not self._enqueue(lambda: self._begin(self._reader.start, request, flight)):
            flight.fail_rest()
        return flight

    def put(self, request: Put) -> Flight:
        """Write and publish what is not held; a block lands once a restart would find it.

        A block fails if its parent is not published or on its way, if its bytes do not match the
        request's checksum, if no room can be made within the capacity, or if the drive fails; in
        the background also with `BudgetSpent`.
        """
        flight = Flight(len(request.keys), self._signal)
        refused = self._settings.read_only
        if refused or not self._enqueue(lambda: self._begin(self._writer.plan, request, flight)):
            flight.fail_rest()
        return flight

    def describe_elements(self, element_bytes: int) -> None:
        """From now on blocks are numbers of that many bytes. Raises `CodecUnknown`.

        For an owner that learns it after opening: a sidecar from its first client.
        """
        self._writer.policy = replace(self._writer.policy, element_bytes=element_bytes)

    def persist(self, namespace: bytes, keys: Sequence[BlockKey], tokens: Tokens) -> Answer:
        """As `lookup`: what is published is durable."""
        return self.lookup(namespace, keys, tokens)

    def holds(self, namespace: bytes, keys: Sequence[BlockKey]) -> int:
        """How many leading `keys` are published, at once, for tools. 0 after `close`."""
        with self._face:
            return 0 if self._closed else self._count(namespace, keys)

    def namespaces(self) -> list[tuple[str, int, int]]:
        """`(namespace in hex, blocks, bytes)` of every namespace that holds something."""
        with self._face:
            rows = [] if self._closed else self._catalogue.namespace_rows()
        return [(row.digest.hex(), row.blocks, row.nbytes) for _, row in rows if row.blocks]

    def statistics(self) -> NvmeStatistics:
        """A snapshot; after `close`, the last one."""
        tally, totals = self._tally, self._core.totals
        return NvmeStatistics(
            blocks=totals.blocks,
            extents=totals.extents,
            used_bytes=totals.used_bytes,
            capacity_bytes=self._settings.capacity_bytes,
            read_bytes=tally.read_bytes,
            written_bytes=tally.written_bytes,
            hits=tally.hits,
            misses=tally.misses,
            quarantined=tally.quarantined,
            evicted_blocks=tally.evicted_blocks,
            refused_blocks=tally.refused_blocks,
            budget_refused_blocks=tally.budget_refused_blocks,
            written_today_bytes=self._budget.written_bytes,
            write_budget_bytes=self._budget.limit_bytes,
            io_errors=tally.io_errors,
            direct=self._segments.files.direct,
            state=tally.state,
            codec=self._meter.statistics(),
        )

    def close(self) -> None:
        """Finish what was accepted, save last uses, release the directory. Idempotent."""
        with self._face:
            first, self._closed = not self._closed, True
            if first:
                self._loop.call_soon_threadsafe(self._writer.close)
        self._thread.join()
        if first:
            self._segments.close()
            self._catalogue.close()
            self._lock.release()

    def __repr__(self) -> str:
        stats = self.statistics()
        return (
            f"NvmeTier({stats.blocks} blocks, {stats.used_bytes} of {stats.capacity_bytes} bytes, "
            f"{stats.state})"
        )

    def _enqueue(self, action: Callable[[], None]) -> bool:
        with self._face:
            if self._closed:
                return False
            self._loop.call_soon_threadsafe(action)
            return True

    def _count(self, namespace: bytes, keys: Sequence[BlockKey]) -> int:
        try:
            return self._catalogue.count(namespace, keys, int(self._settings.clock() * 1e6))
        except (OSError, StoreCorrupt) as error:
            _log.warning("NVMe lookup: %s", error)
            return 0

    def _begin(
        self, start: Callable[[Request, Flight], None], request: Request, flight: Flight
    ) -> None:
        try:
            start(request, flight)
        except Exception as error:  # noqa: BLE001 - the caller gets it with the flight
            _log.error("NVMe tier: a request broke", exc_info=error)
            flight.fail_rest(error)

    async def _serve(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        settings = self._settings
        workers = Workers(settings.io_threads, self._loop)
        self._core = Core(
            self._catalogue,
            self._segments,
            workers,
            capacity_bytes=settings.capacity_bytes,
            totals=self._totals,
            clock=settings.clock,
            tally=self._tally,
            budget=self._budget,
        )
        self._meter = Meter(min(settings.io_threads, len(os.sched_getaffinity(0))))
        self._reader = Reader(self._core, self._meter, settings.io_threads)
        self._writer = Writer(
            self._core,
            self._next_id,
            self._meter,
            settings.policy,
            extent_bytes=settings.geometry.extent_bytes,
            group_bytes=settings.geometry.group_bytes,
        )
        started.set()
        await self._write_until_closed(workers)
        await self._reader.drain()
        await workers.drain()
        await self._core.close(save=not settings.read_only)
        workers.close()

    async def _write_until_closed(self, workers: Workers) -> None:
        """Run the writer; should it break, fail what it held and start it again."""
        while True:
            try:
                await self._writer.run()
            except Exception as error:  # noqa: BLE001 - the callers get it with their flights
                _log.error("NVMe tier: the writer broke", exc_info=error)
                await workers.drain()
                self._writer.fail_all(error)
            else:
                return


def _open_parts(
    path: Path, files: Files, settings: Settings
) -> tuple[Catalogue, Segments, Callable[[], int], Counters, DayWritten | None]:
    """Catalogue, segments, source of ids, totals, what the day's budget has had: recovered.

    Raises as `open`, or `OSError`.
    """
    if not settings.read_only:
        files.probe(path / "segments")
    fresh = not settings.read_only and not any((path / "segments").glob("*.seg"))
    catalogue = Catalogue.open(path / "catalog", read_only=settings.read_only, create=fresh)
    try:
        epoch = 0 if settings.read_only else catalogue.begin_epoch()
        next_id = count(epoch << 32 | 1).__next__
        segments = Segments(
            path / "segments",
            files,
            next_id,
            read_only=settings.read_only,
            segment_bytes=settings.geometry.segment_bytes,
        )
        if settings.read_only:
            totals = catalogue.counters()
        else:
            totals = recover(catalogue, segments, settings.capacity_bytes)
        written = catalogue.written()
    except BaseException:
        catalogue.close()
        raise
    return catalogue, segments, next_id, totals, written
