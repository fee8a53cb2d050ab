"""One block's bytes to its stored bytes and back: byte planes, each as it is or one zstd frame.

The numbers of a block share their exponents far more than their mantissas, so the bytes that carry
exponents are compressed apart from the rest. `FORMAT.md` has the grammar. Pure: knows no file and
no pool; what it reads is not trusted. A `Coder` belongs to one thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from xxhash import xxh3_64_intdigest

from kvtier.tiers.contracts import Bytes
from kvtier.tiers.errors import CodecUnknown, RecordRefused
from kvtier.tiers.nvme.record import PLANES, RAW, padded, table_bytes

CODECS = ("raw", "zstd", "auto")
"""What a policy may be called. `auto`: zstd where loading it is measured to be faster."""

WORTHWHILE = 0.95
"""A block is stored encoded if that takes at most this part of the raw block's pages."""

_SUM = Struct("<Q")
_LENGTHS = {planes: Struct(f"<{planes}I") for planes in PLANES}
_WORDS = {planes: np.dtype(f"<u{planes}") for planes in PLANES}

# Exponents repeat as a distribution, not as strings: what shrinks them is the entropy coder, and
# few and long matches leave it the most. On bf16 KV 1.44x at twice the speed of level 1 (1.41x).
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    hash_log=8,
    chain_log=6,
    search_log=1,
    window_log=20,
    write_content_size=True,
)


@dataclass(frozen=True)
class CodecPolicy:
    """How blocks are to be stored: a name out of `CODECS`, and the bytes of one number in a block.

    Raises `CodecUnknown`.
    """

    codec: str = "raw"
    element_bytes: int = 1

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise CodecUnknown(f"codec: {self.codec!r} is unknown; use one of {', '.join(CODECS)}")
        if self.element_bytes not in PLANES:
            raise CodecUnknown(
                f"element_bytes: {self.element_bytes} is not supported; use 1, 2 or 4"
            )

    def named(self, codec: str | None) -> "CodecPolicy":
        """This policy, or (if one is named) another codec's over the same numbers."""
        return self if codec is None else replace(self, codec=codec)


class Coder:
    """Compressor, decompressor and memory of one thread."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self._decompressor = zstandard.ZstdDecompressor()
        self._planes = np.empty(0, np.uint8)
        self._halves = np.empty(0, np.uint8)
        self._block = np.empty(0, np.uint8)

    def encode(self, block: Bytes, planes: int) -> bytes | None:
        """The stored bytes of `block` under codec `planes`; None if it is to be stored raw.

        `block`: uint8, contiguous. None where it is not worthwhile or not made of such elements.
        """
        if block.nbytes % planes:
            return None
        pieces = [self._shorter(plane) for plane in self._split(block, planes)]
        lengths = [len(piece) for piece in pieces]
        if padded(table_bytes(planes) + sum(lengths)) > WORTHWHILE * padded(block.nbytes):
            return None
        body = b"".join((_LENGTHS[planes].pack(*lengths), *pieces))
        return _SUM.pack(xxh3_64_intdigest(body)) + body

    def decode(self, codec: int, stored: Bytes, block: Bytes) -> None:
        """Fill `block` (uint8, contiguous) from the stored bytes of a codec other than raw.

        The memory it takes depends on the block's size alone. Raises `RecordRefused` if they are
        not what `encode` makes of such a block; what stands in `block` then means nothing.
        """
        if codec not in PLANES or block.nbytes % codec or len(stored) <= table_bytes(codec):
            raise RecordRefused("block: its stored bytes are not of its codec; it is damaged")
        if xxh3_64_intdigest(stored[_SUM.size :].data) != _SUM.unpack_from(stored.data)[0]:
            raise RecordRefused("block: its stored bytes fail their checksum; it is damaged")
        size, at = block.nbytes // codec, table_bytes(codec)
        lengths = _LENGTHS[codec].unpack_from(stored.data, _SUM.size)
        if at + sum(lengths) != len(stored) or not all(0 < n <= size for n in lengths):
            raise RecordRefused("block: the lengths of its planes do not add up; it is damaged")
        planes = []
        for length in lengths:
            planes.append(self._plane(stored[at : at + length], size))
            at += length
        self._merge(planes, block)

    def decoded(self, codec: int, stored: Bytes, block_bytes: int) -> Bytes:
        """The block: `stored` itself if it is raw, else memory that is valid until the next call.

        Raises as `decode`.
        """
        if codec == RAW:
            return stored
        if len(self._block) < block_bytes:
            self._block = np.empty(block_bytes, np.uint8)
        self.decode(codec, stored, self._block[:block_bytes])
        return self._block[:block_bytes]

    def _split(self, block: Bytes, planes: int) -> list[Bytes]:
        if planes == 1:
            return [block]
        if len(self._planes) < block.nbytes:
            self._planes = np.empty(block.nbytes, np.uint8)
        split = list(self._planes[: block.nbytes].reshape(planes, -1))
        words = block.view(_WORDS[planes])
        for number, plane in enumerate(split):
            np.right_shift(words, 8 * number, out=plane, casting="unsafe")
        return split

    def _merge(self, planes: Sequence[Bytes], block: Bytes) -> None:
        if len(planes) == 1:
            np.copyto(block, planes[0])
        elif len(planes) == 2:
            _join(planes[0], planes[1], block.view("<u2"))
        else:
            if len(self._halves) < block.nbytes:
                self._halves = np.empty(block.nbytes, np.uint8)
            low, high = self._halves[: block.nbytes].view("<u2").reshape(2, -1)
            _join(planes[0], planes[1], low)
            _join(planes[2], planes[3], high)
            _join(low, high, block.view("<u4"))

    def _shorter(self, plane: Bytes) -> "bytes | memoryview":
        frame = self._compressor.compress(plane.data)
        return frame if len(frame) < len(plane) else plane.data

    def _plane(self, piece: Bytes, size: int) -> Bytes:
        """One plane of `size` bytes. Nothing is allocated before the frame has said that size."""
        if len(piece) == size:
            return piece
        try:
            frame = zstandard.get_frame_parameters(piece.data)
            if frame.content_size == size and frame.window_size <= size:
                plane = self._decompressor.decompress(piece.data, allow_extra_data=False)
                return np.frombuffer(plane, np.uint8)
        except zstandard.ZstdError as error:
            raise RecordRefused(f"block: a plane is damaged ({error})") from error
        raise RecordRefused("block: a plane is not of the size it should be; it is damaged")


def _join(low: npt.NDArray[Any], high: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """`out = high << bits of low | low`, in the form numpy runs fastest (widening as it goes)."""
    np.multiply(high, 1 << 8 * low.itemsize, out=out, dtype=out.dtype, casting="unsafe")
    np.add(out, low, out=out)
