"""One write transaction on the catalogue: what changes together. Knows no file and no thread.

Keeps what the tables promise each other: a block row for every live block, a `heads` row under
every parent, an `age` row for exactly the extents whose tail has no child, totals that add up.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvtier.index.words import ROOT_KEY
from kvtier.tiers.errors import StoreCorrupt
from kvtier.tiers.nvme.rows import (
    WHOLE_FILE,
    Extent,
    Freed,
    Table,
    block_row_key,
    encode_block,
    key_pair,
    number_key,
    pair_key,
    seal,
)
from kvtier.tiers.nvme.tables import Book


class Edit(Book):
    """Changes inside one write transaction. Call `finish` last; without it totals are stale."""

    def __init__(self, txn: Any, tables: Sequence[Any]) -> None:
        super().__init__(txn, tables)
        self.freed: list[Freed] = []
        self.num_removed = 0

    def add(self, extent: Extent, used: int) -> bool:
        """Publish an extent. False (nothing changed) if its parent is missing or a block is not."""
        space = extent.namespace_id
        parent = self.extent_of(space, extent.parent) if extent.parent != ROOT_KEY else None
        if parent is None and extent.parent != ROOT_KEY:
            return False
        keys = extent.keys[: extent.live]
        if any(self.block(space, key) is not None for key in keys):
            return False
        for position, key in enumerate(keys):
            self.put(Table.BLOCKS, block_row_key(space, key), encode_block(extent.id, position))
        if parent is not None:
            self.put(Table.HEADS, block_row_key(space, extent.parent), number_key(extent.id))
            if parent.tail == extent.parent:
                self.drop(Table.AGE, pair_key(self.last_use(parent.id), parent.id))
        self.put(Table.USES, number_key(extent.id), number_key(used))
        self.put(Table.AGE, pair_key(used, extent.id), b"")
        self.keep(extent)
        self.count(extent, extent.live, extent.nbytes)
        self.totals.extents += 1
        return True

    def supersede(self, extent: Extent) -> None:
        """Remove the blocks of `extent` from older records, with all that hangs off them there.

        Changes nothing if the extent's parent is missing.
        """
        space, parent = extent.namespace_id, extent.parent
        if parent != ROOT_KEY and self.extent_of(space, parent) is None:
            return
        for key in extent.keys[: extent.live]:
            row = self.block(space, key)
            if row is not None:
                self.quarantine(*row)

    def trim(self, extent: Extent, live: int) -> None:
        """Keep only the first `live` blocks (0: forget the extent) and queue the rest as freed.

        Does not look for children: the caller removes those too, or has none.
        """
        space, used = extent.namespace_id, self.last_use(extent.id)
        for key in extent.keys[live : extent.live]:
            self.drop(Table.BLOCKS, block_row_key(space, key))
        start, end = extent.end(live), extent.end(extent.live)
        self.num_removed += extent.live - live
        self.count(extent, live - extent.live, start - end)
        self.queue(Freed(extent.id, extent.segment, start, end - start))
        if live:
            shorter = extent.cut(live)
            self.keep(shorter)
            self.order(shorter)
            return
        self.drop(Table.AGE, pair_key(used, extent.id))
        self.drop(Table.USES, number_key(extent.id))
        self.drop(Table.EXTENTS, number_key(extent.id))
        self.totals.extents -= 1
        if extent.parent != ROOT_KEY:
            parent_key = block_row_key(space, extent.parent)
            value = seal(Table.HEADS, parent_key, number_key(extent.id))
            self._txn.delete(parent_key, value, db=self._tables[Table.HEADS])
            parent = self.extent_of(space, extent.parent)
            if parent is not None:  # whoever used the child used the parent
                self.used(parent.id, used)
                if parent.tail == extent.parent:
                    self.order(parent)

    def touch(self, uses: Mapping[int, int]) -> None:
        """Record last uses, extent by extent."""
        for id, used in uses.items():
            if self.get(Table.USES, number_key(id)) is not None:
                self.used(id, used)

    def evict(self, nbytes: int, protected: Collection[int]) -> None:
        """Free at least `nbytes` if that much is evictable: oldest extents, from their tails.

        Never touches an extent in `protected`, nor a block that has a child.
        """
        freed, start = 0, (0, 0)
        while freed < nbytes:
            oldest = self._oldest(start, protected)
            if oldest is None:
                return
            extent = self.extent(oldest[1])
            live = 0 if extent is None else self._shortest(extent, nbytes - freed)
            if extent is None or live == extent.live:
                raise StoreCorrupt(f"catalogue: extent {oldest[1]} should not stand in age")
            end = extent.end(extent.live)
            freed += end - extent.end(live)
            self.trim(extent, live)
            # What stood before the victim is protected. The parent has its last use or a later
            # one, so it can have come in before the victim only at the very same instant.
            start = (oldest[0], 0)

    def quarantine(self, id: int, position: int) -> None:
        """Remove an extent's blocks from `position` on, and everything that hangs off them."""
        rest = [(id, position)]
        while rest:
            id, position = rest.pop()
            extent = self.extent(id)
            if extent is None or position >= extent.live:
                continue
            for key in extent.keys[position : extent.live]:
                rest += ((child, 0) for child in self.heads(extent.namespace_id, key))
            self.trim(extent, position)

    def queue(self, freed: Freed) -> None:
        """Remember a range to be punched, until `clear`."""
        self.put(Table.FREES, pair_key(freed.segment, freed.offset), number_key(freed.length))
        self.freed.append(freed)

    def clear(self, freed: Freed) -> None:
        """The range is back with the file system."""
        self.drop(Table.FREES, pair_key(freed.segment, freed.offset))

    def finish(self) -> None:
        """Write totals, and give up closed segments in which nothing lives."""
        for id, segment in self.touched_segments().items():
            if segment.sealed and not segment.live_bytes:
                self.drop(Table.SEGMENTS, number_key(id))
                self.queue(Freed(0, id, WHOLE_FILE, 0))
            else:
                self.put(Table.SEGMENTS, number_key(id), segment.encode())
        self.write_totals()

    def _shortest(self, extent: Extent, nbytes: int) -> int:
        """How many blocks to keep to free `nbytes`: a pinned block stays, one with a child too."""
        live, end = extent.live, extent.end(extent.live)
        while live > extent.pinned and end - extent.end(live) < nbytes:
            if self.head(extent.namespace_id, extent.key(live - 1)) is not None:
                break
            live -= 1
        return live

    def _oldest(self, start: tuple[int, int], protected: Collection[int]) -> tuple[int, int] | None:
        """The first `(last use, extent)` in `age` from `start` on that is not protected."""
        for key, _ in self.walk(Table.AGE, pair_key(*start)):
            if key_pair(key)[1] not in protected:
                return key_pair(key)
        return None
