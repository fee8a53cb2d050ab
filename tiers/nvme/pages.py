"""The audit of an LMDB file before LMDB opens it. Knows LMDB's pages and none of the rows in them.

LMDB trusts its file: one flipped bit in a page header, a node or a page number lets it read outside
the map or stop the process. Here the whole structure is read with plain reads (a bad sector is an
exception and not a signal) and verified, in bounded memory. What passes can be opened, read and
written without harm; what the rows say is for their checksums to judge.

Layout of LMDB 0.9 on a 64-bit host (`mdb.c`): a page begins with u64 number, u16 pad, u16 flags,
u16 lower, u16 upper; then u16 offsets of its nodes, up to `lower`; the nodes themselves fill the
page from `upper` to its end without a gap. A node is u16 low, u16 high, u16 flags, u16 key size,
key, value; low and high are the value's size, in a branch (with flags) the number of the child.
"""

import errno
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

import numpy as np
import numpy.typing as npt

from kvtier.tiers.errors import StoreCorrupt

Ints = npt.NDArray[np.int64]

_MAGIC = 0xBEEFC0DE
_VERSION = 1
_NO_PAGE = 2**64 - 1
_HEADER = 16
_NODE = 8
_MAX_DEPTH = 32
_MAX_KEY = 511
_BRANCH, _LEAF, _OVERFLOW, _META, _DIRTY, _SUBPAGE = 0x01, 0x02, 0x04, 0x08, 0x10, 0x40
_BIG, _SUB, _DUP = 0x01, 0x02, 0x04
_INTEGER_KEYS, _DUPSORT = 0x08, 0x04
_WINDOW_BYTES = 1 << 20
_SPARSE = 8
"""A window of the file is read whole unless fewer than one in so many of its pages is wanted."""

_ORDER = "<" if sys.byteorder == "little" else ">"
_META_PAGE = Struct(_ORDER + "Q2xH4xIIQQ")
_TREE = Struct(_ORDER + "IHHQQQQQ")
_END_OF_META = Struct(_ORDER + "QQ")
_PAGE_HEAD = Struct(_ORDER + "QHHI")

_FREE, _MAIN, _PLAIN, _SORTED, _DUPLICATES = range(5)
_NO_FLAGS = 8
_FLAGS_ALLOWED = np.zeros((5, _NO_FLAGS + 1), np.bool_)
_FLAGS_ALLOWED[_FREE, [0, _BIG]] = True
_FLAGS_ALLOWED[_MAIN, _SUB] = True
_FLAGS_ALLOWED[_PLAIN, [0, _BIG]] = True
_FLAGS_ALLOWED[_SORTED, [0, _DUP, _DUP | _SUB]] = True
_FLAGS_ALLOWED[_DUPLICATES, 0] = True


def audit_pages(path: Path, tables: Mapping[bytes, bool], *, map_bytes: int) -> None:
    """Verify every page of the LMDB file at `path` that LMDB may come to.

    `tables`: named databases, and whether each keeps duplicates; others are only checked in
    themselves. A file that says it needs more than `map_bytes` is refused.

    Raises `StoreCorrupt`, naming the page, if LMDB could be led astray, if the file is missing,
    empty or cut short, or if it cannot be read; `OSError` if it may not be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise StoreCorrupt(f"{path}: is missing") from error
    try:
        _Audit(fd, path, tables, map_bytes).run()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise StoreCorrupt(f"{path}: cannot be read ({error.strerror})") from error
    finally:
        os.close(fd)


@dataclass(frozen=True)
class _Tree:
    """One B-tree as its owner describes it."""

    kind: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int
    owner: int = -1


@dataclass(frozen=True)
class _Nodes:
    """Nodes of several pages, flat. `page`: index of the page; `at`: first byte in the buffer;
    `first`: by page, where its nodes begin in the other arrays."""

    first: Ints
    page: Ints
    at: Ints
    low: Ints
    flags: Ints
    key_bytes: Ints

    def where(self, chosen: npt.NDArray[np.bool_]) -> "_Nodes":
        return _Nodes(
            self.first,
            self.page[chosen],
            self.at[chosen],
            self.low[chosen],
            self.flags[chosen],
            self.key_bytes[chosen],
        )


@dataclass(frozen=True)
class _Frontier:
    """Pages of one step of the walk, in key order within a tree. `level` 1: a leaf."""

    number: Ints
    tree: Ints
    level: Ints


class _Audit:
    def __init__(self, fd: int, path: Path, tables: Mapping[bytes, bool], map_bytes: int) -> None:
        self._fd = fd
        self._path = path
        self._tables = tables
        self._map_bytes = map_bytes
        self._trees: list[_Tree] = []
        self._walked = np.zeros((4, 0), np.int64)  # branches, leaves, overflows, entries by tree
        self._free_lists: list[tuple[int, int, int, bytes]] = []

    def run(self) -> None:
        self._read_metas()
        self._seen = np.zeros(self._last_page + 1, np.bool_)
        self._window = bytearray(_WINDOW_BYTES)
        marks = np.random.default_rng(0).integers(2**62, size=self._page_bytes // 2 + 1)
        self._marks: Ints = marks
        for tree in range(2):  # the list of free pages first, by itself: its order matters
            frontier = self._roots([tree])
            while len(frontier.number):
                frontier = self._descend(frontier)
        self._check_claims()
        self._check_free_lists()

    def _refuse(self, page: int, reason: str) -> StoreCorrupt:
        return StoreCorrupt(f"{self._path}: page {page} {reason}")

    def _refuse_any(self, bad: npt.NDArray[np.bool_], numbers: Ints, reason: str) -> None:
        if bad.any():
            raise self._refuse(int(numbers[int(np.argmax(bad))]), reason)

    def _read_metas(self) -> None:
        size = os.fstat(self._fd).st_size
        first = self._read_meta(0, 0)
        psize = first[0]
        if psize & (psize - 1) or not 512 <= psize <= 32768:
            raise self._refuse(0, f"says that pages have {psize} bytes")
        self._page_bytes = psize
        second = self._read_meta(1, psize)
        if second[0] != psize:
            raise self._refuse(1, f"says that pages have {second[0]} bytes, page 0 says {psize}")
        if (first[1], second[1]) != (0, 0) and abs(first[1] - second[1]) != 1:
            raise self._refuse(0, "and page 1 are not of neighbouring transactions")
        if first[1] % 2 or (second[1] and second[1] % 2 == 0):
            raise self._refuse(0, "and page 1 have each other's transactions")
        _, self._transaction, free, main, self._last_page = max(first, second, key=lambda m: m[1])
        self._file_pages = size // psize
        if not 1 <= self._last_page < max(self._map_bytes // psize, 2):
            raise self._refuse(0, f"says that page {self._last_page} is the last")
        if free.flags != _INTEGER_KEYS or main.flags:
            raise self._refuse(0, "has flags that no store has")
        self._add(free)
        self._add(main)

    def _read_meta(self, number: int, offset: int) -> tuple[int, int, _Tree, _Tree, int]:
        raw = os.pread(self._fd, 512, offset)
        end = _HEADER + 24 + 2 * _TREE.size
        if len(raw) < end + _END_OF_META.size:
            raise self._refuse(number, "is cut short")
        found, flags, magic, version, _, _ = _META_PAGE.unpack_from(raw)
        if (found, flags, magic) != (number, _META, _MAGIC):
            raise self._refuse(number, "is no meta page")
        if version != _VERSION:
            raise self._refuse(number, f"is of LMDB's data version {version}, not {_VERSION}")
        (psize,) = Struct(_ORDER + "I").unpack_from(raw, _HEADER + 24)
        free = self._tree(_FREE, raw[_HEADER + 24 :])
        main = self._tree(_MAIN, raw[_HEADER + 24 + _TREE.size :])
        last_page, transaction = _END_OF_META.unpack_from(raw, end)
        return psize, transaction, free, main, last_page

    def _tree(self, kind: int, raw: bytes, owner: int = -1) -> _Tree:
        _, flags, depth, branches, leaves, overflows, entries, root = _TREE.unpack_from(raw)
        return _Tree(kind, flags, depth, branches, leaves, overflows, entries, root, owner)

    def _add(self, tree: _Tree) -> int:
        """Take in a tree that some page describes; returns its index."""
        self._trees.append(tree)
        return len(self._trees) - 1

    def _roots(self, trees: list[int]) -> _Frontier:
        """Where the walk of these trees begins."""
        rows: list[tuple[int, int, int]] = []
        for index in trees:
            tree = self._trees[index]
            if tree.root == _NO_PAGE:
                claims = (tree.depth, tree.branches, tree.leaves, tree.overflows, tree.entries)
                if any(claims):
                    raise self._refuse(0, "leads to an empty tree that says it is not")
                continue
            if not 1 <= tree.depth <= _MAX_DEPTH or not 2 <= tree.root <= self._last_page:
                raise self._refuse(
                    0, f"leads to a tree of depth {tree.depth} with its root at page {tree.root}"
                )
            rows.append((tree.root, index, tree.depth))
        if len(self._trees) > self._walked.shape[1]:
            grown = np.zeros((4, 2 * len(self._trees)), np.int64)
            grown[:, : self._walked.shape[1]] = self._walked
            self._walked = grown
        columns = np.array(rows, np.int64).reshape(-1, 3)
        return _Frontier(columns[:, 0], columns[:, 1], columns[:, 2])

    def _mark(self, numbers: Ints) -> None:
        """Note that the walk comes to these pages: for the first time, and inside the file."""
        last = min(self._last_page, self._file_pages - 1)
        self._refuse_any((numbers < 2) | (numbers > last), numbers, "is wanted and not in the file")
        ordered = np.sort(numbers)
        twice = self._seen[ordered]
        twice[1:] |= ordered[1:] == ordered[:-1]
        self._refuse_any(twice, ordered, "belongs to two")
        self._seen[ordered] = True

    def _descend(self, frontier: _Frontier) -> _Frontier:
        """Check the frontier's pages; returns the pages they lead to."""
        self._mark(frontier.number)
        found: list[tuple[Ints, Ints]] = []
        fresh = len(self._trees)
        by_number = np.argsort(frontier.number, kind="stable")
        per_window = _WINDOW_BYTES // self._page_bytes
        windows = frontier.number[by_number] // per_window
        cuts = np.flatnonzero(np.diff(windows)) + 1
        for chosen in np.split(by_number, cuts):
            found.append(self._check_window(frontier, chosen))
        roots = self._roots(list(range(fresh, len(self._trees))))
        child = np.concatenate([children for children, _ in found])
        parent = np.concatenate([parents for _, parents in found])
        order = np.argsort(parent, kind="stable")
        child, parent = child[order], parent[order]
        return _Frontier(
            np.concatenate([child, roots.number]),
            np.concatenate([frontier.tree[parent], roots.tree]),
            np.concatenate([frontier.level[parent] - 1, roots.level]),
        )

    def _read_window(self, numbers: Ints) -> Ints:
        """Read ascending pages into the window; returns where each begins in it."""
        size = self._page_bytes
        first, span = int(numbers[0]), int(numbers[-1] - numbers[0]) + 1
        view = memoryview(self._window)
        if span <= _SPARSE * len(numbers):
            self._read(view[: span * size], first)
            return (numbers - first) * size
        for position, number in enumerate(numbers):
            self._read(view[position * size : (position + 1) * size], int(number))
        return np.arange(len(numbers)) * size

    def _read(self, into: memoryview, number: int) -> None:
        if os.preadv(self._fd, [into], number * self._page_bytes) != len(into):
            raise self._refuse(number, "or one behind it is cut short")

    def _check_window(self, frontier: _Frontier, chosen: Ints) -> tuple[Ints, Ints]:
        """Check pages that stand near each other; returns children, and whose each is."""
        numbers, trees, levels = (
            frontier.number[chosen],
            frontier.tree[chosen],
            frontier.level[chosen],
        )
        starts = self._read_window(numbers)
        words = np.frombuffer(self._window, np.uint16)
        heads = np.frombuffer(self._window, np.uint64)
        branch = levels > 1
        flags = np.where(branch, _BRANCH, _LEAF)
        wrong = (heads[starts >> 3] != numbers.astype(np.uint64)) | (
            words[(starts >> 1) + 5] != flags
        )
        self._refuse_any(wrong, numbers, "is not what the page that leads to it says")
        np.add.at(self._walked[0], trees[branch], 1)
        np.add.at(self._walked[1], trees[~branch], 1)
        # Only the list of free pages may be caught with a branch of one child.
        least = np.where(branch & (trees != 0), 2, 1)
        spans = np.full(len(numbers), self._page_bytes)
        nodes = self._nodes(words, starts, spans, least, numbers)
        kinds = np.array([tree.kind for tree in self._trees])[trees]
        values = np.where(nodes.flags == _BIG, 8, nodes.low)
        inside = branch[nodes.page]
        values[inside] = 0
        sizes = _NODE + nodes.key_bytes + values
        self._check_tiling(words, starts, spans, nodes, sizes, numbers)
        inner = nodes.where(inside)
        leaves = nodes.where(~inside) if len(inner.at) else nodes
        self._check_leaves(leaves, chosen, numbers, trees, kinds)
        return inner.low | inner.flags << 32, chosen[inner.page]

    def _nodes(
        self,
        words: npt.NDArray[np.uint16],
        starts: Ints,
        spans: Ints,
        least: Ints,
        numbers: Ints,
    ) -> _Nodes:
        """The nodes of pages (or of pages within pages), their headers inside."""
        lower = words[(starts >> 1) + 6].astype(np.int64)
        upper = words[(starts >> 1) + 7].astype(np.int64)
        bad = (lower | upper) & 1 != 0
        bad |= (lower < _HEADER + 2 * least) | (lower > upper) | (upper > spans)
        self._refuse_any(bad, numbers, "has bounds that no page has")
        counts = (lower - _HEADER) >> 1
        page = np.repeat(np.arange(len(starts)), counts)
        first = np.cumsum(counts) - counts
        index = np.arange(len(page)) - first[page]
        offset = words[(starts >> 1)[page] + _HEADER // 2 + index].astype(np.int64)
        bad = (offset & 1 != 0) | (offset < upper[page]) | (offset + _NODE > spans[page])
        self._refuse_any(bad, numbers[page], "has an entry outside itself")
        at = starts[page] + offset
        word = at >> 1
        low = words[word].astype(np.int64) | words[word + 1].astype(np.int64) << 16
        flags = words[word + 2].astype(np.int64)
        return _Nodes(first, page, at, low, flags, words[word + 3].astype(np.int64))

    def _check_tiling(
        self,
        words: npt.NDArray[np.uint16],
        starts: Ints,
        spans: Ints,
        nodes: _Nodes,
        sizes: Ints,
        numbers: Ints,
    ) -> None:
        """The nodes fill their page from `upper` to its end: none overlaps, none sticks out.

        Just then the offsets where nodes begin, and the page's end, are the same as `upper` and
        those where nodes end. Two lists are the same if the sums of their marks are.
        """
        begin = nodes.at - starts[nodes.page]
        end = begin + ((sizes + 1) & ~1)
        self._refuse_any(end > spans[nodes.page], numbers[nodes.page], "has an entry too long")
        marks = self._marks
        sums = np.add.reduceat(marks[begin >> 1] - marks[end >> 1], nodes.first)
        sums += marks[spans >> 1] - marks[words[(starts >> 1) + 7] >> 1]
        self._refuse_any(sums != 0, numbers, "has entries that overlap or leave gaps")

    def _check_leaves(
        self, nodes: _Nodes, chosen: Ints, numbers: Ints, trees: Ints, kinds: Ints
    ) -> None:
        kind = kinds[nodes.page]
        strange = ~_FLAGS_ALLOWED[kind, np.minimum(nodes.flags, _NO_FLAGS)]
        strange |= (nodes.key_bytes == 0) | (nodes.key_bytes > _MAX_KEY)
        self._refuse_any(strange, numbers[nodes.page], "has an entry of no kind its table has")
        counts = np.bincount(nodes.page, minlength=len(trees))
        np.add.at(self._walked[3], trees, counts)
        free = nodes.where(kind == _FREE)
        special = nodes.where((nodes.flags != 0) | (kind == _DUPLICATES))
        strange = (special.flags & _SUB != 0) & (special.low != _TREE.size)
        strange |= (special.flags == 0) & (special.low != 0)
        self._refuse_any(strange, numbers[special.page], "has an entry of the wrong size")
        self._refuse_any(free.key_bytes != 8, numbers[free.page], "has a key of the wrong size")
        self._check_big(special.where(special.flags == _BIG), numbers, trees)
        self._check_subpages(special.where(special.flags == _DUP), numbers, trees)
        for i in np.flatnonzero(special.flags & _SUB).tolist():
            key, raw = self._key_and_value(special, i)
            page = special.page[i]
            self._take_tree(key, raw, int(numbers[page]), int(trees[page]))
        for i in range(len(free.at)):
            key, raw = self._key_and_value(free, i)
            if free.flags[i] == _BIG:
                first = int.from_bytes(raw[:8], sys.byteorder)
                offset = first * self._page_bytes + _HEADER
                raw = os.pread(self._fd, int(free.low[i]), offset)
            number = int(numbers[free.page[i]])
            row = (int(chosen[free.page[i]]), int.from_bytes(key, sys.byteorder), number, raw)
            self._free_lists.append(row)

    def _key_and_value(self, nodes: _Nodes, i: int) -> tuple[bytes, bytes]:
        """A node's key, and its value (of a big one: the page that holds it)."""
        start = int(nodes.at[i]) + _NODE
        end = start + int(nodes.key_bytes[i])
        size = 8 if nodes.flags[i] == _BIG else int(nodes.low[i])
        return bytes(self._window[start:end]), bytes(self._window[end : end + size])

    def _check_big(self, big: _Nodes, numbers: Ints, trees: Ints) -> None:
        """Values too big for a page: in pages of their own, which say how many they are."""
        if not len(big.at):
            return
        window = np.frombuffer(self._window, np.uint8)
        where = big.at + _NODE + big.key_bytes
        raw = window[where[:, None] + np.arange(8)]
        firsts = raw.view(np.uint64).reshape(-1)
        needed = (_HEADER - 1 + big.low) // self._page_bytes + 1
        outside = (firsts > self._last_page) | (needed > self._last_page)
        self._refuse_any(outside, numbers[big.page], "leads outside the file")
        first = firsts.astype(np.int64)
        index = np.repeat(np.arange(len(first)), needed)
        step = np.arange(len(index)) - np.repeat(np.cumsum(needed) - needed, needed)
        self._mark(first[index] + step)
        np.add.at(self._walked[2], trees[big.page], needed)
        for number, count in zip(first.tolist(), needed.tolist(), strict=True):
            head = os.pread(self._fd, _HEADER, number * self._page_bytes)
            found, _, flags, pages = _PAGE_HEAD.unpack(head)
            if (found, flags, pages) != (number, _OVERFLOW, count):
                raise self._refuse(number, "does not hold the long value it should")

    def _check_subpages(self, nodes: _Nodes, numbers: Ints, trees: Ints) -> None:
        """Duplicates of one key that fit beside it: a small page in the node's value."""
        if not len(nodes.at):
            return
        own = numbers[nodes.page]
        starts = nodes.at + _NODE + nodes.key_bytes
        self._refuse_any((starts | nodes.low) & 1 != 0, own, "has a page within it at an odd place")
        self._refuse_any(nodes.low < _HEADER, own, "has a page within it without a header")
        words = np.frombuffer(self._window, np.uint16)
        flags = words[(starts >> 1) + 5] & np.uint16(~_DIRTY & 0xFFFF)
        self._refuse_any(flags != _LEAF | _SUBPAGE, own, "has a page within it of the wrong kind")
        inner = self._nodes(words, starts, nodes.low, np.ones(len(starts), np.int64), own)
        strange = (inner.flags != 0) | (inner.low != 0) | (inner.key_bytes > _MAX_KEY)
        self._refuse_any(strange, own[inner.page], "has a page within it with a strange entry")
        self._check_tiling(words, starts, nodes.low, inner, _NODE + inner.key_bytes, own)
        np.add.at(self._walked[3], trees[nodes.page[inner.page]], 1)
        np.subtract.at(self._walked[3], trees[nodes.page], 1)  # counted as one entry already

    def _take_tree(self, key: bytes, raw: bytes, number: int, owner: int) -> None:
        """A table in the main tree, or the duplicates of one key where they are many."""
        if self._trees[owner].kind == _SORTED:
            tree = self._tree(_DUPLICATES, raw, owner)
            self._walked[3, owner] += tree.entries - 1  # counted as one already
            good = tree.flags == 0 and tree.root != _NO_PAGE
        else:
            tree = self._tree(_PLAIN, raw)
            good = tree.flags in (0, _DUPSORT)
            if key in self._tables:
                good = tree.flags == (_DUPSORT if self._tables[key] else 0)
            if tree.flags:
                tree = self._tree(_SORTED, raw)
        if not good or tree.entries > self._map_bytes:
            raise self._refuse(number, f"describes a table {key!r} that no store has")
        self._add(tree)

    def _check_claims(self) -> None:
        """Every tree has as many pages and entries as its owner says."""
        below = np.zeros_like(self._walked)
        for index, tree in enumerate(self._trees):
            if tree.owner >= 0:
                below[:, tree.owner] += self._walked[:, index]
        for index, tree in enumerate(self._trees):
            branches, leaves, overflows, entries = self._walked[:, index].tolist()
            # Older LMDBs do not count the pages of duplicates' trees to the table, newer ones do.
            most_branches, most_leaves = (below[:2, index] + (branches, leaves)).tolist()
            if (
                not branches <= tree.branches <= most_branches
                or not leaves <= tree.leaves <= most_leaves
                or (overflows, entries) != (tree.overflows, tree.entries)
            ):
                raise self._refuse(0, f"leads to tree {index}, which says it is of another size")

    def _check_free_lists(self) -> None:
        """Free pages are listed once, in order, and belong to nothing else."""
        free = np.zeros_like(self._seen)
        before = 0
        for _, transaction, number, raw in sorted(self._free_lists, key=lambda row: row[0]):
            pages = np.frombuffer(raw[: len(raw) // 8 * 8], np.uint64)
            if not before < transaction <= self._transaction:
                raise self._refuse(number, "lists free pages out of order")
            before = transaction
            if len(raw) % 8 or not len(pages) or int(pages[0]) != len(pages) - 1:
                raise self._refuse(number, "lists free pages and miscounts them")
            pages = pages[1:]
            if not len(pages):
                continue
            if pages.max() > self._last_page or pages.min() < 2 or (pages[1:] >= pages[:-1]).any():
                raise self._refuse(number, "lists free pages that are none, or not in order")
            listed = pages.astype(np.int64)
            if (free[listed] | self._seen[listed]).any():
                raise self._refuse(number, "lists free pages that are in use")
            free[listed] = True
        if not free[self._file_pages :].all():
            raise self._refuse(self._file_pages, "is the first that is missing: the file is short")
