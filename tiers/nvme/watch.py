"""What is under way: calls that have not returned, and requests that have not been answered.

Thread-safe books, with an alarm for the watchdog. Knows no drive and does nothing by itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from threading import Condition

from kvtier.tiers.contracts import Answer, Flight
from kvtier.tiers.nvme.landing import Landing

WRITE_FACTOR = 4
"""A sync or a commit waits for all that the drive has buffered, and nobody waits for it; so it may
take this many times as long as a read."""


class Call(StrEnum):
    """What may hang, as the log tells it."""

    LOOP = "the tier's loop"
    READ = "a read"
    WRITE = "a write"
    SYNC = "a sync"
    SPACE = "an allocation or a punched hole"
    COMMIT = "a commit of the catalogue"


class Watch:
    """Calls in flight with their start, and requests owed an answer."""

    def __init__(self, clock: Callable[[], float], stall_s: float) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._alarm = Condition()
        self._calls: dict[int, tuple[Call, float]] = {}
        self._next_call = 0
        self._moved = clock()
        self._answers: list[Answer] = []
        self._puts: list[Flight] = []
        self._fetches: list[Landing] = []
        self._ended = False

    # ---- calls -----------------------------------------------------------------------------------

    def began(self, call: Call) -> int:
        """A call is under way until `ended` is told the number returned here."""
        with self._alarm:
            self._next_call += 1
            self._calls[self._next_call] = (call, self._clock())
            if len(self._calls) == 1:
                self._alarm.notify()
            return self._next_call

    def ended(self, number: int) -> None:
        with self._alarm:
            del self._calls[number]

    @contextmanager
    def during(self, call: Call) -> Iterator[None]:
        """A call that lasts as long as the block."""
        number = self.began(call)
        try:
            yield
        finally:
            self.ended(number)

    def moved(self) -> None:
        """The loop has done something: however much is queued there, it does not hang."""
        self._moved = self._clock()

    def overdue(self) -> Call | None:
        """A call that has been under way for too long, if there is one."""
        with self._alarm:
            now = self._clock()
            for call, start in self._calls.values():
                if call is Call.LOOP:
                    start = max(start, self._moved)
                factor = 1 if call in (Call.LOOP, Call.READ) else WRITE_FACTOR
                if now - start > factor * self._stall_s:
                    return call
            return None

    # ---- requests --------------------------------------------------------------------------------

    def owe(self, request: Answer | Flight | Landing) -> None:
        """A request was taken in. A `Flight` is a put's."""
        with self._alarm:
            if isinstance(request, Answer):
                self._answers.append(request)
            elif isinstance(request, Flight):
                self._puts.append(request)
            else:
                self._fetches.append(request)
            self._alarm.notify()

    def give_up(self, error: Exception) -> int:
        """Answer every request with what is known now; how many fetches that has stalled.

        A put that is failed here must not be published any more, unless all of its bytes were read
        before: its slots are the caller's again.
        """
        with self._alarm:
            self._forget_done()
            answers, puts, fetches = (*self._answers,), (*self._puts,), (*self._fetches,)
        for answer in answers:
            answer.give(0)
        for flight in puts:
            flight.fail_rest(error)
        return sum(landing.give_up(error) for landing in fetches)

    def expire(self) -> None:
        """Drop what is past its deadline or cancelled."""
        with self._alarm:
            self._forget_done()
            fetches = (*self._fetches,)
        for landing in fetches:
            landing.expire()

    # ---- the watchdog's sleep --------------------------------------------------------------------

    def sleep(self, seconds: float, *, awake: Callable[[], bool]) -> bool:
        """Sleep for `seconds`, longer while nothing is under way and `awake` says no.

        False once `end` was called.
        """
        with self._alarm:
            self._alarm.wait_for(lambda: self._ended or self._is_busy or awake())
            late = True
            while late and not self._ended:  # then the whole process stood still, its calls as well
                before = self._clock()
                self._alarm.wait_for(lambda: self._ended, seconds)
                late = self._clock() - before > 2 * seconds
            return not self._ended

    def end(self) -> None:
        """Let the watchdog go."""
        with self._alarm:
            self._ended = True
            self._alarm.notify()

    @property
    def _is_busy(self) -> bool:
        return bool(self._calls or self._answers or self._puts or self._fetches)

    def _forget_done(self) -> None:
        self._answers = [answer for answer in self._answers if not answer.done]
        self._puts = [flight for flight in self._puts if not flight.done]
        self._fetches = [landing for landing in self._fetches if not landing.flight.done]
