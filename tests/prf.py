"""Block bytes that a reader can recompute from the key alone, so that any mix-up shows."""

from hashlib import blake2b

import numpy as np
import numpy.typing as npt
from numpy.random import default_rng


def block_bytes(key: bytes, nbytes: int) -> npt.NDArray[np.uint8]:
    """uint8 [nbytes]: pseudo-random, the same for the same key (BLAKE2b seeds a PCG64)."""
    seed = int.from_bytes(blake2b(key, digest_size=16).digest(), "little")
    return np.frombuffer(default_rng(seed).bytes(nbytes), np.uint8).copy()


def mixed_bytes(key: bytes, nbytes: int) -> npt.NDArray[np.uint8]:
    """As `block_bytes`; every second key's bytes have half the bits, so that they compress."""
    return block_bytes(key, nbytes) & np.uint8(0x0F if key[0] & 1 else 0xFF)


def number_bytes(key: bytes, nbytes: int, element_bytes: int = 2) -> npt.NDArray[np.uint8]:
    """uint8 [nbytes]: normally distributed numbers of that many bytes, the same for the same key.

    They compress as K and V do: 4 is fp32, 2 is bf16, 1 is the byte of a bf16 with its exponent.
    """
    seed = int.from_bytes(blake2b(key, digest_size=16).digest(), "little")
    numbers = default_rng(seed).standard_normal(-(-nbytes // element_bytes), np.float32)
    high = numbers.astype("<f4").view(np.uint8).reshape(-1, 4)[:, 4 - element_bytes :]
    return np.ascontiguousarray(high).reshape(-1)[:nbytes].copy()
