"""The CPU's copy threads: bytes, order, landing, failure. Gates are events, so nothing sleeps."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from xxhash import xxh3_64_intdigest

from kvtier.index.words import TierId
from kvtier.tiers import device as device_module
from kvtier.tiers.contracts import Flight, Pool, Signal
from kvtier.tiers.device import COMPUTE, D2H, H2D, Copy, CpuDevice, Device, coalesce
from kvtier.tiers.pool import ArrayPool, SlotPool
from tests.prf import block_bytes

BB = 5000  # no whole page: rows have padding between them


class Gate:
    """An event the test opens."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        return self._open.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        return self._open.wait(timeout_s)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    made = CpuDevice(Signal())
    yield made
    made.close()


def wait_for(flight: Flight, signal: Signal) -> None:
    while True:
        ticks = signal.ticks
        if flight.done:
            return
        signal.wait(ticks, 30.0)


def pools(n: int = 40, block_bytes_: int = BB) -> tuple[ArrayPool, ArrayPool]:
    src = ArrayPool(TierId.DRAM, n, block_bytes_)
    for slot in range(n):
        src.view(slot)[:] = block_bytes(b"%d" % slot, block_bytes_)
    return src, ArrayPool(TierId.HBM, n, block_bytes_, debug=True)


def copies(src: Pool, dst: Pool, pairs: list[tuple[int, int]]) -> list[Copy]:
    return [Copy(src, s, dst, d) for s, d in pairs]


@pytest.mark.parametrize("stream", [H2D, D2H])
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize(
    "pairs",
    [
        [(3, 3)],
        [(i, i + 5) for i in range(17)],
        [(7, 2), (8, 3), (1, 4), (2, 9), (3, 10), (30, 11)],
        [(i, 20 - i) for i in range(13)],
    ],
)
def test_every_block_arrives_whole_with_its_checksum_and_no_other_slot_changes(
    device: CpuDevice, stream: str, checksum: bool, pairs: list[tuple[int, int]]
) -> None:
    src, dst = pools()
    flight = Flight(len(pairs), device.signal)
    event = device.submit(stream, copies(src, dst, pairs), [], flight, checksum=checksum)
    assert event.wait(30.0) and event.done and event.error is None
    assert flight.done and len(flight.news()[0]) == len(pairs)
    for block, (s, d) in enumerate(pairs):
        assert (dst.view(d) == src.view(s)).all()
        digest = xxh3_64_intdigest(src.view(s).data) if checksum else 0
        assert int(flight.checksums[block]) == digest
    untouched = set(range(40)) - {d for _, d in pairs}
    assert all((dst.view(slot) == 0xFF).all() for slot in untouched)


def test_copies_wait_for_the_events_they_name_and_for_their_stream(device: CpuDevice) -> None:
    src, dst = pools()
    gate = Gate()
    first, second = Flight(1, device.signal), Flight(1, device.signal)
    device.submit(H2D, copies(src, dst, [(0, 0)]), [gate], first, checksum=False)
    end = device.submit(H2D, copies(src, dst, [(1, 1)]), [], second, checksum=False)
    beside = Flight(1, device.signal)
    assert device.submit(D2H, copies(src, dst, [(2, 2)]), [], beside, checksum=True).wait(30.0)
    assert not end.wait(0.0) and not first.done and not second.done
    assert (dst.view(0) == 0xFF).all()
    gate.open()
    assert end.wait(30.0) and first.done and second.done


def test_fences_hold_later_work_and_points_mark_earlier_work(device: CpuDevice) -> None:
    src, dst = pools()
    gate = Gate()
    device.wait_for(D2H, [gate])
    flight = Flight(1, device.signal)
    device.submit(D2H, copies(src, dst, [(0, 0)]), [], flight, checksum=True)
    point = device.record(D2H)
    assert not point.done and point.error is None
    gate.open()
    assert point.wait(30.0) and flight.done


def test_compute_is_the_calling_thread(device: CpuDevice) -> None:
    src, dst = pools()
    assert device.record(COMPUTE).done and device.record(COMPUTE).wait(0.0)
    assert device.record(COMPUTE).error is None
    flight = Flight(3, device.signal)
    pairs = [(i, i) for i in range(3)]
    event = device.submit(H2D, copies(src, dst, pairs), [], flight, checksum=False)
    device.wait_for(COMPUTE, [event])
    assert flight.done


def test_a_waiter_hears_of_the_end_of_an_event_not_only_of_the_landing(device: CpuDevice) -> None:
    src, dst = pools()
    flight = Flight(1, device.signal)
    event = device.submit(H2D, copies(src, dst, [(0, 0)]), [], flight, checksum=False)
    while True:
        ticks = device.signal.ticks
        if event.done:
            break
        device.signal.wait(ticks, 30.0)
        assert device.signal.ticks != ticks
    assert flight.done


class Broken:
    """An event whose wait breaks: stands for any error on a copy thread."""

    done = False
    error: Exception | None = None

    def wait(self, timeout_s: float | None) -> bool:
        raise OSError("the wire is cut")


def test_an_error_fails_the_flight_and_the_thread_lives_on(device: CpuDevice) -> None:
    src, dst = pools()
    flight = Flight(2, device.signal)
    event = device.submit(
        H2D, copies(src, dst, [(0, 0), (1, 1)]), [Broken()], flight, checksum=True
    )
    assert event.wait(30.0) and isinstance(event.error, OSError)
    assert flight.done and len(flight.news()[1]) == 2 and flight.error is event.error
    after = Flight(1, device.signal)
    assert device.submit(H2D, copies(src, dst, [(0, 0)]), [], after, checksum=True).wait(30.0)
    assert len(after.news()[0]) == 1


def test_blocks_land_in_groups_while_the_rest_still_flies(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "LANDING_BYTES", 3 * BB)
    src, dst = pools()
    landings: list[list[int]] = []

    class Watched(Flight):
        def land(self, blocks, checksums=None, source=None, busy_s=0.0):  # type: ignore[no-untyped-def]
            landings.append(list(blocks))
            super().land(blocks, checksums, source, busy_s)

    flight = Watched(8, device.signal)
    pairs = [(i, i) for i in range(8)]
    device.submit(H2D, copies(src, dst, pairs), [], flight, checksum=False).wait(30.0)
    assert landings == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_copy_threads_are_named_and_yield_to_compute(device: CpuDevice) -> None:
    device.record(H2D).wait(30.0)
    device.record(D2H).wait(30.0)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    niceness = {
        thread.name.rpartition("_")[0]: os.getpriority(os.PRIO_PROCESS, thread.native_id or 0)
        for thread in threading.enumerate()
        if thread.name.startswith("kvtier-")
    }
    assert niceness["kvtier-h2d"] == min(19, own + 5)
    assert niceness["kvtier-d2h"] == min(19, own + 10)


def test_closing_finishes_what_was_submitted() -> None:
    device: Device = CpuDevice(Signal())
    src, dst = pools()
    flight = Flight(1, device.signal)
    device.submit(H2D, copies(src, dst, [(0, 0)]), [], flight, checksum=False)
    device.close()
    device.close()
    assert flight.done


def test_a_pool_that_the_cpu_cannot_address_is_refused(device: CpuDevice) -> None:
    src, _ = pools()
    blind = SlotPool(TierId.HBM, 3, BB)
    with pytest.raises(TypeError, match="no bytes that the CPU can address"):
        device.submit(H2D, [Copy(src, 0, blind, 0)], [], Flight(1, device.signal), checksum=False)
    with pytest.raises(IndexError, match="no slots"):
        device.submit(H2D, [Copy(src, 40, src, 0)], [], Flight(1, device.signal), checksum=False)


@pytest.mark.parametrize(
    ("pairs", "limit", "runs"),
    [
        ([], 99, []),
        ([(4, 7)], 1, [1]),
        ([(0, 0), (1, 1), (2, 2), (3, 3)], 10 * BB, [4]),
        ([(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)], 2 * BB, [2, 2, 1]),
        ([(0, 0), (1, 1)], 1, [1, 1]),
        ([(0, 0), (1, 2), (2, 3), (4, 4), (5, 5)], 10 * BB, [1, 2, 2]),
        ([(1, 1), (0, 0)], 10 * BB, [1, 1]),
        ([(0, 0), (0, 0)], 10 * BB, [1, 1]),
    ],
)
def test_only_neighbours_on_both_sides_form_a_run(
    pairs: list[tuple[int, int]], limit: int, runs: list[int]
) -> None:
    src, dst = pools()
    found = coalesce(copies(src, dst, pairs), limit)
    assert [len(run) for run in found] == runs
    assert [at for run in found for at in run] == list(range(len(pairs)))


def test_neighbouring_slots_of_two_pools_form_no_run() -> None:
    src, dst = pools()
    assert len(coalesce([Copy(src, 0, dst, 0), Copy(dst, 1, dst, 1)], 1 << 20)) == 2


def test_what_the_sidecar_needs_loads_no_torch() -> None:
    modules = ("pool", "dram", "device", "mover", "memory", "simulated", "hazards")
    program = f"import sys; {'; '.join(f'import kvtier.tiers.{m}' for m in modules)}"
    program += "; print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "False\n"
