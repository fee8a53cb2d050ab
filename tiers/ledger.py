"""Who is where, and what is on its way: residency, slots and moves in flight.

The ledger is the cache's inner half: it changes the index's columns, takes and frees slots, starts
moves and applies their outcomes. Every method is called with the cache's lock held and returns at
once; bytes move elsewhere. It knows no leases and no requests: who wants a block up is a `Load`,
who wants it down is a `Sink` or an eviction.

Levels are numbered as the index's columns: pools fastest first, then the store (if there is one).
A block is *clean* in a pool when the level below has it too: it can be evicted at once. Eviction
sends the others down first and takes them when they have become clean.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.index.radix import RadixIndex
from kvtier.index.words import BlockIds, BlockKey, Residency, Slots, TierId
from kvtier.tiers.contracts import PENDING, Fetch, Flight, Pool, Put, Store
from kvtier.tiers.device import D2H, H2D
from kvtier.tiers.guard import SlotBook, SlotUse
from kvtier.tiers.mover import Mover
from kvtier.tiers.moves import Doubt, Mask, Move, TailCopy, Terms, branch_runs
from kvtier.tiers.sieve import Sieve

# Blocks go down to a store in groups, so that one sync serves many; at most an eighth of the pool.
EVICTION_GROUP = 32

# What all prefetches together may be reading from the store, and one of them in one fetch; never
# more than an eighth of the pool. Little enough to be over soon, when a request comes that waits.
PREFETCH_BYTES = 64 << 20
PREFETCH_PIECE_BYTES = 16 << 20


class Ledger:
    """Residency of every block in every level, and the moves that change it."""

    def __init__(
        self,
        index: RadixIndex,
        pools: Sequence[Pool],
        store: Store | None,
        mover: Mover | None,
        *,
        clock: Callable[[], float],
        eager: bool,
        sieve: Sieve | None = None,
    ) -> None:
        self.index = index
        self.pools = tuple(pools)
        self.store = store
        self.mover = mover
        self.clock = clock
        self.sieve = sieve
        self.book = SlotBook(pools[0].num_slots)
        self.store_col = len(self.pools)
        self.dropped = 0
        self.evicted = [0] * len(self.pools)
        self._eager = eager
        self._moves: list[Move] = []
        self._tails: list[TailCopy] = []
        self._doubts: list[Doubt] = []
        self._draining: list[tuple[int, BlockIds]] = []
        self._limbo: list[tuple[int, Slots]] = []
        self._writing: set[int] = set()
        self._writing_back: set[int] = set()
        self._filled: list[BlockIds] = []
        self._refused: set[tuple[int, int]] = set()
        self._fresh: deque[BlockIds] = deque()

    # ---- levels ----------------------------------------------------------------------------------

    @property
    def levels(self) -> int:
        return len(self.pools) + (self.store is not None)

    def tier(self, col: int) -> TierId:
        return self.index.columns[col]

    def holds(self, col: int, ids: BlockIds) -> Mask:
        """Which blocks are RESIDENT in `col` (in the store: hinted; in no level at all: none)."""
        if col >= self.levels:
            return np.zeros(len(ids), np.bool_)
        resident: Mask = self.index.state(col, ids) == Residency.RESIDENT
        return resident

    def stands(self, col: int, ids: BlockIds) -> Mask:
        """Which blocks are whole in `col`: RESIDENT, or LEAVING, which `keep` undoes."""
        leaving: Mask = self.index.state(col, ids) == Residency.LEAVING
        return self.holds(col, ids) | leaving

    def lacks(self, col: int, ids: BlockIds) -> Mask:
        """Which blocks are ABSENT in `col`."""
        if col >= self.levels:
            return np.ones(len(ids), np.bool_)
        absent: Mask = self.index.state(col, ids) == Residency.ABSENT
        return absent

    def keep(self, col: int, ids: BlockIds) -> None:
        """Blocks that were about to leave `col` stay: their bytes are still whole."""
        leaving = ids[self.index.state(col, ids) == Residency.LEAVING]
        if len(leaving):
            self.index.cancel_leave(col, leaving)

    def is_being_written(self, ids: BlockIds) -> Mask:
        """Which blocks a put that someone waits for is carrying to the store."""
        return np.fromiter((int(block) in self._writing for block in ids), np.bool_, len(ids))

    def is_being_written_back(self, ids: BlockIds) -> Mask:
        """Which blocks a put that nobody waits for is carrying to the store.

        Who does wait puts them again, with what goes with them: the store writes them once.
        """
        return np.fromiter((int(block) in self._writing_back for block in ids), np.bool_, len(ids))

    def take_filled(self) -> list[BlockIds]:
        """Blocks that became RESIDENT in the last pool since this was last called, by branch."""
        filled, self._filled = self._filled, []
        return filled

    # ---- up --------------------------------------------------------------------------------------

    def raise_blocks(
        self,
        ids: BlockIds,
        col: int,
        slots: Slots,
        arrived: Callable[[int, TierId | None], None],
        terms: Terms,
    ) -> None:
        """Start filling pool `col` from the level below.

        `ids` are one branch, root first, ABSENT in `col` and RESIDENT below; `slots` were just
        taken. The source is pinned until each block's outcome is known.
        """
        self.index.begin_fill(col, ids, slots)
        if col == 0:
            self.book.mark(slots, SlotUse.FILLING)
        below = col + 1
        if below < len(self.pools):
            self.index.pin(below, ids)
            flight = self._mover().promote(
                self.pools[below],
                self.index.slots(below, ids),
                self.pools[col],
                slots,
                deadline=terms.deadline,
            )
        else:
            namespace, parent, keys, prefix = self._address(ids)
            tokens = self.index.tokens_of(ids)
            flight = self._store().fetch(
                Fetch(
                    namespace,
                    parent,
                    tokens,
                    keys,
                    prefix,
                    self.pools[col],
                    slots,
                    deadline=terms.deadline,
                    background=terms.background,
                )
            )
        self._moves.append(Move(flight, ids, below, col, slots, arrived, wanted={terms}))

    def join_moves(self, ids: BlockIds, terms: Terms) -> None:
        """Somebody else wants these blocks: what is bringing them up does it on his terms too."""
        for move in self._moves:
            if move.dst < move.src and np.isin(ids, move.ids).any():
                move.wanted.add(terms)
                move.agree()

    def prefetch_room(self) -> int:
        """How many blocks one more fetch in the background may bring now."""
        pool = self.pools[-1]
        reading = sum(
            move.flight.unread
            for move in self._moves
            if move.src == self.store_col and move.flight.background and not move.flight.stalled
        )
        most = max(1, min(PREFETCH_BYTES // pool.block_bytes, pool.num_slots // 8))
        return max(0, min(most - reading, max(1, PREFETCH_PIECE_BYTES // pool.block_bytes)))

    def is_stalled(self, ids: BlockIds) -> Mask:
        """Which blocks are being filled by a copy that does not come on.

        Their slots are in use until it has returned, and nobody should wait for them.
        """
        stalled = np.zeros(len(ids), np.bool_)
        for move in self._moves:
            if move.slots is not None and move.flight.stalled:
                stalled |= np.isin(ids, move.ids[move.flight.status == PENDING])
        return stalled

    def call_off(self, terms: Terms, instead: Terms | None = None) -> None:
        """Whose terms these are wants blocks no more, or on other terms now.

        What comes up for others goes on for them, no faster than they want it. What comes for
        nobody, and has not begun, is dropped.
        """
        for move in self._moves:
            if terms not in move.wanted or move.flight.done:
                continue
            move.wanted.remove(terms)
            if instead is not None:
                move.wanted.add(instead)
            if move.wanted:
                move.agree()
            else:
                move.flight.cancel()

    def made(self, ids: BlockIds, slots: Slots) -> None:
        """Blocks that compute (or a sidecar's client) has filled become RESIDENT on top."""
        self.index.begin_fill(0, ids, slots)
        self.index.finish_fill(0, ids)
        self.book.mark(slots, SlotUse.RESIDENT)
        if len(self.pools) == 1:
            self._filled.append(ids)
        if self._eager:
            self.index.pin(1, ids)  # keeps the ids theirs while they wait in the queue
            self._fresh.append(ids)

    # ---- down ------------------------------------------------------------------------------------

    def lower_blocks(self, ids: BlockIds, col: int) -> int:
        """Start copying blocks from pool `col` one level down; how many leading ones are under way.

        `ids` are one branch, root first, RESIDENT in `col` and absent below. They are pinned in
        `col` until each one's outcome is known. Fewer than all start when there is no room below.
        """
        below = col + 1
        if below == self.store_col:
            self._put(ids, col)
            return len(ids)
        slots = self._take(below, self._startable(D2H, len(ids), col, below))
        # Making room may have sent some of them down already, as ancestors of what had to go.
        started = ids[self.lacks(below, ids)][: len(slots)]
        if len(started) < len(slots):
            self.free(below, slots[len(started) :])
            slots = slots[: len(started)]
        if len(started):
            self.index.begin_fill(below, started, slots)
            self.index.pin(col, started)
            flight = self._mover().demote(
                self.pools[col], self.index.slots(col, started), self.pools[below], slots
            )
            self._moves.append(Move(flight, started, col, below, slots))
        lacking = self.lacks(below, ids)
        return int(np.argmax(lacking)) if lacking.any() else len(ids)

    def write_back(self, ids: BlockIds) -> Flight:
        """Start putting blocks of the last pool into the store, behind everybody else's.

        As `lower_blocks`, but all of them start, and one that is refused may go down another time.
        """
        return self._put(ids, self.store_col - 1, background=True)

    def _put(self, ids: BlockIds, col: int, *, background: bool = False) -> Flight:
        self.index.pin(col, ids)
        (self._writing_back if background else self._writing).update(ids.tolist())
        pool, slots = self.pools[col], self.index.slots(col, ids)
        namespace, parent, keys, prefix = self._address(ids)
        checksums = pool.checksums(slots) if pool.tier is TierId.DRAM else None
        tokens = self.index.tokens_of(ids)
        flight = self._store().put(
            Put(namespace, parent, tokens, keys, prefix, pool, slots, checksums, background)
        )
        self._moves.append(Move(flight, ids, col, self.store_col, None, background=background))
        return flight

    def _address(
        self, ids: BlockIds
    ) -> tuple[bytes, BlockKey, tuple[BlockKey, ...], npt.NDArray[np.int32]]:
        first = int(ids[0])
        above = self.index.path(first)[:-1]
        return (
            self.index.namespace_of(first),
            self.index.parent_key(first),
            tuple(self.index.keys(ids)),
            self.index.tokens_of(above),
        )

    def copy_tail(self, src: Slots, dst: Slots, owner: int) -> TailCopy:
        """Copy slots of the top pool to others of it, PRIVATE to `owner` once all have arrived."""
        flight = self._mover().promote(self.pools[0], src, self.pools[0], dst)
        tail = TailCopy(flight, src, dst, owner)
        self.book.mark(dst, SlotUse.COPYING, owner)
        self._tails.append(tail)
        return tail

    # ---- outcomes --------------------------------------------------------------------------------

    def advance(self) -> None:
        """Apply what moves have reported since the last call; free slots that have come idle."""
        moves, self._moves = self._moves, []
        for move in moves:
            landed, failed = move.flight.news()
            if len(landed):
                self._landed(move, landed)
            if len(failed):
                self._failed(move, failed)
            if move.flight.unread:
                self._moves.append(move)
        doubts, self._doubts = self._doubts, []
        for doubt in doubts:
            self._settle_doubt(doubt)
        for tail in self._tails:
            self._settle_tail(tail)
        self._tails = [tail for tail in self._tails if not tail.settled]
        draining, self._draining = self._draining, []
        for col, ids in draining:
            self._leave(col, ids[self.index.state(col, ids) == Residency.LEAVING])
        limbo, self._limbo = self._limbo, []
        for col, slots in limbo:
            self._give_up(col, slots)
        self._copy_down_fresh()

    def _settle_doubt(self, doubt: Doubt) -> None:
        held = doubt.answer.value
        if held is None or self.is_being_written(doubt.refused).any():
            self._doubts.append(doubt)
            return
        if held < len(doubt.above):
            # Now they are missing ancestors, which the next eviction sends down as well.
            self.index.clear_hint(self.store_col, doubt.above[held : held + 1])
            self._refused.difference_update((doubt.col, int(block)) for block in doubt.refused)
        self.index.unpin(doubt.col, doubt.above)
        self.index.unpin(doubt.col, doubt.refused)

    def _settle_tail(self, tail: TailCopy) -> None:
        if not tail.flight.done:
            return
        tail.settled = True
        if not tail.failed:
            theirs = self.book.is_used(tail.dst, SlotUse.COPYING, tail.owner)
            self.book.mark(tail.dst[theirs], SlotUse.PRIVATE, tail.owner)

    def _landed(self, move: Move, positions: npt.NDArray[np.intp]) -> None:
        ids = move.ids[positions]
        if move.slots is None:
            self.index.set_hint(move.dst, ids)
            self._written(move, ids)
        else:
            slots = move.slots[positions]
            keys, checksums = self.index.keys(ids), move.flight.checksums[positions]
            self.pools[move.dst].describe(slots, keys, checksums)
            self.index.finish_fill(move.dst, ids)
            if move.dst == 0:
                self.book.mark(slots, SlotUse.RESIDENT)
            if move.dst == len(self.pools) - 1:
                self._filled.append(ids)
            if self.tier(move.src) is TierId.NVME and self.tier(move.dst) is TierId.DRAM:
                self.index.touch_cold(move.dst, ids)
        if move.arrived is not None:
            for position in positions.tolist():
                move.arrived(position, move.flight.sources[position])
        if move.src < len(self.pools):
            self.index.unpin(move.src, ids)

    def _failed(self, move: Move, positions: npt.NDArray[np.intp]) -> None:
        ids = move.ids[positions]
        if move.slots is None:
            self._written(move, ids)
        if move.dst > move.src:
            if not move.background:
                # The level below does not take it: the next eviction drops it, and tries no more.
                self._refused.update((move.src, int(block)) for block in ids)
            if move.slots is None:
                # Those behind that were told of before are unpinned, and may name others by now.
                refused = np.union1d(positions, move.flight.untold)
                self._doubt(move.ids[refused[refused >= positions[0]]], move.src)
        if move.slots is not None:
            self.free(move.dst, self.index.abort_fill(move.dst, ids))
        if move.src < len(self.pools):
            self.index.unpin(move.src, ids)
        else:
            # Gone or corrupt: what the hints promised below this block is gone as well.
            self.index.clear_hint(move.src, ids)

    def _written(self, move: Move, ids: BlockIds) -> None:
        """A put is over, as far as these blocks go."""
        carried = self._writing_back if move.background else self._writing
        carried.difference_update(ids.tolist())

    def _doubt(self, refused: BlockIds, col: int) -> None:
        above = self.index.path(int(refused[0]))[:-1]
        if not self.holds(self.store_col, above[-1:]).any():
            return
        self.index.pin(col, above)
        self.index.pin(col, refused)
        namespace, keys = self.index.namespace_of(int(above[0])), self.index.keys(above)
        answer = self._store().lookup(namespace, keys, self.index.tokens_of(above))
        self._doubts.append(Doubt(answer, above, refused, col))

    def _copy_down_fresh(self) -> None:
        """Copy new blocks one level down soon after they were made, so that eviction is free."""
        for _ in range(len(self._fresh)):
            if self.store_col > 1 and not self._startable(D2H, 1, 0, 1):
                return  # the link is full: no use in looking at every one that waits for it
            ids = self._fresh.popleft()
            wanted = self.holds(0, ids) & self.lacks(1, ids) & ~self.is_being_written(ids)
            later: list[BlockIds] = []
            for run in branch_runs(ids, wanted):
                parent = self.index.path(int(run[0]))[-2:-1]
                blocked = self.store_col == 1 and bool(self.is_being_written(parent).any())
                started = 0 if blocked else self.lower_blocks(run, 0)
                if started < len(run) and (blocked or not self.is_quiet(1)):
                    later.append(run[started:])  # else no room will come: eviction sees to it
            for run in later:
                self.index.pin(1, run)
                self._fresh.append(run)
            self.index.unpin(1, ids)

    # ---- room ------------------------------------------------------------------------------------

    def take(self, col: int, n: int) -> Slots:
        """Up to `n` slots of pool `col` for blocks on their way up, as many as may start now.

        Free ones, then those of clean blocks. Blocks without a copy below are sent down; their
        slots come free later.
        """
        below = col + 1
        if below < len(self.pools):
            n = self._startable(H2D, n, below, col)
        return self._take(col, n)

    def _startable(self, stream: str, n: int, src: int, dst: int) -> int:
        """How many of `n` blocks may start from pool `src` to `dst`, by what is under way there.

        One always, where nothing is: a link that others fill stops nobody.
        """
        room = self._mover().room(stream) // self.pools[dst].block_bytes
        under_way = any(move.src == src and move.dst == dst for move in self._moves)
        return min(n, max(room, 0 if under_way else 1))

    def _take(self, col: int, n: int) -> Slots:
        pool = self.pools[col]
        if pool.num_free < n:
            self.evict(col, n - pool.num_free)
        return pool.alloc(min(n, pool.num_free))

    def free(self, col: int, slots: Slots) -> None:
        """Give slots back once no recorded reader or writer is left on them."""
        if col == 0:
            self.book.mark(slots, SlotUse.FREE)
        self._give_up(col, slots)

    def _give_up(self, col: int, slots: Slots) -> None:
        if not self._is_idle(col, slots):
            self._limbo.append((col, slots))
        else:
            self.pools[col].free(slots)

    def evict(self, col: int, n: int, *, sift: bool = True) -> None:
        """Free `n` slots of pool `col` as far as possible, least recently used leaves first.

        Those that come free without further ado count. With `sift`, what the sieve does not want
        written leaves as if it were clean.
        """
        n -= self.vacating(col)
        if n <= 0:
            return
        group = min(EVICTION_GROUP, max(1, self.pools[col].num_slots // 8))
        victims = self.index.victims(col, max(n, group), least=n)
        if col + 1 >= self.levels:
            self._leave(col, victims[:n])
            return
        clean = self.holds(col + 1, victims) | self._is_refused(col, victims)
        clean |= self.is_stalled(victims)  # a copy below that hangs can't be waited for, nor made
        if sift and self.sieve is not None and col + 1 == self.store_col:
            runs = self._branches(victims[~clean & self.lacks(col + 1, victims)])
            clean |= np.isin(victims, self.sieve.unwanted(runs))
        if col + 1 == self.store_col:
            # A block behind a gap in the store goes down again with what hangs off it: let go now,
            # it would be brought back for that, time and again.
            for run in self._branches(victims[~clean & self.lacks(col + 1, victims)]):
                clean &= ~np.isin(victims, self.missing_ancestors(run))
        self._leave(col, victims[clean][:n])
        short = n - int(np.count_nonzero(clean)) - self.going_down(col)
        if short > 0:
            dirty = victims[~clean & self.lacks(col + 1, victims)]
            for run in self._branches(dirty[: max(short, group)]):
                # Those before it may have taken some of it along.
                rest = run[self.lacks(col + 1, run) & ~self.is_being_written(run)]
                if len(rest):
                    self._send_down(col, rest)

    def going_down(self, col: int) -> int:
        """Blocks on their way from `col` to the level below: slots that will be clean soon.

        Not those that nobody waits for: they may take long, and are the last to be evicted.
        """
        going = (m for m in self._moves if m.src == col and m.dst > col and not m.background)
        return sum(move.flight.unread for move in going)

    def vacating(self, col: int) -> int:
        """Slots of `col` that come free as soon as nothing reads them any more."""
        return self.limbo(col) + self.index.count(col, Residency.LEAVING)

    def is_quiet(self, col: int) -> bool:
        """Nothing moves in pool `col` or below: room there will come only if someone lets go."""
        return not (
            any(m.src >= col or m.dst >= col for m in self._moves if not m.flight.stalled)
            or any(doubt.col >= col for doubt in self._doubts)
            or any(where >= col for where, _ in self._limbo)
            or any(where >= col for where, _ in self._draining)
        )

    def _leave(self, col: int, ids: BlockIds) -> None:
        """RESIDENT or LEAVING -> ABSENT, as soon as nothing reads the slots any more."""
        if not len(ids):
            return
        staying = ids[self.holds(col, ids)]
        if len(staying):
            self.index.begin_leave(col, staying)
        if not self._is_idle(col, self.index.slots(col, ids)):
            self._draining.append((col, ids))
            return
        kept = np.zeros(len(ids), np.bool_)
        for below in range(col + 1, self.levels):
            kept |= self.holds(below, ids)
        if self.sieve is not None and col + 1 == self.store_col:
            self.sieve.leaving(ids, ~kept)
        self.dropped += int(np.count_nonzero(~kept))
        self.evicted[col] += len(ids)
        self._refused.difference_update((col, int(block)) for block in ids)
        self.free(col, self.index.finish_leave(col, ids))

    def _is_idle(self, col: int, slots: Slots) -> bool:
        """Whether no copy and no compute has business with these slots."""
        return self.mover is None or self.mover.idle(self.pools[col], slots)

    def _is_refused(self, col: int, ids: BlockIds) -> Mask:
        if not self._refused:
            return np.zeros(len(ids), np.bool_)
        return np.fromiter(
            ((col, int(block)) in self._refused for block in ids), np.bool_, len(ids)
        )

    def _branches(self, leaf_first: BlockIds) -> list[BlockIds]:
        """Cut a leaf-first plan into root-first runs of one branch each."""
        runs: dict[int, list[int]] = {}  # by the last block of the run
        for block in leaf_first[::-1].tolist():
            run = runs.pop(self.index.parent(block), [])
            run.append(block)
            runs[block] = run
        return [np.asarray(run, np.int32) for run in runs.values()]

    def _send_down(self, col: int, run: BlockIds) -> None:
        """Copy a branch down; drop it where the level below can't take it and won't soon."""
        if col + 1 < self.store_col:
            if self.lower_blocks(run, col) == 0:
                run = run[self.lacks(col + 1, run)]
                spare = self.holds(self.store_col, run)
                moving = self.going_down(col) or self.going_down(col + 1)
                coming = moving or self.vacating(col + 1)
                self._leave(col, run[spare] if coming else run)
            return
        missing = self.missing_ancestors(run)
        if self.is_being_written(missing).any():
            return  # its ancestors are on their way; the next eviction finds them published
        self.keep(col, missing)
        away = missing[~self.holds(col, missing)]
        if not len(away):
            # The store keeps a block only after its parents, so they travel in the same flight.
            together = np.concatenate([missing, run])
            self.lower_blocks(together, col)
            if self.sieve is not None:
                self.sieve.sent(together)
        elif self._are_above(col, away):
            self._bring_down(col, away, run)
        else:
            self._leave(col, run)

    def _are_above(self, col: int, ids: BlockIds) -> bool:
        """Whether blocks that `col` lacks are in the next faster pool, or on their way from it."""
        if col == 0:
            return False
        there = self.holds(col - 1, ids) & ~self._is_refused(col - 1, ids)
        return bool((there | ~self.lacks(col, ids)).all())

    def _bring_down(self, col: int, ancestors: BlockIds, run: BlockIds) -> None:
        """Copy a run's hot ancestors into `col`, from where the next eviction sends all on.

        Where nothing is free the end of the run makes room: without them all of it would be lost.
        """
        ancestors = ancestors[self.lacks(col, ancestors)]
        pool = self.pools[col]
        if len(ancestors) > pool.num_free:
            self._leave(col, run[pool.num_free - len(ancestors) :])
        ancestors = ancestors[: pool.num_free]
        if len(ancestors):
            self.lower_blocks(ancestors, col - 1)

    def missing_ancestors(self, run: BlockIds) -> BlockIds:
        """Ancestors of `run` from the first that the store lacks on, root first.

        A hint behind a gap (of a put that landed after its parent had left) is worth nothing, and
        what is put has to be blocks in a row.
        """
        above = self.index.path(int(run[0]))[:-1]
        lacking = self.lacks(self.store_col, above)
        return above[int(np.argmax(lacking)) :] if lacking.any() else above[:0]

    def _mover(self) -> Mover:
        if self.mover is None:
            raise ValueError("a cache of several pools needs a mover")
        return self.mover

    def _store(self) -> Store:
        if self.store is None:
            raise ValueError("this cache has no store")
        return self.store

    # ---- accounts --------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Blocks whose outcome has not been settled, and new blocks waiting to be copied down."""
        moving = sum(move.flight.unread for move in self._moves)
        moving += sum(len(tail.dst) for tail in self._tails)
        moving += sum(len(doubt.refused) for doubt in self._doubts)
        return moving + sum(len(ids) for ids in self._fresh)

    @property
    def num_private(self) -> int:
        """Slots of the top pool that belong to one lease or reservation."""
        return self.book.count(SlotUse.PRIVATE) + self.book.count(SlotUse.COPYING)

    def limbo(self, col: int) -> int:
        """Slots of `col` that belong to nobody but are still read."""
        return sum(len(slots) for where, slots in self._limbo if where == col)
