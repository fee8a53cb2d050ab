"""A random Llama in a directory, as large as asked for: TTFT does not depend on training.

Written tensor by tensor on the device, with the names and shapes that the engine reads.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class ModelShape:
    """A dense Llama's sizes; embeddings tied, no biases."""

    layers: int
    hidden: int
    wide: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int

    @property
    def parameters(self) -> int:
        return sum(rows * columns for rows, columns in self.sizes().values())

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Every weight's name and `(rows, columns)`; a norm has one row."""
        sizes = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for number in range(self.layers):
            at = f"model.layers.{number}."
            sizes |= {
                at + "input_layernorm.weight": (1, self.hidden),
                at + "self_attn.q_proj.weight": (query, self.hidden),
                at + "self_attn.k_proj.weight": (kv, self.hidden),
                at + "self_attn.v_proj.weight": (kv, self.hidden),
                at + "self_attn.o_proj.weight": (self.hidden, query),
                at + "post_attention_layernorm.weight": (1, self.hidden),
                at + "mlp.gate_proj.weight": (self.wide, self.hidden),
                at + "mlp.up_proj.weight": (self.wide, self.hidden),
                at + "mlp.down_proj.weight": (self.hidden, self.wide),
            }
        return sizes | {"model.norm.weight": (1, self.hidden)}


ONE_BILLION = ModelShape(16, 2048, 8192, 32, 8, 64, 32_000, 65_536)
"""Llama 3.2 1B but for its vocabulary: 32 KiB of bf16 K and V a token, blocks of 512 KiB."""

TINY = ModelShape(2, 32, 64, 4, 2, 16, 64, 512)


def write_model(
    directory: Path, shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> Path:
    """Write config.json and model.safetensors; the same values each time on one kind of device.

    Weights keep unit rows unit: activations neither vanish nor overflow, and no two tokens tie.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.wide,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator(device).manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, (rows, columns) in shape.sizes().items():
        if rows == 1:
            tensors[name] = torch.ones(columns, dtype=dtype)
            continue
        values = torch.randn((rows, columns), device=device, generator=generator)
        tensors[name] = (values / columns**0.5).to(dtype).cpu()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory
