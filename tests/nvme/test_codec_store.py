"""A store whose blocks are encoded: the same bytes come back, and it takes what it says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

import kvtier.tiers.nvme.encoder as encoder
import kvtier.tiers.nvme.pace as pace
from kvtier.index.words import TierId
from kvtier.tiers.contracts import FAILED, LANDED, Bytes
from kvtier.tiers.errors import CodecUnknown
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.codecs import Coder
from kvtier.tiers.nvme.outgoing import Record, sample_block
from kvtier.tiers.nvme.pace import Sample
from kvtier.tiers.nvme.workers import Scratch
from kvtier.tiers.pool import ArrayPool
from tests.nvme.rig import Rig, branch, disk_takes, num_landed
from tests.prf import block_bytes, number_bytes


def mixed(key: bytes, nbytes: int) -> Bytes:
    """Blocks that compress, and others that do not."""
    return (block_bytes if key[0] % 3 == 0 else number_bytes)(key, nbytes)


def zstd(path: Path, **options: Any) -> Rig:
    """A store of bf16 numbers."""
    numbers: dict[str, Any] = {"codec": "zstd", "element_bytes": 2, "fill": number_bytes}
    return Rig(path, **numbers | options)


@pytest.mark.parametrize(
    ("block_size", "element_bytes"), [(5000, 2), (45056, 2), (45056, 4), (20481, 1)]
)
def test_encoded_blocks_come_back_and_take_fewer_pages(
    tmp_path: Path, block_size: int, element_bytes: int
) -> None:
    store, blocks = tmp_path / "s", branch(7)

    def content(key: bytes, nbytes: int) -> Bytes:
        return number_bytes(key, nbytes, element_bytes)

    with zstd(store, block_bytes=block_size, element_bytes=element_bytes, fill=content) as rig:
        assert num_landed(rig.put(blocks)) == 7
        assert rig.landed(blocks) == 7
        seen = rig.tier.statistics()
        assert (seen.codec.zstd_blocks, seen.codec.raw_blocks) == (7, 0)
        assert seen.codec.decoded_bytes == 7 * block_size
        assert seen.codec.stored_bytes < 0.9 * 7 * block_size
        assert disk_takes(store, at_most=seen.used_bytes)
    report = check_store(store)
    assert report.ok and report.bytes == seen.used_bytes < 0.95 * 7 * block_size + 7 * 4096
    with Rig(store, block_bytes=block_size, fill=content) as rig:  # whatever its own codec
        assert rig.landed(blocks) == 7


class CrookedPool(ArrayPool):
    """A pool whose memory is not page-aligned and has no padding."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        memory = np.zeros(num_slots * block_bytes + 1, np.uint8)[1:]
        super().__init__(
            TierId.HBM, num_slots, block_bytes, array=memory.reshape(num_slots, block_bytes)
        )


@pytest.mark.parametrize("block_size", [5000, 20480])
def test_raw_and_encoded_blocks_may_mix_in_a_record_and_in_a_read(
    tmp_path: Path, block_size: int
) -> None:
    store, blocks = tmp_path / "s", branch(20)
    with zstd(store, block_bytes=block_size, fill=mixed) as rig:
        assert num_landed(rig.put(blocks)) == 20
        seen = rig.tier.statistics().codec
        assert seen.raw_blocks == sum(key[0] % 3 == 0 for key in blocks.keys) > 0
        assert seen.raw_blocks + seen.zstd_blocks == 20
        for start in range(20):
            assert num_landed(rig.fetch(blocks.part(start, 20))) == 20 - start
        crooked = CrookedPool(20, block_size)
        assert num_landed(rig.fetch(blocks, pool=crooked)) == 20
        again = branch(9, 1)
        assert num_landed(rig.put(again, pool=CrookedPool(9, block_size))) == 9
        assert rig.landed(again) == 9
    assert check_store(store).ok


def test_a_put_may_ask_for_another_codec_than_the_stores(tmp_path: Path) -> None:
    with zstd(tmp_path / "s", codec="raw") as rig:
        for seed, (codec, encoded) in enumerate([(None, 0), ("zstd", 4), ("raw", 0), ("auto", 0)]):
            before = rig.tier.statistics().codec.zstd_blocks
            blocks = branch(4, seed)
            assert num_landed(rig.put(blocks, codec=codec)) == rig.landed(blocks) == 4
            assert rig.tier.statistics().codec.zstd_blocks == before + encoded


def test_a_codec_that_there_is_not_is_named_and_costs_only_who_asks(tmp_path: Path) -> None:
    with pytest.raises(CodecUnknown, match="'lz4' is unknown"):
        zstd(tmp_path / "s", codec="lz4")
    assert not (tmp_path / "s").exists()
    with zstd(tmp_path / "s") as rig:
        flight = rig.put(branch(3), codec="lz4")
        assert (flight.status == FAILED).all() and isinstance(flight.error, CodecUnknown)
        assert num_landed(rig.put(branch(3))) == 3


@pytest.mark.parametrize(("codec", "position"), [("zstd", 5), ("zstd", 0), ("auto", 2)])
def test_a_record_that_cannot_be_encoded_fails_alone_with_what_hangs_off_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    codec: str,
    position: int,
) -> None:
    encode, broken, others = Coder.encode, branch(9), branch(9, 1)
    kept = position - position % 3  # three blocks a record
    bad = number_bytes(broken.keys[position], 5000)

    def fail(self: Coder, block: Bytes, planes: int) -> bytes | None:
        if block.tobytes() == bytes(bad):
            raise MemoryError("no room for a context")
        return encode(self, block, planes)

    monkeypatch.setattr(Coder, "encode", fail)
    with zstd(tmp_path / "s", codec=codec) as rig:
        flight = rig.put(broken)
        assert [int(status) for status in flight.status] == [LANDED] * kept + [FAILED] * (9 - kept)
        assert isinstance(flight.error, MemoryError) and "NVMe encoding broke" in caplog.text
        assert num_landed(rig.put(others)) == rig.landed(others) == 9
        monkeypatch.setattr(Coder, "encode", encode)
        assert num_landed(rig.put(broken)) == rig.landed(broken) == 9
    report = check_store(tmp_path / "s")
    assert report.ok and report.leftover_bytes == 0


def test_the_size_of_elements_may_be_learnt_after_opening(tmp_path: Path) -> None:
    with zstd(tmp_path / "s", block_bytes=90112, element_bytes=1) as rig:
        rig.put(branch(4))
        apart = rig.tier.statistics().codec.stored_bytes
        rig.tier.describe_elements(2)
        rig.put(branch(4, 1))
        assert rig.tier.statistics().codec.stored_bytes < 1.95 * apart
        with pytest.raises(CodecUnknown):
            rig.tier.describe_elements(3)


def test_raw_blocks_never_see_a_coder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a raw block was encoded or decoded")

    for name in ("encode", "decode"):
        monkeypatch.setattr(Coder, name, refuse)
    with Rig(tmp_path / "s", fill=number_bytes) as rig:
        assert num_landed(rig.put(branch(9))) == rig.landed(branch(9)) == 9


def test_a_store_holds_as_many_encoded_blocks_as_really_fit(tmp_path: Path) -> None:
    store, blocks = tmp_path / "s", branch(30)
    with zstd(store, capacity_bytes=240 << 10) as rig:  # 30 raw blocks take 240 KiB, without heads
        assert num_landed(rig.put(blocks)) == rig.landed(blocks) == 30
        seen = rig.tier.statistics()
        assert seen.evicted_blocks == 0 and seen.used_bytes == 10 * 4096 + 30 * 4096
        assert disk_takes(store, at_most=seen.used_bytes)


def test_evicting_trims_encoded_records_from_their_tails(tmp_path: Path) -> None:
    store, blocks = tmp_path / "s", branch(30)
    with zstd(store, capacity_bytes=120 << 10, fill=mixed) as rig:
        for start in range(0, 30, 6):
            part = branch(6, start)
            assert num_landed(rig.put(part)) == rig.landed(part) == 6
            assert disk_takes(store, at_most=rig.tier.statistics().used_bytes)
        assert rig.tier.statistics().evicted_blocks > 0
        rig.put(blocks)
        assert rig.landed(blocks) == rig.lookup(blocks) > 0
    assert check_store(store).ok


def test_bytes_that_changed_before_they_were_encoded_cost_their_record_and_its_heirs(
    tmp_path: Path,
) -> None:
    blocks, other = branch(9), branch(3, 1)
    content = [number_bytes(key, 5000) for key in blocks.keys]
    sums = np.array([xxh3_64_intdigest(each.data) for each in content], np.uint64)
    sums[4] ^= np.uint64(1)
    with zstd(tmp_path / "s") as rig:
        first, second = rig.begin_put(blocks, checksums=sums), rig.begin_put(other)
        rig.settle(first)
        rig.settle(second)
        assert (first.status == LANDED).tolist() == [True] * 3 + [False] * 6
        assert (second.status == LANDED).all()
        assert num_landed(rig.put(blocks)) == rig.landed(blocks) == 9
    assert check_store(tmp_path / "s").ok


def test_auto_begins_raw_and_encodes_once_everything_is_measured_and_it_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, float]] = []

    def pays(**measured: float) -> bool:
        asked.append(measured)
        return True

    monkeypatch.setattr(pace, "pays", pays)
    monkeypatch.setattr(pace, "_ENOUGH_BYTES", 1)
    with zstd(tmp_path / "s", codec="auto") as rig:
        for seed in range(2):  # nothing was read yet
            rig.put(branch(3, seed))
            assert rig.tier.statistics().codec.zstd_blocks == 0 == len(asked)
        assert rig.landed(branch(3)) == 3
        for _ in range(10_000):  # a fetch is measured just after it has landed
            seen = rig.tier.statistics().codec
            if seen.drive_bytes_s:
                break
            rig.lookup(branch(3))
        assert seen.drive_bytes_s > 0 and seen.decode_bytes_s > 0
        rig.put(branch(3, 2))
        assert rig.tier.statistics().codec.zstd_blocks == 3
        assert asked[-1]["ratio"] == 2.0  # 5000 bytes in one page instead of two
        assert asked[-1]["drive_bytes_s"] == seen.drive_bytes_s
        rig.put(branch(3, 3), namespace=b"n" * 32)  # a namespace of its own
        assert rig.tier.statistics().codec.zstd_blocks == 3
        assert rig.landed(branch(3, 2)) == 3


def test_auto_encodes_a_block_for_trial_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[Record] = []

    def sample(record: Record, scratch: Scratch) -> Sample:
        sampled.append(record)
        return sample_block(record, scratch)

    monkeypatch.setattr(encoder, "sample_block", sample)
    with zstd(tmp_path / "s", codec="auto") as rig:  # groups of 64 KiB, records of 28 KiB
        for seed in range(10):
            rig.put(branch(3, seed))
        assert [record.keys[0] for record in sampled] == [
            branch(3, n).keys[0] for n in (0, 3, 6, 9)
        ]
        rig.put(branch(3, 10), namespace=b"n" * 32)
        assert sampled[-1].namespace == b"n" * 32
        assert len(sampled) == 5


def test_auto_stays_raw_where_blocks_do_not_compress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "_ENOUGH_BYTES", 1)
    with zstd(tmp_path / "s", codec="auto", fill=block_bytes) as rig:
        for seed in range(4):
            rig.put(branch(3, seed))
            assert rig.landed(branch(3, seed)) == 3
        assert rig.tier.statistics().codec.zstd_blocks == 0
