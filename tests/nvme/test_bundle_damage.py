"""Damaged, cut short and hostile bundles: never a wrong byte, never a large allocation."""

import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvtier.index.words import ROOT_KEY, BlockKey, block_keys
from kvtier.tiers.errors import BundleRefused, RecordRefused, StoreVersion
from kvtier.tiers.nvme.bundle import (
    MAX_BLOCK_BYTES,
    MAX_HEADER_BYTES,
    Contents,
    encode_footer,
    encode_head,
)
from kvtier.tiers.nvme.bundle_reader import Bundle, Record, Trail, verify_bundle
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.record import PAGE, RecordHeader, StoredBlock, encode_header
from tests.nvme.bundles import ALL, OTHER, Tree, bring, exported, grown, held
from tests.nvme.rig import NAMESPACE, Rig
from tests.prf import block_bytes

# The records of the tree, three blocks of 5000 bytes at most, and where they begin: head 0,
# trunk 1 8 15, limb and twig off its first record, and so on. Depth first.
FIRST = PAGE
"""Of the trunk's first record: header, then blocks at 2, 4 and 6 pages."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A bundle of the tree."""
    place = tmp_path_factory.mktemp("bundles")
    grown(place / "a")
    exported(place / "a", place / "b")
    return (place / "b").read_bytes()


def flipped(content: bytes, offset: int, mask: int = 1) -> bytes:
    body = bytearray(content)
    body[offset] ^= mask
    return bytes(body)


def sound_blocks(path: Path) -> int:
    """How many blocks a reader hands out; each is what was written, or this fails."""
    count = 0
    with Bundle(path) as bundle:
        for record in bundle.records():
            if not isinstance(record, Record):
                continue
            out = np.empty(record.header.block_bytes, np.uint8)
            for position, block in enumerate(record.header.blocks):
                try:
                    bundle.read_block(record, position, out)
                except RecordRefused:
                    continue
                assert np.array_equal(out, block_bytes(block.key, 5000)), "wrong bytes"
                count += 1
    return count


def is_padding(offset: int, whole: bytes) -> bool:
    """Whether this byte stands behind a block's 5000 bytes in its second page."""
    page = whole[offset // PAGE * PAGE :][:PAGE]
    return offset % PAGE >= 904 and not any(page[904:]) and page[:8] != whole[FIRST:][:8]


@given(st.data())
def test_a_flipped_bit_anywhere_is_seen_and_never_handed_out(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("flip") / "b"
    offset = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(flipped(whole, offset, 1 << data.draw(st.integers(0, 7))))
    try:
        report = verify_bundle(path)
    except (BundleRefused, StoreVersion):
        assert offset < PAGE
        return
    assert report.ok == is_padding(offset, whole)
    assert (sound_blocks(path) < 21) == (not report.ok and offset < len(whole) - PAGE)


def test_a_flipped_bit_in_any_byte_of_a_records_header_costs_the_record(
    tmp_path: Path, whole: bytes
) -> None:
    path = tmp_path / "b"
    for offset in (*range(320), *range(320, PAGE, 61)):  # what follows 308 is zeros
        path.write_bytes(flipped(whole, FIRST + offset, 1 << offset % 8))
        report = verify_bundle(path)
        assert not report.complete and report.blocks == 8 and report.damaged == 10


@pytest.mark.parametrize(
    ("offset", "there"),
    [
        (FIRST, {"trunk": 0, "limb": 0, "twig": 0}),
        (FIRST + 8, {"trunk": 0, "limb": 0, "twig": 0}),
        (FIRST + 12, {"trunk": 0, "limb": 0, "twig": 0}),
        (FIRST + 64, {"trunk": 0, "limb": 0, "twig": 0}),
        (FIRST + 108, {"trunk": 0, "limb": 0, "twig": 0}),
        (FIRST + 300, {"trunk": 0, "limb": 0, "twig": 0}),
        (FIRST + 1 * PAGE, {"trunk": 0, "limb": 0, "twig": 0}),
        (FIRST + 3 * PAGE + 4999, {"trunk": 1, "limb": 0, "twig": 0}),
        (FIRST + 5 * PAGE, {"trunk": 2}),
        (FIRST + 2 * PAGE + 904, {}),
    ],
)
def test_damage_costs_what_it_hit_and_what_hangs_off_it(
    tmp_path: Path, whole: bytes, offset: int, there: dict[str, int]
) -> None:
    path = tmp_path / "b"
    path.write_bytes(flipped(whole, offset))
    with Rig(tmp_path / "c") as rig:
        report = bring(path, rig)
        assert held(rig, Tree.make()) == ALL | there
        assert report.ok == (not there) and report.refused == 0
        path.write_bytes(whole)
        again = bring(path, rig)  # a sound copy fills the gaps
        assert again.ok and again.already_there == report.imported
        assert held(rig, Tree.make()) == ALL
    assert check_store(tmp_path / "c").ok


def test_a_lost_header_costs_its_branch_and_not_the_one_it_left(
    tmp_path: Path, whole: bytes
) -> None:
    path = tmp_path / "b"
    path.write_bytes(flipped(whole, 8 * PAGE + 200))  # the limb's first record
    report = verify_bundle(path)
    assert (report.blocks, report.damaged) == (15, 1 + 2)  # what hangs off: of limb and twig
    with Rig(tmp_path / "c") as rig:
        assert bring(path, rig).damaged == 3
        assert held(rig, Tree.make()) == ALL | {"limb": 0, "twig": 0}


def test_a_bundle_without_its_footer_is_imported_and_said_to_be_incomplete(
    tmp_path: Path, whole: bytes
) -> None:
    for offset in (-PAGE, -PAGE + 40, -1):
        path = tmp_path / "b"
        path.write_bytes(flipped(whole, len(whole) + offset))
        with Rig(tmp_path / f"c{offset}") as rig:
            report = bring(path, rig)
            assert not report.complete and not report.ok and report.imported == 21
            assert held(rig, Tree.make()) == ALL


def test_a_bundle_cut_at_any_page_gives_what_it_has(tmp_path: Path, whole: bytes) -> None:
    path, tree, before = tmp_path / "b", Tree.make(), 0
    with Rig(tmp_path / "c") as rig:
        for page in range(1, len(whole) // PAGE):
            path.write_bytes(whole[: page * PAGE])
            report = bring(path, rig)
            assert not report.complete and "not complete" in report.problems[-1]
            assert report.refused == 0 and report.already_there == before
            before += report.imported
            assert report.blocks == before + report.damaged
            assert verify_bundle(path).blocks == sum(held(rig, tree).values()) == before
    assert before == 21


@pytest.mark.parametrize("extra", [1, 100, PAGE, 3 * PAGE])
def test_what_stands_behind_the_footer_is_told(tmp_path: Path, whole: bytes, extra: int) -> None:
    (tmp_path / "b").write_bytes(whole + b"\1" * extra)
    report = verify_bundle(tmp_path / "b")
    assert not report.complete and report.blocks == 21


def test_a_record_left_out_is_missed(tmp_path: Path, whole: bytes) -> None:
    page = (len(whole) // PAGE) - 8  # the last record: header and three blocks of two pages
    assert whole[page * PAGE :][:8] == whole[FIRST:][:8]
    with Rig(tmp_path / "c") as rig:
        (tmp_path / "b").write_bytes(whole[: page * PAGE] + whole[-PAGE:])
        assert not bring(tmp_path / "b", rig).complete
        footer = encode_footer(contents_of(tmp_path / "b", whole).footer(), page)
        (tmp_path / "b").write_bytes(whole[: page * PAGE] + footer)
        report = bring(tmp_path / "b", rig)
        assert not report.complete and report.damaged == 0
        assert held(rig, Tree.make()) == ALL | {"foreign": 0}


def contents_of(path: Path, content: bytes) -> Contents:
    """What the whole bundle holds."""
    path.write_bytes(content)
    contents = Contents()
    with Bundle(path) as bundle:
        for record in bundle.records():
            assert isinstance(record, Record)
            contents.add(record.header, record.raw)
    return contents


def test_a_record_that_stands_elsewhere_is_refused(tmp_path: Path, whole: bytes) -> None:
    first, second = whole[PAGE : 8 * PAGE], whole[8 * PAGE : 15 * PAGE]
    assert first[:8] == second[:8]
    (tmp_path / "b").write_bytes(whole[:PAGE] + second + first + whole[15 * PAGE :])
    with Rig(tmp_path / "c") as rig:
        report = bring(tmp_path / "b", rig)
        assert not report.ok and held(rig, Tree.make())["trunk"] == 0


def crafted(path: Path, headers: Sequence[RecordHeader], payload: bytes = b"") -> Path:
    """A bundle of any headers, each checksummed and at its place; the payload behind each."""
    contents, body = Contents(), bytearray(encode_head())
    for header in headers:
        raw = encode_header(replace(header, page=len(body) // PAGE))
        contents.add(header, raw)
        body += raw + payload
    path.write_bytes(body + encode_footer(contents.footer(), len(body) // PAGE))
    return path


def header_of(
    tokens: Sequence[int], size: int, *, parent: BlockKey = ROOT_KEY, content: bytes = b""
) -> RecordHeader:
    """A record of one block."""
    ids = np.array(tokens, np.int32)
    (key,) = block_keys(NAMESPACE, parent, ids, len(tokens))
    block = StoredBlock(key, xxh3_64_intdigest(content), size)
    return RecordHeader(1, 0, 0, NAMESPACE, parent, size, ids.tobytes(), (block,))


def cheaply(action: Callable[[], object]) -> None:
    """Run it; it must not take much memory."""
    tracemalloc.start()
    try:
        action()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("size", [MAX_BLOCK_BYTES, MAX_BLOCK_BYTES + 1, 2**32 - 1, 0])
def test_a_block_larger_than_the_file_is_refused_without_room_being_made_for_it(
    tmp_path: Path, size: int
) -> None:
    path = crafted(tmp_path / "b", [header_of([1, 2], size)])

    def look() -> None:
        report = verify_bundle(path)
        assert not report.ok and report.blocks == 0

    cheaply(look)
    for capacity in (1 << 20, 1 << 40):
        with Rig(tmp_path / "c", capacity_bytes=capacity) as rig:
            cheaply(lambda rig=rig: bring(path, rig))  # type: ignore[misc]
            assert rig.tier.statistics().blocks == 0


@pytest.mark.parametrize("length", [0, 1, 4095, MAX_HEADER_BYTES + PAGE, 2**32 - PAGE])
def test_a_header_of_impossible_length_is_refused(tmp_path: Path, length: int) -> None:
    body = bytearray(crafted(tmp_path / "b", [header_of([1, 2], 10)]).read_bytes())
    body[FIRST + 12 : FIRST + 16] = length.to_bytes(4, "little")
    (tmp_path / "b").write_bytes(body)
    cheaply(lambda: verify_bundle(tmp_path / "b"))
    report = verify_bundle(tmp_path / "b")
    assert report.records == 0 and not report.complete


def test_records_that_name_each_other_as_parents_are_refused(tmp_path: Path) -> None:
    first = header_of([1, 2], 10)
    second = header_of([3, 4], 10, parent=first.blocks[0].key)
    loop = replace(first, parent=second.blocks[0].key)
    themselves = replace(first, parent=first.blocks[0].key)
    path = crafted(tmp_path / "b", [loop, second, themselves, loop], bytes(PAGE))
    with Rig(tmp_path / "c") as rig:
        report = bring(path, rig)
        assert (report.records, report.damaged, report.imported) == (1, 1, 0)
        assert "not those of its tokens" in report.problems[0]


def test_a_key_that_is_not_of_its_namespace_is_refused(tmp_path: Path) -> None:
    moved = replace(header_of([1, 2], 10), namespace=OTHER)
    report = verify_bundle(crafted(tmp_path / "b", [moved], bytes(PAGE)))
    assert report.records == 0 and "not those of its tokens" in report.problems[0]


def test_blocks_without_tokens_are_refused(tmp_path: Path) -> None:
    empty = replace(header_of([1], 10), tokens=b"")
    report = verify_bundle(crafted(tmp_path / "b", [empty], bytes(PAGE)))
    assert report.records == 0 and not report.ok


def test_a_branch_of_any_depth_is_walked_without_recursion(tmp_path: Path) -> None:
    headers, parent = [], ROOT_KEY
    content = b"\7" * 10
    for number in range(1500):
        headers.append(header_of([number, 5], 10, parent=parent, content=content))
        parent = headers[-1].blocks[0].key
    path = crafted(tmp_path / "b", headers, content.ljust(PAGE, b"\0"))
    assert verify_bundle(path).ok
    trail = Trail()
    for header in headers:
        assert (step := trail.enter(header)).hangs and step.rooted
        step.kept = 1
    with Rig(tmp_path / "c", capacity_bytes=32 << 20) as rig:
        report = bring(path, rig)
        assert report.ok and report.imported == 1500


def test_blocks_that_come_twice_are_imported_once(tmp_path: Path) -> None:
    content = b"\7" * 10
    root = header_of([1, 2], 10, content=content)
    path = crafted(tmp_path / "b", [root, root, root], content.ljust(PAGE, b"\0"))
    with Rig(tmp_path / "c", block_bytes=10) as rig:
        assert import_counts(path, rig) == 3
        assert rig.tier.statistics().blocks == 1


def import_counts(path: Path, rig: Rig) -> int:
    """Blocks that landed or were there."""
    report = bring(path, rig)
    return report.imported + report.already_there


def test_an_orphan_whose_parent_the_store_has_is_imported(tmp_path: Path, whole: bytes) -> None:
    path, tree = tmp_path / "b", Tree.make()
    path.write_bytes(flipped(whole, FIRST + 200))
    with Rig(tmp_path / "c") as rig:
        rig.put(tree.trunk.part(0, 3))
        report = bring(path, rig)
        assert not report.ok and report.damaged == 0 and report.imported == 18
        assert held(rig, tree) == ALL
