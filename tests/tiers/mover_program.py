"""Programs over a mover, two pools and a device: what any caller of the mover may do.

Each slot that is held has *contents*: what stands in it once everything submitted so far is over.
Whoever reads a slot (a kernel in its turn on the compute stream, or the host) compares it with the
contents of the moment at which the read was submitted. Slots are given back when the mover calls
them idle, and then poisoned on the spot.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from xxhash import xxh3_64_intdigest

from kvtier.index.namespace import BlockLayout
from kvtier.index.words import Slots, TierId
from kvtier.tiers.contracts import FAILED, LANDED, Bytes, Flight
from kvtier.tiers.cuda import CudaDevice
from kvtier.tiers.device import D2H, H2D, CpuDevice, Device
from kvtier.tiers.hazards import Place
from kvtier.tiers.mover import Mover
from kvtier.tiers.pool import ArrayPool
from kvtier.tiers.simulated import SimDevice, places
from tests.prf import block_bytes
from tests.tiers.fake_cuda import FakeCuda, JudgedHbm, dense
from tests.tiers.judged import JudgedPool, SimWorker

BB = 64
NUM_SLOTS = 8
AnyPool = ArrayPool | JudgedHbm

WEIGHTS = {
    "fill": 8,
    "write": 4,
    "write_behind": 3,
    "demote": 10,
    "promote": 10,
    "copy": 4,
    "read": 8,
    "read_on_host": 5,
    "free": 8,
    "run": 14,
    "cancel": 2,
    "join": 1,
    "pass_time": 2,
    "break_things": 4,
}


@dataclass(frozen=True)
class Written:
    data: Bytes

    def bytes(self) -> Bytes | None:
        return self.data


@dataclass(frozen=True)
class Copied:
    """What block `block` of a flight brought. Where it failed, anything may stand there."""

    flight: Flight
    block: int
    source: "Contents"

    def bytes(self) -> Bytes | None:
        return None if self.flight.status[self.block] == FAILED else self.source.bytes()


Contents = Written | Copied


@dataclass(frozen=True)
class Bench:
    """A device under test, the simulation that runs it, and pools that it can copy between."""

    sim: SimDevice
    device: Device
    hbm: AnyPool
    dram: AnyPool
    is_gpu: bool = True
    """Compute is a stream of the simulation, not the calling thread."""
    finish: Callable[[], None] | None = None
    """Ends what the device needs of the pools, whatever is under way."""


class MoverProgram:
    def __init__(self, bench: Bench, choose: Callable[[int], int]) -> None:
        self.sim, self.hbm, self.dram, self.is_gpu = bench.sim, bench.hbm, bench.dram, bench.is_gpu
        self.finish = bench.finish
        self.mover = Mover(bench.device, clock=self.sim.clock)
        self.choose = choose
        self.held: dict[AnyPool, dict[int, Contents]] = {self.hbm: {}, self.dram: {}}
        self.limbo: list[tuple[AnyPool, Slots]] = []
        self.flights: list[Flight] = []
        self.num_written = 0
        self.read_lately: list[int] = []

    def step(self, verb: str, a: int, b: int, c: int) -> None:
        act: Callable[[int, int, int], None] = getattr(self, verb)
        act(a, b, c)

    # ---- verbs -----------------------------------------------------------------------------------

    def fill(self, a: int, b: int, c: int) -> None:
        """Compute writes new slots."""
        n = min(1 + a % 4, self.hbm.num_free)
        if n:
            self._compute(self.hbm.alloc(n))

    def write(self, a: int, b: int, c: int) -> None:
        """Compute writes slots again that nobody has business with."""
        here = self._some(self.hbm, a, b)
        if len(here) and self.mover.idle(self.hbm, here):
            self._compute(here)

    def write_behind(self, a: int, b: int, c: int) -> None:
        """Compute writes on in a slot, behind what others read of it; the slot may be given up."""
        read = [slot for slot in self.read_lately if slot in self.held[self.hbm]]
        here = np.array(read[:1], np.int32) if read else self._some(self.hbm, a, 0)
        if not len(here):
            return
        self.mover.fence_compute(self.hbm, here)
        self._launch("write behind", lambda: None)
        self.mover.computed(self.hbm, here)
        if b % 2:
            self.run(c, 0, 0)
            self._give_up(self.hbm, here)

    def demote(self, a: int, b: int, c: int) -> None:
        self._move(self.mover.demote, self.hbm, self.dram, a, b, c)

    def promote(self, a: int, b: int, c: int) -> None:
        self._move(self.mover.promote, self.dram, self.hbm, a, b, c)

    def copy(self, a: int, b: int, c: int) -> None:
        """Within one pool, as the tail of a fork."""
        self._move(self.mover.promote, self.hbm, self.hbm, a, b, c)

    def read(self, a: int, b: int, c: int) -> None:
        """Compute reads slots; behind a fence, where copies into them have not landed."""
        here = self._some(self.hbm, a, b)
        contents = [self.held[self.hbm][slot] for slot in here.tolist()]
        if not len(here):
            return
        if not all(_has_landed(each) for each in contents):
            self.mover.fence_compute(self.hbm, here)

        def look() -> None:
            for slot, each in zip(here.tolist(), contents, strict=True):
                _expect(self.hbm, slot, each)

        self._launch(f"read {here}", look, reads=places(self.hbm, here))
        self.mover.reading(self.hbm, here)

    def read_on_host(self, a: int, b: int, c: int) -> None:
        """The host reads what it was told has landed, and its checksum."""
        here = self._some(self.dram, a, b)
        for slot in here.tolist():
            contents = self.held[self.dram][slot]
            if isinstance(contents, Copied) and contents.flight.status[contents.block] == LANDED:
                self.sim.touch(f"host reads {slot}", reads=[(self.dram, slot)])
                _expect(self.dram, slot, contents)
                found = xxh3_64_intdigest(self.dram.view(slot).data)
                assert found == int(contents.flight.checksums[contents.block]), "wrong checksum"

    def free(self, a: int, b: int, c: int) -> None:
        pool = (self.hbm, self.dram)[c % 2]
        self._give_up(pool, self._some(pool, a, b))

    def run(self, a: int, b: int, c: int) -> None:
        for _ in range(1 + a % 5):
            self.sim.run_one()
        self._empty_limbo()

    def cancel(self, a: int, b: int, c: int) -> None:
        if self.flights:
            self.flights[a % len(self.flights)].cancel()

    def join(self, a: int, b: int, c: int) -> None:
        if self.flights:
            self.flights[a % len(self.flights)].agree(None, background=False)

    def pass_time(self, a: int, b: int, c: int) -> None:
        self.sim.advance(1.0 + a % 3)

    def break_things(self, a: int, b: int, c: int) -> None:
        """From now on one in `share` copies fails (0: none)."""
        share = (0, 3)[a % 2]
        self.sim.faults = lambda name: share > 0 and self.choose(share) == 1

    def come_to_rest(self) -> None:
        if self.finish is not None:
            self.finish()
        self.sim.run_all()
        for pool, held in self.held.items():
            for slot, contents in held.items():
                _expect(pool, slot, contents)
        everything = np.arange(NUM_SLOTS, dtype=np.int32)
        for pool in self.held:
            assert self.mover.idle(pool, everything)
        assert self.mover.num_tracked == 0
        assert all(flight.done for flight in self.flights)
        self._empty_limbo()
        for pool, held in self.held.items():
            assert pool.num_free + len(held) == NUM_SLOTS
        statistics = self.mover.statistics()
        for stream, link in ((H2D, statistics.up), (D2H, statistics.down)):
            assert link.in_flight_bytes == 0
            assert self.mover.room(stream) > 0
        landed = sum(flight.landed for flight in self.flights) * BB
        assert statistics.up.landed_bytes + statistics.down.landed_bytes == landed

    # ---- inside ----------------------------------------------------------------------------------

    def _launch(
        self,
        name: str,
        kernel: Callable[[], None],
        *,
        reads: Sequence[Place] = (),
        writes: Sequence[Place] = (),
    ) -> None:
        if self.is_gpu:
            self.sim.launch(name, kernel, reads=reads, writes=writes)
        else:
            self.sim.touch(name, reads=reads, writes=writes)
            kernel()

    def _some(self, pool: AnyPool, a: int, b: int) -> Slots:
        """Up to four different held slots."""
        held = sorted(self.held[pool])
        first = held[a % len(held) :] if held else []
        return np.array(first[: 1 + b % 4], np.int32)

    def _compute(self, here: Slots) -> None:
        self.num_written += 1
        data = block_bytes(b"%d" % self.num_written, BB)

        def write() -> None:
            self.hbm.array[here, :BB] = data

        self._launch(f"write {here}", write, writes=places(self.hbm, here))
        self.mover.computed(self.hbm, here)
        self.held[self.hbm].update(dict.fromkeys(here.tolist(), Written(data)))

    def _move(
        self,
        move: Callable[..., Flight],
        src: AnyPool,
        dst: AnyPool,
        a: int,
        b: int,
        c: int,
    ) -> None:
        """Into slots just taken, or over what stands in others, whoever still uses them."""
        here = self._some(src, a, b)
        there = dst.alloc(min(len(here), dst.num_free)) if c % 3 else self._some(dst, b, a)
        here, there = here[: len(there)], there[: len(here)]
        if src is dst and not set(here.tolist()).isdisjoint(there.tolist()):
            _expect_refusal(lambda: move(src, here, dst, there))
            return
        if len(here):
            _expect_refusal(lambda: move(src, here[[0, 0]], dst, there[[0, 0]]))
        deadline = (self.sim.clock() + 1.0, self.sim.clock(), None, None, None)[c % 5]
        flight = move(src, here, dst, there, deadline=deadline)
        self.flights.append(flight)
        if src is self.hbm:
            self.read_lately = here.tolist()
        sources = [self.held[src][slot] for slot in here.tolist()]
        for block, (slot, source) in enumerate(zip(there.tolist(), sources, strict=True)):
            self.held[dst][slot] = Copied(flight, block, source)

    def _give_up(self, pool: AnyPool, slots: Slots) -> None:
        for slot in slots.tolist():
            del self.held[pool][slot]
        if len(slots):
            self.limbo.append((pool, slots))
        self._empty_limbo()

    def _empty_limbo(self) -> None:
        waiting, self.limbo = self.limbo, []
        for pool, slots in waiting:
            if self.mover.idle(pool, slots):
                pool.free(slots)
            else:
                self.limbo.append((pool, slots))


def _expect_refusal(move: Callable[[], Flight]) -> None:
    """Blocks of one move run in any order: none may depend on another."""
    try:
        move()
    except ValueError:
        return
    raise AssertionError("blocks that depend on each other are moved at once")


def _has_landed(contents: Contents) -> bool:
    """Whether the host knows that no copy into it is under way any more."""
    return isinstance(contents, Written) or contents.flight.status[contents.block] == LANDED


def _expect(pool: AnyPool, slot: int, contents: Contents) -> None:
    wanted = contents.bytes()
    assert wanted is None or np.array_equal(pool.view(slot), wanted), (
        f"wrong bytes in {pool}[{slot}]"
    )


def simulated(choose: Callable[[int], int], size: int) -> MoverProgram:
    sim = SimDevice(choose, async_compute=True)
    return MoverProgram(Bench(sim, sim, *_pools(sim)), choose)


def on_workers(choose: Callable[[int], int], size: int) -> MoverProgram:
    """`CpuDevice`, whose threads are streams of the simulation."""
    sim = SimDevice(choose)
    device = CpuDevice(sim.signal, clock=sim.clock, worker=lambda name: SimWorker(sim, name))
    return MoverProgram(Bench(sim, device, *_pools(sim), is_gpu=False), choose)


def on_cuda(choose: Callable[[int], int], size: int) -> MoverProgram:
    """`CudaDevice` on a fake of CUDA that the simulation runs."""
    sim = SimDevice(choose, async_compute=True)
    hbm = JudgedHbm(sim, BlockLayout(1, 1, 2, 8, "float16"), NUM_SLOTS)
    dram = dense(sim, NUM_SLOTS, BB) if size % 2 else _pools(sim)[1]
    cuda = FakeCuda(sim, (hbm, dram))
    device = CudaDevice(sim.signal, runtime=cuda, register=cuda.register, clock=sim.clock)
    device.register(dram)
    finish = partial(device.forget, dram) if size // 2 % 2 else device.close
    return MoverProgram(Bench(sim, device, hbm, dram, finish=finish), choose)


def _pools(sim: SimDevice) -> tuple[JudgedPool, JudgedPool]:
    return (
        JudgedPool(sim, TierId.HBM, NUM_SLOTS, BB),
        JudgedPool(sim, TierId.DRAM, NUM_SLOTS, BB),
    )


BENCHES: Mapping[str, Callable[[Callable[[int], int], int], MoverProgram]] = {
    "mover": simulated,
    "mover on workers": on_workers,
    "mover on CUDA": on_cuda,
}
