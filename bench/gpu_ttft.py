"""Time to the first token by the tier that holds the prompt's prefix, end to end.

A random model of a billion parameters in bf16. Cold is bound by prefill's arithmetic, a hit by
computing the question, by the launches of its layers, and by the link (DRAM) or the drive (NVMe);
so a hit's share of cold falls with the prompt. The targets were set for an engine on a CPU, where
prefill is slower and the share smaller. Rounds are interleaved; a ratio is of one round.

    python -m bench.gpu_ttft [--budget SECONDS] [--directory DIR] [--dry]
"""

import tempfile
from pathlib import Path
from statistics import median

import numpy as np
import torch

from bench.gpu import Gpu
from bench.gpu_model import ONE_BILLION, TINY, ModelShape, write_model
from bench.gpu_part import Report, Setting, run_part
from kvtier.engine.assembly import CacheSettings
from kvtier.engine.llm import LLM
from kvtier.engine.request import Completion
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.scheduler import EngineSettings
from kvtier.index.words import TierId, Tokens

LENGTHS = (4096, 16_384)
"""Prompts; the first one's ratios are the figures."""

DECODED = 16
ROUNDS = 7
MIB = 1 << 20
TIERS: dict[str, tuple[TierId, tuple[TierId, ...]]] = {
    "hbm": (TierId.HBM, ()),
    "dram": (TierId.DRAM, (TierId.HBM,)),
    "nvme": (TierId.NVME, (TierId.HBM, TierId.DRAM)),
}
"""Where a prefix lies after these pools were emptied."""


def engine_settings(gpu: Gpu) -> EngineSettings:
    return EngineSettings(step_tokens=64 if gpu.dry else 4096)


def open_llm(gpu: Gpu, work: Path, shape: ModelShape, engine: EngineSettings) -> LLM:
    """A model of this shape and three tiers, all below `work`."""
    dtype = "float32" if gpu.dry else "bfloat16"
    model = write_model(work / "model", shape, gpu.device, getattr(torch, dtype))
    # Twice and three times the longest prompt: what a round empties goes down to the drive.
    hbm, dram, nvme = (8, 8, 16) if gpu.dry else (1152, 1536, 4096)
    cache = CacheSettings(
        hbm_bytes=hbm * MIB,
        dram_bytes=dram * MIB,
        store=work / "store",
        nvme_bytes=nvme * MIB,
        writeback_s=None,
    )
    return LLM(model, cache=cache, engine=engine, dtype=dtype, device=str(gpu.device))


class Prompt:
    """One prompt, asked with its prefix in each tier."""

    def __init__(self, llm: LLM, tokens: Tokens, *, decoded: int = DECODED) -> None:
        self._llm = llm
        self._tokens = tokens
        self._sampling = SamplingParams(max_tokens=decoded, ignore_stop=True)
        self._colds = 0
        self.last: dict[str, Completion] = {}

    def ready(self) -> Completion:
        """Compute it once and put it into the store. Raises RuntimeError if that fails."""
        self._ask("first", "")
        flushed = self._llm.flush(self._tokens)
        if flushed.failed:
            raise RuntimeError(f"flush: {flushed.failed} blocks could not be written")
        return self.last["first"]

    def round(self, *, backwards: bool) -> dict[str, float]:
        """TTFT in seconds: cold, and by tier."""
        found = {}
        for name in reversed(["cold", *TIERS]) if backwards else ["cold", *TIERS]:
            found[name] = self._cold() if name == "cold" else self.hit(name)
        return found

    def hit(self, name: str) -> float:
        """TTFT in seconds with the prefix in this tier, and, below HBM, nowhere above it."""
        self._ask("again", "")  # whatever came between, the prefix is in HBM and DRAM now
        self._settle()
        for tier in TIERS[name][1]:
            self._llm.cache.shed(tier)
        seconds = self._ask(name, "")
        self._settle()
        return seconds

    def check(self) -> None:
        """Raises RuntimeError if a hit was not of all whole blocks, or not from where it says."""
        size = self._llm.layout.block_size
        whole = (len(self._tokens) - 1) // size * size
        for name, (tier, _) in TIERS.items():
            found = self.last[name].hit_tokens
            if found != {tier: whole}:
                raise RuntimeError(f"{name}: {dict(found)} tokens were found, want {whole}")

    def _cold(self) -> float:
        self._colds += 1
        seconds = self._ask("cold", f"cold {self._colds}")
        self._settle()
        return seconds

    def _ask(self, name: str, salt: str) -> float:
        done = self._llm.generate([self._tokens], self._sampling, salt=salt)[0]
        self.last[name] = done
        return done.ttft_s

    def _settle(self) -> None:
        self._llm.cache.drain(self._llm.cache.clock() + 60)


def measure_prompt(
    setting: Setting, llm: LLM, length: int
) -> tuple[dict[str, list[float]], Prompt]:
    """Seconds of each round by tier. Raises RuntimeError if a hit was not what it should be."""
    rng = np.random.default_rng(length)
    tokens = rng.integers(3, llm.config.vocab_size, length).astype(np.int32)
    prompt = Prompt(llm, tokens, decoded=3 if setting.gpu.dry else DECODED)
    prompt.ready()
    prompt.round(backwards=False)
    seconds: dict[str, list[float]] = {name: [] for name in ("cold", *TIERS)}
    turns = range(1 if setting.gpu.dry else ROUNDS)
    for turn in setting.budget.walk(turns, lambda _: 0.2 + length * 4e-5):
        for name, value in prompt.round(backwards=turn % 2 == 1).items():
            seconds[name].append(value)
    prompt.check()
    return seconds, prompt


def measure(setting: Setting) -> Report:
    gpu = setting.gpu
    lengths = (100,) if gpu.dry else LENGTHS
    rows: list[list[object]] = [["tokens", "prefix in", "TTFT ms", "of cold %", "decode tok/s"]]
    figures: dict[str, float] = {}
    shape = TINY if gpu.dry else ONE_BILLION
    notes: dict[str, object] = {"parameters": shape.parameters}
    with (
        tempfile.TemporaryDirectory(dir=setting.directory) as work,
        open_llm(gpu, Path(work), shape, engine_settings(gpu)) as llm,
    ):
        for length in setting.budget.walk(lengths, lambda n: 4 + n * 4e-4):
            seconds, prompt = measure_prompt(setting, llm, length)
            if not seconds["cold"]:
                continue
            for name, values in seconds.items():
                pairs = zip(values, seconds["cold"], strict=True)
                share = 100 * median(value / cold for value, cold in pairs)
                done = prompt.last[name]
                rate = (len(done.token_ids) - 1) / (done.total_s - done.ttft_s)
                rows.append([str(length), name, 1e3 * median(values), share, rate])
                if length == lengths[0] and name != "cold":
                    figures[f"ttft_{name}"] = share
        notes["direct"] = getattr(llm.store.statistics(), "direct", None) if llm.store else None
    return Report(figures, rows=rows, notes=notes)


if __name__ == "__main__":
    run_part("ttft", __doc__, measure)
