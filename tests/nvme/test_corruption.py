"""Damaged, swapped, stale and foreign bytes are misses: never served, then forgotten."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.tiers.errors import StoreVersion
from kvtier.tiers.nvme.catalogue import Catalogue
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.record import PAGE, decode_header, encode_header
from kvtier.tiers.nvme.rows import Extent
from tests.nvme.rig import NAMESPACE, Branch, Rig, branch, flip, num_landed, segment_files


def extents(store: Path, blocks: Branch) -> list[Extent]:
    """The records that hold a branch, first to last."""
    catalogue = Catalogue.open(store / "catalog", read_only=True)
    try:
        spans = catalogue.find(NAMESPACE, blocks.keys, now=0)
    finally:
        catalogue.close()
    return [span.extent for span in spans]


def filled(store: Path, *branches: Branch, block_bytes: int = 5000) -> None:
    with Rig(store, block_bytes=block_bytes) as rig:
        for blocks in branches:
            assert num_landed(rig.put(blocks)) == len(blocks.keys)


# Blocks of 5000 bytes, three a record: header at 0, blocks at 4096, 12288 and 20480.
@pytest.mark.parametrize(
    ("offset", "survivors"),
    [
        (4096, 3),
        (4096 + 4999, 3),
        (12288 + 17, 4),
        (12288 + 4096, 4),
        (20480, 5),
        (20480 + 4999, 5),
    ],
)
@pytest.mark.parametrize("mask", [1, 0x80])
def test_a_flipped_payload_bit_costs_its_block_and_what_is_behind(
    tmp_path: Path, offset: int, survivors: int, mask: int
) -> None:
    store, blocks, other = tmp_path / "s", branch(9), branch(4, 1)
    limb = branch(2, 2, parent=blocks.keys[7])
    filled(store, blocks, other, limb)
    target = extents(store, blocks)[1]
    flip(segment_files(store)[0], target.offset + offset, mask)
    report = check_store(store)
    assert (
        [line for line in report.problems if "fails its checksum" in line]
        == [*report.problems]
        != []
    )
    with Rig(store) as rig:
        assert rig.landed(blocks) == survivors
        assert rig.lookup(blocks) == survivors
        assert rig.lookup(limb) == 0
        assert rig.tier.statistics().quarantined == 9 - survivors + 2
        assert rig.landed(other) == 4
        assert num_landed(rig.put(blocks)) == rig.landed(blocks) == 9  # recompute refills it
    assert check_store(store).ok


def test_a_flipped_bit_in_padding_harms_nobody(tmp_path: Path) -> None:
    store, blocks = tmp_path / "s", branch(3)
    filled(store, blocks)
    flip(segment_files(store)[0], 4096 + 5000)
    assert check_store(store).ok
    with Rig(store) as rig:
        assert rig.landed(blocks) == 3


@pytest.mark.parametrize(
    "offset", [0, 8, 12, 16, 24, 33, 64, 96, 100, 104, 112, 128, 160, 300, 4095]
)
def test_a_flipped_header_bit_costs_the_record_whatever_block_is_read(
    tmp_path: Path, offset: int
) -> None:
    store, blocks = tmp_path / "s", branch(9)
    filled(store, blocks)
    flip(segment_files(store)[0], extents(store, blocks)[1].offset + offset)
    assert not check_store(store).ok
    with Rig(store) as rig:
        assert rig.landed(blocks.part(4, 9)) == 0  # not the record's first block
        assert rig.landed(blocks) == rig.lookup(blocks) == 3
    assert check_store(store).ok


def copy_record(source: Path, start: int, target: Path, at: int, nbytes: int) -> None:
    with source.open("rb") as file:
        file.seek(start)
        data = file.read(nbytes)
    with target.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_a_record_that_stands_in_anothers_place_is_refused(tmp_path: Path) -> None:
    store, one, two = tmp_path / "s", branch(3), branch(3, 1)
    filled(store, one, two)
    (mine,), (yours,) = extents(store, one), extents(store, two)
    file = segment_files(store)[0]
    copy_record(file, yours.offset, file, mine.offset, mine.nbytes)
    with Rig(store) as rig:
        assert rig.landed(one) == rig.lookup(one) == 0
        assert rig.landed(two) == 3


@pytest.mark.parametrize(("segments", "pages"), [(1, 0), (0, 1), (0, -1)])
def test_a_record_written_for_another_place_is_refused_though_all_else_agrees(
    tmp_path: Path, segments: int, pages: int
) -> None:
    store, blocks = tmp_path / "s", branch(9)
    filled(store, blocks)
    (extent, *_) = extents(store, blocks)[1:]
    with segment_files(store)[0].open("r+b") as file:
        file.seek(extent.offset)
        header = decode_header(file.read(extent.header_pages * PAGE))
        moved = replace(header, segment=header.segment + segments, page=header.page + pages)
        file.seek(extent.offset)
        file.write(encode_header(moved))
    assert any("another place" in line for line in check_store(store).problems)
    with Rig(store) as rig:
        assert rig.landed(blocks) == rig.lookup(blocks) == 3


def test_swapped_blocks_within_a_record_are_refused(tmp_path: Path) -> None:
    store, blocks = tmp_path / "s", branch(3)
    filled(store, blocks, block_bytes=4096)
    file = segment_files(store)[0]
    data = file.read_bytes()
    file.write_bytes(data[:4096] + data[8192:12288] + data[4096:8192] + data[12288:])
    with Rig(store, block_bytes=4096) as rig:
        assert rig.landed(blocks) == 0


def test_the_same_blocks_from_an_earlier_generation_are_refused(tmp_path: Path) -> None:
    old, store, blocks = tmp_path / "old", tmp_path / "s", branch(3)
    filled(old, blocks)
    with Rig(store):
        pass  # an epoch more: the same record gets another generation
    filled(store, blocks)
    (then,), (now,) = extents(old, blocks), extents(store, blocks)
    copy_record(segment_files(old)[0], then.offset, segment_files(store)[0], now.offset, now.nbytes)
    assert any("generation" in line for line in check_store(store).problems)
    with Rig(store) as rig:
        assert rig.landed(blocks) == 0


def test_a_record_of_another_namespace_is_refused(tmp_path: Path) -> None:
    other, store, blocks = tmp_path / "other", tmp_path / "s", branch(3)
    with Rig(other) as rig:
        rig.put(blocks, namespace=b"x" * 32)
    filled(store, blocks)
    (mine,) = extents(store, blocks)
    copy_record(segment_files(other)[0], 0, segment_files(store)[0], mine.offset, mine.nbytes)
    with Rig(store) as rig:
        assert rig.landed(blocks) == 0


@pytest.mark.parametrize("keep", [0, 100, 4096, 9000])
def test_a_segment_cut_short_or_gone_is_a_miss(tmp_path: Path, keep: int) -> None:
    store, blocks = tmp_path / "s", branch(3)
    filled(store, blocks)
    with Rig(store) as rig:  # sealed by now: opening did not cut it
        file = segment_files(store)[0]
        if keep:
            os.truncate(file, keep)
        else:
            file.unlink()
        assert rig.landed(blocks) < 3
        assert rig.lookup(blocks) < 3
        assert num_landed(rig.put(blocks)) == rig.landed(blocks) == 3


def test_a_damaged_row_of_the_catalogue_is_a_miss(tmp_path: Path) -> None:
    store, blocks = tmp_path / "s", branch(3)
    filled(store, blocks)
    data = (store / "catalog" / "data.mdb").read_bytes()
    at = data.rindex(blocks.keys[1])  # somewhere in a live or an old page: every one of them
    while at >= 0:
        flip(store / "catalog" / "data.mdb", at + 34)  # past the key: the row's body
        at = data.rfind(blocks.keys[1], 0, at)
    assert not check_store(store).ok
    with Rig(store) as rig:
        assert rig.landed(blocks) < 3
        assert num_landed(rig.put(branch(3, 5))) == 3


def test_a_store_of_a_newer_format_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "s"
    with monkeypatch.context() as patch:
        patch.setattr("kvtier.tiers.nvme.catalogue.FORMAT_VERSION", 3)
        filled(store, branch(3))
    before = (store / "catalog" / "data.mdb").read_bytes()
    with pytest.raises(StoreVersion, match="store format 3, this kvtier reads format 2"):
        Rig(store)
    with pytest.raises(StoreVersion):
        check_store(store)
    assert (store / "catalog" / "data.mdb").read_bytes() == before
    assert segment_files(store) != []
