"""The peers' figures, from an environment of their own, by `bench/index_probe.py`."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from bench.harness import note

_PROBE = Path(__file__).with_name("index_probe.py")
_TIMEOUT_S = 300.0


def figures(python: Path, what: str, repeats: int) -> dict[str, Any] | None:
    """What the probe measured of `what` ("sglang", "vllm"); None where it could not be imported."""
    note(f"peer: {what}")
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    # -P: beside the probe stands a bench called `requests`, which is not what a peer imports.
    command = [str(python), "-P", str(_PROBE), what, str(repeats)]
    done = subprocess.run(command, env=mine, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        note(f"peer: {what} gave nothing: {done.stderr.strip().splitlines()[-1:]}")
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
