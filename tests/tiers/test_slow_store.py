"""The cache over a store whose puts end when, and in the order, that the test says."""

from collections.abc import Sequence

import numpy as np

from kvtier.index.words import BlockKey, TierId, Tokens, block_keys
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.contracts import Answer, Fetch, Flight, Put, Signal
from kvtier.tiers.pool import ArrayPool
from tests.tiers.cache_rig import BLOCK_BYTES, BLOCK_SIZE, NAMESPACE, doc


class SlowStore:
    """Holds `held` leading blocks of every path, and ends no put by itself."""

    tier = TierId.NVME

    def __init__(self, signal: Signal, held: int) -> None:
        self._signal = signal
        self.held = held
        self.flights: list[Flight] = []

    def lookup(
        self,
        namespace: bytes,
        keys: Sequence[BlockKey],
        tokens: Tokens,
        *,
        asks: bool = False,
    ) -> Answer:
        return Answer(self._signal, min(self.held, len(keys)))

    def persist(self, namespace: bytes, keys: Sequence[BlockKey], tokens: Tokens) -> Answer:
        return self.lookup(namespace, keys, tokens)

    def put(self, request: Put) -> Flight:
        keys = block_keys(request.namespace, request.parent, request.tokens, BLOCK_SIZE)
        assert keys == list(request.keys), "these blocks are not in a row"
        self.flights.append(Flight(len(request.keys), self._signal))
        return self.flights[-1]

    def fetch(self, request: Fetch) -> Flight:
        raise AssertionError("nobody asks for it")

    def close(self) -> None:
        pass


def test_a_put_may_fail_from_its_end_and_what_failed_first_be_forgotten_meanwhile() -> None:
    signal, tokens = Signal(), doc(1, 6)
    store, pool = SlowStore(signal, held=2), ArrayPool(TierId.DRAM, 8, BLOCK_BYTES)
    cache = TieredCache(BLOCK_SIZE, [pool], [store], None, signal, writeback_s=None)
    slots = cache.reserve(6)
    assert cache.adopt(NAMESPACE, tokens, 0, slots, np.ones(6, np.uint64)) == 6
    ticket = cache.flush(NAMESPACE, tokens)
    cache.poll()
    (flight,) = store.flights
    assert len(flight) == 4
    flight.fail([2, 3])
    cache.poll()
    ticket.close()
    assert cache.shed(TierId.DRAM, cache.clock()) == 2  # what the store refused is dropped
    assert cache.match(NAMESPACE, tokens).tokens == 4 * BLOCK_SIZE
    flight.fail([0, 1])
    cache.poll()
    cache.poll()
    assert cache.shed(TierId.DRAM, cache.clock()) == 4
    cache.check()
    cache.close()


def test_what_is_put_is_in_a_row_though_a_hint_stands_behind_a_gap() -> None:
    signal, tokens = Signal(), doc(1, 3)
    store, pool = SlowStore(signal, held=0), ArrayPool(TierId.DRAM, 8, BLOCK_BYTES)
    cache = TieredCache(BLOCK_SIZE, [pool], [store], None, signal, writeback_s=None)
    slots = cache.reserve(3)
    assert cache.adopt(NAMESPACE, tokens, 0, slots, np.ones(3, np.uint64)) == 3
    both = cache.flush(NAMESPACE, tokens[: 2 * BLOCK_SIZE])
    store.flights[0].land([0])
    cache.poll()
    first = cache.flush(NAMESPACE, tokens[:BLOCK_SIZE])  # the store has lost it meanwhile
    store.flights[0].land([1])
    cache.poll()
    both.close()
    first.close()
    store.flights[1].fail_rest()
    lease = cache.acquire(NAMESPACE, tokens[: 2 * BLOCK_SIZE])  # so that only the third may go
    cache.shed(TierId.DRAM, cache.clock())
    (last,) = store.flights[2:]
    last.fail_rest()
    cache.release(lease)
    cache.poll()
    cache.check()
    cache.close()
