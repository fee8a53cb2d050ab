"""The paged Triton kernels under the whole model: in the interpreter here, compiled on a GPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.engine.batch import Span, lay_out
from kvtier.engine.cpu_attention import CpuAttention
from kvtier.engine.model import Attention
from kvtier.engine.triton_attention import TritonAttention
from kvtier.kernels.shared_decode import shared_decode
from tests.engine.variants import BLOCK, forward, load, make_pool, random_tokens, span
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


def decode_step(
    share: bool, contexts: list[int], common: int, *, heads: int = 2, seed: int = 0
) -> torch.Tensor:
    """One layer's attention of sequences that all stand on the same first `common` blocks."""
    blocks = [-(-context // BLOCK) for context in contexts]
    own = iter(range(common, common + sum(blocks)))
    tables = [
        np.array([*range(common), *(next(own) for _ in range(n - common))], np.int32)
        for n in blocks
    ]
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn((sum(blocks) + common, 1, 2, 1, BLOCK, 16), generator=generator)
    states = torch.randn((len(contexts), heads + 2, 16), generator=generator)
    spans = [
        Span(row, np.zeros(1, np.int32), context - 1, tables[row], context, True)
        for row, context in enumerate(contexts)
    ]
    backend = TritonAttention(pool, share_prefixes=share)
    angles = torch.rand((len(contexts), 8), generator=generator)
    backend.begin(lay_out(spans, BLOCK), angles.cos(), angles.sin())
    return backend.attend(0, states)


@pytest.mark.parametrize(
    ("contexts", "common", "launches"),
    [
        ([513 + row for row in range(9)], 32, 1),  # eight of nine need not read a split of 512
        ([513 + row for row in range(8)], 32, 0),  # seven are not worth a launch
        ([513 + row for row in range(9)], 31, 0),  # less than a split in common
    ],
)
def test_what_decoding_sequences_have_in_common_is_read_once_if_it_is_worth_it(
    contexts: list[int], common: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(arguments)
        return shared_decode(*arguments, **options)

    monkeypatch.setattr("kvtier.engine.triton_attention.shared_decode", counted)
    shared = decode_step(True, contexts, common)
    assert len(calls) == launches
    assert torch.equal(shared, decode_step(False, contexts, common))
    assert len(calls) == launches
