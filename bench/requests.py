"""End to end: time to first token of one prompt by where its prefix lies, and decoding.

The baseline is transformers on the same model, prompt and threads in the same run. What a hit
cannot beat is computing the question alone; what a miss must not lose to is transformers' own
prefill. Rounds are interleaved (transformers, cold, HBM, DRAM, NVMe, then the other way round), so
that a drifting machine hits all alike. NVMe hits are read with both pools emptied, in one process:
a restart adds nothing to a hit but an empty index. Prints a table, then one JSON line.

    python -m bench.requests [--quick] [--model DIR] [--tokens N] [--rounds N]
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from bench.harness import Sample, emit, table
from kvtier.engine.assembly import CacheSettings
from kvtier.engine.llm import LLM
from kvtier.engine.request import Completion
from kvtier.engine.sampling import SamplingParams
from kvtier.index.words import TierId, Tokens
from kvtier.tools.model import fetch_model

QUESTION = 48
DECODED = 24
TOGETHER = 8


def random_model(directory: Path) -> Path:
    """A small Llama with random weights, for a quick look at the harness itself."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


class Rounds:
    """One prompt, asked in every state of the cache."""

    def __init__(self, llm: LLM, hf: Any, prompt: Tokens) -> None:
        self._llm = llm
        self._hf = hf
        self._prompt = prompt
        self._sampling = SamplingParams(max_tokens=DECODED, ignore_stop=True)
        self._salts = 0
        self.ttft: dict[str, list[float]] = {}
        self.decode: dict[str, list[float]] = {}
        self.answers: set[tuple[int, ...]] = set()
        self.hits: dict[str, Completion] = {}

    def run(self, rounds: int) -> None:
        steps: list[tuple[str, Callable[[], None]]] = [
            ("transformers", self._transformers),
            ("cold", self._cold),
            ("hbm", lambda: self._ask("hbm", "")),
            ("dram", self._dram),
            ("nvme", self._nvme),
        ]
        self._ask("first", "")
        self._llm.flush(self._prompt)
        self._nvme()
        self._transformers()
        self.ttft.clear()
        self.decode.clear()
        for turn in range(rounds):
            for _, step in steps if turn % 2 == 0 else reversed(steps):
                step()

    def _ask(self, name: str, salt: str) -> None:
        done = self._llm.generate([self._prompt], self._sampling, salt=salt)[0]
        self.ttft.setdefault(name, []).append(done.ttft_s)
        rate = (DECODED - 1) / (done.total_s - done.ttft_s)
        self.decode.setdefault(name, []).append(rate)
        self.answers.add(done.token_ids)
        self.hits[name] = done

    def _cold(self) -> None:
        self._salts += 1
        self._ask("cold", f"cold {self._salts}")
        self._llm.cache.drain(self._llm.cache.clock() + 60)
        self._ask("warm up", "")  # the cold run may have pushed the prompt out of HBM

    def _dram(self) -> None:
        self._llm.cache.shed(TierId.HBM)
        self._ask("dram", "")

    def _nvme(self) -> None:
        self._llm.cache.shed(TierId.HBM)
        self._llm.cache.shed(TierId.DRAM)
        self._ask("nvme", "")
        self._llm.cache.drain(self._llm.cache.clock() + 60)

    @torch.inference_mode()
    def _transformers(self) -> None:
        ids = torch.from_numpy(self._prompt).long()[None]
        begin = time.perf_counter()
        out = self._hf(ids, use_cache=True, logits_to_keep=1)
        answer = [int(out.logits[0, -1].argmax())]
        first = time.perf_counter()
        for _ in range(DECODED - 1):
            step = torch.tensor([answer[-1:]])
            out = self._hf(step, past_key_values=out.past_key_values, use_cache=True)
            answer.append(int(out.logits[0, -1].argmax()))
        self.ttft.setdefault("transformers", []).append(first - begin)
        rate = (DECODED - 1) / (time.perf_counter() - first)
        self.decode.setdefault("transformers", []).append(rate)
        self.answers.add(tuple(answer))


def together(llm: LLM, document: Tokens, rng: np.random.Generator) -> tuple[float, float]:
    """Tokens a second of eight questions about one document: in one call, and one after another."""
    sampling = SamplingParams(max_tokens=DECODED, ignore_stop=True)
    rates = []
    for batched in (True, False):
        asked = [
            np.concatenate([document, rng.integers(3, 500, QUESTION).astype(np.int32)])
            for _ in range(TOGETHER)
        ]
        begin = time.perf_counter()
        if batched:
            llm.generate(asked, sampling)
        else:
            for prompt in asked:
                llm.generate([prompt], sampling)
        rates.append(TOGETHER * DECODED / (time.perf_counter() - begin))
    return rates[0], rates[1]


def report(rounds: Rounds, tokens: int) -> dict[str, object]:
    rows: list[list[object]] = [
        ["prefix in", "hit tokens", "TTFT s", "p20", "p80", "of the faster miss", "decode tok/s"]
    ]
    # Ratios within a round: what slows the whole machine down cancels.
    misses = np.minimum(rounds.ttft["transformers"], rounds.ttft["cold"])
    values: dict[str, object] = {"tokens": tokens}
    for name in ("transformers", "cold", "nvme", "dram", "hbm"):
        sample = Sample(tuple(rounds.ttft[name]))
        ratio = float(np.median(np.asarray(rounds.ttft[name]) / misses))
        rate = float(np.median(rounds.decode[name]))
        hit = rounds.hits[name].cached_tokens if name in rounds.hits else 0
        rows.append([name, str(hit), sample.median, sample.p20, sample.p80, ratio, rate])
        values |= {f"ttft_{name}_s": sample.median, f"decode_{name}_tok_s": rate}
        values[f"ratio_{name}"] = ratio
    table(rows)
    values["answers_identical"] = len(rounds.answers) == 1
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small random model")
    parser.add_argument("--model", type=Path, help="Hugging Face directory (default: SmolLM2)")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokens, rounds = (1024, 3) if options.quick else (options.tokens, options.rounds)
    with tempfile.TemporaryDirectory(dir=".") as work:
        scratch = Path(work)
        if options.quick:
            model = random_model(scratch / "model")
        else:
            model = options.model or fetch_model(scratch / "model")
        hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        rng = np.random.default_rng(0)
        prompt = rng.integers(3, hf.config.vocab_size, tokens).astype(np.int32)
        settings = CacheSettings(store=scratch / "store", nvme_bytes=4 << 30)
        with LLM(model, cache=settings, threads=options.threads) as llm:
            measured = Rounds(llm, hf, prompt)
            measured.run(rounds)
            values = report(measured, tokens)
            batched, one_by_one = together(llm, prompt[:-QUESTION], rng)
            direct = getattr(llm.store.statistics(), "direct", None) if llm.store else None
    print(f"{TOGETHER} questions together {batched:.1f} tok/s, one by one {one_by_one:.1f}")
    values |= {"together_tok_s": batched, "one_by_one_tok_s": one_by_one, "direct": direct}
    emit({"bench": "requests", "threads": options.threads, "rounds": rounds, **values})


if __name__ == "__main__":
    main()
