"""A part's time: grid points are measured in a stated order while they fit, the others are named.

Knows seconds and points, not what is measured.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from bench.harness import Clock

P = TypeVar("P")


class Budget:
    """`seconds` from now on. `dropped`: what was left out, with the reason."""

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._slip = 1.0
        self.dropped: list[str] = []

    @property
    def left(self) -> float:
        return max(0.0, self._end - self._clock())

    def walk(self, points: Iterable[P], cost: Callable[[P], float]) -> Iterator[P]:
        """Yield the points, in order, that the time left has room for; `drop` the others.

        `cost` estimates a point's seconds. An estimate that a point overran stretches the next
        one's as much; so one slow point (the first compiles kernels) costs no more than care.
        """
        for point in points:
            estimate = cost(point) * self._slip
            if estimate > self.left:
                self.drop(point, f"{estimate:.1f} s wanted, {self.left:.1f} s left")
                continue
            begin = self._clock()
            yield point
            self._slip = max(1.0, (self._clock() - begin) / cost(point))

    def drop(self, point: object, why: str) -> None:
        self.dropped.append(f"{point}: {why}")
