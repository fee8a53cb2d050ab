"""The miss-ratio curve as a PNG."""

from itertools import accumulate
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from kvtier.tools.replay.curve import BELADY, Curve
from kvtier.tools.replay.report import Report, label
from kvtier.tools.sizes import format_size

_COLOURS = {"lru": "#8c8c8c", "arc": "#dd8452", "adaptive": "#4c72b0", BELADY: "#55a868"}


def draw(report: Report, curve: Curve, path: Path) -> None:
    """Write the curve, and where the replayed tiers stand beside it: each with those above it."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for rule, hits in curve.hits.items():
        misses = [1 - report.share(n) for n in hits]
        axes.plot(curve.capacities, misses, "o-", ms=4, color=_COLOURS[rule], label=label(rule))
    axes.axhline(
        1 - report.share(report.ideal), ls="--", lw=1, color="black", label="infinite cache"
    )
    capacities = report.capacities
    held = list(accumulate(capacities.values()))
    served = list(accumulate(report.outcome.hits[tier] for tier in capacities))
    misses = [1 - report.share(n) for n in served]
    axes.plot(held, misses, "*", ms=13, color="#c44e52", label="the tiers replayed, from the top")
    names = list(capacities)
    for i, (x, y) in enumerate(zip(held, misses, strict=True)):
        axes.annotate(
            " + ".join(name.upper() for name in names[: i + 1]),
            (x, y),
            xytext=(0, -18),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1},
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda blocks, _: _size(report, blocks)))
    axes.set_xlabel("capacity" if report.block_bytes else "capacity, blocks")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylabel("miss ratio, of blocks asked for")
    axes.set_ylim(0, 1.05)
    axes.grid(alpha=0.3)
    outcome = report.outcome
    axes.set_title(f"{report.trace}: {outcome.requests:,} requests, {outcome.asked:,} blocks")
    axes.legend(fontsize=9)
    figure.savefig(path, dpi=150, format="png")


def _size(report: Report, blocks: float) -> str:
    if report.block_bytes is None:
        return f"{blocks:,.0f}"
    return f"{blocks:,.0f} blocks\n{format_size(blocks * report.block_bytes)}"
