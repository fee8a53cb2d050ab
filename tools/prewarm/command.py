"""`kvtier prewarm` behind its options: opens the engine, runs the job, prints the summary."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvtier.engine.assembly import CacheSettings
from kvtier.engine.model_config import read_config
from kvtier.engine.scheduler import EngineSettings
from kvtier.engine.tokenizer import Tokenizer
from kvtier.index.namespace import BlockLayout
from kvtier.tools.documents import Document, find_documents
from kvtier.tools.engine import open_llm
from kvtier.tools.errors import BadDocument, PrewarmIncomplete
from kvtier.tools.listing import show_listing
from kvtier.tools.options import Tiers
from kvtier.tools.prewarm.job import PrewarmJob, Summary, refuse_too_much
from kvtier.tools.prewarm.progress import TerminalWatcher
from kvtier.tools.prewarm.through_engine import EngineTarget
from kvtier.tools.prompt import document_prefix
from kvtier.tools.sizes import format_size


def run_prewarm(
    paths: Sequence[Path],
    model: Path,
    tiers: Tiers,
    *,
    step_tokens: int,
    threads: int | None,
    as_json: bool,
    exact: bool = False,
) -> None:
    """Prewarm and print. Raises `PrewarmIncomplete`, after the summary, if anything is missing."""
    documents = find_documents(paths)
    if tiers.store is not None:
        unit = EngineSettings().exact_chunk if exact else CacheSettings().block_size
        _refuse_before_opening(documents, model, tiers.nvme_bytes, unit)
    with open_llm(model, tiers, threads, exact=exact) as llm:
        capacity = tiers.nvme_bytes if tiers.store is not None else None
        with TerminalWatcher() as watcher:
            step = -(-step_tokens // llm.share_tokens) * llm.share_tokens
            job = PrewarmJob(EngineTarget(llm, capacity), watcher, step)
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


@dataclass(frozen=True)
class _Room:
    block_size: int
    block_bytes: int
    capacity_bytes: int | None


def _refuse_before_opening(
    documents: Sequence[Document], model: Path, capacity: int, unit: int
) -> None:
    """A store that is opened with a limit below what it holds gives blocks up first.

    So what cannot fit is refused while the store is still closed: nothing is lost by a mistake.
    """
    config, block_size = read_config(model), CacheSettings().block_size
    layout = BlockLayout(config.layers, config.kv_heads, block_size, config.head_dim, "float32")
    chat = Tokenizer(model).encode_chat
    prefixes = []
    for document in documents:
        with suppress(BadDocument):  # the job names it
            prefixes.append(document_prefix(chat, document.read(), unit))
    refuse_too_much(prefixes, _Room(block_size, layout.nbytes, capacity))


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
    rows_stored = [
        (each.document, each.namespace.hex(), each.leaf.hex()) for each in summary.stored
    ]
    if rows_stored:
        show_listing("in the store", ("document", "namespace", "prefix"), rows_stored)
