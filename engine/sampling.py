"""How the next token is chosen from logits: greedy, or seeded sampling. Knows no model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier.engine.errors import BadSampling


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy. `top_k` 0 and `top_p` 1 leave every token in.

    `seed` makes one request's draws repeatable, whatever runs beside it; None draws afresh.
    `stop_ids` end a text besides the model's own end-of-text ids, which `ignore_stop` disregards.
    Raises `BadSampling` if a value is outside its range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    ignore_stop: bool = False

    def __post_init__(self) -> None:
        rules = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0.0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
        }
        for name, (kept, want) in rules.items():
            if not kept:
                raise BadSampling(f"sampling.{name}: {getattr(self, name)} given, want {want}")


class Sampler:
    """Draws one request's tokens. Its generator moves on once for each drawn token."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def pick(self, logits: Tensor) -> int:
        """One token id from float32 logits `[vocab]`."""
        params = self._params
        if params.temperature == 0.0:
            return int(logits.argmax())
        scaled = logits.cpu() / params.temperature
        if params.top_k:
            kept = scaled.topk(min(params.top_k, len(scaled)))
            scaled = torch.full_like(scaled, float("-inf")).scatter(0, kept.indices, kept.values)
        chances = scaled.softmax(-1)
        if params.top_p < 1.0:
            ordered, order = chances.sort(descending=True, stable=True)
            # A token stays if those before it have not reached top_p: the first one always does.
            ordered[ordered.cumsum(-1) - ordered >= params.top_p] = 0.0
            chances = torch.zeros_like(chances).scatter(0, order, ordered)
        return int(torch.multinomial(chances, 1, generator=self._generator))
