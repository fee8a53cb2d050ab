"""A process that puts, fetches and evicts until it is killed. Says what landed, on stdout.

    crash_child.py STORE FIRST_SEED CAPACITY [CALL WHEN COUNT]

With CALL (a method of `Files`, or "commit") it kills itself before or after (WHEN) the COUNT-th
such call that follows the opening.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.tiers.nvme.catalogue import Catalogue
from kvtier.tiers.nvme.files import Files
from tests.nvme.rig import Rig, branch, num_landed


def deadly(plain: Callable[..., Any], when: str, count: int, armed: list[bool]) -> Any:
    """`plain`, with the process dying before or after one of its calls."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += armed[0]
        fatal = armed[0] and calls == count
        if fatal and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = plain(*args, **kwargs)
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


def main() -> None:
    store, first, capacity = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    armed = [False]
    if len(sys.argv) > 4:
        name, when, count = sys.argv[4], sys.argv[5], int(sys.argv[6])
        owner: Any = Catalogue if name == "commit" else Files
        setattr(owner, name, deadly(getattr(owner, name), when, count, armed))
    with Rig(store, capacity_bytes=capacity) as rig:
        armed[0] = True
        sys.stdout.write("open\n")
        sys.stdout.flush()
        for seed in range(first, first + 10_000):
            flights = [(seed, rig.begin_put(branch(7, seed).part(0, 4))), (seed, None)]
            for which, flight in flights:
                flight = flight or rig.begin_put(branch(7, which))
                rig.settle(flight)
                sys.stdout.write(f"{which} {num_landed(flight)}\n")
                sys.stdout.flush()
            rig.fetch(branch(7, max(first, seed - 3)))


if __name__ == "__main__":
    main()
