"""What was asked for lately, without its bytes: a tree of block fingerprints under several experts.

An *expert* is an eviction rule that runs on metadata alone: it keeps the set of blocks that a tier
of its capacity would hold now. All experts of an index share this tree, so that a request costs one
walk. A fingerprint is 32 bits of a hash of a block's token ids; two blocks that collide are counted
as one, which can cost a hit and nothing else. Knows no live block, no residency and no tokens.

A ghost is a run of blocks that were asked for first by one request; it is cut where a later path
leaves it. Ghosts that no expert holds are kept, oldest first to go, up to a bound: their counts are
what lets a rule tell a block that returns from one that is new.

There are several ghosts for every live node, so a ghost is a row of columns (`rows.py`), and what
an expert knows about it stands in columns of the expert's own.
"""

from typing import Protocol

import numpy as np

from kvtier.index.rows import Children, Order, Rows
from kvtier.index.words import Tokens

Ghost = int
"""A row of the tree's. Good until the ghost is forgotten: see `GhostTree.birth`."""

ROOT: Ghost = 0

_MARK = 4
_ODD = 0x9E3779B97F4A7C15
_MOST_EXPERTS = 16


def fingerprints(namespace: bytes, tokens: Tokens, block_size: int) -> bytes:
    """Four bytes for each whole block of `tokens`: equal blocks of a namespace have equal ones."""
    n = len(tokens) // block_size
    ids = tokens[: n * block_size].reshape(n, block_size).astype(np.uint64)
    factors = np.arange(1, 2 * block_size, 2, dtype=np.uint64) * np.uint64(_ODD)
    mixed = ids @ factors + factors.sum()
    mixed ^= np.uint64(int.from_bytes(namespace[:8].ljust(8, b"\0"), "little"))
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(_ODD)
    return bytes((mixed >> np.uint64(32)).astype(np.uint32))


class Listener(Protocol):
    """Who keeps something for each ghost."""

    def split(self, upper: Ghost, lower: Ghost) -> None:
        """`upper` is new and took the head of `lower`'s run; it needs its share of what is kept."""
        ...

    def forgotten(self, ghost: Ghost) -> None:
        """The tree dropped it; no expert holds it. The row may stand for another ghost soon, for
        which nothing must be kept."""
        ...


class GhostTree:
    """All ghosts. `bound` is how many blocks that nobody holds are remembered.

    Columns, to be read by all and changed only here: `parent` (-1 for the root and what is
    forgotten), `start` (blocks above the run), `last` and `before` (the clock of the last request
    and of the one before it), `branches` (children ever made, up to 2), `birth` (the clock when the
    row became this ghost, modulo 2^32).
    """

    def __init__(self, bound: int) -> None:
        self.rows = Rows()
        self.parent = self.rows.integers("i")
        self.start = self.rows.integers("i")
        self.last = self.rows.integers("q")
        self.before = self.rows.integers("q")
        self.birth = self.rows.integers("I")
        self.branches = self.rows.integers("B")
        self.num_ghosts = 0
        self.listeners: list[Listener] = []
        self._num_experts = 0
        self._holders = self.rows.integers("H")
        self._queued = self.rows.integers("H")
        self._num_entries = self.rows.integers("I")
        self._mark = self.rows.integers("I")
        self._num_children = self.rows.integers("i")
        self._children = Children(self.rows, self.parent, self._mark)
        self._marks: list[bytes] = [b""]
        self._bound = bound
        self._idle = Order(self.rows)
        self._idle_blocks = 0
        self.parent[ROOT] = -1

    def enrol(self, expert: Listener) -> int:
        """Take an expert in; returns the bit that names it to `hold` and `enqueue`.

        Raises `ValueError` if there are too many.
        """
        if self._num_experts == _MOST_EXPERTS:
            raise ValueError(f"experts: {_MOST_EXPERTS} of one tree are the most")
        self.listeners.append(expert)
        self._num_experts += 1
        return 1 << self._num_experts - 1

    def marks(self, ghost: Ghost) -> bytes:
        """The fingerprints of its run."""
        return self._marks[ghost]

    def length(self, ghost: Ghost) -> int:
        """How many blocks it has."""
        return len(self._marks[ghost]) // _MARK

    def end(self, ghost: Ghost) -> int:
        """How many blocks a path down to its last one has."""
        return self.start[ghost] + len(self._marks[ghost]) // _MARK

    def path(self, marks: bytes, clock: int) -> tuple[list[Ghost], int]:
        """The ghosts that hold exactly these blocks, root first, made where they are missing, all
        used at `clock` (above all before it); and how many blocks were known."""
        firsts = memoryview(marks).cast("I")
        get, runs, last, before, idle = (
            self._children.get,
            self._marks,
            self.last,
            self.before,
            self._idle,
        )
        ghost, known, path = ROOT, 0, []
        while known < len(firsts):
            child = get(ghost, firsts[known])
            if not child:
                break
            run = runs[child]
            if not marks.startswith(run, known * _MARK):
                child = self._split(child, _common(run, marks, known * _MARK), clock)
                run = runs[child]
            path.append(child)
            before[child] = last[child]
            last[child] = clock
            if not self._holders[child] and child in idle:
                idle.remove(child)
                idle.append(child)
            known += len(run) // _MARK
            ghost = child
        if known < len(firsts):
            fresh = self._make(ghost, known, marks[known * _MARK :], clock)
            self.before[fresh] = self.last[fresh] = clock
            self.branches[fresh] = 0
            self.branches[ghost] = min(2, self.branches[ghost] + 1)
            self._num_children[ghost] += 1
            self._busy(ghost)
            self.settle(fresh)
            path.append(fresh)
        return path, known

    def find(self, marks: bytes) -> list[Ghost]:
        """The ghosts that `marks` lead to, root first; of the last one only the head may match."""
        firsts = memoryview(marks).cast("I")
        ghost, at, found = ROOT, 0, []
        while at < len(firsts):
            ghost = self._children.get(ghost, firsts[at])
            if not ghost:
                break
            found.append(ghost)
            if not marks.startswith(self._marks[ghost], at * _MARK):
                break
            at += self.length(ghost)
        return found

    # ---- what experts hold -----------------------------------------------------------------------

    def hold(self, ghost: Ghost, bit: int) -> None:
        """An expert holds its first block of the ghost."""
        self._holders[ghost] |= bit
        self._busy(ghost)

    def drop(self, ghost: Ghost, bit: int) -> None:
        """An expert holds no block of it any more."""
        self._holders[ghost] &= ~bit
        self.settle(ghost)

    def share(self, upper: Ghost, lower: Ghost, bit: int, rest: int) -> None:
        """After a split: the expert held some of `lower`, and still does if there is a `rest`."""
        self._holders[upper] |= bit
        if not rest:
            self._holders[lower] &= ~bit

    def holders(self, ghost: Ghost) -> int:
        """The bits of those that hold some of it."""
        return self._holders[ghost]

    def is_queued(self, ghost: Ghost, bit: int) -> bool:
        """Whether the expert has it in a queue, and did not `unmark` it since."""
        return bool(self._queued[ghost] & bit)

    def enqueue(self, ghost: Ghost, bit: int) -> None:
        """An expert puts an entry of it into a queue: its row is kept until every entry has left,
        even if it is forgotten."""
        self._queued[ghost] |= bit
        self._num_entries[ghost] += 1

    def dequeue(self, ghost: Ghost, bit: int) -> None:
        """An entry left a queue of the expert."""
        self._queued[ghost] &= ~bit
        self._num_entries[ghost] -= 1
        if not self._num_entries[ghost] and self.parent[ghost] < 0:
            self.rows.give(ghost)

    def unmark(self, ghost: Ghost, bit: int) -> None:
        """Its entry stands in the wrong queue: it is as if it were in none, until another comes."""
        self._queued[ghost] &= ~bit

    # ---- what nobody holds -----------------------------------------------------------------------

    def settle(self, ghost: Ghost) -> None:
        """Nobody holds it any more, or it lost its last child: it may be forgotten later."""
        if (
            self._holders[ghost]
            or self._num_children[ghost]
            or ghost == ROOT
            or ghost in self._idle
        ):
            return
        self._idle.append(ghost)
        self._idle_blocks += self.length(ghost)

    def forget(self) -> None:
        """Drop what is beyond the bound, oldest first, and tell the listeners."""
        while self._idle_blocks > self._bound:
            ghost = self._idle.first
            assert ghost is not None
            self._busy(ghost)
            self._children.remove(ghost)
            above, self.parent[ghost] = self.parent[ghost], -1
            self._marks[ghost] = b""
            self._num_children[above] -= 1
            self.num_ghosts -= 1
            for listener in self.listeners:
                listener.forgotten(ghost)
            self._queued[ghost] = 0
            if not self._num_entries[ghost]:
                self.rows.give(ghost)
            self.settle(above)

    def _busy(self, ghost: Ghost) -> None:
        if ghost in self._idle:
            self._idle.remove(ghost)
            self._idle_blocks -= self.length(ghost)

    def _make(self, parent: Ghost, start: int, marks: bytes, clock: int) -> Ghost:
        """A ghost under `parent`, which has no such child yet."""
        ghost = self.rows.take()
        if ghost == len(self._marks):
            self._marks.append(b"")
        self._marks[ghost] = marks
        self.start[ghost] = start
        self.birth[ghost] = clock & 0xFFFFFFFF
        self._link(ghost, parent)
        self.num_ghosts += 1
        return ghost

    def _link(self, ghost: Ghost, parent: Ghost) -> None:
        self.parent[ghost] = parent
        self._mark[ghost] = memoryview(self._marks[ghost]).cast("I")[0]
        self._children.add(ghost)

    def _split(self, lower: Ghost, at: int, clock: int) -> Ghost:
        """Cut before block `at`; the new ghost is the upper part."""
        run, above, idle = self._marks[lower], self.parent[lower], lower in self._idle
        self._children.remove(lower)
        upper = self._make(above, self.start[lower], run[: at * _MARK], clock)
        self.before[upper], self.last[upper] = self.before[lower], self.last[lower]
        self.branches[upper] = self._num_children[upper] = 1
        self._marks[lower] = run[at * _MARK :]
        self.start[lower] += at
        self._link(lower, upper)
        if idle:
            self._idle_blocks -= at
        for listener in self.listeners:
            listener.split(upper, lower)
        self.settle(lower)
        return upper


def _common(run: bytes, marks: bytes, at: int) -> int:
    """Whole blocks that `run` and `marks[at:]` share, fewer than `run` has."""
    n = min(len(run), len(marks) - at) // _MARK
    ours = np.frombuffer(run, np.uint32, n)
    theirs = np.frombuffer(marks, np.uint32, n, at)
    differ = ours != theirs
    return int(differ.argmax()) if differ.any() else n
