"""What an export takes from a store and in which order. Knows the catalogue, reads no record.

Memory holds the ids of the extents that wait for their turn, and for prefixes those of all that go.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.index.words import ROOT_KEY, BlockKey
from kvtier.tiers.nvme.rows import (
    Extent,
    Table,
    decode_extent,
    decode_pin,
    key_number,
    key_pin,
)
from kvtier.tiers.nvme.tables import Rows


@dataclass(frozen=True)
class Selection:
    """What to export: of these namespaces (digests; none named: all), these prefixes, and those
    pinned under these labels.

    A prefix is named by its last block's key and takes its ancestors. Neither prefix nor label
    named: everything.
    """

    namespaces: frozenset[bytes] = frozenset()
    prefixes: tuple[BlockKey, ...] = ()
    labels: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = [
            *(f"namespace {digest.hex()}" for digest in sorted(self.namespaces)),
            *(f"prefix {key.hex()}" for key in self.prefixes),
            *(f"label {label!r}" for label in self.labels),
        ]
        return ", ".join(named) or "everything"


EVERYTHING = Selection()


class Plan:
    """Which extents go, how many leading blocks of each, and in which order."""

    def __init__(
        self, rows: Rows, namespaces: dict[int, bytes], selection: Selection, now: int
    ) -> None:
        self._rows = rows
        self._now = now
        self.selection = selection
        self.namespaces = namespaces
        self.missing = sorted(d.hex() for d in selection.namespaces - set(namespaces.values()))
        self.num_blocks = 0
        self._whole = not selection.prefixes and not selection.labels
        self._counts: dict[int, int] = {}
        self._stack: list[int] = []
        if self._whole:
            self._take_all()
        else:
            self._take_prefixes(selection.prefixes)
            self._take_pinned(selection.labels)
            self.num_blocks = sum(self._counts.values())
        self._stack.sort(reverse=True)

    def take(self) -> tuple[Extent, int] | None:
        """The next extent and how many of its leading blocks go; None at the end.

        Raises `StoreCorrupt` if its row is damaged: what hangs off it is left out.
        """
        while self._stack:
            id = self._stack.pop()
            extent = self._rows.extent(id)
            if extent is not None:
                served = extent.served(self._now)
                return extent, served if self._whole else min(served, self._counts[id])
        return None

    def follow(self, extent: Extent, count: int) -> None:
        """The first `count` blocks of `extent` went: what hangs off them is next."""
        children = [
            id
            for key in extent.keys[:count]
            for id in self._rows.heads(extent.namespace_id, key)
            if self._whole or id in self._counts
        ]
        self._stack += reversed(children)

    def _take_all(self) -> None:
        for key, body in self._rows.walk(Table.EXTENTS):
            extent = decode_extent(key_number(key), body)
            if extent.namespace_id in self.namespaces:
                self.num_blocks += extent.live
                if extent.parent == ROOT_KEY:
                    self._stack.append(extent.id)

    def _take_prefixes(self, prefixes: Sequence[BlockKey]) -> None:
        for prefix in prefixes:
            if not any(self._climb(number, prefix) for number in self.namespaces):
                self.missing.append(prefix.hex())

    def _take_pinned(self, labels: Sequence[str]) -> None:
        found = set()
        for key, body in self._rows.walk(Table.PINS) if labels else ():
            number, leaf, label = key_pin(key)
            until = decode_pin(body).expires_at
            if label in labels and number in self.namespaces and not 0 < until <= self._now:
                found.add(label)
                self._climb(number, leaf)
        self.missing += sorted(set(labels) - found)

    def _climb(self, number: int, key: BlockKey) -> bool:
        """Take the path that ends in `key`; False if the namespace does not have all of it."""
        while key != ROOT_KEY:
            place = self._rows.place(number, key)
            if place is None or place[1] >= place[0].served(self._now):
                return False
            extent, position = place
            known = extent.id in self._counts
            self._counts[extent.id] = max(self._counts.get(extent.id, 0), position + 1)
            if known:
                return True
            key = extent.parent
            if key == ROOT_KEY:
                self._stack.append(extent.id)
        return True
