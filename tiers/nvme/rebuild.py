"""A new catalogue from the segments alone, when the old one is damaged or gone.

Every record found is published again: oldest first, so that a parent comes before its children;
where a block stands in two records the newer holds, for a record is written only when its blocks
are in no other. What has no parent is not published. Nothing is taken from the old catalogue: pins,
expiry and last uses are lost, and what was evicted and not yet punched is back.

No byte of a segment is changed here. The new catalogue lists every range in which nothing lives as
freed, and `recover` gives it back once the new catalogue stands in its place.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvtier.tiers.nvme.catalogue import Addition, Catalogue, Change
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.rows import Freed, decode_extent
from kvtier.tiers.nvme.segments import list_segments
from kvtier.tiers.nvme.survey import Survey

T = TypeVar("T")

CATALOGUE = "catalog"
UNFINISHED = "catalog.new"
DAMAGED = "catalog.damaged"
"""Directories in a store: the catalogue, one being made, and the last one that was replaced."""

LOST = "pins, expiry and last uses are lost"

_BATCH = 1024


@dataclass(frozen=True)
class Rebuilt:
    """What a rebuild found. `num_orphans`: records whose parent is in no segment, given up;
    `num_damaged_pages`: pages with data that belongs to no whole record, given up too."""

    num_segments: int
    records: int
    blocks: int
    bytes: int
    num_orphans: int
    num_damaged_pages: int

    def __str__(self) -> str:
        lost = f", {self.num_orphans} records without a parent" if self.num_orphans else ""
        lost += f", {self.num_damaged_pages} damaged pages" if self.num_damaged_pages else ""
        return (
            f"{self.records} records, {self.blocks} blocks found in {self.num_segments} segments"
            f"{lost}; {LOST}"
        )


def rebuild_catalogue(
    store: Path,
    files: Files,
    *,
    after_epoch: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Rebuilt:
    """Put a catalogue made from the segments of `store` into the place of the one it has.

    The caller owns the store, has no catalogue of it open, and opens the new one through `recover`.
    The old one is kept as `catalog.damaged`, beside nothing older. `after_epoch`: the new one
    counts on from there if no record says more. `progress` is told `(segments read, in all)`.

    Raises `StoreVersion` if a segment holds a record of another format, `OSError` if the file
    system fails; nothing is in place of the old catalogue then. Killed at any point, it leaves the
    old catalogue, the new one, or none; each of them opens, the last through another rebuild.
    """
    fresh = store / UNFINISHED
    files.remove_tree(fresh)
    found: list[tuple[int, bytes, bytes]] = []
    free: list[Freed] = []
    ends: dict[int, int] = {}
    damaged = 0
    paths = list_segments(store / "segments")
    for done, (segment, path) in enumerate(paths.items()):
        survey = Survey(path, segment, files)
        for namespace, extent in survey:
            found.append((extent.id, namespace, extent.encode()))
            after_epoch = max(after_epoch, extent.id >> 32)
        free += survey.free
        ends[segment] = survey.end
        after_epoch = max(after_epoch, segment >> 32)
        damaged += survey.num_damaged
        if progress is not None:
            progress(done + 1, len(paths))
    found.sort()
    files.make_directory(fresh)
    catalogue = Catalogue.open(fresh, read_only=False, create=True)
    try:
        for ranges in _batches(free):
            catalogue.commit(Change(abandoned=ranges))
        orphans, used = 0, 0
        for rows in _batches(found):
            additions = []
            for id, namespace, body in rows:
                used += 1
                additions.append(Addition(namespace, decode_extent(id, body), used))
            outcome = catalogue.commit(Change(supersede=True, additions=additions))
            orphans += outcome.accepted.count(False)
        totals = catalogue.commit(Change(ends=ends, sealed=ends)).totals
        catalogue.begin_epoch(after_epoch)
    finally:
        catalogue.close()
    _put_in_place(store, files)
    return Rebuilt(len(paths), totals.extents, totals.blocks, totals.used_bytes, orphans, damaged)


def _put_in_place(store: Path, files: Files) -> None:
    current, fresh, damaged = store / CATALOGUE, store / UNFINISHED, store / DAMAGED
    files.sync_directory(fresh)
    if (current / "data.mdb").exists():
        files.remove_tree(damaged)
        files.rename(current, damaged)
    else:
        files.remove_tree(current)
    files.rename(fresh, current)
    files.sync_directory(store)  # before anything is punched that only the old one may name


def _batches(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    return (rows[at : at + _BATCH] for at in range(0, len(rows), _BATCH))
