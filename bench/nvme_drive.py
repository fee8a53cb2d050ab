"""The NVMe tier against the drive: verified reads into DRAM slots, synced and published writes.

Physics: O_DIRECT preadv/pwritev of the same number of bytes on the same directory, into and out of
the same memory. Raw writes end in one fdatasync.

A drive's speed may swing by a factor of two within a minute, and the fastest way to drive it (the
*plan*: threads, bytes a request) with it. So a search only names the few best plans; then each turn
times ours and every one of them within about a second. The plan that counts is chosen on one half
of the turns and scored on the other half, and the other way round: a plan that was merely lucky
while it was chosen gains nothing, and a plan that went stale is not kept.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from bench.harness import note
from bench.nvme_client import Branch, Client
from kvtier.tiers.contracts import Bytes
from kvtier.tiers.dram import DramSlab

DEPTHS = (2, 4, 8, 16, 32)
CHUNKS = (1 << 20, 2 << 20, 4 << 20, 8 << 20)
NUM_CANDIDATES = 4

Plan = tuple[int, int]
"""Threads, bytes a request."""


@dataclass(frozen=True)
class Cost:
    """What moving a number of bytes took: wall seconds, and CPU seconds of the whole process."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class Spread:
    """Of paired ratios: median, 20th and 80th percentile, and the 90 % interval of the median."""

    median: float
    p20: float
    p80: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> "Spread":
        """The interval is a bootstrap's, with a fixed seed."""
        values = np.asarray(ratios)
        draws = np.random.default_rng(0).choice(values, (2000, len(values)))
        low, high = np.percentile(np.median(draws, axis=1), [5, 95])
        median, p20, p80 = np.percentile(values, [50, 20, 80])
        return cls(*(round(float(x), 3) for x in (median, p20, p80, low, high)))


@dataclass(frozen=True)
class Side:
    """Reads or writes of one row. `ratio`: our rate over the drive's."""

    ratio: Spread
    gb_s: float
    raw_gb_s: float
    raw_plan: Plan
    cpu_s_per_gib: float
    raw_cpu_s_per_gib: float


@dataclass(frozen=True)
class Row:
    """One block size and one total."""

    block_kib: int
    total_mib: int
    turns: int
    direct: bool
    read: Side
    write: Side


@dataclass(frozen=True)
class Candidates:
    """The raw plans worth timing in every turn."""

    read: tuple[Plan, ...]
    write: tuple[Plan, ...]


class Raw:
    """Plain O_DIRECT I/O between a file and memory."""

    def __init__(self, path: Path, memory: Bytes) -> None:
        self._path = path
        self._memory = memory

    def read(self, plan: Plan) -> Cost:
        """Read the whole file, as `write` left it."""
        return self._run(os.O_RDONLY, os.preadv, plan)

    def write(self, plan: Plan) -> Cost:
        """Write a new file, space reserved first, and sync it.

        The old file's end is on disk before the clock starts.
        """
        self._path.unlink(missing_ok=True)
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return self._run(os.O_RDWR | os.O_CREAT, os.pwritev, plan)

    def _run(
        self, flags: int, call: Callable[[int, Sequence[memoryview], int], int], plan: Plan
    ) -> Cost:
        size = self._memory.nbytes
        depth, chunk = plan
        fd = os.open(self._path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            with ThreadPoolExecutor(depth) as pool:
                list(pool.map(time.sleep, [0.001] * depth))  # threads exist before the clock runs
                begin, cpu = time.perf_counter(), time.process_time()
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
                return Cost(time.perf_counter() - begin, time.process_time() - cpu)
        finally:
            os.close(fd)


def timed(call: Callable[[], object]) -> Cost:
    begin, cpu = time.perf_counter(), time.process_time()
    call()
    return Cost(time.perf_counter() - begin, time.process_time() - cpu)


@contextmanager
def raw_of(directory: Path, slab: DramSlab) -> Iterator[Raw]:
    """Raw I/O over all of a slab's memory; its file goes at the end."""
    path = directory / "raw"
    try:
        yield Raw(path, slab.array.reshape(-1))
    finally:
        path.unlink(missing_ok=True)


def require_direct(directory: Path) -> None:
    """Ends the program where the directory's file system has no O_DIRECT: nothing to measure."""
    path = directory / "direct"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError as error:
        raise SystemExit(
            f"{directory}: no O_DIRECT here ({error.strerror}); name a directory on a real drive"
        ) from error
    finally:
        path.unlink(missing_ok=True)


def slab_of(block_bytes: int, total: int) -> DramSlab:
    """A slab of about `total` bytes of random blocks."""
    slab = DramSlab.create(total // block_bytes, block_bytes)
    slab.array[:] = np.random.default_rng(1).integers(0, 256, slab.array.shape, np.uint8)
    return slab


def search(raw: Raw) -> Candidates:
    """The few best raw plans of all, by repeated halving; every round takes them in a new order."""
    raw.write((4, 4 << 20))
    return Candidates(_halve(raw.read), _halve(raw.write))


def _halve(call: Callable[[Plan], Cost]) -> tuple[Plan, ...]:
    rng = np.random.default_rng(2)
    plans = list(product(DEPTHS, CHUNKS))
    seconds: dict[Plan, list[float]] = {plan: [] for plan in plans}
    while len(plans) > NUM_CANDIDATES:
        for _ in range(2):
            for which in rng.permutation(len(plans)):
                seconds[plans[which]].append(call(plans[which]).seconds)
        plans.sort(key=lambda plan: float(np.median(seconds[plan])))
        plans = plans[: max(NUM_CANDIDATES, len(plans) // 2)]
    return tuple(plans)


def measure(
    directory: Path, block_bytes: int, total: int, turns: int, candidates: Candidates
) -> Row:
    """Ratios of one block size and one total, at least two turns. Leaves nothing in `directory`."""
    note(f"drive: {block_bytes >> 10} KiB, {total >> 20} MiB")
    slab = slab_of(block_bytes, total)
    size = slab.num_slots * block_bytes
    place = directory / f"store-{block_bytes}"
    client = Client(place, slab, size * (turns + 2) * 2)
    try:
        client.put(Branch.make(0, slab.num_slots))
        with raw_of(directory, slab) as raw:
            raw.write(candidates.write[0])
            reads, writes = [], []
            for turn in range(turns):
                branch = Branch.make(turn + 1, slab.num_slots)
                write, read = _put(client, branch), _fetch(client, branch)
                writes.append(_turn(turn, write, raw.write, candidates.write))
                reads.append(_turn(turn, read, raw.read, candidates.read))
        direct = client.tier.statistics().direct
    finally:
        client.close()
        slab.close()
        shutil.rmtree(place)
    return Row(
        block_bytes >> 10, size >> 20, turns, direct, score(reads, size), score(writes, size)
    )


def _put(client: Client, branch: Branch) -> Callable[[], None]:
    return lambda: client.put(branch)


def _fetch(client: Client, branch: Branch) -> Callable[[], None]:
    return lambda: client.fetch(branch)


@dataclass(frozen=True)
class Turn:
    """What one turn's I/O took, ours and raw by plan."""

    ours: Cost
    raw: Mapping[Plan, Cost]


def _turn(
    number: int,
    ours: Callable[[], None],
    raw: Callable[[Plan], Cost],
    plans: Sequence[Plan],
) -> Turn:
    """Ours goes first or last by turns, and each plan in turn is the one next to it."""
    first = number // 2 % len(plans)
    order = [*plans[first:], *plans[:first]]
    if number % 2 == 0:
        mine = timed(ours)
        return Turn(mine, {plan: raw(plan) for plan in order})
    theirs = {plan: raw(plan) for plan in reversed(order)}
    return Turn(timed(ours), theirs)


def score(turns: Sequence[Turn], size: int) -> Side:
    """Our rate over the drive's. Each half of the turns is scored by the other half's best plan."""
    even, odd = turns[::2], turns[1::2]
    ratios, raw = [], []
    for scored, chosen in ((even, odd), (odd, even)):
        plan = fastest(chosen)
        for turn in scored:
            ratios.append(turn.raw[plan].seconds / turn.ours.seconds)
            raw.append(turn.raw[plan])
    ours = [turn.ours for turn in turns]
    return Side(
        ratio=Spread.of(ratios),
        gb_s=_gb_s(ours, size),
        raw_gb_s=_gb_s(raw, size),
        raw_plan=fastest(turns),
        cpu_s_per_gib=_cpu_s_per_gib(ours, size),
        raw_cpu_s_per_gib=_cpu_s_per_gib(raw, size),
    )


def fastest(turns: Sequence[Turn]) -> Plan:
    """The plan with the best median, each time taken against the mean of all plans in its turn."""

    def median(plan: Plan) -> float:
        means = [np.mean([cost.seconds for cost in turn.raw.values()]) for turn in turns]
        paired = zip(turns, means, strict=True)
        return float(np.median([turn.raw[plan].seconds / mean for turn, mean in paired]))

    return min(turns[0].raw, key=median)


def _gb_s(costs: Sequence[Cost], size: int) -> float:
    return round(size / float(np.median([cost.seconds for cost in costs])) / 1e9, 3)


def _cpu_s_per_gib(costs: Sequence[Cost], size: int) -> float:
    return round(float(np.median([cost.cpu_s for cost in costs])) * (1 << 30) / size, 3)
