"""What a store promises while nothing goes wrong."""

from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvtier.index.words import BlockKey, TierId
from kvtier.tiers.contracts import FAILED, LANDED, Signal
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.custody import NamespaceUse
from kvtier.tiers.nvme.settings import Geometry
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.tiers.pool import ArrayPool
from tests.nvme.rig import NAMESPACE, Rig, branch, num_landed, segment_files
from tests.prf import block_bytes


@pytest.mark.parametrize("block_bytes", [4096, 5000, 12288, 1])
def test_what_was_put_is_looked_up_and_fetched_after_a_restart(
    tmp_path: Path, block_bytes: int
) -> None:
    blocks = branch(11)
    with Rig(tmp_path / "s", block_bytes=block_bytes) as rig:
        assert rig.lookup(blocks) == 0
        assert num_landed(rig.put(blocks)) == 11
        assert rig.lookup(blocks) == rig.landed(blocks) == 11
        before = rig.tier.namespaces()
    with Rig(tmp_path / "s", block_bytes=block_bytes) as rig:
        assert rig.tier.holds(NAMESPACE, blocks.keys) == rig.lookup(blocks) == 11
        assert rig.landed(blocks) == 11
        used = rig.tier.statistics().used_bytes
        assert rig.tier.namespaces() == before == [NamespaceUse(NAMESPACE, 11, used, 0)]
    assert check_store(tmp_path / "s").ok


def test_a_flight_carries_checksum_and_source_of_every_block(tmp_path: Path) -> None:
    blocks = branch(7)
    with Rig(tmp_path / "s") as rig:
        sums = [xxh3_64_intdigest(block_bytes(key, 5000).data) for key in blocks.keys]
        written = rig.put(blocks, checksums=np.array(sums, np.uint64))
        read = rig.fetch(blocks)
    for flight in (written, read):
        assert [int(s) for s in flight.checksums] == sums
        assert flight.sources == [TierId.NVME] * 7


def test_any_part_of_a_branch_can_be_fetched(tmp_path: Path) -> None:
    blocks = branch(10)
    with Rig(tmp_path / "s") as rig:
        rig.put(blocks)
        for start in range(10):
            assert rig.landed(blocks.part(start, 10)) == 10 - start
            assert rig.landed(blocks.part(start, start + 1)) == 1


def test_slots_in_any_order_are_filled_and_no_others_touched(tmp_path: Path) -> None:
    blocks = branch(5)
    with Rig(tmp_path / "s", block_bytes=4096) as rig:
        rig.put(blocks)
        pool = ArrayPool(TierId.DRAM, 9, 4096)
        pool.alloc(9)
        pool.array[:] = 7
        slots = np.array([8, 1, 6, 0, 3], np.int32)
        assert num_landed(rig.fetch(blocks, pool=pool, slots=slots)) == 5
        assert (pool.array[[2, 4, 5, 7]] == 7).all()


class CrookedPool(ArrayPool):
    """A pool whose memory is not page-aligned and has no padding."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        memory = np.zeros(num_slots * block_bytes + 1, np.uint8)[1:]
        super().__init__(
            TierId.HBM, num_slots, block_bytes, array=memory.reshape(num_slots, block_bytes)
        )


@pytest.mark.parametrize("block_bytes", [4096, 5001])
def test_memory_that_direct_io_cannot_use_is_bounced(tmp_path: Path, block_bytes: int) -> None:
    blocks = branch(7)
    with Rig(tmp_path / "s", block_bytes=block_bytes) as rig:
        assert num_landed(rig.put(blocks, pool=CrookedPool(7, block_bytes))) == 7
        assert num_landed(rig.fetch(blocks, pool=CrookedPool(7, block_bytes))) == 7


def test_blocks_that_are_there_land_without_being_written_again(tmp_path: Path) -> None:
    blocks = branch(9)
    with Rig(tmp_path / "s") as rig:
        rig.put(blocks.part(0, 4))
        written = rig.tier.statistics().written_bytes
        assert num_landed(rig.put(blocks.part(0, 4))) == 4
        assert rig.tier.statistics().written_bytes == written
        assert num_landed(rig.put(blocks)) == 9
        assert rig.tier.statistics().blocks == 9
        assert rig.landed(blocks) == 9


def test_the_same_blocks_put_twice_at_once_are_written_once(tmp_path: Path) -> None:
    blocks = branch(9)
    with Rig(tmp_path / "s") as rig:
        flights = [rig.begin_put(blocks.part(0, end)) for end in (6, 9, 9)]
        for flight in flights:
            rig.settle(flight)
            assert (flight.status == LANDED).all()
        assert rig.tier.statistics().blocks == 9
    assert check_store(tmp_path / "s").blocks == 9


def test_a_block_whose_parent_is_nowhere_is_refused(tmp_path: Path) -> None:
    blocks = branch(6)
    with Rig(tmp_path / "s") as rig:
        assert (rig.put(blocks.part(2, 6)).status == FAILED).all()
        assert num_landed(rig.put(blocks.part(0, 2))) == 2
        assert num_landed(rig.put(blocks.part(2, 6))) == 4


def test_a_put_may_hang_off_one_that_is_still_under_way(tmp_path: Path) -> None:
    blocks = branch(12)
    with Rig(tmp_path / "s") as rig:
        flights = [rig.begin_put(blocks.part(start, start + 3)) for start in range(0, 12, 3)]
        for flight in flights:
            rig.settle(flight)
        assert rig.landed(blocks) == 12


def test_a_branch_may_leave_another_in_the_middle_of_a_record(tmp_path: Path) -> None:
    trunk = branch(7)
    limb = branch(5, 1, parent=trunk.keys[1])
    with Rig(tmp_path / "s") as rig:
        rig.put(trunk)
        rig.put(limb)
        assert rig.landed(trunk) == 7
        assert rig.landed(limb) == 5
    assert check_store(tmp_path / "s").ok


def test_namespaces_never_see_each_other(tmp_path: Path) -> None:
    blocks, other = branch(5), b"o" * 32
    with Rig(tmp_path / "s") as rig:
        rig.put(blocks)
        assert rig.lookup(blocks, namespace=other) == 0
        assert num_landed(rig.fetch(blocks, namespace=other)) == 0
        theirs = branch(5, namespace=other)
        assert num_landed(rig.put(theirs, namespace=other)) == 5
        assert {use.namespace for use in rig.tier.namespaces()} == {NAMESPACE, other}
    assert check_store(tmp_path / "s").ok


def test_a_fetch_with_other_tokens_under_the_same_keys_gets_nothing(tmp_path: Path) -> None:
    blocks = branch(5)
    liar = type(blocks)(blocks.parent, blocks.tokens + 1, blocks.keys, blocks.block_tokens)
    with Rig(tmp_path / "s") as rig:
        rig.put(blocks)
        assert rig.landed(liar) == 0
        assert rig.landed(blocks) == 5  # and nothing was thrown away for it


def test_a_put_whose_bytes_are_not_what_was_checksummed_is_refused(tmp_path: Path) -> None:
    blocks = branch(5)
    sums = np.array([xxh3_64_intdigest(block_bytes(k, 5000).data) for k in blocks.keys], np.uint64)
    sums[4] ^= np.uint64(1)
    with Rig(tmp_path / "s") as rig:
        flight = rig.put(blocks, checksums=sums)
        assert list(flight.status) == [LANDED] * 3 + [FAILED] * 2  # records hold three blocks
        assert rig.tier.statistics().refused_blocks == 2
        assert rig.landed(blocks) == 3
    assert check_store(tmp_path / "s").ok


def test_a_checksum_of_zero_means_that_none_was_taken(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        assert num_landed(rig.put(branch(5), checksums=np.zeros(5, np.uint64))) == 5


def test_closing_finishes_what_was_accepted_and_is_idempotent(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "s")
    flights = [rig.begin_put(branch(6, seed)) for seed in range(4)]
    rig.tier.close()
    rig.tier.close()
    assert all((flight.status == LANDED).all() for flight in flights)
    assert (rig.put(branch(2, 9)).status == FAILED).all()
    assert rig.lookup(branch(6)) == 0
    assert rig.tier.holds(NAMESPACE, branch(6).keys) == 0
    assert rig.tier.statistics().blocks == 24


def test_a_read_only_tier_serves_and_refuses_puts(tmp_path: Path) -> None:
    blocks = branch(5)
    with Rig(tmp_path / "s") as rig:
        rig.put(blocks)
    with Rig(tmp_path / "s", read_only=True) as rig:
        assert rig.lookup(blocks) == rig.landed(blocks) == 5
        assert (rig.put(branch(1, 1)).status == FAILED).all()


def test_an_empty_request_is_done_at_once(tmp_path: Path) -> None:
    nothing, pool = branch(0), ArrayPool(TierId.DRAM, 1, 5000)
    with Rig(tmp_path / "s") as rig:
        assert rig.put(nothing, pool=pool).done and rig.fetch(nothing, pool=pool).done
        assert rig.lookup(nothing) == 0


def test_blocks_larger_than_a_record_or_a_segment_go_down_one_by_one(tmp_path: Path) -> None:
    tiny = Geometry(extent_bytes=4096, group_bytes=4096, segment_bytes=4096)
    blocks = branch(5)
    with Rig(tmp_path / "s", block_bytes=40_001, geometry=tiny) as rig:
        rig.put(blocks)
        assert rig.tier.statistics().extents == 5
        assert rig.landed(blocks) == 5
    assert check_store(tmp_path / "s").ok


def test_more_segments_than_open_descriptors_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.nvme.segments._MAX_OPEN", 3)
    tiny = Geometry(extent_bytes=4096, group_bytes=4096, segment_bytes=4096)
    blocks = branch(11)
    with Rig(tmp_path / "s", geometry=tiny) as rig:
        rig.put(blocks)
        assert len(segment_files(tmp_path / "s")) == 11
        assert rig.landed(blocks) == 11


def test_a_namespace_that_holds_nothing_is_forgotten_at_the_next_opening(tmp_path: Path) -> None:
    with Rig(tmp_path / "s", capacity_bytes=1 << 20) as rig:
        rig.put(branch(3))
        rig.put(branch(3, 1, namespace=b"o" * 32), namespace=b"o" * 32)
    with Rig(tmp_path / "s", capacity_bytes=28 << 10) as rig:
        assert [use.namespace for use in rig.tier.namespaces()] == [b"o" * 32]
    for _ in range(2):
        with Rig(tmp_path / "s") as rig:
            rig.put(branch(3, 2))
            assert len(rig.tier.namespaces()) == 2
            assert rig.landed(branch(3, 2)) == 3
    assert check_store(tmp_path / "s").ok


def test_repr_shows_what_it_holds(tmp_path: Path) -> None:
    with Rig(tmp_path / "s", block_bytes=4096) as rig:
        rig.put(branch(1))
        assert repr(rig.tier) == "NvmeTier(1 blocks, 8192 of 4194304 bytes, ok)"


def test_lookup_of_an_unknown_key_stops_there(tmp_path: Path) -> None:
    blocks = branch(5)
    with Rig(tmp_path / "s") as rig:
        rig.put(blocks)
        keys = (*blocks.keys[:2], BlockKey(b"?" * 32), *blocks.keys[3:])
        assert rig.tier.holds(NAMESPACE, keys) == 2


def test_however_many_segments_are_written_few_files_stay_open(tmp_path: Path) -> None:
    one_block = Geometry(extent_bytes=4096, group_bytes=4096, segment_bytes=4096)
    with Rig(tmp_path / "s", block_bytes=100, geometry=one_block) as rig:
        for seed in range(30):
            assert num_landed(rig.put(branch(10, seed))) == 10
        assert len(segment_files(tmp_path / "s")) == 300
        links = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        open_now = [link for link in links if link.resolve().suffix == ".seg"]
        assert 0 < len(open_now) < 150


def test_a_tier_without_threads_is_refused_and_makes_no_store(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^io_threads: 0 .*give at least 1"):
        NvmeTier.open(tmp_path / "s", capacity_bytes=1 << 20, signal=Signal(), io_threads=0)
    assert not (tmp_path / "s").exists()
