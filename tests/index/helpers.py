"""A small index with three columns (HBM, DRAM, NVMe as a store) and ways to fill it; namespaces."""

from dataclasses import fields, replace
from typing import Any

import numpy as np

from kvtier.index.namespace import BlockLayout, Namespace
from kvtier.index.radix import RadixIndex
from kvtier.index.words import BlockIds, Residency, TierId, Tokens

NS = b"namespace"
HBM, DRAM, NVME = 0, 1, 2
LAYOUT = BlockLayout(layers=3, kv_heads=5, block_size=16, head_dim=7, dtype="float32")
BASE = Namespace(
    weights="aa",
    config="bb",
    layout=LAYOUT,
    compute_dtype="float32",
    engine="kvtier",
    engine_version="1",
)


def variants() -> list[tuple[str, Namespace]]:
    """`BASE` with one field changed, for every field, with its name."""
    changed: list[tuple[str, Namespace]] = []
    for field in fields(Namespace):
        value = getattr(BASE, field.name)
        if field.name != "layout":
            other: dict[str, Any] = {field.name: value + (1 if isinstance(value, int) else "x")}
            changed.append((field.name, replace(BASE, **other)))
    for field in fields(BlockLayout):
        side = "bfloat16" if field.name == "dtype" else getattr(LAYOUT, field.name) + 1
        layout: dict[str, Any] = {field.name: side}
        changed.append((f"layout.{field.name}", replace(BASE, layout=replace(LAYOUT, **layout))))
    return changed


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
