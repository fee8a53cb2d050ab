"""The part of `check_store` about pins, holds, expiries and what is due. Reads rows only.

Told of every extent once, in any order, it holds no extent: what it keeps grows with the pins and
expiries, not with the store.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from kvtier.tiers.errors import StoreCorrupt
from kvtier.tiers.nvme.edits import CONDEMNED
from kvtier.tiers.nvme.pins import PinName, path
from kvtier.tiers.nvme.rows import (
    Due,
    Extent,
    Table,
    decode_namespace,
    decode_pin,
    due_key,
    hold_key,
    key_hold,
    key_namespace,
    key_pin,
)
from kvtier.tiers.nvme.tables import Rows


class CustodyCheck:
    """Compares the tables of custody with the extents: `extent` for each, then `problems`."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._most: dict[int, int] = {}
        self._due: dict[bytes, bytes] = {}
        self._pinned: Counter[int] = Counter()
        self._expiries: Counter[int] = Counter()
        self._wrong: list[str] = []
        self._read_pins()

    def extent(self, extent: Extent) -> None:
        """Take in one extent that has a row."""
        self._pinned[extent.namespace_id] += extent.pinned_bytes
        self._expiries[extent.namespace_id] += len(extent.expiries)
        for expiry in extent.expiries:
            self._due[due_key(expiry.at, Due.EXTENT, extent.id)] = b""
        if extent.pinned != self._most.get(extent.id, 0):
            self._wrong.append(f"record {extent.id:x}: what is pinned of it is not what pins hold")
        inside = all(expiry.position < extent.live for expiry in extent.expiries)
        steps = pairwise(extent.expiries)
        falling = all(a.position < b.position and a.at > b.at for a, b in steps)
        if not inside or not falling:
            self._wrong.append(f"record {extent.id:x}: its expiries contradict each other")

    def problems(self) -> Iterator[str]:
        """What is wrong, one line each, once every extent was told."""
        yield from self._wrong
        for key, body in self._rows.walk(Table.NAMESPACES):
            number, row = key_namespace(key), decode_namespace(body)
            if row.leaving:
                self._due[due_key(CONDEMNED, Due.NAMESPACE, number)] = b""
            if (row.pinned_bytes, row.expiries) != (self._pinned[number], self._expiries[number]):
                yield f"namespace {row.digest.hex()[:16]}: its pins or expiries are miscounted"
        if self._rows.counters().pinned_bytes != self._pinned.total():
            yield "catalogue: pinned bytes are miscounted"
        wrong = dict(self._rows.walk(Table.DUE)).items() ^ self._due.items()
        if wrong:
            yield f"catalogue: {len(wrong)} rows of due are wrong or missing"

    def _read_pins(self) -> None:
        expected: set[bytes] = set()
        last = self._rows.counters().last_pin
        for key, body in self._rows.walk(Table.PINS):
            name, row = PinName(*key_pin(key)), decode_pin(body)
            if row.id > last:
                self._wrong.append(f"pin {name.label!r}: has a number that was not given yet")
            if row.expires_at:
                self._due[due_key(row.expires_at, Due.PIN, row.id)] = key
            try:
                for extent, count in path(self._rows, name.namespace_id, name.leaf):
                    expected.add(hold_key(extent.id, count, row.id))
            except StoreCorrupt as error:
                self._wrong.append(f"pin {name.label!r}: {error}")
        found = {key for key, _ in self._rows.walk(Table.HOLDS)}
        if found != expected:
            self._wrong.append(f"catalogue: {len(found ^ expected)} rows of holds are wrong")
        for id, count, _ in map(key_hold, found):
            self._most[id] = max(count, self._most.get(id, 0))
