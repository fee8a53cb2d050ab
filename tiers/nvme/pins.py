"""Pins in one write transaction: who holds which blocks against eviction, and how many bytes.

Knows nothing of why a block is pinned or when it leaves; `edits.py` lifts what goes with a block.
A pin of a block holds the whole path to it: in every extent on the way up, the leading blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvtier.index.words import ROOT_KEY, BlockKey
from kvtier.tiers.errors import StoreCorrupt
from kvtier.tiers.nvme.rows import (
    Due,
    Extent,
    PinRow,
    Table,
    decode_pin,
    due_key,
    hold_key,
    key_hold,
    key_pin,
    pin_key,
)
from kvtier.tiers.nvme.tables import Book, Rows


@dataclass(frozen=True)
class PinName:
    """What makes two pins the same."""

    namespace_id: int
    leaf: BlockKey
    label: str

    @property
    def key(self) -> bytes:
        """Key of its row in `pins`."""
        return pin_key(self.namespace_id, self.leaf, self.label)


def path(rows: Rows, namespace_id: int, leaf: BlockKey) -> Iterator[tuple[Extent, int]]:
    """`(extent, leading blocks)` from a block up to its root. Raises `StoreCorrupt` at a gap."""
    key = leaf
    while key != ROOT_KEY:
        place = rows.place(namespace_id, key)
        if place is None:
            raise StoreCorrupt(f"catalogue: block {key.hex()} has descendants and no row")
        extent, position = place
        yield extent, position + 1
        key = extent.parent


def path_bytes(rows: Rows, name: PinName) -> int:
    """How many bytes a pin holds, whoever else holds them too."""
    extents = path(rows, name.namespace_id, name.leaf)
    return sum(extent.end(count) - extent.offset for extent, count in extents)


def wanted_bytes(rows: Rows, name: PinName) -> int:
    """How many bytes a pin would hold that no pin holds yet."""
    return sum(
        max(0, extent.end(count) - extent.end(extent.pinned))
        for extent, count in path(rows, name.namespace_id, name.leaf)
    )


def pins_of(rows: Rows, namespace_id: int, leaf: BlockKey | None = None) -> list[PinName]:
    """The pins of one block, or of all blocks of a namespace."""
    prefix = pin_key(namespace_id, leaf or b"", "")
    names = []
    for key, _ in rows.walk(Table.PINS, prefix):
        if not key.startswith(prefix):
            break
        names.append(PinName(*key_pin(key)))
    return names


def pin_row(rows: Rows, name: PinName) -> PinRow | None:
    body = rows.get(Table.PINS, name.key)
    return None if body is None else decode_pin(body)


def pin(book: Book, name: PinName, expires_at: int) -> None:
    """Pin a block that is there until `expires_at` (microseconds; 0: until it is lifted).

    The same pin again only takes the new time.
    """
    before = pin_row(book, name)
    if before is None:
        book.totals.last_pin += 1
        row = PinRow(book.totals.last_pin, expires_at)
        for extent, count in path(book, name.namespace_id, name.leaf):
            book.put(Table.HOLDS, hold_key(extent.id, count, row.id), b"")
            _settle(book, extent)
    else:
        row = PinRow(before.id, expires_at)
        book.drop(Table.DUE, due_key(before.expires_at, Due.PIN, before.id))
    book.put(Table.PINS, name.key, row.encode())
    if expires_at:
        book.put(Table.DUE, due_key(expires_at, Due.PIN, row.id), name.key)


def unpin(book: Book, name: PinName) -> bool:
    """Lift a pin: what nothing else holds may be evicted again. False if there is none."""
    row = pin_row(book, name)
    if row is None:
        return False
    book.drop(Table.PINS, name.key)
    book.drop(Table.DUE, due_key(row.expires_at, Due.PIN, row.id))
    for extent, count in path(book, name.namespace_id, name.leaf):
        book.drop(Table.HOLDS, hold_key(extent.id, count, row.id))
        _settle(book, extent)
    return True


def _settle(book: Book, extent: Extent) -> None:
    """Bring an extent's `pinned`, the totals and the order of eviction in line with its holds."""
    body = book.last_key(Table.HOLDS, hold_key(extent.id, 0, 0), hold_key(extent.id + 1, 0, 0))
    pinned = 0 if body is None else key_hold(body)[1]
    if pinned == extent.pinned:
        return
    changed = replace(extent, pinned=pinned)
    book.keep(changed)
    book.count(extent, 0, 0, changed.pinned_bytes - extent.pinned_bytes)
    book.order(changed)
