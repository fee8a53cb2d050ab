"""A cache over small pools with a "model" that computes PRF bytes, for tests of the whole service.

The rig plays the engine: it acquires, computes what is missing (block bytes are a function of the
block key), commits, and looks at every byte a lease gives it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier.index.words import ROOT_KEY, BlockKey, Slots, Tokens, as_tokens, block_keys
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.contracts import HostPool, Store
from kvtier.tiers.lease import Lease
from kvtier.tiers.table import BlockTable
from tests.prf import block_bytes

BLOCK_SIZE = 4
BLOCK_BYTES = 96
NAMESPACE = bytes(range(32))
OTHER_NAMESPACE = bytes(range(32, 64))


def doc(seed: int, blocks: int) -> Tokens:
    """Token ids of a document; documents with one seed are prefixes of each other."""
    return np.random.default_rng(seed).integers(0, 50, blocks * BLOCK_SIZE).astype(np.int32)


def keys_of(tokens: Tokens, namespace: bytes = NAMESPACE) -> list[BlockKey]:
    return block_keys(namespace, ROOT_KEY, as_tokens(tokens), BLOCK_SIZE)


def stamped(cache: TieredCache, slots: Sequence[int] | Slots) -> BlockTable:
    """A block table of any slots, of no lease, made now."""
    wanted = np.asarray(slots, np.int32)
    return BlockTable(wanted, cache.generations_of(wanted))


@dataclass
class Rig:
    cache: TieredCache
    pools: Sequence[HostPool]
    stores: Sequence[Store]
    committed: set[BlockKey] = field(default_factory=set)

    def expect_bytes(self, lease: Lease, tokens: Tokens, blocks: int | None = None) -> None:
        """Each block the lease names holds the bytes of its key, and was committed by someone."""
        keys = keys_of(tokens, lease.namespace)
        table = lease.block_table
        for position in range(len(lease.shared) if blocks is None else blocks):
            slot = int(table[position])
            found = self.pools[0].view(slot)
            wanted = block_bytes(keys[position], BLOCK_BYTES)
            assert np.array_equal(found, wanted), f"wrong bytes in block {position} of {lease!r}"
            assert keys[position] in self.committed, f"block {position} was never computed"

    def compute(self, lease: Lease, tokens: Tokens, deadline: float | None = None) -> int:
        """Fill what the lease lacks of `tokens` and commit it; how many blocks became shared."""
        keys = keys_of(tokens, lease.namespace)
        have = len(lease.shared) + len(lease.private)
        if len(keys) > have:
            self.cache.extend(lease, len(keys) - have, deadline=deadline)
        table = lease.block_table
        first = len(lease.shared)
        self.cache.guard.check([(lease, lease.table)])
        for position in range(first, len(keys)):
            self.pools[0].view(int(table[position]))[:] = block_bytes(keys[position], BLOCK_BYTES)
        self.committed.update(keys)
        return self.cache.commit(lease, tokens)

    def serve(self, tokens: Tokens, namespace: bytes = NAMESPACE) -> tuple[Lease, int]:
        """Acquire, wait, check, compute the rest; the lease and how many blocks were hits."""
        lease = self.cache.acquire(namespace, tokens)
        assert lease.ticket.wait(self.cache.clock() + 60)
        self.expect_bytes(lease, tokens)
        hits = lease.landed_blocks
        self.compute(lease, tokens, self.cache.clock() + 60)
        self.expect_bytes(lease, tokens)
        return lease, hits

    def visit(self, tokens: Tokens, namespace: bytes = NAMESPACE) -> int:
        """`serve`, then release; how many blocks were hits."""
        lease, hits = self.serve(tokens, namespace)
        self.cache.release(lease)
        return hits
