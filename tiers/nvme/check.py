"""`check_store`: read everything, believe nothing. Knows how records and catalogue must agree.

Changes nothing. What a crash may leave behind (an unpublished tail, a range freed and not punched,
a file no row names) is no problem: the next opening takes it back. It is counted as left over.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kvtier.index.words import ROOT_KEY
from kvtier.tiers.errors import RecordRefused, StoreCorrupt, StoreUnsupported, StoreVersion
from kvtier.tiers.nvme.bundle import check_names
from kvtier.tiers.nvme.catalogue import Catalogue
from kvtier.tiers.nvme.check_custody import CustodyCheck
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.lock import StoreLock
from kvtier.tiers.nvme.reader import check_identity
from kvtier.tiers.nvme.rebuild import CATALOGUE
from kvtier.tiers.nvme.record import PAGE, decode_header
from kvtier.tiers.nvme.recovery import is_store
from kvtier.tiers.nvme.rows import (
    Extent,
    NamespaceRow,
    Table,
    block_row_key,
    decode_block,
    decode_extent,
    decode_namespace,
    decode_segment,
    key_namespace,
    key_number,
    key_pair,
)
from kvtier.tiers.nvme.tables import Rows
from kvtier.tiers.nvme.workers import Scratch

_FILE_OVERHEAD = 64 << 10
"""Bytes a file system may count to a file for its own bookkeeping (extent tree pages)."""


@dataclass(frozen=True)
class CheckReport:
    """What a check found. `bytes` are published, `leftover_bytes` come back at the next opening."""

    records: int
    blocks: int
    bytes: int
    leftover_bytes: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def check_store(path: Path, *, progress: Callable[[int, int], None] | None = None) -> CheckReport:
    """Verify every record and every row of the store at `path`, against each other.

    `progress` is told `(records done, records in all)`. Raises `StoreInUse` beside a writer,
    `StoreVersion`, `StoreUnsupported` where there is no store, and `StoreCorrupt` if the catalogue
    cannot be opened at all; everything smaller is a line in `problems`.
    """
    if not is_store(path):
        raise StoreUnsupported(f"{path}: there is no store here; check the path")
    lock = StoreLock(path, read_only=True)
    try:
        catalogue = Catalogue.open(path / CATALOGUE, read_only=True)
        try:
            with catalogue.reading() as rows:
                return _Check(path / "segments", rows, progress).run()
        finally:
            catalogue.close()
    finally:
        lock.release()


def table_problems(rows: Rows, segments: Path) -> tuple[str, ...]:
    """What the tables of a catalogue say against each other, no record being read."""
    check = _Check(segments, rows, None)
    check.compare_tables()
    return check.problems


class _Check:
    def __init__(
        self, segments: Path, rows: Rows, progress: Callable[[int, int], None] | None
    ) -> None:
        self._segments = segments
        self._rows = rows
        self._progress = progress
        self._files = Files()
        self._scratch = Scratch()
        self._problems: list[str] = []
        self._extents: dict[int, Extent] = {}
        self._namespaces: dict[int, NamespaceRow] = {}

    def run(self) -> CheckReport:
        leftover = self.compare_tables()
        self._read_records()
        live = self._extents.values()
        return CheckReport(
            records=len(live),
            blocks=sum(extent.live for extent in live),
            bytes=sum(extent.nbytes for extent in live),
            leftover_bytes=leftover,
            problems=self.problems,
        )

    def compare_tables(self) -> int:
        """Compare the tables with each other. Returns what a crash left on disk."""
        try:
            self._read_extents()
            self._compare_blocks()
            self._compare_order()
            self._compare_totals()
            self._compare_custody()
            return self._compare_segments()
        except StoreCorrupt as error:  # a damaged row: nothing that follows can be trusted
            self._problem(str(error))
            return 0

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(self._problems)

    def _problem(self, text: str) -> None:
        self._problems.append(text)

    def _read_extents(self) -> None:
        self._namespaces = {
            key_namespace(key): decode_namespace(body)
            for key, body in self._rows.scan(Table.NAMESPACES)
        }
        for key, body in self._rows.scan(Table.EXTENTS):
            id = key_number(key)
            self._extents[id] = decode_extent(id, body)

    def _compare_blocks(self) -> None:
        """Every live block has its row, every row its live block, every block its parent."""
        expected = {
            block_row_key(extent.namespace_id, key): (extent.id, position)
            for extent in self._extents.values()
            for position, key in enumerate(extent.keys[: extent.live])
        }
        found = {key: decode_block(body) for key, body in self._rows.scan(Table.BLOCKS)}
        for block in found.keys() | expected.keys():
            if found.get(block) != expected.get(block):
                self._problem(f"block {block[4:].hex()}: its row and its extent disagree")
        for extent in self._extents.values():
            parent = block_row_key(extent.namespace_id, extent.parent)
            if extent.parent != ROOT_KEY and parent not in expected:
                self._problem(f"record {extent.id:x}: its parent is not in the store")

    def _compare_order(self) -> None:
        """`heads` and `age` say what follows from the extents."""
        heads = {
            (block_row_key(e.namespace_id, e.parent), e.id)
            for e in self._extents.values()
            if e.parent != ROOT_KEY
        }
        rows = {(key, key_number(body)) for key, body in self._rows.scan(Table.HEADS)}
        parents = {parent for parent, _ in heads}
        if rows != heads:
            self._problem(f"catalogue: {len(rows ^ heads)} rows of heads are wrong or missing")
        uses = {key_number(key): key_number(body) for key, body in self._rows.scan(Table.USES)}
        if uses.keys() != self._extents.keys():
            self._problem("catalogue: rows of uses are missing or too many")
        ages = {
            (uses.get(e.id, 0), e.id)
            for e in self._extents.values()
            if block_row_key(e.namespace_id, e.tail) not in parents and e.pinned < e.live
        }
        aged = {key_pair(key) for key, _ in self._rows.scan(Table.AGE)}
        if aged != ages:
            self._problem(f"catalogue: {len(aged ^ ages)} rows of age are wrong or missing")

    def _compare_totals(self) -> None:
        live = self._extents.values()
        totals = self._rows.counters()
        counted = (sum(e.nbytes for e in live), sum(e.live for e in live), len(live))
        if counted != (totals.used_bytes, totals.blocks, totals.extents):
            self._problem("catalogue: its totals are not those of its extents")
        blocks: Counter[int] = Counter()
        nbytes: Counter[int] = Counter()
        for extent in live:
            blocks[extent.namespace_id] += extent.live
            nbytes[extent.namespace_id] += extent.nbytes
        for id, row in self._namespaces.items():
            if (row.blocks, row.nbytes) != (blocks[id], nbytes[id]):
                self._problem(f"namespace {row.digest.hex()[:16]}: its totals are wrong")
        if not blocks.keys() <= self._namespaces.keys():
            self._problem("catalogue: a namespace with blocks has no row")

    def _compare_custody(self) -> None:
        custody = CustodyCheck(self._rows)
        for extent in self._extents.values():
            custody.extent(extent)
        self._problems += custody.problems()

    def _compare_segments(self) -> int:
        """Live bytes fit their segments without overlap. Returns what a crash left on disk."""
        segments = {
            key_number(key): decode_segment(body) for key, body in self._rows.scan(Table.SEGMENTS)
        }
        by_segment: dict[int, list[Extent]] = {id: [] for id in segments}
        for extent in self._extents.values():
            by_segment.setdefault(extent.segment, []).append(extent)
        for id, extents in by_segment.items():
            extents.sort(key=lambda extent: extent.offset)
            row = segments.get(id)
            if row is None or row.live_bytes != sum(extent.nbytes for extent in extents):
                self._problem(f"segment {id:x}: its row does not say what lives in it")
                continue
            ends = [0, *(extent.offset + extent.nbytes for extent in extents)]
            starts = [*(extent.offset for extent in extents), row.end]
            if any(start < end for start, end in zip(starts, ends, strict=True)):
                self._problem(f"segment {id:x}: records overlap or stand past its end")
        leftover = 0
        for file in self._segments.glob("*.seg"):
            live = segments[int(file.stem, 16)].live_bytes if int(file.stem, 16) in segments else 0
            over = file.stat().st_blocks * 512 - live
            leftover += over if over > _FILE_OVERHEAD or not live else 0
        return max(0, leftover)

    def _read_records(self) -> None:
        done, total = 0, len(self._extents)
        ordered = sorted(self._extents.values(), key=lambda e: (e.segment, e.offset))
        for segment, extents in groupby(ordered, key=lambda e: e.segment):
            try:
                fd = self._files.open(self._segments / f"{segment:016x}.seg", read_only=True)
            except OSError as error:
                self._problem(f"segment {segment:x}: {error.strerror}")
                continue
            try:
                for extent in extents:
                    done += 1
                    self._read_record(fd, extent)
                    if self._progress is not None:
                        self._progress(done, total)
            finally:
                self._files.close(fd)

    def _read_record(self, fd: int, extent: Extent) -> None:
        record = self._scratch.take("record", extent.nbytes)
        try:
            if self._files.preadv(fd, [record], extent.offset) != extent.nbytes:
                raise StoreCorrupt("the segment ends within it")
            header = decode_header(record[: extent.header_pages * PAGE].tobytes())
            namespace = self._namespaces.get(extent.namespace_id)
            check_identity(header, extent, namespace.digest if namespace else b"")
            check_names(header)
        except (OSError, StoreCorrupt, StoreVersion) as error:
            self._problem(f"record {extent.id:x}: {error}")
            return
        for block, offset in zip(header.blocks[: extent.live], header.offsets, strict=False):
            stored = record[offset : offset + block.stored_bytes]
            try:
                found = self._scratch.coder.decoded(block.codec, stored, header.block_bytes)
                good = xxh3_64_intdigest(found.data) == block.checksum
            except RecordRefused:
                good = False
            if not good:
                self._problem(f"record {extent.id:x}: block {block.key.hex()} fails its checksum")
