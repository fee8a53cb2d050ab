"""A store, a pool and branches of blocks whose bytes are a PRF of their keys."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.index.words import ROOT_KEY, BlockKey, Slots, TierId, Tokens, block_keys
from kvtier.tiers.contracts import LANDED, Answer, Bytes, Checksums, Fetch, Flight, Put, Signal
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.health import Patience
from kvtier.tiers.nvme.settings import Geometry
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.tiers.pool import ArrayPool
from tests.prf import block_bytes

NAMESPACE = bytes(range(32))
SMALL = Geometry(extent_bytes=3 * 8192, group_bytes=64 << 10, segment_bytes=128 << 10)
"""Three blocks a record, a few records a commit, a few commits a segment."""


@dataclass(frozen=True)
class Branch:
    """Blocks in a row."""

    parent: BlockKey
    tokens: Tokens
    keys: tuple[BlockKey, ...]
    block_tokens: int

    def part(self, start: int, stop: int) -> "Branch":
        """Its blocks from `start` to `stop`."""
        parent = self.keys[start - 1] if start else self.parent
        tokens = self.tokens[start * self.block_tokens : stop * self.block_tokens]
        return Branch(parent, tokens, self.keys[start:stop], self.block_tokens)


def branch(
    num_blocks: int,
    seed: int = 0,
    *,
    parent: BlockKey = ROOT_KEY,
    block_tokens: int = 3,
    namespace: bytes = NAMESPACE,
) -> Branch:
    """A branch of its own for each seed."""
    start = seed * 10_007
    tokens = np.arange(start, start + num_blocks * block_tokens, dtype=np.int32)
    keys = tuple(block_keys(namespace, parent, tokens, block_tokens))
    return Branch(parent, tokens, keys, block_tokens)


class Rig:
    """A tier in a directory, and a pool to read into and write from. `options`: see `open`.

    `fill` makes a block's bytes from its key. The clock that judges the drive stands still unless a
    test moves it (`pass_time`) or brings another, so that no load on the machine looks like a drive
    that hangs.
    """

    def __init__(
        self,
        path: Path,
        *,
        block_bytes: int = 5000,
        capacity_bytes: int = 4 << 20,
        files: Files | None = None,
        geometry: Geometry = SMALL,
        read_only: bool = False,
        clock: Any = None,
        monotonic: Callable[[], float] | None = None,
        patience: Patience | None = None,
        fill: Callable[[bytes, int], Bytes] = block_bytes,
        **options: Any,
    ) -> None:
        self.path = path
        self.signal = Signal()
        self.block_bytes = block_bytes
        self.fill = fill
        self.time = 1.0
        self.now_s = 0.0
        self.tier = NvmeTier.open(
            path,
            capacity_bytes=capacity_bytes,
            signal=self.signal,
            files=files,
            geometry=geometry,
            read_only=read_only,
            clock=clock or self._tick,
            monotonic=monotonic or (lambda: self.now_s),
            patience=patience,
            **options,
        )

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *_: object) -> None:
        self.tier.close()

    def _tick(self) -> float:
        self.time += 1.0
        return self.time

    def pass_time(self, seconds: float = 100.0) -> None:
        """Let time pass for the drive: more than any back-off, unless told otherwise."""
        self.now_s += seconds

    def settle(self, waiting: Flight | Answer) -> None:
        """Wait until it is done."""
        for _ in range(600):
            ticks = self.signal.ticks
            if waiting.done:
                return
            self.signal.wait(ticks, 0.1)
        raise TimeoutError(f"{self.tier!r} did not finish {waiting!r}")

    def begin_put(
        self,
        blocks: Branch,
        *,
        namespace: bytes = NAMESPACE,
        checksums: Checksums | None = None,
        pool: ArrayPool | None = None,
        background: bool = False,
        codec: str | None = None,
    ) -> Flight:
        """Start putting a branch, its bytes filled in."""
        count = len(blocks.keys)
        pool = ArrayPool(TierId.DRAM, count, self.block_bytes) if pool is None else pool
        slots = pool.alloc(count)
        for slot, key in zip(slots, blocks.keys, strict=True):
            pool.view(int(slot))[:] = self.fill(key, self.block_bytes)
        nothing = blocks.tokens[:0]
        return self.tier.put(
            Put(
                namespace,
                blocks.parent,
                blocks.tokens,
                blocks.keys,
                nothing,
                pool,
                slots,
                checksums,
                background,
                codec,
            )
        )

    def put(self, blocks: Branch, **options: Any) -> Flight:
        """Put a branch and wait for the outcome."""
        flight = self.begin_put(blocks, **options)
        self.settle(flight)
        return flight

    def fetch(
        self,
        blocks: Branch,
        *,
        namespace: bytes = NAMESPACE,
        pool: ArrayPool | None = None,
        slots: Slots | None = None,
    ) -> Flight:
        """Fetch a branch, wait, and check every byte that is said to have landed."""
        count = len(blocks.keys)
        pool = pool or ArrayPool(TierId.DRAM, count, self.block_bytes, debug=True)
        slots = pool.alloc(count) if slots is None else slots
        nothing = blocks.tokens[:0]
        flight = self.tier.fetch(
            Fetch(namespace, blocks.parent, blocks.tokens, blocks.keys, nothing, pool, slots)
        )
        self.settle(flight)
        landed = 0
        for status, slot, key in zip(flight.status, slots, blocks.keys, strict=True):
            if status == LANDED:
                landed += 1
                wanted = self.fill(key, self.block_bytes)
                assert np.array_equal(pool.view(int(slot)), wanted), "wrong bytes were served"
        assert (flight.status[:landed] == LANDED).all(), "blocks landed behind one that failed"
        return flight

    def landed(self, blocks: Branch) -> int:
        """How many leading blocks a fetch brings."""
        return int((self.fetch(blocks).status == LANDED).sum())

    def lookup(self, blocks: Branch, *, namespace: bytes = NAMESPACE) -> int:
        """How many leading blocks a lookup promises."""
        answer = self.tier.lookup(namespace, blocks.keys, blocks.tokens)
        self.settle(answer)
        assert answer.value is not None
        return answer.value


def segment_files(store: Path) -> list[Path]:
    """The store's segment files, oldest first."""
    return sorted((store / "segments").glob("*.seg"))


def disk_takes(store: Path, *, at_most: int) -> bool:
    """Whether the segments take no more than that of the disk.

    The file system may count a page of its own to a file that is in many pieces (ext4 does).
    """
    taken = [path.stat().st_blocks * 512 for path in segment_files(store)]
    return sum(taken) <= at_most + 4096 * len(taken)


def num_landed(flight: Flight) -> int:
    """Blocks of a finished flight that landed."""
    return int((flight.status == LANDED).sum())


def flip(path: Path, offset: int, mask: int = 1) -> None:
    """Flip bits of one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
