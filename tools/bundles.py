"""`kvtier export`, `import` and `bundle-info` behind their options. No torch."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvtier.index.words import BlockKey
from kvtier.tiers.contracts import Signal
from kvtier.tiers.nvme.bundle_export import export_bundle
from kvtier.tiers.nvme.bundle_import import import_bundle
from kvtier.tiers.nvme.bundle_plan import Selection
from kvtier.tiers.nvme.bundle_reader import Bundle, verify_bundle
from kvtier.tiers.nvme.recovery import is_store
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.tools.digests import parse_digest
from kvtier.tools.errors import BadOption
from kvtier.tools.inspection import ANY_CAPACITY
from kvtier.tools.sizes import format_size

# How many problems the table lists; JSON has more.
SHOWN_PROBLEMS = 10


def run_export(
    store: Path,
    bundle: Path,
    *,
    namespaces: Sequence[str],
    prefixes: Sequence[str],
    labels: Sequence[str],
    codec: str,
    force: bool,
    as_json: bool,
) -> bool:
    """Export and print; True if everything asked for is in the bundle."""
    selection = Selection(
        frozenset(parse_digest(text, "--namespace") for text in namespaces),
        tuple(BlockKey(parse_digest(text, "--prefix")) for text in prefixes),
        tuple(labels),
    )
    with _bar("export", "blocks") as progress:
        report = export_bundle(
            store, bundle, selection, codec=codec, force=force, progress=progress
        )
    rows = {
        "blocks": f"{report.blocks:,} in {report.records:,} records",
        "bytes": f"{format_size(report.nbytes)}, in the bundle {format_size(report.file_bytes)}",
        "kept from an earlier run": f"{report.resumed:,} records",
        "damaged in the store": f"{report.damaged:,} blocks",
        "not in the store": f"{len(report.missing):,} of those named",
    }
    missing = [f"not in the store: {name}" for name in report.missing]
    _show(f"export {store} to {bundle}", rows, [*missing, *report.problems], report.ok)
    if as_json:
        print(json.dumps({"ok": report.ok, **asdict(report)}))
    return report.ok


def run_import(
    bundle: Path,
    store: Path,
    nvme_bytes: int,
    *,
    namespaces: Sequence[str],
    pin_label: str | None,
    as_json: bool,
) -> bool:
    """Import and print; True if the store holds all that was wanted of the bundle."""
    wanted = {parse_digest(text, "--namespace") for text in namespaces} or None
    Bundle(bundle).close()  # refused before a store is made for it
    _refuse_to_shrink(store, nvme_bytes)
    tier = NvmeTier.open(store, capacity_bytes=nvme_bytes, signal=Signal())
    try:
        with _bar("import", "bytes") as progress:
            report = import_bundle(
                bundle, tier, namespaces=wanted, pin_label=pin_label, progress=progress
            )
    finally:
        tier.close()
    rows = {
        "in the bundle": f"{report.blocks:,} blocks, {format_size(report.nbytes)}",
        "imported": f"{report.imported:,} blocks",
        "already there": f"{report.already_there:,} blocks",
        "refused by the store": f"{report.refused:,} blocks",
        "damaged": f"{report.damaged:,} blocks",
        "pinned": f"{report.pinned:,} paths",
        "of other namespaces": f"{sum(n for _, n in report.foreign):,} blocks",
    }
    _show(f"import {bundle} into {store}", rows, report.problems, report.ok)
    if as_json:
        print(json.dumps({"ok": report.ok, **asdict(report), "foreign": dict(report.foreign)}))
    return report.ok


def run_bundle_info(bundle: Path, *, as_json: bool) -> bool:
    """Verify a bundle and print what it holds; True if it is complete and sound."""
    with _bar("verify", "bytes") as progress:
        report = verify_bundle(bundle, progress=progress)
    rows = {
        "sound": f"{report.blocks:,} blocks in {report.records:,} records",
        "bytes": f"{format_size(report.nbytes)}, in the bundle {format_size(report.file_bytes)}",
        "damaged": f"{report.damaged:,} blocks",
    }
    for each in report.namespaces:
        name = f"namespace {each.digest.hex()[:16]}"
        rows[name] = f"{each.blocks:,} blocks, {format_size(each.nbytes)}"
    _show(f"bundle {bundle}", rows, report.problems, report.ok)
    if as_json:
        named = [
            {"namespace": each.digest.hex(), "blocks": each.blocks, "bytes": each.nbytes}
            for each in report.namespaces
        ]
        numbers = {name: value for name, value in vars(report).items() if name != "namespaces"}
        print(json.dumps({"ok": report.ok, **numbers, "namespaces": named}))
    return report.ok


def _refuse_to_shrink(store: Path, nvme_bytes: int) -> None:
    """A store that is opened with a limit below what it holds gives blocks up first."""
    if not is_store(store):
        return
    tier = NvmeTier.open(store, capacity_bytes=ANY_CAPACITY, signal=Signal(), read_only=True)
    used = tier.statistics().used_bytes
    tier.close()
    if used > nvme_bytes:
        raise BadOption(
            f"--nvme: {store} holds {format_size(used)} and would have to give some up; "
            "give what its owner gives it"
        )


@contextmanager
def _bar(title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (
        TextColumn(title),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} % of {task.total:,.0f} " + unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=0)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show(title: str, rows: Mapping[str, str], problems: Sequence[str], ok: bool) -> None:
    table = Table(title=title, show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    for problem in problems[:SHOWN_PROBLEMS]:
        console.print(problem, markup=False, highlight=False)
    if len(problems) > SHOWN_PROBLEMS:
        console.print(f"and {len(problems) - SHOWN_PROBLEMS} more: see --json")
    console.print("ok" if ok else "not ok: something was left out")
