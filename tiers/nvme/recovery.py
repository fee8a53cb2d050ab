"""What opening a store for writing does first: exact usage without reading a record.

Knows that a segment holds nothing unpublished before its published end, and that the catalogue
remembers what was freed and perhaps not punched. A catalogue that is missing or damaged is made
anew from the segments.
"""

import errno
import logging
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from kvtier.tiers.errors import StoreCorrupt, StoreUnsupported
from kvtier.tiers.nvme.catalogue import Catalogue, Change, Outcome
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.rebuild import CATALOGUE, DAMAGED, UNFINISHED, Rebuilt, rebuild_catalogue
from kvtier.tiers.nvme.rows import Counters, DayWritten, Freed
from kvtier.tiers.nvme.segments import Segments, list_segments

_log = logging.getLogger(__name__)

MARKS = frozenset({"owner", "segments", CATALOGUE, UNFINISHED, DAMAGED})
"""Everything that stands in a store's directory."""


class Ids:
    """Numbers for extents and segments, rising: `epoch << 32 | n`, so that none is used twice."""

    def __init__(self) -> None:
        self.epoch = 0

    def begin(self, epoch: int) -> None:
        """Count on from this epoch's first number."""
        self.epoch = epoch
        self._take = count(epoch << 32 | 1).__next__

    def take(self) -> int:
        return self._take()


def is_store(path: Path) -> bool:
    """Whether a store stands there, be it a damaged one."""
    return any((path / name).is_dir() for name in (CATALOGUE, "segments"))


def prepare_directory(path: Path, files: Files) -> None:
    """Create the store's directories if they are not there.

    Raises `StoreUnsupported` if that fails or if the directory is somebody else's.
    """
    try:
        files.make_directory(path)
        strangers = sorted({entry.name for entry in path.iterdir()} - MARKS - {"lost+found"})
        if strangers and not is_store(path):
            raise StoreUnsupported(
                f"{path}: holds {strangers[0]!r} and no store; choose an empty directory"
            )
        files.make_directory(path / CATALOGUE)
        files.make_directory(path / "segments")
    except OSError as error:
        cure = "free some space" if error.errno == errno.ENOSPC else "choose another directory"
        raise StoreUnsupported(f"{path}: cannot be created ({error.strerror}); {cure}") from error


@dataclass(frozen=True)
class Opened:
    """A catalogue open for writing, the store's totals, what the day's budget has had; and what a
    rebuild found, if it took one."""

    catalogue: Catalogue
    totals: Counters
    written: DayWritten | None
    rebuilt: Rebuilt | None = None


def open_catalogue(
    segments: Segments, ids: Ids, capacity_bytes: int, *, damaged: StoreCorrupt | None = None
) -> Opened:
    """Open a store's catalogue for writing, recovered, and begin an epoch of `ids`.

    If it is missing or damaged it is rebuilt first, with a warning of what was lost (`damaged`: it
    is known to be). Raises `StoreVersion` if it, or a segment, is of another format (nothing was
    changed then), `OSError` if the file system fails, and as `Catalogue.open`.
    """
    store = segments.directory.parent
    if damaged is None:
        try:
            return _recovered(segments, ids, capacity_bytes)
        except StoreCorrupt as error:
            damaged = error
    _log.warning("NVMe store: %s", damaged)
    segments.close()
    rebuilt = rebuild_catalogue(store, segments.files, after_epoch=ids.epoch)
    _log.warning("NVMe store %s: made a new catalogue: %s", store, rebuilt)
    return replace(_recovered(segments, ids, capacity_bytes), rebuilt=rebuilt)


def _recovered(segments: Segments, ids: Ids, capacity_bytes: int) -> Opened:
    store, files = segments.directory.parent, segments.files
    fresh = not list_segments(segments.directory)
    catalogue = Catalogue.open(store / CATALOGUE, read_only=False, create=fresh)
    try:
        if fresh:  # no record may be published while a name on the way to it can be lost
            for path in (store / CATALOGUE, store, store.parent):
                files.sync_directory(path)
        ids.begin(catalogue.begin_epoch())
        totals = recover(catalogue, segments, capacity_bytes)
        return Opened(catalogue, totals, catalogue.written())
    except BaseException:
        catalogue.close()
        raise


def recover(catalogue: Catalogue, segments: Segments, capacity_bytes: int) -> Counters:
    """Replay frees, cut unpublished tails, remove files nobody names, evict down to capacity.

    Returns the totals from here on. Raises `OSError` if the file system fails.
    """
    known = catalogue.segments()
    frees = catalogue.frees()
    _reclaim(segments, frees)
    opened = [id for id, row in known.items() if not row.sealed]
    for id in opened:
        path = segments.path(id)
        if path.exists():
            segments.files.truncate(path, known[id].end)
            segments.sync(id)  # once sealed, a tail that came back would never be cut again
    for id, path in list_segments(segments.directory).items():
        if id not in known:
            segments.files.unlink(path)
    outcome = catalogue.commit(Change(cleared=frees, sealed=opened))
    short = outcome.totals.used_bytes - capacity_bytes
    outcome = give_back(catalogue, segments, outcome)
    if short > 0:
        outcome = catalogue.commit(Change(evict_bytes=short, lift_pins=True))
        if outcome.num_pins_lost:
            _log.warning(
                "%s: more is pinned than the capacity holds; %d pins were lifted",
                segments.directory.parent,
                outcome.num_pins_lost,
            )
        outcome = give_back(catalogue, segments, outcome)
    if outcome.totals.used_bytes > capacity_bytes:
        raise StoreCorrupt(
            f"{segments.directory.parent}: cannot be brought below its capacity; "
            "run `kvtier check` on it"
        )
    segments.close()
    return outcome.totals


def give_back(catalogue: Catalogue, segments: Segments, outcome: Outcome) -> Outcome:
    """Give what a transaction freed back to the file system; the outcome of having said so."""
    while outcome.freed:
        _reclaim(segments, outcome.freed)
        outcome = catalogue.commit(Change(cleared=outcome.freed))
    return outcome


def _reclaim(segments: Segments, frees: "list[Freed] | tuple[Freed, ...]") -> None:
    """Punch and unlink, durably."""
    for freed in sorted(frees, key=lambda freed: freed.whole_file):
        segments.reclaim(freed)
    for id in sorted({freed.segment for freed in frees if not freed.whole_file}):
        if segments.path(id).exists():
            segments.sync(id)
