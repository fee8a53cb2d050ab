"""One path of blocks on its way down into the store: what a flush waits for.

A sink asks the store what it holds, copies the rest into the last pool where it is not there yet,
puts it root first, one put at a time (a block is kept only after its parent), and at the end has
the store make the path durable. Called with the cache's lock held.
"""

import numpy as np

from kvtier.index.words import ROOT_KEY, BlockIds, Tokens, block_keys
from kvtier.tiers.contracts import Answer
from kvtier.tiers.ledger import Ledger
from kvtier.tiers.load import leading
from kvtier.tiers.moves import branch_runs


class Sink:
    """Write the whole blocks of `tokens` down, as far as they are in a pool or in the store."""

    def __init__(self, ledger: Ledger, namespace: bytes, tokens: Tokens) -> None:
        self._ledger = ledger
        self._namespace = namespace
        size = ledger.index.block_size
        self._tokens = tokens[: len(tokens) // size * size]
        self._keys = block_keys(namespace, ROOT_KEY, self._tokens, size)
        self.wanted = len(self._keys)
        self.stored = 0
        self._ids: BlockIds = ledger.index.match(namespace, self._tokens)
        self._pools = range(len(ledger.pools))
        self._pin(self._ids)
        self._next = 0
        self._unpinned = 0
        self._put_up_to = 0
        self._ended = False
        self._asked: Answer | None = None
        self._persisting: Answer | None = None
        if ledger.store is None:
            self.close()
        else:
            self._asked = ledger.store.lookup(namespace, self._keys, self._tokens)

    @property
    def done(self) -> bool:
        """True once `stored` is final."""
        return self._ended

    @property
    def failed(self) -> bool:
        """True if the sink ended before the whole path was in the store."""
        return self._ended and self.stored < self.wanted

    def advance(self) -> None:
        """Move on as far as outcomes and room allow."""
        if self._ended:
            return
        if self._asked is not None:
            if self._asked.value is None:
                return
            self._discovered(self._asked.value)
            self._asked = None
        if self._persisting is None and self._pushed():
            self._persist()
        if self._persisting is not None and self._persisting.value is not None:
            self.stored = min(self._next, self._persisting.value)
            self.close()

    def close(self) -> None:
        """End now and drop the pins; what was put stays put."""
        if not self._ended:
            self._ended = True
            self._let_go(len(self._ids))

    def _pin(self, new: BlockIds) -> None:
        for col in self._pools:
            self._ledger.keep(col, new)
            self._ledger.index.pin(col, new)

    def _let_go(self, end: int) -> None:
        """Unpin blocks before `end`: a path longer than a pool passes through it piece by piece."""
        for col in self._pools:
            self._ledger.index.unpin(col, self._ids[self._unpinned : end])
        self._unpinned = end

    def _persist(self) -> None:
        if self._ledger.store is None or self._next == 0:
            self.close()
            return
        size = self._ledger.index.block_size
        self._persisting = self._ledger.store.persist(
            self._namespace, self._keys[: self._next], self._tokens[: self._next * size]
        )

    def _discovered(self, held: int) -> None:
        """The store's answer is the truth: correct the hints, start behind what it holds."""
        index, col = self._ledger.index, self._ledger.store_col
        if held > len(self._ids):
            size = index.block_size
            new = index.insert(self._namespace, self._tokens[: held * size])[len(self._ids) :]
            self._pin(new)
            self._ids = np.concatenate([self._ids, new])
        index.set_hint(col, self._ids[:held][~self._ledger.holds(col, self._ids[:held])])
        stale = self._ids[held:]
        stale = stale[self._ledger.holds(col, stale)]
        if len(stale):
            index.clear_hint(col, stale)
        self._next = held

    def _pushed(self) -> bool:
        """Push the next blocks down; True once no further block can be."""
        ledger = self._ledger
        rest = self._ids[self._next :]
        self._next += leading(ledger.holds(ledger.store_col, rest))
        self._let_go(self._next)
        rest = self._ids[self._next :]
        if not len(rest):
            return True
        for col in self._pools[:-1]:
            wanted = ledger.holds(col, rest) & ledger.lacks(col + 1, rest)
            for run in branch_runs(rest, wanted):
                if ledger.lower_blocks(run, col) < len(run):
                    break
        if ledger.is_being_written(rest).any():
            return False
        if self._put_up_to > self._next:
            return True  # a put has ended, and the store refused
        last = self._pools[-1]
        here = leading(ledger.holds(last, rest))
        if here:
            ledger.lower_blocks(rest[:here], last)
            self._put_up_to = self._next + here
            return False
        return ledger.is_quiet(last)  # it is nowhere above, or there is no room for it here
