"""One path of blocks on its way up: what a lease waits for, and what a prefetch is.

A load matches the path in memory, asks the store how much further it goes, and raises what lies
below, level by level, as room and sources allow. It ends with the contiguous part that arrived,
and holds pins on it. It decides nothing about other loads: two that want the same block share the
copy, because the second finds it FILLING.

        ids:   0 ........ arrived ........ next[col] ........ len(ids) ........ wanted
               resident    being copied     not yet started     perhaps in the store

Called with the cache's lock held.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvtier.index.radix import RadixIndex
from kvtier.index.words import ROOT_KEY, BlockIds, BlockKey, TierId, Tokens, block_keys
from kvtier.tiers.contracts import Answer
from kvtier.tiers.ledger import Ledger
from kvtier.tiers.moves import Mask, Terms


class Load:
    """Bring the whole blocks of `tokens` into pool `col` or a faster one, as far as they exist.

    With `col` the store's column nothing moves: it only finds out.
    `known` are the tiers an earlier load found the first blocks in, for the record. `asks`: it is a
    request's, from which the sieve and the store learn. `terms`, its own: at their deadline it ends
    by itself (without them it waits for as long as it takes); in the background it reads from the
    store piece by piece, as much at a time as the ledger allows all such loads together.
    """

    def __init__(
        self,
        ledger: Ledger,
        namespace: bytes,
        tokens: Tokens,
        col: int,
        known: Sequence[TierId] = (),
        terms: Terms | None = None,
        *,
        asks: bool = False,
    ) -> None:
        self.terms = terms or Terms()
        self._ledger = ledger
        self._index = ledger.index
        self._namespace = namespace
        self._col = col
        self._home = min(col, len(ledger.pools) - 1)
        self._pinned = range(self._home, len(ledger.pools))
        self._cols = range(col, len(ledger.pools))
        self._next = dict.fromkeys(self._cols, 0)
        self._cramped = dict.fromkeys(self._cols, False)
        self._size = ledger.index.block_size
        self._tokens = tokens[: len(tokens) // self._size * self._size]
        self._answer: Answer | None = None
        self._ended = False
        self.ids: BlockIds = np.empty(0, np.int32)
        self.sources: list[TierId] = []
        self.arrived = 0
        matched = reachable(ledger, namespace, self._tokens)
        for pool in range(len(ledger.pools)):
            self._index.touch(pool, matched[ledger.holds(pool, matched)])
        self._index.found(matched)
        self._extend(matched)
        self.sources[: len(known)] = known[: len(self.sources)]
        behind = self._ask(asks)
        if asks and ledger.sieve is not None:
            ledger.sieve.asked(matched, behind)
        self.advance()

    @property
    def done(self) -> bool:
        """True once nothing more will arrive; `arrived` is final."""
        return self._ended

    @property
    def held(self) -> int:
        """Blocks that it pins, or may come to pin. 0 once it is closed."""
        known = self._ended or self._answer is None
        return len(self.ids) if known else len(self._tokens) // self._size

    def advance(self) -> None:
        """Move on as far as outcomes, sources and room allow."""
        if self._ended:
            return
        if self._answer is not None and self._answer.value is not None:
            held, self._answer = self._answer.value, None
            self._discovered(held)
        self._count()  # what has arrived makes room for what follows
        deadline = self.terms.deadline
        if deadline is not None and self._ledger.clock() >= deadline:
            self.settle()
            self._ledger.call_off(self.terms)
            return
        for col in reversed(self._cols):
            self._lift(col)
        self._count()
        if self._answer is None and self._is_stuck():
            self.settle()

    def settle(self) -> None:
        """End now with the contiguous part that has arrived; the rest may land for others, who
        need not hurry for it any more."""
        if self._ended:
            return
        self._ended = True
        self._answer = None
        kept = self.arrived if self._cols else 0  # who only asked keeps nothing
        self._index.unpin(self._home, self.ids[kept:])
        for col in self._pinned[1:]:
            self._index.unpin(col, self.ids[self.arrived :])
        self.ids = self.ids[:kept]
        self.sources = self.sources[: self.arrived]
        waited, self.terms = self.terms, replace(self.terms, background=True)
        self._ledger.call_off(waited, instead=self.terms)

    def close(self) -> None:
        """Settle, and drop the pins; also what has not begun, if it ends by this. `sources` stays,
        for the record."""
        left_early = not self._ended
        self.settle()
        self._index.unpin(self._home, self.ids)
        if left_early:
            self._ledger.call_off(self.terms)
        self.ids = self.ids[:0]

    # ---- inside ----------------------------------------------------------------------------------

    def _extend(self, new: BlockIds) -> None:
        ledger = self._ledger
        for col in self._pinned:
            ledger.keep(col, new)
            self._index.pin(col, new)
        fastest = np.full(len(new), ledger.store_col)
        for pool in reversed(range(len(ledger.pools))):
            fastest[~ledger.lacks(pool, new)] = pool
        self.sources += [ledger.tier(int(col)) for col in fastest]
        self.ids = np.concatenate([self.ids, new])

    def _ask(self, asks: bool) -> list[BlockKey]:
        """Ask the store how many of the blocks behind the match it holds. Returns their keys.

        A request is told of even if nothing is behind it; nobody waits for that answer.
        """
        store = self._ledger.store
        if store is None or not len(self._tokens):
            return []
        keys = keys_behind(self._index, self._namespace, self.ids, self._tokens)
        if keys or asks:
            answer = store.lookup(self._namespace, keys, self._tokens, asks=asks)
            self._answer = answer if keys else None
        return keys

    def _discovered(self, held: int) -> None:
        n = len(self.ids)
        end = min((n + held) * self._size, len(self._tokens))
        if end <= n * self._size:
            return
        new = self._index.insert(self._namespace, self._tokens[:end])[n:]
        self._extend(new)  # pins them, so that the hint cannot push them out
        self._index.set_hint(self._ledger.store_col, new)

    def _lift(self, col: int) -> None:
        """Start filling `col` with the next blocks that are not there or above."""
        ledger = self._ledger
        while self._next[col] < len(self.ids):
            rest = self.ids[self._next[col] :]
            lacking = self._lacking(col, rest)
            skip = leading(~lacking)
            if skip:
                ledger.join_moves(rest[:skip], self.terms)
            self._next[col] += skip
            rest, lacking = rest[skip:], lacking[skip:]
            if not len(rest):
                return
            if col + 1 >= ledger.levels:
                return
            if col + 1 < ledger.store_col:
                ledger.keep(col + 1, rest)
            run = rest[: leading(lacking & ledger.holds(col + 1, rest))]
            if self.terms.background and col + 1 == ledger.store_col:
                run = run[: ledger.prefetch_room()]
                if not len(run):
                    self._cramped[col] = False  # it waits for pieces that are on their way
                    return
            slots = ledger.take(col, len(run))
            self._cramped[col] = len(run) > 0 and not len(slots) and ledger.is_quiet(col)
            if not len(slots):
                return
            arrived = self._arrival(self._next[col], col)
            ledger.raise_blocks(run[: len(slots)], col, slots, arrived, self.terms)
            self._next[col] += len(slots)

    def _arrival(self, base: int, col: int) -> Callable[[int, TierId | None], None]:
        from_store = col + 1 == self._ledger.store_col

        def arrived(position: int, tier: TierId | None) -> None:
            if from_store and tier is not None and base + position < len(self.sources):
                self.sources[base + position] = tier

        return arrived

    def _lacking(self, col: int, ids: BlockIds) -> Mask:
        """Which blocks are neither in `col` nor in a faster pool."""
        lacking = self._ledger.lacks(col, ids)
        for faster in range(col):
            lacking &= self._ledger.lacks(faster, ids)
        return lacking

    def _count(self) -> None:
        rest = self.ids[self.arrived :]
        here = self._ledger.holds(self._col, rest)
        for faster in range(self._col):
            here |= self._ledger.holds(faster, rest)
        fresh = leading(here)
        for col in self._pinned[1:]:
            # A path longer than a lower pool passes through it as through a window.
            self._index.unpin(col, rest[:fresh])
        self.arrived += fresh

    def _is_stuck(self) -> bool:
        """True if the next block will not come: all have, or its source or its copy failed, or
        nobody makes room for it."""
        if self.arrived == len(self.ids):
            return True
        block = self.ids[self.arrived : self.arrived + 1]
        if self._ledger.is_stalled(block)[0]:
            return True  # the store's drive hangs; the request can compute meanwhile
        if not self._lacking(self._col, block)[0]:
            return False
        if not self._cols:
            return True  # it has gone since, and who only asks brings nothing back
        if self._next[self._col] > self.arrived:
            return True  # its copy failed
        for col in self._cols:
            below = col + 1
            if below >= self._ledger.levels:
                return True
            if below == self._ledger.store_col:
                return self._cramped[col] or not self._ledger.holds(below, block)[0]
            if not self._ledger.lacks(below, block)[0]:
                return self._cramped[col]  # it waits for room, or for the copy below
            if self._next[below] > self.arrived:
                return True  # the copy below failed
        return True


def reachable(ledger: Ledger, namespace: bytes, tokens: Tokens) -> BlockIds:
    """The longest run from the root of which every block is somewhere, or promised by a hint."""
    ids = ledger.index.match(namespace, tokens)
    lost = np.ones(len(ids), np.bool_)
    for col in range(ledger.levels):
        lost &= ledger.lacks(col, ids)
    return ids[: leading(~lost)]


def keys_behind(
    index: RadixIndex, namespace: bytes, ids: BlockIds, tokens: Tokens
) -> list[BlockKey]:
    """Keys of the whole blocks of `tokens` behind `ids`, which are its first ones."""
    size = index.block_size
    rest = tokens[len(ids) * size :]
    if len(rest) < size:
        return []
    parent = index.keys(ids[-1:])[0] if len(ids) else ROOT_KEY
    return block_keys(namespace, parent, rest, size)


def leading(mask: Mask) -> int:
    """How many leading entries are true."""
    return len(mask) if mask.all() else int(np.argmin(mask))
