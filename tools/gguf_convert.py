"""Turn a quantised GGUF file of a Llama-type model into a Hugging Face directory.

Writes config.json, generation_config.json, model.safetensors (float32: dequantised values are not
rounded again) and the tokenizer with its chat template. Knows the GGUF names of the Llama family
and nothing about where the file came from. No torch.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.tools.errors import ModelUnavailable

Weights = npt.NDArray[np.float32]

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(source: Path, target: Path) -> None:
    """Write the model in `source` (a .gguf file) as a Hugging Face directory into `target`.

    `target` must be an empty directory; after an error it holds an unusable part. Raises
    `ModelUnavailable` for another architecture, or a file without a chat template.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file
    from transformers import AutoConfig, AutoTokenizer

    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    if architecture != "llama":
        raise ModelUnavailable(
            f"{source.name}: architecture {architecture!r}; only 'llama' is converted: "
            "pass --model DIR with a Hugging Face directory"
        )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if not tokenizer.chat_template:
        raise ModelUnavailable(
            f"{source.name}: no chat template; pass --model DIR with a chat model"
        )
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "float32"
    tensors = dict(_tensors(reader, config.num_attention_heads, config.num_key_value_heads))
    config.tie_word_embeddings = "lm_head.weight" not in tensors

    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _tensors(reader: Any, heads: int, kv_heads: int) -> Iterator[tuple[str, Weights]]:
    """Each tensor of the file under its Hugging Face name, dequantised."""
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        name: str = tensor.name
        weights = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if name in _TOP:
            yield _TOP[name], weights
            continue
        prefix, layer, part, kind = (name.split(".") + [""] * 4)[:4]
        if prefix != "blk" or part not in _LAYER:
            raise ModelUnavailable(
                f"{name}: not a tensor of a plain Llama model; pass --model DIR with a "
                "Hugging Face directory"
            )
        if part in ("attn_q", "attn_k"):
            weights = interleaved_to_halves(weights, heads if part == "attn_q" else kv_heads)
        yield f"model.layers.{layer}.{_LAYER[part]}.{kind}", weights


def interleaved_to_halves(weights: Weights, heads: int) -> Weights:
    """Reorder the rows of a Q or K projection, `[heads * head_dim, hidden]`.

    GGUF rotates neighbouring pairs (row 2i with 2i+1 of a head), Hugging Face rotates halves (row
    i with i + head_dim/2). Row `2i + j` of each head moves to row `j * head_dim/2 + i`.
    """
    rows = weights.shape[0]
    paired = weights.reshape(heads, rows // heads // 2, 2, *weights.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(weights.shape))
