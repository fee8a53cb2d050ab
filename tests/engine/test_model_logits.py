"""The forward pass against transformers, however a sequence is cut into launches."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.engine.cpu_attention import CpuAttention
from tests.engine.variants import (
    BLOCK,
    VARIANTS,
    forward,
    load,
    make_pool,
    random_tokens,
    reference,
    reference_logits,
    span,
)

Variant = Callable[[str], Path]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("cuts", [(1,), (37,), (16, 33, 50), (1, 2, 130, 131)])
def test_chunked_prefill_and_decoding_give_transformers_logits(
    variant: Variant, name: str, cuts: tuple[int, ...]
) -> None:
    directory = variant(name)
    config, model = load(directory)
    tokens = random_tokens(config, cuts[-1] + 5)
    want = reference_logits(reference(directory), tokens)
    attention = CpuAttention(make_pool(config, 12))
    slots = np.random.default_rng(1).permutation(12).astype(np.int32)
    edges = [0, *cuts, *range(cuts[-1] + 1, len(tokens) + 1)]
    for start, end in zip(edges, edges[1:], strict=False):
        got = forward(model, attention, span(7, tokens, start, end, slots))
        torch.testing.assert_close(got[0], want[end - 1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_mixed_batch_gives_each_sequence_its_own_logits(variant: Variant, name: str) -> None:
    directory = variant(name)
    config, model = load(directory)
    hf = reference(directory)
    texts = [random_tokens(config, n, seed=n) for n in (21, 40, 17)]
    tables = np.random.default_rng(2).permutation(9).astype(np.int32).reshape(3, 3)
    attention = CpuAttention(make_pool(config, 9))
    forward(model, attention, span(0, texts[0], 0, 20, tables[0], logits=False))
    # A decoding row, the first chunk of a prompt and a whole prompt, in no helpful order.
    got = forward(
        model,
        attention,
        span(1, texts[1], 0, 33, tables[1], logits=False),
        span(0, texts[0], 20, 21, tables[0]),
        span(2, texts[2], 0, 17, tables[2]),
    )
    assert got.shape == (2, config.vocab_size)
    for row, text in zip(got, (texts[0], texts[2]), strict=True):
        torch.testing.assert_close(row, reference_logits(hf, text)[-1], atol=1e-4, rtol=0)


def test_blocks_filled_by_one_sequence_serve_another_that_never_computed_them(
    variant: Variant,
) -> None:
    directory = variant("four heads on two, biases, untied")
    config, model = load(directory)
    tokens = random_tokens(config, 57)
    want = reference_logits(reference(directory), tokens)
    pool = make_pool(config, 5)
    slots = np.asarray([4, 0, 3, 1], np.int32)
    attention = CpuAttention(pool)
    forward(model, attention, span(0, tokens, 0, 48, slots, logits=False))
    attention.forget(0)
    got = forward(model, attention, span(1, tokens, 48, 57, slots))
    torch.testing.assert_close(got[0], want[-1], atol=1e-4, rtol=0)
    assert torch.isnan(pool[2]).all(), "a slot outside the table was written"
    assert torch.isnan(pool[1, ..., 9:, :]).all(), "positions behind the last token were written"


def test_a_reused_mirror_shows_nothing_of_the_sequence_before(variant: Variant) -> None:
    directory = variant("three heads on one, head 24, tied")
    config, model = load(directory)
    hf = reference(directory)
    attention = CpuAttention(make_pool(config, 6))
    for sequence, n in enumerate((60, 31, 45)):
        tokens = random_tokens(config, n, seed=n)
        slots = np.arange(-(-n // BLOCK), dtype=np.int32)
        got = forward(model, attention, span(sequence, tokens, 0, n, slots))
        torch.testing.assert_close(got[0], reference_logits(hf, tokens)[-1], atol=1e-4, rtol=0)
        attention.forget(sequence)


def test_a_launch_that_asks_for_no_logits_returns_none_and_still_writes_the_pool(
    variant: Variant,
) -> None:
    config, model = load(variant("three heads on three, llama3 rope"))
    tokens = random_tokens(config, 19)
    pool = make_pool(config, 2)
    got = forward(
        model,
        CpuAttention(pool),
        span(0, tokens, 0, 19, np.asarray([1, 0], np.int32), logits=False),
    )
    assert got.shape == (0, config.vocab_size)
    assert torch.isfinite(pool[1]).all() and torch.isfinite(pool[0, ..., :3, :]).all()
