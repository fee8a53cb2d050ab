"""SIGKILL at random instants and at chosen calls: no wrong byte, nothing published is lost."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer

import pytest

from kvtier.tiers.nvme.check import check_store
from tests.nvme import crash_child
from tests.nvme.rig import Rig, branch, disk_takes

ROOMY = 1 << 30
TIGHT = 300 << 10
FIRST = 1000


def run_child(
    store: Path, first: int, capacity: int, *fate: str, kill: tuple[int, float] = (0, 60.0)
) -> dict[int, int]:
    """Run the child until it is dead. Returns how many blocks of each seed it said had landed.

    `kill`: after so many answers, and then so many seconds.
    """
    root = Path(crash_child.__file__).parents[2]
    child_py = [sys.executable, "-m", "tests.nvme.crash_child", str(store)]
    command = [*child_py, str(first), str(capacity), *fate]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        lines = [child.stdout.readline() for _ in range(kill[0])]
        timer = Timer(kill[1], os.kill, (child.pid, signal.SIGKILL))
        timer.start()
        lines += child.stdout.readlines()
        timer.cancel()
        timer.join()
    assert child.returncode == -signal.SIGKILL
    landed: dict[int, int] = {}
    for line in lines:
        if line.endswith("\n"):
            seed, blocks = line.split()
            landed[int(seed)] = int(blocks)
    return landed


def judge(store: Path, capacity: int, landed: dict[int, int]) -> None:
    """The store checks out before and after reopening, and serves what it must, byte for byte."""
    report = check_store(store)
    assert report.ok, report.problems
    with Rig(store, capacity_bytes=capacity) as rig:
        used = rig.tier.statistics().used_bytes
        assert used <= capacity and disk_takes(store, at_most=used)
        for seed, blocks in landed.items():
            served = rig.landed(branch(7, seed))  # the rig compares every byte
            assert served >= blocks or capacity == TIGHT
    report = check_store(store)
    assert report.ok, report.problems
    assert report.bytes == used and report.leftover_bytes == 0


@pytest.mark.parametrize("capacity", [ROOMY, TIGHT])
def test_a_store_survives_being_killed_at_random_instants(tmp_path: Path, capacity: int) -> None:
    chance, landed = random.Random(capacity), dict[int, int]()
    for turn in range(5):
        kill = (chance.randrange(8), chance.uniform(0.0, 0.02))
        landed |= run_child(tmp_path / "s", FIRST * turn, capacity, kill=kill)
        judge(tmp_path / "s", capacity, landed)
    assert landed


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("call", "count"),
    [("allocate", 2), ("pwritev", 3), ("fdatasync", 2), ("commit", 3), ("punch", 2), ("unlink", 1)],
)
def test_a_store_survives_being_killed_at_a_chosen_call(
    tmp_path: Path, call: str, when: str, count: int
) -> None:
    capacity = TIGHT if call in ("punch", "unlink") else ROOMY
    landed = run_child(tmp_path / "s", 0, capacity, call, when, str(count))
    judge(tmp_path / "s", capacity, landed)
