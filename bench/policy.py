"""Eviction policies over request traces: hits by capacity, against Belady and an infinite cache.

No time is measured. Leaf-LRU, ARC and the adaptive policy run in the real index (one tier, one
token a block); S3-FIFO and GDSF beside them as yardsticks; Belady's rule knows the future and is
the limit. A cell is the fraction of requested whole blocks that were served. Exits 1 if a cell
falls short of what is promised:

    leaf-LRU within 0.5 points of the published grid, where trace and capacity are in it (a trace is
    known by its content, not by its name)
    adaptive >= max(leaf-LRU, ARC) - 1.0 point and >= max(S3-FIFO, GDSF) - 2.0 points, everywhere
    of the gap from leaf-LRU to Belady on the conversation trace, 15 / 12 / 8 % closed at
    2,000 / 4,000 / 8,000 blocks

Without TRACE, every trace of `../shared/traces`, seen from the project's root. With `--log` every
finished cell is written to FILE at once, and a run that was stopped goes on from there. Generated
traces are judged by the second line alone.

With `--look-ahead` the adaptive policy is run once more with the next 16 and 64 requests
known, as a queue of so many would show them; this is reported apart, and nothing is promised.

    python -m bench.policy [TRACE ...] [--generated] [--quick] [--requests N] [--log FILE]
                           [--look-ahead] [--capacities BLOCKS ...]
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from bench.harness import emit, note, table
from bench.policy_log import CellLog, code_digest
from bench.policy_references import Gdsf, S3Fifo
from bench.policy_traces import WORKLOADS, generate
from kvtier.index.ghosts import GhostTree, fingerprints
from kvtier.index.recency import Recency
from kvtier.index.words import Tokens
from kvtier.tools.errors import BadTrace
from kvtier.tools.replay.bounds import belady, infinite
from kvtier.tools.replay.one_tier import NAMESPACE, run_policy
from kvtier.tools.traces import TraceFile

ROOT = Path(__file__).resolve().parents[1]
CAPACITIES = (500, 1000, 2000, 4000, 8000, 16000, 32000, 64000)

GENERATED_REQUESTS = 6000

# Content of the two traces that have published figures (Mooncake, blocks of 512 tokens).
CONVERSATION = "0e979490e9d13025"
SYNTHETIC = "1bf53dc0c0366a26"

# Published figures for leaf-LRU: fraction of whole blocks, cold start included.
PUBLISHED = {
    CONVERSATION: dict(
        zip(CAPACITIES, (0.044, 0.047, 0.058, 0.094, 0.193, 0.280, 0.352, 0.375), strict=True)
    ),
    SYNTHETIC: {2000: 0.155, 8000: 0.394, 16000: 0.555},
}
CLOSED = {CONVERSATION: {2000: 0.15, 4000: 0.12, 8000: 0.08}}


def run_expert(
    make: Callable[[GhostTree, int], Recency], requests: Sequence[Tokens], capacity: int
) -> int:
    tree = GhostTree(2 * capacity)
    expert = make(tree, capacity)
    hits = 0
    for clock, tokens in enumerate(requests, 1):
        if len(tokens):
            path, known = tree.path(fingerprints(NAMESPACE, tokens, 1), clock)
            hits += expert.request(path, known, clock)
            tree.forget()
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

LOOK_AHEAD = (16, 64)


def run_ahead(depth: int, requests: Sequence[Tokens], capacity: int) -> int:
    return run_policy("adaptive", requests, capacity, look_ahead=depth)


# Reported apart: these see what is in the queue.
AHEAD: dict[str, Callable[[Sequence[Tokens], int], int]] = {
    f"adaptive + next {depth}": partial(run_ahead, depth) for depth in LOOK_AHEAD
}


@dataclass(frozen=True)
class Trace:
    """A trace to replay: whole blocks of each request. `digest` tells equal content apart from
    equal names."""

    name: str
    requests: tuple[Tokens, ...]

    @property
    def digest(self) -> str:
        digest = blake2b(digest_size=8)
        for blocks in self.requests:
            digest.update(len(blocks).to_bytes(4, "little") + blocks.tobytes())
        return digest.hexdigest()

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.requests))

    @classmethod
    def read(cls, path: Path, most: int | None) -> "Trace":
        """Raises `BadTrace` if the file is not one."""
        name = path.name.split(".")[0]
        file = TraceFile(path, complain=lambda line, what: note(f"{path}, line {line}: {what}"))
        return cls(name, tuple(request.blocks for request in islice(file, most)))


def find_traces(named: Sequence[Path]) -> list[Path]:
    """The files named, or those that stand beside the project. Raises `BadTrace` if there are
    none."""
    folder = ROOT.parent / "shared" / "traces"
    paths = list(named) or sorted(folder.glob("*.jsonl*"))
    if not paths:
        raise BadTrace(f"TRACE: none given, and none in {folder}; name some, or try --generated")
    return paths


def with_own_names(traces: Sequence[Trace]) -> list[Trace]:
    """The traces, numbered where several have one name."""
    named: list[Trace] = []
    for trace in traces:
        same = sum(other.name == trace.name for other in traces[: len(named)])
        named.append(Trace(f"{trace.name}-{same + 1}", trace.requests) if same else trace)
    return named


def count_hits(job: tuple[Trace, str, int]) -> int:
    """Blocks one policy hits at one capacity."""
    trace, policy, capacity = job
    return (RUNS | AHEAD)[policy](trace.requests, capacity)


Grid = dict[tuple[str, str, int], float]
"""Hit ratio by trace name, policy and capacity."""


def fill_grid(
    traces: Sequence[Trace],
    capacities: Sequence[int],
    policies: Sequence[str],
    log: CellLog,
    processes: int,
) -> Grid:
    """Every cell: out of the log, or computed and put there."""
    cells = {
        (trace.digest, policy, capacity): (trace, policy, capacity)
        for trace in traces
        for capacity in reversed(capacities)
        for policy in policies
    }
    missing = {cell: job for cell, job in cells.items() if cell not in log}
    note(f"{len(cells)} cells, {len(missing)} of them to be computed")
    with ProcessPoolExecutor(processes) as pool:
        running = {pool.submit(count_hits, job): cell for cell, job in missing.items()}
        for number, done in enumerate(as_completed(running), 1):
            cell = running[done]
            log.put(cell, done.result())
            trace, policy, capacity = missing[cell]
            ratio = log[cell] / max(1, trace.num_blocks)
            note(f"{number}/{len(missing)} {trace.name} {policy} {capacity}: {ratio:.4f}")
    return {
        (trace.name, policy, capacity): log[trace.digest, policy, capacity]
        / max(1, trace.num_blocks)
        for trace in traces
        for capacity in capacities
        for policy in policies
    }


def shortfalls(grid: Grid, traces: Sequence[Trace], capacities: Sequence[int]) -> list[str]:
    """Every promise a cell breaks, in words."""
    found = []
    for trace in traces:
        published, to_close = PUBLISHED.get(trace.digest, {}), CLOSED.get(trace.digest, {})
        for capacity in capacities:
            at = {policy: grid[trace.name, policy, capacity] for policy in RUNS}
            where = f"{trace.name} at {capacity}: "
            if capacity in published and abs(at["leaf-LRU"] - published[capacity]) > 0.005:
                found.append(
                    f"{where}leaf-LRU {at['leaf-LRU']:.4f}, published {published[capacity]}"
                )
            for others, allowed in ((("leaf-LRU", "ARC"), 0.010), (("S3-FIFO", "GDSF"), 0.020)):
                best = max(others, key=at.__getitem__)
                if at["adaptive"] < at[best] - allowed:
                    found.append(f"{where}adaptive {at['adaptive']:.4f}, {best} {at[best]:.4f}")
            share = closed(grid, trace.name, capacity)
            if capacity in to_close and share < to_close[capacity]:
                found.append(f"{where}{share:.1%} closed, not {to_close[capacity]:.0%}")
    return found


def closed(grid: Grid, name: str, capacity: int, policy: str = "adaptive") -> float:
    """The share of the gap from leaf-LRU to Belady that a policy closes."""
    lru, best = grid[name, "leaf-LRU", capacity], grid[name, "Belady", capacity]
    return (grid[name, policy, capacity] - lru) / max(best - lru, 1e-9)


def report(grid: Grid, traces: Sequence[Trace], capacities: Sequence[int]) -> None:
    """The whole grid in one table."""
    rows: list[list[object]] = [["trace", "policy", *(str(c) for c in capacities)]]
    for trace in traces:
        for policy in RUNS:
            ratios = (f"{grid[trace.name, policy, c]:.3f}" for c in capacities)
            rows.append([trace.name, policy, *ratios])
        shares = (f"{closed(grid, trace.name, c):.0%}" for c in capacities)
        rows.append([trace.name, "gap closed", *shares])
    table(rows)


def report_ahead(grid: Grid, traces: Sequence[Trace], capacities: Sequence[int]) -> None:
    """What the adaptive policy gains from a look at the queue, and of the gap, what it closes."""
    rows: list[list[object]] = [["trace", "policy", *(str(c) for c in capacities)]]
    for trace in traces:
        for policy in ("adaptive", *AHEAD):
            shares = (
                f"{grid[trace.name, policy, c]:.3f} ({closed(grid, trace.name, c, policy):.0%})"
                for c in capacities
            )
            rows.append([trace.name, policy, *shares])
    table(rows)


def main() -> None:
    """Run the grid, print it, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    parser.add_argument("--generated", action="store_true", help="generated traces; no TRACE")
    parser.add_argument("--look-ahead", action="store_true", help="also with the queue in sight")
    parser.add_argument("--capacities", type=int, nargs="+", metavar="BLOCKS", help="only these")
    parser.add_argument("--quick", action="store_true", help="1,500 requests, three capacities")
    parser.add_argument("--requests", type=int, help="only the first N requests of each trace")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep finished cells here")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if options.generated and options.traces:
        parser.error("--generated takes no TRACE; run them apart")
    most = options.requests or (1500 if options.quick else None)
    capacities = options.capacities or (CAPACITIES[:3] if options.quick else CAPACITIES)
    policies = [*RUNS, *(AHEAD if options.look_ahead else ())]
    code = code_digest(
        path
        for part in ("index/*.py", "bench/policy_references.py", "tools/replay/*.py")
        for path in ROOT.glob(part)
    )
    try:
        if options.generated:
            length = most or GENERATED_REQUESTS
            traces = [Trace(name, generate(name, length)) for name in WORKLOADS]
        else:
            paths = find_traces(options.traces)
            traces = with_own_names([Trace.read(path, most) for path in paths])
        log = CellLog(options.log, code)
    except (BadTrace, OSError, ValueError) as error:
        parser.error(str(error))
    with log:
        grid = fill_grid(traces, capacities, policies, log, options.processes)
    report(grid, traces, capacities)
    if options.look_ahead:
        print()
        report_ahead(grid, traces, capacities)
    whole = most is None  # the start of a trace is mostly cold start: nothing is promised for it
    short = shortfalls(grid, traces, capacities) if whole else []
    for line in short:
        print(f"short: {line}")
    emit(
        {
            "bench": "policy",
            "requests": {trace.name: len(trace.requests) for trace in traces},
            "cells": {
                trace.name: {
                    policy: {str(c): round(grid[trace.name, policy, c], 4) for c in capacities}
                    for policy in policies
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
