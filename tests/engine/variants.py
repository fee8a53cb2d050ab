"""Small random Llamas of odd shapes, and what transformers computes with them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvtier.engine.batch import Span, lay_out
from kvtier.engine.model import Attention, LlamaModel
from kvtier.engine.model_config import ModelConfig, read_config
from kvtier.engine.weights import load_weights
from kvtier.index.words import Slots, Tokens

BLOCK = 16

VARIANTS: dict[str, dict[str, Any]] = {
    "three heads on one, head 24, tied": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "hidden_size": 60,
        "head_dim": 24,
    },
    "four heads on two, biases, untied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "three heads on three, llama3 rope": {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "hidden_size": 72,
        "head_dim": 24,
        "tie_word_embeddings": False,
        "num_hidden_layers": 3,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


def load(directory: Path) -> tuple[ModelConfig, LlamaModel]:
    config = read_config(directory)
    return config, LlamaModel(config, load_weights(directory, config, torch.float32))


def reference(directory: Path) -> Any:
    """transformers' own model in float32."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@torch.inference_mode()
def reference_logits(model: Any, tokens: Tokens) -> Tensor:
    """`[len(tokens), vocab]`, all in one forward pass."""
    logits: Tensor = model(torch.from_numpy(tokens).long()[None]).logits[0]
    return logits


@torch.inference_mode()
def reference_greedy(model: Any, tokens: Tokens, n: int) -> list[int]:
    """`n` tokens, each the argmax of a whole forward pass."""
    ids: list[int] = tokens.tolist()
    for _ in range(n):
        ids.append(int(reference_logits(model, np.asarray(ids, np.int32))[-1].argmax()))
    return ids[len(tokens) :]


def random_tokens(config: ModelConfig, n: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(3, config.vocab_size, n).astype(np.int32)


def make_pool(config: ModelConfig, blocks: int) -> Tensor:
    """A pool of NaN: a read of what was not written shows in the output."""
    shape = (blocks, config.layers, 2, config.kv_heads, BLOCK, config.head_dim)
    return torch.full(shape, float("nan"))


def span(
    sequence: int, tokens: Tokens, start: int, end: int, slots: Slots, *, logits: bool = True
) -> Span:
    """A launch's share that computes positions `start` to `end - 1` of `tokens`."""
    return Span(
        sequence, tokens[start:end], start, slots[: -(-end // BLOCK)], len(tokens) + 8, logits
    )


def forward(model: LlamaModel, attention: Attention, *spans: Span) -> Tensor:
    return model.forward(lay_out(spans, BLOCK), attention)
