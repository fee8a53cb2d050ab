"""One owner a directory, and what `open` refuses with one line."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread, active_count

import pytest

from kvtier.tiers.contracts import Signal
from kvtier.tiers.errors import StoreInUse, StoreUnsupported
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.lock import StoreLock
from kvtier.tiers.nvme.tier import NvmeTier
from tests.nvme.faults import FaultyFiles
from tests.nvme.rig import Rig, branch

HOLD = """
import sys
from pathlib import Path
from kvtier.tiers.contracts import Signal
from kvtier.tiers.nvme.tier import NvmeTier
tier = NvmeTier.open(Path(sys.argv[1]), capacity_bytes=1 << 20, signal=Signal())
print("open", flush=True)
sys.stdin.read()
"""


def test_a_second_owner_in_another_process_is_told_the_first_ones_pid(tmp_path: Path) -> None:
    store = tmp_path / "s"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        try:
            assert owner.stdout is not None and owner.stdout.readline() == b"open\n"
            for read_only in (False, True):
                with pytest.raises(
                    StoreInUse, match=f"in use by PID {owner.pid}; run `kvtier serve`"
                ):
                    Rig(store, read_only=read_only)
            with pytest.raises(StoreInUse):
                check_store(store)
        finally:
            os.kill(owner.pid, signal.SIGKILL)
    with Rig(store) as rig:  # the dead hold nothing
        assert rig.lookup(branch(1)) == 0


def test_a_second_owner_in_the_same_process_is_refused_too(tmp_path: Path) -> None:
    with (
        Rig(tmp_path / "s"),
        pytest.raises(StoreInUse, match=f"in use by PID {os.getpid()}"),
    ):
        Rig(tmp_path / "s")
    with Rig(tmp_path / "s") as rig:
        assert rig.tier.statistics().blocks == 0


def test_readers_share_and_keep_a_writer_out(tmp_path: Path) -> None:
    with Rig(tmp_path / "s"):
        pass
    readers = [StoreLock(tmp_path / "s", read_only=True) for _ in range(2)]
    with pytest.raises(StoreInUse, match="in use by another process"):
        StoreLock(tmp_path / "s", read_only=False)
    for reader in readers:
        reader.release()
        reader.release()
    StoreLock(tmp_path / "s", read_only=False).release()


def test_a_directory_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreUnsupported, match=r"holds 'thesis.txt' and no store"):
        Rig(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.txt"]


@pytest.mark.parametrize("read_only", [True, False])
def test_a_path_that_is_no_directory_is_refused(tmp_path: Path, read_only: bool) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreUnsupported):
        Rig(tmp_path / "file", read_only=read_only)


def test_check_names_a_path_without_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreUnsupported, match="there is no store here"):
        check_store(tmp_path)


@pytest.mark.parametrize(
    ("number", "cure"),
    [(28, "the disk is full; free some space"), (95, "cannot punch holes; use ext4"), (5, "mend")],
)
def test_a_file_system_that_cannot_serve_is_refused_with_the_cure(
    tmp_path: Path, number: int, cure: str
) -> None:
    class Incapable(Files):
        def punch(self, fd: int, offset: int, length: int) -> None:
            raise OSError(number, os.strerror(number))

    with pytest.raises(StoreUnsupported, match=cure):
        Rig(tmp_path / "s", files=Incapable())
    with Rig(tmp_path / "s") as rig:  # the refusal held on to nothing
        assert rig.tier.statistics().direct in (True, False)


def test_without_direct_io_the_tier_works_through_the_page_cache_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, os.strerror(22))
        return plain(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with Rig(tmp_path / "s", block_bytes=5001) as rig:
        rig.put(branch(7))
        assert rig.landed(branch(7)) == 7
        assert not rig.tier.statistics().direct
    assert sum("no O_DIRECT" in record.message for record in caplog.records) == 1


def test_a_tier_satisfies_the_store_protocol(tmp_path: Path) -> None:
    from kvtier.tiers.contracts import Store

    tier = NvmeTier.open(tmp_path / "s", capacity_bytes=1 << 20, signal=Signal())
    store: Store = tier
    assert store.tier == "nvme"
    store.close()


def test_an_opening_that_fails_leaves_nothing_open(tmp_path: Path) -> None:
    files, killed = FaultyFiles("fdatasync", errno.EIO), tmp_path / "killed"
    with Rig(tmp_path / "s") as rig:
        rig.put(branch(3))
        shutil.copytree(tmp_path / "s", killed)
    files.arm()
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreUnsupported, match="mend the disk"):
        Rig(killed, files=files)
    assert files.fired and sorted(os.listdir("/proc/self/fd")) == before
    with Rig(killed) as rig:
        assert rig.landed(branch(3)) == 3


def test_a_system_without_threads_to_spare_is_told_and_lets_the_store_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(tmp_path / "s") as rig:
        rig.put(branch(3))
    plain, before = Thread.start, active_count()

    def start(thread: Thread) -> None:
        if thread.name == "kvtier-nvme-io_2":
            raise RuntimeError("can't start new thread")
        plain(thread)

    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", start)
        with pytest.raises(StoreUnsupported, match="fewer io_threads"):
            Rig(tmp_path / "s")
    with Rig(tmp_path / "s", io_threads=2) as rig:
        assert rig.landed(branch(3)) == 3
    assert active_count() <= before
