"""`check_store`: read everything, believe nothing. Knows how records and catalogue must agree.

Changes nothing. What a crash may leave behind (an unpublished tail, a range freed and not punched,
a file no row names) is no problem: the next opening takes it back. It is counted as left over.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from kvtier.tiers.errors import RecordRefused, StoreCorrupt, StoreUnsupported, StoreVersion
from kvtier.tiers.nvme.catalogue import Catalogue
from kvtier.tiers.nvme.check_tables import TableCheck
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.lock import StoreLock
from kvtier.tiers.nvme.rebuild import CATALOGUE
from kvtier.tiers.nvme.recovery import is_store
from kvtier.tiers.nvme.rows import Extent, NamespaceRow
from kvtier.tiers.nvme.tables import Rows
from kvtier.tiers.nvme.verify import read_record, sound_block
from kvtier.tiers.nvme.workers import Scratch

Progress = Callable[[int, int], None]
"""Told `(records done, records in all)`."""


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


@dataclass(frozen=True)
class Findings:
    """A report, and in which extents the blocks from which position on are worthless."""

    report: CheckReport
    damaged: tuple[tuple[int, int], ...]


def check_store(path: Path, *, progress: Progress | None = None) -> CheckReport:
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
            return examine(catalogue, path / "segments", progress).report
        finally:
            catalogue.close()
    finally:
        lock.release()


def examine(catalogue: Catalogue, segments: Path, progress: Progress | None) -> Findings:
    """Verify an open catalogue and the records it names; raises nothing for what is wrong."""
    with catalogue.reading() as rows:
        tables = TableCheck(rows)
        tables.run()
        records = _RecordCheck(segments, tables.namespaces, progress, tables.records)
        try:
            records.run(tables.ordered())
        except StoreCorrupt as error:
            tables.problems.append(str(error))
        leftover = 0 if tables.broke_off else tables.leftover_bytes(segments)
    report = CheckReport(
        tables.records,
        tables.blocks,
        tables.nbytes,
        leftover,
        (*tables.problems, *records.problems),
    )
    return Findings(report, tuple(records.damaged))


def table_problems(rows: Rows) -> tuple[str, ...]:
    """What the tables of a catalogue say against each other, no record being read."""
    tables = TableCheck(rows)
    tables.run()
    return tuple(tables.problems)


class _RecordCheck:
    """Reads records and compares them with what the catalogue says of them."""

    def __init__(
        self,
        segments: Path,
        namespaces: dict[int, NamespaceRow],
        progress: Progress | None,
        total: int,
    ) -> None:
        self.problems: list[str] = []
        self.damaged: list[tuple[int, int]] = []
        self._segments = segments
        self._namespaces = namespaces
        self._progress = progress
        self._total = total
        self._files = Files()
        self._scratch = Scratch()

    def run(self, extents: Iterator[Extent]) -> None:
        """Read every record; `extents` come in the order of the disk."""
        done = 0
        for segment, group in groupby(extents, key=lambda extent: extent.segment):
            try:
                fd = self._files.open(self._segments / f"{segment:016x}.seg", read_only=True)
            except OSError as error:
                self.problems.append(f"segment {segment:x}: {error.strerror}")
                self.damaged += ((extent.id, 0) for extent in group)
                continue
            try:
                for extent in group:
                    done += 1
                    self._read_record(fd, extent)
                    if self._progress is not None:
                        self._progress(done, self._total)
            finally:
                self._files.close(fd)

    def _read_record(self, fd: int, extent: Extent) -> None:
        record = self._scratch.take("record", extent.nbytes)
        try:
            row = self._namespaces.get(extent.namespace_id)
            namespace = row.digest if row else b""
            header = read_record(self._files, fd, extent, namespace, record)
        except (OSError, StoreCorrupt, StoreVersion) as error:
            self.problems.append(f"record {extent.id:x}: {error}")
            self.damaged.append((extent.id, 0))
            return
        first_bad: int | None = None
        for position in range(extent.live):
            try:
                sound_block(header, position, record, self._scratch.coder)
            except RecordRefused as error:
                self.problems.append(f"record {extent.id:x}: {error}")
                first_bad = position if first_bad is None else first_bad
        if first_bad is not None:
            self.damaged.append((extent.id, first_bad))
