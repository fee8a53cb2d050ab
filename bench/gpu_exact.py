"""Whether a hit leads where a miss led, on the GPU: every tier, and hits of every awkward length.

In exact mode each launch's logits are compared bit by bit, of the prompt's end and of the tokens
after it: one other bit fails the run. Without it a hit computes matrices of other shapes than a
miss, which may round otherwise; then greedy tokens are compared, and what share agrees is told.

    python -m bench.gpu_exact [--budget SECONDS] [--directory DIR] [--dry]
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from bench.gpu_model import TINY, ModelShape
from bench.gpu_part import Report, Setting, run_part
from bench.gpu_ttft import TIERS, engine_settings, open_llm
from kvtier.engine.errors import NotExact
from kvtier.engine.llm import LLM
from kvtier.engine.request import Completion
from kvtier.engine.runner import Runner
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.scheduler import EngineSettings, Work
from kvtier.index.words import Tokens

SMALL = ModelShape(8, 1024, 4096, 16, 4, 64, 32_000, 16_384)
"""150 million parameters: what is compared is not speed."""

BLOCK = 16
CHUNK = 256
PROMPT = 5 * CHUNK + 3
DECODED = 6


class Trail:
    """While entered, every launch's logits: the bits that exact mode promises."""

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=16)
        run = Runner.run

        def watched(runner: Runner, work: Sequence[Work]) -> dict[int, Tensor]:
            logits = run(runner, work)
            for _, row in sorted(logits.items()):
                self._digest.update(row.cpu().contiguous().view(torch.uint8).numpy().tobytes())
            return logits

        self._patch = patch.object(Runner, "run", watched)

    def __enter__(self) -> "Trail":
        self._patch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patch.stop()

    def take(self) -> bytes:
        """The digest of the logits since the last call."""
        taken, self._digest = self._digest.digest(), blake2b(digest_size=16)
        return taken


@dataclass(frozen=True)
class Outcome:
    """What a hit led to, beside the miss: `found` tokens of the prompt."""

    case: str
    found: int
    same_bits: bool
    same_tokens: bool

    def row(self) -> list[str]:
        same = ["yes" if is_same else "no" for is_same in (self.same_bits, self.same_tokens)]
        return [self.case, str(self.found), *same]


def hit_lengths(chunk: int, prompt: int) -> list[int]:
    """How much of the prompt was asked before: about every block and chunk boundary of it."""
    near = [1, BLOCK - 1, BLOCK, BLOCK + 1]
    for whole in (chunk, 2 * chunk, prompt // chunk * chunk):
        near += [whole - BLOCK, whole - 1, whole, whole + 1, whole + BLOCK]
    return sorted({length for length in near if 0 < length <= prompt})


def compare(llm: LLM, trail: Trail, tokens: Tokens, hits: Sequence[int]) -> list[Outcome]:
    """Ask after a part of the prompt was asked, and from each tier; raises RuntimeError if a tier
    that was to be hit was not."""
    sampling = SamplingParams(max_tokens=DECODED, ignore_stop=True)

    def ask(part: Tokens, salt: str) -> tuple[Completion, bytes]:
        trail.take()
        done = llm.generate([part], sampling, salt=salt)[0]
        return done, trail.take()

    miss, bits = ask(tokens, "")

    def outcome(case: str, salt: str) -> Outcome:
        done, found = ask(tokens, salt)
        same = done.token_ids == miss.token_ids
        return Outcome(case, done.cached_tokens, found == bits, same)

    outcomes = []
    for length in hits:
        ask(tokens[:length], f"after {length}")
        outcomes.append(outcome(f"after {length}", f"after {length}"))
    llm.flush(tokens)
    for name, (_, above) in TIERS.items():
        ask(tokens, "")
        llm.cache.drain(llm.cache.clock() + 60)
        for tier in above:
            llm.cache.shed(tier)
        outcomes.append(outcome(name, ""))
        if not outcomes[-1].found:
            raise RuntimeError(f"{name}: nothing was found")
    return outcomes


def run_mode(setting: Setting, work: Path, engine: EngineSettings, chunk: int) -> list[Outcome]:
    """Raises `NotExact` if that is asked for and this machine's products do not allow it."""
    gpu = setting.gpu
    shape, length = (TINY, 3 * chunk + 3) if gpu.dry else (SMALL, PROMPT)
    hits = hit_lengths(chunk, length)[:: 5 if gpu.dry else 1]
    tokens = np.random.default_rng(0).integers(3, shape.vocab, length).astype(np.int32)
    with Trail() as trail, open_llm(gpu, work, shape, engine) as llm:
        return compare(llm, trail, tokens, hits)


def measure(setting: Setting) -> Report:
    plain = engine_settings(setting.gpu)
    chunk = 32 if setting.gpu.dry else CHUNK
    exact = replace(plain, exact=True, exact_chunk=chunk, max_running=4)
    rows: list[list[object]] = [["mode", "case", "tokens found", "same bits", "same tokens"]]
    figures: dict[str, float] = {}
    skips: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=setting.directory) as work:
        modes = {"exact_bits": exact, "exact_tokens": plain}
        for name in setting.budget.walk(modes, lambda _: 10.0):
            try:
                found = run_mode(setting, Path(work) / name, modes[name], chunk)
            except NotExact as error:
                skips[name] = f"refused: {error}"
                continue
            same = [each.same_bits if name == "exact_bits" else each.same_tokens for each in found]
            figures[name] = 100 * sum(same) / len(same)
            mode = "exact" if modes[name].exact else "plain"
            rows += [[mode, *each.row()] for each in found]
    return Report(figures, skips, rows)


if __name__ == "__main__":
    run_part("exact", __doc__, measure)
