"""FORMAT.md's worked example, and the header's own rules."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

import kvtier.tiers.nvme.record as record
from kvtier.index.words import ROOT_KEY, BlockKey, block_keys
from kvtier.tiers.errors import RecordRefused, StoreCorrupt, StoreVersion
from kvtier.tiers.nvme.codecs import Coder
from kvtier.tiers.nvme.record import PAGE, RecordHeader, StoredBlock, decode_header, encode_header
from kvtier.tiers.nvme.rows import Table, seal, unseal


def examples() -> list[bytes]:
    """The bytes spelt out in FORMAT.md, block by block."""
    page = (Path(record.__file__).parent / "FORMAT.md").read_text()
    found = []
    for text in re.findall(r"```hex\n(.*?)```", page, re.DOTALL):
        body = bytearray()
        for line in text.splitlines():
            offset, _, digits = line.partition("  ")
            assert int(offset, 16) == len(body)
            body += bytes.fromhex(digits)
        found.append(bytes(body))
    return found


def example() -> bytes:
    """The header spelt out in FORMAT.md."""
    return examples()[0].ljust(PAGE, b"\0")


def make(num_blocks: int, block_tokens: int, block_bytes: int) -> RecordHeader:
    """A header with some content everywhere."""
    tokens = np.arange(num_blocks * block_tokens, dtype="<i4").tobytes()
    blocks = tuple(
        StoredBlock(BlockKey(bytes([i + 1]) * 32), 2**64 - 1 - i, block_bytes)
        for i in range(num_blocks)
    )
    return RecordHeader(
        77, 2**64 - 3, 2**32 - 5, b"n" * 32, BlockKey(b"p" * 32), block_bytes, tokens, blocks
    )


def test_the_worked_example_decodes_to_what_the_page_says() -> None:
    header = decode_header(example())
    tokens = np.array([1, 2, 3, 40, 50, 60], np.int32)
    keys = tuple(block_keys(bytes(range(32)), ROOT_KEY, tokens, 3))
    assert header.namespace == bytes(range(32))
    assert (header.parent, header.generation) == (ROOT_KEY, 1 << 32 | 7)
    assert (header.segment, header.page) == (1 << 32 | 2, 5)
    assert (header.block_bytes, header.record_bytes, header.block_tokens) == (5000, 20480, 3)
    assert header.tokens == tokens.tobytes()
    assert tuple(block.key for block in header.blocks) == keys
    sums = tuple(xxh3_64_intdigest(bytes([value]) * 5000) for value in (0x11, 0x22))
    assert tuple(block.checksum for block in header.blocks) == sums
    assert header.offsets == (4096, 12288)


def test_the_worked_example_is_what_the_encoder_writes() -> None:
    assert encode_header(decode_header(example())) == example()


def test_the_worked_stored_bytes_decode_to_what_the_page_says() -> None:
    i, few = np.arange(64), np.arange(32)
    blocks = {
        1: np.full(64, 0x3C),
        2: np.stack([5 * i % 256, 0 * i + 0x3C], axis=1),
        4: np.stack([5 * few % 256, (7 * few + 16) % 256, 0 * few + 0x3C, 0 * few + 0x3C], axis=1),
    }
    for (codec, wanted), stored in zip(blocks.items(), examples()[1:], strict=True):
        assert len(stored) < wanted.size
        out = Coder().decoded(codec, np.frombuffer(stored, np.uint8), wanted.size)
        assert out.tolist() == wanted.ravel().tolist()


@pytest.mark.parametrize(
    ("codec", "stored_bytes", "sound"),
    [
        (0, 12292, True),
        (0, 12291, False),
        (0, 8192, False),
        (1, 13, True),
        (1, 12, False),
        (2, 8192, True),
        (2, 12289, False),  # as many pages as the raw block
        (4, 25, True),
        (4, 24, False),
        (3, 4096, False),
        (2**16 - 1, 4096, False),
    ],
)
def test_stored_bytes_that_their_codec_cannot_have_are_refused(
    codec: int, stored_bytes: int, sound: bool
) -> None:
    header = make(2, 3, 12292)
    odd = replace(header.blocks[1], codec=codec, stored_bytes=stored_bytes)
    header = replace(header, blocks=(header.blocks[0], odd))
    if sound:
        assert decode_header(encode_header(header)) == header
    else:
        with pytest.raises(RecordRefused):
            decode_header(encode_header(header))


def test_planes_that_do_not_divide_a_block_are_refused() -> None:
    header = make(1, 3, 12290)
    odd = replace(header.blocks[0], codec=4, stored_bytes=400)
    with pytest.raises(RecordRefused):
        decode_header(encode_header(replace(header, blocks=(odd,))))


@given(
    num_blocks=st.integers(1, 64), block_tokens=st.integers(0, 33), block_bytes=st.integers(1, 9999)
)
def test_a_header_survives_encoding_at_any_size(
    num_blocks: int, block_tokens: int, block_bytes: int
) -> None:
    header = make(num_blocks, block_tokens, block_bytes)
    raw = encode_header(header)
    assert len(raw) == header.header_bytes and len(raw) % PAGE == 0
    assert decode_header(raw) == header


@pytest.mark.parametrize(
    ("num_blocks", "block_tokens", "step"), [(1, 16, 1), (5, 3, 7), (64, 17, 9)]
)
def test_a_flipped_bit_anywhere_in_a_header_is_refused(
    num_blocks: int, block_tokens: int, step: int
) -> None:
    raw = bytearray(encode_header(make(num_blocks, block_tokens, 4097)))
    for bit in range(0, 8 * len(raw), step):
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises((RecordRefused, StoreVersion)):
            decode_header(bytes(raw))
        raw[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("cut", [0, 1, 127, 4095])
def test_a_header_cut_short_is_refused(cut: int) -> None:
    with pytest.raises(RecordRefused):
        decode_header(encode_header(make(2, 3, 10))[:cut])


def test_another_format_version_is_named_and_refused() -> None:
    raw = bytearray(example())
    raw[8] = 3
    with pytest.raises(StoreVersion, match="format 3, this kvtier reads format 2"):
        decode_header(bytes(raw))


@pytest.mark.parametrize("odd", [b"", b"x", b"longer than a checksum"])
def test_a_row_is_valid_only_under_its_key_in_its_table(odd: bytes) -> None:
    value = seal(Table.BLOCKS, b"key", odd)
    assert unseal(Table.BLOCKS, b"key", value) == odd
    for table, key in [(Table.BLOCKS, b"kez"), (Table.EXTENTS, b"key")]:
        with pytest.raises(StoreCorrupt, match="damaged"):
            unseal(table, key, value)
