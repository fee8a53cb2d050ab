"""The day's write budget: how many record bytes went to the drive, and what may still follow.

Only writes that nobody waits for are held to it; the others count all the same. Pure: knows no
drive and no catalogue, and no clock but the one it is given.
"""

from collections.abc import Callable

from kvtier.index.admission import Allowance
from kvtier.tiers.errors import BudgetSpent
from kvtier.tiers.nvme.rows import DayWritten

DAY_S = 86_400
"""Seconds of a UTC day in the clock's Unix time."""


class WriteBudget:
    """`limit_bytes` a UTC day. Changed on the tier's loop only; anybody may look.

    `start` is what the catalogue remembers, None for a new store. A clock that is set back begins
    a new day too: better one budget too many than none until the old date returns.
    """

    def __init__(
        self, limit_bytes: int, start: DayWritten | None, clock: Callable[[], float]
    ) -> None:
        self.limit_bytes = limit_bytes
        self._clock = clock
        self._written = start or DayWritten(self._today(), 0)
        self._saved: DayWritten | None = self._written

    @property
    def written_bytes(self) -> int:
        """Bytes written today."""
        written = self._written
        return written.nbytes if written.day == self._today() else 0

    def allows(self, nbytes: int) -> bool:
        """Whether `nbytes` more stay within today's budget."""
        return self.written_bytes + nbytes <= self.limit_bytes

    def allowance(self) -> Allowance:
        """What is left of today's budget, and for how long it has to last."""
        left = max(0, self.limit_bytes - self.written_bytes)
        return Allowance(left, DAY_S - self._clock() % DAY_S)

    def refusal(self) -> BudgetSpent:
        """What who is not allowed is told."""
        return BudgetSpent(
            f"NVMe store: today's write budget of {self.limit_bytes} bytes is spent; it is renewed "
            "at midnight UTC, or raise it"
        )

    def charge(self, nbytes: int) -> None:
        """These bytes have been written, whoever wanted it."""
        self._written = DayWritten(self._today(), self.written_bytes + nbytes)

    @property
    def unsaved(self) -> DayWritten | None:
        """What the next transaction is to write down; None if it stands there already."""
        return None if self._written == self._saved else self._written

    def saved(self, written: DayWritten | None) -> None:
        """What the catalogue has; None if it has nothing, as one that was made anew."""
        self._saved = written

    def _today(self) -> int:
        return int(self._clock() // DAY_S)
