"""Choosing a token: greedy, seeded, restricted; and what parameters are refused."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.engine.errors import BadSampling
from kvtier.engine.sampling import Sampler, SamplingParams

LOGITS = torch.tensor([0.5, 3.0, -1.0, 2.0, 2.5, -math.inf, 0.0])


def draws(n: int, **params: Any) -> list[int]:
    sampler = Sampler(SamplingParams(**params))
    return [sampler.pick(LOGITS) for _ in range(n)]


def test_greedy_takes_the_largest_logit() -> None:
    assert draws(3) == [1, 1, 1]


def test_one_seed_gives_one_sequence_and_another_seed_another() -> None:
    first = draws(40, temperature=1.5, seed=7)
    assert first == draws(40, temperature=1.5, seed=7)
    assert first != draws(40, temperature=1.5, seed=8)
    assert len(set(first)) > 1


def test_no_seed_draws_afresh() -> None:
    assert draws(60, temperature=2.0) != draws(60, temperature=2.0)


def test_draws_follow_the_softmax() -> None:
    counts = torch.bincount(torch.tensor(draws(4000, temperature=1.0, seed=1)), minlength=7) / 4000
    torch.testing.assert_close(counts, LOGITS.softmax(-1), atol=0.03, rtol=0)


@given(top_k=st.integers(1, 9), seed=st.integers(0, 99))
def test_top_k_keeps_the_k_largest(top_k: int, seed: int) -> None:
    allowed = set(LOGITS.topk(min(top_k, 7)).indices.tolist())
    assert set(draws(8, temperature=3.0, top_k=top_k, seed=seed)) <= allowed


@given(top_p=st.floats(0.01, 1.0), seed=st.integers(0, 99))
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, seed: int) -> None:
    chances = LOGITS.softmax(-1)
    order = chances.argsort(descending=True).tolist()
    total, allowed = 0.0, set()
    for token in order:
        allowed.add(token)
        total += float(chances[token])
        if total >= top_p + 1e-6:
            break
    assert set(draws(8, temperature=1.0, top_p=top_p, seed=seed)) <= allowed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(BadSampling, match=rf"sampling\.{name}: {value}"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
