"""Write-back: which blocks of the last pool go down to the store while nobody needs their room.

What has been in the pool for `writeback_s` is put into the store in the background, so that a crash
loses little of what is hot: roots before what hangs off them, since a store keeps a block only
after its parents, and since they serve most. Called with the cache's lock held; each call does a
bounded amount of work. Knows no drive and no budget: a store that refuses is left alone for a
while, twice as long each time.

    filled -> queue -- writeback_s --> ready -- room --> being put --> in the store
                ^        |                |                  |
                |        v                v                  v
                |     has left: forgotten, and nothing leaks
                +------- parent is not there yet, or refused: looked at again after writeback_s
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from kvtier.index.words import BlockIds, Slots
from kvtier.tiers.contracts import LANDED, Flight
from kvtier.tiers.ledger import Ledger
from kvtier.tiers.load import leading
from kvtier.tiers.moves import Mask

WRITEBACK_S = 30.0
"""A block's time in the last pool before it is written back, unless told otherwise."""

# What may be on its way at once, and in one put; never more than an eighth of the pool.
IN_FLIGHT_BYTES = 64 << 20
PUT_BYTES = 16 << 20
MAX_PUTS = 64

# Runs looked at in one step.
STEP_RUNS = 256

# While something is on its way or ready to go, somebody should poll this often.
LOOK_S = 0.05

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, eq=False)
class Run:
    """Blocks of one branch, root first, and when each came into which slot of the last pool.

    Slot and time tell whether it is the same block still: ids and slots are used again.
    """

    ids: BlockIds
    slots: Slots
    filled_at: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, stop: int) -> "Run":
        """Its blocks from `start` to `stop`."""
        return Run(self.ids[start:stop], self.slots[start:stop], self.filled_at[start:stop])


@dataclass(eq=False)
class Down:
    """A put on its way: `run` (perhaps with ancestors before it) and runs that wait for it."""

    flight: Flight
    ids: BlockIds
    run: Run
    behind: list[Run] = field(default_factory=list)


class WriteBack:
    """Write-back of the last pool of a ledger that has a store."""

    def __init__(self, ledger: Ledger, writeback_s: float, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._index = ledger.index
        self._after_s = writeback_s
        self._clock = clock
        self._col = len(ledger.pools) - 1
        pool = ledger.pools[self._col]
        share = max(1, pool.num_slots // 8)
        self._most = min(share, max(1, IN_FLIGHT_BYTES // pool.block_bytes))
        self._most_a_put = min(share, max(1, PUT_BYTES // pool.block_bytes))
        self._filled_at = np.full(pool.num_slots, np.inf)
        self._queue: deque[tuple[float, Run]] = deque()  # by the time they are due
        self._ready: list[tuple[int, int, Run]] = []  # a heap: depth, then order of coming
        self._order = 0
        self._downs: list[Down] = []
        self._carrying: dict[int, Down] = {}
        self._num_waiting = 0
        self._tidy_at = 2 * pool.num_slots
        self._pause_s = 0.0
        self._paused_until = -np.inf
        self._num_written = 0

    @property
    def num_written(self) -> int:
        """Blocks written back so far."""
        return self._num_written

    @property
    def num_waiting(self) -> int:
        """Blocks that wait for their turn; some may have left the pool meanwhile."""
        return self._num_waiting

    def next_due(self) -> float:
        """The clock's value by which `advance` should be called again if nothing else happens."""
        now = self._clock()
        soon = now + LOOK_S
        if self._downs:
            return soon
        if self._ready:
            return max(soon, self._paused_until)
        # What comes into the pool from now on is not due before this.
        idle = now + max(self._after_s, LOOK_S)
        return min(idle, max(soon, self._queue[0][0], self._paused_until)) if self._queue else idle

    def advance(self, filled: Sequence[BlockIds]) -> None:
        """Note what has come into the pool, what has become of puts, and start what is due."""
        now = self._clock()
        self._settle(now)
        for ids in filled:
            self._note(ids, now)
        if self._num_waiting > self._tidy_at:
            self._tidy()
        looked_at = 0
        while self._queue and self._queue[0][0] <= now and looked_at < STEP_RUNS:
            self._make_ready(self._queue.popleft()[1])
            looked_at += 1
        looked_at = 0
        while self._ready and self._may_start(now) and looked_at < STEP_RUNS:
            run = heappop(self._ready)[2]
            self._num_waiting -= len(run)
            self._start(run, now)
            looked_at += 1

    # ---- waiting ---------------------------------------------------------------------------------

    def _note(self, ids: BlockIds, now: float) -> None:
        ids = ids[self._ledger.holds(self._col, ids)]
        slots = self._index.slots(self._col, ids)
        self._filled_at[slots] = now
        self._put_off(Run(ids, slots, self._filled_at[slots]), now)

    def _put_off(self, run: Run, now: float) -> None:
        """Look at what the store still lacks of it when `writeback_s` have passed."""
        run = _picked(run, self._ledger.lacks(self._ledger.store_col, run.ids))
        if len(run):
            self._queue.append((now + self._after_s, run))
            self._num_waiting += len(run)

    def _make_ready(self, run: Run) -> None:
        """Into the heap with what is left of it, if anything is. It is waiting already."""
        left = _picked(run, self._is_wanted(run))
        self._num_waiting -= len(run) - len(left)
        if len(left):
            self._order += 1
            depth = self._index.depth(int(left.ids[0]))
            heappush(self._ready, (depth, self._order, left))

    def _is_wanted(self, run: Run) -> Mask:
        """Which blocks stand where they did, and nowhere below."""
        ledger = self._ledger
        wanted = ledger.holds(self._col, run.ids) & ledger.lacks(ledger.store_col, run.ids)
        wanted &= self._index.slots(self._col, run.ids) == run.slots
        wanted &= self._filled_at[run.slots] == run.filled_at
        return wanted

    def _tidy(self) -> None:
        """Forget blocks that have left, so that a store that takes nothing costs no memory."""
        queue, ready = list(self._queue), self._ready
        self._queue.clear()
        for due, run in queue:
            left = _picked(run, self._is_wanted(run))
            if len(left):
                self._queue.append((due, left))
        self._ready = []
        for depth, order, run in ready:
            left = _picked(run, self._is_wanted(run))
            if len(left):
                self._ready.append((depth, order, left))
        heapify(self._ready)
        self._num_waiting = sum(len(run) for _, run in self._queue)
        self._num_waiting += sum(len(run) for _, _, run in self._ready)
        self._num_waiting += sum(len(run) for down in self._downs for run in down.behind)
        self._tidy_at = 2 * max(self._num_waiting, len(self._filled_at))

    # ---- going -----------------------------------------------------------------------------------

    def _may_start(self, now: float) -> bool:
        return (
            now >= self._paused_until
            and len(self._downs) < MAX_PUTS
            and len(self._carrying) < self._most
        )

    def _start(self, run: Run, now: float) -> None:
        """Put the first blocks of a run with the ancestors that the store lacks, or put it off."""
        ledger = self._ledger
        on_the_way = ledger.is_being_written(run.ids) | ledger.is_being_written_back(run.ids)
        run = _picked(run, self._is_wanted(run) & ~on_the_way)
        if not len(run):
            return
        linked = leading(self._index.parents(run.ids[1:]) == run.ids[:-1]) + 1
        if linked < len(run):
            self._wait_again(run.part(linked, len(run)))
            run = run.part(0, linked)
        if ledger.sieve is not None:
            wanted = ledger.sieve.num_wanted(run.ids)
            if wanted < len(run):  # until it has been asked for again, perhaps
                self._put_off(run.part(wanted, len(run)), now)
                run = run.part(0, wanted)
            if not len(run):
                return
        missing = ledger.missing_ancestors(run.ids)
        carrier = next(
            (self._carrying[b] for b in missing[::-1].tolist() if b in self._carrying), None
        )
        if carrier is not None:
            self._num_waiting += len(run)
            carrier.behind.append(run)
        elif not self._are_due(missing, now):
            self._put_off(run, now)
        else:
            self._put(missing, run)

    def _are_due(self, ids: BlockIds, now: float) -> bool:
        """Whether the pool has had these for long enough, and nobody is putting them."""
        if not self._ledger.holds(self._col, ids).all() or self._ledger.is_being_written(ids).any():
            return False
        filled_at = self._filled_at[self._index.slots(self._col, ids)]
        return bool((filled_at + self._after_s <= now).all())

    def _put(self, ancestors: BlockIds, run: Run) -> None:
        room = min(self._most - len(self._carrying), self._most_a_put)
        ids = np.concatenate([ancestors, run.ids])[:room]
        taken = max(0, len(ids) - len(ancestors))
        down = Down(self._ledger.write_back(ids), ids, run.part(0, taken))
        if self._ledger.sieve is not None:
            self._ledger.sieve.sent(ids)
        rest = run.part(taken, len(run))
        if len(rest):
            self._num_waiting += len(rest)
            down.behind.append(rest)
        self._downs.append(down)
        self._carrying.update(dict.fromkeys(ids.tolist(), down))

    def _wait_again(self, run: Run) -> None:
        self._num_waiting += len(run)
        self._make_ready(run)

    def _settle(self, now: float) -> None:
        """What has become of puts; only once the ledger has heard of all their blocks."""
        refused = False
        for down in [down for down in self._downs if not down.flight.unread]:
            self._downs.remove(down)
            for block in down.ids.tolist():
                del self._carrying[block]
            landed = int(np.count_nonzero(down.flight.status == LANDED))
            self._num_written += landed
            self._num_waiting -= sum(len(run) for run in down.behind)
            if landed == len(down.ids):
                self._pause_s = 0.0
                for run in down.behind:
                    self._wait_again(run)
            else:
                refused = True
                for run in (down.run, *down.behind):
                    self._put_off(run, now)
        if refused:
            self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
            self._paused_until = now + self._pause_s


def _picked(run: Run, mask: Mask) -> Run:
    return run if mask.all() else Run(run.ids[mask], run.slots[mask], run.filled_at[mask])
