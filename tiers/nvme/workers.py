"""Threads for blocking I/O: foreground jobs before background jobs. Knows nothing of either.

One aiofiles executor call per job costs a third of the drive's speed at small blocks; so each call
here is a worker's whole pull loop, which takes jobs until there are none.
"""

import asyncio
import mmap
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import aiofiles.os
import numpy as np

from kvtier.tiers.contracts import Bytes
from kvtier.tiers.nvme.codecs import Coder
from kvtier.tiers.nvme.daemons import DaemonExecutor
from kvtier.tiers.nvme.watch import Call, Watch

T = TypeVar("T")


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


class Workers:
    """Up to `threads` threads. `submit` belongs to the loop's thread; so do the futures."""

    def __init__(self, threads: int, loop: asyncio.AbstractEventLoop, watch: Watch) -> None:
        self._threads = threads
        self._loop = loop
        self._watch = watch
        self._executor = DaemonExecutor(threads, "kvtier-nvme-io")
        self._lock = threading.Lock()
        self._urgent: deque[Callable[[Scratch], None]] = deque()
        self._background: deque[Callable[[Scratch], None]] = deque()
        self._pulling = 0
        self._local = threading.local()
        self._pull_loop = aiofiles.os.wrap(self._pull)
        self._pulls: set[asyncio.Task[None]] = set()

    def submit(
        self, job: Callable[[Scratch], T], call: Call, *, urgent: bool
    ) -> "asyncio.Future[T]":
        """Run `job` on a worker, before all jobs that are not urgent if it is.

        `call`: what the job does to the drive, for the watchdog, while it runs.
        """
        future: asyncio.Future[T] = self._loop.create_future()

        def run(scratch: Scratch) -> None:
            try:
                with self._watch.during(call):
                    result = job(scratch)
            except BaseException as error:  # noqa: BLE001 - goes to whoever awaits the job
                self._loop.call_soon_threadsafe(_deliver, future, None, error)
            else:
                self._loop.call_soon_threadsafe(_deliver, future, result, None)

        with self._lock:
            (self._urgent if urgent else self._background).append(run)
            start = self._pulling < self._threads
            self._pulling += start
        if start:
            task = self._loop.create_task(self._pull_loop(executor=self._executor))
            self._pulls.add(task)
            task.add_done_callback(self._pulls.discard)
        return future

    async def drain(self) -> None:
        """Wait until no worker is pulling."""
        while self._pulls:
            await asyncio.wait(self._pulls)

    def close(self) -> None:
        """Join the threads. Nothing may be in flight."""
        self._executor.shutdown()

    def _pull(self) -> None:
        if not hasattr(self._local, "scratch"):
            self._local.scratch = Scratch()
        scratch: Scratch = self._local.scratch
        while True:
            with self._lock:
                queue = self._urgent or self._background
                if not queue:
                    self._pulling -= 1
                    return
                run = queue.popleft()
            run(scratch)


def _deliver(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
