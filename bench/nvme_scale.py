"""A store of a million blocks beside one of ten thousand, in fresh processes, by turns.

Physics: opening reads a few catalogue pages; a lookup walks one B-tree, whose depth grows with the
logarithm of its rows; an eviction takes the oldest from a queue. So none of them may grow with the
store. Before an opening is timed, the store's files are put out of the page cache, and it is
checked how much of the catalogue stayed.
"""

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import note
from bench.nvme_corpus import Corpus

_ROOT = str(Path(__file__).parents[1])
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Effort:
    """How often things are repeated."""

    rounds: int
    lookups: int
    puts: int


@dataclass(frozen=True)
class Scale:
    """One store's figures. Quantiles are medians over the rounds; `*_mib` is memory added since
    before the opening; `cached` is the largest share of the catalogue that stayed in the page cache
    where it should not."""

    blocks: int
    open_s: float
    first_hit_s: float
    opened_mib: float
    asked_mib: float
    asked_own_mib: float
    asked_files_mib: float
    lookup_p50_s: float
    lookup_p99_s: float
    first_pass_p99_s: float
    put_p50_s: float
    put_p99_s: float
    build_s: float
    catalogue_bytes_per_block: float
    cached: float


def compare(corpora: Sequence[Corpus], effort: Effort) -> list[Scale]:
    """The figures of each store. Puts come last: they evict from the stores for good."""
    found: list[list[tuple[dict[str, float], float, float]]] = [[] for _ in corpora]
    for turn in range(effort.rounds):
        note(f"openings, hits, lookups: round {turn + 1} of {effort.rounds}")
        for which in _order(turn, len(corpora)):
            corpus = corpora[which]
            cached = [drop_cache(corpus)]
            begin = time.monotonic()
            hit = _probe("hit", corpus, turn, 1)
            first_hit_s = hit["landed_at"] - begin
            cached.append(drop_cache(corpus))
            opened = _flat(_probe("open", corpus, 2 * turn + 1000, effort.lookups))
            found[which].append((opened, first_hit_s, max(cached)))
    puts: list[list[list[float]]] = [[] for _ in corpora]
    for turn in range(effort.rounds):
        note(f"evictions: round {turn + 1} of {effort.rounds}")
        for which in _order(turn, len(corpora)):
            puts[which].append(_probe("evict", corpora[which], turn, effort.puts)["put_s"])
    return [_scale(*each) for each in zip(corpora, found, puts, strict=True)]


def _scale(
    corpus: Corpus, found: list[tuple[dict[str, float], float, float]], puts: list[list[float]]
) -> Scale:
    def median(name: str) -> float:
        return float(np.median([opened[name] for opened, _, _ in found]))

    disk = corpus.catalogue.stat().st_blocks * 512
    return Scale(
        blocks=corpus.num_blocks,
        open_s=median("open_s"),
        first_hit_s=float(np.median([first_hit_s for _, first_hit_s, _ in found])),
        opened_mib=median("opened_mib"),
        asked_mib=median("asked_mib"),
        asked_own_mib=median("asked_own_mib"),
        asked_files_mib=median("asked_files_mib"),
        lookup_p50_s=median("lookup_p50_s"),
        lookup_p99_s=median("lookup_p99_s"),
        first_pass_p99_s=median("first_pass_p99_s"),
        put_p50_s=float(np.median([np.percentile(each, 50) for each in puts])),
        put_p99_s=float(np.median([np.percentile(each, 99) for each in puts])),
        build_s=corpus.build_s,
        catalogue_bytes_per_block=disk / corpus.num_blocks,
        cached=max(cached for _, _, cached in found),
    )


def _flat(probed: dict[str, Any]) -> dict[str, float]:
    """One opening's figures by name."""
    steady, first = probed["steady_s"], probed["first_pass_s"]
    return {
        "open_s": probed["open_s"],
        "opened_mib": probed["opened_mib"]["all"],
        "asked_mib": probed["asked_mib"]["all"],
        "asked_own_mib": probed["asked_mib"]["own"],
        "asked_files_mib": probed["asked_mib"]["files"],
        "lookup_p50_s": float(np.percentile(steady, 50)),
        "lookup_p99_s": float(np.percentile(steady, 99)),
        "first_pass_p99_s": float(np.percentile(first, 99)),
    }


def _order(turn: int, count: int) -> range:
    return range(count) if turn % 2 == 0 else range(count - 1, -1, -1)


def _probe(kind: str, corpus: Corpus, seed: int, count: int) -> dict[str, Any]:
    """What a `bench.nvme_probe` of its own process prints; ends the program if it fails."""
    arguments = [kind, str(corpus.store), str(corpus.num_blocks), str(seed), str(count)]
    others = os.environ.get("PYTHONPATH")
    path = _ROOT if not others else os.pathsep.join((_ROOT, others))
    done = subprocess.run(
        [sys.executable, "-m", "bench.nvme_probe", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        raise SystemExit(f"bench/nvme: the probe {kind!r} of {corpus.store} failed")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def drop_cache(corpus: Corpus) -> float:
    """Ask the kernel to forget the store's files; returns what share of the catalogue it kept."""
    for path in corpus.store.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)  # only clean pages can go
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
    return _cached(corpus.catalogue)


def _cached(path: Path) -> float:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        address, size = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapped))
        del view  # the mapping cannot close under it
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(address, size, pages.ctypes.data_as(ctypes.c_void_p)):
            raise OSError(ctypes.get_errno(), "mincore")
    return float(np.mean(pages & 1))
