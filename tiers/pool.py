"""Slots: who has which, what stands in them, and plain host memory behind them.

`SlotPool` hands slots out and takes them back; `ArrayPool` puts bytes behind them. Neither knows
tokens, residency or copies, and neither is thread-safe: the cache's lock guards them.

Each slot has one 64-byte row in a table. In the DRAM slab the table lies in shared memory, so its
form is fixed:

| offset | size | field |
| --- | --- | --- |
| 0 | 32 | key: the block key described last, zeros if none |
| 32 | 8 | generation: u64, how often the slot was freed |
| 40 | 4 | state: u32, a `SlotState` |
| 44 | 4 | zero |
| 48 | 8 | checksum: u64, xxh3-64 of the block's bytes, 0 if none was taken |
| 56 | 8 | zero |

All numbers are little-endian.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.index.words import KEY_BYTES, BlockKey, Slots, TierId
from kvtier.tiers.contracts import Bytes, Checksums
from kvtier.tiers.errors import CapacityTooSmall, TierFull
from kvtier.tiers.memory import PAGE, anonymous, round_up

SLOT_ROW = np.dtype(
    [
        ("key", "u1", (KEY_BYTES,)),
        ("generation", "<u8"),
        ("state", "<u4"),
        ("zero", "<u4"),
        ("checksum", "<u8"),
        ("zeros", "<u8"),
    ]
)

POISON = 0xFF
"""What debug mode fills freed slots with: a NaN in fp32, bf16, fp16 and fp8 (e4m3fn, e5m2)."""

# How far `alloc` looks for a whole run: bounds its cost whatever the size of the pool.
_WINDOW = 16384


def _descending(slots: Slots) -> Slots:
    return np.sort(slots, kind="stable")[::-1]


class SlotState(IntEnum):
    FREE = 0
    HELD = 1  # handed out, content unknown
    VALID = 2  # described: key and checksum are those of the bytes


class SlotPool:
    """A free list over `num_slots` slots with a table row each.

    `alloc` prefers one ascending run, so that neighbours in a branch are neighbours in memory and a
    copy takes them in one go. The free list is a stack whose top is its lowest slots. Freed slots
    are pushed as they come; `alloc` sorts the part it looks at (timsort: linear in what is sorted
    already), and once an eighth was freed out of order the whole list is sorted.
    """

    def __init__(
        self, tier: TierId, num_slots: int, block_bytes: int, table: npt.NDArray[Any] | None = None
    ) -> None:
        """`table`: zeroed rows of `SLOT_ROW`, one a slot; ordinary memory by default.

        Raises `CapacityTooSmall` without a slot or without a byte in it.
        """
        if num_slots < 1 or block_bytes < 1:
            raise CapacityTooSmall(
                f"{tier} pool: {num_slots} slots of {block_bytes} bytes hold nothing; "
                "give the tier room for at least one block"
            )
        self.tier = tier
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self._table = np.zeros(num_slots, SLOT_ROW) if table is None else table
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        self._num_free = num_slots
        self._unsorted = 0

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.tier}: {self._num_free} of {self.num_slots} slots free>"
        )

    @property
    def num_free(self) -> int:
        return self._num_free

    def alloc(self, n: int) -> Slots:
        """`n` slots, ascending, in one run where one is near. Raises `TierFull`, nothing taken."""
        if not 0 <= n <= self._num_free:
            raise TierFull(
                f"{self.tier} pool: {n} slots wanted, {self._num_free} of {self.num_slots} free; "
                "retry later or give the tier more room"
            )
        top = self._num_free
        low = max(0, top - max(_WINDOW, n))
        window = self._free[low:top]
        if self._unsorted and n > 1:
            window[:] = _descending(window)
            self._unsorted = 0 if low == 0 else self._unsorted
        first = self._run_start(window, n)
        slots = window[first : first + n][::-1].copy()
        # Close the gap: what lay above the run moves down.
        self._free[low + first : top - n] = window[first + n :].copy()
        self._num_free = top - n
        self._table["state"][slots] = SlotState.HELD
        return slots

    @staticmethod
    def _run_start(window: Slots, n: int) -> int:
        """Where in this descending window `n` neighbours begin; failing that, its last `n`."""
        last = len(window) - n
        if n < 2 or int(window[last]) - int(window[-1]) == n - 1:
            return last
        runs = np.flatnonzero(window[: last + 1] - window[n - 1 :] == n - 1)
        return int(runs[-1]) if len(runs) else last

    def free(self, slots: Slots) -> None:
        """Give slots back; bumps their generation.

        Raises `ValueError` (nothing freed) on a slot that is free, named twice, or not ours.
        """
        slots = np.asarray(slots, np.int32)
        n = len(slots)
        self._check_held(slots)
        if n > 1 and len(np.unique(slots)) != n:
            raise ValueError(f"{self.tier} pool: a slot is freed twice in one call")
        rows = self._table
        rows["state"][slots] = SlotState.FREE
        rows["generation"][slots] += 1
        rows["key"][slots] = 0
        rows["checksum"][slots] = 0
        self._poison(slots)
        self._free[self._num_free : self._num_free + n] = _descending(slots)
        self._num_free += n
        self._unsorted += n
        if self._unsorted * 8 > self._num_free > _WINDOW:
            self._free[: self._num_free] = _descending(self._free[: self._num_free])
            self._unsorted = 0

    def _check_held(self, slots: Slots) -> None:
        inside = (slots >= 0) & (slots < self.num_slots)
        if not inside.all():
            raise ValueError(f"{self.tier} pool: no slot {int(slots[~inside][0])}")
        idle = self._table["state"][slots] == SlotState.FREE
        if idle.any():
            raise ValueError(f"{self.tier} pool: slot {int(slots[idle][0])} is free already")

    def _poison(self, slots: Slots) -> None:
        """Debug mode's chance to spoil freed bytes; a pool without bytes has none."""

    def describe(self, slots: Slots, keys: Sequence[BlockKey], checksums: Checksums | None) -> None:
        """Write down what now stands in these slots. Raises `ValueError` on a free slot."""
        slots = np.asarray(slots, np.int32)
        if len(keys) != len(slots):
            raise ValueError(f"{self.tier} pool: {len(keys)} keys for {len(slots)} slots")
        self._check_held(slots)
        rows = self._table
        rows["key"][slots] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
        rows["checksum"][slots] = 0 if checksums is None else checksums
        rows["state"][slots] = SlotState.VALID

    def checksums(self, slots: Slots) -> Checksums:
        """uint64 [n]: the checksum described for each slot, 0 where none was."""
        found: Checksums = self._table["checksum"][slots]
        return found

    def key(self, slot: int) -> BlockKey:
        """The key described for a slot; zeros if none."""
        return BlockKey(self._table["key"][slot].tobytes())

    def state(self, slot: int) -> SlotState:
        return SlotState(int(self._table["state"][slot]))

    def generations(self, slots: Slots) -> npt.NDArray[np.uint64]:
        """uint64 [n]: how often each slot was freed. A slot that changed hands has another one."""
        found: npt.NDArray[np.uint64] = self._table["generation"][slots]
        return found


class ArrayPool(SlotPool):
    """A `HostPool` on ordinary memory: `array`, uint8 `[num_slots, stride]`.

    The stride is `block_bytes` rounded up to a page and rows are page-aligned, so that direct I/O
    can land in them. With `debug`, free slots hold `POISON`.
    """

    def __init__(
        self,
        tier: TierId,
        num_slots: int,
        block_bytes: int,
        *,
        debug: bool = False,
        array: Bytes | None = None,
        table: npt.NDArray[Any] | None = None,
    ) -> None:
        """`array` and `table`: memory to use instead of new memory of this process."""
        super().__init__(tier, num_slots, block_bytes, table)
        if array is None:
            stride = round_up(block_bytes, PAGE)
            memory = np.frombuffer(anonymous(num_slots * stride), np.uint8)
            array = memory.reshape(num_slots, stride)
        self.array = array
        self._debug = debug
        if debug:
            self.array[:] = POISON

    def view(self, slot: int) -> Bytes:
        """The slot's `block_bytes` bytes, writable, contiguous. Valid while the slot is held."""
        view: Bytes = self.array[slot, : self.block_bytes]
        return view

    def padded_view(self, slot: int) -> Bytes:
        """The slot up to the next one: whole pages, what lies behind the block is nobody's."""
        view: Bytes = self.array[slot]
        return view

    def padded_run(self, slot: int, num_slots: int) -> Bytes:
        """Neighbouring slots from `slot` on, in one piece, each with what lies behind its block."""
        run: Bytes = self.array[slot : slot + num_slots].reshape(-1)
        return run

    def _poison(self, slots: Slots) -> None:
        if self._debug:
            self.array[slots] = POISON
