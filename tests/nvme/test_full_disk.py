"""A disk that is really full: a small tmpfs, where we may mount one; files that may not grow."""

import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from tests.nvme.rig import Rig, branch, num_landed
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.settings import Geometry

store, limited = Path(sys.argv[1]), sys.argv[2] == "limit"
hog = store.parent / "hog"
GEOMETRY = Geometry(extent_bytes=16 << 10, group_bytes=32 << 10, segment_bytes=1 << 30)

def fill():
    if limited:
        now = max(path.stat().st_size for path in store.rglob("*") if path.is_file())
        resource.setrlimit(resource.RLIMIT_FSIZE, (now, resource.RLIM_INFINITY))
        return
    with hog.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

def make_room():
    if limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    hog.unlink(missing_ok=True)

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with Rig(store, capacity_bytes=1 << 30, geometry=GEOMETRY) as rig:
    old = branch(6)
    assert num_landed(rig.put(old)) == 6
    fill()
    flight = rig.put(branch(40, 1))
    statistics = rig.tier.statistics()
    assert num_landed(flight) < 40 and statistics.refused_blocks > 0, statistics
    assert statistics.state in (("failing",) if limited else ("full",)), statistics
    assert rig.landed(old) == 6  # hits go on
    assert num_landed(rig.put(branch(3, 2))) == 0 and rig.lookup(old) == 6
    make_room()
    rig.pass_time()
    assert num_landed(rig.put(branch(40, 1))) == rig.landed(branch(40, 1)) == 40
    assert rig.tier.statistics().state == "ok"
    used, direct = rig.tier.statistics().used_bytes, rig.tier.statistics().direct
report = check_store(store)
assert report.ok and report.bytes == used, report
with Rig(store, capacity_bytes=1 << 30) as rig:
    assert rig.landed(old) == 6 and rig.landed(branch(40, 1)) == 40
print("direct" if direct else "buffered")
"""

IN_A_TMPFS = 'mount -t tmpfs -o size=3m,mode=700 tmpfs "$1" && exec "$2" -c "$3" "$1/s" tmpfs'


def run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def may_mount(directory: Path) -> bool:
    """Whether a tmpfs can be mounted in a namespace of our own."""
    mount = f'mount -t tmpfs -o size=1m tmpfs "{directory}"'
    try:
        return run(["unshare", "-Urm", "sh", "-c", mount]).returncode == 0
    except OSError:
        return False


def test_a_store_on_a_disk_that_fills_up_serves_on_and_takes_puts_again(tmp_path: Path) -> None:
    if not may_mount(tmp_path):
        pytest.skip("no tmpfs can be mounted in a user namespace here; the file limit is tested")
    shell = ["unshare", "-Urm", "sh", "-c", IN_A_TMPFS, "sh", str(tmp_path), sys.executable, CHILD]
    child = run(shell)
    assert child.returncode == 0, child.stderr
    assert child.stdout in ("direct\n", "buffered\n")


def test_a_store_whose_files_may_not_grow_serves_on_and_takes_puts_again(tmp_path: Path) -> None:
    child = run([sys.executable, "-c", CHILD, str(tmp_path / "s"), "limit"])
    assert child.returncode == 0, child.stderr
