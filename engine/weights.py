"""Loads a dense Llama's weights from safetensors, fused the way the model multiplies them.

Reads one file or a sharded index. Knows names and shapes; never unpickles anything.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvtier.engine.errors import BadModelFile, ModelFileMissing
from kvtier.engine.model_config import ModelConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, eq=False)
class Linear:
    """`y = x W^T + b`; weight `[out, in]`, bias `[out]` or None."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Layer:
    """One decoder layer. `qkv` stacks q, k, v; `gate_up` stacks gate and up: one GEMM each."""

    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, eq=False)
class Weights:
    """embedding and head `[vocab, hidden]`: one tensor when tied."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that hold the weights, sorted. Raises `ModelFileMissing`."""
    return sorted({directory / name for name in _locate(directory).values()})


def load_weights(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: str = "cpu"
) -> Weights:
    """Read and convert to `dtype` on `device`.

    Raises `ModelFileMissing` (a file), or `BadModelFile` (a tensor missing or of another shape than
    the configuration says, or a damaged file).
    """
    with ExitStack() as stack:
        checkpoint = _Checkpoint(directory, stack, dtype, device)
        hidden, wide = config.hidden_size, config.intermediate_size
        query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        bias, mlp_bias = config.attention_bias, config.mlp_bias
        layers = []
        for number in range(config.layers):
            at = f"model.layers.{number}."
            attention, mlp = at + "self_attn.", at + "mlp."
            projections = [
                (attention + name, rows)
                for name, rows in (("q_proj", query), ("k_proj", kv), ("v_proj", kv))
            ]
            layers.append(
                Layer(
                    checkpoint.take(at + "input_layernorm.weight", hidden),
                    checkpoint.linear(projections, hidden, bias),
                    checkpoint.linear([(attention + "o_proj", hidden)], query, bias),
                    checkpoint.take(at + "post_attention_layernorm.weight", hidden),
                    checkpoint.linear(
                        [(mlp + "gate_proj", wide), (mlp + "up_proj", wide)], hidden, mlp_bias
                    ),
                    checkpoint.linear([(mlp + "down_proj", hidden)], wide, mlp_bias),
                )
            )
        embedding = checkpoint.take("model.embed_tokens.weight", config.vocab_size, hidden)
        head = embedding
        if not config.tied_embeddings:
            head = checkpoint.take("lm_head.weight", config.vocab_size, hidden)
        return Weights(embedding, tuple(layers), checkpoint.take("model.norm.weight", hidden), head)


def _locate(directory: Path) -> dict[str, str]:
    """Which file holds each tensor. Raises as `load_weights` does."""
    if (directory / SINGLE).is_file():
        with _open(directory / SINGLE) as file:
            return dict.fromkeys(file.keys(), SINGLE)
    if not (directory / INDEX).is_file():
        raise ModelFileMissing(
            f"{directory}: {SINGLE} is missing; save the weights as safetensors "
            "(save_pretrained does)"
        )
    try:
        located = dict(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadModelFile(f"{directory / INDEX}: {error}; download it again") from error
    for name in sorted(set(located.values())):
        if not (directory / name).is_file():
            raise ModelFileMissing(f"{directory}: {name} is missing; {INDEX} names it")
    return located


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise BadModelFile(f"{path}: {error}; download or export it again") from error


class _Checkpoint:
    """Named tensors of a directory, whichever file each lies in. Open while `stack` is."""

    def __init__(self, directory: Path, stack: ExitStack, dtype: torch.dtype, device: str) -> None:
        self._directory, self._dtype, self._device = directory, dtype, device
        self._located = _locate(directory)
        self._files = {
            name: stack.enter_context(_open(directory / name))
            for name in sorted(set(self._located.values()))
        }

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`, converted and in memory of its own (not a mapping of the file).

        Raises `BadModelFile` if it is missing or of another shape.
        """
        return self._read(name, *shape).to(self._device, self._dtype, copy=True)

    def linear(self, parts: Sequence[tuple[str, int]], columns: int, bias: bool) -> Linear:
        """Stack the weights (and biases) of `(name, rows)` parts below one another."""
        return Linear(
            self._stack([(f"{name}.weight", (rows, columns)) for name, rows in parts]),
            self._stack([(f"{name}.bias", (rows,)) for name, rows in parts]) if bias else None,
        )

    def _stack(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
        read = [self._read(name, *shape).to(self._device, self._dtype) for name, shape in parts]
        return torch.cat(read)

    def _read(self, name: str, *shape: int) -> Tensor:
        if name not in self._located:
            raise BadModelFile(
                f"{self._directory}: tensor {name} is missing; export the model again"
            )
        try:
            tensor: Tensor = self._files[self._located[name]].get_tensor(name)
        except SafetensorError as error:
            raise BadModelFile(f"{self._directory}: tensor {name}: {error}") from error
        if tuple(tensor.shape) != shape:
            raise BadModelFile(
                f"{self._directory}: tensor {name} has shape {list(tensor.shape)}, "
                f"config.json says {list(shape)}; export the model again"
            )
        return tensor
