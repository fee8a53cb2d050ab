"""Polls a cache when time alone has made something due and nobody else may be polling it.

An engine polls its cache at every step, and not at all between two requests; a prefetch is moved on
by news from the store. Knows nothing of what is due.
"""

from threading import Event, Thread

from kvtier.tiers.cache import TieredCache


class Ticker:
    """One thread, from the start to `close`.

    Sleeps until `TieredCache.next_due`; while a prefetch is under way, until the next news.
    """

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._wake = Event()
        self._over = False
        cache.signal.listen(self._heard)
        self._thread = Thread(target=self._tick, name="kvtier-ticker", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The cache is not polled any more once this has returned. Idempotent."""
        self._over = True
        self._wake.set()
        self._thread.join()

    def _heard(self) -> None:
        if self._cache.is_prefetching:
            self._wake.set()

    def _tick(self) -> None:
        while not self._over:
            due = self._cache.next_due()
            self._wake.wait(None if due is None else max(0.0, due - self._cache.clock()))
            self._wake.clear()
            if not self._over:
                self._cache.poll()
