"""How far real K and V compress, and how fast: the store's codec beside zstd without planes.

The blocks are those of SmolLM2 on one of the demo's documents, computed in fp32 by our engine, read
back from a store, and cast. Ratios are exact and count whole pages, as the store does; a block that
is not worth encoding counts as raw. Speeds are GB of decoded bytes a second, against a plain copy
of the same bytes in the same run; the store's checksums are not in them. Prints a table, then one
JSON line.

    python -m bench.codecs [--quick] [--model DIR] [--document 1k|2k|4k]
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import zstandard

from bench.harness import Sample, emit, interleave, table
from kvtier.engine.assembly import CacheSettings
from kvtier.engine.llm import LLM
from kvtier.index.words import ROOT_KEY, TierId, block_keys
from kvtier.tiers.contracts import Bytes, Fetch, Signal
from kvtier.tiers.nvme.codecs import Coder
from kvtier.tiers.nvme.record import padded
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.tiers.pool import ArrayPool
from kvtier.tools.demo.documents import demo_documents
from kvtier.tools.model import fetch_model

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WAIT_S = 60.0


def real_blocks(model: Path, document: str) -> Bytes:
    """uint8 [blocks, block bytes]: fp32 K and V of the demo's document, through a store."""
    with tempfile.TemporaryDirectory() as directory:
        settings = CacheSettings(hbm_bytes=1 << 30, dram_bytes=1 << 29, store=Path(directory))
        with LLM(model, cache=settings) as llm:
            count = llm.tokenizer.encode
            texts = {d.name: d.text for d in demo_documents(lambda text: len(count(text)))}
            tokens = count(texts[document])
            size, nbytes = llm.layout.block_size, llm.layout.nbytes
            tokens = tokens[: len(tokens) // size * size]
            llm.prefill(tokens)
            llm.flush(tokens)
            namespace = llm.namespace().digest
        keys = tuple(block_keys(namespace, ROOT_KEY, tokens, size))
        pool = ArrayPool(TierId.DRAM, len(keys), nbytes)
        signal = Signal()
        store = NvmeTier.open(Path(directory), capacity_bytes=2**62, signal=signal, read_only=True)
        try:
            slots = pool.alloc(len(keys))
            flight = store.fetch(Fetch(namespace, ROOT_KEY, tokens, keys, tokens[:0], pool, slots))
            while not flight.done:
                signal.wait(signal.ticks, WAIT_S)
        finally:
            store.close()
        if flight.error is not None:
            raise flight.error
        return np.stack([pool.view(int(slot)) for slot in slots])


def cast(blocks: Bytes, dtype: torch.dtype) -> Bytes:
    """The same numbers in another dtype, as bytes."""
    numbers = torch.from_numpy(blocks).view(torch.float32).to(dtype)
    return numbers.contiguous().view(torch.uint8).numpy()


class Way(Protocol):
    """One thread's way to encode and to decode."""

    def encode(self, block: Bytes) -> bytes | None: ...
    def decode(self, stored: bytes, block: Bytes) -> None: ...


class Planes:
    """The store's own codec."""

    def __init__(self, planes: int) -> None:
        self._planes, self._coder = planes, Coder()

    def encode(self, block: Bytes) -> bytes | None:
        return self._coder.encode(block, self._planes)

    def decode(self, stored: bytes, block: Bytes) -> None:
        self._coder.decode(self._planes, np.frombuffer(stored, np.uint8), block)


class Plain:
    """zstd over the bytes as they come."""

    def __init__(self, level: int) -> None:
        self._compressor = zstandard.ZstdCompressor(level=level)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, block: Bytes) -> bytes | None:
        return self._compressor.compress(block.data)

    def decode(self, stored: bytes, block: Bytes) -> None:
        block[:] = np.frombuffer(self._decompressor.decompress(stored), np.uint8)


class Copy:
    """What any way could at best do: one copy."""

    def encode(self, block: Bytes) -> bytes | None:
        return block.tobytes()

    def decode(self, stored: bytes, block: Bytes) -> None:
        block[:] = np.frombuffer(stored, np.uint8)


@dataclass(frozen=True)
class Case:
    """One way on blocks of one dtype: what it stores, and its work by threads."""

    name: str
    make: Callable[[], Way]

    def stored(self, blocks: Bytes) -> list[bytes | None]:
        way = self.make()
        return [way.encode(block) for block in blocks]

    def encode(self, blocks: Bytes, threads: int) -> Callable[[], object]:
        """A call that encodes every block."""
        ways = [self.make() for _ in range(threads)]

        def work(thread: int) -> None:
            for block in blocks[thread::threads]:
                ways[thread].encode(block)

        return _spread(work, threads)

    def decode(self, stored: Sequence[bytes], room: Bytes, threads: int) -> Callable[[], object]:
        """A call that decodes every stored block into `room`."""
        ways = [self.make() for _ in range(threads)]

        def work(thread: int) -> None:
            for each, block in zip(stored[thread::threads], room[thread::threads], strict=True):
                ways[thread].decode(each, block)

        return _spread(work, threads)


def _spread(work: Callable[[int], None], threads: int) -> Callable[[], object]:
    if threads == 1:
        return lambda: work(0)
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(work, range(threads)))


def cases(element_bytes: int) -> list[Case]:
    return [
        Case("copy", Copy),
        Case("planes", lambda: Planes(element_bytes)),
        Case("zstd-1", lambda: Plain(1)),
        Case("zstd-3", lambda: Plain(3)),
    ]


def ratio(stored: Sequence[bytes | None], block_bytes: int) -> float:
    """Raw pages to stored pages; what is not encoded, or does not get smaller, is raw."""
    full = padded(block_bytes)
    pages = sum(full if each is None else min(full, padded(len(each))) for each in stored)
    return len(stored) * full / pages


def gb_s(nbytes: int, sample: Sample) -> float:
    return nbytes / sample.median / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer blocks and turns")
    parser.add_argument("--model", type=Path, default=Path(".demo/model"))
    parser.add_argument("--document", choices=["1k", "2k", "4k"], default="2k")
    options = parser.parse_args()
    turns = 4 if options.quick else 12
    original = real_blocks(fetch_model(options.model), "1k" if options.quick else options.document)
    rows: list[list[object]] = [
        ["dtype", "way", "ratio", "enc 1", "enc 2", "dec 1", "dec 2", "of copy, dec 1"]
    ]
    result: dict[str, object] = {"bench": "codecs", "blocks": len(original), "turns": turns}
    for name, dtype in DTYPES.items():
        blocks = cast(original, dtype)
        size, room = blocks.shape[1], np.empty_like(blocks)
        ways = cases(dtype.itemsize)
        stored = {case.name: case.stored(blocks) for case in ways}
        whole = {way: [e for e in each if e is not None] for way, each in stored.items()}
        speeds: dict[str, list[float]] = {case.name: [] for case in ways}
        for threads in (1, 2):
            calls = [case.encode(blocks, threads) for case in ways]
            for case, sample in zip(ways, interleave(calls, turns), strict=True):
                speeds[case.name].append(gb_s(blocks.nbytes, sample))
        for threads in (1, 2):
            calls = [case.decode(whole[case.name], room, threads) for case in ways]
            for case, sample in zip(ways, interleave(calls, turns), strict=True):
                speeds[case.name].append(gb_s(len(whole[case.name]) * size, sample))
        for case in ways:
            found = ratio(stored[case.name], size)
            share = speeds[case.name][2] / speeds["copy"][2]
            rows.append([name, case.name, found, *speeds[case.name], share])
            key = f"{name}_{case.name.replace('-', '')}"
            result[f"{key}_ratio"] = round(found, 4)
            for what, speed in zip(
                ("enc1", "enc2", "dec1", "dec2"), speeds[case.name], strict=True
            ):
                result[f"{key}_{what}_gb_s"] = round(speed, 3)
    table(rows)
    emit(result)


if __name__ == "__main__":
    main()
