"""A process that computes documents, lets 30 s pass on its clock, says what was written back, and
then waits to be killed.

    writeback_child.py STORE
"""

import signal
import sys
from pathlib import Path

from tests.tiers.cache_rig import doc
from tests.tiers.nvme_rig import opened


def main() -> None:
    with opened(Path(sys.argv[1])) as rig:
        for seed, blocks in ((1, 7), (2, 3)):
            rig.visit(doc(seed, blocks))
        rig.settle()
        rig.clock.now += 31
        rig.wait_until(lambda: rig.cache.statistics().written_back == 10)
        rig.visit(doc(3, 2))  # too young to be safe
        sys.stdout.write("written back\n")
        sys.stdout.flush()
        signal.pause()


if __name__ == "__main__":
    main()
