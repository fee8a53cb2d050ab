"""What a replay has found, as a table for people and as one value for JSON."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvtier.index.words import TierId
from kvtier.tools.replay.curve import BELADY, Curve
from kvtier.tools.replay.run import Outcome
from kvtier.tools.replay.world import Setup
from kvtier.tools.sizes import format_size


@dataclass(frozen=True)
class Report:
    """One replay of `trace`. `block_bytes` None: nobody said what a block counts in bytes.

    `ideal` and `belady`: blocks hit without bounds, and by Belady's rule in one tier of all
    capacities together. `tokens_asked` is 0 where the trace does not say what a block holds.
    """

    trace: str
    setup: Setup
    block_bytes: int | None
    outcome: Outcome
    tokens_asked: int
    tokens_hit: Mapping[TierId, int]
    ideal: int
    belady: int
    bad_lines: tuple[int, ...]
    curve: Curve | None

    def share(self, blocks: int) -> float:
        """Of all blocks asked for."""
        return blocks / max(1, self.outcome.asked)

    @property
    def written(self) -> int:
        """Blocks that went to the store."""
        return sum(n for way, n in self.outcome.moved.items() if way.endswith(f"> {TierId.NVME}"))

    @property
    def capacities(self) -> Mapping[TierId, int]:
        """Of the tiers there are, in blocks, fastest first."""
        sizes = {TierId.HBM: self.setup.hbm, TierId.DRAM: self.setup.dram}
        return {tier: n for tier, n in {**sizes, TierId.NVME: self.setup.nvme}.items() if n}


def show(report: Report, console: Console) -> None:
    """Print the tables. They fit 80 columns."""
    for table in (_totals(report), _tiers(report)):
        console.print(table)
    if report.curve is not None:
        console.print(_curve(report, report.curve))


def _totals(report: Report) -> Table:
    table = Table(title=f"replay {report.trace}", show_header=False)
    for name, value in _rows(report):
        table.add_row(name, value)
    return table


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    outcome = report.outcome
    served = sum(outcome.hits.values())
    yield "requests", f"{outcome.requests:,}"
    yield "malformed lines", f"{len(report.bad_lines):,}"
    yield "blocks asked", f"{outcome.asked:,}"
    if outcome.truncated:
        yield "longer than the top tier", f"{outcome.truncated:,} blocks, never taken in"
    yield "served from cache", _of(report, served)
    if report.tokens_asked:
        hit = sum(report.tokens_hit.values())
        yield "the same in tokens", f"{hit:,} ({hit / report.tokens_asked:.1%})"
    yield "Belady, all tiers as one", _of(report, report.belady)
    yield "ideal (infinite cache)", _of(report, report.ideal)
    for way, blocks in outcome.moved.items():
        yield f"moved {way}", _sized(report, blocks)
    if report.setup.nvme:
        per_block = f"{report.share(report.written):.3f} a block asked"
        yield "SSD writes", f"{_sized(report, report.written)}, {per_block}"
        yield "of them written back", _sized(report, outcome.written_back)
    yield "dropped, in no tier below", f"{outcome.dropped:,}"


def _of(report: Report, blocks: int) -> str:
    return f"{blocks:,} ({report.share(blocks):.1%})"


def _sized(report: Report, blocks: int) -> str:
    if report.block_bytes is None:
        return f"{blocks:,} blocks"
    return f"{blocks:,} blocks, {format_size(blocks * report.block_bytes)}"


def _tiers(report: Report) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("tier")
    for heading in ("blocks", "size", "policy", "hits", "of asked", "evictions", "at the end"):
        table.add_column(heading, justify="right", no_wrap=True)
    outcome = report.outcome
    for tier, capacity in report.capacities.items():
        size = "" if report.block_bytes is None else format_size(capacity * report.block_bytes)
        table.add_row(
            str(tier),
            f"{capacity:,}",
            size,
            "lru" if tier is TierId.NVME else report.setup.policies.get(tier, "lru"),
            f"{outcome.hits[tier]:,}",
            f"{report.share(outcome.hits[tier]):.1%}",
            f"{outcome.evicted[tier]:,}",
            f"{outcome.resident[tier]:,}",
        )
    return table


def _curve(report: Report, curve: Curve) -> Table:
    table = Table(title="miss ratio of one tier by capacity", box=SIMPLE_HEAD)
    table.add_column("blocks", justify="right")
    if report.block_bytes is not None:
        table.add_column("size", justify="right")
    for rule in curve.hits:
        table.add_column(label(rule), justify="right")
    table.add_column("infinite", justify="right")
    for i, capacity in enumerate(curve.capacities):
        size = []
        if report.block_bytes is not None:
            size = [format_size(capacity * report.block_bytes)]
        misses = [f"{1 - report.share(hits[i]):.3f}" for hits in curve.hits.values()]
        table.add_row(f"{capacity:,}", *size, *misses, f"{1 - report.share(report.ideal):.3f}")
    return table


def label(rule: str) -> str:
    """A rule's name for people."""
    return {"lru": "leaf-LRU", "arc": "ARC", BELADY: "Belady"}.get(rule, rule)


def numbers(report: Report) -> dict[str, object]:
    """All of it, for JSON. Ratios are of blocks asked for; bytes only if a block's are known."""
    outcome, size = report.outcome, report.block_bytes
    found: dict[str, object] = {
        "trace": report.trace,
        "requests": outcome.requests,
        "bad_lines": report.bad_lines,
        "blocks_asked": outcome.asked,
        "blocks_truncated": outcome.truncated,
        "block_bytes": size,
        "tiers": {
            tier: {
                "blocks": capacity,
                "policy": "lru" if tier is TierId.NVME else report.setup.policies.get(tier, "lru"),
                "hits": outcome.hits[tier],
                "hit_ratio": _ratio(report, outcome.hits[tier]),
                "evicted": outcome.evicted[tier],
                "resident": outcome.resident[tier],
            }
            for tier, capacity in report.capacities.items()
        },
        "hits": sum(outcome.hits.values()),
        "hit_ratio": _ratio(report, sum(outcome.hits.values())),
        "tokens_asked": report.tokens_asked,
        "tokens_hit": dict(report.tokens_hit),
        "ideal_hits": report.ideal,
        "ideal_hit_ratio": _ratio(report, report.ideal),
        "belady_hits": report.belady,
        "belady_hit_ratio": _ratio(report, report.belady),
        "moved_blocks": dict(outcome.moved),
        "ssd_written_blocks": report.written,
        "ssd_written_back_blocks": outcome.written_back,
        "dropped": outcome.dropped,
    }
    if size is not None:
        found["moved_bytes"] = {way: n * size for way, n in outcome.moved.items()}
        found["ssd_written_bytes"] = report.written * size
    if report.curve is not None:
        curve, asked = report.curve, outcome.asked
        found["miss_ratio_curve"] = {
            "capacity_blocks": curve.capacities,
            **{
                rule: [_ratio(report, asked - n) for n in hits] for rule, hits in curve.hits.items()
            },
            "infinite": _ratio(report, asked - report.ideal),
        }
    return found


def _ratio(report: Report, blocks: int) -> float:
    return round(report.share(blocks), 6)
