"""`NvmeTier`: the store on NVMe behind the `Store` protocol. Knows no model and no other tier.

It owns one thread with an asyncio loop (requests, accounting), `io_threads` workers (segment I/O,
checksums), one catalogue thread (LMDB writes) and a watchdog, which answers in their place when the
drive hangs. All are daemons: none keeps the process alive. Reads that someone waits for go before
writes.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from kvtier.index.words import BlockKey, TierId, Tokens
from kvtier.tiers.contracts import Answer, Fetch, Flight, Put, Signal
from kvtier.tiers.errors import (
    CapacityTooSmall,
    StoreBusy,
    StoreCorrupt,
    StoreOut,
    StoreUnsupported,
)
from kvtier.tiers.nvme.budget import WriteBudget
from kvtier.tiers.nvme.catalogue import Catalogue
from kvtier.tiers.nvme.codecs import CodecPolicy
from kvtier.tiers.nvme.core import Core, Tally
from kvtier.tiers.nvme.custody import Custodian, Custody, Found
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.health import Fault, Health, Patience, State
from kvtier.tiers.nvme.landing import Landing
from kvtier.tiers.nvme.lock import StoreLock
from kvtier.tiers.nvme.orders import Order
from kvtier.tiers.nvme.pace import CodecStatistics, Meter
from kvtier.tiers.nvme.reader import Reader
from kvtier.tiers.nvme.rebuild import CATALOGUE
from kvtier.tiers.nvme.record import PAGE
from kvtier.tiers.nvme.recovery import (
    Ids,
    Opened,
    is_store,
    open_catalogue,
    prepare_directory,
)
from kvtier.tiers.nvme.renewal import Renewal
from kvtier.tiers.nvme.rows import Counters, DayWritten
from kvtier.tiers.nvme.segments import SEGMENT_BYTES, Segments
from kvtier.tiers.nvme.watch import Watch
from kvtier.tiers.nvme.watchdog import Watchdog
from kvtier.tiers.nvme.workers import Workers
from kvtier.tiers.nvme.writer import EXTENT_BYTES, GROUP_BYTES, Writer

_log = logging.getLogger(__name__)

Request = TypeVar("Request", Fetch, Put)
Outcome = TypeVar("Outcome", Flight, Landing)

CLOSE_S = 5.0
"""For how long `close` waits for what a drive still has to do."""

_GRACE_S = 1.0


@dataclass(frozen=True)
class NvmeStatistics:
    """What the store holds, and what happened since it was opened.

    `hits` and `misses` count blocks asked of `fetch`; `quarantined` blocks were forgotten because
    they or an ancestor failed verification, `expired_blocks` because their time had come or an
    operator said so; `pins_lost` were lifted with their blocks. `refused_blocks` of puts were not
    published, of them `budget_refused_blocks` of background puts because the day's budget is spent.
    `written_today_bytes` (UTC) count every put, also from before the last opening.

    `state`: "ok"; "full" or "failing": no puts until one has worked again; "failing" without reads,
    "hung", "rebuilding": every request is answered at once with nothing. `errors` by kind
    (`kvtier.tiers.nvme.health.Fault`); `trips`: how often the tier left the drive alone;
    `stalled_reads`: fetches whose read did not return in time.
    """

    blocks: int
    extents: int
    used_bytes: int
    capacity_bytes: int
    pinned_bytes: int
    pin_quota_bytes: int
    read_bytes: int
    written_bytes: int
    hits: int
    misses: int
    quarantined: int
    expired_blocks: int
    evicted_blocks: int
    pins_lost: int
    rebuilds: int
    refused_blocks: int
    budget_refused_blocks: int
    written_today_bytes: int
    write_budget_bytes: int
    errors: Mapping[str, int]
    trips: int
    stalled_reads: int
    direct: bool
    state: State
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
    pin_quota_bytes: int
    write_budget_bytes: int
    read_only: bool
    io_threads: int
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    patience: Patience
    geometry: Geometry
    policy: CodecPolicy


class NvmeTier(Custody):
    """A `Store` in a directory. Made by `open`; every method may be called from any thread."""

    def __init__(
        self,
        lock: StoreLock,
        catalogue: Catalogue,
        segments: Segments,
        ids: Ids,
        totals: Counters,
        written: DayWritten | None,
        signal: Signal,
        settings: Settings,
    ) -> None:
        self._lock = lock
        self._catalogue = catalogue
        self._segments = segments
        self._ids = ids
        self._totals = totals
        self._signal = signal
        self._settings = settings
        self._budget = WriteBudget(settings.write_budget_bytes, written, settings.clock)
        self._tally = Tally()
        self._health = Health(settings.monotonic, settings.patience)
        self._watch = Watch(settings.monotonic, settings.patience.stall_s)
        self._face = threading.Condition()
        self._visitors = 0
        self._closed = False
        self._watchdog = Watchdog(
            self._watch,
            self._health,
            settings.patience.stall_s,
            ping=self._call_soon,
            probe=lambda: self._call_soon(self._reader.probe),
        )
        self._watchdog.start()
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._live, args=(started,), name="kvtier-nvme", daemon=True
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
        pin_quota_bytes: int | None = None,
        write_budget_bytes: int | None = None,
        read_only: bool = False,
        io_threads: int = 16,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        patience: Patience | None = None,
        files: Files | None = None,
        geometry: Geometry | None = None,
        codec: str = "raw",
        element_bytes: int = 1,
    ) -> "NvmeTier":
        """Open the store at `path`, creating it unless `read_only`.

        `capacity_bytes` bounds everything under `segments/`, padding included; the catalogue comes
        on top (about 250 bytes a block). A store that holds more is evicted down to it first.
        `pin_quota_bytes` bounds what pins hold (default: half of the capacity). A read-only tier
        refuses every put, and does not save last uses. `clock` dates uses and expiries; `patience`
        says when a drive is given up and for how long, on the clock `monotonic`.

        `codec` ("raw", "zstd", "auto") is how blocks are stored unless a put says otherwise;
        `element_bytes` (1, 2, 4) is the size of the numbers in a block, by which zstd cuts it into
        planes. What is there is read whatever its codec.

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
        if read_only and not is_store(path):
            raise StoreUnsupported(f"{path}: there is no store here; check the path")
        files = files or Files()
        if not read_only:
            prepare_directory(path, files)
        budget_bytes = capacity_bytes if write_budget_bytes is None else write_budget_bytes
        quota_bytes = capacity_bytes // 2 if pin_quota_bytes is None else pin_quota_bytes
        settings = Settings(
            capacity_bytes,
            quota_bytes,
            budget_bytes,
            read_only,
            io_threads,
            clock,
            monotonic,
            patience or Patience(),
            geometry or Geometry(),
            policy,
        )
        lock = StoreLock(path, read_only=read_only)
        try:
            parts = _open_parts(path, files, settings)
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
        if not self._serves() or not self._enqueue(
            answer, lambda: self._tell(answer, namespace, wanted)
        ):
            answer.give(0)
        return answer

    def fetch(self, request: Fetch) -> Flight:
        """Read blocks into the pool's slots, verified, landing in order.

        A block fails if it is not published, if its bytes or its record's header are not what was
        written for exactly these keys and tokens (then it and its descendants are forgotten), or
        if the drive fails; every block behind it fails too. The checksums are of the bytes landed.

        When the drive hangs, blocks whose read has not begun fail and the flight is `stalled`: the
        others' slots stay in use until their reads return.
        """
        flight = Flight(len(request.keys), self._signal)
        landing = Landing(flight, self._settings.monotonic, request.deadline)
        if not self._serves():
            flight.fail_rest(self._health.refusal())
        elif not self._enqueue(landing, lambda: self._begin(self._reader.start, request, landing)):
            flight.fail_rest()
        return flight

    def put(self, request: Put) -> Flight:
        """Write and publish what is not held; a block lands once a restart would find it.

        A block fails if its parent is not published or on its way, if its bytes do not match the
        request's checksum, if no room can be made within the capacity, or if the drive fails; in
        the background also with `BudgetSpent`.
        """
        flight = Flight(len(request.keys), self._signal)
        if not self._serves() or not self._health.admits:
            self._health.refuse(len(flight))
            flight.fail_rest(self._health.refusal())
        elif self._settings.read_only or not self._enqueue(
            flight, lambda: self._begin(self._writer.plan, request, flight)
        ):
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
        with self._visiting() as open:
            return self._count(namespace, keys) if open else 0

    @property
    def pin_quota_bytes(self) -> int:
        """The most that all pins together may hold."""
        return self._settings.pin_quota_bytes

    def statistics(self) -> NvmeStatistics:
        """A snapshot; after `close`, the last one."""
        tally, totals, health = self._tally, self._core.totals, self._health.report()
        return NvmeStatistics(
            blocks=totals.blocks,
            extents=totals.extents,
            used_bytes=totals.used_bytes,
            capacity_bytes=self._settings.capacity_bytes,
            pinned_bytes=totals.pinned_bytes,
            pin_quota_bytes=self.pin_quota_bytes,
            read_bytes=tally.read_bytes,
            written_bytes=tally.written_bytes,
            hits=tally.hits,
            misses=tally.misses,
            quarantined=tally.quarantined,
            expired_blocks=tally.expired_blocks,
            evicted_blocks=tally.evicted_blocks,
            pins_lost=tally.pins_lost,
            rebuilds=tally.rebuilds,
            budget_refused_blocks=tally.budget_refused_blocks,
            written_today_bytes=self._budget.written_bytes,
            write_budget_bytes=self._budget.limit_bytes,
            refused_blocks=health.refused_blocks,
            errors=health.errors,
            trips=health.trips,
            stalled_reads=health.stalled_reads,
            direct=self._segments.files.direct,
            state=health.state,
            codec=self._meter.statistics(),
        )

    def close(self, deadline_s: float = CLOSE_S) -> None:
        """Finish what was accepted, save last uses, release the directory. Idempotent.

        What is not finished after `deadline_s` fails, or stalls where a read is in flight. If the
        drive hangs, the directory stays locked, for its late writes may still land: the tier lets
        go by itself once they have, or with the process.
        """
        with self._face:
            if not self._closed:
                self._closed = True
                self._call_soon(self._writer.close)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            self._watch.give_up(StoreOut("NVMe store: closed before the drive had finished"))
            self._thread.join(_GRACE_S)
        if self._thread.is_alive():
            _log.warning(
                "NVMe store %s: closed while calls have not returned; locked until they do",
                self._segments.directory.parent,
            )

    def __repr__(self) -> str:
        stats = self.statistics()
        return (
            f"NvmeTier({stats.blocks} blocks, {stats.used_bytes} of {stats.capacity_bytes} bytes, "
            f"{stats.state})"
        )

    def _enqueue(self, owed: Answer | Flight | Landing, action: Callable[[], None]) -> bool:
        with self._face:
            if self._closed:
                return False
            self._watch.owe(owed)
            self._call_soon(lambda: self._do(action))
            return True

    def _do(self, action: Callable[[], None]) -> None:
        action()
        self._watch.moved()

    def _serves(self) -> bool:
        """Whether a request may come in. One that comes when a renewal is due begins it."""
        if self._health.serves:
            return True
        if self._renewal.is_due:
            self._call_soon(self._renewal.begin)
        return False

    def _damaged(self, error: StoreCorrupt) -> None:
        self._renewal.damaged(error)
        self._call_soon(self._renewal.begin)

    def _reopen(self, error: StoreCorrupt) -> Opened:
        """Close the damaged catalogue, which nobody reads any more, and make another."""
        with self._face:
            self._face.wait_for(lambda: not self._visitors)
        self._core.catalogue.close()
        capacity_bytes = self._settings.capacity_bytes
        opened = open_catalogue(self._segments, self._ids, capacity_bytes, damaged=error)
        opened.catalogue.on_damage(self._damaged)
        return opened

    def _call_soon(self, action: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is owed anything any more
            self._loop.call_soon_threadsafe(action)

    @contextmanager
    def _visiting(self) -> Iterator[bool]:
        """Whether the catalogue is open, for a caller that reads it here; it stays so inside."""
        with self._face:
            is_open = not self._closed and self._health.serves
            self._visitors += is_open
        try:
            yield is_open
        finally:
            with self._face:
                self._visitors -= is_open
                self._face.notify_all()

    def _tell(self, answer: Answer, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        if not answer.done:
            answer.give(self._count(namespace, keys) if self._health.serves else 0)

    def _obey(self, order: Order, deadline_s: float) -> int:
        answer: Future[int] = Future()
        if self._settings.read_only:
            raise StoreUnsupported("NVMe store: opened read-only; open it as its one writer")
        if not self._health.serves:
            raise self._health.refusal()
        with self._face:
            if self._closed:
                raise StoreUnsupported("NVMe store: closed; open it again")
            self._call_soon(lambda: self._custodian.begin(order, answer))
        try:
            return answer.result(deadline_s)
        except TimeoutError as error:
            raise StoreBusy(
                f"NVMe store: not done after {deadline_s} s; it goes on, ask again later"
            ) from error

    def _read(self, question: Callable[[Catalogue], Found]) -> Found:
        with self._visiting() as open:
            if self._closed:
                raise StoreUnsupported("NVMe store: closed; open it again")
            if not open:
                raise self._health.refusal()
            return question(self._core.catalogue)

    def _count(self, namespace: bytes, keys: Sequence[BlockKey]) -> int:
        try:
            return self._core.catalogue.count(namespace, keys, int(self._settings.clock() * 1e6))
        except (OSError, StoreCorrupt) as error:
            self._health.count(error, Fault.CATALOGUE)
            _log.warning("NVMe lookup: %s", error)
            return 0

    def _begin(
        self, start: Callable[[Request, Outcome], None], request: Request, outcome: Outcome
    ) -> None:
        try:
            if not self._health.serves:  # it was taken out since the request came
                raise self._health.refusal()
            start(request, outcome)
        except Exception as error:  # noqa: BLE001 - the caller gets it with the flight
            if not isinstance(error, StoreOut):
                _log.error("NVMe tier: a request broke", exc_info=error)
            if isinstance(outcome, Landing):
                outcome.give_up(error)  # reads may have begun
            else:
                outcome.fail_rest(error)

    def _live(self, started: threading.Event) -> None:
        """The tier's own thread, from opening to letting go."""
        try:
            asyncio.run(self._serve(started))
        finally:
            self._watchdog.stop()
            with self._face:
                self._face.wait_for(lambda: not self._visitors)
            self._segments.close()
            self._core.catalogue.close()
            self._lock.release()

    async def _serve(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        settings = self._settings
        workers = Workers(settings.io_threads, self._loop, self._watch)
        self._core = Core(
            self._catalogue,
            self._segments,
            workers,
            self._watch,
            self._health,
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
            self._ids.take,
            self._meter,
            settings.policy,
            extent_bytes=settings.geometry.extent_bytes,
            group_bytes=settings.geometry.group_bytes,
        )
        self._custodian = Custodian(self._core, self._signal)
        self._renewal = Renewal(
            self._core, self._reader, self._writer, self._reopen, settings.monotonic
        )
        if not settings.read_only:
            self._catalogue.on_damage(self._damaged)
            self._custodian.start()
        started.set()
        await self._write_until_closed(workers)
        await self._renewal.drain()
        await self._reader.drain()
        await self._custodian.close()
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
) -> tuple[Catalogue, Segments, Ids, Counters, DayWritten | None]:
    """Catalogue, segments, source of ids, totals, what the day's budget has had: recovered.

    Raises as `open`, or `OSError`.
    """
    ids = Ids()
    segments = Segments(
        path / "segments",
        files,
        ids.take,
        read_only=settings.read_only,
        segment_bytes=settings.geometry.segment_bytes,
    )
    if settings.read_only:
        catalogue = Catalogue.open(path / CATALOGUE, read_only=True)
        try:
            return catalogue, segments, ids, catalogue.counters(), catalogue.written()
        except BaseException:
            catalogue.close()
            raise
    files.probe(path / "segments")
    opened = open_catalogue(segments, ids, settings.capacity_bytes)
    return opened.catalogue, segments, ids, opened.totals, opened.written
