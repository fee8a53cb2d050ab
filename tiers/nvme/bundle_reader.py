"""Reads a bundle front to back and verifies what it hands out. Knows no store and no catalogue.

What it reads may be anybody's: no length is believed before it is bounded, no header is handed out
before its checksum, its place and its keys are verified, no block before its own checksum.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

import numpy as np
from xxhash import xxh3_64_intdigest

from kvtier.index.words import ROOT_KEY, BlockKey
from kvtier.tiers.contracts import Bytes
from kvtier.tiers.errors import BundleRefused, RecordRefused, StoreVersion
from kvtier.tiers.nvme.bundle import (
    MAX_BLOCK_BYTES,
    MAX_FOOTER_BYTES,
    MAX_HEADER_BYTES,
    Contents,
    Footer,
    NamespaceTotals,
    check_head,
    check_names,
    decode_footer,
)
from kvtier.tiers.nvme.codecs import Coder
from kvtier.tiers.nvme.record import MAGIC, PAGE, RAW, RecordHeader, decode_header

CUT_SHORT = "record: the bundle ends before its blocks do"

_LENGTH = Struct("<I")
_LENGTH_AT = 12


@dataclass(frozen=True)
class Record:
    """A record of a bundle whose header is verified. `offset` is where it begins in the file."""

    header: RecordHeader
    raw: bytes
    offset: int


@dataclass(frozen=True)
class Damage:
    """A place in a bundle where a record should begin and none that is sound does."""

    offset: int
    reason: str


class Bundle:
    """An open bundle. `records` walks it; `read_block` reads one block of what the walk gave."""

    def __init__(self, path: Path) -> None:
        """Raises `BundleRefused` if it cannot be read or is no bundle, `StoreVersion`."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise BundleRefused(f"{path}: cannot be read ({error.strerror}); check it") from error
        try:
            self.nbytes = os.fstat(self._fd).st_size
            check_head(self._read(0, PAGE), path)
        except OSError as error:
            os.close(self._fd)
            raise BundleRefused(f"{path}: cannot be read ({error.strerror}); check it") from error
        except BaseException:
            os.close(self._fd)
            raise
        self._complete = False
        self._coder = Coder()

    def __enter__(self) -> "Bundle":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    @property
    def complete(self) -> bool:
        """After a walk to the end: whether the footer is there and agrees with what was met."""
        return self._complete

    def records(self) -> Iterator[Record | Damage]:
        """Every record in order. Where none is sound, one `Damage`, then the next that is.

        Keeps nothing: a second walk begins anew. A sound header may still have damaged blocks.
        """
        self._complete = False
        contents, offset, lost = Contents(), PAGE, False
        while offset + PAGE <= self.nbytes:
            try:
                record = self._record_at(offset)
            except (RecordRefused, StoreVersion, OSError) as error:
                footer = self._footer_at(offset)
                if footer is not None:
                    self._complete = footer == contents.footer()
                    return
                if not lost:
                    yield Damage(offset, str(error))
                lost = True
                offset += PAGE
            else:
                contents.add(record.header, record.raw)
                yield record
                lost = False
                offset += record.header.record_bytes

    def num_present(self, record: Record) -> int:
        """How many leading blocks of a record the file is long enough for."""
        header = record.header
        ends = (
            record.offset + offset + block.stored_bytes
            for offset, block in zip(header.offsets, header.blocks, strict=True)
        )
        return sum(end <= self.nbytes for end in ends)

    def read_block(self, record: Record, position: int, out: Bytes) -> None:
        """The decoded bytes of one block into `out`, uint8 [block_bytes], verified.

        Raises `RecordRefused` if they are damaged or not there; `out` then holds anything.
        """
        header = record.header
        block, offset = header.blocks[position], record.offset + header.offsets[position]
        if offset + block.stored_bytes > self.nbytes:
            raise RecordRefused(CUT_SHORT)
        stored = out if block.codec == RAW else np.empty(block.stored_bytes, np.uint8)
        try:
            count = os.preadv(self._fd, [stored.data], offset)
        except OSError as error:
            raise RecordRefused(f"record: cannot be read ({error.strerror})") from error
        if count == len(stored) and block.codec != RAW:
            self._coder.decode(block.codec, stored, out)
        if count != len(stored) or xxh3_64_intdigest(out.data) != block.checksum:
            raise RecordRefused(f"record: block {block.key.hex()[:16]} fails its checksum")

    def _read(self, offset: int, nbytes: int) -> bytes:
        return os.pread(self._fd, nbytes, offset)

    def _record_at(self, offset: int) -> Record:
        raw = self._read(offset, PAGE)
        if raw[:8] != MAGIC:
            raise RecordRefused("record: no header at this place")
        (length,) = _LENGTH.unpack_from(raw, _LENGTH_AT)
        if not PAGE <= length <= MAX_HEADER_BYTES or length % PAGE:
            raise RecordRefused("record: its header has an impossible length")
        raw = raw if length == PAGE else self._read(offset, length)
        header = decode_header(raw)
        if header.segment or header.page != offset // PAGE:
            raise RecordRefused("record: it was written for another place")
        if not 0 < header.block_bytes <= MAX_BLOCK_BYTES:
            raise RecordRefused("record: its blocks have an impossible size")
        check_names(header)
        return Record(header, raw, offset)

    def _footer_at(self, offset: int) -> Footer | None:
        nbytes = self.nbytes - offset
        if nbytes > MAX_FOOTER_BYTES:
            return None
        try:
            return decode_footer(self._read(offset, nbytes), offset // PAGE)
        except OSError:
            return None


@dataclass(eq=False)
class Step:
    """One record on a trail. Of its blocks the first `kept` are where they should be; what is
    behind them was `refused` by a store, or else is damaged."""

    header: RecordHeader
    above: "Step | None"
    position: int
    """The block of `above` it hangs off."""
    rooted: bool
    """Whether the trail knows everything above it."""
    kept: int = 0
    refused: bool = False
    followed: bool = False
    """Whether a kept block hangs off the last kept one."""

    @property
    def hangs(self) -> bool:
        """Whether its parent is a kept block of the trail, or the root."""
        if self.above is None:
            return self.rooted
        return self.position < self.above.kept


class Trail:
    """The records from a root down to the one entered last: where the next one's parent is.

    A record whose parent is not on it (its header is damaged) stands on top of what is there, so
    that what hangs off it is found, and goes with the next such one. `left` is told of every step
    that goes, deepest first, once nothing more can hang off it.
    """

    def __init__(self, left: Callable[[Step], None] | None = None) -> None:
        self._left = left
        self._steps: list[Step] = []
        self._places: dict[tuple[bytes, BlockKey], tuple[int, int]] = {}
        self._lost_at = 0

    def enter(self, header: RecordHeader) -> Step:
        """Go on to this record: its step, below its parent's if that is on the trail."""
        name, above, position = header.namespace, None, 0
        if header.parent == ROOT_KEY:
            self._cut(0)
        elif (name, header.parent) in self._places:
            depth, position = self._places[name, header.parent]
            above = self._steps[depth]
            self._cut(depth + 1)
        else:
            self._cut(self._lost_at)
        rooted = header.parent == ROOT_KEY if above is None else above.rooted
        step = Step(header, above, position, rooted)
        for i, block in enumerate(header.blocks):
            self._places[name, block.key] = (len(self._steps), i)
        self._steps.append(step)
        if rooted:
            self._lost_at = len(self._steps)
        return step

    def end(self) -> None:
        """Leave every step."""
        self._cut(0)

    def _cut(self, depth: int) -> None:
        while len(self._steps) > depth:
            step = self._steps.pop()
            for block in step.header.blocks:
                self._places.pop((step.header.namespace, block.key), None)
            if step.above is not None and step.kept:
                step.above.followed |= step.position == step.above.kept - 1
            if self._left is not None:
                self._left(step)
        self._lost_at = min(self._lost_at, depth)


INCOMPLETE = "the bundle is not complete: cut short, its export unfinished, or records are missing"

_PROBLEMS_KEPT = 100


class Problems:
    """What went wrong, a line each: the first hundred, and how many more."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._more = 0

    def add(self, line: str) -> None:
        if len(self._lines) < _PROBLEMS_KEPT:
            self._lines.append(line)
        else:
            self._more += 1

    def told(self) -> tuple[str, ...]:
        more = [f"and {self._more} more"] if self._more else []
        return (*self._lines, *more)


@dataclass(frozen=True)
class BundleReport:
    """What a bundle holds. `records` and `blocks` are sound; `damaged` blocks are not, or hang off
    one that is not. A damaged header hides how many blocks it had: it is in `problems` only."""

    records: int
    blocks: int
    nbytes: int
    file_bytes: int
    damaged: int
    complete: bool
    namespaces: tuple[NamespaceTotals, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.complete and not self.problems


def verify_bundle(
    path: Path, *, progress: Callable[[int, int], None] | None = None
) -> BundleReport:
    """Read and verify all of a bundle. `progress` is told `(bytes done, bytes in all)`.

    Raises `BundleRefused` if it is no bundle or cannot be read, `StoreVersion`.
    """
    trail, problems = Trail(), Problems()
    records = blocks = nbytes = damaged = 0
    contents = Contents()
    with Bundle(path) as bundle:
        for item in bundle.records():
            if isinstance(item, Damage):
                problems.add(f"page {item.offset // PAGE}: {item.reason}")
                continue
            header, step = item.header, trail.enter(item.header)
            records += 1
            contents.add(header, item.raw)
            if step.hangs:
                step.kept = num_sound(bundle, item, problems)
            else:
                problems.add(f"page {header.page}: what it hangs off is damaged or missing")
            blocks += step.kept
            nbytes += step.kept * header.block_bytes
            damaged += len(header.blocks) - step.kept
            if progress is not None:
                progress(min(item.offset + header.record_bytes, bundle.nbytes), bundle.nbytes)
        if not bundle.complete:
            problems.add(INCOMPLETE)
        return BundleReport(
            records,
            blocks,
            nbytes,
            bundle.nbytes,
            damaged,
            bundle.complete,
            contents.footer().namespaces,
            problems.told(),
        )


def num_sound(bundle: Bundle, record: Record, problems: Problems) -> int:
    """How many leading blocks of a record are sound."""
    header, present = record.header, bundle.num_present(record)
    out = np.empty(header.block_bytes if present else 0, np.uint8)
    for position in range(present):
        try:
            bundle.read_block(record, position, out)
        except RecordRefused as error:
            problems.add(f"page {header.page}: {error}")
            return position
    if present < len(header.blocks):
        problems.add(f"page {header.page}: {CUT_SHORT}")
    return present
