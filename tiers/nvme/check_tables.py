"""Do the catalogue's tables agree with each other? Knows no record and reads no segment.

Goes once through the extents and asks every other table for the rows that must follow from each.
Where a table then holds just as many rows, it holds no other; so a store of a million blocks is
checked in little memory.
"""

from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.index.words import ROOT_KEY
from kvtier.tiers.errors import StoreCorrupt
from kvtier.tiers.nvme.check_custody import CustodyCheck
from kvtier.tiers.nvme.rows import (
    WHOLE_FILE,
    Extent,
    NamespaceRow,
    SegmentRow,
    Table,
    decode_extent,
    decode_namespace,
    decode_segment,
    key_namespace,
    key_number,
    key_pair,
    number_key,
    pair_key,
)
from kvtier.tiers.nvme.segments import list_segments
from kvtier.tiers.nvme.tables import Rows

_FILE_OVERHEAD = 64 << 10
"""Bytes a file system may count to a file for its own bookkeeping (extent tree pages)."""


class TableCheck:
    """After `run`: what is wrong in `problems`, how much lives; `broke_off` at a damaged row."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.problems: list[str] = []
        self.records = self.blocks = self.nbytes = 0
        self._namespaces: dict[int, NamespaceRow] = {}
        self._segments: dict[int, SegmentRow] = {}
        self._expected: Counter[Table] = Counter()
        self._space_blocks: Counter[int] = Counter()
        self._space_bytes: Counter[int] = Counter()
        self.broke_off = False
        self._places = array("Q")  # segment, offset, end, id of every extent

    @property
    def namespaces(self) -> dict[int, NamespaceRow]:
        return self._namespaces

    def run(self) -> None:
        """Compare everything. A damaged row ends it: nothing that follows can be trusted."""
        try:
            self._namespaces = {
                key_namespace(key): decode_namespace(body)
                for key, body in self._rows.walk(Table.NAMESPACES)
            }
            self._segments = {
                key_number(key): decode_segment(body)
                for key, body in self._rows.walk(Table.SEGMENTS)
            }
            custody = CustodyCheck(self._rows)
            for key, body in self._rows.walk(Table.EXTENTS):
                extent = decode_extent(key_number(key), body)
                self._compare(extent)
                custody.extent(extent)
            self.problems += custody.problems()
            self._compare_counts()
            self._compare_totals()
            self._compare_segments()
        except StoreCorrupt as error:
            self.problems.append(str(error))
            self.broke_off = True

    def ordered(self) -> Iterator[Extent]:
        """Every extent by its place on disk."""
        for id in self._table()[:, 3].tolist():
            extent = self._rows.extent(id)
            if extent is not None:
                yield extent

    def leftover_bytes(self, directory: Path) -> int:
        """What a crash left on disk, and the next opening takes back."""
        leftover = 0
        for segment, path in list_segments(directory).items():
            row = self._segments.get(segment)
            live = row.live_bytes if row is not None else 0
            over = path.stat().st_blocks * 512 - live
            leftover += over if over > _FILE_OVERHEAD or not live else 0
        return max(0, leftover)

    def _compare(self, extent: Extent) -> None:
        """One extent against the rows that must follow from it."""
        rows, space = self._rows, extent.namespace_id
        self.records += 1
        self.blocks += extent.live
        self.nbytes += extent.nbytes
        self._space_blocks[space] += extent.live
        self._space_bytes[space] += extent.nbytes
        self._places.extend((extent.segment, extent.offset, extent.end(extent.live), extent.id))
        self._expected[Table.EXTENTS] += 1
        self._expected[Table.BLOCKS] += extent.live
        for position in range(extent.live):
            key = extent.key(position)
            if rows.block(space, key) != (extent.id, position):
                self.problems.append(f"block {key.hex()}: its row and its extent disagree")
        if extent.parent != ROOT_KEY:
            self._expected[Table.HEADS] += 1
            if not rows.has_head(space, extent.parent, extent.id):
                self.problems.append(f"record {extent.id:x}: its row in heads is missing")
            if not self._has(space, extent.parent):
                self.problems.append(f"record {extent.id:x}: its parent is not in the store")
        if rows.get(Table.USES, number_key(extent.id)) is None:
            self.problems.append(f"record {extent.id:x}: its row in uses is missing")
        self._expected[Table.USES] += 1
        if rows.head(space, extent.tail) is None and extent.pinned < extent.live:
            self._expected[Table.AGE] += 1
            if rows.get(Table.AGE, pair_key(rows.last_use(extent.id), extent.id)) is None:
                self.problems.append(f"record {extent.id:x}: its row in age is missing")

    def _has(self, space: int, key: bytes) -> bool:
        row = self._rows.block(space, key)
        extent = None if row is None else self._rows.extent(row[0])
        return row is not None and extent is not None and row[1] < extent.live

    def _compare_counts(self) -> None:
        for table in (Table.BLOCKS, Table.HEADS, Table.USES, Table.AGE):
            found, wanted = self._rows.num_rows(table), self._expected[table]
            if found > wanted:
                name = table.name.lower()
                self.problems.append(f"catalogue: {name} has {found} rows instead of {wanted}")

    def _compare_totals(self) -> None:
        totals = self._rows.counters()
        counted = (self.nbytes, self.blocks, self.records)
        if counted != (totals.used_bytes, totals.blocks, totals.extents):
            self.problems.append("catalogue: its totals are not those of its extents")
        for id, row in self._namespaces.items():
            if (row.blocks, row.nbytes) != (self._space_blocks[id], self._space_bytes[id]):
                self.problems.append(f"namespace {row.digest.hex()[:16]}: its totals are wrong")
        if not self._space_blocks.keys() <= self._namespaces.keys():
            self.problems.append("catalogue: a namespace with blocks has no row")

    def _compare_segments(self) -> None:
        """Live bytes fit their segments, and overlap neither each other nor what is freed."""
        table = self._table()
        owners, firsts = np.unique(table[:, 0], return_index=True)
        parts = np.split(table, firsts[1:]) if len(table) else []
        places = dict(zip(owners.tolist(), parts, strict=True))
        for id, row in self._segments.items():
            mine = places.pop(id, table[:0])
            if row.live_bytes != int((mine[:, 2] - mine[:, 1]).sum()):
                self.problems.append(f"segment {id:x}: its row does not say what lives in it")
            elif len(mine) and ((mine[1:, 1] < mine[:-1, 2]).any() or mine[-1, 2] > row.end):
                self.problems.append(f"segment {id:x}: records overlap or stand past its end")
        self.problems += [f"segment {id:x}: has records and no row" for id in places]
        for key, _ in self._rows.walk(Table.FREES):
            segment, offset = key_pair(key)
            if offset == WHOLE_FILE and segment in self._segments:
                self.problems.append(f"segment {segment:x}: is to be removed and has a row")

    def _table(self) -> "npt.NDArray[np.uint64]":
        """Segment, offset, end and id of every extent, by place."""
        table = np.array(self._places, np.uint64).reshape(-1, 4)
        return table[np.lexsort((table[:, 1], table[:, 0]))]
