"""Segment files: append-only space for records. Knows no record format and no catalogue.

A segment only grows at its end, and no id is used twice, so that a freed range may be punched any
number of times. `allocate`, `retire` and `settled` are called from the tier's loop; the rest from
any thread.
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.rows import Freed

SEGMENT_BYTES = 1 << 30
"""A segment is closed to writing once it is this long: a terabyte is a thousand files."""

_MAX_OPEN = 128
_NAME = re.compile(r"(?!ffffffff)[0-9a-f]{16}\.seg")


@dataclass(frozen=True)
class Allocation:
    """A range of a segment that nobody else will write. `fresh`: the file is to be created."""

    segment: int
    offset: int
    length: int
    fresh: bool


@dataclass
class _Opened:
    fd: int
    users: int = 0


def list_segments(directory: Path) -> dict[int, Path]:
    """The segment files under `directory` by their ids, ascending. Other files are not ours."""
    named = (path for path in directory.iterdir() if _NAME.fullmatch(path.name))
    return dict(sorted((int(path.stem, 16), path) for path in named))


class Segments:
    """The files of one store, under `directory`."""

    def __init__(
        self,
        directory: Path,
        files: Files,
        next_id: Callable[[], int],
        *,
        read_only: bool,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.directory = directory
        self.files = files
        self._next_id = next_id
        self._read_only = read_only
        self._segment_bytes = segment_bytes
        self._current: int | None = None
        self._end = 0
        self._retired: set[int] = set()
        self._outstanding: Counter[int] = Counter()
        self._lock = Lock()
        self._open: OrderedDict[int, _Opened] = OrderedDict()

    def path(self, segment: int) -> Path:
        return self.directory / f"{segment:016x}.seg"

    def allocate(self, nbytes: int) -> Allocation:
        """Take `nbytes` at the end of the current segment, or at the start of a new one."""
        if self._current is not None and self._end + nbytes > self._segment_bytes:
            self.retire()
        fresh = self._current is None
        if self._current is None:
            self._current, self._end = self._next_id(), 0
        allocation = Allocation(self._current, self._end, nbytes, fresh)
        self._end += nbytes
        self._outstanding[self._current] += 1
        return allocation

    def retire(self) -> None:
        """Write no more into the current segment."""
        if self._current is not None:
            self._retired.add(self._current)
            self._current = None

    def restart(self) -> None:
        """Forget what was being written and close every file. Nothing may be in flight."""
        self._current = None
        self._retired.clear()
        self._outstanding.clear()
        self.close()

    def settled(self, allocation: Allocation) -> None:
        """The allocation's bytes are being published or given up with the next commit."""
        self._outstanding[allocation.segment] -= 1

    @property
    def sealable(self) -> tuple[int, ...]:
        """Segments that will never change at their end again."""
        return tuple(s for s in self._retired if not self._outstanding[s])

    def sealed(self, segments: Collection[int]) -> None:
        """The catalogue knows that these are closed."""
        self._retired.difference_update(segments)
        for segment in segments:
            del self._outstanding[segment]

    def prepare(self, allocation: Allocation) -> None:
        """Make the range writable: create the file if it is new, reserve the disk's blocks.

        Raises `OSError`, ENOSPC if the disk is full, before any byte is written.
        """
        with self.opened(allocation.segment, create=allocation.fresh) as fd:
            if allocation.fresh:
                self.files.sync_directory(self.directory)
            self.files.allocate(fd, allocation.offset, allocation.length)

    @contextmanager
    def opened(self, segment: int, *, create: bool = False) -> Iterator[int]:
        """A descriptor that stays open inside the block. Raises `OSError` if the file is gone.

        `create`: the file is new.
        """
        with self._lock:
            entry = self._open.get(segment)
            if entry is not None:
                entry.users += 1
                self._open.move_to_end(segment)
        if entry is None:  # opened outside the lock: a drive that hangs must not stop other reads
            fd = self.files.open(self.path(segment), create=create, read_only=self._read_only)
            entry = self._register(segment, fd)
        try:
            yield entry.fd
        finally:
            with self._lock:
                entry.users -= 1

    def _register(self, segment: int, fd: int) -> _Opened:
        """Take in a descriptor and one user of it; closes what is too many."""
        surplus: list[int] = []
        with self._lock:
            entry = self._open.setdefault(segment, _Opened(fd))
            if entry.fd != fd:
                surplus.append(fd)  # somebody else was faster
            self._open.move_to_end(segment)
            entry.users += 1
            idle = [s for s, e in self._open.items() if not e.users]
            for old in idle[: max(0, len(self._open) - _MAX_OPEN)]:
                surplus.append(self._open.pop(old).fd)
        for other in surplus:
            self.files.close(other)
        return entry

    def sync(self, segment: int) -> None:
        """Make what was written to a segment (or punched out of it) durable."""
        with self.opened(segment) as fd:
            self.files.fdatasync(fd)

    def reclaim(self, freed: Freed) -> None:
        """Give a range, or the whole file, back to the file system. A file that is gone is fine."""
        if freed.whole_file:
            with self._lock:
                entry = self._open.get(freed.segment)
                idle = entry is not None and not entry.users
                if idle:
                    del self._open[freed.segment]
            if entry is not None and idle:
                self.files.close(entry.fd)
            self.files.unlink(self.path(freed.segment))
            return
        try:
            with self.opened(freed.segment) as fd:
                self.files.punch(fd, freed.offset, freed.length)
        except FileNotFoundError:
            return

    def close(self) -> None:
        """Close every descriptor. Nothing may be in flight."""
        with self._lock:
            while self._open:
                self.files.close(self._open.popitem()[1].fd)
