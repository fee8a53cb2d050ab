"""How long it takes until a DRAM slab can be used, phase by phase, in seconds a GiB.

Nothing starts faster than its memory can be written once: the kernel zeroes every page. So the
limit is a memset of the same bytes by one thread in memory that is there already, and beside it the
same in memory that is not, which faults once a page: what a slab that is not populated would cost
its first copies. Phases:

    map       memfd, size, mapping at an aligned address
    collapse  one page in each huge page touched, then MADV_COLLAPSE
    populate  MADV_POPULATE_WRITE of what is not there yet
    attach    `DramSlab.attach` of the same slab, populated into a second set of page tables

with huge pages (what `DramSlab.create` does) and without them. `create` is all of it through the
front door. Runs are interleaved; medians, after one run that does not count (in a virtual machine
the host gives memory only when it is first touched, at a tenth of the speed). Shares of huge pages
are as the kernel reports them. On a machine that is short of memory, or of unfragmented memory,
collapsing is slower. The last line is JSON.

    python -m bench.startup [--quick] [--gib N]
"""

import argparse
import mmap
import os
import time
from collections.abc import Callable

import numpy as np

from bench.harness import Sample, emit, note, table
from kvtier.tiers.dram import DramSlab
from kvtier.tiers.memory import (
    SharedMapping,
    address_of,
    advise,
    anonymous,
    collapse,
    huge_bytes,
    populate,
)

GIB = 1 << 30
BLOCK = 2 << 20


class Phases:
    """Seconds by phase, one list entry a run."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.huge: dict[str, float] = {}

    def time(self, phase: str, call: Callable[[], object]) -> object:
        begin = time.perf_counter()
        result = call()
        self.seconds.setdefault(phase, []).append(time.perf_counter() - begin)
        return result

    def median(self, phase: str) -> float:
        return Sample(tuple(self.seconds[phase])).median


def memsets(phases: Phases, nbytes: int) -> None:
    """The limit, and what the first copies would pay."""
    there = np.frombuffer(anonymous(nbytes), np.uint8)
    there[:] = 1
    phases.time("memset", lambda: there.fill(2))
    small = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise(small, mmap.MADV_NOHUGEPAGE)
    fresh = np.frombuffer(small, np.uint8)
    phases.time("memset, fresh 4 KiB pages", lambda: fresh.fill(2))


def parts(phases: Phases, nbytes: int, *, huge: bool) -> None:
    """What `DramSlab.create` does, taken apart."""
    name = "huge" if huge else "4 KiB"

    def make() -> SharedMapping:
        fd = os.memfd_create("kvtier-bench", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        mapping = SharedMapping(fd, nbytes)
        os.close(fd)
        advise(mapping, mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        return mapping

    mapping = phases.time(f"map, {name}", make)
    assert isinstance(mapping, SharedMapping)
    if huge:
        phases.time("collapse, huge", lambda: collapse(mapping, 0, nbytes))
    phases.time(f"populate, {name}", lambda: populate(mapping, 0, nbytes, fresh=True))
    phases.huge[f"populate, {name}"] = huge_bytes(address_of(mapping), nbytes) / nbytes


def whole(phases: Phases, nbytes: int) -> None:
    """Through the front door, then a second mapping as an engine beside a sidecar makes it."""
    slab = phases.time("create", lambda: DramSlab.create(nbytes // BLOCK, BLOCK))
    assert isinstance(slab, DramSlab)
    phases.huge["create"] = slab.huge_bytes() / slab.geometry.nbytes
    fd = os.dup(slab.fd)
    guest = phases.time("attach", lambda: DramSlab.attach(fd, populate=True))
    assert isinstance(guest, DramSlab)
    phases.huge["attach"] = guest.huge_bytes() / guest.geometry.nbytes
    guest.close()
    slab.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="128 MiB, three runs")
    parser.add_argument("--gib", type=int, default=4, help="size of the slab (4)")
    options = parser.parse_args()
    nbytes, runs = (128 << 20, 3) if options.quick else (options.gib * GIB, 7)
    phases = Phases()
    for run in range(runs + 1):
        note(f"run {run} of {runs}" if run else "warming up")
        turns: list[Callable[[], None]] = [
            lambda: memsets(phases, nbytes),
            lambda: parts(phases, nbytes, huge=True),
            lambda: parts(phases, nbytes, huge=False),
            lambda: whole(phases, nbytes),
        ]
        for turn in turns if run % 2 == 0 else turns[::-1]:
            turn()
        if run == 0:
            phases.seconds.clear()
    limit = phases.median("memset")
    rows: list[list[object]] = [["phase", "s/GiB", "GB/s", "of the limit", "on huge pages"]]
    for phase in sorted(phases.seconds):
        seconds = phases.median(phase)
        share = f"{phases.huge[phase]:.0%}" if phase in phases.huge else ""
        per_gib = seconds * GIB / nbytes
        rows.append([phase, per_gib, nbytes / seconds / 1e9, f"{seconds / limit:.2f}x", share])
    table(rows)
    emit(
        {
            "bench": "startup",
            "nbytes": nbytes,
            "seconds_per_gib": {
                phase: round(phases.median(phase) * GIB / nbytes, 5) for phase in phases.seconds
            },
            "huge_share": {phase: round(share, 3) for phase, share in phases.huge.items()},
            "create_vs_memset": round(phases.median("create") / limit, 2),
        }
    )


if __name__ == "__main__":
    main()
