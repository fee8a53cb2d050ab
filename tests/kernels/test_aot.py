"""The kernels compile without a GPU, and the machine code keeps the budget of the static report."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def report(cache: Path, *options: str, timeout_s: float) -> dict[str, Any]:
    """The JSON line of `bench.kernels_static`; its own process, since this one may interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.kernels_static", *options],
        env=environment,
        cwd=cache,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_clean(found: dict[str, Any]) -> None:
    assert found["broken"] == found["spills"] == 0
    assert found["max_regs"] <= 255 and found["max_shared"] <= 227 << 10
    assert 0.9 <= found["worst_predicted_bw_share"] <= 1


@pytest.mark.timeout(400)  # 17 s of CPU time, on machines that may be busy
def test_a_part_of_the_shipped_launches_compiles_for_sm_90_and_keeps_its_budget(
    tmp_path: Path,
) -> None:
    found = report(tmp_path, "--quick", timeout_s=390)
    assert_clean(found)
    assert found["configs"] == 6 and len(found["launches"]) == 15


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_every_shipped_launch_compiles_for_every_architecture_and_keeps_its_budget(
    tmp_path: Path,
) -> None:
    found = report(tmp_path, timeout_s=3500)
    assert_clean(found)
    assert found["archs"] == [80, 90, 100] and found["configs"] == 81
