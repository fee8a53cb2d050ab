"""The command line's options that several commands share, and the values they stand for.

Importing this loads neither torch nor the engine.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvtier.index.admission import ADMISSIONS
from kvtier.index.policies import DEFAULT_POLICY, POLICIES
from kvtier.tiers.nvme.codecs import CodecPolicy
from kvtier.tiers.writeback import WRITEBACK_S
from kvtier.tools.errors import BadOption
from kvtier.tools.sizes import parse_size

Model = Annotated[
    Path, typer.Option("--model", metavar="DIR", help="Hugging Face directory of a Llama model.")
]
Store = Annotated[
    Path | None, typer.Option("--store", metavar="DIR", help="NVMe store, opened by this process.")
]
Socket = Annotated[
    Path | None, typer.Option("--socket", metavar="PATH", help="Socket of a running sidecar.")
]
Hbm = Annotated[str, typer.Option("--hbm", metavar="SIZE", help="Room for KV in the fast tier.")]
Dram = Annotated[str, typer.Option("--dram", metavar="SIZE", help="Room for KV in host memory.")]
Nvme = Annotated[str, typer.Option("--nvme", metavar="SIZE", help="Room for KV in the store.")]
Codec = Annotated[
    str,
    typer.Option(
        "--codec",
        metavar="NAME",
        help="How blocks are stored: raw; zstd (smaller); auto (zstd where that loads faster).",
    ),
]
Namespaces = Annotated[
    list[str] | None,
    typer.Option("--namespace", metavar="HEX", help="Only these namespaces (default: all)."),
]
WritebackS = Annotated[
    float,
    typer.Option(
        "--writeback-s",
        metavar="SECONDS",
        min=0.0,
        help="Write KV down to the store when it has been in host memory for so long (0: never).",
    ),
]
WriteBudget = Annotated[
    str | None,
    typer.Option(
        "--write-budget",
        metavar="SIZE",
        help="Write nothing more back once so much was written on a UTC day (default: --nvme).",
    ),
]
HbmPolicy = Annotated[
    str,
    typer.Option(
        "--hbm-policy", metavar="NAME", help="What leaves the fast tier first: lru, arc, adaptive."
    ),
]
DramPolicy = Annotated[
    str,
    typer.Option(
        "--dram-policy", metavar="NAME", help="What leaves host memory first: lru, arc, adaptive."
    ),
]
NvmeAdmission = Annotated[
    str,
    typer.Option(
        "--nvme-admission",
        metavar="NAME",
        help="What goes to the store: all; learned (what is likely to be used again, within"
        " --write-budget).",
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Compute threads (default: torch's choice).")
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="The same bits whatever was cached: fixed launch shapes, whole chunks only; slower.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]


@dataclass(frozen=True)
class Tiers:
    """Where KV goes: sizes in bytes, and a store of this process's own or a sidecar's socket."""

    hbm_bytes: int
    dram_bytes: int
    nvme_bytes: int
    store: Path | None
    socket: Path | None
    codec: str = "raw"
    writeback_s: float | None = WRITEBACK_S
    write_budget_bytes: int | None = None
    hbm_policy: str = DEFAULT_POLICY
    dram_policy: str = DEFAULT_POLICY
    nvme_admission: str = "all"


def policy(name: str, option: str) -> str:
    """The name, if there is such an eviction policy. Raises `BadOption`."""
    if name not in POLICIES:
        raise BadOption(f"{option}: {name!r} given, want one of {', '.join(POLICIES)}")
    return name


def admission(text: str) -> str:
    """One of `ADMISSIONS`. Raises `BadOption`."""
    if text not in ADMISSIONS:
        raise BadOption(f"--nvme-admission: {text!r} given, want {' or '.join(ADMISSIONS)}")
    return text


def write_budget(text: str | None) -> int | None:
    """Bytes a day, None for the store's default. Raises `BadOption`."""
    return None if text is None else parse_size(text, "--write-budget")


def tiers(
    *,
    hbm: str,
    dram: str,
    nvme: str,
    store: Path | None,
    socket: Path | None,
    codec: str,
    needed: bool,
    writeback_s: float = WRITEBACK_S,
    budget: str | None = None,
    hbm_policy: str = DEFAULT_POLICY,
    dram_policy: str = DEFAULT_POLICY,
    nvme_admission: str = "all",
) -> Tiers:
    """Check and parse. Raises `BadOption`: both places given, or none although one is `needed`;
    what is the sidecar's business given beside its socket; no such policy. `CodecUnknown`.

    Without a store there is no DRAM tier either: what one process computes once fits in HBM.
    """
    if store is not None and socket is not None:
        raise BadOption("--store and --socket: the sidecar owns the store; give one of the two")
    if needed and store is None and socket is None:
        raise BadOption("no store: give --store DIR, or --socket PATH of a running sidecar")
    if CodecPolicy(codec).codec != "raw" and socket is not None:
        raise BadOption("--codec and --socket: the sidecar owns the store; give it to kvtier serve")
    if policy(dram_policy, "--dram-policy") != DEFAULT_POLICY and socket is not None:
        raise BadOption(
            "--dram-policy and --socket: the sidecar owns DRAM; give it to kvtier serve"
        )
    if admission(nvme_admission) != "all" and socket is not None:
        raise BadOption(
            "--nvme-admission and --socket: the sidecar owns the store; give it to kvtier serve"
        )
    return Tiers(
        parse_size(hbm, "--hbm"),
        parse_size(dram, "--dram") if store is not None else 0,
        parse_size(nvme, "--nvme"),
        store,
        socket,
        codec,
        writeback_s or None,
        write_budget(budget),
        policy(hbm_policy, "--hbm-policy"),
        dram_policy,
        nvme_admission,
    )
