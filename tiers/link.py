"""One direction between two pools: what is on its way there, and how fast it has been lately.

A link knows flights and bytes, no slots and no events. It decides nothing: the mover asks it how
much more may be started. Not thread-safe: the mover's lock guards it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.tiers.contracts import Flight

# What may be under way before anything was measured: eight groups of blocks that land together
# (`LANDING_BYTES`), so that a link does not run dry while somebody reacts to one of them.
LEAST_IN_FLIGHT = 64 << 20

# From then on, what the link carries in this time: 1 GB at 50 GB/s. More would make it no faster,
# and what has been handed to a copy engine can't be called off.
HORIZON_S = 0.02

# A measurement counts half as much once this time has passed.
HALF_LIFE_S = 10.0


@dataclass(frozen=True)
class LinkStatistics:
    """What a link has carried and is carrying."""

    landed_bytes: int = 0
    busy_s: float = 0.0
    """How long the copies of those bytes took, where the device can tell."""
    called_off_blocks: int = 0
    """Blocks that nobody wanted any more, or too late, before their copy began."""
    in_flight_bytes: int = 0
    bytes_per_s: float | None = None
    """Lately, while it was busy. None: nothing was measured yet."""


class Meter:
    """Bytes a second over busy time, where older measurements count less.

    Two sums, of bytes and of seconds, are halved each `half_life_s` of `clock`; their quotient is
    the rate. So a long copy counts as its length, an idle hour changes nothing, and what comes
    after it counts for more than what was before.
    """

    def __init__(self, clock: Callable[[], float], half_life_s: float = HALF_LIFE_S) -> None:
        self._clock = clock
        self._half_life_s = half_life_s
        self._nbytes = 0.0
        self._busy_s = 0.0
        self._at = clock()

    @property
    def bytes_per_s(self) -> float | None:
        return self._nbytes / self._busy_s if self._busy_s > 0 else None

    def add(self, nbytes: int, busy_s: float) -> None:
        """`nbytes` took `busy_s`; without either there is nothing to learn."""
        if nbytes <= 0 or busy_s <= 0:
            return
        now = self._clock()
        # Never quite nothing: a rate that was measured once stays known.
        kept = max(1e-6, 0.5 ** (max(0.0, now - self._at) / self._half_life_s))
        self._at = now
        self._nbytes = self._nbytes * kept + nbytes
        self._busy_s = self._busy_s * kept + busy_s


class Link:
    """The flights of one copy stream.

    `most_bytes`: how much may be under way at once; None: `HORIZON_S` of what was measured, and
    `LEAST_IN_FLIGHT` at least.
    """

    def __init__(self, clock: Callable[[], float], most_bytes: int | None = None) -> None:
        self._meter = Meter(clock)
        self._most_bytes = most_bytes
        self._flights: list[tuple[Flight, int]] = []
        self._landed_bytes = 0
        self._busy_s = 0.0
        self._called_off = 0

    def carry(self, flight: Flight, block_bytes: int) -> None:
        """A flight of blocks of this size has started."""
        self._flights.append((flight, block_bytes))

    @property
    def limit(self) -> int:
        """Bytes that may be under way at once."""
        if self._most_bytes is not None:
            return self._most_bytes
        rate = self._meter.bytes_per_s
        return LEAST_IN_FLIGHT if rate is None else max(LEAST_IN_FLIGHT, int(rate * HORIZON_S))

    @property
    def room(self) -> int:
        """Bytes that may be started now. None until a quarter of the limit is free: moves stay big
        enough to be worth starting."""
        self.settle()
        limit = self.limit
        free = limit - self._in_flight
        return free if free * 4 >= limit else 0

    @property
    def bytes_per_s(self) -> float | None:
        self.settle()
        return self._meter.bytes_per_s

    def statistics(self) -> LinkStatistics:
        self.settle()
        return LinkStatistics(
            landed_bytes=self._landed_bytes,
            busy_s=self._busy_s,
            called_off_blocks=self._called_off,
            in_flight_bytes=self._in_flight,
            bytes_per_s=self._meter.bytes_per_s,
        )

    @property
    def _in_flight(self) -> int:
        return sum(flight.pending * nbytes for flight, nbytes in self._flights)

    def settle(self) -> None:
        """Learn from the flights that are over, and forget them."""
        over = [(flight, nbytes) for flight, nbytes in self._flights if flight.done]
        if not over:
            return
        self._flights = [(flight, nbytes) for flight, nbytes in self._flights if not flight.done]
        for flight, block_bytes in over:
            nbytes = flight.landed * block_bytes
            self._landed_bytes += nbytes
            self._busy_s += flight.busy_s
            self._called_off += flight.called_off
            self._meter.add(nbytes, flight.busy_s)
