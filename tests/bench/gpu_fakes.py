"""Parts of a GPU suite as a runner may meet them: `python -m tests.bench.gpu_fakes KIND`."""

import json
import subprocess
import sys
import time
from pathlib import Path

GOOD = {
    "status": "measured",
    "why": "",
    "figures": {"layout_pool_gib": 64.0, "layout_loss": 4.5},
    "skips": {},
}
SAID = {
    "good": GOOD,
    "failing": GOOD | {"figures": {"tests_failed": 1.0, "tests_passed": 9.0}},
    "half": GOOD | {"figures": {"layout_pool_gib": 64.0}, "skips": {"layout_loss": "no time"}},
    "options": GOOD | {"notes": sys.argv[2:]},
    "skipped": {"status": "skipped", "why": "no such card"},
    "nan": GOOD | {"figures": {"layout_loss": float("nan")}},
    "strange": GOOD | {"figures": {"layout_lost": 1.0}},
    "text": GOOD | {"figures": {"layout_loss": "fast"}},
    "odd": GOOD | {"status": "odd"},
    "probe": {"usable": True, "broken": False, "why": "", "card": {"name": "fake"}},
    "no-gpu": {"usable": False, "broken": False, "why": "no GPU", "card": {}},
    "cpu-torch": {"usable": False, "broken": True, "why": "a CPU build", "card": {}},
}
"""The last line of a part that ends well."""


def main() -> None:
    kind = sys.argv[1]
    sys.stdout.write("half a table\n")
    if kind in SAID:
        sys.stdout.write(json.dumps(SAID[kind]) + "\n")
    elif kind == "garbage":
        sys.stdout.write("{nothing\n")
    elif kind == "hang":
        # A child of its own, whose id the test looks for.
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(sys.argv[2]).write_text(str(child.pid))
        time.sleep(600)
    else:
        raise SystemExit("it broke")


if __name__ == "__main__":
    main()
