"""`--repair` forgets what is damaged and keeps the rest; the check that follows finds nothing."""

import shutil
from pathlib import Path

import lmdb
import pytest

from kvtier.tiers.errors import StoreInUse, StoreUnsupported
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.repair import rebuild_store, repair_store
from kvtier.tiers.nvme.rows import Table
from kvtier.tiers.nvme.settings import Geometry
from tests.nvme.rig import NAMESPACE, Branch, Rig, branch, disk_takes, flip, segment_files

PAGE = 4096


@pytest.fixture
def trunk() -> Branch:
    return branch(9)


@pytest.fixture
def store(tmp_path: Path, trunk: Branch) -> Path:
    """Three records in a row, one that hangs off the seventh block, and one apart."""
    with Rig(tmp_path / "s") as rig:
        rig.put(trunk)
        rig.put(branch(2, 1, parent=trunk.keys[6]))
        rig.put(branch(3, 2))
        rig.tier.pin(NAMESPACE, branch(3, 2).keys, "kept")
    return tmp_path / "s"


def served(store: Path, *branches: Branch) -> list[int]:
    with Rig(store) as rig:
        used = rig.tier.statistics().used_bytes
        assert disk_takes(store, at_most=used)
        return [rig.landed(blocks) for blocks in branches]


def test_a_sound_store_is_left_as_it_is(store: Path, trunk: Branch) -> None:
    report = repair_store(store)
    assert report.after.ok and report.found == () and report.rebuilt is None
    assert (report.forgotten_blocks, report.freed_bytes, report.after.blocks) == (0, 0, 14)
    with Rig(store) as rig:
        assert [pin.label for pin in rig.tier.pins()] == ["kept"]
    assert served(store, trunk) == [9]


@pytest.mark.parametrize(("page", "left"), [(0, 3), (3, 4)])
def test_damaged_blocks_are_forgotten_with_all_that_hangs_off_them(
    store: Path, trunk: Branch, page: int, left: int
) -> None:
    flip(segment_files(store)[0], (PAGE + 3 * 2 * PAGE) + page * PAGE + 40)  # in the second record
    assert not check_store(store).ok
    report = repair_store(store)
    assert report.after.ok and len(report.found) == 1 and report.rebuilt is None
    assert report.forgotten_blocks == 9 - left + 2
    assert served(store, trunk, branch(3, 2)) == [left, 3]


@pytest.mark.parametrize("table", [Table.BLOCKS, Table.HEADS, Table.AGE, Table.SEGMENTS])
def test_tables_that_disagree_are_made_anew(store: Path, trunk: Branch, table: Table) -> None:
    environment = lmdb.open(str(store / "catalog"), max_dbs=16)
    db = environment.open_db(table.name.lower().encode(), dupsort=table is Table.HEADS)
    with environment.begin(write=True, db=db) as txn, txn.cursor() as cursor:
        assert cursor.first() and cursor.delete()
    environment.close()
    report = repair_store(store)
    assert report.after.ok and report.found
    assert report.rebuilt is not None and report.rebuilt.blocks == 14
    assert served(store, trunk, branch(3, 2)) == [9, 3]


def test_a_missing_catalogue_is_made_anew(store: Path, trunk: Branch) -> None:
    shutil.rmtree(store / "catalog")
    report = repair_store(store)
    assert report.after.ok and report.rebuilt is not None and len(report.found) == 1
    assert served(store, trunk) == [9]


def test_space_in_which_nothing_lives_is_given_back(store: Path, trunk: Branch) -> None:
    with segment_files(store)[0].open("ab") as file:
        file.write(b"x" * 100_000)
    before = sum(path.stat().st_blocks for path in segment_files(store))
    with Rig(store):  # closed files are not cut at an opening
        pass
    with segment_files(store)[0].open("ab") as file:
        file.write(b"x" * 100_000)
    assert check_store(store).leftover_bytes > 90_000
    report = repair_store(store)
    assert report.freed_bytes >= 100_000 and report.after.leftover_bytes == 0
    assert sum(path.stat().st_blocks for path in segment_files(store)) <= before
    assert served(store, trunk) == [9]


def test_a_catalogue_made_anew_on_demand_serves_the_same_without_pins(
    store: Path, trunk: Branch
) -> None:
    report = rebuild_store(store)
    assert report.after.ok and report.rebuilt is not None and report.rebuilt.blocks == 14
    assert "pins, expiry and last uses are lost" in str(report.rebuilt)
    assert served(store, trunk, branch(3, 2)) == [9, 3]
    with Rig(store) as rig:
        assert rig.tier.pins() == []


def test_a_store_in_use_or_none_is_not_mended(tmp_path: Path, store: Path) -> None:
    for mend in (repair_store, rebuild_store):
        with Rig(store), pytest.raises(StoreInUse):
            mend(store)
        with pytest.raises(StoreUnsupported, match="no store here"):
            mend(tmp_path / "none")


def test_every_block_that_a_long_repair_forgets_is_counted(tmp_path: Path) -> None:
    with Rig(tmp_path / "s", geometry=Geometry(extent_bytes=1)) as rig:
        rig.put(branch(70))
    flip(segment_files(tmp_path / "s")[0], 40)
    report = repair_store(tmp_path / "s")
    assert report.after.ok and report.after.blocks == 0
    assert report.forgotten_blocks == 70
