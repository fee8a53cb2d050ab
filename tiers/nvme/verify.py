"""A record of a store, read whole and verified, for those who read everything: check and export.

Knows what the catalogue says of one record; not who else is in its segment.
"""

from kvtier.tiers.contracts import Bytes
from kvtier.tiers.errors import RecordRefused
from kvtier.tiers.nvme.bundle import check_names
from kvtier.tiers.nvme.checksum import checksum
from kvtier.tiers.nvme.codecs import Coder
from kvtier.tiers.nvme.files import Files, read_whole
from kvtier.tiers.nvme.reader import check_identity
from kvtier.tiers.nvme.record import PAGE, RecordHeader, decode_header
from kvtier.tiers.nvme.rows import Extent


def read_record(
    files: Files, fd: int, extent: Extent, namespace: bytes, record: Bytes
) -> RecordHeader:
    """Fill `record`, uint8 [whole pages], with the beginning of an extent's record.

    Returns its header, verified. Raises `RecordRefused`, `StoreVersion`, `OSError`.
    """
    read_whole(files, fd, [record], extent.offset)
    header = decode_header(record[: extent.header_pages * PAGE].tobytes())
    check_identity(header, extent, namespace)
    check_names(header)
    return header


def sound_block(header: RecordHeader, position: int, record: Bytes, coder: Coder) -> Bytes:
    """The decoded bytes of a block that `read_record` brought. Good until `coder` decodes again.

    Raises `RecordRefused`, naming the block, if they are not those that were written.
    """
    row, offset = header.blocks[position], header.offsets[position]
    stored = record[offset : offset + row.stored_bytes]
    try:
        block = coder.decoded(row.codec, stored, header.block_bytes)
    except RecordRefused as error:
        raise RecordRefused(f"block {row.key.hex()} fails its checksum ({error})") from error
    if checksum(block) != row.checksum:
        raise RecordRefused(f"block {row.key.hex()} fails its checksum")
    return block
