"""Who works for an open store: a loop on a thread of its own, and everything that runs on it.

The thread, the workers, the catalogue's thread and the watchdog are daemons: none keeps the process
alive. The crew lets go of the directory by itself once its last call has returned. Knows no
request: the tier brings them in as actions to run on the loop.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvtier.tiers.contracts import Answer, Flight, Signal
from kvtier.tiers.errors import StoreCorrupt, StoreOut, StoreUnsupported
from kvtier.tiers.nvme.budget import WriteBudget
from kvtier.tiers.nvme.catalogue import Catalogue
from kvtier.tiers.nvme.core import Core, Tally
from kvtier.tiers.nvme.custody import Custodian
from kvtier.tiers.nvme.health import Health
from kvtier.tiers.nvme.landing import Landing
from kvtier.tiers.nvme.lock import StoreLock
from kvtier.tiers.nvme.pace import Meter
from kvtier.tiers.nvme.puts import Puts
from kvtier.tiers.nvme.reader import Reader
from kvtier.tiers.nvme.recovery import Ids, Opened, open_catalogue
from kvtier.tiers.nvme.renewal import Renewal
from kvtier.tiers.nvme.rows import Counters, DayWritten
from kvtier.tiers.nvme.segments import Segments
from kvtier.tiers.nvme.settings import Settings
from kvtier.tiers.nvme.watch import Watch
from kvtier.tiers.nvme.watchdog import Watchdog
from kvtier.tiers.nvme.workers import Workers
from kvtier.tiers.nvme.writer import Writer

_log = logging.getLogger(__name__)

_GRACE_S = 1.0


@dataclass(frozen=True)
class Parts:
    """An opened store, recovered: whose it is, its catalogue and files, what it holds."""

    lock: StoreLock
    catalogue: Catalogue
    segments: Segments
    ids: Ids
    totals: Counters
    written: DayWritten | None


class Crew:
    """Made when the store is open; everything is in place once the constructor returns. Raises
    `StoreUnsupported`, and lets go of the store, if the system gives it no threads.

    `core`, `reader`, `puts`, `writer`, `custodian` and `renewal` belong to the loop: reach them by
    `bring_in` or `call_soon`. `health`, `watch`, `meter` and `budget` may be asked from any thread.
    """

    core: Core
    reader: Reader
    puts: Puts
    writer: Writer
    custodian: Custodian
    renewal: Renewal

    def __init__(self, parts: Parts, signal: Signal, settings: Settings) -> None:
        self.segments = parts.segments
        self.settings = settings
        self.budget = WriteBudget(settings.write_budget_bytes, parts.written, settings.clock)
        self.meter = Meter(min(settings.io_threads, len(os.sched_getaffinity(0))))
        self.health = Health(settings.monotonic, settings.patience)
        self.watch = Watch(settings.monotonic, settings.patience.stall_s)
        self._parts = parts
        self._signal = signal
        self._face = threading.Condition()
        self._visitors = 0
        self._closed = False
        self._watchdog = Watchdog(
            self.watch,
            self.health,
            settings.patience.stall_s,
            ping=self.call_soon,
            probe=lambda: self.call_soon(self.reader.probe),
        )
        self._watchdog.start()
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._live, args=(started,), name="kvtier-nvme", daemon=True
        )
        self._failure: Exception | None = None
        self._thread.start()
        started.wait()
        if self._failure is not None:
            raise StoreUnsupported(
                f"{parts.segments.directory.parent}: the store's threads cannot be started "
                f"({self._failure}); raise the limit on processes, or take fewer io_threads"
            ) from self._failure

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def serves(self) -> bool:
        """Whether a request may come in. One that comes when a renewal is due begins it."""
        if self.health.serves:
            return True
        if self.renewal.is_due:
            self.call_soon(self._renew)
        return False

    def bring_in(self, owed: Answer | Flight | Landing, action: Callable[[], None]) -> bool:
        """Have a request served on the loop; the watchdog answers it if that hangs. False, and
        nothing is owed, once the crew is closed."""
        with self._face:
            if self._closed:
                return False
            self.watch.owe(owed)
            self.call_soon(lambda: self._do(action))
            return True

    def order(self, action: Callable[[], None]) -> bool:
        """Run something on the loop that the watchdog does not answer for. False once closed."""
        with self._face:
            if not self._closed:
                self.call_soon(action)
            return not self._closed

    def call_soon(self, action: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is owed anything any more
            self._loop.call_soon_threadsafe(action)

    @contextmanager
    def visiting(self) -> Iterator[bool]:
        """Whether the catalogue is open, for a caller that reads it here; it stays so inside."""
        with self._face:
            is_open = not self._closed and self.health.serves
            self._visitors += is_open
        try:
            yield is_open
        finally:
            with self._face:
                self._visitors -= is_open
                self._face.notify_all()

    def close(self, deadline_s: float) -> None:
        """Finish what was accepted, or answer it after `deadline_s`; idempotent."""
        with self._face:
            if not self._closed:
                self._closed = True
                self.call_soon(self.puts.close)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            self.watch.give_up(StoreOut("NVMe store: closed before the drive had finished"))
            self._thread.join(_GRACE_S)
        if self._thread.is_alive():
            _log.warning(
                "NVMe store %s: closed while calls have not returned; locked until they do",
                self.segments.directory.parent,
            )

    # ---- inside ----------------------------------------------------------------------------------

    def _do(self, action: Callable[[], None]) -> None:
        action()
        self.watch.moved()

    def _damaged(self, error: StoreCorrupt) -> None:
        self.renewal.needed(error)
        self.call_soon(self._renew)

    def _renew(self) -> None:
        """Begin a renewal; not while closing, for then nobody would see to its end."""
        if not self._closed:
            self.renewal.begin()

    def _reopen(self, reason: Exception) -> Opened:
        """Close the catalogue, which nobody reads any more, and open it as a start does; if it is
        damaged, make another."""
        with self._face:
            self._face.wait_for(lambda: not self._visitors)
        self.core.catalogue.close()
        capacity_bytes = self.settings.capacity_bytes
        damaged = reason if isinstance(reason, StoreCorrupt) else None
        opened = open_catalogue(self.segments, self._parts.ids, capacity_bytes, damaged=damaged)
        opened.catalogue.on_damage(self._damaged)
        return opened

    def _live(self, started: threading.Event) -> None:
        """The thread's life, from opening to letting go."""
        try:
            asyncio.run(self._serve(started))
        except RuntimeError as error:
            if started.is_set():
                raise
            self._failure = error
        finally:
            self._watchdog.stop()
            with self._face:
                self._face.wait_for(lambda: not self._visitors)
            self.segments.close()
            owner = self.core if started.is_set() else self._parts
            owner.catalogue.close()
            self._parts.lock.release()
            started.set()

    async def _serve(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        settings = self.settings
        workers = Workers(settings.io_threads, self._loop, self.watch)
        self.core = Core(
            self._parts.catalogue,
            self.segments,
            workers,
            self.watch,
            self.health,
            capacity_bytes=settings.capacity_bytes,
            totals=self._parts.totals,
            clock=settings.clock,
            tally=Tally(),
            budget=self.budget,
            read_only=settings.read_only,
        )
        self.reader = Reader(self.core, self.meter, settings.io_threads)
        self.puts = Puts(
            self.core,
            self._parts.ids.take,
            settings.policy,
            extent_bytes=settings.geometry.extent_bytes,
            lot_bytes=settings.lot_bytes,
            group_bytes=settings.group_bytes,
        )
        self.writer = Writer(self.core, self.puts, self.meter, settings.group_bytes)
        self.custodian = Custodian(self.core, self._signal)
        self.renewal = Renewal(
            self.core, self.reader, self.writer, self._reopen, settings.monotonic
        )
        if not settings.read_only:
            self._parts.catalogue.on_damage(self._damaged)
            self.custodian.start()
        started.set()
        await self._write_until_closed(workers)
        await self.renewal.drain()
        await self.reader.drain()
        await self.custodian.close()
        await workers.drain()
        await self.core.close(save=not settings.read_only)
        workers.close()

    async def _write_until_closed(self, workers: Workers) -> None:
        """Run the writer; should it break, fail what it held and start it again.

        How far it came is for recovery to find out, as after a crash: until then the store is out,
        so that nothing is built on what may not be so.
        """
        while True:
            try:
                await self.writer.run()
            except Exception as error:  # noqa: BLE001 - the callers get it with their flights
                _log.error("NVMe tier: the writer broke", exc_info=error)
                self.renewal.needed(error)
                await workers.drain()
                self.puts.fail_all(error)
                self._renew()
            else:
                return
