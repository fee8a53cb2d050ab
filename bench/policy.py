"""Eviction policies over request traces: hits by capacity, against Belady and an infinite cache.

No time is measured. Leaf-LRU, ARC and the adaptive policy run in the real index (one tier, one
token a block); S3-FIFO and GDSF beside them as yardsticks; Belady's rule knows the future and is
the limit. A cell is the fraction of requested whole blocks that were served. Exits 1 if a cell
falls short of what is promised:

    leaf-LRU within 0.5 points of the published grid, where trace and capacity are in it
    adaptive >= max(leaf-LRU, ARC) - 1.0 point and >= max(S3-FIFO, GDSF) - 2.0 points, everywhere
    of the gap from leaf-LRU to Belady on the conversation trace, 15 / 12 / 8 % closed at
    2,000 / 4,000 / 8,000 blocks

    python -m bench.policy [TRACE ...] [--quick] [--requests N]
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from bench.harness import emit, note, table
from bench.policy_references import Gdsf, S3Fifo
from kvtier.index.experts import Recency
from kvtier.index.ghosts import GhostTree, fingerprints
from kvtier.index.words import Tokens
from kvtier.tools.replay.bounds import belady, infinite
from kvtier.tools.replay.one_tier import NAMESPACE, run_policy
from kvtier.tools.traces import TraceFile

CAPACITIES = (500, 1000, 2000, 4000, 8000, 16000, 32000, 64000)

# Published figures for leaf-LRU: fraction of whole blocks, cold start included.
PUBLISHED = {
    "mooncake_conversation": dict(
        zip(CAPACITIES, (0.044, 0.047, 0.058, 0.094, 0.193, 0.280, 0.352, 0.375), strict=True)
    ),
    "mooncake_synthetic": {2000: 0.155, 8000: 0.394, 16000: 0.555},
}
CLOSED = {2000: 0.15, 4000: 0.12, 8000: 0.08}
CLOSED_ON = "mooncake_conversation"


def run_expert(
    make: Callable[[GhostTree[None], int, int], Recency[None]],
    requests: Sequence[Tokens],
    capacity: int,
) -> int:
    tree: GhostTree[None] = GhostTree(1, 2 * capacity)
    expert = make(tree, 0, capacity)
    tree.on_split = expert.split
    hits = 0
    for clock, tokens in enumerate(requests, 1):
        if len(tokens):
            path, known = tree.path(fingerprints(NAMESPACE, tokens, 1), clock)
            hits += expert.request(path, known, clock)
            for node in tree.forget():
                expert.forgotten(node)
    return hits


RUNS: dict[str, Callable[[Sequence[Tokens], int], int]] = {
    "leaf-LRU": lambda requests, capacity: run_policy("lru", requests, capacity),
    "ARC": lambda requests, capacity: run_policy("arc", requests, capacity),
    "adaptive": lambda requests, capacity: run_policy("adaptive", requests, capacity),
    "S3-FIFO": lambda requests, capacity: run_expert(S3Fifo, requests, capacity),
    "GDSF": lambda requests, capacity: run_expert(Gdsf, requests, capacity),
    "Belady": belady,
    "infinite": lambda requests, capacity: infinite(requests),
}


@dataclass(frozen=True)
class Trace:
    """A trace to replay: whole blocks of each request."""

    name: str
    requests: tuple[Tokens, ...]

    @classmethod
    def read(cls, path: Path, most: int | None) -> "Trace":
        name = path.name.split(".")[0]
        file = TraceFile(path, complain=lambda line, what: note(f"{path}, line {line}: {what}"))
        return cls(name, tuple(request.blocks for request in islice(file, most)))


def cell(job: tuple[Trace, str, int]) -> float:
    """The hit ratio of one policy at one capacity."""
    trace, policy, capacity = job
    total = sum(map(len, trace.requests))
    return RUNS[policy](trace.requests, capacity) / max(1, total)


Grid = dict[tuple[str, str, int], float]


def shortfalls(grid: Grid, traces: Sequence[str], capacities: Sequence[int]) -> list[str]:
    """Every promise a cell breaks, in words."""
    found = []
    for name in traces:
        for capacity in capacities:
            at = {policy: grid[name, policy, capacity] for policy in RUNS}
            where = f"{name} at {capacity}: "
            published = PUBLISHED.get(name, {}).get(capacity)
            if published is not None and abs(at["leaf-LRU"] - published) > 0.005:
                found.append(f"{where}leaf-LRU {at['leaf-LRU']:.4f}, published {published}")
            for others, allowed in ((("leaf-LRU", "ARC"), 0.010), (("S3-FIFO", "GDSF"), 0.020)):
                best = max(others, key=at.__getitem__)
                if at["adaptive"] < at[best] - allowed:
                    found.append(f"{where}adaptive {at['adaptive']:.4f}, {best} {at[best]:.4f}")
            wanted = CLOSED.get(capacity) if name == CLOSED_ON else None
            if wanted is not None and closed(grid, name, capacity) < wanted:
                found.append(f"{where}{closed(grid, name, capacity):.1%} closed, not {wanted:.0%}")
    return found


def closed(grid: Grid, name: str, capacity: int) -> float:
    """The share of the gap from leaf-LRU to Belady that the adaptive policy closes."""
    lru, best = grid[name, "leaf-LRU", capacity], grid[name, "Belady", capacity]
    return (grid[name, "adaptive", capacity] - lru) / max(best - lru, 1e-9)


def main() -> None:
    """Run the grid, print it, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    parser.add_argument("--quick", action="store_true", help="1,500 requests, three capacities")
    parser.add_argument("--requests", type=int, help="only the first N requests of each trace")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    paths = options.traces or sorted(Path("../shared/traces").glob("*.jsonl*"))
    if not paths:
        parser.error("TRACE: none given, and there are none beside the project; name some")
    most = options.requests or (1500 if options.quick else None)
    capacities = CAPACITIES[:3] if options.quick else CAPACITIES
    traces = [Trace.read(path, most) for path in paths]
    jobs = [
        (trace, policy, capacity)
        for trace in traces
        for capacity in reversed(capacities)
        for policy in RUNS
    ]
    grid: Grid = {}
    with ProcessPoolExecutor(options.processes) as pool:
        for (trace, policy, capacity), ratio in zip(jobs, pool.map(cell, jobs), strict=True):
            grid[trace.name, policy, capacity] = ratio
            note(f"{trace.name} {policy} {capacity}: {ratio:.4f}")
    for trace in traces:
        rows: list[list[object]] = [[trace.name, *(str(c) for c in capacities)]]
        for policy in RUNS:
            rows.append([policy, *(f"{grid[trace.name, policy, c]:.3f}" for c in capacities)])
        rows.append(["gap closed", *(f"{closed(grid, trace.name, c):.0%}" for c in capacities)])
        table(rows)
        print()
    whole = most is None
    short = shortfalls(grid, [trace.name for trace in traces], capacities) if whole else []
    for line in short:
        print(f"short: {line}")
    emit(
        {
            "bench": "policy",
            "requests": {trace.name: len(trace.requests) for trace in traces},
            "cells": {
                trace.name: {
                    policy: {str(c): round(grid[trace.name, policy, c], 4) for c in capacities}
                    for policy in RUNS
                }
                for trace in traces
            },
            "closed": {
                trace.name: {str(c): round(closed(grid, trace.name, c), 3) for c in capacities}
                for trace in traces
            },
            "judged": whole,
            "short": short,
        }
    )
    if short:
        sys.exit(1)


if __name__ == "__main__":
    main()
