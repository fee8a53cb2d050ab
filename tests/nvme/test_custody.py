"""Pins, expiry and deletion through the tier: what stays, what goes, and when."""

import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from kvtier.index.words import BlockKey
from kvtier.tiers.contracts import Bytes
from kvtier.tiers.errors import PinRefused, StoreBusy, StoreUnsupported
from kvtier.tiers.nvme import custody
from kvtier.tiers.nvme.catalogue import Catalogue, Change, Outcome
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.custody import NamespaceUse, PinInfo
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.rows import Freed
from kvtier.tiers.nvme.settings import Geometry
from tests.nvme.rig import NAMESPACE, Rig, branch, num_landed

RECORD = 4096 + 3 * 8192
"""Three blocks of 5000 bytes and their header."""

OTHER = b"o" * 32


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def pressed(rig: Rig, first_seed: int = 100, branches: int = 8) -> None:
    """Put more than the store holds."""
    for seed in range(first_seed, first_seed + branches):
        rig.put(branch(3, seed))


# ---- pins ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", [0, 4, 8])
def test_a_pin_holds_a_path_against_eviction_and_not_what_hangs_off_it(
    tmp_path: Path, leaf: int
) -> None:
    trunk = branch(9)
    with Rig(tmp_path / "s", capacity_bytes=6 * RECORD) as rig:
        rig.put(trunk)
        rig.tier.pin(NAMESPACE, trunk.keys[: leaf + 1], "keep")
        pressed(rig)
        assert rig.landed(trunk) == leaf + 1
        held = (leaf // 3 + 1) * 4096 + (leaf + 1) * 8192
        assert rig.tier.pins() == [PinInfo(NAMESPACE, trunk.keys[leaf], "keep", None, held)]
        assert rig.tier.statistics().pinned_bytes == held
        assert rig.tier.namespaces()[0].pinned_bytes == held
    assert check_store(tmp_path / "s").ok


def test_unpinning_makes_evictable_exactly_what_no_other_pin_holds(tmp_path: Path) -> None:
    trunk = branch(9)
    with Rig(tmp_path / "s", capacity_bytes=6 * RECORD) as rig:
        rig.put(trunk)
        rig.tier.pin(NAMESPACE, trunk.keys, "long")
        rig.tier.pin(NAMESPACE, trunk.keys[:5], "short")
        assert rig.tier.unpin(NAMESPACE, trunk.keys, "long")
        assert not rig.tier.unpin(NAMESPACE, trunk.keys, "long")
        pressed(rig)
        assert rig.landed(trunk) == 5
        assert rig.tier.unpin_label("short") == 1
        assert rig.tier.statistics().pinned_bytes == 0
        pressed(rig, 200)
        assert rig.lookup(trunk) == 0
    assert check_store(tmp_path / "s").ok


def test_a_pin_beyond_the_quota_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    trunk, other = branch(9), branch(6, 1)
    with Rig(tmp_path / "s", pin_quota_bytes=3 * RECORD) as rig:
        rig.put(trunk)
        rig.put(other)
        rig.tier.pin(NAMESPACE, trunk.keys[:6], "a")
        with pytest.raises(PinRefused, match=f"wants {2 * RECORD} bytes.*{3 * RECORD}.*raise"):
            rig.tier.pin(NAMESPACE, other.keys, "a")
        assert rig.tier.statistics().pinned_bytes == 2 * RECORD
        rig.tier.pin(NAMESPACE, trunk.keys, "b")  # of its nine blocks six are held already
        rig.tier.pin(NAMESPACE, trunk.keys[:4], "c")  # and all of these
        assert len(rig.tier.pins()) == 3
    assert check_store(tmp_path / "s").ok


def test_by_default_pins_may_hold_half_of_the_capacity(tmp_path: Path) -> None:
    with Rig(tmp_path / "s", capacity_bytes=5 * RECORD) as rig:
        assert rig.tier.statistics().pin_quota_bytes == 5 * RECORD // 2


@pytest.mark.parametrize("label", ["", "ü" * 33, "\udcff"])
def test_a_label_is_neither_empty_nor_long(tmp_path: Path, label: str) -> None:
    with Rig(tmp_path / "s") as rig:
        rig.put(branch(1))
        with pytest.raises(PinRefused, match="1 to 64 bytes"):
            rig.tier.pin(NAMESPACE, branch(1).keys, label)
        assert not rig.tier.unpin(NAMESPACE, branch(1).keys, label)
        rig.tier.pin(NAMESPACE, branch(1).keys, "ü" * 32)


def test_what_is_not_in_the_store_cannot_be_pinned(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        rig.put(branch(3))
        with pytest.raises(PinRefused, match="not in the store"):
            rig.tier.pin(NAMESPACE, branch(4).keys, "x")
        with pytest.raises(PinRefused, match="not in the store"):
            rig.tier.pin(OTHER, branch(3).keys, "x")
        assert rig.tier.pins() == []


def test_a_pin_ends_at_its_time_and_a_second_word_moves_it(tmp_path: Path) -> None:
    clock, trunk = Clock(), branch(3)
    with Rig(tmp_path / "s", capacity_bytes=3 * RECORD, clock=clock) as rig:
        rig.put(trunk)
        rig.tier.pin(NAMESPACE, trunk.keys, "x", expires_at=1010.0)
        rig.tier.pin(NAMESPACE, trunk.keys, "x", expires_at=1020.5)
        assert rig.tier.pins() == [PinInfo(NAMESPACE, trunk.keys[2], "x", 1020.5, RECORD)]
        clock.seconds = 1015.0
        pressed(rig)
        assert rig.lookup(trunk) == 3
        clock.seconds = 1021.0
        pressed(rig, 200)
        assert rig.lookup(trunk) == 0
        assert rig.tier.pins() == []
    assert check_store(tmp_path / "s").ok


def test_less_room_than_is_pinned_lifts_the_pins_of_least_use_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Rig(tmp_path / "s", pin_quota_bytes=1 << 20) as rig:
        for seed in range(3):
            rig.put(branch(3, seed))
            rig.tier.pin(NAMESPACE, branch(3, seed).keys, f"pin {seed}")
        rig.landed(branch(3, 0))
    with Rig(tmp_path / "s", capacity_bytes=2 * RECORD) as rig:
        assert [rig.lookup(branch(3, seed)) for seed in range(3)] == [3, 0, 3]
        assert [pin.label for pin in rig.tier.pins()] != []
        assert {pin.label for pin in rig.tier.pins()} == {"pin 0", "pin 2"}
    assert "1 pins were lifted" in caplog.text
    assert check_store(tmp_path / "s").ok


# ---- expiry --------------------------------------------------------------------------------------


def test_from_its_time_on_nothing_expired_is_served_nor_what_hangs_off_it(tmp_path: Path) -> None:
    clock, trunk = Clock(), branch(9)
    limb = branch(2, 1, parent=trunk.keys[6])
    with Rig(tmp_path / "s", clock=clock) as rig:
        rig.put(trunk)
        rig.put(limb)
        rig.tier.pin(NAMESPACE, limb.keys, "no help")
        assert rig.tier.expire(NAMESPACE, trunk.keys[4:], at=1100.0)
        assert not rig.tier.expire(NAMESPACE, [BlockKey(trunk.keys[0][::-1])], at=1100.0)
        assert (rig.landed(trunk), rig.landed(limb)) == (9, 2)
        clock.seconds = 1100.0
        assert (rig.landed(trunk), rig.landed(limb)) == (4, 0)
        assert (rig.lookup(trunk), rig.lookup(limb)) == (4, 0)
        rig.put(branch(1, 50))  # any commit removes what is due
        stats = rig.tier.statistics()
        assert (stats.expired_blocks, stats.blocks, stats.pins_lost) == (7, 5, 1)
        assert num_landed(rig.put(trunk)) == rig.landed(trunk) == 9
    assert check_store(tmp_path / "s").ok


def test_an_expiry_is_never_put_off(tmp_path: Path) -> None:
    clock, trunk = Clock(), branch(6)
    with Rig(tmp_path / "s", clock=clock) as rig:
        rig.put(trunk)
        rig.tier.expire(NAMESPACE, trunk.keys[2:], at=1100.0)
        rig.tier.expire(NAMESPACE, trunk.keys[2:], at=1200.0)
        rig.tier.expire(NAMESPACE, trunk.keys[1:], at=1300.0)
        clock.seconds = 1150.0
        assert rig.lookup(trunk) == 2
        clock.seconds = 1300.0
        assert rig.lookup(trunk) == 1


def test_what_has_expired_is_removed_without_any_request(tmp_path: Path) -> None:
    seconds = iter(range(1000, 10**9))
    with Rig(tmp_path / "s", clock=lambda: float(next(seconds))) as rig:
        rig.put(branch(3))
        rig.tier.expire(NAMESPACE, branch(3).keys, at=float(next(seconds)) + 2.5)
        for _ in range(600):
            ticks = rig.signal.ticks
            if rig.tier.statistics().blocks == 0:
                break
            rig.signal.wait(ticks, 0.1)
        assert rig.tier.statistics().expired_blocks == 3


def test_what_expired_while_the_store_was_closed_is_gone_after_opening(tmp_path: Path) -> None:
    clock = Clock()
    with Rig(tmp_path / "s", clock=clock) as rig:
        rig.put(branch(6))
        rig.tier.expire(NAMESPACE, branch(6).keys[3:], at=1100.0)
    clock.seconds = 1200.0
    with Rig(tmp_path / "s", clock=clock, read_only=True) as rig:
        assert rig.lookup(branch(6)) == 3
    with Rig(tmp_path / "s", clock=clock) as rig:
        assert rig.lookup(branch(6)) == 3
        rig.put(branch(1, 50))
        assert rig.tier.statistics().blocks == 4
    assert check_store(tmp_path / "s").ok


# ---- removal -------------------------------------------------------------------------------------


def test_forgetting_removes_a_branch_now_pins_and_all(tmp_path: Path) -> None:
    trunk, limb = branch(7), branch(4, 1, parent=branch(7).keys[4])
    with Rig(tmp_path / "s") as rig:
        rig.put(trunk)
        rig.put(limb)
        rig.tier.pin(NAMESPACE, limb.keys, "a")
        rig.tier.pin(NAMESPACE, trunk.keys[:2], "b")
        assert rig.tier.forget(NAMESPACE, trunk.keys[3:4])
        assert not rig.tier.forget(NAMESPACE, trunk.keys[3:4])
        assert (rig.lookup(trunk), rig.lookup(limb)) == (3, 0)
        assert rig.tier.statistics().blocks == 3
        assert [pin.label for pin in rig.tier.pins()] == ["b"]
        assert num_landed(rig.put(trunk)) == rig.landed(trunk) == 7
    report = check_store(tmp_path / "s")
    assert report.ok and report.leftover_bytes == 0


def test_deleting_a_namespace_leaves_the_others_and_its_name_free(tmp_path: Path) -> None:
    kept, blocks = branch(7), branch(7, namespace=OTHER)
    with Rig(tmp_path / "s") as rig:
        rig.put(kept)
        rig.put(blocks, namespace=OTHER)
        rig.tier.pin(OTHER, blocks.keys, "x")
        assert rig.tier.delete_namespace(OTHER) == 7
        assert rig.tier.delete_namespace(OTHER) == 0
        assert [use.namespace for use in rig.tier.namespaces()] == [NAMESPACE]
        assert rig.lookup(blocks, namespace=OTHER) == 0
        assert (rig.landed(kept), rig.tier.statistics().pinned_bytes) == (7, 0)
        rig.put(blocks.part(0, 3), namespace=OTHER)
        assert rig.lookup(blocks, namespace=OTHER) == 3
    assert check_store(tmp_path / "s").ok


class SlowFiles(Files):
    """Reads wait, once they are told to, until they are let through."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = Event(), Event()
        self.go.set()

    def preadv(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        self.reached.set()
        assert self.go.wait(60)
        return super().preadv(fd, buffers, offset)


def test_a_fetch_that_has_begun_brings_its_bytes_although_the_namespace_is_deleted(
    tmp_path: Path,
) -> None:
    blocks, files = branch(9), SlowFiles()
    with Rig(tmp_path / "s", files=files) as rig, ThreadPoolExecutor(1) as other:
        rig.put(blocks)
        files.reached.clear()
        files.go.clear()
        fetched = other.submit(rig.fetch, blocks)
        assert files.reached.wait(60)
        assert rig.tier.delete_namespace(NAMESPACE) == 9
        assert rig.lookup(blocks) == 0
        files.go.set()
        assert num_landed(fetched.result(60)) == 9  # the rig checks every byte
    report = check_store(tmp_path / "s")
    assert report.ok and report.blocks == report.leftover_bytes == 0


def test_a_deletion_in_small_steps_serves_nothing_and_survives_a_kill_at_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the store after each transaction is what a kill there leaves."""
    store = tmp_path / "s"
    copies: list[Path] = []
    plain = Catalogue.commit

    def commit(self: Catalogue, change: Change) -> Outcome:
        outcome = plain(self, change)
        copies.append(shutil.copytree(store, tmp_path / f"copy {len(copies)}"))
        return outcome

    blocks, kept = branch(9, namespace=OTHER), branch(6, 3)
    with Rig(store) as rig:
        rig.put(blocks, namespace=OTHER)
        rig.put(kept)
        monkeypatch.setattr(custody, "SWEEP_STEPS", 1)
        monkeypatch.setattr(Catalogue, "commit", commit)
        rig.tier.delete_namespace(OTHER)
        monkeypatch.undo()
    assert len(copies) >= 4
    for copy in copies:
        (copy / "owner").write_text("")
        with Rig(copy) as rig:
            assert rig.lookup(blocks, namespace=OTHER) == 0
            assert rig.landed(kept) == 6
            rig.put(branch(1, 50))
            assert rig.tier.statistics().blocks == 7
        assert check_store(copy).ok


def test_what_was_said_is_kept_by_a_kill(tmp_path: Path) -> None:
    clock, trunk = Clock(), branch(9)
    with Rig(tmp_path / "s", clock=clock) as rig:
        rig.put(trunk)
        rig.tier.pin(NAMESPACE, trunk.keys[:4], "x", expires_at=2000.0)
        rig.tier.expire(NAMESPACE, trunk.keys[6:], at=1500.0)
        shutil.copytree(tmp_path / "s", tmp_path / "killed")
    (tmp_path / "killed" / "owner").write_text("")
    with Rig(tmp_path / "killed", clock=clock) as rig:
        held = 2 * 4096 + 4 * 8192
        assert rig.tier.pins() == [PinInfo(NAMESPACE, trunk.keys[3], "x", 2000.0, held)]
        assert rig.tier.namespaces() == [NamespaceUse(NAMESPACE, 9, 3 * RECORD, held)]
        clock.seconds = 1500.0
        assert rig.lookup(trunk) == 6
    assert check_store(tmp_path / "killed").ok


# ---- the verbs as such ---------------------------------------------------------------------------


def test_a_verb_is_refused_where_it_cannot_be_carried_out(tmp_path: Path) -> None:
    with Rig(tmp_path / "s") as rig:
        rig.put(branch(3))
    with Rig(tmp_path / "s", read_only=True) as rig:
        with pytest.raises(StoreUnsupported, match="read-only"):
            rig.tier.forget(NAMESPACE, branch(3).keys)
        assert len(rig.tier.namespaces()) == 1
    with pytest.raises(StoreUnsupported, match="closed"):
        rig.tier.pins()


@pytest.mark.parametrize(
    ("verb", "last"), [("pin", ("x",)), ("unpin", ("x",)), ("expire", (1.0,)), ("forget", ())]
)
def test_a_verb_without_keys_names_itself_and_changes_nothing(
    tmp_path: Path, verb: str, last: tuple[object, ...]
) -> None:
    with Rig(tmp_path / "s") as rig:
        rig.put(branch(3))
        with pytest.raises(ValueError, match=f"^{verb}: keys are empty; name"):
            getattr(rig.tier, verb)(NAMESPACE, [], *last)
        assert rig.lookup(branch(3)) == 3 and rig.tier.pins() == []


def test_a_verb_past_its_deadline_says_so_and_is_carried_out_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, go = Catalogue.commit, Event()

    def commit(self: Catalogue, change: Change) -> Outcome:
        assert not change.orders or go.wait(60)
        return plain(self, change)

    with Rig(tmp_path / "s") as rig:
        rig.put(branch(3))
        monkeypatch.setattr(Catalogue, "commit", commit)
        with pytest.raises(StoreBusy, match="goes on"):
            rig.tier.pin(NAMESPACE, branch(3).keys, "late", deadline_s=0.01)
        go.set()
        assert rig.tier.unpin_label("late") == 1


def test_the_work_of_giving_ranges_back_grows_with_their_number_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, compared = Freed.__eq__, Counter[str]()

    def counting(one: Freed, other: object) -> bool:
        compared["all"] += 1
        return plain(one, other)

    monkeypatch.setattr(Freed, "__eq__", counting)
    with Rig(tmp_path / "s", geometry=Geometry(extent_bytes=1)) as rig:
        rig.put(branch(90))
        assert rig.tier.delete_namespace(NAMESPACE) == 90
        assert num_landed(rig.put(branch(1))) == 1  # its commit clears the 90 ranges
    assert compared["all"] < 3 * 90


@pytest.mark.parametrize("never", [float("inf"), 1e30])
def test_a_time_beyond_every_clock_is_never(tmp_path: Path, never: float) -> None:
    blocks = branch(3)
    with Rig(tmp_path / "s") as rig:
        rig.put(blocks)
        rig.tier.pin(NAMESPACE, blocks.keys, "a", expires_at=never)
        assert rig.tier.expire(NAMESPACE, blocks.keys, never)
        assert len(rig.tier.pins()) == 1 and rig.landed(blocks) == 3
        assert rig.tier.expire(NAMESPACE, blocks.keys, -never)
        assert rig.landed(blocks) == 0
    assert check_store(tmp_path / "s").ok
