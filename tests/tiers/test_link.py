"""What a link says of itself: how fast, how full, what was called off."""

import numpy as np
import pytest

from kvtier.index.words import TierId
from kvtier.tiers.contracts import Flight, Signal
from kvtier.tiers.device import D2H, H2D
from kvtier.tiers.link import HORIZON_S, LEAST_IN_FLIGHT, Link, Meter
from kvtier.tiers.mover import Mover
from kvtier.tiers.pool import ArrayPool
from kvtier.tiers.simulated import SimDevice

GB = 10**9


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_rate_is_bytes_over_busy_time_whatever_the_size_of_copies() -> None:
    meter = Meter(Clock())
    assert meter.bytes_per_s is None
    meter.add(10 * GB, 1.0)
    meter.add(2 * GB, 2.0)
    assert meter.bytes_per_s == pytest.approx(4 * GB)


def test_old_measurements_count_less_and_an_idle_hour_changes_nothing() -> None:
    clock = Clock()
    meter = Meter(clock, half_life_s=10.0)
    meter.add(10 * GB, 1.0)
    clock.now_s = 10.0
    meter.add(1 * GB, 1.0)
    assert meter.bytes_per_s == pytest.approx((5 + 1) * GB / 1.5)
    clock.now_s += 3600.0
    assert meter.bytes_per_s == pytest.approx(4 * GB)
    meter.add(1 * GB, 1.0)
    assert meter.bytes_per_s == pytest.approx(1 * GB, rel=1e-4)


def test_what_took_no_time_teaches_nothing() -> None:
    meter = Meter(Clock())
    meter.add(GB, 0.0)
    meter.add(0, 0.1)  # all of it was called off
    assert meter.bytes_per_s is None


def test_a_link_has_no_room_until_a_quarter_of_its_limit_is_free() -> None:
    link = Link(Clock(), 800)
    flight = Flight(8, Signal())
    link.carry(flight, 100)
    assert link.room == 0
    flight.land([0])
    assert link.room == 0
    flight.fail([1])
    assert link.room == 200
    flight.land(range(2, 8), busy_s=3.0)
    assert link.room == 800
    found = link.statistics()
    assert (found.landed_bytes, found.busy_s, found.in_flight_bytes) == (700, 3.0, 0)


def test_without_a_setting_a_link_takes_what_it_carries_in_a_moment() -> None:
    link = Link(Clock())
    assert link.limit == LEAST_IN_FLIGHT
    for rate, wanted in ((GB // 100, LEAST_IN_FLIGHT), (50 * GB, int(50 * GB * HORIZON_S))):
        link = Link(Clock())
        flight = Flight(1, Signal())
        link.carry(flight, rate)
        flight.land([0], busy_s=1.0)
        link.settle()
        assert link.limit == wanted


def test_a_mover_measures_each_direction_by_what_has_landed() -> None:
    sim = SimDevice(3, copy_s=0.5)
    mover = Mover(sim, clock=sim.clock, most_in_flight=400)
    hbm, dram = (ArrayPool(tier, 8, 100) for tier in (TierId.HBM, TierId.DRAM))
    some = np.arange(3, dtype=np.int32)
    mover.promote(dram, some, hbm, some)
    assert (mover.room(H2D), mover.room(D2H)) == (100, 400)
    assert mover.bandwidth(H2D) is None
    sim.run_all()
    assert mover.bandwidth(H2D) == pytest.approx(200)
    assert mover.bandwidth(D2H) is None
    found = mover.statistics()
    assert (found.up.landed_bytes, found.up.busy_s, found.down.landed_bytes) == (300, 1.5, 0)


def test_a_mover_that_may_move_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="most_in_flight"):
        Mover(SimDevice(0), most_in_flight=0)
