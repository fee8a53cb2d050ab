"""Promotion and demotion against plain memcpy of the same bytes, in the same run.

The limit is one `memcpy` by one thread between the same two pools' memory (CPU: HBM is an ordinary
tensor). A promotion copies; a demotion also hashes what arrived, so its own limit is memcpy and
then xxh3-64 of the same bytes, block by block. "Scattered" takes the slots of one side in random
order, so that no two blocks are neighbours. Pairs are interleaved (A B B A); a row gives the median
ratio limit time / our time, with its 20th and 80th percentile. Times run from the call to the last
block's landing, as a waiting thread sees it. The bytes stay below glibc's threshold for
non-temporal stores (190 MiB on a server with a large L3), above which one memcpy is another, up to
1.6x faster thing that no run of blocks ever is. The last line is JSON.

    python -m bench.tiers [--quick]
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from bench.harness import Sample, emit, interleave, table
from kvtier.index.namespace import BlockLayout
from kvtier.index.words import Slots
from kvtier.tiers.contracts import Flight, Signal
from kvtier.tiers.device import CpuDevice
from kvtier.tiers.dram import DramSlab
from kvtier.tiers.hbm import HbmPool
from kvtier.tiers.mover import Mover

LAYOUTS = {
    "smollm2-135m fp32 (720 KiB)": BlockLayout(30, 3, 16, 64, "float32"),
    "llama-8b bf16 (2 MiB)": BlockLayout(32, 8, 16, 128, "bfloat16"),
    "padded slots (45 kB)": BlockLayout(5, 3, 15, 50, "bfloat16"),
}


@dataclass
class Rig:
    """Two pools of one layout with `nbytes` of blocks in each, and the mover between them."""

    hbm: HbmPool
    dram: DramSlab
    mover: Mover
    top: Slots
    low: Slots

    @classmethod
    def make(cls, layout: BlockLayout, nbytes: int) -> "Rig":
        n = nbytes // layout.nbytes
        hbm, dram = HbmPool(layout, n), DramSlab.create(n, layout.nbytes)
        dram.array[:] = np.random.default_rng(0).integers(0, 256, dram.array.shape, np.uint8)
        return cls(hbm, dram, Mover(CpuDevice(Signal())), hbm.alloc(n), dram.alloc(n))

    @property
    def nbytes(self) -> int:
        return len(self.top) * self.hbm.block_bytes

    def promote(self, low: Slots) -> Callable[[], None]:
        return lambda: self._finish(self.mover.promote(self.dram, low, self.hbm, self.top))

    def demote(self, low: Slots) -> Callable[[], None]:
        return lambda: self._finish(self.mover.demote(self.hbm, self.top, self.dram, low))

    def memcpy_up(self) -> None:
        np.copyto(self.hbm.array, self.dram.array[:, : self.hbm.block_bytes])

    def memcpy_down_and_hash(self) -> None:
        target = self.dram.array[:, : self.hbm.block_bytes]
        for block, source in zip(target, self.hbm.array, strict=True):
            np.copyto(block, source)
            xxh3_64_intdigest(block.data)

    def _finish(self, flight: Flight) -> None:
        signal = self.mover.device.signal
        while True:
            ticks = signal.ticks
            if flight.done:
                return
            signal.wait(ticks, 10.0)

    def close(self) -> None:
        self.mover.device.close()
        self.dram.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer bytes and pairs")
    quick = parser.parse_args().quick
    nbytes, pairs = (64 << 20, 10) if quick else (128 << 20, 24)
    rows: list[list[object]] = [
        ["layout", "move", "limit GB/s", "ours GB/s", "ratio", "p20", "p80"]
    ]
    result: dict[str, object] = {"bench": "tiers", "nbytes": nbytes, "pairs": pairs}
    for name, layout in LAYOUTS.items():
        rig = Rig.make(layout, nbytes)
        scattered = np.random.default_rng(1).permutation(rig.low)
        cases = {
            "promote": (rig.memcpy_up, rig.promote(rig.low)),
            "promote scattered": (rig.memcpy_up, rig.promote(scattered)),
            "demote": (rig.memcpy_down_and_hash, rig.demote(rig.low)),
            "demote scattered": (rig.memcpy_down_and_hash, rig.demote(scattered)),
        }
        for case, (limit, ours) in cases.items():
            base, mine = interleave([limit, ours], pairs)
            ratio = Sample(tuple(a / b for a, b in zip(base.seconds, mine.seconds, strict=True)))
            speeds = [rig.nbytes / sample.median / 1e9 for sample in (base, mine)]
            rows.append([name, case, *speeds, ratio.median, ratio.p20, ratio.p80])
            result[f"{name.split()[0]}_{case.replace(' ', '_')}_ratio"] = round(ratio.median, 3)
        rig.close()
    table(rows)
    emit(result)


if __name__ == "__main__":
    main()
