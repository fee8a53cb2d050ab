"""A dense Llama decoder over rows of many sequences at once. Tokens in, logits out.

Where K and V go, and what each row attends to, is the attention backend's business; which rows run
together is the scheduler's. Knows no cache and no request.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvtier.engine.batch import Batch, Span
from kvtier.engine.model_config import ModelConfig
from kvtier.engine.rope import inverse_frequencies, rotations
from kvtier.engine.weights import Layer, Linear, Weights


class Attention(Protocol):
    """Rotates a launch's queries and keys, stores its K and V and lets its rows attend.

    One launch at a time, layers in order.
    """

    def preload(self, span: Span) -> None:
        """The positions before `span.start` stand in the pool: get them ready, if that helps.

        May be called before any launch of the sequence, with more of it each time.
        """
        ...

    def begin(self, batch: Batch, cos: Tensor, sin: Tensor) -> None:
        """Get ready for one launch: whatever is the same in every layer.

        cos, sin float32 `[rows, head_dim / 2]`: each row's angles (`rope.rotations`).
        """
        ...

    def attend(self, layer: int, states: Tensor) -> Tensor:
        """Causal attention of each row over its own sequence.

        states `[rows, heads + 2 * kv_heads, head_dim]`: query, key and value heads, not rotated
        yet; they may be overwritten. Returns `[rows, heads, head_dim]`.
        """
        ...

    def finish(self) -> None:
        """After the last layer: every row's K and V stand in the pool."""
        ...

    def forget(self, sequence: int) -> None:
        """This sequence has ended or lost its blocks: drop whatever is kept for it."""
        ...


class LlamaModel:
    """The forward pass. Immutable once built; `frequencies` follow the weights' device."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._weights = weights
        frequencies = inverse_frequencies(config.rope, config.head_dim)
        self._frequencies = frequencies.to(weights.embedding.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention) -> Tensor:
        """Compute every row's K and V, and logits float32 `[len(batch.wanted), vocab]`."""
        weights, eps = self._weights, self.config.norm_eps
        attention.begin(batch, *rotations(self._frequencies, batch.positions))
        hidden = weights.embedding[batch.tokens]
        for number, layer in enumerate(weights.layers):
            states = self._project(layer, hidden)
            mixed = attention.attend(number, states).flatten(1)
            if number == len(weights.layers) - 1:
                # Only K and V of the last layer serve other rows: the rest is for the logits.
                hidden, mixed = hidden[batch.wanted], mixed[batch.wanted]
            hidden = _mix(layer, hidden, mixed, eps)
        attention.finish()
        return self._logits(hidden)

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._weights.embedding.device

    @torch.inference_mode()
    def rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each float32 `[n, head_dim / 2]`, of int64 positions `[n]`.

        This and the next three are all that is done to rows apart from attention, in every layer
        with the same shapes: what holds for how they treat a row holds for the model.
        """
        return rotations(self._frequencies, positions)

    @torch.inference_mode()
    def project(self, hidden: Tensor) -> Tensor:
        """`[n, heads + 2 * kv_heads, head_dim]` of rows `[n, hidden]`, of the first layer."""
        return self._project(self._weights.layers[0], hidden)

    @torch.inference_mode()
    def mix(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """What the first layer makes of rows `[n, hidden]` and their `[n, heads * head_dim]`."""
        return _mix(self._weights.layers[0], hidden, mixed, self.config.norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 `[n, vocab]` of rows that have passed all layers."""
        return self._logits(hidden)

    def _project(self, layer: Layer, hidden: Tensor) -> Tensor:
        heads, kv_heads = self.config.heads, self.config.kv_heads
        normed = F.rms_norm(hidden, hidden.shape[-1:], layer.attention_norm, self.config.norm_eps)
        states = F.linear(normed, layer.qkv.weight, layer.qkv.bias)
        return states.view(-1, heads + 2 * kv_heads, self.config.head_dim)

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = F.rms_norm(hidden, hidden.shape[-1:], self._weights.norm, self.config.norm_eps)
        return F.linear(normed, self._weights.head).float()


def _mix(layer: Layer, hidden: Tensor, mixed: Tensor, eps: float) -> Tensor:
    """The rows after attention's share and the feed-forward network's are added."""
    return _feed_forward(_project_onto(hidden, mixed, layer.output), layer, eps)


def _feed_forward(hidden: Tensor, layer: Layer, eps: float) -> Tensor:
    """`hidden + down(silu(gate(x)) * up(x))` of the normed rows."""
    normed = F.rms_norm(hidden, hidden.shape[-1:], layer.mlp_norm, eps)
    gate, up = F.linear(normed, layer.gate_up.weight, layer.gate_up.bias).chunk(2, dim=-1)
    return _project_onto(hidden, F.silu(gate).mul_(up), layer.down)


def _project_onto(hidden: Tensor, rows: Tensor, linear: Linear) -> Tensor:
    """`hidden + rows W^T + b`, the sum folded into the GEMM."""
    if linear.bias is not None:
        hidden = hidden + linear.bias
    return torch.addmm(hidden, rows, linear.weight.t())
