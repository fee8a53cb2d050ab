"""The NVMe tier against the drive, against its own size, and against a peer.

1. Verified reads into DRAM slots and synced, published writes, as a ratio to raw O_DIRECT I/O of
   the same bytes on the same directory, in interleaved turns (`bench.nvme_drive`).
2. A store of one million 4 KiB blocks, four an extent, beside one of ten thousand, each in fresh
   processes: opening, first hit, memory, lookups, evictions (`bench.nvme_scale`).
3. LMCache's `fs_native` adapter on the same directory, where it is installed (`bench.nvme_peer`).

The ratios in the JSON line are the smallest of their column. Ends in that line.

    python -m bench.nvme [--quick] [--only PART] [--directory DIR] [--store DIR] [--peer-python EXE]
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import nvme_drive, nvme_peer, nvme_scale
from bench.harness import emit, note, table
from bench.nvme_corpus import open_or_build, require
from bench.nvme_drive import Candidates, Row, Side
from bench.nvme_peer import PeerRow
from bench.nvme_scale import Effort, Scale

PARTS = ("drive", "scale", "peer")
DOCUMENT = 180 << 20
"""One 4,096-token document of SmolLM2-135M in fp32: 256 blocks of 720 KiB."""

LARGE = 1 << 30
"""Enough that starting and ending do not count."""


@dataclass(frozen=True)
class Plan:
    """What is measured: block sizes; totals with the turns of each; stores; repetitions."""

    block_bytes: tuple[int, ...]
    totals: tuple[tuple[int, int], ...]
    num_blocks: tuple[int, int]
    effort: Effort
    peer_rounds: int


FULL = Plan(
    block_bytes=(256 << 10, 720 << 10, 2 << 20),
    totals=((DOCUMENT, 20), (LARGE, 8)),
    num_blocks=(1_000_000, 10_000),
    effort=Effort(rounds=5, lookups=10_000, puts=400),
    peer_rounds=5,
)
QUICK = Plan(
    block_bytes=(720 << 10,),
    totals=((DOCUMENT, 4),),
    num_blocks=(20_000, 10_000),
    effort=Effort(rounds=2, lookups=2_000, puts=100),
    peer_rounds=3,
)


def run(
    plan: Plan, parts: Sequence[str], directory: Path, store: Path | None, peer: Path | None
) -> dict[str, object]:
    """Measure, print a table for each part, and return the JSON line's values.

    `directory` must exist; only the stores of blocks stay in it, the large one in `store` if that
    is given, for another run.
    A part that was not run leaves its fields None.
    """
    candidates = {}
    rows: list[Row] = []
    peers: list[PeerRow] = []
    scales: list[Scale] = []
    version = nvme_peer.version(peer) if peer and "peer" in parts else None
    if "drive" in parts or version:
        need = max(total * (turns + 3) for total, turns in plan.totals)
        require(directory, need, "the comparison with the drive")
        nvme_drive.require_direct(directory)
        for block_bytes in plan.block_bytes:
            candidates[block_bytes] = _search(directory, block_bytes, plan.totals[0][0])
    for block_bytes, plans in candidates.items():
        for total, turns in plan.totals:
            if "drive" in parts:
                rows.append(nvme_drive.measure(directory, block_bytes, total, turns, plans))
            if peer and version:
                rounds = plan.peer_rounds
                peers.append(nvme_peer.measure(peer, directory, block_bytes, total, rounds, plans))
    if rows:
        _print_rows(rows)
    if "peer" in parts:
        _print_peers(peers, version)
    if "scale" in parts:
        large, small = plan.num_blocks
        corpora = [
            open_or_build(store or directory / "large", large),
            open_or_build(directory / "small", small),
        ]
        scales = nvme_scale.compare(corpora, plan.effort)
        _print_scales(scales)
    return {
        "bench": "nvme",
        **_drive_fields(rows),
        **_scale_fields(scales, plan.num_blocks[0]),
        "peer": {"version": version, "rows": [asdict(row) for row in peers]} if version else None,
    }


def _search(directory: Path, block_bytes: int, total: int) -> Candidates:
    note(f"drive: searching the best raw plans at {total >> 20} MiB")
    slab = nvme_drive.slab_of(block_bytes, total)
    try:
        with nvme_drive.raw_of(directory, slab) as raw:
            return nvme_drive.search(raw)
    finally:
        slab.close()


def _drive_fields(rows: Sequence[Row]) -> dict[str, object]:
    """The worst of all rows; `rows` has each. CPU seconds are those of reads unless `write` says
    otherwise."""

    def least(values: Sequence[float]) -> float | None:
        return min(values, default=None)

    def most(values: Sequence[float]) -> float | None:
        return max(values, default=None)

    return {
        "read_ratio": least([row.read.ratio.median for row in rows]),
        "write_ratio": least([row.write.ratio.median for row in rows]),
        "cpu_s_per_gib": most([row.read.cpu_s_per_gib for row in rows]),
        "cpu_s_per_gib_raw": most([row.read.raw_cpu_s_per_gib for row in rows]),
        "cpu_s_per_gib_write": most([row.write.cpu_s_per_gib for row in rows]),
        "cpu_s_per_gib_write_raw": most([row.write.raw_cpu_s_per_gib for row in rows]),
        "direct": all(row.direct for row in rows) if rows else None,
        "rows": [asdict(row) for row in rows],
    }


def _scale_fields(scales: Sequence[Scale], num_blocks: int) -> dict[str, object]:
    """Fields of the large store; those that say `1m` say `20k` where it has 20,000 blocks."""
    million, rest = divmod(num_blocks, 1_000_000)
    size = f"{num_blocks // 1000}k" if rest else f"{million}m"
    names = [f"open_s_{size}", f"first_hit_s_{size}"]
    names += ["open_rss_mib", "lookup_scaling", "evict_scaling"]
    if not scales:
        return {**dict.fromkeys(names), "scales": []}
    large, small = scales
    values = (
        large.open_s,
        large.first_hit_s,
        large.asked_mib,
        large.lookup_p99_s / small.lookup_p99_s,
        large.put_p99_s / small.put_p99_s,
    )
    rounded = {name: round(value, 3) for name, value in zip(names, values, strict=True)}
    return {**rounded, "scales": [asdict(scale) for scale in scales]}


def _print_rows(rows: Sequence[Row]) -> None:
    heading = ["block", "total", "what", "ours/raw", "p20", "p80", "90 % interval"]
    heading += ["GB/s", "raw GB/s", "raw plan", "CPU s/GiB", "raw CPU"]
    lines: list[Sequence[object]] = [heading]
    for row in rows:
        for what, side in (("read", row.read), ("write", row.write)):
            lines.append([f"{row.block_kib} KiB", f"{row.total_mib} MiB", what, *_cells(side)])
    table(lines)
    print()


def _cells(side: Side) -> list[object]:
    ratio, (depth, chunk) = side.ratio, side.raw_plan
    return [
        ratio.median,
        ratio.p20,
        ratio.p80,
        f"{ratio.low:.3f}-{ratio.high:.3f}",
        side.gb_s,
        side.raw_gb_s,
        f"{depth} x {chunk >> 20} MiB",
        side.cpu_s_per_gib,
        side.raw_cpu_s_per_gib,
    ]


def _print_peers(peers: Sequence[PeerRow], version: str | None) -> None:
    if version is None:
        print("lmcache: not installed (bench/README.md, `--peer-python`)\n")
        return
    heading = [f"lmcache {version} fs_native", "total", "read/raw", "GB/s", "threads"]
    lines: list[Sequence[object]] = [[*heading, "write/raw", "GB/s", "threads"]]
    for peer in peers:
        lines.append(
            [
                f"{peer.block_kib} KiB",
                f"{peer.total_mib} MiB",
                *(peer.read_ratio, peer.read_gb_s, peer.read_workers),
                *(peer.write_ratio, peer.write_gb_s, peer.write_workers),
            ]
        )
    table(lines)
    print()


def _print_scales(scales: Sequence[Scale]) -> None:
    large, small = scales

    def line(name: str, unit: float, *, ratio: bool = False) -> list[object]:
        a, b = getattr(large, name), getattr(small, name)
        return [a * unit, b * unit, a / b if ratio else ""]

    table(
        [
            ["store", f"{large.blocks:,} blocks", f"{small.blocks:,} blocks", "ratio"],
            ["open, s", *line("open_s", 1)],
            ["first hit after exec, s", *line("first_hit_s", 1)],
            ["memory added by opening, MiB", *line("opened_mib", 1)],
            ["memory added after lookups, MiB", *line("asked_mib", 1)],
            ["  of it the process's own", *line("asked_own_mib", 1)],
            ["  of it pages of mapped files", *line("asked_files_mib", 1)],
            ["lookup of a prompt p50, us", *line("lookup_p50_s", 1e6, ratio=True)],
            ["lookup of a prompt p99, us", *line("lookup_p99_s", 1e6, ratio=True)],
            ["  nothing cached, p99, us", *line("first_pass_p99_s", 1e6, ratio=True)],
            ["evicting put p50, ms", *line("put_p50_s", 1e3, ratio=True)],
            ["evicting put p99, ms", *line("put_p99_s", 1e3, ratio=True)],
            ["building, s", *line("build_s", 1)],
            ["catalogue, bytes a block", *line("catalogue_bytes_per_block", 1)],
            ["catalogue left in page cache", *line("cached", 1)],
        ]
    )
    print()


def main() -> None:
    """Run, print the tables, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one block size, 20,000 blocks")
    parser.add_argument("--only", choices=PARTS, help="one part of the three")
    parser.add_argument("--directory", type=Path, default=Path(), help="where (default: here)")
    parser.add_argument("--store", type=Path, help="keep the large store here, and use it again")
    parser.add_argument("--peer-python", type=Path, help="the Python of LMCache's environment")
    options = parser.parse_args()
    parts = PARTS if options.only is None else (options.only,)
    plan = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix=".bench-nvme-", dir=options.directory) as name:
        emit(run(plan, parts, Path(name), options.store, options.peer_python))


if __name__ == "__main__":
    main()
