"""Mend a store that nobody serves from: what `kvtier check` does when it may change things.

Opens the store as its one writer. Blocks that fail are forgotten with all that hangs off them, a
catalogue whose tables disagree is made anew, and space in which nothing lives is given back.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier.tiers.errors import StoreCorrupt, StoreUnsupported
from kvtier.tiers.nvme.catalogue import Catalogue, Change
from kvtier.tiers.nvme.check import CheckReport, check_store, examine, table_problems
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.lock import StoreLock
from kvtier.tiers.nvme.rebuild import CATALOGUE, Rebuilt
from kvtier.tiers.nvme.record import PAGE
from kvtier.tiers.nvme.recovery import Ids, Opened, give_back, is_store, open_catalogue
from kvtier.tiers.nvme.rows import Extent, Freed, Table, decode_extent, key_number
from kvtier.tiers.nvme.segments import Segments, list_segments

Progress = Callable[[int, int], None]

_ANY_CAPACITY = 2**62
_BATCH = 256


@dataclass(frozen=True)
class RepairReport:
    """What was done. `found`: problems before; `forgotten_blocks` of damaged records and of what
    hung off them; `freed_bytes` in which nothing lived; `rebuilt`: what a new catalogue holds, if
    one was made; `after`: the check that followed."""

    found: tuple[str, ...]
    forgotten_blocks: int
    freed_bytes: int
    rebuilt: Rebuilt | None
    after: CheckReport


def repair_store(path: Path, *, progress: Progress | None = None) -> RepairReport:
    """Mend what can be mended at `path`, then check again.

    Raises as `NvmeTier.open`; the store is whole then, or as it was.
    """
    return _mended(path, None, progress)


def rebuild_store(path: Path, *, progress: Progress | None = None) -> RepairReport:
    """Make the catalogue at `path` anew from the segments alone, then as `repair_store`.

    Pins, expiry and last uses are lost.
    """
    return _mended(path, StoreCorrupt(f"{path}: its catalogue is given up, as asked"), progress)


def _mended(path: Path, damaged: StoreCorrupt | None, progress: Progress | None) -> RepairReport:
    if not is_store(path):
        raise StoreUnsupported(f"{path}: there is no store here; check the path")
    lock = StoreLock(path, read_only=False)
    try:
        mend = _Mend(path, progress)
        try:
            mend.open(damaged)
            mend.run()
        finally:
            mend.close()
    except OSError as error:
        raise StoreUnsupported(f"{path}: cannot be mended ({error}); mend the disk") from error
    finally:
        lock.release()
    after = check_store(path, progress=progress)
    return RepairReport(mend.found, mend.forgotten_blocks, mend.freed_bytes, mend.rebuilt, after)


class _Mend:
    def __init__(self, path: Path, progress: Progress | None) -> None:
        self.found: tuple[str, ...] = ()
        self.forgotten_blocks = self.freed_bytes = 0
        self.rebuilt: Rebuilt | None = None
        self._path = path
        self._progress = progress
        self._ids = Ids()
        self._segments = Segments(path / "segments", Files(), self._ids.take, read_only=False)
        self._opened: Opened | None = None

    def open(self, damaged: StoreCorrupt | None) -> None:
        """Open the catalogue; one that is damaged, or whose tables disagree, is made anew first:
        a wrong table must not say what an opening removes."""
        damaged = damaged or self._look()
        self._opened = open_catalogue(self._segments, self._ids, _ANY_CAPACITY, damaged=damaged)
        self.rebuilt = self._opened.rebuilt

    def close(self) -> None:
        if self._opened is not None:
            self._opened.catalogue.close()
            self._opened = None
        self._segments.close()

    def run(self) -> None:
        """Forget what is damaged, give back what is not used."""
        findings = examine(self._catalogue, self._segments.directory, self._progress)
        self.found += findings.report.problems
        before = self._catalogue.counters().blocks
        for at in range(0, len(findings.damaged), _BATCH):
            self._change(Change(quarantine=findings.damaged[at : at + _BATCH]))
        self._give_back_gaps()
        self.forgotten_blocks = before - self._catalogue.counters().blocks

    @property
    def _catalogue(self) -> Catalogue:
        assert self._opened is not None
        return self._opened.catalogue

    def _look(self) -> StoreCorrupt | None:
        """What is wrong with the catalogue, if anything is."""
        try:
            catalogue = Catalogue.open(self._path / CATALOGUE, read_only=True)
        except StoreCorrupt as error:
            self.found = (str(error),)
            return error
        try:
            with catalogue.reading() as rows:
                self.found = table_problems(rows)
        finally:
            catalogue.close()
        return StoreCorrupt(f"{self._path}: its tables disagree") if self.found else None

    def _change(self, change: Change) -> None:
        give_back(self._catalogue, self._segments, self._catalogue.commit(change))

    def _give_back_gaps(self) -> None:
        """Free ranges of segments that hold data and no live block (beside what holes show)."""
        gaps: list[Freed] = []
        places: dict[int, list[tuple[int, int]]] = {}
        with self._catalogue.reading() as rows:
            for key, body in rows.walk(Table.EXTENTS):
                extent = decode_extent(key_number(key), body)
                places.setdefault(extent.segment, []).append(_place(extent))
        for segment in list_segments(self._segments.directory):
            gaps += self._gaps(segment, sorted(places.get(segment, [])))
        self.freed_bytes += sum(gap.length for gap in gaps)
        for at in range(0, len(gaps), _BATCH):
            self._change(Change(abandoned=gaps[at : at + _BATCH]))

    def _gaps(self, segment: int, places: list[tuple[int, int]]) -> Iterator[Freed]:
        """Ranges of a segment between `places` in which data stands."""
        size = self._segments.path(segment).stat().st_size
        end = -(-size // PAGE) * PAGE
        lived = 0
        with self._segments.opened(segment) as fd:
            for start, stop in (*places, (end, end)):
                while lived < start:
                    data = self._segments.files.next_data(fd, lived)
                    if data is None or data[0] >= start:
                        break
                    first = data[0] // PAGE * PAGE
                    last = min(-(-data[1] // PAGE) * PAGE, start)
                    yield Freed(0, segment, first, last - first)
                    lived = last
                lived = max(lived, stop)


def _place(extent: Extent) -> tuple[int, int]:
    return extent.offset, extent.end(extent.live)
