"""The `kvtier` command. Parses options; the work is in the modules that each command imports.

Imports are inside the commands, so that `kvtier serve` loads neither torch nor the engine.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvtier.index.errors import KvtierError
from kvtier.index.policies import DEFAULT_POLICY
from kvtier.tiers.writeback import WRITEBACK_S
from kvtier.tools import options
from kvtier.tools.options import tiers
from kvtier.tools.sizes import parse_size
from kvtier.tools.store import app as store_app

EXIT_BAD_INPUT = 2

app = typer.Typer(
    name="kvtier",
    help="Tiered KV-cache storage: GPU memory, host memory and NVMe under one radix index.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(store_app, name="store")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    What the user can mend is one line on standard error and code 2. Our own bugs keep their
    traceback.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name="kvtier")
    except KvtierError as error:
        print(f"kvtier: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


@app.command()
def serve(
    socket: Annotated[Path, typer.Option("--socket", metavar="PATH", help="Where to listen.")],
    store: Annotated[
        Path | None, typer.Option("--store", metavar="DIR", help="NVMe store (none: DRAM only).")
    ] = None,
    dram: options.Dram = "8GiB",
    nvme: options.Nvme = "64GiB",
    codec: options.Codec = "raw",
    writeback_s: options.WritebackS = WRITEBACK_S,
    write_budget: options.WriteBudget = None,
    dram_policy: options.DramPolicy = DEFAULT_POLICY,
    nvme_admission: options.NvmeAdmission = "all",
) -> None:
    """Own DRAM and NVMe for every engine on this host, until SIGTERM or SIGINT."""
    from kvtier.tools.serve import serve as run_server

    run_server(
        socket,
        store,
        dram_bytes=parse_size(dram, "--dram"),
        nvme_bytes=parse_size(nvme, "--nvme"),
        codec=codec,
        writeback_s=writeback_s or None,
        write_budget_bytes=options.write_budget(write_budget),
        dram_policy=options.policy(dram_policy, "--dram-policy"),
        nvme_admission=options.admission(nvme_admission),
    )


@app.command()
def prewarm(
    documents: Annotated[
        list[Path],
        typer.Argument(metavar="DOCUMENT", help="Text files, directories, or .jsonl lists."),
    ],
    model: options.Model,
    store: options.Store = None,
    socket: options.Socket = None,
    hbm: options.Hbm = "1GiB",
    dram: options.Dram = "1GiB",
    nvme: options.Nvme = "64GiB",
    codec: options.Codec = "raw",
    step: Annotated[
        int, typer.Option("--step", min=1, help="Tokens computed between two flushes.")
    ] = 2048,
    threads: options.Threads = None,
    exact: options.Exact = False,
    as_json: options.Json = False,
) -> None:
    """Compute the KV of documents and store it, before anyone asks about them.

    Safe to stop and to run again: what is stored is not computed again.
    """
    place = tiers(
        hbm=hbm, dram=dram, nvme=nvme, store=store, socket=socket, codec=codec, needed=True
    )
    from kvtier.tools.prewarm.command import run_prewarm

    run_prewarm(
        documents, model, place, step_tokens=step, threads=threads, as_json=as_json, exact=exact
    )


@app.command()
def generate(
    model: options.Model,
    prompt: Annotated[str, typer.Option("--prompt", help="What to ask.")],
    document: Annotated[
        Path | None, typer.Option("--document", metavar="FILE", help="The text it is about.")
    ] = None,
    store: options.Store = None,
    socket: options.Socket = None,
    hbm: options.Hbm = "1GiB",
    dram: options.Dram = "1GiB",
    nvme: options.Nvme = "64GiB",
    codec: options.Codec = "raw",
    writeback_s: options.WritebackS = WRITEBACK_S,
    write_budget: options.WriteBudget = None,
    hbm_policy: options.HbmPolicy = DEFAULT_POLICY,
    dram_policy: options.DramPolicy = DEFAULT_POLICY,
    nvme_admission: options.NvmeAdmission = "all",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    salt: Annotated[str, typer.Option(help="Share KV only with requests of this salt.")] = "",
    threads: options.Threads = None,
    exact: options.Exact = False,
    as_json: options.Json = False,
) -> None:
    """Answer one prompt, and say how many of its tokens came from which tier."""
    place = tiers(
        hbm=hbm,
        dram=dram,
        nvme=nvme,
        store=store,
        socket=socket,
        codec=codec,
        needed=False,
        writeback_s=writeback_s,
        budget=write_budget,
        hbm_policy=hbm_policy,
        dram_policy=dram_policy,
        nvme_admission=nvme_admission,
    )
    from kvtier.engine.sampling import SamplingParams
    from kvtier.tools.generate import run_generate

    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    run_generate(
        prompt,
        document,
        model,
        place,
        sampling,
        salt=salt,
        threads=threads,
        as_json=as_json,
        exact=exact,
    )


@app.command()
def check(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Directory of the store.")],
    repair: Annotated[
        bool, typer.Option("--repair", help="Mend what is wrong: forget damaged blocks.")
    ] = False,
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild-catalogue",
            help="Make the catalogue anew from the segments; pins, expiry, last uses are lost.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Verify every record and every row of a store.

    Exit code 0: all is well (now); 1: something is wrong; 2: it could not be looked at.
    """
    from kvtier.tools.inspection import run_check

    if not run_check(store, repair=repair, rebuild=rebuild, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def stats(
    store: Annotated[
        Path | None, typer.Argument(metavar="STORE", help="Directory of the store.")
    ] = None,
    socket: options.Socket = None,
    as_json: options.Json = False,
) -> None:
    """Show what a store, or a running sidecar, holds."""
    from kvtier.tools.inspection import run_stats

    run_stats(store, socket, as_json=as_json)


@app.command("export")
def export_to_bundle(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Directory of the store.")],
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The file to make.")],
    namespace: options.Namespaces = None,
    prefix: Annotated[
        list[str] | None,
        typer.Option("--prefix", metavar="KEY", help="A path, by the key of its last block."),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="LABEL", help="All paths pinned under this label."),
    ] = None,
    codec: Annotated[
        str, typer.Option("--codec", metavar="NAME", help="How blocks are stored: zstd or raw.")
    ] = "zstd",
    force: Annotated[bool, typer.Option("--force", help="Replace BUNDLE if it is there.")] = False,
    as_json: options.Json = False,
) -> None:
    """Write a store's blocks to one file, to carry them elsewhere.

    Verifies every block. Safe to stop and to run again. Exit code 1 if anything was left out.
    """
    from kvtier.tools.bundles import run_export

    complete = run_export(
        store,
        bundle,
        namespaces=namespace or (),
        prefixes=prefix or (),
        labels=label or (),
        codec=codec,
        force=force,
        as_json=as_json,
    )
    if not complete:
        raise typer.Exit(1)


@app.command("import")
def import_from_bundle(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A file made by export.")],
    store: Annotated[
        Path, typer.Argument(metavar="STORE", help="Directory of the store, made if not there.")
    ],
    nvme: options.Nvme = "64GiB",
    namespace: options.Namespaces = None,
    pin: Annotated[
        str | None, typer.Option("--pin", metavar="LABEL", help="Hold its paths under this label.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Put a bundle's blocks into a store that no process owns now.

    Verifies every block. Safe to stop and to run again. Exit code 1 if anything was left out.
    """
    from kvtier.tools.bundles import run_import

    size = parse_size(nvme, "--nvme")
    names = namespace or ()
    if not run_import(bundle, store, size, namespaces=names, pin_label=pin, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def bundle_info(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A file made by export.")],
    as_json: options.Json = False,
) -> None:
    """Verify a bundle and show what it holds. Exit code 1 if anything is wrong with it."""
    from kvtier.tools.bundles import run_bundle_info

    if not run_bundle_info(bundle, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def replay(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Requests as JSON lines, plain or gzip.")
    ],
    hbm: Annotated[
        str, typer.Option("--hbm", metavar="N", help="Room in HBM: blocks, or a size; 0: none.")
    ] = "1000",
    dram: Annotated[
        str, typer.Option("--dram", metavar="N", help="Room in DRAM: blocks, or a size; 0: none.")
    ] = "4000",
    nvme: Annotated[
        str, typer.Option("--nvme", metavar="N", help="Room on NVMe: blocks, or a size; 0: none.")
    ] = "32000",
    block_bytes: Annotated[
        str | None,
        typer.Option("--block-bytes", metavar="SIZE", help="Bytes of one block of the trace."),
    ] = None,
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAME", help="Of both pools: lru, arc or adaptive.")
    ] = "lru",
    hbm_policy: Annotated[
        str | None, typer.Option("--hbm-policy", metavar="NAME", help="Of HBM, if another.")
    ] = None,
    dram_policy: Annotated[
        str | None, typer.Option("--dram-policy", metavar="NAME", help="Of DRAM, if another.")
    ] = None,
    writeback_s: options.WritebackS = WRITEBACK_S,
    write_budget: Annotated[
        str | None,
        typer.Option(
            "--write-budget",
            metavar="N",
            help="Write nothing more back once so much was written on a day (default: --nvme).",
        ),
    ] = None,
    running: Annotated[
        int, typer.Option("--running", min=1, help="Requests that hold their blocks at once.")
    ] = 1,
    lookahead: Annotated[
        int,
        typer.Option("--lookahead", min=0, help="Requests in the queue whose blocks are spared."),
    ] = 0,
    nvme_admission: options.NvmeAdmission = "all",
    curve: Annotated[
        int, typer.Option("--curve", min=0, help="Capacities of the miss-ratio curve (0: none).")
    ] = 8,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw the curve here.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="For the curve (default: all cores).")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at a malformed line.")] = False,
    as_json: options.Json = False,
) -> None:
    """Replay a request trace on the cache without bytes: hits by tier, moves, SSD writes.

    Prints them beside what no cache can beat, and the miss ratio by capacity.
    """
    from kvtier.tools.replay.command import run_replay
    from kvtier.tools.replay.options import parse_setup

    options.policy(policy, "--policy")
    size = None if block_bytes is None else parse_size(block_bytes, "--block-bytes")
    setup = parse_setup(
        hbm=hbm,
        dram=dram,
        nvme=nvme,
        block_bytes=size,
        hbm_policy=hbm_policy or policy,
        dram_policy=dram_policy or policy,
        writeback_s=writeback_s or None,
        write_budget=write_budget,
        nvme_admission=nvme_admission,
    )
    run_replay(
        trace,
        setup,
        block_bytes=size,
        running=running,
        lookahead=lookahead,
        strict=strict,
        points=curve,
        processes=processes or os.cpu_count() or 1,
        png=png,
        as_json=as_json,
    )


@app.command()
def demo(
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="DIR", help="Use this model instead of fetching one."),
    ] = None,
    work: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where model, store and chart go.")
    ] = Path(".demo"),
    threads: options.Threads = None,
) -> None:
    """Ask questions about three documents from every tier, embedded and through a sidecar."""
    from kvtier.tools.demo.script import run_demo

    run_demo(work, model, threads)


if __name__ == "__main__":
    sys.exit(main())
