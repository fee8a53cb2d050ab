"""The catalogue's rows, to bytes and back. Pure: knows no LMDB and no file.

Every value ends in the xxh3-64 of key and value, seeded with its table, so that a row is good only
under its own key in its own table. `FORMAT.md` has the grammar.
"""

from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from itertools import accumulate
from struct import Struct, unpack_from

from xxhash import xxh3_64_intdigest

from kvtier.index.words import KEY_BYTES, BlockKey
from kvtier.tiers.errors import StoreCorrupt
from kvtier.tiers.nvme.record import PAGE

CURE = "run `kvtier check --rebuild-catalogue` on the store"
"""What helps against any damage to the catalogue; opening the store for writing does the same."""

_CHECKSUM_BYTES = 8
_FOUND_BY = 16


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
    USES = 8
    PINS = 9
    HOLDS = 10
    DUE = 11


def seal(table: Table, key: bytes, body: bytes) -> bytes:
    """`body` and its checksum."""
    return body + xxh3_64_intdigest(key + body, seed=table).to_bytes(_CHECKSUM_BYTES, "little")


def unseal(table: Table, key: bytes, value: bytes) -> bytes:
    """The body. Raises `StoreCorrupt` if it does not belong under this key in this table."""
    body = value[:-_CHECKSUM_BYTES]
    told = int.from_bytes(value[-_CHECKSUM_BYTES:], "little")
    if len(value) < _CHECKSUM_BYTES or xxh3_64_intdigest(key + body, seed=table) != told:
        raise StoreCorrupt(
            f"catalogue: table {table.name.lower()}, row {key.hex()} is damaged; {CURE}"
        )
    return body


_BLOCK = Struct("<QH")
_EXTENT = Struct("<IQQHHHHH32s")
_EXPIRY = Struct("<HQ")
_SEGMENT = Struct("<BQQ")
_NAMESPACE = Struct("<32sQQQQB")
_COUNTERS = Struct("<QQQQIQ")
_PIN = Struct("<QQ")
_DAY_WRITTEN = Struct("<QQ")
_NUMBER = Struct(">Q")
_PAIR = Struct(">QQ")
_PREFIX = Struct(">I")
_HOLD = Struct(">QHQ")
_DUE = Struct(">QBQ")


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
    """Key of `blocks` and `heads`: blocks of one namespace stand together.

    Half of a block's key is enough to find it by; its extent has the whole.
    """
    return _PREFIX.pack(namespace_id) + key[:_FOUND_BY]


@dataclass(frozen=True)
class Expiry:
    """From block `position` of its extent on, nothing is served once it is `at` (microseconds)."""

    position: int
    at: int


@dataclass(frozen=True)
class Extent:
    """One record as the catalogue knows it: its first `live` blocks are readable.

    `names` is the blocks' keys end to end, `pages` the stored pages of each; the first `pinned`
    blocks may not be evicted. `expiries` rise in position and fall in time.
    """

    id: int
    namespace_id: int
    segment: int
    offset: int
    header_pages: int
    live: int
    parent: BlockKey
    names: bytes = field(repr=False)
    pages: tuple[int, ...]
    pinned: int = 0
    expiries: tuple[Expiry, ...] = ()

    @cached_property
    def keys(self) -> tuple[BlockKey, ...]:
        """The key of each block."""
        return tuple(map(self.key, range(len(self.pages))))

    def key(self, position: int) -> BlockKey:
        return BlockKey(self.names[position * KEY_BYTES : (position + 1) * KEY_BYTES])

    @property
    def tail(self) -> BlockKey:
        """The last live block."""
        return self.key(self.live - 1)

    @property
    def nbytes(self) -> int:
        """Bytes it holds on disk now: header and live blocks."""
        return self.end(self.live) - self.offset

    @property
    def pinned_bytes(self) -> int:
        """Bytes of it that pins hold: header and pinned blocks."""
        return self.end(self.pinned) - self.offset

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each block's stored bytes begin in the segment; one more entry for the end."""
        first = self.offset + PAGE * self.header_pages
        return tuple(accumulate((PAGE * n for n in self.pages), initial=first))

    def end(self, live: int) -> int:
        """Where the record ends in the segment if `live` blocks are kept (0: nothing is)."""
        return self.starts[live] if live else self.offset

    def served(self, now: int) -> int:
        """How many leading blocks its own expiries leave at `now`."""
        gone = (expiry.position for expiry in self.expiries if expiry.at <= now)
        return min(gone, default=self.live)

    def cut(self, live: int) -> "Extent":
        """The same with only its first `live` blocks, and no word about the others."""
        kept = tuple(expiry for expiry in self.expiries if expiry.position < live)
        return replace(self, live=live, pinned=min(self.pinned, live), expiries=kept)

    def encode(self) -> bytes:
        count = len(self.pages)
        head = _EXTENT.pack(
            self.namespace_id,
            self.segment,
            self.offset,
            self.header_pages,
            count,
            self.live,
            self.pinned,
            len(self.expiries),
            self.parent,
        )
        expiries = (_EXPIRY.pack(expiry.position, expiry.at) for expiry in self.expiries)
        return b"".join((head, self.names, Struct(f"<{count}I").pack(*self.pages), *expiries))


def decode_extent(id: int, body: bytes) -> Extent:
    space, segment, offset, header, count, live, pinned, num_expiries, parent = _EXTENT.unpack_from(
        body
    )
    pages_at = _EXTENT.size + KEY_BYTES * count
    rest = pages_at + 4 * count
    if len(body) != rest + _EXPIRY.size * num_expiries or not pinned <= live <= count or not live:
        raise StoreCorrupt(f"catalogue: extent {id} contradicts itself; {CURE}")
    return Extent(
        id,
        space,
        segment,
        offset,
        header,
        live,
        BlockKey(parent),
        body[_EXTENT.size : pages_at],
        unpack_from(f"<{count}I", body, pages_at),
        pinned,
        tuple(Expiry(*row) for row in _EXPIRY.iter_unpack(body[rest:])) if num_expiries else (),
    )


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
    """One namespace's digest and what the store holds of it.

    `expiries` counts the rows of that name in its extents: without any, a reader need not ask a
    block's ancestors. `leaving`: it is being deleted, and serves nothing.
    """

    digest: bytes
    blocks: int = 0
    nbytes: int = 0
    pinned_bytes: int = 0
    expiries: int = 0
    leaving: bool = False

    def encode(self) -> bytes:
        return _NAMESPACE.pack(
            self.digest, self.blocks, self.nbytes, self.pinned_bytes, self.expiries, self.leaving
        )


def decode_namespace(body: bytes) -> NamespaceRow:
    digest, blocks, nbytes, pinned, expiries, leaving = _NAMESPACE.unpack(body)
    return NamespaceRow(digest, blocks, nbytes, pinned, expiries, bool(leaving))


@dataclass
class Counters:
    """Totals over all extents, kept in the transaction that changes them."""

    used_bytes: int = 0
    blocks: int = 0
    extents: int = 0
    pinned_bytes: int = 0
    last_namespace: int = 0
    last_pin: int = 0

    def encode(self) -> bytes:
        return _COUNTERS.pack(
            self.used_bytes,
            self.blocks,
            self.extents,
            self.pinned_bytes,
            self.last_namespace,
            self.last_pin,
        )


def decode_counters(body: bytes) -> Counters:
    return Counters(*_COUNTERS.unpack(body))


@dataclass(frozen=True)
class PinRow:
    """A pin's number and when it ends (microseconds; 0: never)."""

    id: int
    expires_at: int

    def encode(self) -> bytes:
        return _PIN.pack(self.id, self.expires_at)


def decode_pin(body: bytes) -> PinRow:
    return PinRow(*_PIN.unpack(body))


def pin_key(namespace_id: int, leaf: bytes, label: str) -> bytes:
    """Key of `pins`: a block's pins stand together, a namespace's too."""
    return _PREFIX.pack(namespace_id) + leaf + label.encode()


def key_pin(key: bytes) -> tuple[int, BlockKey, str]:
    """`(namespace, leaf, label)`."""
    start = _PREFIX.size + KEY_BYTES
    return (
        key_namespace(key[: _PREFIX.size]),
        BlockKey(key[_PREFIX.size : start]),
        (key[start:].decode()),
    )


def hold_key(extent: int, blocks: int, pin: int) -> bytes:
    """Key of `holds`: the pin that holds most of an extent is the last of its rows."""
    return _HOLD.pack(extent, blocks, pin)


def key_hold(key: bytes) -> tuple[int, int, int]:
    """`(extent, leading blocks held, pin)`."""
    extent, blocks, pin = _HOLD.unpack(key)
    return extent, blocks, pin


class Due(IntEnum):
    """What a row of `due` names."""

    EXTENT = 0
    PIN = 1
    NAMESPACE = 2


def due_key(at: int, kind: Due, id: int) -> bytes:
    """Key of `due`: what is to be done first stands first."""
    return _DUE.pack(at, kind, id)


def key_due(key: bytes) -> tuple[int, Due, int]:
    at, kind, id = _DUE.unpack(key)
    return at, Due(kind), id


@dataclass(frozen=True)
class DayWritten:
    """Record bytes written on one UTC day; `day` counts from 1970-01-01."""

    day: int
    nbytes: int

    def encode(self) -> bytes:
        return _DAY_WRITTEN.pack(self.day, self.nbytes)


def decode_day_written(body: bytes) -> DayWritten:
    return DayWritten(*_DAY_WRITTEN.unpack(body))


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
