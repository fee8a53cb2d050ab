"""The order of writing, publishing, deleting and punching, as the file layer sees it."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.index.words import TierId
from kvtier.tiers.contracts import Bytes, Flight
from kvtier.tiers.nvme.catalogue import Catalogue, Change, Outcome
from kvtier.tiers.nvme.record import PAGE
from kvtier.tiers.nvme.settings import Geometry
from kvtier.tiers.pool import ArrayPool
from tests.nvme.faults import HangingFiles, RecordingFiles
from tests.nvme.rig import NAMESPACE, Rig, branch, num_landed


def record_commits(files: RecordingFiles, patch: pytest.MonkeyPatch) -> None:
    """Write every catalogue transaction into the same log."""
    plain = Catalogue.commit

    def commit(self: Catalogue, change: Change) -> Outcome:
        outcome = plain(self, change)
        for addition, taken in zip(change.additions, outcome.accepted, strict=True):
            extent = addition.extent
            if taken:
                name = f"{extent.segment:016x}.seg"
                files.note("publish", name, extent.offset, extent.nbytes)
        for freed in outcome.freed:
            files.note("delete", f"{freed.segment:016x}.seg", freed.offset, freed.length)
        return outcome

    patch.setattr(Catalogue, "commit", commit)


def unsynced_publications(log: list[tuple[str, str, int, int]]) -> list[str]:
    """Extents published while a byte of them, or their file's name, was not durable."""
    dirty: dict[str, list[tuple[int, int]]] = {}
    nameless: set[str] = set()
    bad = []
    for call, name, offset, length in log:
        if call == "create":
            nameless.add(name)
        elif call == "sync directory":
            nameless.clear()
        elif call == "write":
            dirty.setdefault(name, []).append((offset, length))
        elif call == "sync":
            dirty.pop(name, None)
        elif call == "publish":
            covers = [
                at for at, n in dirty.get(name, ()) if at < offset + length and offset < at + n
            ]
            if covers or name in nameless:
                bad.append(f"{name} at {offset}")
    return bad


def test_nothing_is_published_before_its_bytes_and_its_name_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RecordingFiles()
    record_commits(files, monkeypatch)
    with Rig(tmp_path / "s", files=files) as rig:
        flights = [rig.begin_put(branch(9, seed)) for seed in range(6)]
        for flight in flights:
            rig.settle(flight)
            assert num_landed(flight) == 9
    assert sum(line[0] == "publish" for line in files.log) == 18
    assert unsynced_publications(files.log) == []


@pytest.mark.parametrize("omitted", ["sync", "sync directory"])
def test_the_check_above_would_notice_a_missing_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, omitted: str
) -> None:
    files = RecordingFiles()
    record_commits(files, monkeypatch)
    with Rig(tmp_path / "s", files=files) as rig:
        rig.put(branch(9))
    assert unsynced_publications([line for line in files.log if line[0] != omitted]) != []


def test_bytes_are_punched_only_after_their_rows_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RecordingFiles()
    record_commits(files, monkeypatch)
    with Rig(tmp_path / "s", files=files, capacity_bytes=160 << 10) as rig:
        for seed in range(9):
            rig.put(branch(5, seed))
    deleted: set[tuple[str, int]] = set()
    punched = [line[1:] for line in files.log if line[0] == "punch" and line[1] != "probe"]
    assert len(punched) > 3
    for call, name, offset, length in files.log:
        pages = {(name, at) for at in range(offset, offset + length, PAGE)}
        if call == "delete":
            deleted |= pages
        elif call == "punch" and name != "probe":
            assert pages <= deleted


def test_neighbouring_ranges_are_given_back_in_one_call(tmp_path: Path) -> None:
    files = RecordingFiles()
    with Rig(tmp_path / "s", files=files, geometry=Geometry(extent_bytes=1)) as rig:
        rig.put(branch(12))
        files.log.clear()
        assert rig.tier.delete_namespace(NAMESPACE) == 12
        assert num_landed(rig.put(branch(1))) == 1
        assert rig.tier.statistics().used_bytes == 8192 + PAGE
    punched = [line for line in files.log if line[0] == "punch"]
    assert len(punched) == 1 and punched[0][3] == 12 * (8192 + PAGE)


class Witness(HangingFiles):
    """Says when a write begins after the hung call."""

    def __init__(self, call: str) -> None:
        super().__init__(call)
        self.written = threading.Event()

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        if self.entered.is_set():
            self.written.set()
        return super().pwritev(fd, buffers, offset)


def test_a_put_begins_while_the_one_before_it_is_synced(tmp_path: Path) -> None:
    files = Witness("fdatasync")
    with Rig(tmp_path / "s", files=files) as rig:
        files.arm()
        first = rig.begin_put(branch(3))
        assert files.entered.wait(30)
        second = rig.begin_put(branch(3, 1))
        assert files.written.wait(20)
        assert not first.done
        files.release()
        rig.settle(first)
        rig.settle(second)
        assert num_landed(first) == num_landed(second) == 3


class Taken(ArrayPool):
    """Its first block to be read by a worker is given up and used for something else just then."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        super().__init__(TierId.DRAM, num_slots, block_bytes)
        self.given = threading.Event()
        self.put: Flight | None = None

    def view(self, slot: int) -> Bytes:
        if threading.current_thread() is not threading.main_thread():
            assert self.given.wait(30) and self.put is not None
            self.put.fail_rest()
            self.array[:] = 0xEE
        return super().view(slot)


def test_bytes_that_were_read_after_their_put_was_given_up_are_never_written(
    tmp_path: Path,
) -> None:
    files = RecordingFiles()
    with Rig(tmp_path / "s", files=files) as rig:
        pool = Taken(3, rig.block_bytes)
        pool.put = rig.begin_put(branch(3), pool=pool)
        pool.given.set()
        rig.settle(pool.put)
        assert num_landed(rig.put(branch(3, 1))) == 3
    assert sum(line[0] == "write" for line in files.log) == 1
