"""What exact mode costs: the same prompts through a plain engine and an exact one, interleaved.

Bound by matrix products. Prefill pays for padding the last chunk and for launches of one chunk
each, so its ratio is about `ceil(n / chunk) * chunk / n`; a hit pays for up to a chunk that is
computed again; one sequence decodes in `max_running` rows, whose price per row falls with their
number, and a full batch pays nothing. Times of one run are comparable with each other only: ratios
are medians of pairs. Prints a table, then one JSON line.

    python -m bench.exact [--quick] [--model DIR] [--tokens N] [--rounds N] [--chunks N ...]
"""

import argparse
import statistics
import tempfile
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import torch

from bench.harness import emit, note, table
from bench.requests import random_model
from kvtier.engine.assembly import CacheSettings
from kvtier.engine.llm import LLM
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.scheduler import EngineSettings
from kvtier.index.words import Tokens
from kvtier.tools.model import fetch_model

QUESTION = 48
DECODED = 16
RUNNING = 8

Figures = dict[str, list[float]]
"""Seconds, by what was timed."""


def open_engine(model: Path, chunk: int) -> LLM:
    """An engine over HBM alone, exact if `chunk` is not 0."""
    engine = EngineSettings(max_running=RUNNING)
    if chunk:
        rows = max(engine.step_tokens, chunk + RUNNING)
        engine = replace(engine, exact=True, exact_chunk=chunk, step_tokens=rows)
    return LLM(model, cache=CacheSettings(hbm_bytes=1 << 30, dram_bytes=0), engine=engine)


def ask(llm: LLM, prompt: Tokens, others: list[Tokens], salt: str, into: Figures) -> None:
    """A miss, a hit but for the question, one sequence decoding, and a full batch of them."""
    sampling = SamplingParams(max_tokens=DECODED, ignore_stop=True)
    (cold,) = llm.generate([prompt], sampling, salt=salt)
    (warm,) = llm.generate([prompt], sampling, salt=salt)
    together = llm.generate(others, sampling, salt=salt)
    into.setdefault("miss", []).append(cold.ttft_s)
    into.setdefault("hit", []).append(warm.ttft_s)
    into.setdefault("decode, alone", []).append(warm.total_s - warm.ttft_s)
    # From when the last of them decodes too, until it is done.
    seconds = max(each.total_s for each in together) - max(each.ttft_s for each in together)
    into.setdefault("decode, full batch", []).append(seconds)


def compare(model: Path, chunk: int, tokens: int, rounds: int) -> dict[str, float]:
    """Median of exact over plain, by what was timed."""
    plain, exact = Figures(), Figures()
    with open_engine(model, 0) as without, open_engine(model, chunk) as with_it:
        numbers = np.random.default_rng(chunk)
        size, salts = without.config.vocab_size, count()
        arms = [(without, plain), (with_it, exact)]
        for turn in range(rounds + 1):
            prompt = numbers.integers(3, size, tokens).astype(np.int32)
            others = [numbers.integers(3, size, 16).astype(np.int32) for _ in range(RUNNING)]
            for llm, into in arms if turn % 2 == 0 else arms[::-1]:
                ask(llm, prompt, others, str(next(salts)), into)
            if turn == 0:  # pages and thread pools
                plain.clear()
                exact.clear()
    return {
        name: statistics.median(b / a for a, b in zip(plain[name], exact[name], strict=True))
        for name in plain
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small random model")
    parser.add_argument("--model", type=Path, help="Hugging Face directory (default: SmolLM2)")
    parser.add_argument("--tokens", type=int, default=2048 + QUESTION)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokens, rounds = (300, 2) if options.quick else (options.tokens, options.rounds)
    rows: list[list[object]] = []
    values: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir=".") as work:
        scratch = Path(work)
        if options.quick:
            model = random_model(scratch / "model")
        else:
            model = options.model or fetch_model(scratch / "model")
        for chunk in options.chunks:
            note(f"chunks of {chunk}")
            ratios = compare(model, chunk, tokens, rounds)
            rows = rows or [["exact over plain, chunk", *ratios]]
            rows.append([str(chunk), *ratios.values()])
            values[str(chunk)] = ratios
    table(rows)
    emit(
        {
            "bench": "exact",
            "tokens": tokens,
            "rounds": rounds,
            "threads": options.threads,
            "time_ratio_by_chunk": values,
        }
    )


if __name__ == "__main__":
    main()
