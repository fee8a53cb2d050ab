"""A disk as a power cut sees it: what is durable, what was asked since, what may be left of both.

Knows names, pages and order; no store. A *place* is an inode: its sync makes the changes to it
durable, and until then each of them may have happened or not, in any order, writes also in part.
Strict: nothing is durable because something else is.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

from kvtier.tiers.nvme.record import PAGE

ROOT = 0
"""The inode of the directory in which the store stands."""

_ZEROS = bytes(PAGE)
_EXHAUSTIVE = 4
"""So many pending changes or fewer: every subset of them is a state."""

_REORDERED = 3
"""Of more: every subset of the last ones."""


@dataclass
class Content:
    """A file: bytes up to `size`; the pages that take space on the disk."""

    size: int = 0
    pages: dict[int, bytes] = field(default_factory=dict)


@dataclass
class Disk:
    """Names by directory, files by inode."""

    names: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, Content] = field(default_factory=dict)

    def copy(self) -> "Disk":
        names = {inode: dict(entries) for inode, entries in self.names.items()}
        files = {i: Content(file.size, dict(file.pages)) for i, file in self.files.items()}
        return Disk(names, files)

    def find(self, parts: Sequence[str]) -> int | None:
        """The inode of a path below the root."""
        inode = ROOT
        for part in parts:
            entries = self.names.get(inode, {})
            if part not in entries:
                return None
            inode = entries[part]
        return inode

    def image(self) -> "Image":
        """Everything that has a name."""
        directories: list[str] = []
        files: list[tuple[str, int, tuple[tuple[int, bytes], ...]]] = []
        rest = [("", ROOT)]
        while rest:
            path, inode = rest.pop()
            for name, child in sorted(self.names[inode].items()):
                below = f"{path}/{name}" if path else name
                if child in self.names:
                    directories.append(below)
                    rest.append((below, child))
                else:
                    file = self.files[child]
                    files.append((below, file.size, tuple(sorted(file.pages.items()))))
        return Image(tuple(directories), tuple(files))


@dataclass(frozen=True)
class Image:
    """A disk as it can be compared and written out."""

    directories: tuple[str, ...]
    files: tuple[tuple[str, int, tuple[tuple[int, bytes], ...]], ...]

    def write(self, root: Path) -> None:
        """Make the directory `root`. Allocated pages take space there too, zeros or not."""
        root.mkdir()
        for directory in self.directories:
            (root / directory).mkdir()
        for path, size, pages in self.files:
            fd = os.open(root / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                for first, run in _runs(pages):
                    os.pwrite(fd, run, first * PAGE)
                os.ftruncate(fd, size)
            finally:
                os.close(fd)


def _runs(pages: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    first, run = 0, list[bytes]()
    for page, data in pages:
        if run and page != first + len(run):
            yield first, b"".join(run)
            run = []
        first = first if run else page
        run.append(data)
    if run:
        yield first, b"".join(run)


@dataclass(frozen=True)
class Link:
    """A new file or directory gets a name."""

    place: int
    name: str
    inode: int
    directory: bool = False

    def create(self, disk: Disk) -> None:
        """The file is there, empty and without a name."""
        if self.directory:
            disk.names[self.inode] = {}
        else:
            disk.files[self.inode] = Content()

    def apply(self, disk: Disk) -> None:
        disk.names[self.place][self.name] = self.inode


@dataclass(frozen=True)
class Unlink:
    place: int
    name: str

    def apply(self, disk: Disk) -> None:
        disk.names[self.place].pop(self.name, None)


@dataclass(frozen=True)
class Rename:
    """Within one directory; atomic."""

    place: int
    old: str
    new: str

    def apply(self, disk: Disk) -> None:
        entries = disk.names[self.place]
        if self.old in entries:
            entries[self.new] = entries.pop(self.old)


@dataclass(frozen=True)
class Write:
    place: int
    first: int
    pages: tuple[bytes, ...]

    def apply(self, disk: Disk) -> None:
        file = disk.files[self.place]
        file.pages.update(enumerate(self.pages, self.first))
        file.size = max(file.size, (self.first + len(self.pages)) * PAGE)


@dataclass(frozen=True)
class Allocate:
    place: int
    first: int
    count: int

    def apply(self, disk: Disk) -> None:
        file = disk.files[self.place]
        for page in range(self.first, self.first + self.count):
            file.pages.setdefault(page, _ZEROS)
        file.size = max(file.size, (self.first + self.count) * PAGE)


@dataclass(frozen=True)
class Punch:
    place: int
    first: int
    count: int

    def apply(self, disk: Disk) -> None:
        pages = disk.files[self.place].pages
        for page in range(self.first, self.first + self.count):
            pages.pop(page, None)


@dataclass(frozen=True)
class Truncate:
    place: int
    size: int

    def apply(self, disk: Disk) -> None:
        file = disk.files[self.place]
        file.pages = {at: page for at, page in file.pages.items() if at * PAGE < self.size}
        file.size = min(file.size, self.size)


@dataclass(frozen=True)
class Sync:
    """Everything asked of `place` so far is durable. `site`: who called."""

    place: int
    site: str


@dataclass(frozen=True)
class Store:
    """A whole file is replaced, atomically and durably: an LMDB commit."""

    place: int
    pages: tuple[bytes, ...]

    def apply(self, disk: Disk) -> None:
        disk.files[self.place] = Content(len(self.pages) * PAGE, dict(enumerate(self.pages)))


@dataclass(frozen=True)
class Rot:
    """The drive lost a bit of what it had stored."""

    place: int
    offset: int

    def apply(self, disk: Disk) -> None:
        pages = disk.files[self.place].pages
        page = bytearray(pages[self.offset // PAGE])
        page[self.offset % PAGE] ^= 1
        pages[self.offset // PAGE] = bytes(page)


@dataclass(frozen=True)
class Loss:
    """The drive lost a name for good."""

    place: int
    name: str

    def apply(self, disk: Disk) -> None:
        disk.names[self.place].pop(self.name, None)


@dataclass(frozen=True)
class Mark:
    """The store told its user something: `keys` have landed."""

    keys: frozenset[bytes]


Change = Link | Unlink | Rename | Write | Allocate | Punch | Truncate
"""What is pending until its place is synced."""

Event = Change | Sync | Store | Rot | Loss | Mark
_AT_ONCE = (Store, Rot, Loss)
_NAMES = (Link, Unlink, Rename)


@dataclass
class Model:
    """What is durable, and what was asked of the disk since."""

    durable: Disk = field(default_factory=Disk)
    pending: list[Change] = field(default_factory=list)

    def copy(self) -> "Model":
        return Model(self.durable.copy(), list(self.pending))

    def happen(self, event: Event) -> None:
        """The next event of a history."""
        if isinstance(event, Link):
            event.create(self.durable)
        if isinstance(event, _AT_ONCE):
            event.apply(self.durable)
        elif isinstance(event, Sync):
            for operation in self.pending:
                if operation.place == event.place:
                    operation.apply(self.durable)
            self.pending = [op for op in self.pending if op.place != event.place]
        elif not isinstance(event, Mark):
            self.pending.append(event)

    def whole(self) -> Disk:
        """The disk if everything pending has happened: what a killed process leaves."""
        return _applied(self.durable, self.pending)

    def cuts(self) -> Iterator[tuple[str, Disk]]:
        """`(what happened, the disk)` for every bounded fate of what is pending; not all differ."""
        for told, operations in _fates(self.pending):
            yield told, _applied(self.durable, operations)


def _applied(disk: Disk, operations: Sequence[Change]) -> Disk:
    disk = disk.copy()
    for operation in operations:
        operation.apply(disk)
    return disk


def _fates(pending: Sequence[Change]) -> Iterator[tuple[str, list[Change]]]:
    count = len(pending)
    everything = range(count)
    yield "all kept", list(pending)
    if count:
        yield "all dropped", []
    recent = everything if count <= _EXHAUSTIVE else everything[-_REORDERED:]
    lost = set(combinations(everything, 1))
    for size in range(2, len(recent) + 1):
        lost.update(combinations(recent, size))
    if count > _EXHAUSTIVE:
        lost |= {tuple(i for i in everything if i != kept) for kept in everything}
        lost |= {tuple(range(start, count)) for start in range(1, count)}
        names = tuple(i for i in everything if isinstance(pending[i], _NAMES))
        lost |= {names, tuple(i for i in everything if i not in names)}
    for dropped in sorted(lost):
        told = ", ".join(_brief(pending[i]) for i in dropped)
        yield f"dropped: {told}", [pending[i] for i in everything if i not in dropped]
    for i, operation in enumerate(pending):
        if isinstance(operation, Write) and len(operation.pages) > 1:
            half = replace(operation, pages=operation.pages[: len(operation.pages) // 2])
            yield f"torn: {_brief(operation)}", [*pending[:i], half, *pending[i + 1 :]]


def _brief(operation: Change) -> str:
    told = type(operation).__name__.lower()
    return f"{told} in {operation.place} at {getattr(operation, 'first', '')}"
