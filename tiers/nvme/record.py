"""The header of one record, to bytes and back. Pure: no file, no catalogue, no clock.

`FORMAT.md` beside this file is the grammar; its worked example is a test. A record is one extent:
a header of whole pages, then each block's stored bytes padded to whole pages. The header alone is
enough to reject bytes that are not what a reader came for.
"""

from dataclasses import dataclass
from itertools import accumulate
from struct import Struct

from xxhash import xxh3_64_intdigest

from kvtier.index.words import BlockKey
from kvtier.tiers.errors import RecordRefused, StoreVersion

PAGE = 4096
"""Bytes. O_DIRECT's unit, and the alignment of every header and every stored block."""

FORMAT_VERSION = 2
MAGIC = b"KVTIER\r\n"
RAW = 0
"""Codec: the stored bytes are the block's bytes."""

PLANES = (1, 2, 4)
"""The other codecs: zstd over that many byte planes. Their stored bytes always take fewer pages
than the raw block."""

_FIXED = Struct("<8sIIQQ32s32sIIIIQQ")
_BLOCK = Struct("<32sQIHH")
_CHECKSUM_AT = 112
_CHECKSUM_END = 120


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def table_bytes(planes: int) -> int:
    """What stands in front of the planes: u64 checksum, u32 length of each."""
    return 8 + 4 * planes


@dataclass(frozen=True)
class StoredBlock:
    """One block's row in a header. `checksum` is xxh3-64 of the decoded bytes."""

    key: BlockKey
    checksum: int
    stored_bytes: int
    codec: int = RAW


@dataclass(frozen=True)
class RecordHeader:
    """What a record says about itself. `tokens` are little-endian int32, all blocks in order.

    `segment` and `page` are its place: the segment's id, and the page of it where it begins.
    """

    generation: int
    segment: int
    page: int
    namespace: bytes
    parent: BlockKey
    block_bytes: int
    tokens: bytes
    blocks: tuple[StoredBlock, ...]

    @property
    def block_tokens(self) -> int:
        """Token ids in one block."""
        return len(self.tokens) // 4 // len(self.blocks)

    @property
    def header_bytes(self) -> int:
        return header_bytes(len(self.blocks), self.block_tokens)

    @property
    def record_bytes(self) -> int:
        """Header and payload with their padding."""
        return self.header_bytes + sum(padded(block.stored_bytes) for block in self.blocks)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each block's stored bytes begin, from the record's first byte."""
        sizes = (padded(block.stored_bytes) for block in self.blocks[:-1])
        return tuple(accumulate(sizes, initial=self.header_bytes))

    def tokens_of(self, position: int) -> bytes:
        """The token ids of one block, as stored."""
        stride = 4 * self.block_tokens
        return self.tokens[position * stride : (position + 1) * stride]


def header_bytes(num_blocks: int, block_tokens: int) -> int:
    """Bytes of the header of a record of that many blocks: whole pages."""
    return padded(_FIXED.size + num_blocks * (_BLOCK.size + 4 * block_tokens))


def encode_header(header: RecordHeader) -> bytes:
    """`header_bytes` bytes, ready to stand in front of the payload."""
    count = len(header.blocks)
    fixed = _FIXED.pack(
        MAGIC,
        FORMAT_VERSION,
        header.header_bytes,
        header.generation,
        header.record_bytes,
        header.namespace,
        header.parent,
        count,
        header.block_tokens,
        header.block_bytes,
        header.page,
        0,
        header.segment,
    )
    rows = b"".join(
        _BLOCK.pack(block.key, block.checksum, block.stored_bytes, block.codec, 0)
        for block in header.blocks
    )
    body = bytearray((fixed + rows + header.tokens).ljust(header.header_bytes, b"\0"))
    body[_CHECKSUM_AT:_CHECKSUM_END] = xxh3_64_intdigest(body).to_bytes(8, "little")
    return bytes(body)


def decode_header(raw: bytes) -> RecordHeader:
    """Read a header of exactly `len(raw)` bytes.

    Raises `StoreVersion` if it is of another format version, and `RecordRefused` if it is not a
    header, is damaged, or contradicts itself.
    """
    if len(raw) < _FIXED.size or raw[:8] != MAGIC:
        raise RecordRefused("record: no header at this place; the record is gone or damaged")
    (
        _,
        version,
        length,
        generation,
        record_bytes,
        namespace,
        parent,
        count,
        block_tokens,
        block_bytes,
        page,
        checksum,
        segment,
    ) = _FIXED.unpack_from(raw)
    if version != FORMAT_VERSION:
        raise StoreVersion(
            f"record: format {version}, this kvtier reads format {FORMAT_VERSION}; "
            "use the kvtier that wrote the store, or a new directory"
        )
    blank = bytearray(raw)
    blank[_CHECKSUM_AT:_CHECKSUM_END] = bytes(8)
    if length != len(raw) or xxh3_64_intdigest(blank) != checksum:
        raise RecordRefused("record: the header's checksum does not match; it is damaged")
    if not count or length != header_bytes(count, block_tokens):
        raise RecordRefused("record: the header contradicts itself")
    rows_end = _FIXED.size + count * _BLOCK.size
    tokens = bytes(raw[rows_end : rows_end + 4 * count * block_tokens])
    blocks = tuple(
        StoredBlock(BlockKey(key), digest, stored, codec)
        for key, digest, stored, codec, _ in _BLOCK.iter_unpack(raw[_FIXED.size : rows_end])
    )
    header = RecordHeader(
        generation, segment, page, namespace, BlockKey(parent), block_bytes, tokens, blocks
    )
    if (
        not all(_sound(block, block_bytes) for block in blocks)
        or header.record_bytes != record_bytes
    ):
        raise RecordRefused("record: the header's lengths or codecs do not add up")
    return header


def _sound(block: StoredBlock, block_bytes: int) -> bool:
    if block.codec == RAW:
        return block.stored_bytes == block_bytes
    if block.codec not in PLANES or block_bytes % block.codec:
        return False
    shorter = padded(block.stored_bytes) < padded(block_bytes)
    return shorter and block.stored_bytes > table_bytes(block.codec)
