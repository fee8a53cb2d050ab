"""Damage found while the store is open: it is out for a moment, and then as it was."""

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kvtier.tiers.errors import StoreCorrupt, StoreOut
from kvtier.tiers.nvme.catalogue import Catalogue
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.rebuild import CATALOGUE, UNFINISHED
from kvtier.tiers.nvme.rows import Table, block_row_key, encode_block, namespace_key
from tests.nvme.faults import HangingFiles
from tests.nvme.rig import NAMESPACE, Branch, Rig, branch, disk_takes, flip, num_landed


def rot(store: Path, key: bytes) -> None:
    """Flip a bit of a row's body under the open catalogue, in every page that has the row."""
    file = store / "catalog" / "data.mdb"
    data = file.read_bytes()
    at = data.find(key)
    assert at > 0
    while at > 0:
        flip(file, at + len(key) + 2)
        at = data.find(key, at + 1)


def block_key(blocks: Branch, position: int) -> bytes:
    return block_row_key(1, blocks.keys[position])


def wait_for(rig: Rig, state: str) -> None:
    """Ask until the store is in that state, as its users do."""
    for _ in range(2000):
        if rig.tier.statistics().state == state:
            return
        rig.settle(rig.tier.lookup(bytes(32), (), branch(1).tokens))
        Event().wait(0.005)
    raise TimeoutError(repr(rig.tier))


def on_lookup(rig: Rig, blocks: Branch) -> None:
    assert rig.lookup(blocks) == 0


def on_fetch(rig: Rig, blocks: Branch) -> None:
    assert rig.landed(blocks) == 0


def on_put(rig: Rig, blocks: Branch) -> None:
    assert num_landed(rig.put(blocks)) == 0


@pytest.mark.parametrize("touch", [on_lookup, on_fetch, on_put])
def test_a_damaged_row_found_on_touch_leads_to_a_rebuild(
    tmp_path: Path, touch: Callable[[Rig, Branch], None], caplog: pytest.LogCaptureFixture
) -> None:
    store, blocks, other = tmp_path / "s", branch(7), branch(4, 1)
    with Rig(store) as rig:
        rig.put(blocks)
        rig.put(other)
        rot(store, block_key(blocks, 0))
        touch(rig, blocks)
        wait_for(rig, "ok")
        assert rig.tier.statistics().rebuilds == 1
        assert rig.landed(blocks) == rig.lookup(blocks) == 7 and rig.landed(other) == 4
        assert num_landed(rig.put(branch(5, 2))) == rig.landed(branch(5, 2)) == 5
        used = rig.tier.statistics().used_bytes
        assert disk_takes(store, at_most=used)
    assert "made a new catalogue: 5 records, 11 blocks" in caplog.text
    report = check_store(store)
    assert report.ok and report.bytes == used and report.leftover_bytes == 0
    with Rig(store) as rig:
        assert rig.landed(blocks) == 7 and rig.landed(branch(5, 2)) == 5


def test_damage_found_by_a_commit_leads_to_a_rebuild(tmp_path: Path) -> None:
    store, blocks = tmp_path / "s", branch(6)
    with Rig(store) as rig:
        rig.put(blocks)
        rot(store, b"counters")
        assert num_landed(rig.put(branch(3, 1))) == 0
        wait_for(rig, "ok")
        assert num_landed(rig.put(branch(3, 1))) == 3
        assert rig.landed(blocks) == 6
        assert disk_takes(store, at_most=rig.tier.statistics().used_bytes)
    assert check_store(store).ok


def test_a_block_whose_row_and_extent_disagree_is_damage(tmp_path: Path) -> None:
    store, blocks = tmp_path / "s", branch(3)
    with Rig(store) as rig:
        rig.put(blocks)
    catalogue = Catalogue.open(store / "catalog", read_only=False)
    with catalogue._writing() as edit:
        edit.put(Table.BLOCKS, block_key(blocks, 0), encode_block(77, 0))
    catalogue.close()
    with Rig(store) as rig:
        assert rig.lookup(blocks) == 0
        wait_for(rig, "ok")
        assert rig.landed(blocks) == 3
    assert check_store(store).ok


def test_a_pin_of_a_namespace_without_a_row_is_damage(tmp_path: Path) -> None:
    store, blocks = tmp_path / "s", branch(3)
    with Rig(store) as rig:
        rig.put(blocks)
        rig.tier.pin(NAMESPACE, blocks.keys, "x")
    catalogue = Catalogue.open(store / CATALOGUE, read_only=False)
    with catalogue._writing() as edit:
        edit.drop(Table.NAMESPACES, namespace_key(1))
    catalogue.close()
    with Rig(store) as rig:
        with pytest.raises(StoreCorrupt, match="pin 'x' is of namespace 1, which has no row"):
            rig.tier.pins()
        wait_for(rig, "ok")
        assert rig.tier.statistics().rebuilds == 1
        assert rig.landed(blocks) == 3


class Slow(Files):
    """A rebuild that waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = Event(), Event()

    def make_directory(self, path: Path) -> None:
        if path.name == UNFINISHED:
            self.begun.set()
            assert self.go.wait(30)
        super().make_directory(path)


def test_while_the_catalogue_is_made_anew_every_request_is_answered_at_once(
    tmp_path: Path,
) -> None:
    store, files, blocks = tmp_path / "s", Slow(), branch(5)
    with Rig(store, files=files) as rig:
        rig.put(blocks)
        rot(store, block_key(blocks, 0))
        rig.lookup(blocks)
        assert files.begun.wait(30)
        assert rig.tier.statistics().state == "rebuilding"
        assert rig.lookup(blocks) == rig.landed(blocks) == 0
        assert rig.tier.holds(bytes(range(32)), blocks.keys) == 0
        with pytest.raises(StoreOut, match="rebuilding"):
            rig.tier.namespaces()
        flight = rig.put(branch(2, 4))
        assert num_landed(flight) == 0 and flight.error is not None
        files.go.set()
        wait_for(rig, "ok")
        assert rig.landed(blocks) == 5


def test_a_store_closed_while_its_catalogue_is_made_anew_has_a_whole_one(tmp_path: Path) -> None:
    store, files, blocks = tmp_path / "s", Slow(), branch(5)
    rig = Rig(store, files=files)
    rig.put(blocks)
    rot(store, block_key(blocks, 0))
    rig.lookup(blocks)
    assert files.begun.wait(30)
    files.go.set()
    rig.tier.close(30.0)
    assert check_store(store).ok
    with Rig(store) as again:
        assert again.landed(blocks) == 5


def test_damage_that_comes_back_within_a_minute_leaves_the_store_out_until_then(
    tmp_path: Path,
) -> None:
    store, blocks = tmp_path / "s", branch(5)
    with Rig(store) as rig:
        rig.put(blocks)
        for turn in range(2):
            rot(store, block_key(blocks, 0))
            assert rig.lookup(blocks) == 0
            if turn == 0:
                wait_for(rig, "ok")
                rig.pass_time(59.0)
        wait_for(rig, "failing")
        assert rig.lookup(blocks) == rig.landed(blocks) == num_landed(rig.put(branch(2, 1))) == 0
        assert rig.tier.statistics().rebuilds == 1
        rig.pass_time(1.0)
        wait_for(rig, "ok")
        assert rig.tier.statistics().rebuilds == 2
        assert rig.landed(blocks) == 5


class Full(Files):
    """No room for a new catalogue, until there is."""

    full = True

    def make_directory(self, path: Path) -> None:
        if path.name == UNFINISHED and self.full:
            raise OSError(28, "No space left on device")
        super().make_directory(path)


def test_a_rebuild_that_fails_is_tried_again_later(tmp_path: Path) -> None:
    store, files, blocks = tmp_path / "s", Full(), branch(5)
    with Rig(store, files=files) as rig:
        rig.put(blocks)
        rot(store, block_key(blocks, 0))
        assert rig.lookup(blocks) == 0
        wait_for(rig, "failing")
        assert rig.lookup(blocks) == rig.landed(blocks) == num_landed(rig.put(branch(2, 1))) == 0
        files.full = False
        assert rig.lookup(blocks) == 0
        rig.pass_time(60.0)
        wait_for(rig, "ok")
        assert rig.landed(blocks) == 5 and num_landed(rig.put(branch(2, 1))) == 2
        assert rig.tier.statistics().rebuilds == 1
    assert check_store(store).ok


def test_puts_and_fetches_under_way_when_damage_is_found_end(tmp_path: Path) -> None:
    store, blocks = tmp_path / "s", branch(9)
    with Rig(store) as rig:
        rig.put(blocks)
        waiting: list[Any] = [rig.begin_put(branch(9, seed)) for seed in range(1, 9)]
        rot(store, block_key(blocks, 0))
        rig.lookup(blocks)
        for flight in waiting:
            rig.settle(flight)
        wait_for(rig, "ok")
        for seed in range(1, 9):
            assert num_landed(rig.put(branch(9, seed))) == rig.landed(branch(9, seed)) == 9
        assert disk_takes(store, at_most=rig.tier.statistics().used_bytes)
    assert check_store(store).ok


@pytest.mark.parametrize("turns", [0, 3])
def test_a_store_closed_before_its_catalogue_is_made_anew_lets_go(
    tmp_path: Path, turns: int
) -> None:
    store, files, blocks = tmp_path / "s", HangingFiles("fdatasync"), branch(5)
    rig = Rig(store, files=files)
    rig.put(blocks)
    rot(store, block_key(blocks, 0))
    files.arm()
    put = rig.begin_put(branch(3, 1))
    assert files.entered.wait(30)
    rig.lookup(blocks)
    for _ in range(turns):  # of the loop: then the renewal waits for the put already
        turned = Event()
        rig.tier._crew.call_soon(turned.set)
        assert turned.wait(30)
    rig.tier.close(0.1)
    files.release()
    rig.settle(put)
    rig.tier.close(20.0)
    with Rig(store) as again:
        again.lookup(blocks)  # closed in time, it left the damage for the next owner to find
        wait_for(again, "ok")
        assert again.landed(blocks) == 5
    assert check_store(store).ok


def test_a_new_catalogue_is_told_what_was_written_today(tmp_path: Path) -> None:
    store, blocks = tmp_path / "s", branch(5)
    with Rig(store) as rig:
        rig.put(blocks)
        written = rig.tier.statistics().written_today_bytes
        rot(store, block_key(blocks, 0))
        rig.lookup(blocks)
        wait_for(rig, "ok")
    with Rig(store) as rig:
        assert rig.tier.statistics().written_today_bytes == written > 0
