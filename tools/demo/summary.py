"""From single measurements to the demo's numbers. Pure: no clock, no terminal, no files.

How each number comes about:

    ttft_nvme_s      median over the fresh processes of a mode: the first question about a document
    ttft_dram_s,     median of three questions about the document, none asked before; HBM emptied
    ttft_hbm_s         before each of the DRAM ones
    ttft_cold_s      one request under a fresh salt
    restore_vs_raw   at the largest document, for each process: (raw read + memcpy of the bytes that
                       its NVMe hit read) / (that hit's TTFT - median TTFT of its HBM hits, which
                       computed as many tokens); the median over the processes of both modes. The
                       raw time is scaled to the bytes of the hit where they differ by a block.
    hit_ratio        cached tokens / prompt tokens over all requests but the cold ones
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from kvtier.tools.demo.results import Ask, Baseline, Direct, Mode, Raw, Result, State

# Reads count as past the page cache if hardly any page of the segments is in it.
CACHED_AT_MOST = 0.02


@dataclass(frozen=True)
class Row:
    """One document in one mode. Times in seconds, by state."""

    document: str
    mode: Mode
    tokens: int
    hf_s: float
    ttft_s: dict[State, float]
    shown: dict[State, Ask]
    answers_identical: bool
    answer: str

    @property
    def cold_s(self) -> float:
        """What a hit is held against: our cold prefill or transformers', whichever is faster."""
        return min(self.ttft_s[State.COLD], self.hf_s)

    def as_json(self) -> dict[str, object]:
        return {
            "document": self.document,
            "tokens": self.tokens,
            "mode": str(self.mode),
            "ttft_hf_s": round(self.hf_s, 4),
            **{f"ttft_{state}_s": round(self.ttft_s[state], 4) for state in State},
            "nvme_bytes_read": self.shown[State.NVME].nvme_bytes_read,
            "answers_identical": self.answers_identical,
        }


@dataclass(frozen=True)
class DemoSummary:
    model: str
    direct: bool
    restore_vs_raw: float
    hit_ratio: float
    rows: tuple[Row, ...]

    @property
    def answers_identical(self) -> bool:
        return all(row.answers_identical for row in self.rows)

    def as_json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "direct": self.direct,
            "restore_vs_raw": round(self.restore_vs_raw, 3),
            "hit_ratio": round(self.hit_ratio, 4),
            "documents": [row.as_json() for row in self.rows],
        }


def summarise(model: str, results: Sequence[Result]) -> DemoSummary:
    """`results` of every process. Each document needs every state in every mode it was asked in."""
    asks = [result for result in results if isinstance(result, Ask)]
    hf = {each.document: each.prefill_s for each in results if isinstance(each, Baseline)}
    warm = [ask for ask in asks if ask.state is not State.COLD]
    checks = [result for result in results if isinstance(result, Direct)]
    names = list(dict.fromkeys(ask.document for ask in asks))
    modes = list(dict.fromkeys(ask.mode for ask in asks))
    return DemoSummary(
        model=model,
        direct=all(each.asked and each.cached_share <= CACHED_AT_MOST for each in checks),
        restore_vs_raw=median(_restores(asks, [r for r in results if isinstance(r, Raw)])),
        hit_ratio=sum(a.cached_tokens for a in warm) / sum(a.prompt_tokens for a in warm),
        rows=tuple(_row(name, mode, asks, hf[name]) for name in names for mode in modes),
    )


def _row(document: str, mode: Mode, asks: Sequence[Ask], hf_s: float) -> Row:
    about = [ask for ask in asks if ask.document == document]
    here = [ask for ask in about if ask.mode is mode]
    timed = {state: _timed(state, here) for state in State}
    compared = timed[State.COLD][0]
    return Row(
        document=document,
        mode=mode,
        tokens=compared.prompt_tokens,
        hf_s=hf_s,
        ttft_s={state: median(ask.ttft_s for ask in timed[state]) for state in State},
        shown={state: timed[state][0] for state in State},
        answers_identical=_identical(about),
        answer=compared.answer,
    )


def _timed(state: State, asks: Iterable[Ask]) -> list[Ask]:
    """The asks of the first process whose question was new then; NVMe hits of every process."""
    seen: set[str] = set()
    kept = []
    for ask in asks:
        new = ask.question not in seen or state is State.COLD
        seen.add(ask.question)
        if ask.state is state and new and (ask.session == 0 or state is State.NVME):
            kept.append(ask)
    return kept


def _identical(asks: Iterable[Ask]) -> bool:
    """Whether each question has one answer, whatever the tier, the mode and the process."""
    answers: dict[str, set[str]] = {}
    for ask in asks:
        answers.setdefault(ask.question, set()).add(ask.answer)
    return all(len(each) == 1 for each in answers.values())


def _restores(asks: Sequence[Ask], raws: Sequence[Raw]) -> list[float]:
    ratios = []
    largest = max(asks, key=lambda ask: ask.prompt_tokens).document
    for raw in raws:
        here = [
            ask
            for ask in asks
            if (ask.document, ask.mode, ask.session) == (largest, raw.mode, raw.session)
        ]
        nvme = next(ask for ask in here if ask.state is State.NVME)
        hbm = [
            ask.ttft_s
            for ask in here
            if ask.state is State.HBM and ask.cached_tokens == nvme.cached_tokens
        ]
        raw_s = (raw.read_s + raw.memcpy_s) * nvme.nvme_bytes_read / raw.nbytes
        ratios.append(raw_s / max(nvme.ttft_s - median(hbm), 1e-9))
    return ratios
