"""Whether a hit leads where a miss led, on the GPU: every tier, lengths around block boundaries.

A miss computes a prompt in one launch, a hit only what was not found, so that its matrix products
have other shapes and may round otherwise: greedy tokens are compared, and what share agrees is
told, not promised.

    python -m bench.gpu_exact [--budget SECONDS] [--directory DIR] [--dry]
"""

import tempfile
from pathlib import Path

import numpy as np

from bench.gpu_model import TINY, ModelShape
from bench.gpu_part import Report, Setting, run_part
from bench.gpu_ttft import DECODED, TIERS, Prompt, open_llm

SMALL = ModelShape(8, 1024, 4096, 16, 4, 64, 32_000, 16_384)
"""150 million parameters: what is compared is not speed."""

LENGTHS = (2048, 2049, 2063, 2064, 517, 4096 + 17)


def measure(setting: Setting) -> Report:
    gpu = setting.gpu
    shape, lengths = (TINY, (33, 48)) if gpu.dry else (SMALL, LENGTHS)
    same = {name: [0, 0] for name in TIERS}
    rng = np.random.default_rng(0)
    with (
        tempfile.TemporaryDirectory(dir=setting.directory) as work,
        open_llm(gpu, Path(work), shape) as llm,
    ):
        for length in setting.budget.walk(lengths, lambda _: 2.0):
            tokens = rng.integers(3, llm.config.vocab_size, length).astype(np.int32)
            prompt = Prompt(llm, tokens, decoded=3 if gpu.dry else DECODED)
            want = prompt.ready()
            for name, counts in same.items():
                prompt.hit(name)
                counts[0] += prompt.last[name].token_ids == want.token_ids
                counts[1] += 1
            prompt.check()
    total = sum(counts[1] for counts in same.values())
    rows: list[list[object]] = [["prefix in", "same tokens", "runs"]]
    rows += [[name, str(counts[0]), str(counts[1])] for name, counts in same.items()]
    figures = {}
    if total:
        figures["exact_tokens"] = 100 * sum(counts[0] for counts in same.values()) / total
    return Report(figures, {"exact_bits": "the engine has no exact mode"}, rows)


if __name__ == "__main__":
    run_part("exact", __doc__, measure)
