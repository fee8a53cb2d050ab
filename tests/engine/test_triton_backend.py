"""The paged Triton kernels under the whole model: in the interpreter here, compiled on a GPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.engine.cpu_attention import CpuAttention
from kvtier.engine.model import Attention
from kvtier.engine.triton_attention import TritonAttention
from tests.engine.variants import forward, load, make_pool, random_tokens, span
from tests.tiny_model import make_tiny_model

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter takes CPU tensors; the GPU suite compiles"
)


def test_chunks_decoding_and_mixed_batches_agree_with_the_cpu_path(tmp_path: Path) -> None:
    directory = make_tiny_model(
        tmp_path, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, head_dim=24
    )
    config, model = load(directory)
    texts = [random_tokens(config, n, seed=n) for n in (24, 21)]
    tables = np.random.default_rng(0).permutation(5).astype(np.int32)[:4].reshape(2, 2)
    steps = [
        [(0, 0, 17)],
        [(0, 17, 23), (1, 0, 5)],
        [(1, 5, 20), (0, 23, 24)],
        [(1, 20, 21)],
    ]
    backends: list[Attention] = [
        CpuAttention(make_pool(config, 5)),
        TritonAttention(make_pool(config, 5)),
    ]
    for step in steps:
        spans = [span(s, texts[s], start, end, tables[s]) for s, start, end in step]
        cpu, triton = (forward(model, backend, *spans) for backend in backends)
        assert torch.isfinite(triton).all()
        torch.testing.assert_close(triton, cpu, atol=1e-4, rtol=0)
