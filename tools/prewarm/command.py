"""`kvtier prewarm` behind its options: opens the engine, runs the job, prints the summary."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvtier.tools.documents import find_documents
from kvtier.tools.engine import open_llm
from kvtier.tools.errors import PrewarmIncomplete
from kvtier.tools.options import Tiers
from kvtier.tools.prewarm.job import PrewarmJob, Summary
from kvtier.tools.prewarm.progress import TerminalWatcher
from kvtier.tools.prewarm.through_engine import EngineTarget
from kvtier.tools.sizes import format_size


def run_prewarm(
    paths: Sequence[Path],
    model: Path,
    tiers: Tiers,
    *,
    step_tokens: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Prewarm and print. Raises `PrewarmIncomplete`, after the summary, if anything is missing."""
    documents = find_documents(paths)
    with open_llm(model, tiers, threads) as llm:
        capacity = tiers.nvme_bytes if tiers.store is not None else None
        with TerminalWatcher() as watcher:
            job = PrewarmJob(EngineTarget(llm, capacity), watcher, step_tokens)
            summary = job.run(documents)
    _show(summary)
    if as_json:
        print(json.dumps(summary.as_json()), flush=True)
    if summary.problems:
        missing = summary.failed + summary.not_started
        raise PrewarmIncomplete(
            f"{missing} of {summary.documents} documents are not stored; first: "
            f"{summary.problems[0]}"
        )


def _show(summary: Summary) -> None:
    table = Table(title="prewarm", show_header=False)
    rows = {
        "documents computed": f"{summary.computed}",
        "documents already there": f"{summary.already_there}",
        "documents too short for a block": f"{summary.too_short}",
        "documents failed": f"{summary.failed}",
        "documents not started": f"{summary.not_started}",
        "tokens computed": f"{summary.tokens_computed:,}",
        "tokens skipped": f"{summary.tokens_skipped:,}",
        "written": f"{summary.blocks_written:,} blocks, {format_size(summary.bytes_written)}",
        "time": f"{summary.seconds:.1f} s, {summary.tokens_per_s:,.0f} tokens/s",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
