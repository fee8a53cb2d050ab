"""The real small model against transformers, where its package is to be had."""

from pathlib import Path

import torch

from kvtier.engine.cpu_attention import CpuAttention
from tests.engine.variants import (
    forward,
    load,
    make_pool,
    random_tokens,
    reference,
    reference_logits,
    span,
)


def test_the_real_models_logits_are_transformers_own(real_model: Path) -> None:
    config, model = load(real_model)
    tokens = random_tokens(config, 203)
    want = reference_logits(reference(real_model), tokens)
    slots = torch.randperm(13, generator=torch.Generator().manual_seed(0)).int().numpy()
    attention = CpuAttention(make_pool(config, 13))
    for start, end in ((0, 150), (150, 202), (202, 203)):
        got = forward(model, attention, span(0, tokens, start, end, slots))
        torch.testing.assert_close(got[0], want[end - 1], atol=2e-3, rtol=1e-4)
        assert int(got[0].argmax()) == int(want[end - 1].argmax())
