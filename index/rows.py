"""Many small records as rows of integer arrays, and two structures that live in such arrays.

A record is a row number; its fields are the entries of columns, a few bytes each where an object
and its boxed integers would be some hundreds. Row 0 is never handed out. Knows nothing of what the
rows stand for.
"""

from array import array
from collections.abc import Iterator

import numpy as np

_LEAST = 64
_ODD = 40503
_ABSENT, _END = 0, -1


class Rows:
    """Rows to take and to give back. All columns grow together, in place.

    A row that was given back keeps what its columns hold: clear what has to be clear.
    """

    def __init__(self) -> None:
        self._columns: list[array[int] | array[float]] = []
        self._size = 0
        self._unused = 1
        self._given: list[int] = []
        self._grow(_LEAST)

    def __len__(self) -> int:
        """How many there are now, row 0 and rows not handed out among them."""
        return self._size

    def integers(self, code: str) -> "array[int]":
        """A new column, 0 everywhere. `code` is that of an integer type of `array`."""
        column = array(code, bytes(self._size * array(code).itemsize))
        self._columns.append(column)
        return column

    def floats(self) -> "array[float]":
        """A new column of 64 bit floats, 0 everywhere."""
        column = array("d", bytes(8 * self._size))
        self._columns.append(column)
        return column

    def take(self) -> int:
        """A row nobody has."""
        if self._given:
            return self._given.pop()
        if self._unused == self._size:
            self._grow(_LEAST)
        row, self._unused = self._unused, self._unused + 1
        return row

    def give(self, row: int) -> None:
        """Undo `take`."""
        self._given.append(row)

    def _grow(self, n: int) -> None:
        """A few more: an array keeps a sixteenth in reserve, so it seldom moves."""
        for column in self._columns:
            column.frombytes(bytes(n * column.itemsize))
        self._size += n


class Order:
    """Rows, the first one put in first: a doubly linked list in two columns."""

    def __init__(self, rows: Rows) -> None:
        self._next = rows.integers("i")
        self._previous = rows.integers("i")
        self._first = self._last = _END

    def __contains__(self, row: int) -> bool:
        return self._next[row] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        row = self._first
        while row != _END:
            yield row
            row = self._next[row]

    @property
    def first(self) -> int | None:
        """The row that was put in before all others."""
        return None if self._first == _END else self._first

    def append(self, row: int) -> None:
        """Put in a row that is not in it."""
        self._next[row], self._previous[row] = _END, self._last
        if self._last == _END:
            self._first = row
        else:
            self._next[self._last] = row
        self._last = row

    def remove(self, row: int) -> None:
        """Take out a row that is in it."""
        after, before = self._next[row], self._previous[row]
        if before == _END:
            self._first = after
        else:
            self._next[before] = after
        if after == _END:
            self._last = before
        else:
            self._previous[after] = before
        self._next[row] = _ABSENT


class Children:
    """Rows by parent row and mark: a hash table whose chains are a column.

    `parents` and `marks` are columns of `rows`; a row's entries must not change while it is in.
    """

    def __init__(self, rows: Rows, parents: "array[int]", marks: "array[int]") -> None:
        self._parents = parents
        self._marks = marks
        self._chain = rows.integers("i")
        self._heads = array("i", bytes(4 * _LEAST))
        self._mask = _LEAST - 1
        self._num = 0

    def get(self, parent: int, mark: int) -> int:
        """The child, or 0."""
        row = self._heads[(parent * _ODD ^ mark) & self._mask]
        while row > 0:
            if self._marks[row] == mark and self._parents[row] == parent:
                return row
            row = self._chain[row]
        return 0

    def add(self, row: int) -> None:
        """Put in a row whose parent has no child of its mark yet."""
        if self._num == len(self._heads):
            self._double()
        bucket = self._bucket(row)
        self._chain[row] = self._heads[bucket] or _END
        self._heads[bucket] = row
        self._num += 1

    def remove(self, row: int) -> None:
        """Take out a row that is in."""
        chain, bucket = self._chain, self._bucket(row)
        at = self._heads[bucket]
        if at == row:
            self._heads[bucket] = chain[row]
        else:
            while chain[at] != row:
                at = chain[at]
            chain[at] = chain[row]
        chain[row] = _ABSENT
        self._num -= 1

    def _bucket(self, row: int) -> int:
        return (self._parents[row] * _ODD ^ self._marks[row]) & self._mask

    def _double(self) -> None:
        """Twice as many heads. In numpy: a request waits for it."""
        self._heads = array("i", bytes(8 * len(self._heads)))
        self._mask = len(self._heads) - 1
        heads, chain = np.frombuffer(self._heads, np.int32), np.frombuffer(self._chain, np.int32)
        rows = np.flatnonzero(chain != _ABSENT).astype(np.int32)
        parents = np.frombuffer(self._parents, np.int32)[rows].astype(np.uint64)
        marks = np.frombuffer(self._marks, np.uint32)[rows]
        buckets = (parents * np.uint64(_ODD) ^ marks) & np.uint64(self._mask)
        order = np.argsort(buckets)
        rows, buckets = rows[order], buckets[order]
        last = np.append(buckets[1:] != buckets[:-1], True)  # of its chain
        chain[rows] = np.where(last, _END, np.roll(rows, -1))
        first = np.roll(last, 1)
        heads[buckets[first]] = rows[first]
