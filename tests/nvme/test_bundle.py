"""What is exported from one store and imported into another is there, byte for byte."""

import fcntl
from pathlib import Path

import pytest

from kvtier.index.words import BlockKey
from kvtier.tiers.errors import BundleRefused, StoreInUse, StoreOut, StoreUnsupported
from kvtier.tiers.nvme.bundle_export import export_bundle
from kvtier.tiers.nvme.bundle_plan import Selection
from kvtier.tiers.nvme.bundle_reader import Bundle, Record, verify_bundle
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.record import PAGE
from kvtier.tiers.nvme.tier import NvmeTier
from tests.nvme.bundles import (
    ALL,
    NONE,
    OTHER,
    Killed,
    KilledFiles,
    bring,
    exported,
    grown,
    held,
    prefixes,
)
from tests.nvme.rig import NAMESPACE, Rig, branch, flip, segment_files


@pytest.mark.parametrize("block_bytes", [4096, 5000, 1])
def test_a_whole_store_goes_to_another_and_is_hit_there(tmp_path: Path, block_bytes: int) -> None:
    tree, bundle, told = grown(tmp_path / "a", block_bytes), tmp_path / "b", list[tuple[int, int]]()
    report = exported(tmp_path / "a", bundle, progress=lambda *now: told.append(now))
    assert (report.blocks, report.nbytes) == (21, 21 * block_bytes)
    assert (report.file_bytes, report.resumed) == (bundle.stat().st_size, 0)
    assert told[-1] == (21, 21) and [done for done, _ in told] == sorted(done for done, _ in told)
    assert not bundle.with_name("b.part").exists()
    told.clear()
    with Rig(tmp_path / "c", block_bytes=block_bytes) as rig:
        came = bring(bundle, rig, progress=lambda *now: told.append(now))
        assert came.ok and (came.imported, came.already_there) == (21, 0)
        assert (came.records, came.nbytes) == (report.records, report.nbytes)
        assert held(rig, tree) == ALL
        assert len(told) == came.records and told[-1][0] < told[-1][1] == report.file_bytes
    assert check_store(tmp_path / "c").ok
    with Rig(tmp_path / "c", block_bytes=block_bytes) as rig:
        assert held(rig, tree) == ALL


def test_a_bundle_tells_what_it_holds(tmp_path: Path) -> None:
    grown(tmp_path / "a")
    written = exported(tmp_path / "a", tmp_path / "b")
    report = verify_bundle(tmp_path / "b")
    assert report.ok
    assert [(each.digest, each.blocks, each.nbytes) for each in report.namespaces] == [
        (NAMESPACE, 18, 90_000),
        (OTHER, 3, 15_000),
    ]
    assert (report.records, report.blocks) == (written.records, 21)


def test_a_records_parent_is_in_the_branch_before_it(tmp_path: Path) -> None:
    grown(tmp_path / "a")
    exported(tmp_path / "a", tmp_path / "b")
    seen: set[bytes] = {bytes(32)}
    with Bundle(tmp_path / "b") as bundle:
        for number, record in enumerate(bundle.records(), start=1):
            assert isinstance(record, Record) and record.header.generation == number
            assert record.header.parent in seen
            seen |= {block.key for block in record.header.blocks}
        assert bundle.complete


def test_a_prefix_takes_its_ancestors_and_nothing_else(tmp_path: Path) -> None:
    tree, bundle = grown(tmp_path / "a"), tmp_path / "b"
    report = exported(tmp_path / "a", bundle, prefixes(tree.twig.keys[0]))
    assert report.blocks == 2 + 4 + 1
    with Rig(tmp_path / "c") as rig:
        assert bring(bundle, rig).ok
        assert held(rig, tree) == NONE | {"trunk": 2, "limb": 4, "twig": 1}
    several = prefixes(tree.trunk.keys[4], tree.twig.keys[1], tree.limb.keys[0], tree.alone.keys[1])
    report = exported(tmp_path / "a", bundle, several, force=True)
    assert report.blocks == 5 + 4 + 2 + 2
    with Rig(tmp_path / "d") as rig:
        assert bring(bundle, rig).ok
        assert held(rig, tree) == {"trunk": 5, "limb": 4, "twig": 2, "alone": 2, "foreign": 0}


def test_one_namespace_is_exported_or_imported_alone(tmp_path: Path) -> None:
    tree, bundle = grown(tmp_path / "a"), tmp_path / "b"
    assert exported(tmp_path / "a", bundle, Selection(frozenset({OTHER}))).blocks == 3
    exported(tmp_path / "a", bundle, force=True)
    with Rig(tmp_path / "c") as rig:
        report = bring(bundle, rig, namespaces=[OTHER])
        assert report.ok and (report.blocks, report.imported) == (3, 3)
        assert report.foreign == ((NAMESPACE.hex(), 18),)
        assert held(rig, tree) == NONE | {"foreign": 3}


def test_what_is_not_in_the_store_is_reported_and_the_rest_goes(tmp_path: Path) -> None:
    tree = grown(tmp_path / "a")
    nowhere = BlockKey(b"?" * 32)
    selection = Selection(
        frozenset({NAMESPACE, b"?" * 32}), (nowhere, tree.limb.keys[3]), ("gold",)
    )
    report = export_bundle(tmp_path / "a", tmp_path / "b", selection)
    assert not report.ok and report.blocks == 2 + 4
    assert report.missing == ((b"?" * 32).hex(), nowhere.hex(), "gold")
    foreign = Selection(frozenset({NAMESPACE}), (tree.foreign.keys[0],))
    report = export_bundle(tmp_path / "a", tmp_path / "c", foreign)
    assert report.missing == (tree.foreign.keys[0].hex(),) and report.blocks == 0


def test_an_export_of_nothing_leaves_no_file_and_says_what_was_asked_for(tmp_path: Path) -> None:
    tree = grown(tmp_path / "a")
    nothing = Selection(frozenset({OTHER}), (tree.limb.keys[3],), ("gold",))
    report = export_bundle(tmp_path / "a", tmp_path / "b", nothing)
    assert not report.ok and (report.records, report.file_bytes) == (0, 0)
    asked = f"namespace {OTHER.hex()}, prefix {tree.limb.keys[3].hex()}, label 'gold'"
    assert report.problems == (f"no bundle was made: no sound block matched {asked}",)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_export_of_nothing_keeps_what_a_killed_one_left(tmp_path: Path) -> None:
    grown(tmp_path / "a")
    with pytest.raises(Killed):
        export_bundle(tmp_path / "a", tmp_path / "b", files=KilledFiles(3, 0.0))
    left = (tmp_path / "b.part").read_bytes()
    export_bundle(tmp_path / "a", tmp_path / "b", prefixes(BlockKey(b"?" * 32)))
    assert (tmp_path / "b.part").read_bytes() == left
    assert exported(tmp_path / "a", tmp_path / "b").resumed > 0


def test_blocks_that_are_there_are_not_written_again(tmp_path: Path) -> None:
    tree, bundle = grown(tmp_path / "a"), tmp_path / "b"
    exported(tmp_path / "a", bundle)
    with Rig(tmp_path / "c") as rig:
        rig.put(tree.trunk.part(0, 4))
        before = rig.tier.statistics().written_bytes
        report = bring(bundle, rig)
        assert report.ok and (report.already_there, report.imported) == (4, 17)
        assert held(rig, tree) == ALL
        written = rig.tier.statistics().written_bytes
        assert written - before == report.imported * 8192 + 8 * PAGE  # one header a record
        report = bring(bundle, rig)
        assert report.ok and (report.already_there, report.imported) == (21, 0)
        assert rig.tier.statistics().written_bytes == written


def test_an_empty_store_makes_an_empty_bundle(tmp_path: Path) -> None:
    Rig(tmp_path / "a").tier.close()
    assert exported(tmp_path / "a", tmp_path / "b").file_bytes == 2 * PAGE
    with Rig(tmp_path / "c") as rig:
        report = bring(tmp_path / "b", rig)
        assert report.ok and report.blocks == 0


def test_an_existing_file_is_replaced_only_when_told_so(tmp_path: Path) -> None:
    grown(tmp_path / "a")
    bundle = tmp_path / "b"
    bundle.write_text("precious")
    with pytest.raises(
        BundleRefused, match="is there already; choose another name or give --force"
    ):
        export_bundle(tmp_path / "a", bundle)
    assert bundle.read_text() == "precious" and not (tmp_path / "b.part").exists()
    exported(tmp_path / "a", bundle, force=True)
    assert verify_bundle(bundle).ok


def test_two_exports_to_one_name_do_not_mix(tmp_path: Path) -> None:
    grown(tmp_path / "a")
    with (tmp_path / "b.part").open("wb") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        with pytest.raises(BundleRefused, match="another export writes it"):
            export_bundle(tmp_path / "a", tmp_path / "b")
    exported(tmp_path / "a", tmp_path / "b")


def test_a_store_in_use_or_not_there_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with Rig(tmp_path / "a"), pytest.raises(StoreInUse):
        export_bundle(tmp_path / "a", tmp_path / "b")
    with pytest.raises(StoreUnsupported, match="there is no store here"):
        export_bundle(tmp_path / "no", tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_export_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    grown(tmp_path / "a")
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    exported(tmp_path / "a", tmp_path / "b")
    after = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert before == after


@pytest.mark.parametrize(("offset", "kept"), [(4096, 0), (4096 + 8192, 1), (4096 + 2 * 8192, 2)])
def test_a_damaged_block_of_the_store_ends_its_branch_and_is_told(
    tmp_path: Path, offset: int, kept: int
) -> None:
    tree = grown(tmp_path / "a")
    flip(segment_files(tmp_path / "a")[0], offset)  # of the trunk's first record
    report = export_bundle(tmp_path / "a", tmp_path / "b")
    assert not report.ok and report.damaged == 3 - kept
    assert any("fails its checksum" in line for line in report.problems)
    limb = {"limb": 4, "twig": 2} if kept > 1 else {}
    with Rig(tmp_path / "c") as rig:
        assert bring(tmp_path / "b", rig).ok
        assert held(rig, tree) == NONE | {"trunk": kept, "alone": 5, "foreign": 3} | limb


def test_a_damaged_header_in_the_store_costs_its_record_and_what_hangs_off(tmp_path: Path) -> None:
    tree = grown(tmp_path / "a")
    flip(segment_files(tmp_path / "a")[0], 100)
    report = export_bundle(tmp_path / "a", tmp_path / "b")
    assert not report.ok and (report.damaged, report.blocks) == (3, 8)
    with Rig(tmp_path / "c") as rig:
        assert bring(tmp_path / "b", rig).ok
        assert held(rig, tree) == NONE | {"alone": 5, "foreign": 3}


def test_a_store_whose_keys_are_not_those_of_its_tokens_gives_nothing(tmp_path: Path) -> None:
    with Rig(tmp_path / "a") as rig:
        rig.put(branch(3), namespace=OTHER)  # keys chained in another namespace
    report = export_bundle(tmp_path / "a", tmp_path / "b")
    assert report.blocks == 0 and "not those of its tokens" in report.problems[0]


@pytest.mark.parametrize("capacity_pages", [3, 8, 9, 20, 31])
def test_a_store_too_small_takes_the_first_blocks_and_refuses_the_rest(
    tmp_path: Path, capacity_pages: int
) -> None:
    tree, bundle = grown(tmp_path / "a"), tmp_path / "b"
    exported(tmp_path / "a", bundle)
    for part in range(2):  # the second time it resumes, and nothing is pushed out for it
        with Rig(tmp_path / "c", capacity_bytes=capacity_pages * PAGE) as rig:
            report = bring(bundle, rig)
            assert not report.ok and report.damaged == 0
            there = report.imported + report.already_there
            assert 0 < there < 21 and report.refused == 21 - there
            assert sum(held(rig, tree).values()) == there
            assert held(rig, tree)["trunk"] > 0
            assert (report.imported == 0) == (part == 1)
    assert check_store(tmp_path / "c").ok


def test_what_others_have_in_the_store_goes_first(tmp_path: Path) -> None:
    tree, bundle = grown(tmp_path / "a"), tmp_path / "b"
    exported(tmp_path / "a", bundle)
    with Rig(tmp_path / "c", capacity_bytes=70 * PAGE) as rig:
        for seed in range(20, 26):
            rig.put(branch(5, seed))
        assert bring(bundle, rig).ok
        assert held(rig, tree) == ALL
    assert check_store(tmp_path / "c").ok


def test_pinned_paths_are_exported_by_their_label_and_pinned_on_import(tmp_path: Path) -> None:
    tree, bundle, everything = grown(tmp_path / "a"), tmp_path / "b", tmp_path / "all"
    with Rig(tmp_path / "a") as rig:
        rig.tier.pin(NAMESPACE, tree.trunk.keys[:5], "gold")
        rig.tier.pin(NAMESPACE, tree.twig.keys, "gold")
        rig.tier.pin(NAMESPACE, tree.alone.keys, "tin")
        rig.tier.pin(NAMESPACE, tree.alone.keys, "gold", expires_at=rig.time + 50)
        rig.tier.pin(OTHER, tree.foreign.keys, "gold")
    ours = Selection(frozenset({NAMESPACE}), labels=("gold",))
    report = exported(tmp_path / "a", bundle, ours, clock=lambda: 1e6)
    assert report.blocks == 5 + 4 + 2
    exported(tmp_path / "a", everything, Selection(labels=("gold", "tin")))
    with Rig(tmp_path / "c", capacity_bytes=60 * PAGE) as rig:
        came = bring(bundle, rig, pin_label="from a", expires_at=1e6)
        assert came.ok and came.pinned == 2
        assert {(pin.leaf, pin.label, pin.expires_at) for pin in rig.tier.pins()} == {
            (tree.trunk.keys[4], "from a", 1e6),
            (tree.twig.keys[1], "from a", 1e6),
        }
        for seed in range(20, 40):
            rig.put(branch(3, seed))
        assert held(rig, tree) == NONE | {"trunk": 5, "limb": 4, "twig": 2}
    assert check_store(tmp_path / "c").ok
    assert verify_bundle(everything).blocks == 5 + 4 + 2 + 5 + 3


def test_a_pin_beyond_the_quota_is_told_and_costs_no_block(tmp_path: Path) -> None:
    tree, bundle = grown(tmp_path / "a"), tmp_path / "b"
    exported(tmp_path / "a", bundle)
    with Rig(tmp_path / "c", pin_quota_bytes=20 * PAGE) as rig:
        report = bring(bundle, rig, pin_label="gold")
        assert not report.ok and report.imported == 21
        assert 0 < report.pinned < 4 and any("quota" in line for line in report.problems)
        assert held(rig, tree) == ALL


def test_a_drive_that_gives_out_before_the_pins_is_told_and_costs_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, bundle = grown(tmp_path / "a"), tmp_path / "b"
    exported(tmp_path / "a", bundle)

    def out(*_: object, **__: object) -> None:
        raise StoreOut("left alone")

    monkeypatch.setattr(NvmeTier, "pin", out)
    with Rig(tmp_path / "c") as rig:
        report = bring(bundle, rig, pin_label="gold")
        assert report.pinned == report.refused == 0 and "left alone" in report.problems[0]
        assert held(rig, tree) == ALL


def test_what_has_expired_stays_behind(tmp_path: Path) -> None:
    tree = grown(tmp_path / "a")
    with Rig(tmp_path / "a", clock=lambda: 5.0) as rig:
        assert rig.tier.expire(NAMESPACE, tree.trunk.keys[4:], at=100.0)
        assert rig.tier.expire(NAMESPACE, tree.limb.keys[2:], at=200.0)
    for now, blocks in ((99.0, 21), (101.0, 18), (201.0, 14)):
        report = exported(tmp_path / "a", tmp_path / f"{now}", clock=lambda now=now: now)
        assert report.blocks == blocks
    prefix = prefixes(tree.twig.keys[1])
    report = export_bundle(tmp_path / "a", tmp_path / "b", prefix, clock=lambda: 201.0)
    assert report.missing == (tree.twig.keys[1].hex(),) and report.blocks == 0


def test_what_was_evicted_again_is_refused_and_not_imported(tmp_path: Path) -> None:
    tree, bundle = grown(tmp_path / "a"), tmp_path / "b"
    exported(tmp_path / "a", bundle)
    with Rig(tmp_path / "c", capacity_bytes=70 * PAGE, pin_quota_bytes=50 * PAGE) as rig:
        for seed in range(20, 24):
            rig.put(branch(5, seed))
            rig.tier.pin(NAMESPACE, branch(5, seed).keys, "others")
        report = bring(bundle, rig)
        assert not report.ok and report.refused > 0 and report.damaged == 0
        assert sum(held(rig, tree).values()) == report.imported
        assert all(rig.landed(branch(5, seed)) == 5 for seed in range(20, 24))
    assert check_store(tmp_path / "c").ok
