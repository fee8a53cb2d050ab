"""One record on its way down: what it will say, what its blocks are stored as, and its write.

Knows pools, codecs and the record's format; not queues, groups or the account of space. The
functions run on a worker. The bytes in the slots do not change until the record has landed.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from kvtier.index.words import BlockKey
from kvtier.tiers.contracts import PENDING, Bytes, Flight, Pool
from kvtier.tiers.nvme.blocks import block_views, page_runs
from kvtier.tiers.nvme.checksum import checksum
from kvtier.tiers.nvme.codecs import CodecPolicy
from kvtier.tiers.nvme.files import write_whole
from kvtier.tiers.nvme.pace import Sample
from kvtier.tiers.nvme.record import (
    PAGE,
    RAW,
    RecordHeader,
    StoredBlock,
    encode_header,
    header_bytes,
    padded,
)
from kvtier.tiers.nvme.rows import Extent
from kvtier.tiers.nvme.segments import Segments
from kvtier.tiers.nvme.workers import Scratch

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Rider:
    """Blocks of a flight, `count` from `first` on, that wait for a record's from `position` on."""

    flight: Flight
    first: int
    position: int
    count: int


@dataclass(eq=False)
class Record:
    """One extent on its way down. `riders`: who waits for it, first of all who brought it.

    `encoded`: per block its stored bytes, or None if it is stored raw; empty if all are.
    `sizes`: stored bytes of each block; until it is encoded the most they may be.
    """

    id: int
    namespace: bytes
    parent: BlockKey
    anchor: int
    after: "Record | None"
    keys: tuple[BlockKey, ...]
    tokens: bytes
    pool: Pool
    slots: tuple[int, ...]
    expected: tuple[int, ...] | None
    policy: CodecPolicy
    riders: list[Rider]
    background: bool
    checksums: tuple[int, ...] = ()
    encoded: tuple[bytes | None, ...] = ()
    sizes: tuple[int, ...] = ()
    nbytes: int = 0
    segment: int = 0
    offset: int = 0
    error: Exception | None = field(default=None)

    def __post_init__(self) -> None:
        self.resize((self.pool.block_bytes,) * len(self.keys))

    @property
    def is_forsaken(self) -> bool:
        """Whether the put that brought these blocks was given up before they were published.

        Its slots are the caller's again, so bytes read from now on may be anything's.
        """
        owner = self.riders[0]
        status = owner.flight.status[owner.first : owner.first + owner.count]
        return bool((status != PENDING).any())

    @property
    def is_unwanted(self) -> bool:
        """Whether everyone who waits for it has cancelled."""
        return all(rider.flight.cancelled for rider in self.riders)

    @property
    def inherits(self) -> bool:
        """Whether it failed because the record it hangs off did."""
        return self.after is not None and self.error is self.after.error is not None

    def ride(self, flight: Flight, block: int, position: int) -> None:
        """A block of another flight waits for the one at `position`."""
        last = self.riders[-1]
        follows = last.first + last.count == block and last.position + last.count == position
        if last is not self.riders[0] and last.flight is flight and follows:
            last.count += 1
        else:
            self.riders.append(Rider(flight, block, position, 1))

    def resize(self, sizes: tuple[int, ...]) -> None:
        """Take other `sizes`, and the bytes on disk (header and padding included) with them."""
        self.sizes = sizes
        self.nbytes = self.header_bytes + sum(map(padded, sizes))

    @property
    def header_bytes(self) -> int:
        return header_bytes(len(self.keys), len(self.tokens) // 4 // len(self.keys))

    def extent(self) -> Extent:
        """The catalogue's row; the namespace's number is the catalogue's to fill in."""
        return Extent(
            self.id,
            0,
            self.segment,
            self.offset,
            self.header_bytes // PAGE,
            len(self.keys),
            self.parent,
            b"".join(self.keys),
            tuple(padded(size) // PAGE for size in self.sizes),
        )


class ChecksumMismatch(Exception):
    """The bytes of a put are not the bytes its caller took the checksum of."""


class Forsaken(Exception):
    """A put was given up by its caller, or for a drive that hangs."""


def sample_block(record: Record, scratch: Scratch) -> Sample:
    """Encode and decode the record's last block; keep nothing of it."""
    size, planes = record.pool.block_bytes, record.policy.element_bytes
    (block,) = block_views(record.pool, record.slots[-1:])
    encoded = scratch.coder.encode(block, planes)
    if encoded is None:
        return Sample(1.0, 0.0)
    stored = np.frombuffer(encoded, np.uint8)
    begin = perf_counter()
    scratch.coder.decoded(planes, stored, size)
    return Sample(padded(size) / padded(len(encoded)), size / (perf_counter() - begin))


def encode_record(record: Record, scratch: Scratch) -> Exception | None:
    """Verify and encode the record's blocks, each where that is worthwhile. `sizes` are then what
    will be stored. Returns what went wrong: whatever it is, it is this record's alone."""
    try:
        return _try_to_encode(record, scratch)
    except Exception as error:  # noqa: BLE001 - goes to the put's flights
        _log.error("NVMe encoding broke", exc_info=error)
        return error


def _try_to_encode(record: Record, scratch: Scratch) -> ChecksumMismatch | None:
    error = _take_checksums(record)
    if error is None:
        planes = record.policy.element_bytes
        views = block_views(record.pool, record.slots)
        encoded = tuple(scratch.coder.encode(view, planes) for view in views)
        if any(each is not None for each in encoded):
            record.encoded = encoded
            full = record.pool.block_bytes
            record.resize(tuple(full if each is None else len(each) for each in encoded))
    return error


def write_record(record: Record, segments: Segments, scratch: Scratch) -> Exception | None:
    """Verify, checksum and write one record; returns what went wrong, for its space is reserved and
    whatever it is must not keep the group from giving that back."""
    try:
        return _try_to_write(record, segments, scratch)
    except Exception as error:  # noqa: BLE001 - goes to the put's flights
        if not isinstance(error, OSError):
            _log.error("NVMe write broke", exc_info=error)
        return error


def _try_to_write(record: Record, segments: Segments, scratch: Scratch) -> Exception | None:
    if record.is_forsaken:
        return Forsaken("put: given up before it was written")
    mismatch = None if record.checksums else _take_checksums(record)
    if mismatch is not None:
        return mismatch
    if record.is_forsaken:  # then they may be of other bytes, and a rebuild would believe them
        return Forsaken("put: given up before it was written")
    payload = _payload(record, scratch)
    head = scratch.take("header", record.header_bytes)
    head[:] = np.frombuffer(encode_header(_header(record)), np.uint8)
    record.encoded = ()
    with segments.opened(record.segment) as fd:
        write_whole(segments.files, fd, [head, *payload], record.offset)
    return None


def _take_checksums(record: Record) -> ChecksumMismatch | None:
    views = block_views(record.pool, record.slots)
    record.checksums = tuple(map(checksum, views))
    expected = record.expected or ()  # 0: the pool has none for that block
    if any(told not in (0, found) for told, found in zip(expected, record.checksums, strict=False)):
        return ChecksumMismatch("put: a block's bytes changed since its checksum was taken")
    return None


def _header(record: Record) -> RecordHeader:
    planes = record.policy.element_bytes
    encoded = record.encoded or (None,) * len(record.keys)
    codecs = [RAW if each is None else planes for each in encoded]
    return RecordHeader(
        record.id,
        record.segment,
        record.offset // PAGE,
        record.namespace,
        record.parent,
        record.pool.block_bytes,
        record.tokens,
        tuple(map(StoredBlock, record.keys, record.checksums, record.sizes, codecs)),
    )


def _payload(record: Record, scratch: Scratch) -> Sequence[Bytes]:
    """The payload in page-aligned pieces: the slots themselves where they are just that."""
    if not record.encoded and record.pool.block_bytes % PAGE == 0:
        runs = page_runs(record.pool, record.slots)
        if runs is not None:
            return runs
    views = block_views(record.pool, record.slots)
    encoded = record.encoded or (None,) * len(views)
    room = scratch.take("payload", sum(map(padded, record.sizes)))
    start = 0
    for view, each in zip(views, encoded, strict=True):
        block = view if each is None else np.frombuffer(each, np.uint8)
        end = start + padded(len(block))
        room[start : start + len(block)] = block
        room[start + len(block) : end] = 0  # a slot's own padding may hold anything
        start = end
    return [room]
