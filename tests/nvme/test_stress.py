"""Threads that put, fetch, look up and overflow one store at once, while bytes rot under it."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.tiers.nvme.check import check_store
from tests.nvme.rig import Rig, branch, flip, segment_files


def work(rig: Rig, seed: int, steps: int, rot: bool) -> int:
    """Random requests; the rig checks every byte that lands. Returns how many landed."""
    chance, landed = random.Random(seed), 0
    for _ in range(steps):
        blocks = branch(9, chance.randrange(6))
        action = chance.randrange(4)
        if action == 0:
            rig.put(blocks.part(0, chance.randrange(1, 10)))
        elif action == 1:
            rig.put(branch(4, chance.randrange(6, 12), parent=blocks.keys[chance.randrange(9)]))
        elif action == 2:
            start = chance.randrange(9)
            landed += rig.landed(blocks.part(start, 9))
        else:
            rig.lookup(blocks)
        if rot and chance.random() < 0.05:
            decay(rig.path, chance)
    return landed


def decay(store: Path, chance: random.Random) -> None:
    """Flip one bit somewhere in the segments."""
    for victim in segment_files(store)[-1:]:  # never an old one, which may be going just now
        if size := victim.stat().st_size:
            flip(victim, chance.randrange(size), 1 << chance.randrange(8))


def run(store: Path, *, steps: int, rot: bool) -> int:
    with Rig(store, capacity_bytes=400 << 10) as rig, ThreadPoolExecutor(4) as threads:
        jobs = [threads.submit(work, rig, seed, steps, rot and seed == 0) for seed in range(4)]
        landed = sum(job.result() for job in jobs)
        assert rig.tier.statistics().used_bytes <= 400 << 10
    return landed


def test_requests_from_many_threads_at_once_stay_right(tmp_path: Path) -> None:
    assert run(tmp_path / "s", steps=30, rot=False) > 0
    report = check_store(tmp_path / "s")
    assert report.ok, report.problems


@pytest.mark.stress
def test_many_requests_over_rotting_bytes_stay_right(tmp_path: Path) -> None:
    assert run(tmp_path / "s", steps=2000, rot=True) > 0
    with Rig(tmp_path / "s") as rig:
        for seed in range(6):
            rig.fetch(branch(9, seed))
    problems = check_store(tmp_path / "s").problems  # rot that nobody has read yet
    assert all(line.startswith("record ") for line in problems)
