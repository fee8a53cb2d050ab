"""Kills, full disks and damage: a bundle is resumed, refused or imported in part, never wrong."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.tiers.contracts import Bytes
from kvtier.tiers.errors import BundleRefused
from kvtier.tiers.nvme.bundle_export import export_bundle
from kvtier.tiers.nvme.bundle_reader import verify_bundle
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.record import PAGE
from tests.nvme.bundles import (
    ALL,
    Killed,
    KilledFiles,
    Tree,
    bring,
    exported,
    grown,
    held,
    prefixes,
)
from tests.nvme.faults import FaultyFiles
from tests.nvme.rig import Rig, branch, flip

NUM_RECORDS = 9
NUM_WRITES = NUM_RECORDS + 2
"""The head, the records, the footer."""


class CountingFiles(Files):
    """Counts the bytes written."""

    def __init__(self) -> None:
        super().__init__(direct=False)
        self.nbytes = 0

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        written = super().pwritev(fd, buffers, offset)
        self.nbytes += written
        return written


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that holds the tree, and beside it `whole`, the bundle of all of it."""
    store = tmp_path_factory.mktemp("bundles") / "a"
    grown(store)
    exported(store, store.with_name("whole"))
    return store


@pytest.fixture
def whole(source: Path) -> bytes:
    return source.with_name("whole").read_bytes()


@pytest.mark.parametrize("done", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("at", range(NUM_WRITES + 1))
def test_an_export_killed_at_any_write_goes_on_behind_it_to_the_same_bundle(
    tmp_path: Path, source: Path, whole: bytes, at: int, done: float
) -> None:
    bundle, files = tmp_path / "b", KilledFiles(at, done)
    with pytest.raises(Killed):
        export_bundle(source, bundle, files=files)
    assert files.num_writes == at and not bundle.exists()
    again = CountingFiles()
    report = exported(source, bundle, files=again)
    assert bundle.read_bytes() == whole
    assert report.resumed == min(max(0, at - 1 + int(done)), NUM_RECORDS)
    left = len(whole) - again.nbytes  # what was not written again: head and whole records
    assert left >= (at + int(done)) * PAGE - PAGE and (left > 0) == (at + int(done) > 0)
    assert not (tmp_path / "b.part").exists()


def test_damage_in_what_a_killed_export_left_is_written_again(
    tmp_path: Path, source: Path, whole: bytes
) -> None:
    for offset in range(0, len(whole), 4093):
        part = tmp_path / "b.part"
        part.write_bytes(whole)
        flip(part, offset)
        report = exported(source, tmp_path / "b")
        assert verify_bundle(tmp_path / "b").ok and report.blocks == 21
        damaged_padding = (tmp_path / "b").read_bytes() != whole
        assert not damaged_padding or report.resumed == NUM_RECORDS
        (tmp_path / "b").unlink()


def test_what_another_export_left_is_kept_as_far_as_it_is_the_same(
    tmp_path: Path, source: Path, whole: bytes
) -> None:
    trunk = branch(7)
    with pytest.raises(Killed):
        export_bundle(source, tmp_path / "b", prefixes(trunk.keys[6]), files=KilledFiles(9, 0))
    assert (tmp_path / "b.part").stat().st_size > 0
    report = exported(source, tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == whole
    assert report.resumed == 1  # the trunk's first record; then the limb comes
    (tmp_path / "s.part").write_bytes(whole)
    report = exported(source, tmp_path / "s", prefixes(trunk.keys[2]))
    assert (report.resumed, report.blocks) == (1, 3) and verify_bundle(tmp_path / "s").ok
    (tmp_path / "c.part").write_bytes(b"something else" * 999)
    assert exported(source, tmp_path / "c").resumed == 0
    assert (tmp_path / "c").read_bytes() == whole


def test_a_damaged_block_of_the_store_does_not_hinder_a_resume(tmp_path: Path) -> None:
    store = tmp_path / "a"
    grown(store)
    flip(store / "segments" / sorted(os.listdir(store / "segments"))[0], 4096 + 2 * 8192)
    assert not export_bundle(store, tmp_path / "whole").ok
    with pytest.raises(Killed):
        export_bundle(store, tmp_path / "b", files=KilledFiles(3, 0))
    report = export_bundle(store, tmp_path / "b")
    assert (report.resumed, report.damaged) == (2, 1)
    assert (tmp_path / "b").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(
    ("call", "at", "resumed"),
    [
        ("open", 0, 0),
        *(("pwritev", at, max(0, at - 1)) for at in range(NUM_WRITES)),
        ("fdatasync", 0, NUM_RECORDS),
    ],
)
def test_a_disk_that_fails_is_named_and_the_next_run_goes_on(
    tmp_path: Path, source: Path, whole: bytes, call: str, at: int, resumed: int, error: int
) -> None:
    files = FaultyFiles(call, error, at=at)
    files.direct = False
    files.arm()
    cure = "free some space" if error == errno.ENOSPC else "mend that or choose another"
    with pytest.raises(BundleRefused, match=f"b.part: cannot be written .*{cure}"):
        export_bundle(source, tmp_path / "b", files=files)
    assert files.fired == 1 and not (tmp_path / "b").exists()
    assert exported(source, tmp_path / "b").resumed == resumed
    assert (tmp_path / "b").read_bytes() == whole


def test_a_name_that_may_not_last_is_an_error(tmp_path: Path, source: Path, whole: bytes) -> None:
    files = FaultyFiles("sync_directory", errno.EIO)
    files.direct = False
    files.arm()
    with pytest.raises(BundleRefused, match="cannot be written"):
        export_bundle(source, tmp_path / "b", files=files)
    assert (tmp_path / "b").read_bytes() == whole


class FullFiles(Files):
    """A disk with room for so many bytes: the write that reaches the end is short, the next one
    fails."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(direct=False)
        self._left = nbytes

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        (buffer,) = buffers
        if not self._left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().pwritev(fd, [buffer[: self._left]], offset)
        self._left -= written
        return written


@pytest.mark.parametrize("room", [1, 4096, 5000, 40_000, 100_001])
def test_a_disk_that_fills_up_keeps_what_it_took_for_the_next_run(
    tmp_path: Path, source: Path, whole: bytes, room: int
) -> None:
    with pytest.raises(BundleRefused, match="No space left.*free some space"):
        export_bundle(source, tmp_path / "b", files=FullFiles(room))
    assert (tmp_path / "b.part").read_bytes() == whole[:room]
    exported(source, tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == whole


IMPORT = """
import os, signal, sys
from pathlib import Path
from kvtier.tiers.nvme import bundle_import
from tests.nvme.rig import Rig
count = 0
def progress(done, total):
    global count
    count += 1
    if count == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
bundle_import._POOL_BYTES = 3 * 8192  # a put at a time
rig = Rig(Path(sys.argv[2]))
bundle_import.import_bundle(Path(sys.argv[1]), rig.tier, progress=progress)
"""


@pytest.mark.parametrize("at", [1, 4, 7])
def test_an_import_killed_in_the_middle_goes_on_where_it_was(
    tmp_path: Path, source: Path, at: int
) -> None:
    bundle, tree = source.with_name("whole"), Tree.make()
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, str(bundle), str(tmp_path / "c"), f"{at}"], check=False
    )
    assert done.returncode == -signal.SIGKILL
    with Rig(tmp_path / "c") as rig:
        there = sum(held(rig, tree).values())
        assert there >= max(0, at - 2)
        report = bring(bundle, rig)
        assert report.ok and (report.already_there, report.imported) == (there, 21 - there)
        assert held(rig, tree) == ALL
    assert check_store(tmp_path / "c").ok


def test_an_import_into_a_store_that_is_sick_or_takes_nothing_reports_it(
    tmp_path: Path, source: Path, whole: bytes
) -> None:
    bundle = source.with_name("whole")
    with Rig(tmp_path / "s") as rig:
        rig.tier._health.hung("a read")
        report = bring(bundle, rig, pin_label="a")
        assert report.refused + report.damaged == report.blocks and report.problems
        rig.pass_time()
    with Rig(source, read_only=True) as rig:
        report = bring(bundle, rig, pin_label="a")
        assert report.already_there == report.blocks and not report.pinned and report.problems
