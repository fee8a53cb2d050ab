"""The yardsticks of `bench.policy`, and its verdict."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.policy import AHEAD, CLOSED, PUBLISHED, RUNS, Trace, closed, shortfalls
from bench.policy_traces import chained
from kvtier.index.policies import POLICIES
from kvtier.tools.replay.bounds import belady, infinite
from kvtier.tools.replay.one_tier import run_policy

CHAINS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=30)


@settings(deadline=None, max_examples=40, derandomize=True)  # greedy on a tree: no theorem
@given(CHAINS, st.integers(5, 12))
def test_nobody_hits_more_than_belady_and_belady_not_more_than_infinite(
    requests: list[list[int]], capacity: int
) -> None:
    blocks = chained(requests)
    best = belady(blocks, capacity)
    assert best <= infinite(blocks)
    assert belady(blocks, 1000) == infinite(blocks)
    for policy in ("leaf-LRU", "ARC", "adaptive", "S3-FIFO", "GDSF"):
        assert RUNS[policy](blocks, capacity) <= best, policy
    for policy, run in AHEAD.items():
        assert run(blocks, capacity) <= best, policy


@pytest.mark.parametrize("policy", POLICIES)
def test_a_look_at_the_queue_saves_some_of_a_loop_that_does_not_fit(policy: str) -> None:
    loop = chained([[document, 0] for document in range(3)] * 20)
    blind = run_policy(policy, loop, 4)
    assert run_policy(policy, loop, 4, look_ahead=2) >= blind + 20
    assert run_policy(policy, loop, 4, look_ahead=2) <= belady(loop, 4)


def test_a_cell_that_falls_short_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"leaf-LRU": 0.30, "ARC": 0.32, "adaptive": 0.305, "S3-FIFO": 0.2, "GDSF": 0.33}
    grid = {("t", policy, 500): cells.get(policy, 0.5) for policy in RUNS}
    trace = Trace("t", (np.arange(3, dtype=np.int32),))
    assert shortfalls(grid, [trace], [500]) == [
        "t at 500: adaptive 0.3050, ARC 0.3200",
        "t at 500: adaptive 0.3050, GDSF 0.3300",
    ]
    assert round(closed(grid, "t", 500), 3) == 0.025
    monkeypatch.setitem(PUBLISHED, trace.digest, {2000: 0.058})
    monkeypatch.setitem(CLOSED, trace.digest, {2000: 0.15})
    level = {("t", policy, 2000): 0.2 for policy in RUNS}
    assert shortfalls(level, [trace], [2000]) == [
        "t at 2000: leaf-LRU 0.2000, published 0.058",
        "t at 2000: 0.0% closed, not 15%",
    ]
