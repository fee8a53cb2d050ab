"""One write transaction on the catalogue: what changes together. Knows no file and no thread.

Keeps what the tables promise each other: a block row for every live block, a `heads` row under
every parent, an `age` row for exactly the extents whose tail has no child, totals that add up.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from kvtier.index.words import ROOT_KEY, BlockKey
from kvtier.tiers.nvme.rows import (
    WHOLE_FILE,
    Counters,
    Extent,
    Freed,
    NamespaceRow,
    SegmentRow,
    Table,
    block_row_key,
    decode_block,
    decode_counters,
    decode_extent,
    decode_namespace,
    decode_segment,
    encode_block,
    key_number,
    key_pair,
    namespace_key,
    number_key,
    pair_key,
    seal,
    unseal,
)

COUNTERS_KEY = b"counters"


class Rows:
    """Typed reads inside one LMDB transaction. Raises `StoreCorrupt` at a damaged row."""

    def __init__(self, txn: Any, tables: Mapping[Table, Any]) -> None:
        self._txn = txn
        self._tables = tables

    def get(self, table: Table, key: bytes) -> bytes | None:
        """The body under `key`, or None."""
        value = self._txn.get(key, db=self._tables[table])
        return None if value is None else unseal(table, key, value)

    def extent(self, id: int) -> Extent | None:
        body = self.get(Table.EXTENTS, number_key(id))
        return None if body is None else decode_extent(id, body)

    def block(self, namespace_id: int, key: bytes) -> tuple[int, int] | None:
        """`(extent, position)` of a block, or None."""
        body = self.get(Table.BLOCKS, block_row_key(namespace_id, key))
        return None if body is None else decode_block(body)

    def heads(self, namespace_id: int, parent: bytes) -> list[int]:
        """The extents whose first block follows `parent`."""
        key = block_row_key(namespace_id, parent)
        with self._txn.cursor(db=self._tables[Table.HEADS]) as cursor:
            found = cursor.iternext_dup() if cursor.set_key(key) else ()
            return [key_number(unseal(Table.HEADS, key, value)) for value in found]

    def counters(self) -> Counters:
        body = self.get(Table.META, COUNTERS_KEY)
        return Counters() if body is None else decode_counters(body)

    def scan(self, table: Table) -> "list[tuple[bytes, bytes]]":
        """Every `(key, body)` of a small table, in order."""
        with self._txn.cursor(db=self._tables[table]) as cursor:
            return [(bytes(key), unseal(table, key, value)) for key, value in cursor]


class Edit(Rows):
    """Changes inside one write transaction. Call `finish` last; without it totals are stale."""

    def __init__(self, txn: Any, tables: Mapping[Table, Any]) -> None:
        super().__init__(txn, tables)
        self.totals = self.counters()
        self.freed: list[Freed] = []
        self.num_removed = 0
        self._segments: dict[int, SegmentRow] = {}
        self._namespaces: dict[int, NamespaceRow] = {}

    def put(self, table: Table, key: bytes, body: bytes) -> None:
        self._txn.put(key, seal(table, key, body), db=self._tables[table])

    def drop(self, table: Table, key: bytes) -> None:
        self._txn.delete(key, db=self._tables[table])

    def new_namespace(self, digest: bytes) -> int:
        """Number a namespace that has none yet."""
        self.totals.next_namespace += 1
        self._namespaces[self.totals.next_namespace] = NamespaceRow(digest)
        return self.totals.next_namespace

    def segment(self, id: int) -> SegmentRow:
        """The row of a segment, to change in place; `finish` writes it."""
        if id not in self._segments:
            body = self.get(Table.SEGMENTS, number_key(id))
            self._segments[id] = SegmentRow() if body is None else decode_segment(body)
        return self._segments[id]

    def add(self, extent: Extent) -> bool:
        """Publish an extent. False (nothing changed) if its parent is missing or a block is not."""
        space = extent.namespace_id
        parent = self._extent_of(space, extent.parent)
        if parent is None and extent.parent != ROOT_KEY:
            return False
        if any(self.block(space, key) is not None for key in extent.keys):
            return False
        for position, key in enumerate(extent.keys):
            self.put(Table.BLOCKS, block_row_key(space, key), encode_block(extent.id, position))
        if extent.parent != ROOT_KEY:
            self.put(Table.HEADS, block_row_key(space, extent.parent), number_key(extent.id))
        self._store(extent)
        if parent is not None:
            self._order(parent)
        self._count(extent, extent.live, extent.nbytes)
        self.totals.extents += 1
        return True

    def trim(self, extent: Extent, live: int) -> None:
        """Keep only the first `live` blocks (0: forget the extent) and queue the rest as freed.

        Does not look for children: the caller removes those too, or has none.
        """
        space = extent.namespace_id
        for key in extent.keys[live : extent.live]:
            self.drop(Table.BLOCKS, block_row_key(space, key))
        self.drop(Table.AGE, pair_key(extent.last_use, extent.id))
        start, end = extent.end(live), extent.end(extent.live)
        self.num_removed += extent.live - live
        self._count(extent, live - extent.live, start - end)
        self.queue(Freed(extent.id, extent.segment, start, end - start))
        if live:
            self._store(replace(extent, live=live))
            return
        self.drop(Table.EXTENTS, number_key(extent.id))
        self.totals.extents -= 1
        if extent.parent != ROOT_KEY:
            parent_key = block_row_key(space, extent.parent)
            value = seal(Table.HEADS, parent_key, number_key(extent.id))
            self._txn.delete(parent_key, value, db=self._tables[Table.HEADS])
            parent = self._extent_of(space, extent.parent)
            if parent is not None:  # whoever used the child used the parent
                self._use(parent, max(parent.last_use, extent.last_use))

    def touch(self, uses: Mapping[int, int]) -> None:
        """Record last uses, extent by extent."""
        for id, used in uses.items():
            extent = self.extent(id)
            if extent is not None and used > extent.last_use:
                self._use(extent, used)

    def evict(self, nbytes: int, protected: Collection[int]) -> None:
        """Free at least `nbytes` if that much is evictable: oldest extents, from their tails.

        Never touches an extent in `protected`, nor a block that has a child.
        """
        freed, skip = 0, set(protected)
        while freed < nbytes:
            extent = self._oldest(skip)
            if extent is None:
                return
            live, end = extent.live, extent.end(extent.live)
            while live and freed + end - extent.end(live) < nbytes:
                if self.heads(extent.namespace_id, extent.keys[live - 1]):
                    break
                live -= 1
            freed += end - extent.end(live)
            if live == extent.live:
                skip.add(extent.id)
            else:
                self.trim(extent, live)

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
        for id, segment in self._segments.items():
            if segment.sealed and not segment.live_bytes:
                self.drop(Table.SEGMENTS, number_key(id))
                self.queue(Freed(0, id, WHOLE_FILE, 0))
            else:
                self.put(Table.SEGMENTS, number_key(id), segment.encode())
        for number, namespace in self._namespaces.items():
            self.put(Table.NAMESPACES, namespace_key(number), namespace.encode())
        self.put(Table.META, COUNTERS_KEY, self.totals.encode())

    def _extent_of(self, namespace_id: int, key: BlockKey) -> Extent | None:
        place = self.block(namespace_id, key)
        return None if place is None else self.extent(place[0])

    def _oldest(self, skip: Collection[int]) -> Extent | None:
        with self._txn.cursor(db=self._tables[Table.AGE]) as cursor:
            for key, value in cursor:
                unseal(Table.AGE, key, value)
                id = key_pair(key)[1]
                if id not in skip:
                    return self.extent(id)
        return None

    def _store(self, extent: Extent) -> None:
        self.put(Table.EXTENTS, number_key(extent.id), extent.encode())
        self._order(extent)

    def _use(self, extent: Extent, used: int) -> None:
        self.drop(Table.AGE, pair_key(extent.last_use, extent.id))
        self._store(replace(extent, last_use=used))

    def _order(self, extent: Extent) -> None:
        """An extent stands in `age` exactly when its tail has no child."""
        key = pair_key(extent.last_use, extent.id)
        if self.heads(extent.namespace_id, extent.tail):
            self.drop(Table.AGE, key)
        else:
            self.put(Table.AGE, key, b"")

    def _count(self, extent: Extent, blocks: int, nbytes: int) -> None:
        self.totals.blocks += blocks
        self.totals.used_bytes += nbytes
        self.segment(extent.segment).live_bytes += nbytes
        namespace = self._namespace(extent.namespace_id)
        namespace.blocks += blocks
        namespace.nbytes += nbytes

    def _namespace(self, id: int) -> NamespaceRow:
        if id not in self._namespaces:
            body = self.get(Table.NAMESPACES, namespace_key(id))
            self._namespaces[id] = decode_namespace(body or bytes(48))
        return self._namespaces[id]
