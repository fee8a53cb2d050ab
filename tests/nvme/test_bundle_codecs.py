"""Bundles of encoded blocks: smaller, the same bytes, and as hard to fool."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.tiers.errors import CodecUnknown
from kvtier.tiers.nvme.bundle_export import export_bundle
from kvtier.tiers.nvme.bundle_reader import Bundle, Record, verify_bundle
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.record import PAGE, RAW
from kvtier.tiers.nvme.settings import Geometry
from tests.nvme.bundles import ALL, Killed, KilledFiles, Tree, bring, exported, grown, held
from tests.nvme.rig import Rig, flip
from tests.prf import number_bytes

BLOCK = 45_056


@dataclass(frozen=True)
class Numbers:
    """Blocks that are numbers of that many bytes, and rigs that hold them."""

    element_bytes: int

    def fill(self, key: bytes, nbytes: int) -> npt.NDArray[np.uint8]:
        return number_bytes(key, nbytes, self.element_bytes)

    def rig(self, store: Path, block: int = BLOCK, **options: Any) -> Rig:
        return Rig(store, block_bytes=block, fill=self.fill, **options)

    def grown(self, store: Path, block: int = BLOCK, **options: Any) -> Tree:
        return grown(store, block, fill=self.fill, **options)


@pytest.fixture(params=[2, 4])
def numbers(request: pytest.FixtureRequest) -> Numbers:
    return Numbers(request.param)


def codecs_of(bundle: Path) -> set[int]:
    with Bundle(bundle) as opened:
        records = [record for record in opened.records() if isinstance(record, Record)]
    return {block.codec for record in records for block in record.header.blocks}


@pytest.mark.parametrize("block", [45_056, 90_020])
@pytest.mark.parametrize("kept_as", ["raw", "zstd"])
def test_a_bundle_of_either_codec_carries_a_store_of_either_codec(
    tmp_path: Path, numbers: Numbers, kept_as: str, block: int
) -> None:
    store, sizes = tmp_path / "a", {}
    large = Geometry(extent_bytes=3 * 92_160, group_bytes=1 << 20, segment_bytes=2 << 20)
    width = numbers.element_bytes
    tree = numbers.grown(store, block, codec=kept_as, element_bytes=width, geometry=large)
    for codec, planes in (("raw", {RAW}), ("zstd", {width})):
        bundle = tmp_path / codec
        sizes[codec] = exported(store, bundle, codec=codec).file_bytes
        assert verify_bundle(bundle).ok and codecs_of(bundle) == planes
        with numbers.rig(tmp_path / f"to {codec}", block) as rig:
            report = bring(bundle, rig)
            assert report.ok and report.imported == 21
            assert held(rig, tree) == ALL
        assert check_store(tmp_path / f"to {codec}").ok
    assert sizes["zstd"] < 0.95 * sizes["raw"]


def test_a_store_that_encodes_is_filled_by_what_blocks_take_there(
    tmp_path: Path, numbers: Numbers
) -> None:
    encoding: dict[str, Any] = {"codec": "zstd", "element_bytes": numbers.element_bytes}
    tree = numbers.grown(tmp_path / "a", **encoding)
    exported(tmp_path / "a", tmp_path / "b")
    with numbers.rig(tmp_path / "a") as rig:
        used = rig.tier.statistics().used_bytes
    capacity = used + 12 * PAGE  # and of a raw block's estimate there is one at a time
    assert capacity < 21 * 12 * PAGE
    with numbers.rig(tmp_path / "c", capacity_bytes=capacity, **encoding) as rig:
        assert bring(tmp_path / "b", rig).ok
        assert held(rig, tree) == ALL


def test_what_does_not_shrink_stays_raw(tmp_path: Path) -> None:
    grown(tmp_path / "a", BLOCK)
    exported(tmp_path / "a", tmp_path / "b", codec="zstd")
    assert codecs_of(tmp_path / "b") == {RAW}


def test_a_flipped_bit_in_encoded_bytes_is_refused(tmp_path: Path, numbers: Numbers) -> None:
    bundle = tmp_path / "b"
    numbers.grown(tmp_path / "a")
    exported(tmp_path / "a", bundle)
    with Bundle(bundle) as opened:
        record = next(opened.records())
        assert isinstance(record, Record)
    start, end = 8192, 8192 + record.header.blocks[0].stored_bytes
    with numbers.rig(tmp_path / "c") as rig:
        for offset in (*range(start, start + 32), *range(start + 32, end, 1501), end - 1):
            flip(bundle, offset, 1 << offset % 8)
            report = verify_bundle(bundle)
            assert (report.blocks, report.damaged) == (8, 13)  # the trunk and what hangs off it
            if offset % 7 == 0:
                assert bring(bundle, rig).damaged == 13
            flip(bundle, offset, 1 << offset % 8)
        assert held(rig, Tree.make()) == dict.fromkeys(ALL, 0) | {"alone": 5, "foreign": 3}
    assert verify_bundle(bundle).ok


@pytest.mark.parametrize(("first", "then"), [("zstd", "raw"), ("raw", "zstd")])
def test_an_export_that_changes_its_codec_keeps_only_what_it_may(
    tmp_path: Path, numbers: Numbers, first: str, then: str
) -> None:
    store = tmp_path / "a"
    numbers.grown(store)
    with pytest.raises(Killed):
        export_bundle(store, tmp_path / "b", codec=first, files=KilledFiles(4, 0))
    report = exported(store, tmp_path / "b", codec=then)
    assert verify_bundle(tmp_path / "b").ok
    assert report.resumed == (0 if then == "raw" else 3)
    assert codecs_of(tmp_path / "b") == ({RAW} if then == "raw" else {RAW, numbers.element_bytes})


def test_a_codec_there_is_not_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    grown(tmp_path / "a")
    with pytest.raises(CodecUnknown, match="'auto' is unknown; use one of zstd, raw"):
        export_bundle(tmp_path / "a", tmp_path / "b", codec="auto")
    assert not list(tmp_path.glob("b*"))
