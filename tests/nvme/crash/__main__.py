"""`python -m tests.nvme.crash`: kill a store's process many times, and count what it costs.

Ends with 1 if a byte was wrong, usage not exact, or less than 99.9 % of what was published served.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.nvme.crash.rounds import ROUNDS_A_STORE, Totals, decode_totals, reports

SHARED_MEMORY = Path("/dev/shm")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nvme.crash", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="kills, in all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no store later")
    parser.add_argument("--seed", type=int, help="of the first store; the next ones count up")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="stores at a time")
    parser.add_argument("--log", type=Path, help="append a line of totals a store, over all runs")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="where stores are made")
    options = parser.parse_args()
    began = time.monotonic()
    sums, last_seed = _logged(options.log)
    seed = last_seed + 1 if options.seed is None else options.seed
    places = [options.directory, options.directory]
    if SHARED_MEMORY.is_dir():
        places.append(SHARED_MEMORY)
    run, commit = Totals(), _commit()
    jobs, seconds = options.jobs, options.seconds
    for store in reports(seed, options.rounds, places, jobs=jobs, seconds=seconds):
        run.add(store.totals)
        sums.add(store.totals)
        for complaint in store.complaints:
            print(complaint)
        if store.complaints:
            print(f"again: --seed {store.seed} --rounds {ROUNDS_A_STORE}")
        when = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"when": when, "commit": commit, "seed": store.seed, **sums.encode()}
        if options.log is not None:
            with options.log.open("a") as file:
                file.write(json.dumps(line) + "\n")
    took_s = time.monotonic() - began
    print(json.dumps({**run.encode(), "rounds_a_second": round(run.rounds / took_s, 1)}))
    return 0 if run.ok else 1


def _logged(path: Path | None) -> tuple[Totals, int]:
    """Totals and seed of the log's last line."""
    if path is None or not path.exists() or not path.read_text().strip():
        return Totals(), 0
    line = json.loads(path.read_text().splitlines()[-1])
    return decode_totals(line), int(line["seed"])


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    described = subprocess.run(command, capture_output=True, text=True, check=False)
    return described.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
