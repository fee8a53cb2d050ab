"""Is the drive well? Counts what went wrong, and says what may touch the drive now.

Two breakers: one for writes (a full disk stops admission, reads go on) and one for the whole drive
(reads that fail in a row, calls that do not return). Knows no file, no thread and no request; every
method may be called from any thread. The clock is the caller's, in monotonic seconds.
"""

import errno
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from threading import Lock

from kvtier.tiers.errors import StoreCorrupt, StoreOut
from kvtier.tiers.nvme.breaker import Breaker
from kvtier.tiers.nvme.files import ShortRead, ShortWrite

_log = logging.getLogger(__name__)

FAILED_READS = 3
"""So many extents in a row that the drive cannot read take it out."""


class State(StrEnum):
    """What the store can do now."""

    OK = "ok"
    FULL = "full"  # no puts: no space
    FAILING = "failing"  # no puts; nothing at all once reads fail in a row
    HUNG = "hung"  # nothing: a call does not return
    REBUILDING = "rebuilding"  # nothing: the catalogue is being made anew


class Fault(StrEnum):
    """What can go wrong with a drive."""

    ENOSPC = "enospc"
    EIO = "eio"
    SHORT_READ = "short_read"
    SHORT_WRITE = "short_write"
    HUNG = "hung"
    CATALOGUE = "catalogue"
    OTHER = "other"


class Admission(Enum):
    """How many records may be written now."""

    ALL = "all"
    ONE = "one"  # the probe
    NONE = "none"


@dataclass(frozen=True)
class Patience:
    """How long the tier bears with its drive, in seconds.

    `stall_s`: a read, or the tier's own loop, that takes longer is hung; a call that writes may
    take four times as long (see `watch`). A sick drive is left alone for `first_s` to `most_s`.
    """

    stall_s: float = 0.5
    first_s: float = 1.0
    most_s: float = 30.0


@dataclass(frozen=True)
class HealthReport:
    """Counts since the tier was opened, by kind."""

    state: State
    errors: Mapping[str, int]
    trips: int
    refused_blocks: int
    stalled_reads: int


class Health:
    """The state of one store's drive."""

    def __init__(self, clock: Callable[[], float], patience: Patience) -> None:
        self._clock = clock
        self._lock = Lock()
        self._writes = Breaker(patience.first_s, patience.most_s)
        self._drive = Breaker(patience.first_s, patience.most_s)
        self._write_state = self._drive_state = self._known = State.OK
        self._out: State | None = None
        self._errors: Counter[Fault] = Counter()
        self._unread: set[int] = set()
        self._refused_blocks = 0
        self._stalled_reads = 0

    # ---- what may be done now --------------------------------------------------------------------

    @property
    def state(self) -> State:
        if self._out is not None:
            return self._out
        if self._drive.is_open:
            return self._drive_state
        return self._write_state if self._writes.is_open else State.OK

    @property
    def is_hung(self) -> bool:
        return self._drive.is_open and self._drive_state is State.HUNG

    @property
    def serves(self) -> bool:
        """Whether requests may touch the drive at all."""
        return self._out is None and not self._drive.is_open

    @property
    def is_out(self) -> bool:
        """Whether the tier itself has taken the store out."""
        return self._out is not None

    @property
    def admits(self) -> bool:
        """Whether a put is worth planning: writes work, or one of its records may be the probe."""
        return self.serves and (not self._writes.is_open or self._writes.is_due(self._clock()))

    def admission(self) -> Admission:
        """Take leave to write. ONE ends in `write_failed`, `write_worked` or `write_undecided`."""
        with self._lock:
            if self._out is not None:
                return Admission.NONE
            if not self._writes.is_open:
                return Admission.ALL
            return Admission.ONE if self._writes.probe(self._clock()) else Admission.NONE

    @property
    def admits_all(self) -> bool:
        """Whether writes need no probe."""
        return not self._writes.is_open

    def refusal(self) -> StoreOut:
        """Why a request is turned away."""
        return StoreOut(f"NVMe store is {self.state}: left alone for a while; do without it")

    # ---- what was seen ---------------------------------------------------------------------------

    def count(self, error: Exception, fault: Fault | None = None) -> None:
        """Something went wrong that has no consequence here. `fault`: None, as the error says."""
        with self._lock:
            self._errors[fault or _fault(error)] += 1

    def refuse(self, num_blocks: int) -> None:
        """Blocks of puts were turned away."""
        with self._lock:
            self._refused_blocks += num_blocks

    def stalled(self, num_reads: int) -> None:
        """Fetches were left waiting for a read that does not return."""
        with self._lock:
            self._stalled_reads += num_reads

    def write_failed(self, error: Exception, fault: Fault | None = None) -> None:
        """A write, or the catalogue (`fault`), failed: no puts until a probe has worked.

        A damaged catalogue (`StoreCorrupt`) is only counted: it needs another one, and no probe.
        """
        with self._lock:
            self._errors[fault or _fault(error)] += 1
            if isinstance(error, StoreCorrupt):
                return
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._write_state = State.FULL if full else State.FAILING
            self._writes.failed(self._clock())
            self._tell(error)

    def write_worked(self) -> None:
        with self._lock:
            self._writes.succeeded(self._clock())
            self._tell(None)

    def write_undecided(self) -> None:
        """The probe was not written, for a reason that is not the drive's."""
        with self._lock:
            self._writes.withdraw()

    def read_failed(self, extent: int, error: Exception) -> None:
        """The drive could not read this extent."""
        with self._lock:
            self._errors[_fault(error)] += 1
            self._unread.add(extent)
            if len(self._unread) >= FAILED_READS and not self._drive.is_open:
                self._drive_state = State.FAILING
                self._drive.failed(self._clock())
                self._tell(error)

    def read_worked(self) -> None:
        with self._lock:
            self._unread.clear()

    def probe_reads(self) -> bool:
        """Whether the drive is to be tried now; the answer goes to `reads_probed`."""
        with self._lock:
            if self._drive_state is not State.FAILING or not self._drive.is_due(self._clock()):
                return False
            return self._drive.probe(self._clock())

    def reads_probed(self, error: Exception | None) -> None:
        with self._lock:
            if self._drive_state is not State.FAILING or not self._drive.is_probing:
                return  # it hangs meanwhile
            if error is not None:
                self._errors[_fault(error)] += 1
                self._drive.failed(self._clock())
                return
            self._unread.clear()
            self._drive.succeeded(self._clock())
            self._tell(None)

    def hung(self, what: str) -> None:
        """A call has not returned for too long: nothing touches the drive until `returned`."""
        with self._lock:
            if self._drive.is_open and self._drive_state is State.HUNG:
                return
            self._errors[Fault.HUNG] += 1
            self._drive.failed(self._clock())
            self._drive_state = State.HUNG
            self._tell(StoreOut(f"{what} does not return"))

    def returned(self) -> None:
        """No call hangs now. The drive is used again once it was left alone for long enough."""
        with self._lock:
            if self._drive_state is State.HUNG and self._drive.probe(self._clock()):
                self._drive.succeeded(self._clock())
                self._tell(None)

    def take_out(self, state: State) -> None:
        """The tier itself needs the store for a while, or cannot use it (`state` says why)."""
        with self._lock:
            self._out = state
            self._tell(None)

    def bring_back(self) -> None:
        with self._lock:
            self._out = None
            self._tell(None)

    def report(self) -> HealthReport:
        with self._lock:
            return HealthReport(
                self.state,
                {fault.value: self._errors[fault] for fault in Fault},
                self._writes.trips + self._drive.trips,
                self._refused_blocks,
                self._stalled_reads,
            )

    def _tell(self, error: Exception | None) -> None:
        if self.state is not self._known:
            self._known = self.state
            why = "" if error is None else f": {error}"
            _log.warning("NVMe store is %s%s", self._known, why)


def _fault(error: Exception) -> Fault:
    if isinstance(error, ShortWrite):
        return Fault.SHORT_WRITE
    if isinstance(error, ShortRead):
        return Fault.SHORT_READ
    if isinstance(error, StoreCorrupt):
        return Fault.CATALOGUE
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return Fault.ENOSPC
    return Fault.EIO if number == errno.EIO else Fault.OTHER
