"""`NvmeTier`: the store on NVMe behind the `Store` protocol. Knows no model and no other tier.

Its crew is one thread with an asyncio loop (requests, accounting), `io_threads` workers (segment
I/O, checksums), one catalogue thread (LMDB writes) and a watchdog, which answers in their place
when the drive hangs. Reads that someone waits for go before writes.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kvtier.index.admission import Allowance
from kvtier.index.words import BlockKey, TierId, Tokens
from kvtier.tiers.contracts import Answer, Fetch, Flight, Put, Signal
from kvtier.tiers.errors import (
    CapacityTooSmall,
    StoreBusy,
    StoreCorrupt,
    StoreOut,
    StoreUnsupported,
)
from kvtier.tiers.nvme.catalogue import Catalogue
from kvtier.tiers.nvme.codecs import CodecPolicy
from kvtier.tiers.nvme.crew import Crew, Parts
from kvtier.tiers.nvme.custody import Custody, Found
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.health import Fault, Patience
from kvtier.tiers.nvme.landing import Landing
from kvtier.tiers.nvme.lock import StoreLock
from kvtier.tiers.nvme.orders import Order
from kvtier.tiers.nvme.rebuild import CATALOGUE
from kvtier.tiers.nvme.record import PAGE
from kvtier.tiers.nvme.recovery import (
    Ids,
    is_store,
    open_catalogue,
    prepare_directory,
)
from kvtier.tiers.nvme.segments import Segments
from kvtier.tiers.nvme.settings import Geometry, NvmeStatistics, Settings

_log = logging.getLogger(__name__)

Request = TypeVar("Request", Fetch, Put)
Outcome = TypeVar("Outcome", Flight, Landing)

CLOSE_S = 5.0
"""For how long `close` waits for what a drive still has to do."""


class NvmeTier(Custody):
    """A `Store` in a directory. Made by `open`; every method may be called from any thread."""

    def __init__(self, crew: Crew, signal: Signal) -> None:
        self._crew = crew
        self._signal = signal
        self._settings = crew.settings
        self._health = crew.health

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
        `CapacityTooSmall`, `StoreCorrupt`, `CodecUnknown`, `ValueError` without an I/O thread.
        """
        if io_threads < 1:
            raise ValueError(f"io_threads: {io_threads} read and write nothing; give at least 1")
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
            bool(write_budget_bytes),
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
            parts = _open_parts(path, files, settings, lock)
        except OSError as error:
            lock.release()
            raise StoreUnsupported(
                f"{path}: cannot be opened ({error}); mend the disk or choose another directory"
            ) from error
        except BaseException:
            lock.release()
            raise
        return cls(Crew(parts, signal, settings), signal)

    @property
    def tier(self) -> TierId:
        return TierId.NVME

    @property
    def signal(self) -> Signal:
        """Notified whenever a flight or an answer of this tier moves on."""
        return self._signal

    def lookup(
        self,
        namespace: bytes,
        keys: Sequence[BlockKey],
        tokens: Tokens,
        *,
        asks: bool = False,
    ) -> Answer:
        """How many leading `keys` are published. Does not count as a use, and who `asks` is of no
        interest here: the cache above learns from it."""
        if asks and not keys:
            return Answer(self._signal, 0)
        answer = Answer(self._signal)
        wanted = tuple(keys)
        if not self._crew.serves() or not self._crew.bring_in(
            answer, lambda: self._tell(answer, namespace, wanted)
        ):
            answer.give(0)
        return answer

    def fetch(self, request: Fetch) -> Flight:
        """Read blocks into the pool's slots, verified, landing in order.

        A block fails if it is not published, if its bytes or its record's header are not what was
        written for exactly these keys and tokens (then it and its descendants are forgotten), or
        if the drive fails; every block behind it fails too. The checksums are of the bytes landed.
        Background fetches are read by a quarter of the threads at most, behind all others.

        When the drive hangs, blocks whose read has not begun fail and the flight is `stalled`: the
        others' slots stay in use until their reads return.
        """
        flight = Flight(
            len(request.keys),
            self._signal,
            deadline=request.deadline,
            background=request.background,
        )
        landing = Landing(flight, self._settings.monotonic)
        if not self._crew.serves():
            flight.fail_rest(self._health.refusal())
        elif not self._crew.bring_in(
            landing, lambda: self._begin(self._crew.reader.start, request, landing)
        ):
            flight.fail_rest()
        return flight

    def put(self, request: Put) -> Flight:
        """Write and publish what is not held; a block lands once a restart would find it.

        A block fails if its parent is not published or on its way, if its bytes do not match the
        request's checksum, if no room can be made within the capacity, or if the drive fails; in
        the background also with `BudgetSpent`.
        """
        flight = Flight(len(request.keys), self._signal)
        if not self._crew.serves() or not self._health.admits:
            self._health.refuse(len(flight))
            flight.fail_rest(self._health.refusal())
        elif self._settings.read_only or not self._crew.bring_in(
            flight, lambda: self._begin(self._crew.puts.plan, request, flight)
        ):
            flight.fail_rest()
        return flight

    def describe_elements(self, element_bytes: int) -> None:
        """From now on blocks are numbers of that many bytes. Raises `CodecUnknown`.

        For an owner that learns it after opening: a sidecar from its first client.
        """
        self._crew.puts.policy = replace(self._crew.puts.policy, element_bytes=element_bytes)

    def persist(self, namespace: bytes, keys: Sequence[BlockKey], tokens: Tokens) -> Answer:
        """As `lookup`: what is published is durable."""
        return self.lookup(namespace, keys, tokens)

    def holds(self, namespace: bytes, keys: Sequence[BlockKey]) -> int:
        """How many leading `keys` are published, at once, for tools. 0 after `close`."""
        with self._crew.visiting() as open:
            return self._count(namespace, keys) if open else 0

    def allowance(self) -> Allowance | None:
        """What may still be written today, where a write budget was given; None: no limit.

        For whoever chooses what to put: the tier itself refuses background puts only.
        """
        return self._crew.budget.allowance() if self._settings.is_budgeted else None

    @property
    def pin_quota_bytes(self) -> int:
        """The most that all pins together may hold."""
        return self._settings.pin_quota_bytes

    def statistics(self) -> NvmeStatistics:
        """A snapshot; after `close`, the last one."""
        crew, health = self._crew, self._health.report()
        tally, totals = crew.core.tally, crew.core.totals
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
            written_today_bytes=crew.budget.written_bytes,
            write_budget_bytes=crew.budget.limit_bytes,
            refused_blocks=health.refused_blocks,
            errors=health.errors,
            trips=health.trips,
            stalled_reads=health.stalled_reads,
            direct=crew.segments.files.direct,
            state=health.state,
            codec=crew.meter.statistics(),
        )

    def close(self, deadline_s: float = CLOSE_S) -> None:
        """Finish what was accepted, save last uses, release the directory. Idempotent.

        What is not finished after `deadline_s` fails, or stalls where a read is in flight. If the
        drive hangs, the directory stays locked, for its late writes may still land: the tier lets
        go by itself once they have, or with the process.
        """
        self._crew.close(deadline_s)

    def __repr__(self) -> str:
        stats = self.statistics()
        return (
            f"NvmeTier({stats.blocks} blocks, {stats.used_bytes} of {stats.capacity_bytes} bytes, "
            f"{stats.state})"
        )

    def _tell(self, answer: Answer, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        if not answer.done:
            answer.give(self._count(namespace, keys) if self._health.serves else 0)

    def _obey(self, order: Order, deadline_s: float) -> int:
        answer: Future[int] = Future()
        if self._settings.read_only:
            raise StoreUnsupported("NVMe store: opened read-only; open it as its one writer")
        if not self._health.serves:
            raise self._health.refusal()
        if not self._crew.order(lambda: self._crew.custodian.begin(order, answer)):
            raise StoreUnsupported("NVMe store: closed; open it again")
        try:
            return answer.result(deadline_s)
        except TimeoutError as error:
            raise StoreBusy(
                f"NVMe store: not done after {deadline_s} s; it goes on, ask again later"
            ) from error

    def _read(self, question: Callable[[Catalogue], Found]) -> Found:
        with self._crew.visiting() as open:
            if self._crew.closed:
                raise StoreUnsupported("NVMe store: closed; open it again")
            if not open:
                raise self._health.refusal()
            return question(self._crew.core.catalogue)

    def _count(self, namespace: bytes, keys: Sequence[BlockKey]) -> int:
        try:
            return self._crew.core.catalogue.count(
                namespace, keys, int(self._settings.clock() * 1e6)
            )
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


def _open_parts(path: Path, files: Files, settings: Settings, lock: StoreLock) -> Parts:
    """The store, recovered. Raises as `open`, or `OSError`."""
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
            counters, written = catalogue.counters(), catalogue.written()
            return Parts(lock, catalogue, segments, ids, counters, written)
        except BaseException:
            catalogue.close()
            raise
    files.probe(path / "segments")
    try:
        opened = open_catalogue(segments, ids, settings.capacity_bytes)
    except BaseException:
        segments.close()
        raise
    return Parts(lock, opened.catalogue, segments, ids, opened.totals, opened.written)
