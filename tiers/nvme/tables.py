"""Typed access to the catalogue's tables inside one LMDB transaction. Knows no file, no thread.

`Rows` reads. `Book` writes single rows and keeps the totals; what must change together is said in
`edits.py` and `pins.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.index.words import KEY_BYTES, ROOT_KEY, BlockKey
from kvtier.tiers.errors import StoreCorrupt
from kvtier.tiers.nvme.rows import (
    CURE,
    Counters,
    Extent,
    NamespaceRow,
    SegmentRow,
    Table,
    block_row_key,
    decode_block,
    decode_counters,
    decode_extent,
    decode_namespace,
    decode_segment,
    key_number,
    namespace_key,
    number_key,
    pair_key,
    seal,
    unseal,
)

COUNTERS_KEY = b"counters"


@dataclass(frozen=True)
class Span:
    """`count` blocks in a row, from block `position` of an extent on."""

    extent: Extent
    position: int
    count: int


class Rows:
    """Reads. Raises `StoreCorrupt` at a damaged row."""

    def __init__(self, txn: Any, tables: Sequence[Any]) -> None:
        self._txn = txn
        self._tables = tables

    def get(self, table: Table, key: bytes) -> bytes | None:
        """The body under `key`, or None."""
        value = self._txn.get(key, db=self._tables[table])
        return None if value is None else unseal(table, key, value)

    def scan(self, table: Table) -> "list[tuple[bytes, bytes]]":
        """Every `(key, body)` of a small table, in order."""
        return list(self.walk(table))

    def walk(self, table: Table, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """`(key, body)` in order from `start` on. Nothing may be written meanwhile."""
        with self._txn.cursor(db=self._tables[table]) as cursor:
            if not (cursor.set_range(start) if start else cursor.first()):
                return
            for key, value in cursor:
                yield key, unseal(table, key, value)

    def first(self, table: Table, start: bytes = b"") -> tuple[bytes, bytes] | None:
        """The first `(key, body)` from `start` on, or None."""
        return next(self.walk(table, start), None)

    def last_key(self, table: Table, start: bytes, end: bytes) -> bytes | None:
        """The last key of a table that is not below `start` and below `end`, or None."""
        with self._txn.cursor(db=self._tables[table]) as cursor:
            there = cursor.prev() if cursor.set_range(end) else cursor.last()
            if not there or cursor.key() < start:
                return None
            unseal(table, cursor.key(), cursor.value())
            return bytes(cursor.key())

    def num_rows(self, table: Table) -> int:
        """How many rows a table has, duplicates counted each."""
        return int(self._txn.stat(self._tables[table])["entries"])

    def extent(self, id: int) -> Extent | None:
        body = self.get(Table.EXTENTS, number_key(id))
        return None if body is None else decode_extent(id, body)

    def block(self, namespace_id: int, key: bytes) -> tuple[int, int] | None:
        """`(extent, position)` of a block, or None."""
        body = self.get(Table.BLOCKS, block_row_key(namespace_id, key))
        return None if body is None else decode_block(body)

    def heads(self, namespace_id: int, parent: bytes) -> Iterator[int]:
        """The extents whose first block follows `parent`. Nothing may be written meanwhile."""
        key = block_row_key(namespace_id, parent)
        with self._txn.cursor(db=self._tables[Table.HEADS]) as cursor:
            if cursor.set_key(key):
                for value in cursor.iternext_dup():
                    yield key_number(unseal(Table.HEADS, key, value))

    def has_head(self, namespace_id: int, parent: bytes, id: int) -> bool:
        """Whether extent `id` is one of them; however many there are, one look."""
        key = block_row_key(namespace_id, parent)
        with self._txn.cursor(db=self._tables[Table.HEADS]) as cursor:
            return bool(cursor.set_key_dup(key, seal(Table.HEADS, key, number_key(id))))

    def head(self, namespace_id: int, parent: bytes) -> int | None:
        """One of them, or None if there is none."""
        body = self.get(Table.HEADS, block_row_key(namespace_id, parent))
        return None if body is None else key_number(body)

    def last_use(self, id: int) -> int:
        """When an extent was last used, in microseconds (0: not known)."""
        body = self.get(Table.USES, number_key(id))
        return 0 if body is None else key_number(body)

    def counters(self) -> Counters:
        body = self.get(Table.META, COUNTERS_KEY)
        return Counters() if body is None else decode_counters(body)

    def namespace_row(self, number: int) -> NamespaceRow | None:
        body = self.get(Table.NAMESPACES, namespace_key(number))
        return None if body is None else decode_namespace(body)

    def extent_of(self, namespace_id: int, key: BlockKey) -> Extent | None:
        """The extent a block stands in, or None."""
        place = self.place(namespace_id, key)
        return None if place is None else place[0]

    def place(self, namespace_id: int, key: bytes) -> tuple[Extent, int] | None:
        """`(extent, position)` of a live block, or None.

        Raises `StoreCorrupt` if a block's row names what is not in its extent.
        """
        row = self.block(namespace_id, key)
        if row is None:
            return None
        extent = self.extent(row[0])
        if extent is None or row[1] >= extent.live:
            raise StoreCorrupt(f"catalogue: block {key.hex()} and its extent disagree; {CURE}")
        same = extent.namespace_id == namespace_id and extent.key(row[1]) == key
        return (extent, row[1]) if same else None

    def spans(self, number: int, wanted: bytes, now: int) -> Iterator[Span]:
        """Where the leading blocks of a branch stand, `wanted` being their keys end to end.

        Costs two rows an extent, not one a block. Ends at the first block that is not there, that
        has expired or hangs off one that has, or whose rows contradict each other.
        """
        at = 0
        while at < len(wanted):
            span = self.span(number, wanted, at, now)
            if span is None:
                return
            yield span
            at += span.count * KEY_BYTES

    def span(self, number: int, wanted: bytes, at: int, now: int) -> Span | None:
        """As many blocks of `wanted`, from its byte `at` on, as stand in one extent."""
        key = wanted[at : at + KEY_BYTES]
        place = self.place(number, key)
        if place is None:
            return None
        extent, position = place
        served = extent.served(now)
        if position >= served:
            return None
        if at:
            follows = wanted[at - KEY_BYTES : at] == _parent(extent, position)
        else:
            follows = not self._withheld(extent, now)
        if not follows:
            return None
        there = extent.names[position * KEY_BYTES : served * KEY_BYTES]
        return Span(extent, position, _num_equal(there, wanted[at : at + len(there)]))

    def _withheld(self, extent: Extent, now: int) -> bool:
        """Whether the namespace is being deleted, or an ancestor in another extent has expired."""
        namespace = self.namespace_row(extent.namespace_id)
        if namespace is None or namespace.leaving:
            return True
        if not namespace.expiries:
            return False
        while extent.parent != ROOT_KEY:
            place = self.place(extent.namespace_id, extent.parent)
            if place is None or place[1] >= place[0].served(now):
                return True
            extent = place[0]
        return False


def _parent(extent: Extent, position: int) -> bytes:
    return extent.key(position - 1) if position else extent.parent


def _num_equal(there: bytes, wanted: bytes) -> int:
    """How many leading keys are the same in both."""
    if there[: len(wanted)] == wanted:
        return len(wanted) // KEY_BYTES
    starts = range(0, len(wanted), KEY_BYTES)
    return next(i for i, a in enumerate(starts) if there[a:][:KEY_BYTES] != wanted[a:][:KEY_BYTES])


class Book(Rows):
    """Single rows in a write transaction, and the totals that follow from them."""

    def __init__(self, txn: Any, tables: Sequence[Any]) -> None:
        super().__init__(txn, tables)
        self.totals = self.counters()
        self._segments: dict[int, SegmentRow] = {}
        self._namespaces: dict[int, NamespaceRow] = {}

    def put(self, table: Table, key: bytes, body: bytes) -> None:
        self._txn.put(key, seal(table, key, body), db=self._tables[table])

    def put_new(self, table: Table, key: bytes, body: bytes) -> bool:
        """As `put`, unless there is a row already; whether there was none."""
        value = seal(table, key, body)
        return bool(self._txn.put(key, value, overwrite=False, db=self._tables[table]))

    def drop(self, table: Table, key: bytes) -> bool:
        """Delete a row; whether there was one."""
        return bool(self._txn.delete(key, db=self._tables[table]))

    def new_namespace(self, digest: bytes) -> int:
        """Number a namespace that has none yet."""
        self.totals.last_namespace += 1
        self._namespaces[self.totals.last_namespace] = NamespaceRow(digest)
        return self.totals.last_namespace

    def namespace(self, id: int) -> NamespaceRow:
        """The row of a namespace, to change in place; `write_totals` writes it."""
        if id not in self._namespaces:
            self._namespaces[id] = self.namespace_row(id) or NamespaceRow(bytes(KEY_BYTES))
        return self._namespaces[id]

    def namespace_row(self, number: int) -> NamespaceRow | None:
        return self._namespaces.get(number) or super().namespace_row(number)

    def drop_namespace(self, id: int) -> None:
        """Forget the row of a namespace that holds nothing."""
        self._namespaces.pop(id, None)
        self.drop(Table.NAMESPACES, namespace_key(id))

    def segment(self, id: int) -> SegmentRow:
        """The row of a segment, to change in place; `write_totals` writes it."""
        if id not in self._segments:
            body = self.get(Table.SEGMENTS, number_key(id))
            self._segments[id] = SegmentRow() if body is None else decode_segment(body)
        return self._segments[id]

    def touched_segments(self) -> Mapping[int, SegmentRow]:
        return self._segments

    def write_totals(self) -> None:
        """Write the rows that were changed in place."""
        for number, namespace in self._namespaces.items():
            self.put(Table.NAMESPACES, namespace_key(number), namespace.encode())
        self.put(Table.META, COUNTERS_KEY, self.totals.encode())

    def keep(self, extent: Extent) -> None:
        """Write an extent's row, new or changed."""
        self.put(Table.EXTENTS, number_key(extent.id), extent.encode())

    def used(self, id: int, used: int) -> None:
        """Record a use of an extent; an earlier one than is known changes nothing."""
        before = self.last_use(id)
        if used > before:
            self.put(Table.USES, number_key(id), number_key(used))
            if self.drop(Table.AGE, pair_key(before, id)):
                self.put(Table.AGE, pair_key(used, id), b"")

    def order(self, extent: Extent) -> None:
        """An extent stands in `age` exactly when its tail has no child and is not pinned."""
        key = pair_key(self.last_use(extent.id), extent.id)
        held = extent.pinned == extent.live
        if held or self.head(extent.namespace_id, extent.tail) is not None:
            self.drop(Table.AGE, key)
        else:
            self.put(Table.AGE, key, b"")

    def count(self, extent: Extent, blocks: int, nbytes: int, pinned_bytes: int = 0) -> None:
        """Add to every total that an extent is part of."""
        namespace = self.namespace(extent.namespace_id)
        self.totals.blocks += blocks
        self.totals.used_bytes += nbytes
        self.totals.pinned_bytes += pinned_bytes
        self.segment(extent.segment).live_bytes += nbytes
        namespace.blocks += blocks
        namespace.nbytes += nbytes
        namespace.pinned_bytes += pinned_bytes
