"""The miss-ratio curve: one tier of ever more blocks, under each rule asked for and Belady's.

The jobs are independent of each other and run in several processes. Knows no tiers and no files.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from kvtier.index.words import Tokens
from kvtier.tools.replay.bounds import belady
from kvtier.tools.replay.one_tier import run_policy

BELADY = "belady"
"""The rule of a curve that is no policy."""


@dataclass(frozen=True)
class Curve:
    """Blocks hit, by rule, at each of `capacities` (in blocks, rising)."""

    capacities: tuple[int, ...]
    hits: Mapping[str, tuple[int, ...]]


def spread(given: Sequence[int], n: int) -> tuple[int, ...]:
    """About `n` capacities, geometric, from half the smallest of `given` to twice their sum."""
    low, high = max(1.0, min(given) / 2), 2.0 * sum(given)
    step = (high / low) ** (1 / max(1, n - 1))
    return tuple(sorted({round(low * step**k) for k in range(n)}))


def trace_curve(
    requests: Sequence[Tokens],
    capacities: Sequence[int],
    policies: Sequence[str],
    *,
    processes: int,
    progress: Callable[[int, int], None],
) -> Curve:
    """Run every policy and Belady's rule at every capacity; `progress(done, all)` after each."""
    rules = [*policies, BELADY]
    jobs = [(rule, capacity) for capacity in reversed(capacities) for rule in rules]
    found: dict[tuple[str, int], int] = {}
    for job, hits in zip(jobs, _run(requests, jobs, processes), strict=True):
        found[job] = hits
        progress(len(found), len(jobs))
    return Curve(
        tuple(capacities), {rule: tuple(found[rule, c] for c in capacities) for rule in rules}
    )


def _run(
    requests: Sequence[Tokens], jobs: Sequence[tuple[str, int]], processes: int
) -> Iterator[int]:
    if processes < 2:
        for rule, capacity in jobs:
            yield _hits(requests, rule, capacity)
        return
    # Not forked: whoever draws a progress bar has threads.
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        futures = [pool.submit(_hits, requests, rule, capacity) for rule, capacity in jobs]
        for future in futures:
            yield future.result()


def _hits(requests: Sequence[Tokens], rule: str, capacity: int) -> int:
    if rule == BELADY:
        return belady(requests, capacity)
    return run_policy(rule, requests, capacity)
