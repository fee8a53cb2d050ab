"""A block's memory as the I/O layer wants it: whole pages, page-aligned. Knows pools, no files."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

from kvtier.tiers.contracts import Bytes, HostPool, Pool
from kvtier.tiers.nvme.record import PAGE, padded


def block_views(pool: Pool, slots: Sequence[int]) -> list[Bytes]:
    """The `block_bytes` bytes of each slot."""
    host = cast(HostPool, pool)
    return [host.view(slot) for slot in slots]


def page_runs(pool: Pool, slots: Sequence[int]) -> list[Bytes] | None:
    """The slots' whole pages in as few buffers as they stand in, or None as `page_views`.

    A pool that can tell neighbours offers `padded_run(slot, num_slots)`.
    """
    take = getattr(pool, "padded_run", None)
    if take is None:
        return page_views(pool, slots)
    cuts = [i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1]
    runs = [take(slots[a], b - a) for a, b in pairwise([0, *cuts, len(slots)])]
    fit = sum(r.nbytes for r in runs) == len(slots) * padded(pool.block_bytes)
    return runs if fit and not any(_address(r) % PAGE for r in runs) else page_views(pool, slots)


def page_views(pool: Pool, slots: Sequence[int]) -> list[Bytes] | None:
    """The slots' memory as aligned whole pages (padding included), or None if it is not so laid.

    A pool whose stride is longer than its blocks offers `padded_view(slot)`: the stride's bytes.
    """
    view = cast("Callable[[int], Bytes]", getattr(pool, "padded_view", cast(HostPool, pool).view))
    wanted = padded(pool.block_bytes)
    views = [view(slot) for slot in slots]
    fit = all(v.nbytes >= wanted and not _address(v) % PAGE for v in views)
    return [v[:wanted] for v in views] if fit else None


def _address(view: Bytes) -> int:
    return int(view.__array_interface__["data"][0])
