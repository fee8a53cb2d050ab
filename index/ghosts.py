"""What was asked for lately, without its bytes: a tree of block fingerprints under several experts.

An *expert* is an eviction rule that runs on metadata alone: it keeps the set of blocks that a tier
of its capacity would hold now. All experts of a policy share this tree, so that a request costs one
walk. A fingerprint is 32 bits of a hash of a block's token ids; two blocks that collide are counted
as one, which can cost a hit and nothing else. Knows no live block, no residency and no tokens.

A node is a run of blocks that were asked for first by one request; it is cut where a later path
leaves it. Nodes that no expert holds are kept, oldest first to go, up to a bound: their counts are
what lets a rule tell a block that returns from one that is new.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from kvtier.index.words import Tokens

L = TypeVar("L")

_MARK = 4
_ODD = 0x9E3779B97F4A7C15


def fingerprints(namespace: bytes, tokens: Tokens, block_size: int) -> bytes:
    """Four bytes for each whole block of `tokens`: equal blocks of a namespace have equal ones."""
    n = len(tokens) // block_size
    ids = tokens[: n * block_size].reshape(n, block_size).astype(np.uint64)
    factors = np.arange(1, 2 * block_size, 2, dtype=np.uint64) * np.uint64(_ODD)
    seed = np.uint64(int.from_bytes(namespace[:8].ljust(8, b"\0"), "little"))
    mixed = ((ids + np.uint64(1)) * factors).sum(axis=1, dtype=np.uint64) ^ seed
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(_ODD)
    return bytes((mixed >> np.uint64(32)).astype(np.uint32))


class Ghost(Generic[L]):
    """A run of blocks. Per expert: how many leading ones it holds (`held`), and how many children
    lead to held ones (`twigs`). `live` is whatever the policy ties to it."""

    __slots__ = (
        "before",
        "branches",
        "children",
        "counts",
        "held",
        "last",
        "live",
        "marks",
        "num_holders",
        "parent",
        "ranks",
        "start",
        "twigs",
    )

    def __init__(self, parent: "Ghost[L] | None", start: int, marks: bytes, experts: int) -> None:
        self.parent = parent
        self.start = start
        self.marks = marks
        self.children: dict[bytes, Ghost[L]] = {}
        self.held = [0] * experts
        self.twigs = [0] * experts
        self.counts = [0] * experts
        self.ranks = [0.0] * experts
        self.num_holders = 0
        self.branches = 0
        self.before = 0
        self.last = 0
        self.live: L | None = None

    def __len__(self) -> int:
        return len(self.marks) // _MARK

    @property
    def end(self) -> int:
        return self.start + len(self.marks) // _MARK

    def depth_held(self, expert: int) -> int:
        """How many blocks from the root on this path the expert holds."""
        node: Ghost[L] | None = self
        while node is not None:
            if node.held[expert]:
                return node.start + node.held[expert]
            node = node.parent
        return 0


class GhostTree(Generic[L]):
    """All nodes. `bound` is how many blocks that nobody holds are remembered."""

    def __init__(self, experts: int, bound: int) -> None:
        self.root: Ghost[L] = Ghost(None, 0, b"", experts)
        self.on_split: Callable[[Ghost[L], Ghost[L]], None] = lambda upper, lower: None
        self.num_nodes = 0
        self._experts = experts
        self._bound = bound
        self._idle: OrderedDict[Ghost[L], None] = OrderedDict()
        self._idle_blocks = 0

    def path(self, marks: bytes, clock: int) -> tuple[list[Ghost[L]], int]:
        """The nodes that hold exactly these blocks, root first, made where they are missing, all
        used at `clock`; and how many blocks were known."""
        node, at, path = self.root, 0, []
        while at < len(marks):
            child = node.children.get(marks[at : at + _MARK])
            if child is None:
                break
            if not marks.startswith(child.marks, at):
                child = self._split(child, _common(child.marks, marks, at))
            path.append(child)
            child.before, child.last = child.last, clock
            if child in self._idle:
                self._idle.move_to_end(child)
            at += len(child.marks)
            node = child
        known = at // _MARK
        if at < len(marks):
            fresh: Ghost[L] = Ghost(node, known, marks[at:], self._experts)
            fresh.before = fresh.last = clock
            node.children[marks[at : at + _MARK]] = fresh
            node.branches += 1
            self._busy(node)
            self.num_nodes += 1
            self.settle(fresh)
            path.append(fresh)
        return path, known

    def find(self, start: "Ghost[L]", marks: bytes) -> "tuple[Ghost[L], Sequence[Ghost[L]]]":
        """Follow `marks` down from the end of `start`: the last node entered, and all of them."""
        node, at, found = start, 0, []
        while at < len(marks):
            child = node.children.get(marks[at : at + _MARK])
            if child is None:
                break
            found.append(child)
            node = child
            if not marks.startswith(child.marks, at):
                break
            at += len(child.marks)
        return node, found

    def settle(self, node: "Ghost[L]") -> None:
        """Nobody holds the node any more, or it lost its last child: it may be forgotten later."""
        if node.num_holders or node.children or node.parent is None or node in self._idle:
            return
        self._idle[node] = None
        self._idle_blocks += len(node)

    def revive(self, node: "Ghost[L]") -> None:
        """Somebody holds the node."""
        self._busy(node)

    def forget(self) -> Iterator["Ghost[L]"]:
        """Drop what is beyond the bound, oldest first, and tell what is dropped."""
        while self._idle_blocks > self._bound:
            node, _ = self._idle.popitem(last=False)
            self._idle_blocks -= len(node)
            parent = node.parent
            assert parent is not None
            del parent.children[node.marks[:_MARK]]
            node.parent = None
            self.num_nodes -= 1
            yield node
            self.settle(parent)

    def _busy(self, node: "Ghost[L]") -> None:
        if node in self._idle:
            del self._idle[node]
            self._idle_blocks -= len(node)

    def _split(self, lower: "Ghost[L]", at: int) -> "Ghost[L]":
        """Cut before block `at`; the new node is the upper part."""
        above = lower.parent
        assert above is not None
        idle = lower in self._idle
        cut = at * _MARK
        upper: Ghost[L] = Ghost(above, lower.start, lower.marks[:cut], self._experts)
        upper.before, upper.last = lower.before, lower.last
        upper.counts = list(lower.counts)
        upper.ranks = list(lower.ranks)
        upper.branches = 1
        upper.live = lower.live
        lower.marks = lower.marks[cut:]
        lower.start += at
        lower.parent = upper
        above.children[upper.marks[:_MARK]] = upper
        upper.children[lower.marks[:_MARK]] = lower
        for expert in range(self._experts):
            held = lower.held[expert]
            upper.held[expert] = min(held, at)
            lower.held[expert] = max(0, held - at)
            upper.twigs[expert] = 1 if lower.held[expert] or lower.twigs[expert] else 0
            if held:
                upper.num_holders += 1
                lower.num_holders -= not lower.held[expert]
        self.num_nodes += 1
        if idle:
            self._idle_blocks -= at
        else:
            self.settle(lower)
        self.on_split(upper, lower)
        return upper


def _common(run: bytes, marks: bytes, at: int) -> int:
    """Whole blocks that `run` and `marks[at:]` share, fewer than `run` has."""
    n = min(len(run), len(marks) - at) // _MARK
    ours = np.frombuffer(run, np.uint32, n)
    theirs = np.frombuffer(marks, np.uint32, n, at)
    differ = ours != theirs
    return int(differ.argmax()) if differ.any() else n
