"""What `bench.nvme_scale` measures in processes of their own: a store opened, asked, filled.

    python -m bench.nvme_probe {open|hit|evict} STORE NUM_BLOCKS SEED COUNT

Prints one JSON line. It imports only what a process that serves from a store needs, so that its
start is a server's start and its memory is the store's.
"""

import json
import sys
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from bench.nvme_client import NO_LIMIT, Branch, Client
from bench.nvme_corpus import (
    BLOCK_BYTES,
    EXTENT_BLOCKS,
    GEOMETRY,
    PROMPT_BLOCKS,
    prompts,
    stamp,
    stamped,
)
from kvtier.tiers.dram import DramSlab

_WARM_PUTS = 8


@dataclass(frozen=True)
class Job:
    """The command line: a store, how many blocks it was built of, a seed, how many calls."""

    store: Path
    num_blocks: int
    seed: int
    count: int


def probe_open(job: Job) -> dict[str, object]:
    """Open; then ask for `count` random whole prompts, twice.

    The first pass starts with nothing of the catalogue in memory; memory is read before the
    opening, after it, and after the first pass. The second pass is the steady state.
    """
    slab = DramSlab.create(1, BLOCK_BYTES)
    before = resident()
    begin = time.perf_counter()
    client = Client(job.store, slab, NO_LIMIT)
    open_s = time.perf_counter() - begin
    opened = resident()
    first = _lookups(client, job, job.seed)
    after = resident()
    second = _lookups(client, job, job.seed + 1)
    client.close()
    return {
        "open_s": open_s,
        "opened_mib": _added(opened, before),
        "asked_mib": _added(after, before),
        "first_pass_s": first,
        "steady_s": second,
    }


def probe_hit(job: Job) -> dict[str, object]:
    """Open, find one prompt, and bring it into DRAM; says when, on the monotonic clock."""
    slab = DramSlab.create(PROMPT_BLOCKS, BLOCK_BYTES)
    prompt = next(prompts(job.num_blocks, job.seed))
    client = Client(job.store, slab, NO_LIMIT)
    _expect_whole(client.lookup(prompt))
    client.fetch(prompt)
    landed_at = time.monotonic()
    if not stamped(slab, client.slots, prompt.keys):
        raise SystemExit("bench/nvme: wrong bytes were served")
    client.close()
    return {"landed_at": landed_at}


def probe_evict(job: Job) -> dict[str, object]:
    """Put `count` extents of four blocks into a store that is full to the byte."""
    slab = DramSlab.create(EXTENT_BLOCKS, BLOCK_BYTES)
    client = Client(job.store, slab, NO_LIMIT)
    used = client.tier.statistics().used_bytes
    client.close()
    client = Client(job.store, slab, used, GEOMETRY)
    seconds = []
    for _ in range(_WARM_PUTS + job.count):
        branch = Branch.make(None, EXTENT_BLOCKS)
        stamp(slab, client.slots, branch.keys)
        begin = time.perf_counter()
        client.put(branch)
        seconds.append(time.perf_counter() - begin)
    statistics = client.tier.statistics()
    client.close()
    if statistics.evicted_blocks < job.count or statistics.used_bytes > used:
        raise SystemExit(f"bench/nvme: the full store did not evict: {statistics}")
    return {"put_s": seconds[_WARM_PUTS:]}


def resident() -> dict[str, float]:
    """MiB of this process in memory: all, its own, and pages of mapped files."""
    names = {"VmRSS": "all", "RssAnon": "own", "RssFile": "files"}
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {short: int(fields[name].split()[0]) / 1024 for name, short in names.items()}


def _added(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in before}


def _lookups(client: Client, job: Job, seed: int) -> list[float]:
    seconds = []
    for prompt in islice(prompts(job.num_blocks, seed), job.count):
        begin = time.perf_counter()
        held = client.lookup(prompt)
        seconds.append(time.perf_counter() - begin)
        _expect_whole(held)
    return seconds


def _expect_whole(held: int) -> None:
    if held != PROMPT_BLOCKS:
        raise SystemExit(
            f"bench/nvme: the store holds {held} of a prompt's {PROMPT_BLOCKS} blocks: many runs "
            "have evicted too much of it; remove its directory, so that it is built again"
        )


_PROBES = {"open": probe_open, "hit": probe_hit, "evict": probe_evict}


def main(arguments: list[str]) -> None:
    """Run one probe and print what it found."""
    kind, store, num_blocks, seed, count = arguments
    job = Job(Path(store), int(num_blocks), int(seed), int(count))
    print(json.dumps(_PROBES[kind](job)))


if __name__ == "__main__":
    main(sys.argv[1:])
