"""Damaged, swapped, stale and foreign bytes are misses: never served, then forgotten."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.tiers.errors import StoreVersion
from kvtier.tiers.nvme.catalogue import Catalogue
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.record import (
    PAGE,
    RAW,
    RecordHeader,
    decode_header,
    encode_header,
    padded,
)
from kvtier.tiers.nvme.rows import Extent
from tests.nvme.rig import NAMESPACE, Branch, Rig, branch, flip, num_landed, segment_files
from tests.prf import number_bytes


def extents(store: Path, blocks: Branch) -> list[Extent]:
    """The records that hold a branch, first to last."""
    catalogue = Catalogue.open(store / "catalog", read_only=True)
    try:
        spans = catalogue.find(NAMESPACE, blocks.keys, now=0)
    finally:
        catalogue.close()
    return [span.extent for span in spans]


def filled(store: Path, *branches: Branch, **options: Any) -> None:
    with Rig(store, **options) as rig:
        for blocks in branches:
            assert num_landed(rig.put(blocks)) == len(blocks.keys)


@pytest.fixture(params=["raw", "zstd"])
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How the blocks of a store stand, as `Rig` is told it. Three of 5000 bytes in a record."""
    numbers = {"codec": "zstd", "element_bytes": 2, "fill": number_bytes}
    return numbers if request.param == "zstd" else {}


def header_of(store: Path, extent: Extent) -> RecordHeader:
    """The header of a record, as it stands in the segment."""
    with (store / "segments" / f"{extent.segment:016x}.seg").open("rb") as file:
        file.seek(extent.offset)
        return decode_header(file.read(extent.header_pages * PAGE))


@pytest.mark.parametrize(
    ("block", "part", "mask"),
    [(0, 0.0, 1), (0, 1.0, 128), (1, 0.003, 128), (1, 0.5, 16), (2, 0.0, 128), (2, 1.0, 1)],
)
def test_a_flipped_payload_bit_costs_its_block_and_what_is_behind(
    tmp_path: Path, kind: dict[str, Any], block: int, part: float, mask: int
) -> None:
    store, blocks, other = tmp_path / "s", branch(9), branch(4, 1)
    limb = branch(2, 2, parent=blocks.keys[7])
    filled(store, blocks, other, limb, **kind)
    target = extents(store, blocks)[1]
    header = header_of(store, target)
    row = header.blocks[block]
    assert (row.codec == RAW) is (row.stored_bytes == 5000) is (not kind)
    place = target.offset + header.offsets[block] + int(part * (row.stored_bytes - 1))
    flip(segment_files(store)[0], place, mask)
    report = check_store(store)
    assert (
        [line for line in report.problems if "fails its checksum" in line]
        == [*report.problems]
        != []
    )
    with Rig(store, **kind) as rig:
        assert rig.landed(blocks) == 3 + block
        assert rig.lookup(blocks) == 3 + block
        assert rig.lookup(limb) == 0
        assert rig.tier.statistics().quarantined == 6 - block + 2
        assert rig.landed(other) == 4
        assert num_landed(rig.put(blocks)) == rig.landed(blocks) == 9  # recompute refills it
    assert check_store(store).ok


def test_a_flipped_bit_in_padding_harms_nobody(tmp_path: Path, kind: dict[str, Any]) -> None:
    store, blocks = tmp_path / "s", branch(3)
    filled(store, blocks, **kind)
    header = header_of(store, extents(store, blocks)[0])
    for row, offset in zip(header.blocks, header.offsets, strict=True):
        flip(segment_files(store)[0], offset + row.stored_bytes)
    assert check_store(store).ok
    with Rig(store, **kind) as rig:
        assert rig.landed(blocks) == 3


@pytest.mark.parametrize(
    "offset", [0, 8, 12, 16, 24, 33, 64, 96, 100, 104, 108, 112, 120, 128, 160, 172, 300, 4095]
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


def first_block(header: RecordHeader, **changes: Any) -> RecordHeader:
    """The header with something else about its first block."""
    return replace(header, blocks=(replace(header.blocks[0], **changes), *header.blocks[1:]))


ALTERATIONS: dict[str, Callable[[RecordHeader], RecordHeader]] = {
    "generation": lambda h: replace(h, generation=h.generation ^ 1),
    "segment": lambda h: replace(h, segment=h.segment + 1),
    "page behind": lambda h: replace(h, page=h.page + 1),
    "page before": lambda h: replace(h, page=h.page - 1),
    "namespace": lambda h: replace(h, namespace=b"x" * 32),
    "parent": lambda h: replace(h, parent=h.blocks[0].key),
    "block bytes": lambda h: replace(
        h, block_bytes=5002, blocks=tuple(replace(b, stored_bytes=5002) for b in h.blocks)
    ),
    "tokens": lambda h: replace(h, tokens=bytes(len(h.tokens))),
    "fewer tokens": lambda h: replace(h, tokens=h.tokens[:12]),
    "fewer blocks": lambda h: replace(h, blocks=h.blocks[:2], tokens=h.tokens[:24]),
    "key": lambda h: first_block(h, key=h.blocks[1].key),
    "checksum": lambda h: first_block(h, checksum=h.blocks[0].checksum ^ 1),
    "stored bytes": lambda h: first_block(h, stored_bytes=h.blocks[0].stored_bytes - 1),
    "pages": lambda h: first_block(h, stored_bytes=40),
    "raw or not": lambda h: first_block(
        h, codec=0 if h.blocks[0].codec else 2, stored_bytes=5000 if h.blocks[0].codec else 3000
    ),
    "planes": lambda h: first_block(h, codec=4),
    "codec": lambda h: first_block(h, codec=77),
}


@pytest.mark.parametrize("field", ALTERATIONS)
def test_a_header_that_says_something_else_under_a_good_checksum_is_refused(
    tmp_path: Path, kind: dict[str, Any], field: str
) -> None:
    store, blocks = tmp_path / "s", branch(9)
    filled(store, blocks, **kind)
    extent = extents(store, blocks)[1]
    header = header_of(store, extent)
    with segment_files(store)[0].open("r+b") as file:
        file.seek(extent.offset)
        file.write(encode_header(ALTERATIONS[field](header)))
    assert not check_store(store).ok
    with Rig(store, **kind) as rig:
        assert rig.landed(blocks) == 3


def copy_record(source: Path, start: int, target: Path, at: int, nbytes: int) -> None:
    with source.open("rb") as file:
        file.seek(start)
        data = file.read(nbytes)
    with target.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_a_record_that_stands_in_anothers_place_is_refused(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    store, one, two = tmp_path / "s", branch(3), branch(3, 1)
    filled(store, one, two, **kind)
    (mine,), (yours,) = extents(store, one), extents(store, two)
    file = segment_files(store)[0]
    copy_record(file, yours.offset, file, mine.offset, mine.nbytes)
    with Rig(store, **kind) as rig:
        assert rig.landed(one) == rig.lookup(one) == 0
        assert rig.landed(two) == 3


def test_swapped_blocks_within_a_record_are_refused(tmp_path: Path, kind: dict[str, Any]) -> None:
    store, blocks = tmp_path / "s", branch(3)
    filled(store, blocks, **kind)
    file = segment_files(store)[0]
    data = file.read_bytes()
    first, second, third = header_of(store, extents(store, blocks)[0]).offsets
    swapped = data[:first] + data[second:third] + data[first:second] + data[third:]
    file.write_bytes(swapped)
    with Rig(store, **kind) as rig:
        assert rig.landed(blocks) == 0


def test_the_same_blocks_from_an_earlier_generation_are_refused(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    old, store, blocks = tmp_path / "old", tmp_path / "s", branch(3)
    filled(old, blocks, **kind)
    with Rig(store):
        pass  # an epoch more: the same record gets another generation
    filled(store, blocks, **kind)
    (then,), (now,) = extents(old, blocks), extents(store, blocks)
    copy_record(segment_files(old)[0], then.offset, segment_files(store)[0], now.offset, now.nbytes)
    assert any("generation" in line for line in check_store(store).problems)
    with Rig(store, **kind) as rig:
        assert rig.landed(blocks) == 0


def test_a_record_of_another_namespace_is_refused(tmp_path: Path, kind: dict[str, Any]) -> None:
    other, store, blocks = tmp_path / "other", tmp_path / "s", branch(3)
    with Rig(other, **kind) as rig:
        rig.put(blocks, namespace=b"x" * 32)
    filled(store, blocks, **kind)
    (mine,) = extents(store, blocks)
    copy_record(segment_files(other)[0], 0, segment_files(store)[0], mine.offset, mine.nbytes)
    with Rig(store, **kind) as rig:
        assert rig.landed(blocks) == 0


def test_the_zeros_of_a_trimmed_block_are_never_served(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    store, blocks = tmp_path / "s", branch(3)
    filled(store, blocks, **kind)
    header = header_of(store, extents(store, blocks)[0])
    with segment_files(store)[0].open("r+b") as file:
        file.seek(header.offsets[2])
        file.write(bytes(padded(header.blocks[2].stored_bytes)))
    with Rig(store, **kind) as rig:
        assert rig.landed(blocks) == rig.lookup(blocks) == 2


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


def test_a_read_only_tier_that_meets_damage_stays_well(tmp_path: Path) -> None:
    store, damaged, good = tmp_path / "s", branch(3), branch(3, 1)
    filled(store, damaged, good)
    (extent,) = extents(store, damaged)
    flip(segment_files(store)[0], extent.starts[1] + 7)
    with Rig(store, read_only=True) as rig:
        for _ in range(3):
            assert rig.landed(damaged) == 1
        assert rig.landed(good) == 3
        stats = rig.tier.statistics()
        assert stats.state == "ok" and not any(stats.errors.values())
