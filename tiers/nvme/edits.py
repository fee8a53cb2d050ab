"""One write transaction on the catalogue: what changes together. Knows no file and no thread.

Keeps what the tables promise each other: a block row for every live block, a `heads` row under
every parent, an `age` row for exactly the extents whose tail has no child and no pin, a `due` row
for every expiry, totals that add up.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtier.index.words import ROOT_KEY
from kvtier.tiers.errors import StoreCorrupt
from kvtier.tiers.nvme.pins import PinName, pins_of, unpin
from kvtier.tiers.nvme.rows import (
    WHOLE_FILE,
    Due,
    Expiry,
    Extent,
    Freed,
    Table,
    block_row_key,
    decode_block,
    due_key,
    encode_block,
    key_due,
    key_pair,
    key_pin,
    namespace_key,
    number_key,
    pair_key,
    seal,
)
from kvtier.tiers.nvme.tables import Book

CONDEMNED = 0
"""An expiry's time: the blocks failed verification."""

FORGOTTEN = 1
"""An expiry's time: an operator wants the blocks gone now."""

_ALL = 1 << 62


class Edit(Book):
    """Changes inside one write transaction. Call `finish` last; without it totals are stale."""

    def __init__(self, txn: Any, tables: Sequence[Any]) -> None:
        super().__init__(txn, tables)
        self.freed: list[Freed] = []
        self.num_removed = 0
        self.num_quarantined = 0
        self.num_expired = 0
        self.num_pins_lost = 0

    def add(self, extent: Extent, used: int) -> bool:
        """Publish an extent. False (nothing changed) if its parent is missing or a block is not."""
        space = extent.namespace_id
        parent = self.extent_of(space, extent.parent) if extent.parent != ROOT_KEY else None
        if parent is None and extent.parent != ROOT_KEY:
            return False
        if not self._add_blocks(space, extent):
            return False
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

    def _add_blocks(self, space: int, extent: Extent) -> bool:
        """A row for each live block; none, and False, if one of them has a row already."""
        keys = extent.keys[: extent.live]
        for position, key in enumerate(keys):
            if not self.put_new(
                Table.BLOCKS, block_row_key(space, key), encode_block(extent.id, position)
            ):
                self.block(space, key)  # raises if that row is damaged
                for mine in keys[:position]:
                    self.drop(Table.BLOCKS, block_row_key(space, mine))
                return False
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
                self._remove(*row, limit=_ALL)

    def trim(self, extent: Extent, live: int) -> None:
        """Keep only the first `live` blocks (0: forget the extent) and queue the rest as freed.

        What was said of the others, pins and expiries, goes with them. Does not look for children:
        the caller removes those first, or there are none.
        """
        if extent.pinned > live:
            extent = self._lift_from(extent, live)
        space, used = extent.namespace_id, self.last_use(extent.id)
        self._forget_expiries(extent, [e for e in extent.expiries if e.position >= live])
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

    def lift_and_evict(self, nbytes: int) -> None:
        """As `evict`, and what is pinned too if it must be: the pins of least use go first."""
        goal = self._freed_bytes() + nbytes
        self.evict(nbytes, ())
        pins = [PinName(*key_pin(key)) for key, _ in self.scan(Table.PINS)]
        for name in sorted(pins, key=self._pin_use):
            if self._freed_bytes() >= goal:
                return
            unpin(self, name)
            self.num_pins_lost += 1
            self.evict(goal - self._freed_bytes(), ())

    def expire(self, id: int, position: int, at: int) -> None:
        """Serve nothing of an extent from `position` on, nor what hangs off it, once it is `at`.

        An expiry is never put off: the earliest word counts. `sweep` removes the blocks.
        """
        extent = self.extent(id)
        if extent is None or position >= extent.live:
            return
        if any(e.position <= position and e.at <= at for e in extent.expiries):
            return
        later = [e for e in extent.expiries if e.position >= position and e.at >= at]
        self._forget_expiries(extent, later)
        kept = [e for e in extent.expiries if e not in later] + [Expiry(position, at)]
        kept.sort(key=lambda expiry: expiry.position)
        self.put(Table.DUE, due_key(at, Due.EXTENT, id), b"")
        self.namespace(extent.namespace_id).expiries += 1
        self.keep(replace(extent, expiries=tuple(kept)))

    def leave(self, number: int) -> None:
        """Serve nothing of a namespace from now on; `sweep` removes its blocks."""
        self.namespace(number).leaving = True
        self.put(Table.DUE, due_key(CONDEMNED, Due.NAMESPACE, number), b"")

    def sweep(self, now: int, limit: int) -> None:
        """Do what is due at `now`, in about `limit` steps of an extent or a pin each.

        Children go before parents, so what is left over for the next time is prefix-closed.
        """
        while limit > 0:
            due = self.first(Table.DUE)
            if due is None or key_due(due[0])[0] > now:
                return
            at, kind, id = key_due(due[0])
            before = self.num_removed
            if kind is Due.PIN:
                unpin(self, PinName(*key_pin(due[1])))
                limit -= 1
            elif kind is Due.EXTENT:
                limit -= self._remove(id, self._expired_from(id, at), limit)
            else:
                limit -= self._remove_some(id, limit)
            if kind is Due.EXTENT and at == CONDEMNED:
                self.num_quarantined += self.num_removed - before
            else:
                self.num_expired += self.num_removed - before

    @property
    def next_due(self) -> int | None:
        """When `sweep` has something to do next, in microseconds."""
        due = self.first(Table.DUE)
        return None if due is None else key_due(due[0])[0]

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

    def _freed_bytes(self) -> int:
        return sum(freed.length for freed in self.freed)

    def _pin_use(self, name: PinName) -> int:
        place = self.place(name.namespace_id, name.leaf)
        return 0 if place is None else self.last_use(place[0].id)

    def _lift_from(self, extent: Extent, live: int) -> Extent:
        """Lift the pins of all blocks of an extent from `live` on; returns it as it is then."""
        for position in range(live, extent.pinned):
            for name in pins_of(self, extent.namespace_id, extent.key(position)):
                unpin(self, name)
                self.num_pins_lost += 1
        lifted = self.extent(extent.id)
        if lifted is None or lifted.pinned > live:
            raise StoreCorrupt(f"catalogue: extent {extent.id} is held by a pin that is not there")
        return lifted

    def _forget_expiries(self, extent: Extent, expiries: Sequence[Expiry]) -> None:
        for expiry in expiries:
            self.drop(Table.DUE, due_key(expiry.at, Due.EXTENT, extent.id))
            self.namespace(extent.namespace_id).expiries -= 1

    def _expired_from(self, id: int, at: int) -> int:
        extent = self.extent(id)
        for expiry in () if extent is None else extent.expiries:
            if expiry.at == at:
                return expiry.position
        raise StoreCorrupt(f"catalogue: extent {id} does not say that it expires at {at}")

    def _remove(self, id: int, position: int, limit: int) -> int:
        """Remove an extent's blocks from `position` on and all that hangs off them, leaves first.

        Stops after `limit` extents; returns how many there were.
        """
        done, stack = 0, [(id, position, _ALL)]  # extent, first block to go, blocks still to ask
        while stack and done < limit:
            id, start, at = stack.pop()
            extent = self.extent(id)
            if extent is None:
                raise StoreCorrupt(f"catalogue: extent {id} is named and is not there")
            at = min(at, extent.live)
            child = None
            while at > start and child is None:
                child = self.head(extent.namespace_id, extent.key(at - 1))
                at -= child is None
            if child is None:
                self.trim(extent, start)
                done += 1
            else:
                stack += (id, start, at), (child, 0, _ALL)
        return done

    def _remove_some(self, number: int, limit: int) -> int:
        """Remove blocks of a namespace, or the namespace if it has none left."""
        prefix = namespace_key(number)
        row = self.first(Table.BLOCKS, prefix)
        if row is not None and row[0].startswith(prefix):
            return self._remove(decode_block(row[1])[0], 0, limit)
        self.drop(Table.DUE, due_key(CONDEMNED, Due.NAMESPACE, number))
        self.drop_namespace(number)
        return 1

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
