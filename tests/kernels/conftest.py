"""Where a Triton test runs: the interpreter on CPU tensors, or a GPU."""

import os

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of a Triton test's tensors; the one that this process cannot use is skipped."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if request.param == "cuda" and (interpreted or not torch.cuda.is_available()):
        pytest.skip("no CUDA device, or Triton's interpreter is on")
    if request.param == "cpu" and not interpreted:
        pytest.skip("Triton compiles for the GPU here; the cuda case covers this one")
    return torch.device(request.param)
