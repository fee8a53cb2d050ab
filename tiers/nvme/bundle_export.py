"""`export_bundle`: what a plan takes from a store, each block verified, into one file.

Memory holds one record beside the plan.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.index.words import BlockKey
from kvtier.tiers.contracts import Bytes
from kvtier.tiers.errors import RecordRefused, StoreCorrupt, StoreUnsupported, StoreVersion
from kvtier.tiers.nvme.bundle import MAX_BLOCK_BYTES, MAX_HEADER_BYTES
from kvtier.tiers.nvme.bundle_packing import Packer
from kvtier.tiers.nvme.bundle_part import Part
from kvtier.tiers.nvme.bundle_plan import EVERYTHING, Plan, Selection
from kvtier.tiers.nvme.bundle_reader import Problems
from kvtier.tiers.nvme.catalogue import Catalogue
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.lock import StoreLock
from kvtier.tiers.nvme.rebuild import CATALOGUE
from kvtier.tiers.nvme.record import RecordHeader, StoredBlock
from kvtier.tiers.nvme.recovery import is_store
from kvtier.tiers.nvme.rows import Extent
from kvtier.tiers.nvme.segments import Segments
from kvtier.tiers.nvme.verify import read_record, sound_block
from kvtier.tiers.nvme.workers import Scratch


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote. `nbytes` are decoded bytes; `resumed` records were there from an
    earlier run; `damaged` blocks of the store were left out, as was all that hangs off them;
    `missing` namespaces and prefixes (hex) and labels are not in the store. Where
    something was named and nothing of it is there, no bundle is made, and `problems` says so."""

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
    codec: str = "zstd",
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    files: Files | None = None,
    clock: Callable[[], float] = time.time,
) -> ExportReport:
    """Write what is selected of the store at `store` to `destination`, whole or not at all.

    `codec`: "zstd" (what that does not shrink stays raw) or "raw".
    `progress` is told `(blocks done, blocks in all)`; `files` writes the bundle; what has expired
    by `clock` (seconds, the tier's) stays behind. An existing `destination` is replaced only with
    `force`. If this fails, `destination` is as it was and `destination`.part holds what the next
    run goes on behind.

    Raises `BundleRefused` if the bundle cannot be written, `CodecUnknown`, `StoreInUse` beside a
    writer, `StoreVersion`, `StoreUnsupported` where there is no store, `StoreCorrupt` if its
    catalogue cannot be opened or does not say where to begin. A damaged record, or row on the way
    on, is a line in `problems`.
    """
    if not is_store(store):
        raise StoreUnsupported(f"{store}: there is no store here; check the path")
    scratch = Scratch()
    packer = Packer(codec, scratch.coder)
    lock = StoreLock(store, read_only=True)
    try:
        catalogue = Catalogue.open(store / CATALOGUE, read_only=True)
        try:
            namespaces = dict(_chosen(catalogue, selection))
            segments = Segments(store / "segments", Files(), _no_ids, read_only=True)
            try:
                with catalogue.reading() as rows, Part(destination, force, files) as part:
                    plan = Plan(rows, namespaces, selection, int(clock() * 1e6))
                    return _Export(plan, segments, part, packer, scratch, progress).run()
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


class _Export:
    def __init__(
        self,
        plan: Plan,
        segments: Segments,
        part: Part,
        packer: Packer,
        scratch: Scratch,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._plan = plan
        self._segments = segments
        self._part = part
        self._packer = packer
        self._scratch = scratch
        self._progress = progress
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
        made = bool(part.contents.records) or plan.selection == EVERYTHING
        if made:
            part.finish()
        else:
            part.discard()
            self._problems.add(f"no bundle was made: no sound block matched {plan.selection}")
        return ExportReport(
            part.contents.records,
            self._blocks,
            self._nbytes,
            part.end if made else 0,
            part.resumed,
            self._damaged,
            tuple(plan.missing),
            self._problems.told(),
        )

    def _export(self, extent: Extent, count: int) -> int:
        """Bring the first `count` blocks of an extent into the part; how many were sound."""
        if not count:
            return 0
        header = self._resume(extent, extent.keys[:count])
        if header is None:
            try:
                header, stored = self._read(extent, count)
            except (RecordRefused, StoreVersion, OSError) as error:
                self._problems.add(f"record {extent.id:x}: {error}")
                self._damaged += count
                return 0
            if not header.blocks:
                self._damaged += count
                return 0
            keys = tuple(block.key for block in header.blocks)
            if self._resume(extent, keys) is None:
                self._part.append(header, stored)
        kept = len(header.blocks)
        self._blocks += kept
        self._damaged += count - kept
        self._nbytes += kept * header.block_bytes
        return kept

    def _resume(self, extent: Extent, keys: tuple[BlockKey, ...]) -> RecordHeader | None:
        """The record an earlier export left of just these blocks, if it is the next one there."""
        namespace = self._plan.namespaces[extent.namespace_id]
        return self._part.resume(namespace, extent.parent, keys, raw=self._packer.raw)

    def _read(self, extent: Extent, count: int) -> tuple[RecordHeader, Sequence[Bytes]]:
        """The leading sound blocks of the first `count`: a header for just them, their bytes as
        the bundle is to have them."""
        namespace = self._plan.namespaces[extent.namespace_id]
        raw = self._scratch.take("record", extent.starts[count] - extent.offset)
        with self._segments.opened(extent.segment) as fd:
            header = read_record(self._segments.files, fd, extent, namespace, raw)
        if header.block_bytes > MAX_BLOCK_BYTES or header.header_bytes > MAX_HEADER_BYTES:
            raise RecordRefused("its blocks or its header are larger than a bundle takes")
        rows: list[StoredBlock] = []
        pieces: list[Bytes] = []
        for position in range(count):
            try:
                block = sound_block(header, position, raw, self._scratch.coder)
            except RecordRefused as error:
                self._problems.add(f"record {extent.id:x}: {error}")
                break
            row, offset = header.blocks[position], header.offsets[position]
            stored = raw[offset : offset + row.stored_bytes]
            row, piece = self._packer.pack(namespace, row, stored, block, first=not rows)
            rows.append(row)
            pieces.append(piece)
        tokens = header.tokens[: 4 * header.block_tokens * len(rows)]
        return replace(header, tokens=tokens, blocks=tuple(rows)), pieces
