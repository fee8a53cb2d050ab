"""Reads `config.json` of a Hugging Face directory into one frozen value.

Knows which architectures this engine computes and refuses every other by name, so that no model
runs with a feature silently left out. Does not read weights.
"""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvtier.engine.errors import BadModelFile, ModelFileMissing, UnsupportedModel

SUPPORTED = ("LlamaForCausalLM",)


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: plain, or with Llama 3's frequency scaling (`kind` "llama3")."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_positions: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a dense Llama decoder. Sizes are counts of elements, not bytes."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: Rope
    stop_ids: tuple[int, ...]

    @cached_property
    def digest(self) -> str:
        """Hex digest of every field that the computed K and V depend on."""
        fields = asdict(self)
        del fields["stop_ids"], fields["max_positions"]
        return blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=32).hexdigest()


def read_config(directory: Path) -> ModelConfig:
    """Parse `directory/config.json`.

    Raises `ModelFileMissing`, `BadModelFile` (not JSON, a field missing or of the wrong kind), or
    `UnsupportedModel`, which names the architecture or feature and what is supported.
    """
    raw = _read_json(directory, "config.json")
    _refuse_unsupported(directory, raw)
    try:
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        config = ModelConfig(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            rope=_rope(directory, raw),
            stop_ids=_stop_ids(directory, raw),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadModelFile(
            f"{directory / 'config.json'}: {type(error).__name__} at {error}; "
            "export the model again with save_pretrained"
        ) from error
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise BadModelFile(
            f"{directory / 'config.json'}: {config.heads} heads over {config.kv_heads} KV heads of "
            f"{config.head_dim} is no grouped attention; export the model again"
        )
    return config


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    if not directory.is_dir():
        raise ModelFileMissing(f"{directory}: no such model directory; pass a Hugging Face one")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFileMissing(
            f"{directory}: {name} is missing; pass a Hugging Face model directory"
        ) from None
    except (OSError, ValueError) as error:
        raise BadModelFile(f"{path}: {error}; export the model again") from error
    if not isinstance(value, dict):
        raise BadModelFile(f"{path}: not a JSON object; export the model again")
    return value


def _refuse_unsupported(directory: Path, raw: dict[str, Any]) -> None:
    names = raw.get("architectures") or [raw.get("model_type", "none named")]
    if not any(name in SUPPORTED for name in names):
        raise UnsupportedModel(
            f"{directory}: architecture {', '.join(map(str, names))} is not supported; "
            f"use one of {', '.join(SUPPORTED)}"
        )
    unsupported = {
        "sliding_window": raw.get("sliding_window"),
        "quantization_config": raw.get("quantization_config"),
        "hidden_act other than silu": raw.get("hidden_act", "silu") != "silu",
        "partial_rotary_factor": (_rope_fields(raw).get("partial_rotary_factor") or 1.0) != 1.0,
    }
    for feature, present in unsupported.items():
        if present:
            raise UnsupportedModel(
                f"{directory}: {feature} is not supported; "
                f"use a dense {SUPPORTED[0]} with full attention and unquantised weights"
            )


def _rope_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`; earlier ones `rope_theta` and `rope_scaling`."""
    fields = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    merged: dict[str, Any] = {
        key: raw[key] for key in ("rope_theta", "partial_rotary_factor") if key in raw
    }
    return merged | dict(fields)


def _rope(directory: Path, raw: dict[str, Any]) -> Rope:
    fields = _rope_fields(raw)
    kind = fields.get("rope_type") or fields.get("type") or "default"
    theta = float(fields.get("rope_theta", 10000.0))
    if kind == "default":
        return Rope(theta)
    if kind != "llama3":
        raise UnsupportedModel(
            f"{directory}: rope scaling {kind!r} is not supported; use default or llama3"
        )
    return Rope(
        theta,
        kind,
        float(fields["factor"]),
        float(fields["low_freq_factor"]),
        float(fields["high_freq_factor"]),
        int(
            fields.get("original_max_position_embeddings")
            or raw.get("max_position_embeddings", 2048)
        ),
    )


def _stop_ids(directory: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end a text: `generation_config.json` overrides `config.json`, as in transformers."""
    found = raw.get("eos_token_id")
    if (directory / "generation_config.json").exists():
        found = _read_json(directory, "generation_config.json").get("eos_token_id", found)
    if found is None:
        return ()
    return tuple(int(each) for each in (found if isinstance(found, list) else [found]))
