"""A small index with three columns (HBM, DRAM, NVMe as a store) and ways to fill it."""

import numpy as np

from kvtier.index.radix import RadixIndex
from kvtier.index.words import BlockIds, Residency, TierId, Tokens

NS = b"namespace"
HBM, DRAM, NVME = 0, 1, 2


def make(size: int, *, max_hint_blocks: int = 1_000_000) -> RadixIndex:
    columns = [TierId.HBM, TierId.DRAM, TierId.NVME]
    return RadixIndex(size, columns, stores=[TierId.NVME], max_hint_blocks=max_hint_blocks)


def text(size: int, *blocks: int, rest: int = 0) -> Tokens:
    """Blocks named by numbers (a block repeats its number), then `rest` more tokens."""
    return np.repeat(np.array([*blocks, 99], np.int32), size)[: len(blocks) * size + rest]


def fill(index: RadixIndex, col: int, tokens: Tokens, namespace: bytes = NS) -> BlockIds:
    """Insert and make RESIDENT what is ABSENT in `col`; a block's slot is its id."""
    ids = index.insert(namespace, tokens)
    absent = ids[index.state(col, ids) == Residency.ABSENT]
    index.begin_fill(col, absent, absent)
    index.finish_fill(col, absent)
    return ids


def evict(index: RadixIndex, col: int, ids: BlockIds) -> None:
    index.begin_leave(col, ids)
    index.finish_leave(col, ids)
