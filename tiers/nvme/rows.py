"""The catalogue's rows, to bytes and back. Pure: knows no LMDB and no file.

Every value ends in the xxh3-64 of key and value, seeded with its table, so that a row is good only
under its own key in its own table. `FORMAT.md` has the grammar.
"""

from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from struct import Struct

from xxhash import xxh3_64_intdigest

from kvtier.index.words import BlockKey
from kvtier.tiers.errors import StoreCorrupt
from kvtier.tiers.nvme.record import PAGE

_CHECKSUM_BYTES = 8


class Table(IntEnum):
    """The LMDB databases. The number seeds the checksum of the table's rows."""

    META = 0
    NAMESPACES = 1
    BLOCKS = 2
    EXTENTS = 3
    HEADS = 4
    AGE = 5
    SEGMENTS = 6
    FREES = 7


def seal(table: Table, key: bytes, body: bytes) -> bytes:
    """`body` and its checksum."""
    return body + xxh3_64_intdigest(key + body, seed=table).to_bytes(_CHECKSUM_BYTES, "little")


def unseal(table: Table, key: bytes, value: bytes) -> bytes:
    """The body. Raises `StoreCorrupt` if it does not belong under this key in this table."""
    body = value[:-_CHECKSUM_BYTES]
    if seal(table, key, body) != value:
        raise StoreCorrupt(
            f"catalogue: table {table.name.lower()}, row {key.hex()} is damaged; "
            "remove the store directory to start afresh"
        )
    return body


_BLOCK = Struct("<QH")
_EXTENT = Struct("<IQQHHHQ32s")
_EXTENT_BLOCK = Struct("<32sI")
_SEGMENT = Struct("<BQQ")
_NAMESPACE = Struct("<32sQQ")
_COUNTERS = Struct("<QQQI")
_NUMBER = Struct(">Q")
_PAIR = Struct(">QQ")
_PREFIX = Struct(">I")


def number_key(value: int) -> bytes:
    """Key of `extents` and `segments`; also the value of `heads` and `frees` (big-endian)."""
    return _NUMBER.pack(value)


def key_number(key: bytes) -> int:
    return int(_NUMBER.unpack(key)[0])


def pair_key(first: int, second: int) -> bytes:
    """Key of `age` (last use, extent) and of `frees` (segment, offset)."""
    return _PAIR.pack(first, second)


def key_pair(key: bytes) -> tuple[int, int]:
    first, second = _PAIR.unpack(key)
    return first, second


def namespace_key(namespace_id: int) -> bytes:
    """Key of `namespaces`."""
    return _PREFIX.pack(namespace_id)


def key_namespace(key: bytes) -> int:
    return int(_PREFIX.unpack(key)[0])


def block_row_key(namespace_id: int, key: bytes) -> bytes:
    """Key of `blocks` and `heads`: blocks of one namespace stand together."""
    return _PREFIX.pack(namespace_id) + key


@dataclass(frozen=True)
class Extent:
    """One record as the catalogue knows it: its first `live` blocks are readable.

    `pages` counts the stored pages of each block. `last_use` is microseconds of the tier's clock.
    """

    id: int
    namespace_id: int
    segment: int
    offset: int
    header_pages: int
    live: int
    last_use: int
    parent: BlockKey
    keys: tuple[BlockKey, ...]
    pages: tuple[int, ...]

    @property
    def tail(self) -> BlockKey:
        """The last live block."""
        return self.keys[self.live - 1]

    @property
    def nbytes(self) -> int:
        """Bytes it holds on disk now: header and live blocks."""
        return self.end(self.live) - self.offset if self.live else 0

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each block's stored bytes begin in the segment; one more entry for the end."""
        first = self.offset + PAGE * self.header_pages
        return tuple(accumulate((PAGE * n for n in self.pages), initial=first))

    def end(self, live: int) -> int:
        """Where the record ends in the segment if `live` blocks are kept (0: nothing is)."""
        return self.starts[live] if live else self.offset

    def encode(self) -> bytes:
        head = _EXTENT.pack(
            self.namespace_id,
            self.segment,
            self.offset,
            self.header_pages,
            len(self.keys),
            self.live,
            self.last_use,
            self.parent,
        )
        return head + b"".join(map(_EXTENT_BLOCK.pack, self.keys, self.pages))


def decode_extent(id: int, body: bytes) -> Extent:
    namespace, segment, offset, header, count, live, used, parent = _EXTENT.unpack_from(body)
    rows = list(_EXTENT_BLOCK.iter_unpack(body[_EXTENT.size :]))
    if len(rows) != count or not 0 < live <= count:
        raise StoreCorrupt(f"catalogue: extent {id} contradicts itself; remove the store directory")
    keys = tuple(BlockKey(key) for key, _ in rows)
    pages = tuple(int(n) for _, n in rows)
    return Extent(id, namespace, segment, offset, header, live, used, BlockKey(parent), keys, pages)


def encode_block(extent: int, position: int) -> bytes:
    return _BLOCK.pack(extent, position)


def decode_block(body: bytes) -> tuple[int, int]:
    extent, position = _BLOCK.unpack(body)
    return extent, position


@dataclass
class SegmentRow:
    """One segment file: closed to writing or not, where its published bytes end, how many live."""

    sealed: bool = False
    end: int = 0
    live_bytes: int = 0

    def encode(self) -> bytes:
        return _SEGMENT.pack(self.sealed, self.end, self.live_bytes)


def decode_segment(body: bytes) -> SegmentRow:
    sealed, end, live = _SEGMENT.unpack(body)
    return SegmentRow(bool(sealed), end, live)


@dataclass
class NamespaceRow:
    """One namespace's digest and what the store holds of it."""

    digest: bytes
    blocks: int = 0
    nbytes: int = 0

    def encode(self) -> bytes:
        return _NAMESPACE.pack(self.digest, self.blocks, self.nbytes)


def decode_namespace(body: bytes) -> NamespaceRow:
    return NamespaceRow(*_NAMESPACE.unpack(body))


@dataclass
class Counters:
    """Totals over all extents, kept in the transaction that changes them."""

    used_bytes: int = 0
    blocks: int = 0
    extents: int = 0
    next_namespace: int = 0

    def encode(self) -> bytes:
        return _COUNTERS.pack(self.used_bytes, self.blocks, self.extents, self.next_namespace)


def decode_counters(body: bytes) -> Counters:
    return Counters(*_COUNTERS.unpack(body))


WHOLE_FILE = 2**64 - 1


@dataclass(frozen=True)
class Freed:
    """A range of a segment the catalogue no longer names. `extent` 0: it never named it.

    `WHOLE_FILE` as offset (and length 0) is the file itself, once nothing lives in it.
    """

    extent: int
    segment: int
    offset: int
    length: int

    @property
    def whole_file(self) -> bool:
        return self.offset == WHOLE_FILE
