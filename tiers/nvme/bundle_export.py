"""`export_bundle`: a part of a store, verified, into one file. Knows how a store is walked.

Memory holds one record and the ids of the extents still to come. What an earlier, killed export
left in `NAME.part` is verified and kept while it is what this one would write again.
"""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
from xxhash import xxh3_64_intdigest

from kvtier.index.words import ROOT_KEY, BlockKey
from kvtier.tiers.contracts import Bytes
from kvtier.tiers.errors import (
    BundleRefused,
    RecordRefused,
    StoreCorrupt,
    StoreUnsupported,
    StoreVersion,
)
from kvtier.tiers.nvme.bundle import (
    MAX_BLOCK_BYTES,
    MAX_HEADER_BYTES,
    Contents,
    check_names,
    encode_footer,
    encode_head,
)
from kvtier.tiers.nvme.bundle_reader import Bundle, Damage, Problems, Record, num_sound
from kvtier.tiers.nvme.catalogue import Catalogue
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.lock import StoreLock
from kvtier.tiers.nvme.reader import check_identity
from kvtier.tiers.nvme.record import (
    PAGE,
    RecordHeader,
    StoredBlock,
    decode_header,
    encode_header,
)
from kvtier.tiers.nvme.rows import (
    Extent,
    Table,
    decode_extent,
    decode_pin,
    key_number,
    key_pin,
)
from kvtier.tiers.nvme.segments import Segments
from kvtier.tiers.nvme.tables import Rows
from kvtier.tiers.nvme.workers import Scratch


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


EVERYTHING = Selection()


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote. `nbytes` are decoded bytes; `resumed` records were there from an
    earlier run; `damaged` blocks of the store were left out, as was all that hangs off them;
    `missing` namespaces and prefixes (hex) and labels are not in the store."""

    records: int
    blocks: int
    nbytes: int
    file_bytes: int
    resumed: int
    damaged: int
    missing: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems and not self.missing


def export_bundle(
    store: Path,
    destination: Path,
    selection: Selection = EVERYTHING,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    files: Files | None = None,
    clock: Callable[[], float] = time.time,
) -> ExportReport:
    """Write what is selected of the store at `store` to `destination`, whole or not at all.

    `progress` is told `(blocks done, blocks in all)`; `files` writes the bundle; what has expired
    by `clock` (seconds, the tier's) stays behind. An existing `destination` is replaced only with
    `force`. If this fails, `destination` is as it was and `destination`.part holds what the next
    run goes on behind.

    Raises `BundleRefused` if the bundle cannot be written, `StoreInUse` beside a writer,
    `StoreVersion`, `StoreUnsupported` where there is no store, `StoreCorrupt` if its catalogue
    cannot be opened. A damaged record or row is a line in `problems`.
    """
    if not (store / "catalog").is_dir():
        raise StoreUnsupported(f"{store}: there is no store here; check the path")
    lock = StoreLock(store, read_only=True)
    try:
        catalogue = Catalogue.open(store / "catalog", read_only=True)
        try:
            namespaces = dict(_chosen(catalogue, selection))
            segments = Segments(store / "segments", Files(), _no_ids, read_only=True)
            try:
                with catalogue.reading() as rows, _Part(destination, force, files) as part:
                    plan = _Plan(rows, namespaces, selection, int(clock() * 1e6))
                    return _Export(rows, plan, segments, part, progress).run()
            finally:
                segments.close()
        finally:
            catalogue.close()
    finally:
        lock.release()


def _chosen(catalogue: Catalogue, selection: Selection) -> Iterator[tuple[int, bytes]]:
    for number, row in catalogue.namespace_rows():
        if (
            row.blocks
            and not row.leaving
            and (not selection.namespaces or row.digest in selection.namespaces)
        ):
            yield number, row.digest


def _no_ids() -> int:
    raise AssertionError("a store that is only read makes no segment")


class _Plan:
    """Which extents go, how many leading blocks of each, and in which order."""

    def __init__(
        self, rows: Rows, namespaces: dict[int, bytes], selection: Selection, now: int
    ) -> None:
        self._rows = rows
        self._now = now
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


class _Export:
    def __init__(
        self,
        rows: Rows,
        plan: _Plan,
        segments: Segments,
        part: "_Part",
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._rows = rows
        self._plan = plan
        self._segments = segments
        self._part = part
        self._progress = progress
        self._scratch = Scratch()
        self._problems = Problems()
        self._blocks = self._nbytes = self._damaged = 0

    def run(self) -> ExportReport:
        part, plan = self._part, self._plan
        while True:
            try:
                found = plan.take()
                if found is None:
                    break
                kept = self._export(*found)
                plan.follow(found[0], kept)
            except StoreCorrupt as error:  # a damaged row: its branch ends here
                self._problems.add(str(error))
            if self._progress is not None:
                self._progress(self._blocks + self._damaged, plan.num_blocks)
        part.finish()
        return ExportReport(
            part.contents.records,
            self._blocks,
            self._nbytes,
            part.end,
            part.resumed,
            self._damaged,
            tuple(plan.missing),
            self._problems.told(),
        )

    def _export(self, extent: Extent, count: int) -> int:
        """Bring the first `count` blocks of an extent into the part; how many were sound."""
        if not count:
            return 0
        namespace = self._plan.namespaces[extent.namespace_id]
        part = self._part
        header = part.resume(namespace, extent.parent, extent.keys[:count])
        if header is None:
            try:
                header, stored = self._read(extent, count, namespace)
            except (RecordRefused, StoreVersion, OSError) as error:
                self._problems.add(f"record {extent.id:x}: {error}")
                self._damaged += count
                return 0
            if not header.blocks:
                self._damaged += count
                return 0
            keys = tuple(block.key for block in header.blocks)
            if part.resume(namespace, extent.parent, keys) is None:
                part.append(header, stored)
        kept = len(header.blocks)
        self._blocks += kept
        self._damaged += count - kept
        self._nbytes += kept * header.block_bytes
        return kept

    def _read(
        self, extent: Extent, count: int, namespace: bytes
    ) -> tuple[RecordHeader, Sequence[Bytes]]:
        """The leading sound blocks of the first `count`: a header for just them, their bytes."""
        raw = self._scratch.take("record", extent.starts[count] - extent.offset)
        with self._segments.opened(extent.segment) as fd:
            if self._segments.files.preadv(fd, [raw], extent.offset) != len(raw):
                raise RecordRefused("the segment ends within it")
        header = decode_header(raw[: extent.header_pages * PAGE].tobytes())
        check_identity(header, extent, namespace)
        check_names(header)
        if header.block_bytes > MAX_BLOCK_BYTES or header.header_bytes > MAX_HEADER_BYTES:
            raise RecordRefused("its blocks or its header are larger than a bundle takes")
        blocks: list[StoredBlock] = []
        stored: list[Bytes] = []
        for block, offset in zip(header.blocks[:count], header.offsets, strict=False):
            data = raw[offset:][: block.stored_bytes]
            if xxh3_64_intdigest(data.data) != block.checksum:
                self._problems.add(
                    f"record {extent.id:x}: block {block.key.hex()} fails its checksum"
                )
                break
            blocks.append(block)
            stored.append(data)
        tokens = header.tokens[: 4 * header.block_tokens * len(blocks)]
        return replace(header, tokens=tokens, blocks=tuple(blocks)), stored


class _Part:
    """`NAME.part` while it grows to be the bundle `NAME`.

    Raises `BundleRefused` at any failure to write; the file keeps what was written before.
    """

    def __init__(self, destination: Path, force: bool, files: Files | None) -> None:
        self._destination = destination
        self._force = force
        self._files = files or Files(direct=False)
        self._path = destination.with_name(destination.name + ".part")
        self._scratch = Scratch()
        self._old: Bundle | None = None
        self._left: Iterator[Record] = iter(())
        self._next: Record | None = None
        self.contents = Contents()
        self.end = PAGE
        self.resumed = 0

    def __enter__(self) -> "_Part":
        self._refuse_to_replace()
        try:
            self._fd = self._files.open(self._path, create=True)
        except OSError as error:
            raise self._failed(error) from error
        try:
            self._own()
            self._look_at_what_is_left()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._old is not None:
            self._old.__exit__()
        self._files.close(self._fd)

    def resume(
        self, namespace: bytes, parent: BlockKey, keys: Sequence[BlockKey]
    ) -> RecordHeader | None:
        """The header of the next record that an earlier export left, if it holds just these."""
        record = self._next
        if record is None:
            return None
        header = record.header
        told = (header.namespace, header.parent, tuple(block.key for block in header.blocks))
        if told != (namespace, parent, tuple(keys)):
            return None
        self.contents.add(header, record.raw)
        self.end += header.record_bytes
        self.resumed += 1
        self._next = next(self._left, None)
        return header

    def append(self, header: RecordHeader, stored: Sequence[Bytes]) -> None:
        """Write a record behind what is there. Of `header`, place and generation are ours."""
        self._next = None
        placed = replace(
            header, generation=self.contents.records + 1, segment=0, page=self.end // PAGE
        )
        head = encode_header(placed)
        record = self._scratch.take("record", placed.record_bytes)
        record[:] = 0
        record[: len(head)] = np.frombuffer(head, np.uint8)
        for data, offset in zip(stored, placed.offsets, strict=True):
            record[offset : offset + len(data)] = data
        self._write(record)
        self.contents.add(placed, head)

    def finish(self) -> None:
        """Close the bundle with its footer and give it its name, durably."""
        self._next = None
        footer = encode_footer(self.contents.footer(), self.end // PAGE)
        self._write(np.frombuffer(footer, np.uint8))
        try:
            self._files.fdatasync(self._fd)
            os.replace(self._path, self._destination)
            self._files.sync_directory(self._destination.parent)
        except OSError as error:
            raise self._failed(error) from error

    def _refuse_to_replace(self) -> None:
        if self._destination.exists() and not self._force:
            raise BundleRefused(
                f"{self._destination}: is there already; choose another name or give --force"
            )

    def _own(self) -> None:
        """Be the only export that writes this file."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(self._fd), self._path.stat())
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise BundleRefused(f"{self._path}: another export writes it; wait for its end")
        self._refuse_to_replace()

    def _look_at_what_is_left(self) -> None:
        try:
            self._old = Bundle(self._path)
        except (BundleRefused, StoreVersion):
            self.end = 0
            self._write(np.frombuffer(encode_head(), np.uint8))
            return
        self._left = _sound_records(self._old)
        self._next = next(self._left, None)

    def _write(self, data: Bytes) -> None:
        """Put `data` at the end, and nothing behind it."""
        done = 0
        try:
            self._files.truncate(self._path, self.end)
            while done < len(data):
                count = self._files.pwritev(self._fd, [data[done:]], self.end + done)
                if not count:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                done += count
        except OSError as error:
            raise self._failed(error) from error
        self.end += len(data)

    def _failed(self, error: OSError) -> BundleRefused:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        cure = "free some space" if full else "mend that or choose another place"
        return BundleRefused(
            f"{self._path}: cannot be written ({error.strerror}); {cure}, then export again: "
            "it goes on behind what is there"
        )


def _sound_records(bundle: Bundle) -> Iterator[Record]:
    """The records of a bundle up to the first damage of any kind."""
    for item in bundle.records():
        if isinstance(item, Damage) or num_sound(bundle, item, Problems()) < len(
            item.header.blocks
        ):
            return
        yield item
