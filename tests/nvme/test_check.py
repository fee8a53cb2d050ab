"""`check_store` sees what is wrong, in either direction, and tells it from what a crash leaves."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.rows import (
    Counters,
    Due,
    SegmentRow,
    Table,
    block_row_key,
    due_key,
    encode_block,
    hold_key,
    number_key,
    pair_key,
    seal,
    unseal,
)
from tests.nvme.rig import NAMESPACE, Rig, branch, segment_files

USED = 5 * 4096 + 11 * 8192
PINNED = 2 * 4096 + 5 * 8192


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two branches, one hanging off the other's second block."""
    trunk = branch(7)
    with Rig(tmp_path / "s") as rig:
        rig.put(trunk)
        rig.put(branch(4, 1, parent=trunk.keys[1]))
        rig.tier.pin(NAMESPACE, trunk.keys[:5], "pin", expires_at=1e9)
        rig.tier.expire(NAMESPACE, trunk.keys[6:], at=2e9)
    return tmp_path / "s"


def tamper(store: Path, table: Table, change: Callable[[Any], None]) -> None:
    """Change a table behind the catalogue's back."""
    environment = lmdb.open(str(store / "catalog"), max_dbs=16)
    try:
        db = environment.open_db(table.name.lower().encode(), dupsort=table is Table.HEADS)
        with environment.begin(write=True, db=db) as txn:
            change(txn)
    finally:
        environment.close()


def drop_first(txn: Any) -> None:
    with txn.cursor() as cursor:
        assert cursor.first() and cursor.delete()


def test_a_sound_store_is_reported_with_its_size_and_progress(store: Path) -> None:
    told: list[tuple[int, int]] = []
    report = check_store(store, progress=lambda done, total: told.append((done, total)))
    assert report.ok and report.leftover_bytes == 0
    assert (report.records, report.blocks) == (5, 11)
    assert report.bytes == USED
    assert told == [(n, 5) for n in range(1, 6)]


@pytest.mark.parametrize(
    "table",
    [
        Table.BLOCKS,
        Table.EXTENTS,
        Table.HEADS,
        Table.AGE,
        Table.SEGMENTS,
        Table.NAMESPACES,
        Table.USES,
        Table.PINS,
        Table.HOLDS,
        Table.DUE,
    ],
)
def test_a_missing_row_of_any_table_is_a_problem(store: Path, table: Table) -> None:
    tamper(store, table, drop_first)
    assert not check_store(store).ok


def put_row(table: Table, key: bytes, body: bytes) -> Callable[[Any], None]:
    return lambda txn: txn.put(key, seal(table, key, body))


@pytest.mark.parametrize(
    ("table", "key", "body"),
    [
        (Table.BLOCKS, block_row_key(1, b"k" * 32), encode_block(77, 0)),
        (Table.HEADS, block_row_key(1, b"k" * 32), number_key(77)),
        (Table.AGE, pair_key(5, 77), b""),
        (Table.META, b"counters", Counters(0, 0, 0, PINNED, 1, 1).encode()),
        (Table.META, b"counters", Counters(USED, 11, 5, 0, 1, 1).encode()),
        (Table.HOLDS, hold_key(77, 1, 1), b""),
        (Table.DUE, due_key(5, Due.EXTENT, 77), b""),
    ],
)
def test_a_row_too_many_or_a_false_one_is_a_problem(
    store: Path, table: Table, key: bytes, body: bytes
) -> None:
    tamper(store, table, put_row(table, key, body))
    assert len(check_store(store).problems) == 1


def test_a_segment_that_is_gone_is_a_problem(store: Path) -> None:
    gone = segment_files(store)[0]
    gone.unlink()
    problems = check_store(store).problems
    assert len(problems) == 1 and gone.stem.lstrip("0") in problems[0]


def test_what_a_crash_leaves_is_left_over_and_not_a_problem(store: Path) -> None:
    (store / "segments" / f"{7:016x}.seg").write_bytes(bytes(range(256)) * 1024)
    with segment_files(store)[-1].open("ab") as tail:
        tail.write(b"unpublished" * 20_000)
    tamper(store, Table.FREES, put_row(Table.FREES, pair_key(99, 0), number_key(4096)))
    segment = int(segment_files(store)[-1].stem, 16)
    row = SegmentRow(sealed=False, end=5 * 4096 + 11 * 8192, live_bytes=5 * 4096 + 11 * 8192)
    key = number_key(segment)
    tamper(store, Table.SEGMENTS, put_row(Table.SEGMENTS, key, row.encode()))
    report = check_store(store)
    assert report.ok, report.problems
    assert report.leftover_bytes >= (256 << 10) + 200_000
    with Rig(store) as rig:
        assert rig.landed(branch(7)) == 7
    report = check_store(store)
    assert report.ok and report.leftover_bytes == 0


def test_a_check_reads_a_few_rows_a_record_however_many_hang_off_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(tmp_path / "s") as rig:
        root = branch(1)
        rig.put(root)
        for seed in range(1, 81):
            rig.put(branch(1, seed, parent=root.keys[0]))
    plain, read = unseal, Counter[Table]()

    def counting(table: Table, key: bytes, value: bytes) -> bytes:
        read[table] += 1
        return plain(table, key, value)

    monkeypatch.setattr("kvtier.tiers.nvme.tables.unseal", counting)
    assert check_store(tmp_path / "s").ok
    assert read.total() < 20 * 81
