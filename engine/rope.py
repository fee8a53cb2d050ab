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


def rotations(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`(cos, sin)` of the angles at these positions, each float32 `[n, head_dim / 2]`."""
    angles = positions.to(torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate_(states: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `states [n, heads, head_dim]` in place by cos, sin `[n, 1, head_dim / 2]`, its dtype.

    Element `i` pairs with `i + head_dim / 2` (the Hugging Face order of Llama weights). Every
    product and sum is rounded by itself: `addcmul_` fuses them on some processors, and then a key's
    bits would depend on the machine, and differ from those of `kernels/rope_write.py`.
    """
    low, high = states.chunk(2, dim=-1)
    low_sin, high_sin = low * sin, high * sin
    low.mul_(cos).sub_(high_sin)
    high.mul_(cos).add_(low_sin)
