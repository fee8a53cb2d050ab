"""Encoding is lossless, worthwhile or not done at all, and decoding trusts nothing."""

import tracemalloc
from collections.abc import Sequence
from struct import pack

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvtier.tiers.contracts import Bytes
from kvtier.tiers.errors import CodecUnknown, RecordRefused
from kvtier.tiers.nvme.codecs import CODECS, WORTHWHILE, CodecPolicy, Coder
from kvtier.tiers.nvme.record import PLANES, padded
from tests.prf import block_bytes, number_bytes

GUARD = 0xA5
SIZES = (1, 2, 4095, 5000, 8192, 45056, 100_004)


def content(kind: str, nbytes: int, planes: int, seed: int = 0) -> Bytes:
    """A block of one kind; the same for the same arguments."""
    key = seed.to_bytes(4, "little")
    if kind == "numbers":
        return number_bytes(key, nbytes, planes)
    if kind == "constant":
        return np.full(nbytes, seed % 256, np.uint8)
    return block_bytes(key, nbytes)


def decode_guarded(codec: int, stored: bytes, nbytes: int, *, shift: int = 0) -> Bytes:
    """Decode into the middle of a larger memory, and see that nothing around it was touched."""
    memory = np.full(nbytes + 64 + shift, GUARD, np.uint8)
    out = memory[32 + shift : 32 + shift + nbytes]
    try:
        Coder().decode(codec, np.frombuffer(stored, np.uint8), out)
    finally:
        assert (memory[: 32 + shift] == GUARD).all() and (memory[-32:] == GUARD).all()
    return out


def stored_as(planes: int, pieces: Sequence[bytes], lengths: Sequence[int] | None = None) -> bytes:
    """Stored bytes with a good checksum, whatever is in them."""
    told = lengths or [len(piece) for piece in pieces]
    body = pack(f"<{planes}I", *told) + b"".join(pieces)
    return pack("<Q", xxh3_64_intdigest(body)) + body


@given(
    kind=st.sampled_from(["numbers", "constant", "noise"]),
    nbytes=st.sampled_from(SIZES) | st.integers(1, 70_000),
    planes=st.sampled_from(PLANES),
    seed=st.integers(0, 2**32 - 1),
    shift=st.integers(0, 3),
)
@example(kind="numbers", nbytes=45056, planes=4, seed=1, shift=3)
def test_what_is_encoded_decodes_to_the_same_bytes_and_saves_pages(
    kind: str, nbytes: int, planes: int, seed: int, shift: int
) -> None:
    block = content(kind, nbytes, planes, seed)
    encoded = Coder().encode(block, planes)
    if encoded is not None:
        assert padded(len(encoded)) <= WORTHWHILE * padded(nbytes)
        assert np.array_equal(decode_guarded(planes, encoded, nbytes, shift=shift), block)


@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("nbytes", [45056, 100_004, 2 << 20])
def test_numbers_shrink_and_noise_is_left_alone(planes: int, nbytes: int) -> None:
    encoded = Coder().encode(content("numbers", nbytes, planes), planes)
    assert encoded is not None and len(encoded) < 0.9 * nbytes
    assert Coder().encode(content("noise", nbytes, planes), planes) is None


@pytest.mark.parametrize("nbytes", [1, 4095, 4096])
def test_a_block_of_one_page_is_left_alone(nbytes: int) -> None:
    assert Coder().encode(content("constant", nbytes, 1), 1) is None


@pytest.mark.parametrize(("nbytes", "planes"), [(45055, 2), (45054, 4), (45057, 4)])
def test_a_block_that_is_no_whole_number_of_elements_is_left_alone(
    nbytes: int, planes: int
) -> None:
    assert Coder().encode(content("constant", nbytes, planes), planes) is None


def test_planes_of_exponents_compress_better_than_the_bytes_as_they_come() -> None:
    block = content("numbers", 720 << 10, 2)
    together, apart = Coder().encode(block, 1), Coder().encode(block, 2)
    assert together is not None and apart is not None
    assert len(apart) < 0.95 * len(together)


def test_a_coder_may_be_used_for_blocks_of_any_size_in_any_order() -> None:
    coder = Coder()
    for nbytes, planes in [(45056, 4), (20480, 2), (100_004, 4), (45056, 1), (40960, 4)]:
        block = content("numbers", nbytes, planes, nbytes)
        encoded = coder.encode(block, planes)
        assert encoded is not None
        found = coder.decoded(planes, np.frombuffer(encoded, np.uint8), nbytes)
        assert np.array_equal(found, block)


@pytest.mark.parametrize("planes", PLANES)
def test_stored_bytes_cut_short_or_too_long_are_refused(planes: int) -> None:
    block = content("numbers", 24_000, planes)
    encoded = Coder().encode(block, planes)
    assert encoded is not None
    for cut in [*range(64), *range(64, len(encoded), 97), len(encoded) - 1]:
        with pytest.raises(RecordRefused):
            decode_guarded(planes, encoded[:cut], len(block))
    for tail in (b"\0", encoded):
        with pytest.raises(RecordRefused):
            decode_guarded(planes, encoded + tail, len(block))


@pytest.mark.parametrize("planes", PLANES)
def test_every_flipped_bit_of_stored_bytes_is_refused(planes: int) -> None:
    block = np.concatenate([content("numbers", 1024, planes), content("constant", 7168, 1)])
    encoded = Coder().encode(block, planes)
    assert encoded is not None
    coder, out = Coder(), np.empty(len(block), np.uint8)
    stored = np.frombuffer(encoded, np.uint8).copy()
    for bit in range(8 * len(stored)):
        stored[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordRefused):
            coder.decode(planes, stored, out)
        stored[bit // 8] ^= 1 << bit % 8
    coder.decode(planes, stored, out)
    assert np.array_equal(out, block)


@given(planes=st.sampled_from(PLANES), data=st.data())
def test_hostile_planes_under_a_good_checksum_are_refused_or_fill_just_the_block(
    planes: int, data: st.DataObject
) -> None:
    nbytes = 8192
    frame = zstandard.ZstdCompressor().compress(bytes(nbytes // planes))
    piece = st.sampled_from([b"", frame[:-1], frame + b"\0", frame]) | st.binary(max_size=60)
    pieces = data.draw(st.lists(piece, min_size=planes, max_size=planes))
    lengths = [data.draw(st.sampled_from([len(p), 0, 2**32 - 1, nbytes])) for p in pieces]
    try:
        out = decode_guarded(planes, stored_as(planes, pieces, lengths), nbytes)
    except RecordRefused:
        return
    assert pieces == [frame] * planes and not out.any()


@pytest.mark.parametrize("planes", PLANES)
def test_lengths_that_do_not_add_up_to_the_stored_bytes_are_refused(planes: int) -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(8192 // planes))
    pieces = [frame] * planes
    assert not decode_guarded(planes, stored_as(planes, pieces), 8192).any()
    for stored in (
        stored_as(planes, [*pieces, b"\0"], [len(frame)] * planes),
        stored_as(planes, pieces, [*[len(frame)] * (planes - 1), len(frame) + 1]),
    ):
        with pytest.raises(RecordRefused, match="do not add up"):
            decode_guarded(planes, stored, 8192)


def test_a_frame_that_is_longer_than_its_plane_is_refused() -> None:
    noise = content("noise", 8192, 1)
    frame = zstandard.ZstdCompressor().compress(noise.tobytes())
    assert len(frame) > 8192
    with pytest.raises(RecordRefused):
        decode_guarded(1, stored_as(1, [frame]), 8192)


def bomb(nbytes: int) -> bytes:
    """A small frame that decodes to many bytes, and says so, with a window of 128 KiB."""
    parameters = zstandard.ZstdCompressionParameters(window_log=17)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(bytes(nbytes))


def lying(frame: bytes, content_bytes: int) -> bytes:
    """The frame of more than 64 KiB with another content size in its header."""
    assert frame[4] >> 6 == 2  # the size takes four bytes
    at = 5 if frame[4] & 0x20 else 6
    return frame[:at] + pack("<I", content_bytes) + frame[at + 4 :]


def huge_window(nbytes: int) -> bytes:
    """A frame of `nbytes` zeros whose header asks for a window of a gigabyte."""
    descriptor, window = 0x80, (30 - 10) << 3
    rle_block = (1 | 1 << 1 | nbytes << 3).to_bytes(3, "little") + b"\0"
    return pack("<IBBI", 0xFD2FB528, descriptor, window, nbytes) + rle_block


SIZE = 200_000


@pytest.mark.parametrize(
    "frame",
    [
        bomb(64 << 20),
        lying(bomb(64 << 20), SIZE),
        lying(bomb(SIZE), SIZE - 1),
        lying(bomb(SIZE), 2**32 - 1),
        huge_window(SIZE),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(SIZE)),
        bomb(SIZE // 2) * 2,
        pack("<II", 0x184D2A50, SIZE) + bytes(40),
        b"\x28\xb5\x2f\xfd",
        bomb(SIZE)[:-2],
    ],
    ids="bomb lying short long window sizeless two skippable magic cut".split(),
)
def test_a_hostile_frame_is_refused_without_memory_for_what_it_claims(frame: bytes) -> None:
    stored = np.frombuffer(stored_as(1, [frame]), np.uint8)
    out = np.empty(SIZE, np.uint8)
    coder = Coder()
    tracemalloc.start()
    try:
        with pytest.raises(RecordRefused):
            coder.decode(1, stored, out)
        assert tracemalloc.get_traced_memory()[1] < 2 * SIZE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", [0, 3, 8, 2**16 - 1])
def test_a_codec_that_there_is_not_is_refused(codec: int) -> None:
    with pytest.raises(RecordRefused):
        Coder().decode(codec, np.zeros(100, np.uint8), np.empty(8192, np.uint8))


def test_a_policy_names_what_it_does_not_know_and_what_it_knows() -> None:
    with pytest.raises(CodecUnknown, match="'lz4' is unknown; use one of raw, zstd, auto"):
        CodecPolicy("lz4")
    with pytest.raises(CodecUnknown, match="element_bytes: 3 is not supported; use 1, 2 or 4"):
        CodecPolicy("raw", 3)
    policy = CodecPolicy("zstd", 2)
    assert policy.named(None) is policy
    assert [policy.named(name) for name in CODECS] == [CodecPolicy(name, 2) for name in CODECS]
