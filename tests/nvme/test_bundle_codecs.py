"""Bundles of encoded blocks: smaller, the same bytes, and as hard to fool."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.tiers.errors import CodecUnknown
from kvtier.tiers.nvme.bundle_export import export_bundle
from kvtier.tiers.nvme.bundle_reader import Bundle, Record, verify_bundle
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.record import RAW
from tests.nvme.bundles import ALL, Killed, KilledFiles, Tree, bring, exported, grown, held
from tests.nvme.rig import Rig, flip
from tests.prf import block_bytes


def number_bytes(key: bytes, nbytes: int, *, element_bytes: int) -> npt.NDArray[np.uint8]:
    """uint8 [nbytes]: normally distributed bf16 (2) or fp32 (4), the same for the same key."""
    seeds = block_bytes(key, 8).view(np.uint64)
    numbers = np.random.default_rng(seeds).standard_normal(nbytes // element_bytes, np.float32)
    kept = numbers.view(np.uint8).reshape(-1, 4)[:, 4 - element_bytes :]
    return np.ascontiguousarray(kept).reshape(-1)


@pytest.fixture(params=[2, 4])
def element_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Every block of the test is numbers of that size."""
    content = partial(number_bytes, element_bytes=request.param)
    monkeypatch.setattr("tests.nvme.rig.block_bytes", content)
    yield request.param


def codecs_of(bundle: Path) -> set[int]:
    with Bundle(bundle) as opened:
        records = [record for record in opened.records() if isinstance(record, Record)]
    return {block.codec for record in records for block in record.header.blocks}


@pytest.mark.parametrize("block", [45_056, 90_020])
@pytest.mark.parametrize("kept_as", ["raw", "zstd"])
def test_a_bundle_of_either_codec_carries_a_store_of_either_codec(
    tmp_path: Path, element_bytes: int, kept_as: str, block: int
) -> None:
    store, sizes = tmp_path / "a", {}
    tree = grown(store, block, codec=kept_as, element_bytes=element_bytes)
    for codec, planes in (("raw", {RAW}), ("zstd", {element_bytes})):
        bundle = tmp_path / codec
        sizes[codec] = exported(store, bundle, codec=codec).file_bytes
        assert verify_bundle(bundle).ok and codecs_of(bundle) == planes
        with Rig(tmp_path / f"to {codec}", block_bytes=block) as rig:
            report = bring(bundle, rig)
            assert report.ok and report.imported == 21
            assert held(rig, tree) == ALL
        assert check_store(tmp_path / f"to {codec}").ok
    assert sizes["zstd"] < 0.95 * sizes["raw"]


def test_what_does_not_shrink_stays_raw(tmp_path: Path) -> None:
    grown(tmp_path / "a", 45_056)
    exported(tmp_path / "a", tmp_path / "b", codec="zstd")
    assert codecs_of(tmp_path / "b") == {RAW}


def test_a_flipped_bit_in_encoded_bytes_is_refused(tmp_path: Path, element_bytes: int) -> None:
    bundle = tmp_path / "b"
    grown(tmp_path / "a", 45_056)
    exported(tmp_path / "a", bundle)
    with Bundle(bundle) as opened:
        record = next(opened.records())
        assert isinstance(record, Record)
    start, end = 8192, 8192 + record.header.blocks[0].stored_bytes
    with Rig(tmp_path / "c", block_bytes=45_056) as rig:
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
    tmp_path: Path, element_bytes: int, first: str, then: str
) -> None:
    store = tmp_path / "a"
    grown(store, 45_056)
    with pytest.raises(Killed):
        export_bundle(store, tmp_path / "b", codec=first, files=KilledFiles(4, 0))
    report = exported(store, tmp_path / "b", codec=then)
    assert verify_bundle(tmp_path / "b").ok
    assert report.resumed == (0 if then == "raw" else 3)
    assert codecs_of(tmp_path / "b") == ({RAW} if then == "raw" else {RAW, element_bytes})


def test_a_codec_there_is_not_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    grown(tmp_path / "a")
    with pytest.raises(CodecUnknown, match="'auto' is unknown; use one of zstd, raw"):
        export_bundle(tmp_path / "a", tmp_path / "b", codec="auto")
    assert not list(tmp_path.glob("b*"))
