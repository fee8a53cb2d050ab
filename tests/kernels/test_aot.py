"""The kernels compile for sm_90 without a GPU, and the machine code is what it should be."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "aot.py"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `aot.py` says of each kernel; its own process, since this one may be interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "90"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def test_every_kernel_compiles_for_sm_90_without_spilling(
    reports: dict[str, dict[str, Any]],
) -> None:
    assert len(reports) == 10
    for name, report in reports.items():
        assert report["cubin_bytes"] > 0, name
        assert report["stack"] == 0, f"{name} spills: {report}"
        assert report["shared"] <= 227 << 10, f"{name} does not fit an SM: {report}"


def test_attention_multiplies_on_tensor_cores(reports: dict[str, dict[str, Any]]) -> None:
    for name, report in reports.items():
        if name.startswith("paged_"):
            assert report["mma"] > 0, f"{name}: {report}"


def test_keys_and_values_are_read_16_bytes_at_a_time(reports: dict[str, dict[str, Any]]) -> None:
    for name, report in reports.items():
        if name != "write_kv/80":  # one head's 160 bytes a token do not fill a warp's 512
            assert report["wide_loads"] > 0, f"{name}: {report}"
