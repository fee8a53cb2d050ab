"""The words every room shares: tiers, tokens, block keys. Values only; nothing here acts.

A *block* is `block_size` consecutive tokens' keys and values, all layers, as one run of bytes.
A *block key* names one block's content: a keyed BLAKE2b chain over everything before it.
"""

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from hashlib import blake2b
from typing import NewType

import numpy as np
import numpy.typing as npt

from kvtier.index.errors import BadTokens

BlockKey = NewType("BlockKey", bytes)
"""32 bytes: `blake2b(parent key + token ids, key=namespace digest)`."""

Tokens = npt.NDArray[np.int32]
"""Token ids, one-dimensional, C-contiguous."""

BlockIds = npt.NDArray[np.int32]
"""Ids of blocks inside one `RadixIndex`. Not slots: an id says which block, a slot says where."""

Slots = npt.NDArray[np.int32]
"""Places inside one pool; -1 is no place."""

KEY_BYTES = 32
ROOT_KEY = BlockKey(bytes(KEY_BYTES))
"""The parent of a first block."""


class TierId(StrEnum):
    """A level of storage, fastest first in any list of tiers."""

    HBM = "hbm"
    DRAM = "dram"
    NVME = "nvme"
    SIDECAR = "sidecar"


class Residency(IntEnum):
    """Where one block stands in one tier: ABSENT -> FILLING -> RESIDENT -> LEAVING -> ABSENT.

    Only RESIDENT is matched. A failed fill returns to ABSENT. LEAVING may return to RESIDENT (its
    bytes were only being read); a pinned block never becomes LEAVING.
    """

    ABSENT = 0
    FILLING = 1
    RESIDENT = 2
    LEAVING = 3


def as_tokens(ids: "Sequence[int] | npt.NDArray[np.integer]") -> Tokens:
    """Return `ids` as a contiguous int32 array (no copy if it is one already).

    Raises `BadTokens` if it is not one-dimensional, not integers, negative, or beyond int32.
    """
    array = np.asarray(ids)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadTokens(
            f"tokens: want a one-dimensional run of integers, got shape {array.shape} "
            f"of {array.dtype}; pass the tokenizer's ids"
        )
    if array.dtype != np.int32:
        if int(array.max()) > np.iinfo(np.int32).max:
            raise BadTokens(f"tokens: id {int(array.max())} does not fit in 32 bits")
        array = array.astype(np.int32)
    if int(array.min()) < 0:
        raise BadTokens(f"tokens: id {int(array.min())} is negative; pass the tokenizer's ids")
    return np.ascontiguousarray(array)


def block_keys(
    namespace: bytes, parent: BlockKey, tokens: Tokens, block_size: int
) -> list[BlockKey]:
    """Chain the keys of the whole blocks in `tokens`, which follow the block named `parent`.

    `namespace` is the 32-byte digest that keys the hash. Trailing tokens that do not fill a block
    get no key. Every hash covers the parent's full 32 bytes and the ids as little-endian int32.
    """
    keyed = blake2b(key=namespace, digest_size=KEY_BYTES)
    data = tokens.astype("<i4", copy=False).tobytes()
    stride = 4 * block_size
    keys: list[BlockKey] = []
    for start in range(0, len(data) - stride + 1, stride):
        state = keyed.copy()
        state.update(parent)
        state.update(data[start : start + stride])
        parent = BlockKey(state.digest())
        keys.append(parent)
    return keys
