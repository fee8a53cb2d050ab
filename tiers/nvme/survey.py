"""What stands in a segment, told from the segment alone. Knows no catalogue.

A record begins at a page whose header is whole and says that this is its segment and its page; so
bytes of a payload that look like a header are not taken for one. What is not there is a hole:
evicted blocks were punched out, and the payload of an unfinished write was reserved and never
written. Where the file system does not tell holes, they read as zeros.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.tiers.contracts import Bytes
from kvtier.tiers.errors import RecordRefused, StoreVersion
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.record import MAGIC, PAGE, RecordHeader, decode_header
from kvtier.tiers.nvme.rows import Extent, Freed
from kvtier.tiers.nvme.workers import Scratch

_WINDOW_BYTES = 64 << 10
_HEADER_LENGTH_AT = slice(12, 16)
_MOST_HEADER_BYTES = 16 << 20
_MOST_BLOCKS = 2**16 - 1
_FIRST_NEVER_USED = (2**32 - 1) << 32


@dataclass
class Survey:
    """One segment's records, cut to what is there, and the ranges in which nothing lives.

    Iterating reads the file and yields `(namespace digest, extent)` in the order of the file;
    afterwards `free`, `end` (the file's length in whole pages) and `num_damaged` (pages in which
    data stands that belongs to no record) are complete. Raises `OSError` if the file cannot be
    opened, `StoreVersion` at a record of another format version.
    """

    path: Path
    segment: int
    files: Files
    free: list[Freed] = field(default_factory=list)
    end: int = 0
    num_damaged: int = 0

    def __iter__(self) -> Iterator[tuple[bytes, Extent]]:
        self._scratch = Scratch()
        self._window = range(0)
        self._fd = self.files.open(self.path, read_only=True)
        try:
            size = self.path.stat().st_size
            yield from self._records()
            self.end = -(-size // PAGE) * PAGE
            self._leave(self.end)
        finally:
            self.files.close(self._fd)

    def _records(self) -> Iterator[tuple[bytes, Extent]]:
        self._lived, at, data = 0, 0, range(0)
        while True:
            if at >= data.stop:
                found = self.files.next_data(self._fd, at)
                if found is None:
                    return
                data = range(found[0] // PAGE * PAGE, found[1])
                at = max(at, data.start)
            header = self._header(at)
            if header is None:
                at += PAGE
                self.num_damaged += 1
                continue
            extent = self._extent(header, at, data.stop)
            at += header.record_bytes
            if extent.live:
                self._leave(extent.offset)
                self._lived = extent.end(extent.live)
                yield header.namespace, extent

    def _leave(self, until: int) -> None:
        """Nothing lives between the last record and `until`."""
        if until > self._lived:
            self.free.append(Freed(0, self.segment, self._lived, until - self._lived))

    def _header(self, at: int) -> RecordHeader | None:
        """The header of the record that begins at `at`, if one does."""
        page = self._read(at, PAGE)
        if page is None or page[: len(MAGIC)].tobytes() != MAGIC:
            return None
        length = int.from_bytes(page[_HEADER_LENGTH_AT].tobytes(), "little")
        whole = length % PAGE == 0 and PAGE <= length <= _MOST_HEADER_BYTES
        raw = self._read(at, length) if whole else page
        try:
            header = None if raw is None else decode_header(raw.tobytes())
        except StoreVersion as error:
            raise StoreVersion(f"{self.path}, byte {at}: {error}") from error
        except RecordRefused:
            return None
        if header is None or (header.segment, header.page) != (self.segment, at // PAGE):
            return None
        usable = len(header.blocks) <= _MOST_BLOCKS and header.generation < _FIRST_NEVER_USED
        return header if usable else None

    def _extent(self, header: RecordHeader, at: int, data_end: int) -> Extent:
        """The record as a catalogue would name it, its live blocks those that are there."""
        names = b"".join(block.key for block in header.blocks)
        ends = (*header.offsets[1:], header.record_bytes)
        pages = tuple(
            (end - start) // PAGE for start, end in zip(header.offsets, ends, strict=True)
        )
        live = sum(at + end <= data_end for end in ends)
        while live and not self._any(at + header.offsets[live - 1], at + ends[live - 1]):
            live -= 1
        return Extent(
            header.generation,
            0,
            self.segment,
            at,
            header.header_bytes // PAGE,
            live,
            header.parent,
            names,
            pages,
        )

    def _any(self, start: int, end: int) -> bool:
        """Whether anything but zeros stands in a range; its last page tells nearly always."""
        for first, nbytes in ((end - PAGE, PAGE), (start, end - start)):
            stored = self._read(first, nbytes)
            if stored is not None and stored.any():
                return True
        return False

    def _read(self, at: int, nbytes: int) -> Bytes | None:
        """Bytes of the file, valid until the next call; None if they are not all to be had."""
        if not (self._window.start <= at and at + nbytes <= self._window.stop):
            room = self._scratch.take("window", max(nbytes, _WINDOW_BYTES))
            try:
                read = self.files.preadv(self._fd, [room], at)
            except OSError:  # a bad sector: read what is asked for, and nothing with it
                room = room[:nbytes]
                try:
                    read = self.files.preadv(self._fd, [room], at)
                except OSError:
                    read = 0
            self._buffer, self._window = room, range(at, at + read)
        found = self._buffer[at - self._window.start :][:nbytes]
        return found if at + nbytes <= self._window.stop else None
