"""A damaged LMDB file is found before LMDB opens it: no crash, no wrong byte, no exception."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import lmdb
import pytest

from kvtier.tiers.errors import StoreCorrupt
from kvtier.tiers.nvme.pages import audit_pages
from tests.nvme import damage_child
from tests.nvme.damage_child import PAGE, in_use

MEMORY = Path("/dev/shm")
TABLES = {b"plain": False, b"sorted": True}


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """A small store, in memory where there is such a place: nothing here is about durability."""
    with TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as place:
        damage_child.build(Path(place) / "base")
        yield Path(place)


def survive(base: Path, first: int, count: int) -> tuple[int, int]:
    """Damage the store in so many ways, in a process of its own.

    Returns how often the catalogue was rebuilt, and how many blocks were served in all.
    """
    root = Path(damage_child.__file__).parents[2]
    command = [sys.executable, "-m", "tests.nvme.damage_child", str(base / "base"), str(base)]
    command += [str(first), str(count)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=600)
    assert run.returncode == 0, (run.returncode, run.stdout.splitlines()[-1:], run.stderr[-3000:])
    lines = [line.split() for line in run.stdout.splitlines()]
    assert len(lines) == count
    return sum(int(line[3]) for line in lines), sum(int(line[2]) for line in lines)


def test_no_damage_to_the_catalogue_kills_the_process_or_serves_wrong_bytes(base: Path) -> None:
    rebuilt, served = survive(base, 0, 80)
    assert 40 < rebuilt <= 80
    assert served > 80 * 60


@pytest.mark.stress
@pytest.mark.timeout(0)
@pytest.mark.parametrize("batch", range(30))
def test_thousands_of_damages_kill_nothing(base: Path, batch: int) -> None:
    assert survive(base, 1000 + 200 * batch, 200)[1] > 0


def workload(path: Path, seed: int, steps: int) -> None:
    """A random LMDB file: long values, duplicates of all amounts, deletions, free pages."""
    chance = random.Random(seed)
    env = lmdb.open(str(path), map_size=1 << 28, max_dbs=4, sync=False)
    tables = [env.open_db(name, dupsort=dup) for name, dup in TABLES.items()]
    rows: list[tuple[int, bytes, bytes]] = []
    for _ in range(steps):
        with env.begin(write=True) as txn:
            for _ in range(chance.randrange(1, 150)):
                if rows and chance.random() < 0.3:
                    which, key, value = rows.pop(chance.randrange(len(rows)))
                    txn.delete(key, value, db=tables[which])
                    continue
                which = chance.randrange(2)
                if which == 0:
                    size = chance.choice((0, 9, 18, 18, 18, 220, 1500, 2500, 9001))
                    row = (0, chance.randbytes(chance.choice((8, 17, 36))), chance.randbytes(size))
                else:
                    parent = chance.choice((b"x" * 36, b"y" * 36, chance.randbytes(36)))
                    row = (1, parent, chance.randbytes(16))
                rows.append(row)
                txn.put(row[1], row[2], db=tables[which])
    env.close()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_lmdb_writes_passes(tmp_path: Path, seed: int) -> None:
    for steps in (0, 1, 7, 30):
        workload(tmp_path, seed, steps)
        audit_pages(tmp_path / "data.mdb", TABLES, map_bytes=1 << 30)


def test_every_flipped_bit_in_a_header_of_a_wanted_page_is_found(tmp_path: Path) -> None:
    workload(tmp_path, 3, 12)
    path = tmp_path / "data.mdb"
    wanted, data = in_use(path, TABLES), path.read_bytes()
    assert len(wanted) > 10
    # The padding word is never read, nor is the older meta page's content.
    bits = [bit for bit in range(8 * 16) if not 64 <= bit < 80]
    for page in wanted[2:]:
        for bit in bits[page % 16 :: 16]:
            spoilt = bytearray(data)
            spoilt[page * PAGE + bit // 8] ^= 1 << bit % 8
            path.write_bytes(spoilt)
            with pytest.raises(StoreCorrupt):
                audit_pages(path, TABLES, map_bytes=1 << 30)


@pytest.mark.parametrize("keep", [0, 1, 100, PAGE, PAGE + 50, 3 * PAGE, -PAGE, -1])
def test_a_file_cut_short_is_found(tmp_path: Path, keep: int) -> None:
    workload(tmp_path, 5, 10)
    path = tmp_path / "data.mdb"
    end = (
        max(in_use(path, TABLES)) * PAGE + PAGE
    )  # behind it stand free pages, which may be missing
    os.truncate(path, end)
    os.truncate(path, keep if keep >= 0 else end + keep)
    with pytest.raises(StoreCorrupt):
        audit_pages(path, TABLES, map_bytes=1 << 30)


def test_a_table_that_changed_its_kind_is_found(tmp_path: Path) -> None:
    workload(tmp_path, 1, 5)
    for tables in ({b"plain": True}, {b"sorted": False}):
        with pytest.raises(StoreCorrupt, match="table"):
            audit_pages(tmp_path / "data.mdb", tables, map_bytes=1 << 30)


def test_a_file_that_wants_more_room_than_the_map_has_is_refused(tmp_path: Path) -> None:
    workload(tmp_path, 1, 5)
    with pytest.raises(StoreCorrupt, match="is the last"):
        audit_pages(tmp_path / "data.mdb", TABLES, map_bytes=8 * PAGE)
