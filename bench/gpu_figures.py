"""Every figure that the GPU suite is asked for, its target, and the verdict on a value.

`design`: the project's promises in numbers; `field`: what the literature on such kernels and copies
lets one expect, relative to what the same run measures. A figure without a target is told as it is.
Knows no GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

DESIGN, FIELD, CPU = "design", "field", "design, for a CPU engine"


class Verdict(StrEnum):
    MET = "met"
    SHORT = "short"
    TOLD = "-"
    SKIPPED = "skipped"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Target:
    """`value` is the least allowed if `is_floor`, else the most."""

    value: float
    is_floor: bool
    source: str

    def __str__(self) -> str:
        return f"{'>=' if self.is_floor else '<='} {self.value:g} ({self.source})"

    def allows(self, value: float) -> bool:
        return value >= self.value if self.is_floor else value <= self.value


def at_least(value: float, source: str = DESIGN) -> Target:
    return Target(value, True, source)


def at_most(value: float, source: str = DESIGN) -> Target:
    return Target(value, False, source)


@dataclass(frozen=True)
class Figure:
    """`name` is unique over all parts. `is_vital`: short of it, something is wrong, not slow."""

    name: str
    what: str
    unit: str
    target: Target | None = None
    is_vital: bool = False

    def judge(self, value: float) -> Verdict:
        if self.target is None:
            return Verdict.TOLD
        if self.target.allows(value):
            return Verdict.MET
        return Verdict.FAILED if self.is_vital else Verdict.SHORT


@dataclass(frozen=True)
class Line:
    """One figure's outcome; `why` says why there is no value, or what was left out of it."""

    figure: Figure
    value: float | None
    verdict: Verdict
    why: str = ""


FIGURES: Mapping[str, tuple[Figure, ...]] = {
    "tests": (
        Figure("tests_failed", "GPU tests that failed", "tests", at_most(0), True),
        Figure("tests_passed", "GPU tests that passed", "tests", at_least(1)),
        Figure("tests_not_run", "GPU tests without time", "tests", at_most(0)),
    ),
    "exact": (
        Figure("exact_bits", "exact mode: hits with a miss's bits", "%", at_least(100), True),
        Figure("exact_tokens", "hits with a miss's tokens, not exact mode", "%"),
    ),
    "bandwidth": (
        Figure("read_gb_s", "reading device memory (Triton)", "GB/s"),
        Figure("pinned_up_gb_s", "pinned memcpy, host to device", "GB/s"),
        Figure("pinned_down_gb_s", "pinned memcpy, device to host", "GB/s"),
        Figure("pinned_both_gb_s", "pinned memcpy, both ways, sum", "GB/s"),
    ),
    "attention": (
        Figure("decode_b8_8k", "decode of read, batch >= 8, context >= 8k", "%", at_least(90)),
        Figure("decode_b1_32k", "decode of read, one of >= 32k", "%", at_least(75, FIELD)),
        Figure("decode_vs_sdpa", "decode, SDPA's time / ours, worst", "x"),
        Figure("decode_vs_flashinfer", "decode, FlashInfer's time / ours, worst", "x"),
        Figure("decode_vs_flash_attn", "decode, FlashAttention's time / ours, worst", "x"),
    ),
    "lengths": (
        Figure("decode_spread", "decode of read, 32 of 0.6k to 6k", "%", at_least(85, FIELD)),
        Figure("decode_random_loss", "decode, random blocks, loss", "%", at_most(5, FIELD)),
        Figure("decode_fp8", "decode of read, FP8, 16 of 8k", "%", at_least(85, FIELD)),
        Figure("shared_speedup", "shared-prefix decode, 32 on 16k", "x", at_least(3, FIELD)),
    ),
    "layout": (
        Figure("layout_pool_gib", "pool of the layouts compared", "GiB", at_least(60)),
        Figure("layout_loss", "decode, block-major, loss to layer-major", "%", at_most(3)),
    ),
    "prefill": (
        Figure("prefill_vs_sdpa", "prefill, SDPA's time / ours, worst", "x"),
        Figure("prefill_tflops", "prefill, best", "TFLOP/s"),
    ),
    "copies": (
        Figure("promote_of_pinned", "promotion of pinned memcpy", "%", at_least(95)),
        Figure("demote_of_pinned", "demotion of pinned memcpy", "%", at_least(95)),
        Figure("both_of_pinned", "both ways of pinned both ways", "%"),
        Figure("decode_slowdown", "decode slower during copies by", "%", at_most(3, FIELD)),
    ),
    "ttft": (
        Figure("ttft_hbm", "first token of 4k, HBM hit, of cold", "%", at_most(5, CPU)),
        Figure("ttft_dram", "first token of 4k, DRAM hit, of cold", "%", at_most(5, CPU)),
        Figure("ttft_nvme", "first token of 4k, NVMe hit, of cold", "%", at_most(7, CPU)),
    ),
}
"""By the part that measures them, in the order of the table."""


def lines_of(
    part: str, values: Mapping[str, float], skips: Mapping[str, str], why: str, *, failed: bool
) -> list[Line]:
    """A line for each figure of `part`; one without a value is skipped, or failed with its part.

    Raises ValueError for a value that is no figure of this part.
    """
    wanted = FIGURES[part]
    strange = sorted(values.keys() - {each.name for each in wanted})
    if strange:
        raise ValueError(f"{part}: reports {', '.join(strange)}, which it is not asked for")
    lines = []
    for figure in wanted:
        value = values.get(figure.name)
        if failed:
            lines.append(Line(figure, None, Verdict.FAILED, why))
        elif value is None:
            reason = skips.get(figure.name) or why or "not measured"
            lines.append(Line(figure, None, Verdict.SKIPPED, reason))
        else:
            lines.append(Line(figure, value, figure.judge(value), skips.get(figure.name, "")))
    return lines


def table_rows(lines: list[Line]) -> list[list[object]]:
    """For `bench.harness.table`: figure, value, target, verdict, why."""
    rows: list[list[object]] = [["figure", "value", "unit", "target", "verdict", "  why"]]
    for line in lines:
        value = "" if line.value is None else f"{line.value:.4g}"
        target = "" if line.figure.target is None else str(line.figure.target)
        why = f"  {line.why}" if line.why else ""
        rows.append([line.figure.what, value, line.figure.unit, target, line.verdict.value, why])
    return rows
