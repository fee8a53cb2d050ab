"""Rotary position embedding, plain and with Llama 3's scaling. Knows positions, not requests."""

from math import pi

import torch
from torch import Tensor

from kvtier.engine.model_config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """float32 `[head_dim / 2]`: `theta ** (-2 i / head_dim)`, scaled as `rope` says.

    The "llama3" scaling leaves wavelengths shorter than `original / high_freq_factor` alone,
    divides those longer than `original / low_freq_factor` by `factor`, and blends linearly in
    between (Llama 3.1 model card; the same formula as transformers' `rope_type: llama3`).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    wavelengths = 2 * pi / plain
    turns = rope.original_positions / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def rotations(frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`(cos, sin)` of the angles at these positions, each `[n, 1, head_dim / 2]` of `dtype`."""
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_(states: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `states [n, heads, head_dim]` in place by the angles of `rotations`.

    Element `i` pairs with `i + head_dim / 2` (the Hugging Face order of Llama weights).
    """
    low, high = states.chunk(2, dim=-1)
    crossed = low * sin
    low.mul_(cos).addcmul_(high, sin, value=-1)
    high.mul_(cos).add_(crossed)
