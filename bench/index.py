"""How fast the radix index is, against what the machine can do with the same bytes.

A match cannot be faster than comparing its tokens (memcmp of 512 KiB for 128k tokens), keys not
faster than BLAKE2b over the same bytes, and eviction must cost the same however many leaves there
are. All of it is computation in one thread, so times are CPU time. Prints a table, then one JSON
line.

    python -m bench.index [--quick]
"""

import argparse
import gc
import tracemalloc
from collections.abc import Callable
from hashlib import blake2b
from time import thread_time

import numpy as np

from bench.harness import Sample, emit, interleave, measure, table
from kvtier.index.radix import RadixIndex
from kvtier.index.words import BlockIds, TierId, Tokens

BLOCK = 16
NS = bytes(32)
HBM, DRAM = 0, 1
COLUMNS = (TierId.HBM, TierId.DRAM, TierId.NVME)
EVICT_BLOCKS = 1024 // BLOCK


def new_index() -> RadixIndex:
    return RadixIndex(BLOCK, COLUMNS, stores=[TierId.NVME])


def random_tokens(n: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 128_000, n, dtype=np.int32)


def make_resident(index: RadixIndex, col: int, tokens: Tokens) -> BlockIds:
    ids = index.insert(NS, tokens)
    absent = ids[index.state(col, ids) == 0]
    index.begin_fill(col, absent, absent)
    index.finish_fill(col, absent)
    return ids


def index_with_path(tokens: Tokens, nodes: int) -> RadixIndex:
    """An index in which `tokens` lies along `nodes` nodes, resident in HBM and DRAM."""
    index = new_index()
    for col in (HBM, DRAM):
        make_resident(index, col, tokens)
    step = len(tokens) // nodes
    for cut in range(step, len(tokens), step):
        branch = np.concatenate((tokens[:cut], random_tokens(BLOCK, cut)))
        make_resident(index, HBM, branch)
    return index


def request(index: RadixIndex, tokens: Tokens) -> Callable[[], None]:
    """What one request asks: match, every column's residency, slots, touch, pin."""

    def call() -> None:
        ids = index.match(NS, tokens)
        for col in range(len(COLUMNS)):
            index.state(col, ids)
        index.slots(HBM, ids)
        index.touch(HBM, ids)
        index.pin(HBM, ids)
        index.unpin(HBM, ids)

    return call


def forget_after(index: RadixIndex, tokens: Tokens) -> Callable[[], None]:
    def call() -> None:
        index.forget(index.insert(NS, tokens))

    return call


def keys_once(tokens: Tokens) -> Callable[[], None]:
    """Keys of a fresh index each time: they are remembered after the first."""

    def call() -> None:
        index = new_index()
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


def evict_and_refill(leaves: int, repeats: int) -> Sample:
    """Time to plan and take 1,024 tokens from HBM; new leaves come in between, untimed."""
    index = new_index()
    rng = np.random.default_rng(leaves)
    system = random_tokens(4 * BLOCK, 1)
    blocks_a_leaf = 4

    def add(n: int) -> None:
        tails = rng.integers(0, 2**31 - 1, (n, blocks_a_leaf * BLOCK), dtype=np.int32)
        for tail in tails:
            make_resident(index, HBM, np.concatenate((system, tail)))

    def evict() -> None:
        victims = index.victims(HBM, EVICT_BLOCKS)
        index.begin_leave(HBM, victims)
        index.finish_leave(HBM, victims)

    add(leaves)
    gc.collect()
    gc.freeze()  # a full collection of 400k nodes would be all that is measured
    seconds: list[float] = []
    for _ in range(repeats):
        seconds += measure(evict, 1, warmup=0, clock=thread_time).seconds
        add(EVICT_BLOCKS // blocks_a_leaf)
    gc.unfreeze()
    return Sample(tuple(seconds))


def bytes_a_block(blocks_a_node: int) -> float:
    """Memory a block, resident in HBM and DRAM, with keys; the token ids' own bytes left out."""
    nodes = 8_192 // blocks_a_node
    rng = np.random.default_rng(blocks_a_node)
    gc.collect()
    tracemalloc.start()
    index = new_index()
    for _ in range(nodes):
        tokens = rng.integers(0, 128_000, blocks_a_node * BLOCK, dtype=np.int32)
        make_resident(index, HBM, tokens)
        index.keys(make_resident(index, DRAM, tokens))
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / (nodes * blocks_a_node) - 4 * BLOCK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, under 30 s")
    quick: bool = parser.parse_args().quick
    repeats = 30 if quick else 300

    tokens = random_tokens(131_072, 0)
    data, twin = tokens.tobytes(), bytes(bytearray(tokens.tobytes()))
    rows: list[tuple[object, ...]] = [("what", "median us", "p20", "p80", "p99", "x limit")]
    values: dict[str, object] = {"bench": "index", "block_size": BLOCK, "quick": quick}

    def report(name: str, sample: Sample, limit: Sample | None = None, key: str = "") -> None:
        micro = [1e6 * s for s in (sample.median, sample.p20, sample.p80, sample.p99)]
        rows.append((name, *micro, sample.median / limit.median if limit else "-"))
        if key:
            values[key] = round(micro[0], 2)

    indexes = {nodes: index_with_path(tokens, nodes) for nodes in (1, 64, 1024)}
    matches = [lambda index=index: index.match(NS, tokens) for index in indexes.values()]
    memcmp, *matched = interleave([lambda: data == twin, *matches], repeats, clock=thread_time)
    report("memcmp of 128k tokens", memcmp, None, "memcmp_128k_us")
    names = ("match_128k_us", "match_128k_64_nodes_us", "match_128k_1024_nodes_us")
    for (nodes, index), sample, key in zip(indexes.items(), matched, names, strict=True):
        report(f"match 128k, {nodes} nodes", sample, memcmp, key)
        whole = measure(request(index, tokens), repeats, clock=thread_time)
        report("  + states, touch, pin, unpin", whole, memcmp, f"request{key[5:]}")

    short = tokens[:32_768]
    report(
        "insert + forget 32k",
        measure(forget_after(new_index(), short), repeats, clock=thread_time),
        None,
        "insert_us",
    )
    hashing, keys = interleave(
        [hash_all(short.tobytes()), keys_once(short)], repeats // 3, clock=thread_time
    )
    report("blake2b of 32k, by block", hashing, None, "blake2b_32k_us")
    report("insert + keys 32k", keys, hashing, "insert_keys_us")

    tails: dict[int, float] = {}
    for leaves in (2_000, 20_000) if quick else (2_000, 20_000, 200_000):
        sample = evict_and_refill(leaves, 200 if quick else 1_000)
        tails[leaves] = sample.p99
        report(f"evict 1,024 tokens, {leaves} leaves", sample)
        values[f"evict_1024_p99_us_{leaves}"] = round(1e6 * sample.p99, 1)
    values["evict_scaling"] = round(tails[max(tails)] / tails[2_000], 2)
    table(rows)

    sizes: list[tuple[object, ...]] = [("blocks a node", "bytes a block")]
    for blocks_a_node in (1, 4, 16, 64):
        size = bytes_a_block(blocks_a_node)
        sizes.append((str(blocks_a_node), size))
        values[f"bytes_per_block_{blocks_a_node}"] = round(size, 1)
    table(sizes)
    emit(values)


if __name__ == "__main__":
    main()
