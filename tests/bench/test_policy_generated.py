"""The adaptive policy on generated traces: hard on it in ways that the public traces are not.

Small on purpose, so what is promised for whole traces is promised here with the same tolerance: one
point below the better of leaf-LRU and ARC, at sizes from a few paths to most of the working set.
"""

import pytest

from bench.policy import RUNS
from bench.policy_traces import WORKLOADS, generate

REQUESTS = 1000
CAPACITIES = (100, 300)
TOLERANCE = 0.010


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_adaptive_policy_is_never_far_below_leaf_lru_and_arc(name: str) -> None:
    requests = generate(name, REQUESTS, scale=1)
    total = sum(map(len, requests))
    for capacity in CAPACITIES:
        hits = {
            policy: RUNS[policy](requests, capacity) for policy in ("leaf-LRU", "ARC", "adaptive")
        }
        best = max(hits["leaf-LRU"], hits["ARC"])
        assert hits["adaptive"] >= best - TOLERANCE * total, f"{capacity} blocks: {hits}"


def test_where_recency_can_hit_nothing_most_of_what_can_be_hit_is_hit() -> None:
    """A loop longer than the tier."""
    requests = generate("loop", REQUESTS, scale=1)
    assert RUNS["leaf-LRU"](requests, 400) == RUNS["ARC"](requests, 400) == 0
    assert RUNS["adaptive"](requests, 400) > 0.85 * RUNS["Belady"](requests, 400)
