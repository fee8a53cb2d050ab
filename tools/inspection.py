"""`kvtier check` and `kvtier stats` behind their options: what stands in a store. No torch."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvtier.tiers.contracts import Signal
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.repair import RepairReport, rebuild_store, repair_store
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.tiers.sidecar.client import observe
from kvtier.tools.errors import BadOption
from kvtier.tools.sizes import format_size

# A store is not asked to fit anywhere when it is only looked at.
ANY_CAPACITY = 2**62
# How many problems the table lists; JSON has them all.
SHOWN_PROBLEMS = 20


def run_check(store: Path, *, repair: bool, rebuild: bool, as_json: bool) -> bool:
    """Verify a store, mending it first if asked to; print what was found.

    True if all is well in the end. Raises what `check_store` and `repair_store` do.
    """
    bar = Progress(console=Console(stderr=True), disable=not Console(stderr=True).is_terminal)
    mended: RepairReport | None = None
    with bar:
        task = bar.add_task("records", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if rebuild:
            mended = rebuild_store(store, progress=progress)
        elif repair:
            mended = repair_store(store, progress=progress)
        report = check_store(store, progress=progress) if mended is None else mended.after
    table = Table(title=f"check {store}", show_header=False)
    if mended is not None:
        table.add_row("problems found", f"{len(mended.found):,}")
        table.add_row("blocks forgotten", f"{mended.forgotten_blocks:,}")
        table.add_row("given back", format_size(mended.freed_bytes))
        table.add_row("new catalogue", str(mended.rebuilt or "not needed"))
    table.add_row("records", f"{report.records:,}")
    table.add_row("blocks", f"{report.blocks:,}")
    table.add_row("published", format_size(report.bytes))
    table.add_row("left over by a crash", format_size(report.leftover_bytes))
    table.add_row("problems", f"{len(report.problems):,}")
    console = Console()
    console.print(table)
    for problem in report.problems[:SHOWN_PROBLEMS]:
        console.print(problem, markup=False, highlight=False)
    if len(report.problems) > SHOWN_PROBLEMS:
        console.print(f"and {len(report.problems) - SHOWN_PROBLEMS} more: see --json")
    console.print("ok" if report.ok else "not ok: `kvtier check --repair` mends what it can")
    if as_json:
        done = {} if mended is None else {"repair": _repair_numbers(mended)}
        print(json.dumps({"ok": report.ok, **asdict(report), **done}))
    return report.ok


def _repair_numbers(mended: RepairReport) -> dict[str, object]:
    return {
        "found": mended.found,
        "forgotten_blocks": mended.forgotten_blocks,
        "freed_bytes": mended.freed_bytes,
        "rebuilt": None if mended.rebuilt is None else asdict(mended.rebuilt),
    }


def run_stats(store: Path | None, socket: Path | None, *, as_json: bool) -> None:
    """Print the numbers of a store nobody owns just now, or of a running sidecar."""
    if (store is None) == (socket is None):
        raise BadOption("stats: give either a store's directory or --socket PATH of a sidecar")
    numbers: Mapping[str, int | float]
    namespaces: Iterable[tuple[str, int, int]]
    if socket is not None:
        seen = observe(socket)
        numbers = seen.numbers
        namespaces = [(each.namespace.hex(), each.blocks, each.nbytes) for each in seen.namespaces]
    else:
        assert store is not None
        numbers, namespaces = _look(store)
    _show(f"stats {store or socket}", numbers, namespaces)
    if as_json:
        named = [
            {"namespace": name, "blocks": blocks, "bytes": nbytes}
            for name, blocks, nbytes in namespaces
        ]
        print(json.dumps({"numbers": dict(numbers), "namespaces": named}))


def _look(store: Path) -> tuple[dict[str, int | float], list[tuple[str, int, int]]]:
    tier = NvmeTier.open(store, capacity_bytes=ANY_CAPACITY, signal=Signal(), read_only=True)
    try:
        seen = tier.statistics()
        numbers = {"blocks": seen.blocks, "extents": seen.extents, "used_bytes": seen.used_bytes}
        uses = [(use.namespace.hex(), use.blocks, use.nbytes) for use in tier.namespaces()]
        return dict(numbers), uses
    finally:
        tier.close()


def _show(
    title: str, numbers: Mapping[str, int | float], namespaces: Iterable[tuple[str, int, int]]
) -> None:
    table = Table(title=title, show_header=False)
    for name, value in numbers.items():
        shown = format_size(value) if name.endswith("bytes") else f"{value:,}"
        table.add_row(name, shown)
    for name, blocks, nbytes in namespaces:
        table.add_row(f"namespace {name[:16]}", f"{blocks:,} blocks, {format_size(nbytes)}")
    Console().print(table)
