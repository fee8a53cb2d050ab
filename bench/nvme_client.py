"""A caller of the NVMe tier that waits for it: branches of blocks, one slab, put, fetch, lookup.

Knows no measurement and no size: the parts of `bench.nvme` and its child process time what they
call here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from kvtier.index.words import ROOT_KEY, BlockKey, Slots, Tokens, block_keys
from kvtier.tiers.contracts import LANDED, Fetch, Flight, Put, Signal
from kvtier.tiers.dram import DramSlab
from kvtier.tiers.nvme.settings import Geometry
from kvtier.tiers.nvme.tier import NvmeTier

NAMESPACE = b"bench/nvme".ljust(32, b"\0")
BLOCK_TOKENS = 16
NO_LIMIT = 1 << 50
"""A capacity, in bytes, that nothing here reaches."""


@dataclass(frozen=True)
class Branch:
    """Blocks in a row below `parent`."""

    parent: BlockKey
    tokens: Tokens
    keys: tuple[BlockKey, ...]

    @classmethod
    def make(
        cls, seed: int | list[int] | None, num_blocks: int, parent: BlockKey = ROOT_KEY
    ) -> "Branch":
        """Random tokens, the same for the same seed; for None, tokens that no other branch has."""
        tokens = np.random.default_rng(seed).integers(0, 50_000, num_blocks * BLOCK_TOKENS)
        ids = tokens.astype(np.int32)
        return cls(parent, ids, tuple(block_keys(NAMESPACE, parent, ids, BLOCK_TOKENS)))

    def then(self, tail: "Branch") -> "Branch":
        """This branch with `tail` (made with this one's last key as its parent) behind it."""
        tokens = np.concatenate([self.tokens, tail.tokens])
        return Branch(self.parent, tokens, self.keys + tail.keys)


class Waiting(Protocol):
    """A flight or an answer."""

    @property
    def done(self) -> bool: ...


class Client:
    """A tier opened over a slab all of whose slots are ours. Ends with `close`."""

    def __init__(
        self, directory: Path, slab: DramSlab, capacity_bytes: int, geometry: Geometry | None = None
    ) -> None:
        self._signal = Signal()
        self._slab = slab
        self.slots: Slots = np.arange(slab.num_slots, dtype=np.int32)
        self.tier = NvmeTier.open(
            directory, capacity_bytes=capacity_bytes, signal=self._signal, geometry=geometry
        )

    def begin_put(self, branch: Branch, slots: Slots) -> Flight:
        """Start writing a branch from these slots."""
        none = branch.tokens[:0]
        return self.tier.put(
            Put(NAMESPACE, branch.parent, branch.tokens, branch.keys, none, self._slab, slots, None)
        )

    def put(self, branch: Branch) -> None:
        """Write a branch from the first slots; returns once all of it is published."""
        self.finish(self.begin_put(branch, self.slots[: len(branch.keys)]))

    def fetch(self, branch: Branch) -> None:
        """Read a branch into the first slots, verified."""
        none = branch.tokens[:0]
        slots = self.slots[: len(branch.keys)]
        self.finish(
            self.tier.fetch(
                Fetch(NAMESPACE, branch.parent, branch.tokens, branch.keys, none, self._slab, slots)
            )
        )

    def lookup(self, branch: Branch) -> int:
        """How many leading blocks of it the store holds."""
        answer = self.tier.lookup(NAMESPACE, branch.keys, branch.tokens)
        self._settle(answer)
        return answer.value or 0

    def finish(self, flight: Flight) -> None:
        """Wait until every block has landed; ends the program if one fails."""
        self._settle(flight)
        if not (flight.status == LANDED).all():
            raise SystemExit(f"bench/nvme: blocks failed: {flight.error}")

    def close(self) -> None:
        self.tier.close()

    def _settle(self, waiting: Waiting) -> None:
        while True:
            ticks = self._signal.ticks
            if waiting.done:
                return
            self._signal.wait(ticks, 1.0)
