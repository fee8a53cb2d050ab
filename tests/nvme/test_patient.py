"""Reads that nobody waits for: behind those that somebody does, and never in their way."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvtier.index.words import TierId
from kvtier.tiers.contracts import LANDED, Bytes, Fetch, Flight
from kvtier.tiers.nvme.watch import Call, Watch
from kvtier.tiers.nvme.workers import Batch, Scratch, Workers
from kvtier.tiers.pool import ArrayPool
from tests.nvme.faults import HangingFiles
from tests.nvme.rig import NAMESPACE, Branch, Rig, branch


class Order(HangingFiles):
    """Hangs in the first read, and notes where each read begins."""

    def __init__(self) -> None:
        super().__init__("preadv")
        self.reads: list[int] = []

    def preadv(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        self.reads.append(offset)
        return super().preadv(fd, buffers, offset)


def begin(rig: Rig, blocks: Branch, *, background: bool) -> Flight:
    count = len(blocks.keys)
    pool = ArrayPool(TierId.DRAM, count, rig.block_bytes)
    return rig.tier.fetch(
        Fetch(
            NAMESPACE,
            blocks.parent,
            blocks.tokens,
            blocks.keys,
            blocks.tokens[:0],
            pool,
            pool.alloc(count),
            background=background,
        )
    )


@contextmanager
def one_reader(path: Path) -> Iterator[tuple[Rig, Order, list[list[int]]]]:
    """A tier of one thread that hangs in its next read; two branches, and where their records are
    read, in order."""
    files = Order()
    with Rig(path, files=files, io_threads=1) as rig:
        offsets = []
        for blocks in (branch(9, 1), branch(9, 2)):
            rig.put(blocks)
            assert rig.landed(blocks) == 9  # reads the headers, which are kept
            files.reads.clear()
            assert rig.landed(blocks) == 9
            offsets.append(list(files.reads))
        files.reads.clear()
        files.arm()
        yield rig, files, offsets


def test_a_read_that_somebody_waits_for_overtakes_a_prefetch(tmp_path: Path) -> None:
    with one_reader(tmp_path / "s") as (rig, files, (mine, theirs)):
        hint = begin(rig, branch(9, 1), background=True)
        assert files.entered.wait(20)
        demand = begin(rig, branch(9, 2), background=False)
        wait_for(lambda: len(queue(rig)[0]) == len(theirs))
        files.release()
        rig.settle(demand)
        rig.settle(hint)
        assert files.reads == [mine[0], *theirs, *mine[1:]]
        assert (hint.status == LANDED).all() and (demand.status == LANDED).all()


def test_a_prefetch_that_somebody_has_come_to_wait_for_waits_no_longer(tmp_path: Path) -> None:
    with one_reader(tmp_path / "s") as (rig, files, (mine, theirs)):
        first = begin(rig, branch(9, 2), background=True)
        assert files.entered.wait(20)
        second = begin(rig, branch(9, 1), background=True)
        wait_for(lambda: len(queue(rig)[1]) == len(theirs) - 1 + len(mine))
        second.agree(None, background=False)
        files.release()
        rig.settle(first)
        rig.settle(second)
        assert files.reads == [theirs[0], *mine, *theirs[1:]]


def test_a_read_that_nobody_waits_for_any_more_is_overtaken(tmp_path: Path) -> None:
    with one_reader(tmp_path / "s") as (rig, files, (mine, theirs)):
        left = begin(rig, branch(9, 1), background=False)
        assert files.entered.wait(20)
        demand = begin(rig, branch(9, 2), background=False)
        wait_for(lambda: len(queue(rig)[0]) == len(mine) - 1 + len(theirs))
        left.agree(None, background=True)
        files.release()
        rig.settle(demand)
        rig.settle(left)
        assert files.reads == [mine[0], *theirs, *mine[1:]]
        assert (left.status == LANDED).all()


def test_what_was_called_off_is_not_read(tmp_path: Path) -> None:
    with one_reader(tmp_path / "s") as (rig, files, (mine, theirs)):
        left = begin(rig, branch(9, 1), background=False)
        assert files.entered.wait(20)
        demand = begin(rig, branch(9, 2), background=False)
        wait_for(lambda: len(queue(rig)[0]) == len(mine) - 1 + len(theirs))
        left.cancel()
        files.release()
        rig.settle(demand)
        rig.settle(left)
        assert files.reads == [mine[0], *theirs]
        assert 0 < np.count_nonzero(left.status == LANDED) < 9


def queue(rig: Rig) -> tuple[Sequence[object], Sequence[object]]:
    """Jobs that wait: urgent ones, patient ones."""
    workers = rig.tier._crew.core.workers
    return workers._urgent, workers._patient


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise TimeoutError


class Bench:
    """Workers and a gate that jobs wait at; `began` names them in order."""

    def __init__(self, threads: int) -> None:
        loop = asyncio.get_running_loop()
        self.workers = Workers(threads, loop, Watch(loop.time, 60.0))
        self.gate = threading.Event()
        self.began: list[str] = []

    def batch(self, *, urgent: bool, patient: bool = False) -> Batch[None]:
        hurried = (lambda: False) if patient else None
        return Batch(self.workers, Call.READ, urgent=urgent, hurried=hurried)

    def job(self, name: str, *, gated: bool = True) -> Callable[[Scratch], None]:
        def run(scratch: Scratch) -> None:
            self.began.append(name)
            if gated:
                assert self.gate.wait(20)

        return run


def test_patient_reads_leave_three_quarters_of_the_threads_free() -> None:
    async def run() -> None:
        bench = Bench(8)
        patient = bench.batch(urgent=True, patient=True)
        for _ in range(6):
            patient.add(bench.job("patient"))
        urgent = bench.batch(urgent=True)
        for _ in range(4):
            urgent.add(bench.job("urgent", gated=False))
        await urgent.results()
        wait_for(lambda: bench.began.count("patient") == 2)
        assert sorted(bench.began) == ["patient"] * 2 + ["urgent"] * 4
        bench.gate.set()
        await patient.results()
        assert bench.began.count("patient") == 6
        bench.workers.close()

    asyncio.run(run())


def test_patient_reads_and_writes_take_turns() -> None:
    async def run() -> None:
        bench = Bench(1)
        holdup = bench.batch(urgent=True)
        holdup.add(bench.job("urgent"))
        patient = bench.batch(urgent=True, patient=True)
        writes = bench.batch(urgent=False)
        for _ in range(3):
            patient.add(bench.job("read"))
        for _ in range(3):
            writes.add(bench.job("write"))
        bench.gate.set()
        for batch in (holdup, patient, writes):
            await batch.results()
        assert bench.began == ["urgent", "read", "write", "read", "write", "read", "write"]
        bench.workers.close()

    asyncio.run(run())
