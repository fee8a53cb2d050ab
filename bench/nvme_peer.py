"""LMCache's `fs_native` adapter with O_DIRECT, measured by LMCache's own bench, beside raw I/O.

It runs in an environment of its own (`bench/README.md`). What it does is less: no fsync, no
checksum, one file a block. Its rounds cannot be interleaved with ours, so raw I/O is timed right
before and after each of its runs. Knows LMCache by its command line only.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import note
from bench.nvme_drive import Candidates, Raw, raw_of, slab_of

WORKERS = (4, 8, 16)
_TIMEOUT_S = 600.0
_WARM_ROUNDS = 1


@dataclass(frozen=True)
class PeerRow:
    """LMCache's best over the numbers of worker threads tried. Ratios are its rate over the
    drive's, medians over medians, not paired."""

    block_kib: int
    total_mib: int
    read_gb_s: float
    write_gb_s: float
    read_ratio: float
    write_ratio: float
    read_workers: int
    write_workers: int


def version(python: Path) -> str | None:
    """The version of LMCache that `python` has; None where it cannot be imported."""
    code = "import lmcache, importlib.metadata as m; print(m.version('lmcache'))"
    done = subprocess.run([python, "-c", code], env=_environment(), capture_output=True, text=True)
    return done.stdout.split()[-1] if done.returncode == 0 else None


def measure(
    python: Path,
    directory: Path,
    block_bytes: int,
    total: int,
    rounds: int,
    candidates: Candidates,
) -> PeerRow:
    """One block size and one total. Leaves nothing in `directory`."""
    slab = slab_of(block_bytes, total)
    num_blocks, size = slab.num_slots, slab.num_slots * block_bytes
    raw_write: list[float] = []
    raw_read: list[float] = []
    found: list[tuple[int, dict[str, float]]] = []
    try:
        with raw_of(directory, slab) as raw:
            raw.write(candidates.write[0])
            for workers in WORKERS:
                note(f"peer: {block_bytes >> 10} KiB, {size >> 20} MiB, {workers} threads")
                _drive(raw, candidates, raw_write, raw_read)
                seconds = _run(python, directory / "peer", workers, block_bytes, num_blocks, rounds)
                found.append((workers, seconds))
                _drive(raw, candidates, raw_write, raw_read)
    finally:
        slab.close()
    write_workers, write = min(found, key=lambda each: each[1]["Store"])
    read_workers, read = min(found, key=lambda each: each[1]["Load"])
    return PeerRow(
        block_kib=block_bytes >> 10,
        total_mib=size >> 20,
        read_gb_s=round(size / read["Load"] / 1e9, 3),
        write_gb_s=round(size / write["Store"] / 1e9, 3),
        read_ratio=round(float(np.median(raw_read)) / read["Load"], 3),
        write_ratio=round(float(np.median(raw_write)) / write["Store"], 3),
        read_workers=read_workers,
        write_workers=write_workers,
    )


def _drive(raw: Raw, candidates: Candidates, write_s: list[float], read_s: list[float]) -> None:
    """Add what the best plans of the search take at this moment."""
    write_s.append(raw.write(candidates.write[0]).seconds)
    read_s.append(raw.read(candidates.read[0]).seconds)


def _run(
    python: Path, place: Path, workers: int, block_bytes: int, num_blocks: int, rounds: int
) -> dict[str, float]:
    """Median seconds of a round by operation ("Store", "Load"); every key must have succeeded."""
    adapter = {
        "type": "fs_native",
        "base_path": str(place),
        "use_odirect": True,
        "num_workers": workers,
    }
    place.mkdir()
    output = place / "figures.json"
    options: dict[str, object] = {
        "--l2-adapter": json.dumps(adapter),
        "--num-keys": num_blocks,
        "--data-size-kb": block_bytes >> 10,
        "--l1-align-bytes": 4096,
        "--rounds": rounds,
        "--warmup-rounds": _WARM_ROUNDS,
        "--format": "json",
        "--output": output,
    }
    flat = [str(word) for option in options.items() for word in option]
    command = [str(python), "-m", "lmcache.cli.main", "bench", "l2", *flat]
    try:
        done = subprocess.run(
            command, env=_environment(), capture_output=True, text=True, timeout=_TIMEOUT_S
        )
        if done.returncode or not output.exists():
            raise SystemExit(f"bench/nvme: LMCache's bench failed:\n{_tail(done.stderr)}")
        return _seconds(json.loads(output.read_text())["metrics"].values())
    finally:
        shutil.rmtree(place)


def _seconds(sections: Sequence[dict[str, Any]]) -> dict[str, float]:
    found = {}
    for section in sections:
        if section.get("operation") in ("Store", "Load"):
            if section["total_success"] != section["total_keys"]:
                raise SystemExit(f"bench/nvme: LMCache lost keys: {section}")
            found[section["operation"]] = section["duration_p50_ms"] / 1000
    return found


def _environment() -> dict[str, str]:
    """Ours without what would lead its Python to our packages; no telemetry."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**mine, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-20:])
