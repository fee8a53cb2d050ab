"""Threads that never keep the process alive. Knows nothing of what they run.

The interpreter joins the threads of a `ThreadPoolExecutor` before it exits, so that one system call
that never returns would keep the process for ever.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonExecutor(Executor):
    """Up to `threads` daemon threads, each started when it is first needed."""

    def __init__(self, threads: int, name: str) -> None:
        self._name = name
        self._most = threads
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._idle = threading.Semaphore(0)
        self._ended = False
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As `Executor.submit`. Raises `RuntimeError` after `shutdown`."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - goes to whoever holds the future
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._ended:
                raise RuntimeError(f"{self._name}: takes no jobs after shutdown")
            self._jobs.put(run)
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more jobs; with `wait`, return once those taken have run."""
        with self._lock:
            self._ended = True
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            job()
            del job  # or the last job's memory lives as long as the thread is idle
            self._idle.release()
