"""Capacity is hard, eviction takes old tails, and what remains is prefix-closed."""

import tempfile
from pathlib import Path
from threading import Lock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.tiers.contracts import FAILED, LANDED
from kvtier.tiers.errors import CapacityTooSmall, TierFull
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.settings import Geometry
from tests.nvme.rig import Rig, branch, disk_takes, num_landed

RECORD = 4096 + 3 * 8192
"""Three blocks of 5000 bytes and their header."""


class MeteredFiles(Files):
    """Watches that the segments never take more than the capacity."""

    def __init__(self, store: Path, capacity: int) -> None:
        super().__init__()
        self._store = store
        self._capacity = capacity
        self._guard = Lock()
        self.ample = True

    def allocate(self, fd: int, offset: int, length: int) -> None:
        super().allocate(fd, offset, length)
        with self._guard:
            self.ample &= disk_takes(self._store, at_most=self._capacity)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "fetch", "limb"]), st.integers(0, 4), st.integers(1, 9)
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=STEPS,
    capacity_pages=st.integers(2, 40),
    block_bytes=st.sampled_from([1, 4096, 5000, 13000]),
)
def test_usage_never_exceeds_capacity_and_what_is_held_is_prefix_closed(
    steps: list[tuple[str, int, int]], capacity_pages: int, block_bytes: int
) -> None:
    capacity = capacity_pages * 4096
    with tempfile.TemporaryDirectory() as name:
        store = Path(name) / "s"
        files = MeteredFiles(store, capacity)
        with Rig(store, capacity_bytes=capacity, block_bytes=block_bytes, files=files) as rig:
            for action, seed, length in steps:
                trunk = branch(9, seed)
                if action == "put":
                    rig.put(trunk.part(0, length))
                elif action == "limb":
                    rig.put(branch(length, seed + 10, parent=trunk.keys[seed]))
                else:
                    assert rig.landed(trunk) == rig.lookup(trunk)
                assert rig.tier.statistics().used_bytes <= capacity
                assert disk_takes(store, at_most=capacity)
        assert files.ample
        report = check_store(store)
        assert report.ok, report.problems
        assert disk_takes(store, at_most=report.bytes)
        assert report.leftover_bytes == 0


def test_the_least_recently_fetched_branch_goes_first(tmp_path: Path) -> None:
    with Rig(tmp_path / "s", capacity_bytes=3 * RECORD) as rig:
        for seed in range(3):
            rig.put(branch(3, seed))
        rig.landed(branch(3, 0))
        rig.lookup(branch(3, 1))  # looking is not using
        rig.put(branch(3, 3))
        assert [rig.lookup(branch(3, seed)) for seed in range(4)] == [3, 0, 3, 3]


def test_last_uses_survive_a_restart(tmp_path: Path) -> None:
    with Rig(tmp_path / "s", capacity_bytes=3 * RECORD) as rig:
        for seed in range(3):
            rig.put(branch(3, seed))
        rig.landed(branch(3, 0))
        later = rig.time + 1
    with Rig(tmp_path / "s", capacity_bytes=3 * RECORD, clock=lambda: later) as rig:
        rig.put(branch(3, 3))
        assert [rig.lookup(branch(3, seed)) for seed in range(4)] == [3, 0, 3, 3]


def test_a_branch_is_trimmed_from_its_tail_block_by_block(tmp_path: Path) -> None:
    with Rig(tmp_path / "s", capacity_bytes=4 * RECORD) as rig:
        rig.put(branch(9))
        rig.put(branch(2, 1))  # 20 KiB of the 28 KiB that were left
        rig.put(branch(1, 2))  # needs 12 KiB: one block of the oldest tail
        assert rig.lookup(branch(9)) == 8
        assert rig.landed(branch(9).part(0, 8)) == 8
        assert rig.tier.statistics().evicted_blocks == 1
        assert num_landed(rig.put(branch(9))) == 9  # the trimmed block comes back in a new record
        assert rig.landed(branch(9)) == 9
    assert check_store(tmp_path / "s").ok


def test_an_inner_block_is_never_evicted_before_its_children(tmp_path: Path) -> None:
    trunk = branch(3)
    limbs = [branch(3, seed, parent=trunk.keys[0]) for seed in (1, 2)]
    with Rig(tmp_path / "s", capacity_bytes=4 * RECORD) as rig:
        rig.put(trunk)
        for limb in limbs:
            rig.put(limb)
        for seed in range(3, 12):
            rig.put(branch(3, seed))
            held = [rig.lookup(limb) for limb in limbs]
            assert rig.lookup(trunk) >= 1 or held == [0, 0]
        assert rig.lookup(branch(3, 11)) == 3
    assert check_store(tmp_path / "s").ok


def test_a_put_larger_than_the_store_keeps_its_first_blocks(tmp_path: Path) -> None:
    with Rig(tmp_path / "s", capacity_bytes=2 * RECORD) as rig:
        rig.put(branch(3, 1))
        flight = rig.put(branch(12))
        assert list(flight.status) == [LANDED] * 6 + [FAILED] * 6
        assert isinstance(flight.error, TierFull)
        assert rig.landed(branch(12)) == 6


def test_a_block_that_can_never_fit_fails_and_evicts_nothing(tmp_path: Path) -> None:
    with Rig(tmp_path / "s", capacity_bytes=8 * 4096, block_bytes=4096) as rig:
        rig.put(branch(3))
    with Rig(tmp_path / "s", capacity_bytes=8 * 4096, block_bytes=40_000) as rig:
        flight = rig.put(branch(2, 1))
        assert (flight.status == FAILED).all()
        assert isinstance(flight.error, CapacityTooSmall)
        assert "raise its capacity" in str(flight.error)
        assert rig.tier.statistics().refused_blocks == 2
        assert rig.tier.statistics().blocks == 3


def test_a_capacity_that_holds_no_block_is_refused_at_open(tmp_path: Path) -> None:
    with pytest.raises(CapacityTooSmall, match="give at least 8192"):
        Rig(tmp_path / "s", capacity_bytes=8191)


def test_a_smaller_capacity_is_honoured_before_serving(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        for seed in range(5):
            rig.put(branch(7, seed))
    for capacity in (5 * RECORD + 4096, RECORD, 2 * 4096):
        with Rig(tmp_path / "s", capacity_bytes=capacity) as rig:
            assert rig.tier.statistics().used_bytes <= capacity
            assert disk_takes(tmp_path / "s", at_most=capacity)
        assert check_store(tmp_path / "s").ok


@pytest.mark.parametrize("block_bytes", [1, 5000, 45056])
def test_a_store_of_a_few_blocks_takes_blocks_and_not_whole_records(
    tmp_path: Path, block_bytes: int
) -> None:
    """A record longer than the store would push everything out and then find no room."""
    room = 2 * (4096 + -(-block_bytes // 4096) * 4096)
    geometry = Geometry()
    with Rig(
        tmp_path / "s", block_bytes=block_bytes, capacity_bytes=room, geometry=geometry
    ) as rig:
        for seed in range(3):
            assert num_landed(rig.put(branch(7, seed))) == 2
        assert rig.landed(branch(7, 2)) == 2
