"""Reading a model directory: what is refused, and what the message says."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvtier.engine.errors import BadModelFile, ModelFileMissing, UnsupportedModel
from kvtier.engine.model_config import read_config
from kvtier.engine.weights import load_weights, weight_files


@pytest.fixture
def copied(tiny: Path, tmp_path: Path) -> Path:
    return copytree(tiny, tmp_path / "model")


def edit(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, ["MixtralForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, ["DeepseekV3ForCausalLM"]),
        ({"sliding_window": 4096}, ["sliding_window"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"hidden_act": "gelu"}, ["hidden_act"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, ["yarn", "llama3"]),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, ["linear"]),
    ],
)
def test_an_unsupported_feature_is_refused_by_name(
    copied: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read_config(edit(copied, **changes))
    assert all(word in str(caught.value) for word in [*words, str(copied)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(copied: Path, name: str) -> None:
    (copied / name).unlink()
    with pytest.raises(ModelFileMissing, match=name):
        load_weights(copied, read_config(copied), torch.float32)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileMissing, match="nowhere"):
        read_config(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "[]", '{"architectures": ["LlamaForCausalLM"]}'])
def test_a_damaged_config_is_named(copied: Path, text: str) -> None:
    (copied / "config.json").write_text(text)
    with pytest.raises(BadModelFile, match=r"config\.json"):
        read_config(copied)


def test_a_damaged_weights_file_is_named(copied: Path) -> None:
    (copied / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    with pytest.raises(BadModelFile, match=r"model\.safetensors"):
        load_weights(copied, read_config(copied), torch.float32)


def test_a_missing_or_misshapen_tensor_is_named(copied: Path) -> None:
    path = copied / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    kept = tensors.pop(name)
    save_file(tensors, path)
    with pytest.raises(BadModelFile, match=f"{name} is missing"):
        load_weights(copied, read_config(copied), torch.float32)
    save_file(tensors | {name: kept[:, :-1].contiguous()}, path)
    with pytest.raises(BadModelFile, match=f"{name} has shape"):
        load_weights(copied, read_config(copied), torch.float32)


def test_sharded_weights_equal_single_ones_and_a_missing_shard_is_named(
    copied: Path, tmp_path: Path
) -> None:
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(copied).save_pretrained(sharded, max_shard_size="100KB")
    assert len(weight_files(sharded)) > 1
    one = load_weights(copied, read_config(copied), torch.float32)
    many = load_weights(sharded, read_config(sharded), torch.float32)
    assert torch.equal(one.embedding, many.embedding)
    for a, b in zip(one.layers, many.layers, strict=True):
        assert torch.equal(a.qkv.weight, b.qkv.weight)
        assert torch.equal(a.gate_up.weight, b.gate_up.weight)
    lost = weight_files(sharded)[-1]
    lost.unlink()
    with pytest.raises(ModelFileMissing, match=lost.name):
        load_weights(sharded, read_config(sharded), torch.float32)


def test_weights_do_not_depend_on_the_file_once_loaded(copied: Path) -> None:
    weights = load_weights(copied, read_config(copied), torch.float32)
    before = weights.embedding.sum().item(), weights.layers[0].down.weight.sum().item()
    path = copied / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert (weights.embedding.sum().item(), weights.layers[0].down.weight.sum().item()) == before


def test_old_and_new_rope_spellings_mean_the_same(copied: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    new = read_config(edit(copied, rope_parameters=scaling | {"rope_theta": 5e5}))
    old = read_config(edit(copied, rope_parameters=None, rope_theta=5e5, rope_scaling=scaling))
    assert old.rope == new.rope
    assert old.rope.kind == "llama3"


def test_stop_ids_come_from_the_generation_config_first(copied: Path) -> None:
    assert read_config(copied).stop_ids == (2,)
    (copied / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert read_config(copied).stop_ids == (2, 5)
