"""Writes down what a tier asks of its disk, LMDB commits included. Knows no record and no request.

Operations are written down before they are issued, barriers after they have returned: a history
may claim less than the disk knows, never more. An LMDB commit counts as atomic and durable; the
catalogue's file is copied after each.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Lock
from types import FrameType
from typing import Any

import lmdb
import pytest

from kvtier.tiers.contracts import Bytes
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.record import PAGE
from tests.nvme.crash.disk import (
    Allocate,
    Change,
    Event,
    Link,
    Loss,
    Mark,
    Model,
    Punch,
    Rename,
    Rot,
    Store,
    Sync,
    Truncate,
    Unlink,
    Write,
)

_OURS = f"{Path('tiers', 'nvme')}/"
_CARRIERS = ("files.py", "workers.py", "daemons.py")
_CATALOGUE = "data.mdb"


class Recorder(Files):
    """The file layer of the store below `root`, a directory that looks as `start` says.

    `omitted`: a site whose syncs are left out, on the disk and in the history.
    """

    def __init__(self, root: Path, start: Model, omitted: str | None = None) -> None:
        super().__init__(direct=False)
        self.events: list[Event] = []
        self._root = root
        self._start = start.copy()
        self._live = start.whole()
        self._omitted = omitted
        self._guard = Lock()
        self._inodes: dict[int, int] = {}
        self._fresh = count(1 + max([*self._live.names, *self._live.files]))
        self._probing = False

    def instants(self, first: int = 0) -> Iterator[tuple[int, Model]]:
        """The disk after every event from the `first` on; `(events so far, model)`."""
        model = self._start.copy()
        for done, event in enumerate([None, *self.events]):
            if event is not None:
                model.happen(event)
            if done >= first:
                yield done, model

    def now(self) -> Model:
        """The disk at this moment."""
        model = self._start.copy()
        for event in self.events:
            model.happen(event)
        return model

    def mark(self, keys: Sequence[bytes]) -> None:
        """The store's user was told that `keys` have landed."""
        with self._guard:
            self.events.append(Mark(frozenset(keys)))

    def rot(self, path: Path, offset: int) -> None:
        """Flip a bit of what is stored."""
        with self._guard, path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
            self.events.append(Rot(self._inode(path), offset))

    def lose_catalogue(self, directory: Path) -> None:
        """The file of the catalogue in `directory` is gone."""
        with self._guard:
            (directory / _CATALOGUE).unlink()
            event = Loss(self._inode(directory), _CATALOGUE)
            event.apply(self._live)
            self.events.append(event)

    def open(self, path: Path, *, create: bool = False, read_only: bool = False) -> int:
        if create:
            self._link(path)
        fd = super().open(path, create=create, read_only=read_only)
        if not self._probing:
            self._inodes[fd] = self._inode(path)
        return fd

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        data = b"".join(buffer.tobytes() for buffer in buffers)
        self._happen(Write(self._inodes[fd], offset // PAGE, _pages(data)))
        return super().pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._happen(Allocate(self._inodes[fd], offset // PAGE, length // PAGE))
        super().allocate(fd, offset, length)

    def punch(self, fd: int, offset: int, length: int) -> None:
        if not self._probing:
            self._happen(Punch(self._inodes[fd], offset // PAGE, length // PAGE))
        super().punch(fd, offset, length)

    def truncate(self, path: Path, length: int) -> None:
        if self._live.files[self._inode(path)].size > length:
            self._happen(Truncate(self._inode(path), length))
        super().truncate(path, length)

    def unlink(self, path: Path) -> None:
        place = self._inode(path.parent)
        if path.name in self._live.names[place]:
            self._happen(Unlink(place, path.name))
        super().unlink(path)

    def rename(self, old: Path, new: Path) -> None:
        assert old.parent == new.parent
        self._happen(Rename(self._inode(old.parent), old.name, new.name))
        super().rename(old, new)

    def remove_tree(self, path: Path) -> None:
        place = self._inode(path.parent)
        if path.name in self._live.names[place]:
            self._happen(Unlink(place, path.name))
        super().remove_tree(path)

    def fdatasync(self, fd: int) -> None:
        site = _site(sys._getframe(1))
        if site != self._omitted:
            super().fdatasync(fd)
            self._sync(self._inodes[fd], site)

    def sync_directory(self, path: Path) -> None:
        site = f"{_site(sys._getframe(1))} of {path.relative_to(self._root)}"
        if site != self._omitted:
            super().sync_directory(path)
            self._sync(self._inode(path), site)

    def make_directory(self, path: Path) -> None:
        self._link(path, directory=True)
        super().make_directory(path)

    def probe(self, directory: Path) -> None:
        """Not part of the history: what it leaves behind is no segment."""
        self._probing = True
        try:
            super().probe(directory)
        finally:
            self._probing = False

    @contextmanager
    def recording(self) -> Iterator["Recorder"]:
        """Write down LMDB's commits too, meanwhile."""
        plain = lmdb.open

        def opened(path: str, **options: Any) -> Any:
            environment = plain(path, **options)
            if self._root not in Path(path).parents or options.get("readonly"):
                return environment
            self._link(Path(path) / _CATALOGUE)
            return _Environment(environment, self, self._inode(Path(path) / _CATALOGUE))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lmdb, "open", opened)
            yield self

    def committed(self, path: Path, inode: int) -> None:
        """An LMDB transaction has ended; `path` is its file."""
        event = Store(inode, _pages((path / _CATALOGUE).read_bytes()))
        with self._guard:
            file = self._live.files[inode]
            if tuple(file.pages.values()) != event.pages:
                event.apply(self._live)
                self.events.append(event)

    def _link(self, path: Path, *, directory: bool = False) -> None:
        with self._guard:
            place = self._inode(path.parent)
            if self._probing or path.name in self._live.names[place]:
                return
            event = Link(place, path.name, next(self._fresh), directory)
            self.events.append(event)
            event.create(self._live)
            event.apply(self._live)

    def _happen(self, operation: Change) -> None:
        with self._guard:
            self.events.append(operation)
            operation.apply(self._live)

    def _sync(self, place: int, site: str) -> None:
        with self._guard:
            self.events.append(Sync(place, site))

    def _inode(self, path: Path) -> int:
        inode = self._live.find(path.relative_to(self._root).parts)
        assert inode is not None, f"{path}: made behind the file layer's back"
        return inode


class _Environment:
    """An LMDB environment whose commits are written down."""

    def __init__(self, environment: Any, recorder: Recorder, inode: int) -> None:
        self._environment = environment
        self._recorder = recorder
        self._inode = inode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def open_db(self, *arguments: Any, **options: Any) -> Any:
        table = self._environment.open_db(*arguments, **options)
        if options.get("create", True):
            self.committed()
        return table

    @contextmanager
    def begin(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        with self._environment.begin(*arguments, **options) as transaction:
            yield transaction
        if options.get("write"):
            self.committed()

    def committed(self) -> None:
        self._recorder.committed(Path(self._environment.path()), self._inode)


def _pages(data: bytes) -> tuple[bytes, ...]:
    assert len(data) % PAGE == 0
    return tuple(data[at : at + PAGE] for at in range(0, len(data), PAGE))


def _site(frame: FrameType | None) -> str:
    """The calls of the tier's modules that lead here, innermost first."""
    chain = []
    while frame is not None:
        code = frame.f_code
        path = Path(code.co_filename)
        if _OURS in code.co_filename and path.name not in _CARRIERS:
            chain.append(f"{path.stem}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    return " < ".join(chain)


HANDLED = frozenset(name for name in vars(Recorder) if not name.startswith("_"))
"""Methods of `Files` the recorder knows; those that only read or close need no line."""
