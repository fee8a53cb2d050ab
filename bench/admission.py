"""What goes to NVMe: everything, second touch or learned reuse, through the live cache, on traces.

`kvtier replay`'s world: HBM, DRAM and a store of leaf-LRU, leaf-LRU in both pools, nothing written
back, so that what is written is what eviction chose. Beside the traces a generated one of
documents: 30,000, drawn two a request by a power law (0.95), of 4 to 39 blocks. Each trace ends at
midnight; the day's budget of `learned, half` is half of what `all` writes, that of `learned, even`
what second touch writes. Prints a table, then one JSON line.

    python -m bench.admission [TRACE ...] [--requests N] [--no-documents]
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.harness import emit, note, table
from bench.policy import find_traces
from kvtier.index.admission import Admission, Marks, Mask
from kvtier.index.words import Tokens
from kvtier.tiers.nvme.budget import DAY_S
from kvtier.tools.replay.run import Outcome, Replay
from kvtier.tools.replay.world import Setup
from kvtier.tools.traces import TraceFile

HBM, DRAM = 1000, 4000
NVME = {"mooncake_synthetic": 16_000, "agentic_coding": 16_000}
NVME_OTHERS = 32_000

Requests = list[tuple[float, Tokens]]


class SecondTouch(Admission):
    """Writes what has been asked for again."""

    def worth(self, marks: Marks) -> Mask:
        slots = self._slots(marks)
        return np.asarray((self._marks[slots] == marks) & (self._touches[slots] > 0), np.bool_)


def documents(requests: int) -> Iterator[tuple[float, Tokens]]:
    """Two documents a request and two blocks that are its own, one request a second."""
    rng = np.random.default_rng(0)
    weights = np.arange(1, 30_001) ** -0.95
    weights /= weights.sum()
    sizes = rng.integers(4, 40, len(weights))
    numbers: dict[tuple[int, int, int], int] = {}
    for moment in range(requests):
        drawn = rng.choice(len(weights), 2, p=weights).tolist()
        path: list[int] = []
        for document, size in [*((d, int(sizes[d])) for d in drawn), (-1 - moment, 2)]:
            for place in range(size):
                above = path[-1] if path else -1
                path.append(numbers.setdefault((above, document, place), len(numbers)))
        yield float(moment), np.array(path, np.int32)


def run(requests: Requests, setup: Setup, admission: Admission | None = None) -> Outcome:
    replay = Replay(setup, admission=admission)
    for moment, blocks in requests:
        replay.request(moment, blocks)
    return replay.outcome()


def measure(name: str, requests: Requests) -> dict[str, list[float]]:
    """Per rule: share of blocks hit, blocks written a block asked."""
    midnight = (requests[-1][0] // DAY_S + 1) * DAY_S
    requests = [(moment + midnight - requests[-1][0] - 1, path) for moment, path in requests]
    nvme = NVME.get(name, NVME_OTHERS)
    setup = Setup(HBM, DRAM, nvme)
    learned = Setup(HBM, DRAM, nvme, nvme_admission="learned")
    everything = run(requests, setup)
    second = run(requests, setup, SecondTouch(DRAM, nvme))

    def within(budget: int) -> Outcome:
        return run(requests, replace(learned, write_budget_bytes=max(1, budget)))

    outcomes = {
        "all": everything,
        "second touch": second,
        "learned": run(requests, learned),
        "learned, half": within(everything.moved["dram > nvme"] // 2),
        "learned, even": within(second.moved["dram > nvme"]),
    }
    found = {}
    for rule, outcome in outcomes.items():
        hits = sum(outcome.hits.values()) / outcome.asked
        found[rule] = [round(hits, 4), round(outcome.moved["dram > nvme"] / outcome.asked, 4)]
        note(f"{name}, {rule}: {found[rule]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    parser.add_argument("--requests", type=int, default=12_000, help="only the first of each")
    parser.add_argument("--no-documents", action="store_true", help="not the generated trace")
    options = parser.parse_args()
    most = options.requests
    paths = find_traces(options.traces)
    found = {}
    for path in paths:
        name = path.name.split(".")[0]
        requests = [(r.timestamp_s, r.blocks) for r in TraceFile(path) if len(r.blocks)]
        found[name] = measure(name, requests[:most])
    if not options.no_documents:
        found["documents"] = measure("documents", list(documents(most)))
    rules = list(next(iter(found.values())))
    rows: list[list[object]] = [["hit, written a block", *rules]]
    for name, by_rule in found.items():
        rows.append([name, *(f"{hit:.3f}, {cost:.3f}" for hit, cost in by_rule.values())])
    table(rows)
    emit({"bench": "admission", "requests": most, "hbm": HBM, "dram": DRAM, "cells": found})


if __name__ == "__main__":
    main()
