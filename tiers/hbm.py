"""The paged KV pool that attention reads: one tensor, one block after another.

On CUDA it is GPU memory; on the CPU an ordinary tensor whose bytes `array` also shows to the
mover. A block is one contiguous run of bytes either way. Knows no keys' meaning and no policy.
"""

import numpy as np
import torch

from kvtier.index.namespace import BlockLayout
from kvtier.index.words import Slots, TierId
from kvtier.tiers.contracts import Bytes
from kvtier.tiers.errors import CapacityTooSmall
from kvtier.tiers.memory import NotEnoughMemory, anonymous, populate, require
from kvtier.tiers.pool import POISON, SlotPool


class HbmPool(SlotPool):
    """`tensor`: `[num_slots, layers, 2, kv_heads, block_size, head_dim]` of the layout's dtype.

    `flat`: the same memory as uint8 `[num_slots, block_bytes]`. `array` (CPU only): `flat` as
    numpy, so that a CPU pool is a `HostPool` as well.
    """

    array: Bytes

    def __init__(
        self, layout: BlockLayout, num_slots: int, device: str = "cpu", *, debug: bool = False
    ) -> None:
        """Takes and populates the memory at once; slots hold zeros, or NaN with `debug`.

        Raises `CapacityTooSmall` for less than one slot, `NotEnoughMemory` if it is not there.
        """
        self.device = torch.device(device)
        nbytes = num_slots * layout.nbytes
        _require(nbytes, f"hbm pool of {num_slots} blocks", self.device)
        super().__init__(TierId.HBM, num_slots, layout.nbytes)
        self.layout = layout
        self._debug = debug
        if self.device.type == "cpu":
            mapping = anonymous(nbytes)
            populate(mapping, 0, len(mapping), fresh=True)
            self.array = np.frombuffer(mapping, np.uint8, nbytes).reshape(num_slots, layout.nbytes)
            self.flat = torch.from_numpy(self.array)
        else:
            self.flat = torch.zeros(num_slots, layout.nbytes, dtype=torch.uint8, device=self.device)
        dtype: torch.dtype = getattr(torch, layout.dtype)
        self.tensor = self.flat.view(-1).view(dtype).view(num_slots, *layout.shape)
        if debug:
            self.flat.fill_(POISON)

    @classmethod
    def sized(
        cls, layout: BlockLayout, nbytes: int, device: str = "cpu", *, debug: bool = False
    ) -> "HbmPool":
        """As many whole blocks as `nbytes` hold. Raises `CapacityTooSmall` if that is none."""
        if nbytes < layout.nbytes:
            raise CapacityTooSmall(
                f"hbm pool: {nbytes:,} bytes are less than one block of {layout.nbytes:,}; "
                "give it more room"
            )
        return cls(layout, nbytes // layout.nbytes, device, debug=debug)

    def view(self, slot: int) -> Bytes:
        """The slot's bytes, writable. CPU only: raises `TypeError` for GPU memory."""
        if self.device.type != "cpu":
            raise TypeError(f"hbm pool: the CPU cannot address slot {slot} on {self.device}")
        view: Bytes = self.array[slot]
        return view

    def _poison(self, slots: Slots) -> None:
        if not self._debug:
            return
        self.flat[torch.from_numpy(slots.astype(np.int64)).to(self.device)] = POISON
        if self.device.type == "cuda":
            # Poisoning writes the slot: it must be over before a copy on another stream may start.
            torch.cuda.current_stream(self.device).synchronize()


def _require(nbytes: int, what: str, device: torch.device) -> None:
    """Raises `NotEnoughMemory` unless the device has `nbytes` free."""
    if device.type == "cpu":
        require(nbytes, what)
        return
    free = torch.cuda.mem_get_info(device)[0]
    if nbytes > free:
        raise NotEnoughMemory(
            f"{what}: needs {nbytes:,} bytes, {device} has {free:,} free; make the pool smaller"
        )
