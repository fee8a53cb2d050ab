"""The NVMe tier against the drive: verified reads into DRAM slots, synced and published writes.

Physics: O_DIRECT preadv/pwritev of the same number of bytes on the same directory in the same run,
at the best of several queue depths and request sizes, into and out of the same memory. Raw writes
end in one fdatasync. Pairs are interleaved (A B B A); each row gives the median ratio and its
20th and 80th percentile. Ends in one JSON line.

    python -m bench.nvme [--quick] [--directory DIR]
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from bench.harness import emit, table
from kvtier.index.words import ROOT_KEY, BlockKey, Tokens, block_keys
from kvtier.tiers.contracts import LANDED, Bytes, Fetch, Flight, Put, Signal
from kvtier.tiers.dram import DramSlab
from kvtier.tiers.nvme.tier import NvmeTier

NAMESPACE = b"bench/nvme".ljust(32, b"\0")
BLOCK_TOKENS = 16
DEPTHS = (2, 4, 8, 16)
CHUNKS = (1 << 20, 4 << 20)


@dataclass(frozen=True)
class Branch:
    """A prompt's blocks."""

    tokens: Tokens
    keys: tuple[BlockKey, ...]

    @classmethod
    def make(cls, seed: int, num_blocks: int) -> "Branch":
        tokens = np.random.default_rng(seed).integers(0, 50_000, num_blocks * BLOCK_TOKENS)
        ids = tokens.astype(np.int32)
        return cls(ids, tuple(block_keys(NAMESPACE, ROOT_KEY, ids, BLOCK_TOKENS)))


class Raw:
    """Plain O_DIRECT I/O between a file and the slab's memory."""

    def __init__(self, path: Path, memory: Bytes) -> None:
        self._path = path
        self._memory = memory

    def read(self, depth: int, chunk: int) -> float:
        """Seconds to read the whole file."""
        return self._run(os.O_RDONLY, os.preadv, depth, chunk)

    def write(self, depth: int, chunk: int) -> float:
        """Seconds to write a new file, space reserved first, and sync it."""
        self._path.unlink(missing_ok=True)
        return self._run(os.O_RDWR | os.O_CREAT, os.pwritev, depth, chunk)

    def _run(
        self,
        flags: int,
        call: Callable[[int, Sequence[memoryview], int], int],
        depth: int,
        chunk: int,
    ) -> float:
        size = self._memory.nbytes
        fd = os.open(self._path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            with ThreadPoolExecutor(depth) as pool:
                list(pool.map(time.sleep, [0.001] * depth))  # threads exist before the clock runs
                start = time.perf_counter()
                if flags & os.O_CREAT:
                    os.posix_fallocate(fd, 0, size)
                pieces = [(at, min(chunk, size - at)) for at in range(0, size, chunk)]
                done = pool.map(
                    lambda piece: call(fd, [self._memory[piece[0] :][: piece[1]].data], piece[0]),
                    pieces,
                )
                if sum(done) != size:
                    raise OSError("raw I/O came up short")
                if flags & os.O_CREAT:
                    os.fdatasync(fd)
                return time.perf_counter() - start
        finally:
            os.close(fd)


def finish(flight: Flight, signal: Signal) -> None:
    """Wait until every block has landed."""
    while not flight.done:
        ticks = signal.ticks
        if not flight.done:
            signal.wait(ticks, 1.0)
    if not (flight.status == LANDED).all():
        raise SystemExit(f"bench/nvme: blocks failed: {flight.error}")


class Store:
    """The tier over one slab, timed."""

    def __init__(self, directory: Path, slab: DramSlab, capacity_bytes: int) -> None:
        self._signal = Signal()
        self._slab = slab
        self._slots = slab.alloc(slab.num_slots)
        self.tier = NvmeTier.open(directory, capacity_bytes=capacity_bytes, signal=self._signal)

    def read(self, branch: Branch) -> float:
        request = Fetch(
            NAMESPACE,
            ROOT_KEY,
            branch.tokens,
            branch.keys,
            branch.tokens[:0],
            self._slab,
            self._slots,
        )
        start = time.perf_counter()
        finish(self.tier.fetch(request), self._signal)
        return time.perf_counter() - start

    def write(self, branch: Branch) -> float:
        request = Put(
            NAMESPACE,
            ROOT_KEY,
            branch.tokens,
            branch.keys,
            branch.tokens[:0],
            self._slab,
            self._slots,
            None,
        )
        start = time.perf_counter()
        finish(self.tier.put(request), self._signal)
        return time.perf_counter() - start


@dataclass(frozen=True)
class Row:
    """One block size. Ratios are ours over the drive's: median, 20th and 80th percentile. A raw
    plan is `(threads, bytes a request)`."""

    block_kib: int
    read_ratio: tuple[float, float, float]
    write_ratio: tuple[float, float, float]
    read_gb_s: float
    write_gb_s: float
    raw_read_plan: tuple[int, int]
    raw_write_plan: tuple[int, int]
    direct: bool


def measure(directory: Path, block_bytes: int, total: int, pairs: int) -> Row:
    """Ratios of one block size: our rate over the drive's."""
    num_blocks = total // block_bytes
    slab = DramSlab.create(num_blocks, block_bytes)
    slab.array[:] = np.random.default_rng(1).integers(0, 256, slab.array.shape, np.uint8)
    size = num_blocks * block_bytes
    raw = Raw(directory / "raw", slab.array.reshape(-1)[: slab.array.size])
    store = Store(directory / f"store-{block_bytes}", slab, size * (pairs + 4) * 2)
    try:
        plans = list(product(DEPTHS, CHUNKS))
        write_plan = min(plans, key=lambda plan: raw.write(*plan))
        read_plan = min(plans, key=lambda plan: min(raw.read(*plan), raw.read(*plan)))
        writes, reads, write_s, read_s = [], [], [], []
        branch = Branch.make(0, num_blocks)
        store.write(branch)
        for i in range(1, pairs + 1):
            branch = Branch.make(i, num_blocks)
            write, read = partial(store.write, branch), partial(store.read, branch)
            ours, theirs = _pair(i, write, lambda: raw.write(*write_plan))
            writes.append(theirs / ours)
            write_s.append(ours)
            ours, theirs = _pair(i, read, lambda: raw.read(*read_plan))
            reads.append(theirs / ours)
            read_s.append(ours)
        return Row(
            block_kib=block_bytes >> 10,
            read_ratio=_spread(reads),
            write_ratio=_spread(writes),
            read_gb_s=round(size / float(np.median(read_s)) / 1e9, 2),
            write_gb_s=round(size / float(np.median(write_s)) / 1e9, 2),
            raw_read_plan=read_plan,
            raw_write_plan=write_plan,
            direct=store.tier.statistics().direct,
        )
    finally:
        store.tier.close()
        slab.close()
        shutil.rmtree(directory / f"store-{block_bytes}")
        (directory / "raw").unlink(missing_ok=True)


def _pair(turn: int, ours: Callable[[], float], theirs: Callable[[], float]) -> tuple[float, float]:
    """Time both, in the order A B or B A by turns."""
    if turn % 2:
        first = ours()
        return first, theirs()
    second = theirs()
    return ours(), second


def _spread(ratios: Sequence[float]) -> tuple[float, float, float]:
    median, low, high = np.percentile(ratios, [50, 20, 80])
    return round(float(median), 3), round(float(low), 3), round(float(high), 3)


def main() -> None:
    """Run, print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one block size, few pairs")
    parser.add_argument("--directory", type=Path, help="where to measure (default: here)")
    options = parser.parse_args()
    sizes = [720 << 10] if options.quick else [256 << 10, 720 << 10, 2 << 20]
    pairs = 4 if options.quick else 10
    with tempfile.TemporaryDirectory(prefix=".bench-nvme-", dir=options.directory or ".") as name:
        rows = [measure(Path(name), size, 180 << 20, pairs) for size in sizes]
    heading = ("block", "read/raw", "p20", "p80", "GB/s", "write/raw", "p20", "p80", "GB/s")
    lines = [
        (f"{r.block_kib} KiB", *r.read_ratio, r.read_gb_s, *r.write_ratio, r.write_gb_s)
        for r in rows
    ]
    table([heading, *lines])
    middle = rows[len(rows) // 2]
    emit(
        {
            "bench": "nvme",
            "read_ratio": middle.read_ratio[0],
            "write_ratio": middle.write_ratio[0],
            "direct": middle.direct,
            "rows": [asdict(row) for row in rows],
        }
    )


if __name__ == "__main__":
    main()
