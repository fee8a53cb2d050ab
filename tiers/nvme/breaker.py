"""A circuit breaker: after a failure nothing goes through until one probe has succeeded.

    closed --failed--> open --probe (back-off over)--> probing --succeeded--> closed
                        ^                                 |
                        +------- failed: back-off doubled +

Pure: callers pass the time (seconds of a monotonic clock) and hold their own lock. Knows neither
drives nor requests.
"""


class Breaker:
    """Waits `first_s` after a failure, twice as long after each further one, `most_s` at most.

    A failure within `most_s` of the last recovery counts as a further one: what fails again as
    soon as it is used again is left alone for longer.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        if not 0 < first_s <= most_s:
            raise ValueError(
                f"back-off: {first_s} to {most_s} s is no range; give 0 < first <= most"
            )
        self.trips = 0
        self.is_open = False
        self.is_probing = False
        self._first_s = first_s
        self._most_s = most_s
        self._back_off_s = 0.0
        self._until = 0.0
        self._closed_at: float | None = None

    def is_due(self, now: float) -> bool:
        """Whether a probe may go through now."""
        return self.is_open and not self.is_probing and now >= self._until

    def probe(self, now: float) -> bool:
        """Take the one probe, if it is due. It ends in `failed`, `succeeded` or `withdraw`."""
        self.is_probing = self.is_probing or self.is_due(now)
        return self.is_probing

    def failed(self, now: float) -> bool:
        """Something failed. True if that opened a closed breaker; old news changes nothing."""
        if self.is_open and not self.is_probing:
            return False
        opened = not self.is_open
        relapse = self._closed_at is not None and now - self._closed_at < self._most_s
        doubled = min(2 * self._back_off_s, self._most_s)
        self._back_off_s = doubled if relapse or not opened else self._first_s
        self._until = now + self._back_off_s
        self.is_open, self.is_probing = True, False
        self.trips += opened
        return opened

    def succeeded(self, now: float) -> bool:
        """Something worked. True if it was the probe, which closes the breaker."""
        if not self.is_probing:
            return False
        self.is_open = self.is_probing = False
        self._closed_at = now
        return True

    def withdraw(self) -> None:
        """The probe came to no verdict: the next one may go at once."""
        self.is_probing = False
