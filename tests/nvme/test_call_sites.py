"""A fault at every call site in turn: the n-th call of each kind fails, for every n there is.

Whatever fails: no wrong byte, no exception out of the tier's face, exact usage after reopening, a
store that checks out, and a tier that takes puts again once the drive does.
"""

import errno
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvtier.tiers.errors import StoreUnsupported
from kvtier.tiers.nvme.catalogue import Catalogue
from kvtier.tiers.nvme.check import check_store
from tests.nvme.faults import FaultyFiles
from tests.nvme.rig import Rig, branch, disk_takes, flip, num_landed, segment_files

CAPACITY = 160 << 10
FOR_EVER = 1 << 30
MOVES = ("preadv", "pwritev")
FAULTS: tuple[int | str, ...] = (errno.ENOSPC, errno.EIO, "short", "none")
SAMPLE = 24
"""Every so many-th case runs by default; `-m stress` runs them all."""


@pytest.fixture
def store() -> Iterator[Path]:
    """A directory in memory, where syncs cost nothing."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield Path(path) / "s"


def fail_commits(files: FaultyFiles, patch: pytest.MonkeyPatch) -> None:
    """LMDB's transactions fail as `files` says, too, under the name "commit"."""
    plain = Catalogue.commit

    def commit(self: Catalogue, change: Any) -> Any:
        return files.run("commit", lambda: plain(self, change))

    patch.setattr(Catalogue, "commit", commit)


def opened(store: Path, files: FaultyFiles) -> Rig | None:
    """The tier, or None where it says that it can't open this store."""
    try:
        return Rig(store, files=files, capacity_bytes=CAPACITY, io_threads=1)
    except StoreUnsupported:
        return None


def rot(store: Path) -> None:
    """Flip a bit near the end of the newest segment, if it is still there and has an end."""
    for path in segment_files(store)[-1:]:
        with suppress(FileNotFoundError):  # what was evicted goes a little later
            if size := path.stat().st_size:
                flip(path, size - 4096)


def work(rig: Rig) -> None:
    """Puts that fill several segments and overflow the store, hits, a rotten block."""
    trunk = branch(7)
    rig.put(trunk.part(0, 4))
    rig.put(trunk)
    rig.put(branch(4, 1, parent=trunk.keys[2]))
    assert rig.landed(trunk) <= 7 and rig.lookup(trunk) <= 7
    for seed in range(2, 6):
        rig.put(branch(5, seed))
    rot(rig.path)
    for seed in range(2, 6):
        rig.landed(branch(5, seed))  # the rig compares every byte
    rig.put(branch(5, 6))
    assert rig.tier.statistics().used_bytes <= CAPACITY


def live(store: Path, files: FaultyFiles) -> None:
    """Two lives of one store under faults, then one without."""
    files.arm()
    for _ in range(2):
        rig = opened(store, files)
        if rig is not None:
            with rig:
                work(rig)
                rig.pass_time()
                rig.put(branch(2, 7))
    files.arm(False)
    with Rig(store, files=files, capacity_bytes=CAPACITY, io_threads=1) as rig:
        for seed in range(8):
            rig.landed(branch(7 if seed == 0 else 5, seed))
        assert num_landed(rig.put(branch(5, 9))) == rig.landed(branch(5, 9)) == 5
        assert rig.tier.statistics().state == "ok"
        used = rig.tier.statistics().used_bytes
    report = check_store(store)
    rot = [line for line in report.problems if not line.startswith("record ")]
    assert rot == [], rot
    assert report.leftover_bytes == 0
    assert report.bytes == used <= CAPACITY and disk_takes(store, at_most=used)


def cases(counts: dict[str, int]) -> list[tuple[str, int | str, int, int]]:
    """`(call, fault, at, times)` of everything that can be made to fail."""
    found: list[tuple[str, int | str, int, int]] = []
    for call, count in sorted(counts.items()):
        for fault in FAULTS:
            if isinstance(fault, str) and call not in MOVES:
                continue
            found += [(call, fault, at, 1) for at in range(count)]
            found += [(call, fault, at, FOR_EVER) for at in range(0, count, 3)]
    return found


def run_cases(store: Path, monkeypatch: pytest.MonkeyPatch, stride: int) -> int:
    """Run every `stride`-th case; how many faults were injected."""
    fired = 0
    plain = FaultyFiles("nothing", 0, direct=False)
    with monkeypatch.context() as patch:
        fail_commits(plain, patch)
        live(store, plain)
    everything = cases(plain.seen)
    assert {case[0] for case in everything} >= {
        *("open", "preadv", "pwritev", "fdatasync", "allocate", "punch", "truncate", "unlink"),
        *("sync_directory", "commit"),
    }
    for number, (call, fault, at, times) in enumerate(everything[::stride]):
        files = FaultyFiles(call, fault, at=at, times=times, direct=False)
        with monkeypatch.context() as patch:
            fail_commits(files, patch)
            try:
                live(store.with_name(f"s{number}"), files)
            except BaseException as error:
                error.add_note(f"{call} fails with {fault}, call {at}, {times} times")
                raise
        fired += files.fired > 0
    return fired


def test_a_fault_at_a_sample_of_all_call_sites_costs_misses_only(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_cases(store, monkeypatch, SAMPLE) > 15


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_a_fault_at_every_call_site_costs_misses_only(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_cases(store, monkeypatch, 1) > 400
