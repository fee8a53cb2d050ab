"""What every bench shares: timing a call, a table for people, one JSON line for machines.

Numbers of one run are comparable with each other only: a bench measures its limit or its baseline
beside what it reports. Knows nothing of what is measured.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """Seconds of repeated calls: all of them, and the figures that are quoted."""

    seconds: tuple[float, ...]

    def quantile(self, q: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p20(self) -> float:
        return self.quantile(0.2)

    @property
    def p80(self) -> float:
        return self.quantile(0.8)

    @property
    def p99(self) -> float:
        return self.quantile(0.99)


Clock = Callable[[], float]
"""Seconds. `time.thread_time` for pure computation: what other processes take is not counted."""


def measure(
    call: Callable[[], object],
    repeats: int,
    *,
    warmup: int = 2,
    clock: Clock = time.perf_counter,
) -> Sample:
    """Time `call` `repeats` times, after `warmup` calls that are not counted."""
    for _ in range(warmup):
        call()
    seconds = []
    for _ in range(repeats):
        begin = clock()
        call()
        seconds.append(clock() - begin)
    return Sample(tuple(seconds))


def interleave(
    calls: Sequence[Callable[[], object]], repeats: int, *, clock: Clock = time.perf_counter
) -> list[Sample]:
    """Time several calls in the order A B B A …, so that a drifting machine hits all alike."""
    seconds: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for turn in range(repeats):
        order = range(len(calls)) if turn % 2 == 0 else range(len(calls) - 1, -1, -1)
        for which in order:
            begin = clock()
            calls[which]()
            seconds[which].append(clock() - begin)
    return [Sample(tuple(each)) for each in seconds]


def table(rows: Sequence[Sequence[object]]) -> None:
    """Print rows in aligned columns, the first row as the heading."""
    texts = [[cell if isinstance(cell, str) else f"{cell:.4g}" for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))]
    for number, row in enumerate(texts):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def note(text: str) -> None:
    """Say on standard error what is being done."""
    print(text, file=sys.stderr, flush=True)


def emit(values: "dict[str, object]") -> None:
    """Print the one JSON line; the last line of a bench's output."""
    print(json.dumps(values, sort_keys=True))
