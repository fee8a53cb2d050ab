"""How fast the radix index is and how large, against what the machine can do with the same bytes.

A match cannot be faster than comparing its tokens (memcmp of 512 KiB for 128k tokens), keys not
faster than BLAKE2b over the same bytes, and eviction must cost the same however many leaves there
are. All of it is computation in one thread, so times are CPU time. Prints a table, then one JSON
line.

    python -m bench.index [--quick] [--peer-python PYTHON]
"""

import argparse
import gc
import tracemalloc
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from time import thread_time

from bench.harness import Sample, emit, interleave, measure, note, table
from bench.index_peer import figures
from bench.index_probe import BLOCK, LEAVES, tokens_of
from bench.index_world import (
    DRAM,
    EVICT_BLOCKS,
    HBM,
    NS,
    World,
    ask,
    evict,
    new_index,
    serve,
    small_leaves,
)
from kvtier.index.radix import RadixIndex
from kvtier.index.words import Tokens

TARGETS = {
    "match_128k_us": 1000.0,
    "evict_1024_p99_us": 1000.0,
    "evict_scaling": 2.0,
    "bytes_per_block": 160.0,
}
"""The most each may be. The bench says what it found; it fails only where it cannot measure."""

SCALED = 8
"""Memory is measured on an eighth of the world: bytes a block do not depend on its size, and the
tracing of every allocation makes it slow."""


def asked(index: RadixIndex, tokens: Tokens, repeats: int) -> Sample:
    """Times of `ask`. Undoing its pin is not timed."""
    seconds = []
    for _ in range(repeats):
        begin = thread_time()
        ids = ask(index, tokens)
        seconds.append(thread_time() - begin)
        index.unpin(HBM, ids)
    return Sample(tuple(seconds[2:]))


def inserted(index: RadixIndex, tokens: Tokens, repeats: int) -> Sample:
    """Times of `insert` of tokens that are not there. Forgetting them is not timed."""
    seconds = []
    for _ in range(repeats):
        begin = thread_time()
        ids = index.insert(NS, tokens)
        seconds.append(thread_time() - begin)
        index.forget(ids)
    return Sample(tuple(seconds[2:]))


def evicted(index: RadixIndex, refill: Callable[[], None], repeats: int) -> Sample:
    """Times to plan and take 1,024 tokens from HBM; what comes in between is not timed."""
    gc.collect()
    gc.freeze()  # a full collection of 400k nodes would be all that is measured
    seconds: list[float] = []
    for _ in range(repeats):
        seconds += measure(
            lambda: evict(index, HBM, EVICT_BLOCKS), 1, warmup=0, clock=thread_time
        ).seconds
        refill()
    gc.unfreeze()
    return Sample(tuple(seconds))


def served(world: World, tokens: Tokens, repeats: int) -> Sample:
    """Times of a request for what is there: told to the policies, then touched in both pools."""
    index = world.index
    ids = serve(index, tokens, world.capacity)

    def call() -> None:
        index.request(NS, tokens)
        index.touch(HBM, ids)
        index.touch(DRAM, ids)

    return measure(call, repeats, clock=thread_time)


def keys_once(tokens: Tokens) -> Callable[[], None]:
    """Keys of a fresh index each time: they are remembered after the first."""

    def call() -> None:
        index = new_index("lru", 1)
        index.keys(index.insert(NS, tokens))

    return call


def hash_all(data: bytes) -> Callable[[], None]:
    """BLAKE2b of the same bytes block by block, with nothing around it: the limit of `keys`."""
    stride = 4 * BLOCK

    def call() -> None:
        key = bytes(32)
        for start in range(0, len(data), stride):
            key = blake2b(key + data[start : start + stride], digest_size=32).digest()

    return call


def bytes_a_block(policy: str, turnovers: int) -> float:
    """Memory a block with its keys, in all three tiers, beside the token ids themselves.

    After `turnovers` times as many blocks again have come and gone: a policy's shadows remember
    what has gone, and are at their bound after four (the experts of a pool hold different blocks,
    which takes one or two, and twice the pool's blocks are remembered beside them).
    """
    leaves = LEAVES // SCALED
    gc.collect()
    tracemalloc.start()
    world = World(policy, leaves, max_hint_blocks=0)
    world.fill(turnovers * leaves)
    index = world.index
    for node in list(index._tree.walk_nodes()):
        index.keys(node.ids)
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / index.statistics().blocks - 4 * BLOCK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a tenth of the blocks, few repeats")
    parser.add_argument(
        "--peer-python", type=Path, help="a Python with sglang, vllm or both: bench/README.md"
    )
    options = parser.parse_args()
    quick: bool = options.quick
    repeats, leaves = (50, LEAVES // 10) if quick else (300, LEAVES)

    rows: list[tuple[object, ...]] = [("what", "median us", "p20", "p80", "p99", "x limit")]
    values: dict[str, object] = {"bench": "index", "block_size": BLOCK, "quick": quick}

    def report(name: str, sample: Sample, limit: Sample | None = None, key: str = "") -> None:
        micro = [1e6 * s for s in (sample.median, sample.p20, sample.p80, sample.p99)]
        rows.append((name, *micro, sample.median / limit.median if limit else "-"))
        if key:
            values[key] = round(micro[3 if "p99" in key else 0], 2)

    note("building the world")
    tokens = tokens_of(131_072, 0)
    data, twin = tokens.tobytes(), bytes(bytearray(tokens.tobytes()))
    world = World("lru", leaves)
    index, short = world.index, tokens_of(32_768, 3)
    values["blocks"], values["leaves"] = index.statistics().blocks, index.statistics().leaves
    memcmp = measure(lambda: data == twin, repeats, clock=thread_time)
    report("memcmp of 128k tokens", memcmp, None, "memcmp_128k_us")
    fragmented = tokens_of(131_072, 4)
    for path, nodes in ((tokens, 64), (fragmented, 1024), (short, 16)):
        world.add_path(path, nodes)
    for name, path, key in (
        ("request for 128k, 64 nodes", tokens, "match_128k_us"),
        ("request for 128k, 1,024 nodes", fragmented, "match_128k_fragmented_us"),
        ("request for 32k, 16 nodes", short, "match_32k_us"),
    ):
        report(name, asked(index, path, repeats), memcmp, key)
        only = measure(partial(index.match, NS, path), repeats, clock=thread_time)
        report("  of it the match", only, memcmp)
    report("insert 32k", inserted(index, tokens_of(32_768, 5), repeats), None, "insert_us")
    report(
        f"evict 1,024 tokens, {leaves:,} leaves",
        evicted(index, partial(world.fill, 2), repeats),
        None,
        "evict_1024_p99_us",
    )
    del world, index  # two of them would not fit everywhere
    note("the adaptive policy")
    adaptive = World("adaptive", leaves)
    report(
        "request and touch, 50 blocks, adaptive",
        served(adaptive, tokens_of(50 * BLOCK, 6), repeats),
        None,
        "request_adaptive_us",
    )
    report(
        "evict 1,024 tokens, adaptive",
        evicted(adaptive.index, partial(adaptive.fill, 2), repeats),
        None,
        "evict_1024_adaptive_p99_us",
    )
    del adaptive

    blake, keys = interleave(
        [hash_all(short.tobytes()), keys_once(short)], repeats // 3, clock=thread_time
    )
    report("blake2b of 32k, by block", blake, None, "blake2b_32k_us")
    report("insert + keys 32k", keys, blake, "insert_keys_us")

    tails: dict[int, float] = {}
    for number in (2_000, 20_000) if quick else (2_000, 200_000):
        small, add = small_leaves(number)
        sample = evicted(small, partial(add, EVICT_BLOCKS // 4), 3 * repeats)
        tails[number] = sample.p99
        report(f"evict 1,024 tokens, {number:,} small leaves", sample)
    values["evict_scaling"] = round(tails[max(tails)] / tails[2_000], 2)
    table(rows)

    note("memory")
    sizes: list[tuple[object, ...]] = [("policy of HBM and DRAM", "turnovers", "bytes a block")]
    for policy, turnovers, key in (
        ("lru", 0, "bytes_per_block_lru"),
        ("adaptive", 0, "bytes_per_block_fresh"),
        ("adaptive", 2, "bytes_per_block_two_turnovers"),
        ("adaptive", 5, "bytes_per_block"),
    ):
        size = bytes_a_block(policy, turnovers)
        sizes.append((policy, str(turnovers), size))
        values[key] = round(size, 1)
    table(sizes)

    values |= dict.fromkeys(("vs_sglang_match", "vs_sglang_evict_p99", "vs_vllm_lookup"))
    if options.peer_python is not None:
        values |= compared(options.peer_python, values, repeats)
    values["short"] = [key for key, most in TARGETS.items() if float(str(values[key])) > most]
    emit(values)


def compared(python: Path, values: dict[str, object], repeats: int) -> dict[str, object]:
    """Our times over the peers'; what a peer cannot give stays as it was."""

    def ours(key: str) -> float:
        return float(str(values[key])) / 1e6

    found: dict[str, object] = {}
    rows: list[tuple[object, ...]] = [("peer", "theirs, us", "ours / theirs")]
    sglang = figures(python, "sglang", repeats)
    if sglang is not None:
        found["sglang"] = sglang["version"]
        for key, name in (("match", "match_128k_us"), ("evict_p99", "evict_1024_p99_us")):
            ratio = ours(name) / sglang[f"{key}_s"]
            found[f"vs_sglang_{key}"] = round(ratio, 4)
            rows.append((f"sglang {key}", 1e6 * sglang[f"{key}_s"], ratio))
    vllm = figures(python, "vllm", repeats)
    if vllm is not None:
        found["vllm"] = vllm["version"]
        ratio = ours("match_32k_us") / vllm["lookup_s"]
        found["vs_vllm_lookup"] = round(ratio, 4)
        rows.append(("vllm hashes of 32k", 1e6 * vllm["lookup_s"], ratio))
    table(rows)
    return found


if __name__ == "__main__":
    main()
