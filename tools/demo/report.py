"""Shows the demo's numbers: a table and bars on the terminal, and the same bars as a PNG."""

from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvtier.index.words import TierId
from kvtier.tools.demo.results import State
from kvtier.tools.demo.summary import DemoSummary, Row
from kvtier.tools.sizes import format_size

LABELS = {
    State.COLD: "cold",
    State.NVME: "NVMe hit",
    State.DRAM: "DRAM hit",
    State.HBM: "HBM hit",
}
# What a hit at the largest document may cost, against the faster cold prefill.
LIMITS = {State.NVME: 0.07, State.DRAM: 0.05, State.HBM: 0.05}
RESTORE_AT_LEAST = 0.8

BAR_WIDTH = 48
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_COLOURS = {
    State.COLD: "#8c8c8c",
    State.NVME: "#c44e52",
    State.DRAM: "#dd8452",
    State.HBM: "#4c72b0",
}


def show(summary: DemoSummary, console: Console) -> None:
    """Print table, bars, answers and what the largest document reached."""
    console.print(_table(summary))
    for part in (_bars, _answers, _reached):
        for line in part(summary):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print()


def _table(summary: DemoSummary) -> Table:
    """Fits 80 columns. Hit tokens stand under the tier they were found in."""
    title = f"time to first token (TTFT), {summary.model}"
    table = Table(title=title, box=SIMPLE_HEAD, padding=0, collapse_padding=True)
    for heading in ("document", "mode", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tokens", "hbm", "dram", "nvme", "TTFT, s", "speed-up", "bytes read"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in summary.rows:
        for state in State:
            ask = row.shown[state]
            first = state is State.COLD
            table.add_row(
                row.document if first else "",
                str(row.mode) if first else "",
                LABELS[state],
                f"{ask.prompt_tokens}",
                *(f"{ask.hit_tokens.get(t, 0)}" for t in (TierId.HBM, TierId.DRAM, TierId.NVME)),
                f"{row.ttft_s[state]:.3f}",
                f"{row.ttft_s[State.COLD] / row.ttft_s[state]:.1f}x",
                format_size(ask.nvme_bytes_read),
                end_section=state is State.HBM,
            )
    return table


def _bars(summary: DemoSummary) -> Iterator[str]:
    longest = max(max(row.hf_s, *row.ttft_s.values()) for row in summary.rows)
    for row in summary.rows:
        yield f"{row.document}, {row.mode}"
        yield f"  {'transformers':12} {_bar(row.hf_s / longest)} {row.hf_s:.3f} s"
        for state, seconds in row.ttft_s.items():
            yield f"  {LABELS[state]:12} {_bar(seconds / longest)} {seconds:.3f} s"


def _bar(share: float) -> str:
    eighths = max(round(share * BAR_WIDTH * 8), 1)
    bar = _EIGHTHS[8] * (eighths // 8)
    return bar + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _answers(summary: DemoSummary) -> Iterator[str]:
    for row in {row.document: row for row in summary.rows}.values():
        same = "the same from every tier" if row.answers_identical else "NOT the same everywhere"
        yield f"{row.document}: {row.shown[State.COLD].question} -> {row.answer!r} ({same})"


def _reached(summary: DemoSummary) -> Iterator[str]:
    tokens = max(row.tokens for row in summary.rows)
    for row in summary.rows:
        if row.tokens == tokens:
            yield f"{row.document}, {row.mode}, against {row.cold_s:.2f} s: " + ", ".join(
                _against(row, state, limit) for state, limit in LIMITS.items()
            )
    yield (
        f"raw reads and one memcpy / what an NVMe hit adds to an HBM hit: "
        f"{summary.restore_vs_raw:.2f} (want {RESTORE_AT_LEAST} or more); "
        f"reads past the page cache: {'yes' if summary.direct else 'no'}; "
        f"hit ratio of warm requests: {summary.hit_ratio:.1%}"
    )


def _against(row: Row, state: State, limit: float) -> str:
    share = row.ttft_s[state] / row.cold_s
    verdict = "" if share <= limit else f", over {limit:.0%}"
    return f"{LABELS[state]} {share:.1%}{verdict}"


def draw(summary: DemoSummary, path: Path) -> None:
    """Write the bars as a PNG, seconds on a logarithmic scale."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / (len(State) + 1)
    positions = range(len(summary.rows))
    axes.bar(
        positions, [row.hf_s for row in summary.rows], width, label="transformers", color="#ccb974"
    )
    for place, state in enumerate(State, 1):
        axes.bar(
            [position + place * width for position in positions],
            [row.ttft_s[state] for row in summary.rows],
            width,
            label=LABELS[state],
            color=_COLOURS[state],
        )
    axes.set_yscale("log")
    axes.set_ylabel("time to first token, s")
    axes.set_xticks(
        [position + 2 * width for position in positions],
        [f"{row.document} ({row.tokens:,} tokens)\n{row.mode}" for row in summary.rows],
        fontsize=8,
    )
    axes.set_title(summary.model)
    axes.legend(ncols=5, fontsize=8)
    figure.savefig(path, dpi=150)
