"""The mover's edges, against random programs on the simulated device, and what happens without."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvtier.index.words import Slots, TierId
from kvtier.tiers.contracts import FAILED, LANDED, Flight, Signal
from kvtier.tiers.device import COMPUTE, D2H, H2D, Copy, CpuDevice
from kvtier.tiers.errors import CalledOff
from kvtier.tiers.hazards import HazardError
from kvtier.tiers.mover import Mover, MoverStatistics
from kvtier.tiers.pool import ArrayPool
from kvtier.tiers.simulated import SimDevice, places
from tests.prf import block_bytes

BB = 64
N = 5


def slots(*numbers: int) -> Slots:
    return np.array(numbers, np.int32)


def make_pools() -> tuple[ArrayPool, ArrayPool]:
    hbm, dram = ArrayPool(TierId.HBM, N, BB), ArrayPool(TierId.DRAM, N, BB)
    for pool in (hbm, dram):
        for slot in range(N):
            pool.view(slot)[:] = block_bytes(f"{pool.tier}{slot}".encode(), BB)
    return hbm, dram


some_slots = st.lists(st.integers(0, N - 1), min_size=1, max_size=N, unique=True)
steps = st.lists(
    st.tuples(
        st.sampled_from(["promote", "demote", "write", "read", "run"]),
        some_slots,
        st.permutations(range(N)),
    ),
    max_size=25,
)


@given(steps, st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_any_program_ends_as_if_each_step_had_run_at_once(
    program: list[tuple[str, list[int], list[int]]], seed: int
) -> None:
    """On a device with asynchronous compute; the device itself refuses a missing edge."""
    sim = SimDevice(seed, async_compute=True)
    mover = Mover(sim)
    hbm, dram = make_pools()
    model = {TierId.HBM: hbm.array[:, :BB].copy(), TierId.DRAM: dram.array[:, :BB].copy()}
    seen: list[tuple[list[np.ndarray], np.ndarray]] = []
    flights: list[tuple[Flight, np.ndarray]] = []
    for number, (what, chosen, others) in enumerate(program):
        here, there = slots(*chosen), slots(*others[: len(chosen)])
        if what == "promote":
            flights.append((mover.promote(dram, there, hbm, here), model[TierId.DRAM][there]))
            model[TierId.HBM][here] = model[TierId.DRAM][there]
        elif what == "demote":
            flights.append((mover.demote(hbm, here, dram, there), model[TierId.HBM][here]))
            model[TierId.DRAM][there] = model[TierId.HBM][here]
        elif what == "write" and mover.idle(hbm, here):
            fresh = block_bytes(b"%d" % number, BB)

            def write(at: Slots = here, data: np.ndarray = fresh) -> None:
                hbm.array[at, :BB] = data

            sim.launch(f"write {chosen}", write, writes=places(hbm, here))
            mover.computed(hbm, here)
            model[TierId.HBM][here] = fresh
        elif what == "read":
            found: list[np.ndarray] = []

            def read(at: Slots = here, into: list[np.ndarray] = found) -> None:
                into.append(hbm.array[at, :BB].copy())

            mover.fence_compute(hbm, here)
            sim.launch(f"read {chosen}", read, reads=places(hbm, here))
            mover.reading(hbm, here)
            seen.append((found, model[TierId.HBM][here].copy()))
        elif what == "run":
            sim.run_one()
    sim.run_all()
    assert (hbm.array[:, :BB] == model[TierId.HBM]).all()
    assert (dram.array[:, :BB] == model[TierId.DRAM]).all()
    for got, wanted in seen:
        assert (got[0] == wanted).all()
    assert all(flight.done and not len(flight.news()[1]) for flight, _ in flights)
    everything = np.arange(N, dtype=np.int32)
    assert mover.idle(hbm, everything) and mover.idle(dram, everything)
    assert mover.num_tracked == 0


def direct(sim: SimDevice, stream: str, copy: Copy) -> Flight:
    """The control arm: a copy without the mover, so without its edges."""
    flight = Flight(1, sim.signal)
    sim.submit(stream, [copy], [], flight, checksum=False)
    return flight


def test_without_the_mover_the_same_copies_are_a_hazard() -> None:
    hbm, dram = make_pools()
    sim = SimDevice(0)
    Mover(sim).promote(dram, slots(0), hbm, slots(1))
    with pytest.raises(HazardError, match=r"read after write on hbm\[1\]"):
        direct(sim, D2H, Copy(hbm, 1, dram, 2))
    with pytest.raises(HazardError, match=r"write after read on dram\[0\]"):
        direct(sim, D2H, Copy(hbm, 3, dram, 0))


def test_without_its_edge_a_copy_does_corrupt_under_some_order() -> None:
    """The same two copies, the check bypassed by pretending that they touch other pools."""
    wrong = 0
    for seed in range(20):
        hbm, dram = make_pools()
        alias = ArrayPool(TierId.HBM, N, BB, array=hbm.array)
        expected = dram.view(0).copy()
        sim = SimDevice(seed)
        direct(sim, H2D, Copy(dram, 0, hbm, 1))
        direct(sim, D2H, Copy(alias, 1, dram, 2))
        sim.run_all()
        wrong += not (dram.view(2) == expected).all()
    assert 0 < wrong < 20


def test_a_slot_is_idle_only_when_its_readers_and_its_writer_are_done() -> None:
    sim = SimDevice(1, async_compute=True)
    mover = Mover(sim)
    hbm, dram = make_pools()
    assert mover.idle(hbm, slots(0, 1, 2))
    mover.promote(dram, slots(0), hbm, slots(1))
    assert not mover.idle(hbm, slots(1)) and not mover.idle(dram, slots(4, 0))
    assert mover.idle(hbm, slots(0)) and mover.idle(dram, slots(1))
    sim.run_all()
    assert mover.idle(hbm, slots(1)) and mover.idle(dram, slots(0))
    sim.launch("read", lambda: None, reads=places(hbm, slots(3)))
    mover.reading(hbm, slots(3))
    assert not mover.idle(hbm, slots(3))
    sim.run_all()
    assert mover.idle(hbm, slots(3)) and mover.num_tracked == 0


def test_a_demotion_waits_for_the_compute_that_writes_its_block() -> None:
    sim = SimDevice(2, async_compute=True)
    mover = Mover(sim)
    hbm, dram = make_pools()
    ran: list[str] = []
    sim.launch("write", lambda: ran.append("write"), writes=places(hbm, slots(2)))
    mover.computed(hbm, slots(2))
    flight = mover.demote(hbm, slots(2), dram, slots(0))
    sim.run_one()
    assert ran == ["write"] and not flight.done
    sim.run_all()
    assert flight.done


def test_a_faulty_copy_fails_its_flight_and_frees_its_slots() -> None:
    sim = SimDevice(3, faults=lambda name: "dram[1]" in name)
    mover = Mover(sim)
    hbm, dram = make_pools()
    flight = mover.demote(hbm, slots(0, 1, 2), dram, slots(0, 1, 2))
    sim.run_all()
    assert flight.news()[1].tolist() == [1]
    assert mover.idle(dram, slots(0, 1, 2))


@pytest.fixture
def threads() -> Iterator[Mover]:
    device = CpuDevice(Signal())
    yield Mover(device)
    device.close()


def test_on_threads_bytes_go_down_and_up_again_with_their_checksums(threads: Mover) -> None:
    big = 3 * 4096 + 1
    hbm, dram = ArrayPool(TierId.HBM, 50, big), ArrayPool(TierId.DRAM, 50, big)
    top = hbm.alloc(37)
    for slot in top.tolist():
        hbm.view(slot)[:] = block_bytes(b"%d" % slot, big)
    threads.computed(hbm, top)
    low = np.random.default_rng(5).permutation(dram.alloc(37))
    down = threads.demote(hbm, top, dram, low)
    again = np.arange(37, 50, dtype=np.int32)
    up = threads.promote(dram, low[:13], hbm, again)
    threads.fence_compute(hbm, again)
    assert up.done and down.done
    for slot, back in zip(top[:13].tolist(), again.tolist(), strict=True):
        assert (hbm.view(back) == block_bytes(b"%d" % slot, big)).all()
    digests = [xxh3_64_intdigest(hbm.view(slot).data) for slot in top.tolist()]
    assert down.checksums.tolist() == digests
    threads.reading(hbm, again)
    while not threads.idle(dram, low):
        threads.device.record(D2H).wait(30.0)


@pytest.mark.parametrize("seed", range(3))
def test_on_threads_crossing_moves_end_as_if_each_had_run_at_once(
    threads: Mover, seed: int
) -> None:
    big = 40_000
    random = np.random.default_rng(seed)
    hbm, dram = ArrayPool(TierId.HBM, 7, big), ArrayPool(TierId.DRAM, 7, big)
    for pool in (hbm, dram):
        pool.array[:] = random.integers(0, 256, pool.array.shape, np.uint8)
    model = {pool: pool.array[:, :big].copy() for pool in (hbm, dram)}
    for _ in range(200):
        src, dst = (hbm, dram) if random.random() < 0.5 else (dram, hbm)
        n = int(random.integers(1, 8))
        here, there = (random.permutation(7)[:n].astype(np.int32) for _ in range(2))
        move = threads.demote if src is hbm else threads.promote
        move(src, here, dst, there)
        model[dst][there] = model[src][here]
    for stream in (H2D, D2H):
        assert threads.device.record(stream).wait(30.0)
    for pool in (hbm, dram):
        assert (pool.array[:, :big] == model[pool]).all()
        assert threads.idle(pool, np.arange(7, dtype=np.int32))


def test_statistics_count_what_was_started(threads: Mover) -> None:
    hbm, dram = make_pools()
    threads.promote(dram, slots(0, 1), hbm, slots(0, 1))
    threads.demote(hbm, slots(0, 1, 3), dram, slots(2, 3, 4))
    threads.demote(hbm, slots(0), dram, slots(2))
    found = threads.statistics()
    assert found == MoverStatistics(
        promotions=1, promoted_blocks=2, promoted_bytes=2 * BB,
        demotions=2, demoted_blocks=4, demoted_bytes=4 * BB, up=found.up, down=found.down
    )  # fmt: skip


def test_events_that_are_over_do_not_pile_up() -> None:
    sim = SimDevice(4)
    mover = Mover(sim)
    hbm, dram = ArrayPool(TierId.HBM, 999, BB), ArrayPool(TierId.DRAM, 999, BB)
    for i in range(999):
        mover.promote(dram, slots(i), hbm, slots(i))
        sim.run_all()
    assert mover.num_tracked < 200


def test_the_mover_does_not_keep_a_pool_alive() -> None:
    sim = SimDevice(5)
    mover = Mover(sim)
    mover.reading(ArrayPool(TierId.HBM, 3, BB), slots(1))
    assert mover.num_tracked == 0


@pytest.mark.parametrize(
    ("block_bytes_", "targets", "message"),
    [(BB, [0], "2 sources for 1"), (BB + 1, [0, 1], "blocks of 65 into slots of 64")],
)
def test_sides_that_do_not_fit_are_refused_and_nothing_starts(
    block_bytes_: int, targets: list[int], message: str
) -> None:
    sim = SimDevice(6)
    odd = ArrayPool(TierId.DRAM, N, block_bytes_)
    hbm, _ = make_pools()
    with pytest.raises(ValueError, match=message):
        Mover(sim).promote(odd, slots(0, 1), hbm, slots(*targets))
    assert sim.num_pending == 0


def test_moving_nothing_is_over_at_once() -> None:
    sim = SimDevice(7)
    hbm, dram = make_pools()
    assert Mover(sim).promote(dram, slots(), hbm, slots()).done
    assert sim.record(COMPUTE).done and sim.num_pending == 0


# ---- called off ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancelled", "too late"])
def test_what_has_not_begun_is_called_off_and_its_slots_are_idle_no_sooner(how: str) -> None:
    sim = SimDevice(8)
    mover = Mover(sim, clock=sim.clock)
    hbm, dram = make_pools()
    deadline = 1.0 if how == "too late" else None
    flight = mover.promote(dram, slots(0, 1, 2), hbm, slots(2, 3, 4), deadline=deadline)
    sim.run_one()
    if how == "cancelled":
        flight.cancel()
    else:
        sim.advance(1.0)
    assert not flight.done and not mover.idle(hbm, slots(3)) and not mover.idle(dram, slots(1))
    before = hbm.view(3).copy()
    sim.run_all()
    assert flight.status.tolist() == [LANDED, FAILED, FAILED]
    assert isinstance(flight.error, CalledOff)
    assert (hbm.view(3) == before).all()
    assert mover.idle(hbm, slots(2, 3, 4)) and mover.idle(dram, slots(0, 1, 2))
    assert mover.statistics().up.called_off_blocks == 2


def test_a_flight_that_somebody_else_joins_is_not_called_off() -> None:
    sim = SimDevice(9)
    mover = Mover(sim)
    hbm, dram = make_pools()
    flight = mover.promote(dram, slots(0, 1), hbm, slots(2, 3), deadline=1.0)
    flight.cancel()
    flight.agree(None, background=False)
    sim.advance(5.0)
    sim.run_all()
    assert flight.status.tolist() == [LANDED, LANDED]


def test_on_threads_what_has_not_begun_is_called_off() -> None:
    now_s = [0.0]
    device = CpuDevice(Signal(), clock=lambda: now_s[0])
    mover = Mover(device)
    hbm, dram = make_pools()
    now_s[0] = 2.0
    late = mover.promote(dram, slots(0, 1), hbm, slots(2, 3), deadline=1.0)
    in_time = mover.promote(dram, slots(2, 1), hbm, slots(0, 4), deadline=3.0)
    device.close()
    assert late.status.tolist() == [FAILED, FAILED] and late.called_off == 2
    assert in_time.status.tolist() == [LANDED, LANDED]
    assert (hbm.view(4) == dram.view(1)).all()


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [((0, 1), (2, 2), "named twice"), ((0, 1), (1, 2), "both source and destination")],
)
def test_blocks_of_one_move_that_depend_on_each_other_are_refused(
    sources: tuple[int, ...], targets: tuple[int, ...], message: str
) -> None:
    """In one submission they run in any order."""
    sim = SimDevice(6)
    hbm, _ = make_pools()
    with pytest.raises(ValueError, match=message):
        Mover(sim).promote(hbm, slots(*sources), hbm, slots(*targets))
    assert sim.num_pending == 0
