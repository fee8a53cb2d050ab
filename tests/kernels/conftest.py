"""Where a Triton test runs: the interpreter on CPU tensors, or a GPU."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@pytest.fixture(autouse=True)
def dots_of_bf16_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter keeps bf16 as its bits and would multiply those; a dot widens them first."""
    plain = InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of a Triton test's tensors; the one that this process cannot use is skipped."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if request.param == "cuda" and (interpreted or not torch.cuda.is_available()):
        pytest.skip("no CUDA device, or Triton's interpreter is on")
    if request.param == "cpu" and not interpreted:
        pytest.skip("Triton compiles for the GPU here; the cuda case covers this one")
    return torch.device(request.param)
