"""SIGKILL at random instants and at chosen calls: no wrong byte, nothing published is lost.

`make crash N=…` does the same for longer.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_a_store_survives_two_hundred_kills(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.nvme.crash", "--rounds", "200", "--seed", "1"]
    command += ["--directory", str(tmp_path), "--log", str(tmp_path / "log")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    logged = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert logged["rounds"] == 200 and logged["stores"] == 4
    assert logged["wrong"] == logged["lost"] == logged["usage_mismatches"] == 0
    assert logged["published"] > 100 and logged["blocks_read"] > logged["published"]
    assert len(logged["kills"]) > 5
