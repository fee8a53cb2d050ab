"""Polls a cache when time alone has made something due and nobody else may be polling it.

An engine polls its cache at every step, and not at all between two requests. Knows nothing of what
is due.
"""

from threading import Event, Thread

from kvtier.tiers.cache import TieredCache


class Ticker:
    """One thread, from the start to `close`. Sleeps until `TieredCache.next_due`."""

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._over = Event()
        self._thread = Thread(target=self._tick, name="kvtier-ticker", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The cache is not polled any more once this has returned. Idempotent."""
        self._over.set()
        self._thread.join()

    def _tick(self) -> None:
        while (due := self._cache.next_due()) is not None:
            if self._over.wait(max(0.0, due - self._cache.clock())):
                return
            self._cache.poll()
