"""A random Llama of a few kilobytes with a byte-level tokenizer, for tests in any room.

Two calls with the same arguments write the same weights. Nothing is downloaded.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ċ", "Ċ"), ("?", "Ċ"))
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_model(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write config, safetensors and tokenizer into `directory`; return it.

    `overrides` are `LlamaConfig` arguments, e.g. `num_attention_heads=3, num_key_value_heads=1`.
    """
    tokenizer = make_tiny_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    config = LlamaConfig(**(settings | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; a handful of merges let a boundary move when text is appended."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(m) for m in MERGES)]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    make: Any = PreTrainedTokenizerFast  # untyped upstream
    wrapped: PreTrainedTokenizerFast = make(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
