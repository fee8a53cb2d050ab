"""The checksum of a block, as records carry it, at the price of the bytes. Pure."""

from xxhash import xxh3_64, xxh3_64_intdigest

from kvtier.tiers.contracts import Bytes

_PIECE = 64 << 10
"""Bytes. For a longer piece the library gives the interpreter's lock away while it works."""


def checksum(block: Bytes) -> int:
    """xxh3-64 of a block's bytes, uint8 [n].

    The lock is kept: 256 KiB take 10 us, and a worker that gives the lock to another one after
    each block pays more than that for getting it back (twice over: both are woken for it).
    """
    if block.nbytes <= _PIECE:
        return xxh3_64_intdigest(block.data)
    digest, data = xxh3_64(), block.data
    for start in range(0, len(data), _PIECE):
        digest.update(data[start : start + _PIECE])
    return digest.intdigest()
