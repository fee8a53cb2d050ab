"""Threads for blocking I/O: urgent jobs, patient ones, background ones. Knows nothing of any.

Urgent jobs go first. Patient jobs (reads that nobody waits for yet) and background jobs (writes)
take turns, so that neither starves the other; patient ones run on a quarter of the threads, so that
an urgent one finds a thread. A patient job may become urgent while it waits.

One aiofiles executor call per job costs a third of the drive's speed at small blocks; so each call
here is a thread's whole life, which takes jobs as they come. A thread that waits is woken by
`submit` itself, not by the loop: a job begins while the loop is still cutting the next one.
"""

import asyncio
import mmap
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from kvtier.tiers.contracts import Bytes
from kvtier.tiers.nvme.codecs import Coder
from kvtier.tiers.nvme.daemons import DaemonExecutor
from kvtier.tiers.nvme.watch import Call, Watch

T = TypeVar("T")


_LOOK_AGAIN_S = 0.05
"""Nobody tells a worker that somebody now waits for a patient job: while there are any, idle ones
look this often."""


class Scratch:
    """Page-aligned memory of one thread, reused from job to job; and its `coder`."""

    def __init__(self) -> None:
        self.coder = Coder()
        self._buffers: dict[str, Bytes] = {}

    def take(self, name: str, nbytes: int) -> Bytes:
        """`nbytes` under a name; valid until the next `take` of that name."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[name] = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        return buffer[:nbytes]


class Batch(Generic[T]):
    """Jobs that begin as they are added and whose results are wanted together.

    The loop is woken once, when the last has ended: a wake-up for each would cost the workers as
    much of the interpreter's lock as the job itself. Belongs to the loop's thread, but for `_end`.
    """

    def __init__(
        self,
        workers: "Workers",
        call: Call,
        *,
        urgent: bool,
        hurried: Callable[[], bool] | None = None,
    ) -> None:
        """`hurried`: the jobs are patient ones while it says False."""
        self._workers = workers
        self._call = call
        self._urgent = urgent
        self._hurried = hurried
        self._lock = threading.Lock()
        self._results: list[T | BaseException | None] = []
        self._left = 1  # until `results` is called
        self._future: asyncio.Future[None] | None = None

    def add(self, job: Callable[[Scratch], T]) -> None:
        """Run `job` on a worker. Whoever adds one asks for `results` in the end."""
        if self._future is None:
            self._future = self._workers.owed()
        number = len(self._results)
        self._results.append(None)
        with self._lock:
            self._left += 1

        def run(scratch: Scratch) -> None:
            began = self._workers.watch.began(self._call)
            try:
                self._results[number] = job(scratch)
            except BaseException as error:  # noqa: BLE001 - goes to whoever awaits the batch
                self._results[number] = error
            finally:
                self._workers.watch.ended(began)
                self._end()

        self._workers.enqueue(run, urgent=self._urgent, hurried=self._hurried)

    async def results(self) -> list[T | BaseException | None]:
        """What each job returned or raised, in the order of `add`. Add no more."""
        self._end()
        if self._future is not None:
            await self._future
        return self._results

    def _end(self) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last and self._future is not None:
            self._workers.deliver(self._future, None)


@dataclass(frozen=True, eq=False)
class _Job:
    """A job that waits for others while `hurried` says False."""

    run: Callable[[Scratch], None]
    hurried: Callable[[], bool]


class Workers:
    """`threads` threads. `submit` belongs to the loop's thread; so do the futures."""

    def __init__(self, threads: int, loop: asyncio.AbstractEventLoop, watch: Watch) -> None:
        self._loop = loop
        self.watch = watch
        self._executor = DaemonExecutor(threads, "kvtier-nvme-io")
        self._wake = threading.Condition()
        self._urgent: deque[_Job] = deque()
        self._patient: deque[_Job] = deque()
        self._background: deque[Callable[[Scratch], None]] = deque()
        self._most_patient = max(1, threads // 4)
        self._num_patient = 0
        self._patient_last = False
        self._pending: set[asyncio.Future[Any]] = set()
        self._closing = False
        try:
            for _ in range(threads):
                self._executor.submit(self._pull)
        except RuntimeError:  # the system gives no more
            self.close()
            raise

    def submit(
        self, job: Callable[[Scratch], T], call: Call, *, urgent: bool
    ) -> "asyncio.Future[T]":
        """Run `job` on a worker, before all jobs that are not urgent if it is.

        `call`: what the job does to the drive, for the watchdog, while it runs.
        """
        future: asyncio.Future[T] = self.owed()

        def run(scratch: Scratch) -> None:
            try:
                with self.watch.during(call):
                    result = job(scratch)
            except BaseException as error:  # noqa: BLE001 - goes to whoever awaits the job
                self.deliver(future, None, error)
            else:
                self.deliver(future, result)

        self.enqueue(run, urgent=urgent)
        return future

    def owed(self) -> "asyncio.Future[Any]":
        """A future that `drain` waits for and `deliver` settles."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def deliver(
        self, future: "asyncio.Future[Any]", result: Any, error: BaseException | None = None
    ) -> None:
        """Settle a future from any thread."""
        self._loop.call_soon_threadsafe(_settle, future, result, error)

    def enqueue(
        self,
        run: Callable[[Scratch], None],
        *,
        urgent: bool,
        hurried: Callable[[], bool] | None = None,
    ) -> None:
        """Have a worker call `run`, which must not raise. `hurried`: whether an urgent job is one
        now; it is asked again and again, with a lock held, until the job begins."""
        with self._wake:
            if urgent:
                job = _Job(run, hurried or _always)
                (self._urgent if job.hurried() else self._patient).append(job)
            else:
                self._background.append(run)
            self._wake.notify()

    async def drain(self) -> None:
        """Wait until every job has ended."""
        while self._pending:
            await asyncio.wait(self._pending)

    def close(self) -> None:
        """End the threads. Nothing may be in flight."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._executor.shutdown()

    def _pull(self) -> None:
        scratch = Scratch()
        while True:
            with self._wake:
                while (chosen := self._choose()) is None:
                    if self._closing:
                        return
                    self._wake.wait(_LOOK_AGAIN_S if self._patient else None)
                run, patient = chosen
                self._num_patient += patient
            run(scratch)
            del run, chosen  # or the last job's memory lives as long as the thread is idle
            if patient:
                with self._wake:
                    self._num_patient -= 1

    def _choose(self) -> tuple[Callable[[Scratch], None], bool] | None:
        """Take the next job from its queue; whether it counts as patient."""
        for job in self._patient:
            if job.hurried():
                self._patient.remove(job)
                self._wake.notify()  # nobody was told of it: there may be more, and idle threads
                return job.run, False
        while self._urgent:
            job = self._urgent.popleft()
            if job.hurried():
                return job.run, False
            self._patient.append(job)  # who waited for it has gone
        waiting = bool(self._patient) and self._num_patient < self._most_patient
        if waiting and not (self._background and self._patient_last):
            self._patient_last = True
            return self._patient.popleft().run, True
        self._patient_last = False
        return (self._background.popleft(), False) if self._background else None


def _always() -> bool:
    return True


def _settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
