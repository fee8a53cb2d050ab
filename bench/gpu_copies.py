"""Promotion and demotion over the host link against plain pinned memcpy, and what decode feels.

The limit is asynchronous copies of whole memory by one call on one stream a way, between the same
pools. Ours are whole blocks, by the mover, to the moment a waiting thread sees the last one landed;
a demotion hashes what arrived, which one host thread does. "scattered": no two blocks neighbours on
the host side, so every block is a copy call of its own (5 to 7 us each). Pairs are interleaved.

Decode beside copies: the same graph of attention launches, by turns on a quiet link and while both
ways are kept busy; the copies take device memory bandwidth (about 2 %) and nothing else of it.

    python -m bench.gpu_copies [--budget SECONDS] [--dry]
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from statistics import median
from types import TracebackType

import numpy as np
import torch

from bench.gpu import Gpu
from bench.gpu_part import Report, Setting, run_part
from bench.gpu_pool import Pool, decode, make_step, shapes
from bench.harness import Sample, interleave
from kvtier.index.namespace import BlockLayout
from kvtier.index.words import Slots
from kvtier.tiers.contracts import Flight, Signal
from kvtier.tiers.cuda import CudaDevice
from kvtier.tiers.device import CpuDevice, Device
from kvtier.tiers.dram import DramSlab
from kvtier.tiers.hbm import HbmPool
from kvtier.tiers.mover import Mover

LAYOUTS = {
    "2 MiB (8B)": BlockLayout(32, 8, 16, 128, "bfloat16"),
    "512 KiB (1B)": BlockLayout(16, 8, 16, 64, "bfloat16"),
    "5 MiB (70B)": BlockLayout(80, 8, 16, 128, "bfloat16"),
    "64 KiB": BlockLayout(1, 8, 16, 128, "bfloat16"),
}
"""In the order of measuring. The first one's blocks, in a row on both sides, make the figures."""

TINY = {
    "512 B": BlockLayout(2, 1, 4, 16, "float16"),
    "1.2 kB": BlockLayout(3, 1, 4, 25, "float16"),
}
POOL_BYTES = 1 << 30
PAIRS = 12
PATIENCE_S = 20.0
HOLD_S = 1e-3
"""What queueing a launch may take while another thread hashes and submits."""


class Rig(AbstractContextManager["Rig"]):
    """An HBM pool and a slab with as many blocks, and the mover between them."""

    def __init__(self, gpu: Gpu, layout: BlockLayout, n: int) -> None:
        with ExitStack() as stack:
            self.device, register = open_device(gpu)
            stack.callback(self.device.close)
            self.hbm = HbmPool(layout, n, str(gpu.device))
            self.dram = DramSlab.create(n, layout.nbytes)
            stack.callback(self.dram.close)
            content = np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8)
            self.dram.array[:, : layout.nbytes] = content
            self.dram.array[:, 0] = np.arange(n) % 251
            forget = register(self.dram)
            stack.callback(forget)
            self._resources = stack.pop_all()
        self.gpu = gpu
        self.mover = Mover(self.device)
        self.top, self.low = self.hbm.alloc(n), self.dram.alloc(n)
        self.host = torch.from_numpy(self.dram.array[:, : layout.nbytes])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resources.close()

    @property
    def nbytes(self) -> int:
        return len(self.top) * self.hbm.block_bytes

    def plain_up(self) -> None:
        self.hbm.flat.copy_(self.host, non_blocking=True)

    def plain_down(self) -> None:
        self.host.copy_(self.hbm.flat, non_blocking=True)

    def plain_both(self) -> None:
        """Half of the blocks up and the other half down, at once."""
        half = len(self.top) // 2
        self.gpu.together(
            [
                lambda: self.hbm.flat[:half].copy_(self.host[:half], non_blocking=True),
                lambda: self.host[half:].copy_(self.hbm.flat[half:], non_blocking=True),
            ]
        )

    def promote(self, low: Slots, top: Slots) -> Flight:
        return self.mover.promote(self.dram, low, self.hbm, top)

    def demote(self, low: Slots, top: Slots) -> Flight:
        return self.mover.demote(self.hbm, top, self.dram, low)

    def start_both(self) -> list[Flight]:
        half = len(self.top) // 2
        up = self.promote(self.low[:half], self.top[:half])
        return [up, self.demote(self.low[half:], self.top[half:])]

    def both(self) -> None:
        for flight in self.start_both():
            self.finish(flight)

    def finish(self, flight: Flight) -> None:
        """Wait until every block of it has landed. Raises RuntimeError if one does not."""
        signal = self.device.signal
        while True:
            ticks = signal.ticks
            if flight.done:
                break
            signal.wait(ticks, PATIENCE_S)
        if flight.error is not None:
            raise RuntimeError(f"copies failed: {flight.error}")


def open_device(gpu: Gpu) -> tuple[Device, Callable[[DramSlab], Callable[[], None]]]:
    """The device that copies, and how it page-locks a slab: that gives how to unlock it again."""
    if gpu.device.type == "cuda":
        cuda = CudaDevice(Signal(), gpu.device.index or 0)

        def register(slab: DramSlab) -> Callable[[], None]:
            cuda.register(slab)
            return lambda: cuda.forget(slab)

        return cuda, register
    return CpuDevice(Signal()), lambda slab: lambda: None


def check(rig: Rig) -> None:
    """Bytes go up and come down as they were. Raises RuntimeError if not."""
    rig.finish(rig.promote(rig.low, rig.top))
    want = rig.host[-1].clone()
    if not torch.equal(rig.hbm.flat[-1].cpu(), want):
        raise RuntimeError("a promoted block has other bytes than its source")
    rig.host[-1] = 0
    rig.finish(rig.demote(rig.low[-1:], rig.top[-1:]))
    if not torch.equal(rig.host[-1], want):
        raise RuntimeError("a demoted block has other bytes than its source")


def measure_layout(rig: Rig, pairs: int) -> dict[str, tuple[float, float]]:
    """Of pinned memcpy in percent, and GB/s, by case: medians of interleaved pairs."""
    gpu = rig.gpu
    scattered = np.random.default_rng(1).permutation(rig.low).astype(rig.low.dtype)
    up, down = lambda: gpu.together([rig.plain_up]), lambda: gpu.together([rig.plain_down])
    cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "promote": (up, lambda: rig.finish(rig.promote(rig.low, rig.top))),
        "demote": (down, lambda: rig.finish(rig.demote(rig.low, rig.top))),
        "both": (rig.plain_both, rig.both),
        "promote scattered": (up, lambda: rig.finish(rig.promote(scattered, rig.top))),
        "demote scattered": (down, lambda: rig.finish(rig.demote(scattered, rig.top))),
    }
    found = {}
    for name, (plain, ours) in cases.items():
        base, mine = interleave([plain, ours], pairs)
        ratio = Sample(tuple(a / b for a, b in zip(base.seconds, mine.seconds, strict=True)))
        found[name] = (100 * ratio.median, rig.nbytes / mine.median / 1e9)
    return found


class Traffic:
    """Copies both ways on a thread while it is open, the next ones queued before the last end."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._stop, self._flowing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-traffic")
        self._problem: Exception | None = None
        self._nbytes = 0
        self._seconds = 0.0

    @property
    def gb_s(self) -> float:
        """Both ways together, of all that was copied."""
        return self._nbytes / max(self._seconds, 1e-9) / 1e9

    def __enter__(self) -> "Traffic":
        self._thread.start()
        self._flowing.wait(PATIENCE_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._problem is not None:
            raise self._problem

    def _run(self) -> None:
        begin = time.perf_counter()
        flying: deque[Flight] = deque()
        try:
            while not self._stop.is_set():
                flying.extend(self._rig.start_both())
                while len(flying) > 2:
                    self._rig.finish(flying.popleft())
                self._nbytes += self._rig.nbytes
                self._flowing.set()
            while flying:
                self._rig.finish(flying.popleft())
        except (RuntimeError, ValueError) as error:
            self._problem = error
            self._flowing.set()
        self._seconds = time.perf_counter() - begin


def measure_slowdown(rig: Rig, turns: int) -> tuple[float, float]:
    """Percent that attention takes longer beside copies, and their GB/s: medians of turns."""
    gpu = rig.gpu
    shape = shapes(dry=gpu.dry)[0]
    contexts = [40, 40] if gpu.dry else [8 << 10] * 16
    pool = Pool(gpu, shape, 2 * sum(contexts) // shape.block_size, 1 if gpu.dry else 4)
    step = make_step(gpu, shape, contexts, pool.num_blocks)

    def attend() -> None:
        for layer in range(pool.layers):
            decode(pool, step, layer)

    # Captured before there is traffic: a capture and another thread's copies do not go together.
    launches = gpu.prepare([attend])
    ratios, rates = [], []
    for _ in range(turns):
        quiet = gpu.measure(launches, 0.3, hold_s=HOLD_S)[0].median
        with Traffic(rig) as traffic:
            busy = gpu.measure(launches, 0.3, hold_s=HOLD_S)[0].median
        rates.append(traffic.gb_s)
        ratios.append(busy / quiet)
    return 100 * (median(ratios) - 1), median(rates)


def measure(setting: Setting) -> Report:
    gpu, budget = setting.gpu, setting.budget
    rows: list[list[object]] = [["blocks", "case", "of pinned %", "GB/s"]]
    figures: dict[str, float] = {}
    notes: dict[str, object] = {}
    layouts = TINY if gpu.dry else LAYOUTS
    judged = next(iter(layouts))
    for name in budget.walk(layouts, lambda _: 7.0):
        blocks = 8 if gpu.dry else min(2048, POOL_BYTES // layouts[name].nbytes)
        with Rig(gpu, layouts[name], blocks) as rig:
            check(rig)
            found = measure_layout(rig, 2 if gpu.dry else PAIRS)
            if name == judged:
                figures["promote_of_pinned"] = found["promote"][0]
                figures["demote_of_pinned"] = found["demote"][0]
                figures["both_of_pinned"] = found["both"][0]
                slower, rate = measure_slowdown(rig, 1 if gpu.dry else 6)
                figures["decode_slowdown"] = slower
                notes["copies_beside_decode_gb_s"] = rate
        rows += [[name, case, share, rate] for case, (share, rate) in found.items()]
    return Report(figures, rows=rows, notes=notes)


if __name__ == "__main__":
    run_part("copies", __doc__, measure)
