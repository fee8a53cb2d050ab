"""What opening a store for writing does first: exact usage without reading a record.

Knows that a segment holds nothing unpublished before its published end, and that the catalogue
remembers what was freed and perhaps not punched.
"""

import errno
from pathlib import Path

from kvtier.tiers.errors import StoreCorrupt, StoreUnsupported
from kvtier.tiers.nvme.catalogue import Catalogue, Change
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.rows import Counters, Freed
from kvtier.tiers.nvme.segments import Segments

MARKS = frozenset({"owner", "catalog", "segments"})
"""Everything that stands in a store's directory."""


def prepare_directory(path: Path, files: Files) -> None:
    """Create the store's directories if they are not there.

    Raises `StoreUnsupported` if that fails or if the directory is somebody else's.
    """
    try:
        files.make_directory(path)
        strangers = sorted({entry.name for entry in path.iterdir()} - MARKS - {"lost+found"})
        if strangers and not (path / "catalog").is_dir():
            raise StoreUnsupported(
                f"{path}: holds {strangers[0]!r} and no store; choose an empty directory"
            )
        files.make_directory(path / "catalog")
        files.make_directory(path / "segments")
    except OSError as error:
        cure = "free some space" if error.errno == errno.ENOSPC else "choose another directory"
        raise StoreUnsupported(f"{path}: cannot be created ({error.strerror}); {cure}") from error


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
    for path in segments.directory.iterdir():
        if path.suffix == ".seg" and int(path.stem, 16) not in known:
            segments.files.unlink(path)
    outcome = catalogue.commit(Change(cleared=frees, sealed=opened))
    short = outcome.totals.used_bytes - capacity_bytes
    while outcome.freed:
        _reclaim(segments, outcome.freed)
        outcome = catalogue.commit(Change(cleared=outcome.freed))
    if short > 0:
        outcome = catalogue.commit(Change(evict_bytes=short))
        while outcome.freed:
            _reclaim(segments, outcome.freed)
            outcome = catalogue.commit(Change(cleared=outcome.freed))
    if outcome.totals.used_bytes > capacity_bytes:
        raise StoreCorrupt(
            f"{segments.directory.parent}: cannot be brought below its capacity; "
            "run `kvtier check` on it"
        )
    segments.close()
    return outcome.totals


def _reclaim(segments: Segments, frees: "list[Freed] | tuple[Freed, ...]") -> None:
    """Punch and unlink, durably."""
    for freed in sorted(frees, key=lambda freed: freed.whole_file):
        segments.reclaim(freed)
    for id in sorted({freed.segment for freed in frees if not freed.whole_file}):
        if segments.path(id).exists():
            segments.sync(id)
