"""A lost catalogue is made anew from the segments: the same blocks, exact usage, nothing wrong."""

import logging
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.index.words import ROOT_KEY
from kvtier.tiers.errors import StoreCorrupt, StoreVersion
from kvtier.tiers.nvme.catalogue import Catalogue
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.record import PAGE, RecordHeader, StoredBlock, decode_header, encode_header
from kvtier.tiers.nvme.rows import Extent, Table, key_number
from tests.nvme.rig import (
    NAMESPACE,
    Branch,
    Rig,
    branch,
    disk_takes,
    flip,
    num_landed,
    segment_files,
)

CAPACITY = 400 << 10
SPACES = (NAMESPACE, bytes(32))


def lose(store: Path) -> None:
    """Remove the catalogue."""
    shutil.rmtree(store / "catalog")


def extents(store: Path) -> list[Extent]:
    """Every record the catalogue names, as they stand on disk."""
    catalogue = Catalogue.open(store / "catalog", read_only=True)
    try:
        with catalogue.reading() as rows:
            ids = [key_number(key) for key, _ in rows.scan(Table.EXTENTS)]
            found = [extent for extent in map(rows.extent, ids) if extent is not None]
    finally:
        catalogue.close()
    return sorted(found, key=lambda extent: (extent.segment, extent.offset))


class Unpunched(Files):
    """Gives no space back."""

    def punch(self, fd: int, offset: int, length: int) -> None:
        pass


def fill(store: Path, seed: int) -> list[tuple[Branch, bytes, int]]:
    """A random workload with evictions and reopenings, in two namespaces.

    Returns every branch, its namespace, and how many of its blocks are served in the end.
    """
    chance = random.Random(seed)
    known = [(branch(9, s, namespace=space), space) for s in range(4) for space in SPACES]
    for round in range(3):
        with Rig(store, capacity_bytes=CAPACITY) as rig:
            for step in range(12):
                blocks, space = chance.choice(known)
                count = len(blocks.keys)
                if chance.random() < 0.6:
                    rig.put(blocks.part(0, chance.randrange(1, count + 1)), namespace=space)
                else:
                    parent = blocks.keys[chance.randrange(count)]
                    limb = branch(4, 100 * round + step, parent=parent, namespace=space)
                    rig.put(limb, namespace=space)
                    known.append((limb, space))
                again, space = chance.choice(known)
                rig.fetch(again, namespace=space)
            served = [(b, space, rig.lookup(b, namespace=space)) for b, space in known]
    return served


def judge(store: Path, served: list[tuple[Branch, bytes, int]]) -> None:
    """What was served is served, byte for byte; usage is exact; `check` finds nothing."""
    with Rig(store, capacity_bytes=CAPACITY) as rig:
        for blocks, space, count in served:
            flight = rig.fetch(blocks, namespace=space)
            assert num_landed(flight) == rig.lookup(blocks, namespace=space) >= count
        used = rig.tier.statistics().used_bytes
        assert disk_takes(store, at_most=used)
    report = check_store(store)
    assert report.ok and report.leftover_bytes == 0, report.problems
    assert report.bytes == used


@pytest.mark.parametrize("seed", range(4))
def test_a_store_without_its_catalogue_serves_what_it_served(tmp_path: Path, seed: int) -> None:
    store = tmp_path / "s"
    served = fill(store, seed)
    assert sum(count for _, _, count in served) > 10
    lose(store)
    judge(store, served)
    judge(store, served)
    assert not (store / "catalog.new").exists()


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(4, 60))
def test_many_stores_without_their_catalogues_serve_what_they_served(
    tmp_path: Path, seed: int
) -> None:
    store = tmp_path / "s"
    served = fill(store, seed)
    lose(store)
    judge(store, served)


def test_a_damaged_catalogue_is_kept_and_a_warning_tells_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, blocks = tmp_path / "s", branch(5)
    with Rig(store) as rig:
        rig.put(blocks)
    for turn in (b"first", b"second"):
        (store / "catalog" / "data.mdb").write_bytes(turn * 2000)
        caplog.clear()
        with caplog.at_level(logging.WARNING), Rig(store) as rig:
            assert rig.landed(blocks) == 5
        assert "catalogue is damaged" in caplog.text
        assert "2 records, 5 blocks found in 1 segments; pins, expiry" in caplog.text
        assert (store / "catalog.damaged" / "data.mdb").read_bytes() == turn * 2000


@pytest.mark.parametrize("what", ["catalog", "catalog/data.mdb"])
def test_reading_a_store_that_lost_its_catalogue_names_the_cure(tmp_path: Path, what: str) -> None:
    store = tmp_path / "s"
    with Rig(store) as rig:
        rig.put(branch(3))
    (store / "catalog").rename(tmp_path / "away") if what == "catalog" else (store / what).unlink()
    for look in (lambda: Rig(store, read_only=True), lambda: check_store(store)):
        with pytest.raises(StoreCorrupt, match="kvtier check --rebuild-catalogue"):
            look()
    assert not (store / "catalog.damaged").exists()


def test_new_ids_are_above_every_id_in_the_segments(tmp_path: Path) -> None:
    store, blocks = tmp_path / "s", branch(3)
    for _ in range(5):
        with Rig(store) as rig:
            rig.put(blocks)
    with Rig(store) as rig:
        rig.put(branch(3, 1))
    before = {e.id for e in extents(store)} | {e.segment for e in extents(store)}
    lose(store)
    with Rig(store) as rig:
        rig.put(branch(3, 2))
    after = {e.id for e in extents(store)} | {e.segment for e in extents(store)}
    assert before < after and min(after - before) >> 32 > max(before) >> 32


def test_of_a_block_in_two_records_the_newer_holds(tmp_path: Path) -> None:
    store, blocks = tmp_path / "s", branch(7)
    limb = branch(3, 1, parent=blocks.keys[5])
    with Rig(store, files=Unpunched()) as rig:
        rig.put(blocks)
        rig.put(limb)
    first = extents(store)
    flip(segment_files(store)[0], first[1].offset + 3 * PAGE)  # its second block, the fifth
    with Rig(store, files=Unpunched()) as rig:
        assert rig.landed(blocks) == 4
        rig.put(blocks)
        rig.put(branch(3, 2, parent=blocks.keys[6]))
    kept = [(e.id, e.live) for e in extents(store)]
    lose(store)
    with Rig(store) as rig:
        assert rig.landed(blocks) == 7
        assert rig.landed(branch(3, 2, parent=blocks.keys[6])) == 3
        assert rig.lookup(limb) == 0  # it was forgotten with its parent
        assert disk_takes(store, at_most=rig.tier.statistics().used_bytes)
    assert [(e.id, e.live) for e in extents(store)] == kept
    assert check_store(store).ok


def test_what_has_lost_its_parent_is_given_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, blocks, other = tmp_path / "s", branch(9), branch(2, 1)
    with Rig(store) as rig:
        rig.put(blocks)
        rig.put(branch(4, 2, parent=blocks.keys[8]))
        rig.put(other)
    flip(segment_files(store)[0], extents(store)[1].offset + 40)
    lose(store)
    with Rig(store) as rig:
        assert rig.landed(blocks) == 3 and rig.landed(other) == 2
        assert disk_takes(store, at_most=rig.tier.statistics().used_bytes)
    assert "3 records without a parent, 7 damaged pages" in caplog.text
    assert check_store(store).ok


def craft(store: Path, blocks: Branch, payload: Callable[[Any, int, int], None]) -> None:
    """A segment with one record of 5000-byte blocks, whose payload is the caller's to write."""
    segment = 77 << 32 | 5
    stored = tuple(StoredBlock(key, 0, 5000) for key in blocks.keys)
    tokens = blocks.tokens.astype("<i4").tobytes()
    header = RecordHeader(77 << 32 | 6, segment, 0, NAMESPACE, blocks.parent, 5000, tokens, stored)
    with (store / "segments" / f"{segment:016x}.seg").open("w+b") as file:
        file.write(encode_header(header))
        file.flush()
        payload(file, header.header_bytes, header.record_bytes)


def reserve(file: Any, start: int, end: int) -> None:
    os.posix_fallocate(file.fileno(), start, end - start)


def zero(file: Any, start: int, end: int) -> None:
    file.write(bytes(end - start))


def write_one(file: Any, start: int, end: int) -> None:
    file.write(b"x".ljust(2 * PAGE, b"\0"))
    file.flush()
    reserve(file, start + 2 * PAGE, end)


def write_one_and_zeros(file: Any, start: int, end: int) -> None:
    file.write(b"x".ljust(end - start, b"\0"))


@pytest.mark.parametrize(
    ("payload", "live"), [(reserve, 0), (zero, 0), (write_one, 1), (write_one_and_zeros, 1)]
)
def test_a_write_that_was_never_finished_is_cut_where_it_stopped(
    tmp_path: Path, payload: Callable[[Any, int, int], None], live: int
) -> None:
    store, blocks = tmp_path / "s", branch(3)
    with Rig(store):
        pass
    craft(store, blocks, payload)
    lose(store)
    with Rig(store) as rig:
        assert rig.lookup(blocks) == live
        assert rig.tier.statistics().used_bytes == (live and PAGE + live * 2 * PAGE)
        assert disk_takes(store, at_most=rig.tier.statistics().used_bytes)


def test_bytes_of_a_payload_that_look_like_a_record_are_not_one(tmp_path: Path) -> None:
    store, blocks, fake = tmp_path / "s", branch(3), branch(1, 7)
    with Rig(store, block_bytes=2 * PAGE) as rig:
        rig.put(blocks)
    (record,) = extents(store)
    file = segment_files(store)[0]
    with file.open("r+b") as raw:
        header = decode_header(raw.read(PAGE))
        stored = (StoredBlock(fake.keys[0], 0, PAGE),)
        tokens = fake.tokens.astype("<i4").tobytes()
        page = record.starts[1] // PAGE
        lie = replace(
            header, parent=ROOT_KEY, block_bytes=PAGE, tokens=tokens, blocks=stored, page=page
        )
        raw.seek(record.starts[0])  # as another page says of itself
        raw.write(encode_header(lie))
        raw.seek(record.starts[2])  # as another segment says of itself
        raw.write(encode_header(replace(lie, page=record.starts[2] // PAGE, segment=3)))
        raw.write(b"x" * PAGE)
        raw.seek(40)
        raw.write(b"damaged")  # so that what follows is looked at page by page
    lose(store)
    with Rig(store) as rig:
        assert rig.lookup(fake) == rig.lookup(blocks) == 0
        assert rig.tier.statistics().used_bytes == 0
    assert segment_files(store) == []


@pytest.mark.parametrize("version", [1, 3, 2**31])
def test_a_segment_of_another_format_stops_the_rebuild_and_is_left_alone(
    tmp_path: Path, version: int
) -> None:
    store = tmp_path / "s"
    with Rig(store) as rig:
        rig.put(branch(3))
        rig.put(branch(3, 1))
    file = segment_files(store)[0]
    with file.open("r+b") as raw:
        raw.seek(extents(store)[1].offset + 8)
        raw.write(version.to_bytes(4, "little"))
    before = file.read_bytes()
    lose(store)
    for _ in range(2):
        with pytest.raises(StoreVersion, match=f"format {version}, this kvtier reads format 2"):
            Rig(store)
    assert file.read_bytes() == before and not (store / "catalog.damaged").exists()


class Killed(Exception):
    """Stands for a process that ends here."""


class Deadly(Files):
    """Ends the process before or after the `at`-th call that changes the disk."""

    def __init__(self, at: int, when: str) -> None:
        super().__init__()
        self._left, self._when, self.fired = at, when, False

    def step(self, action: Callable[[], Any]) -> Any:
        fatal = self._left == 0
        self._left -= 1
        self.fired |= fatal
        if fatal and self._when == "before":
            raise Killed
        result = action()
        if fatal:
            raise Killed
        return result

    def ending(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method`, as one of the steps."""
        return lambda *args: self.step(lambda: method(*args))

    def rename(self, old: Path, new: Path) -> None:
        self.step(lambda: super(Deadly, self).rename(old, new))

    def remove_tree(self, path: Path) -> None:
        self.step(lambda: super(Deadly, self).remove_tree(path))

    def make_directory(self, path: Path) -> None:
        self.step(lambda: super(Deadly, self).make_directory(path))

    def sync_directory(self, path: Path) -> None:
        self.step(lambda: super(Deadly, self).sync_directory(path))

    def punch(self, fd: int, offset: int, length: int) -> None:
        self.step(lambda: super(Deadly, self).punch(fd, offset, length))

    def unlink(self, path: Path) -> None:
        self.step(lambda: super(Deadly, self).unlink(path))

    def fdatasync(self, fd: int) -> None:
        self.step(lambda: super(Deadly, self).fdatasync(fd))


@pytest.mark.parametrize(("damage", "when"), [("lost", "before"), ("damaged", "after")])
def test_a_rebuild_that_is_killed_at_any_step_leaves_a_store_that_opens(
    tmp_path: Path, damage: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "s"
    blocks, other = branch(7), branch(4, 2)
    with Rig(store, files=Unpunched()) as rig:
        rig.put(blocks)
        rig.put(branch(3, 1, parent=blocks.keys[5]))
        rig.put(other)
        served = [(b, NAMESPACE, rig.lookup(b)) for b in (blocks, other)]
    commit = Catalogue.commit
    begin_epoch = Catalogue.begin_epoch
    for at in range(200):
        files = Deadly(at, when)
        monkeypatch.setattr(Catalogue, "commit", files.ending(commit))
        monkeypatch.setattr(Catalogue, "begin_epoch", files.ending(begin_epoch))
        monkeypatch.setattr("kvtier.tiers.nvme.rebuild._BATCH", 2)
        if damage == "lost":
            lose(store)
        else:
            (store / "catalog" / "data.mdb").write_bytes(b"damaged" * 4000)
        try:
            with Rig(store, capacity_bytes=CAPACITY, files=files):
                pass
        except Killed:
            assert files.fired
        monkeypatch.undo()
        judge(store, served)
        if not files.fired:
            assert at > 12
            return
    raise AssertionError("it never ended")


class Telling(Files):
    """Writes down renames, syncs of directories, and what destroys."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def rename(self, old: Path, new: Path) -> None:
        self.log.append(f"{old.name} -> {new.name}")
        super().rename(old, new)

    def sync_directory(self, path: Path) -> None:
        self.log.append(f"sync {path.name}")
        super().sync_directory(path)

    def punch(self, fd: int, offset: int, length: int) -> None:
        self.log.append("destroy")
        super().punch(fd, offset, length)

    def unlink(self, path: Path) -> None:
        self.log.append("destroy")
        super().unlink(path)

    def truncate(self, path: Path, length: int) -> None:
        self.log.append("destroy")
        super().truncate(path, length)


def test_a_new_catalogue_is_durable_before_it_is_named_and_named_before_anything_is_destroyed(
    tmp_path: Path,
) -> None:
    store, files = tmp_path / "s", Telling()
    with Rig(store) as rig:
        rig.put(branch(6))
    (store / "catalog" / "data.mdb").write_bytes(b"damaged" * 4000)
    with Rig(store, files=files, capacity_bytes=5 * PAGE):
        pass
    log = files.log[files.log.index("sync catalog.new") :]  # before that, the probe
    assert log[:4] == [
        "sync catalog.new",
        "catalog -> catalog.damaged",
        "catalog.new -> catalog",
        "sync s",
    ]
    assert "destroy" in log[4:]


def test_a_rebuild_within_less_room_evicts_first(tmp_path: Path) -> None:
    store = tmp_path / "s"
    with Rig(store) as rig:
        for seed in range(8):
            rig.put(branch(6, seed))
    lose(store)
    with Rig(store, capacity_bytes=CAPACITY // 2) as rig:
        used = rig.tier.statistics().used_bytes
        assert 0 < used <= CAPACITY // 2 and disk_takes(store, at_most=used)
        assert rig.lookup(branch(6, 7)) == 6  # the newest stay
    assert check_store(store).ok
