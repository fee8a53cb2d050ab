"""File layers that fail, shorten or record."""

import errno
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Lock
from typing import TypeVar

from kvtier.tiers.contracts import Bytes
from kvtier.tiers.nvme.files import Files

T = TypeVar("T")


class FaultyFiles(Files):
    """Fails the `at`-th call (from 0) of `call`, and `times` in all; everything else works.

    `fault` is an errno or an exception to raise, "short" for a read or write that does half its
    work, or "none" for one that does nothing. Nothing fails until `arm` is called. `seen`: how
    often each call was made while armed.
    """

    def __init__(
        self,
        call: str,
        fault: int | str | Exception,
        *,
        at: int = 0,
        times: int = 1,
        direct: bool = True,
    ) -> None:
        super().__init__(direct=direct)
        self._call = call
        self._fault = fault
        self._at = at
        self._times = times
        self.seen: Counter[str] = Counter()
        self._armed = False
        self._guard = Lock()
        self.fired = 0

    def arm(self, armed: bool = True) -> None:
        self._armed = armed

    def _due(self, call: str) -> bool:
        with self._guard:
            if not self._armed:
                return False
            self.seen[call] += 1
            if call != self._call:
                return False
            due = self._at < self.seen[call] <= self._at + self._times
            self.fired += due
            return due

    def run(self, call: str, action: Callable[[], T]) -> T:
        """`action`, which is a call of this name, unless it is to fail."""
        if self._due(call):
            raise self._failure()
        return action()

    def _failure(self) -> Exception:
        if isinstance(self._fault, Exception):
            return self._fault
        number = int(self._fault)
        return OSError(number, os.strerror(number))

    def _move(self, call: str, move: Callable[[Sequence[Bytes]], int], b: Sequence[Bytes]) -> int:
        if not self._due(call):
            return move(b)
        if self._fault == "none":
            return 0
        if self._fault == "short":
            half = [buffer[: buffer.nbytes // 2] for buffer in b[:1]] if len(b) < 2 else b
            return move(half[: max(1, len(b) // 2)])
        raise self._failure()

    def open(self, path: Path, *, create: bool = False, read_only: bool = False) -> int:
        return self.run(
            "open", lambda: super(FaultyFiles, self).open(path, create=create, read_only=read_only)
        )

    def preadv(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        return self._move(
            "preadv", lambda some: super(FaultyFiles, self).preadv(fd, some, offset), buffers
        )

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        return self._move(
            "pwritev", lambda some: super(FaultyFiles, self).pwritev(fd, some, offset), buffers
        )

    def fdatasync(self, fd: int) -> None:
        self.run("fdatasync", lambda: super(FaultyFiles, self).fdatasync(fd))

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self.run("allocate", lambda: super(FaultyFiles, self).allocate(fd, offset, length))

    def punch(self, fd: int, offset: int, length: int) -> None:
        self.run("punch", lambda: super(FaultyFiles, self).punch(fd, offset, length))

    def truncate(self, path: Path, length: int) -> None:
        self.run("truncate", lambda: super(FaultyFiles, self).truncate(path, length))

    def unlink(self, path: Path) -> None:
        self.run("unlink", lambda: super(FaultyFiles, self).unlink(path))

    def make_directory(self, path: Path) -> None:
        self.run("make_directory", lambda: super(FaultyFiles, self).make_directory(path))

    def sync_directory(self, path: Path) -> None:
        self.run("sync_directory", lambda: super(FaultyFiles, self).sync_directory(path))


WRITE_CALLS = ("open", "sync_directory", "allocate", "pwritev", "fdatasync")
ERRORS = (errno.ENOSPC, errno.EIO)


class RecordingFiles(Files):
    """Writes down every write, sync and punch as `(call, segment, offset, length)`."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, str, int, int]] = []
        self._guard = Lock()
        self._names: dict[int, str] = {}

    def note(self, call: str, name: str = "", offset: int = 0, length: int = 0) -> None:
        """Add a line, from any thread."""
        with self._guard:
            self.log.append((call, name, offset, length))

    def open(self, path: Path, *, create: bool = False, read_only: bool = False) -> int:
        fd = super().open(path, create=create, read_only=read_only)
        self._names[fd] = path.name
        if create:
            self.note("create", path.name)
        return fd

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        written = super().pwritev(fd, buffers, offset)
        self.note("write", self._names[fd], offset, written)
        return written

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self.note("sync", self._names[fd])

    def punch(self, fd: int, offset: int, length: int) -> None:
        self.note("punch", self._names[fd], offset, length)
        super().punch(fd, offset, length)

    def unlink(self, path: Path) -> None:
        self.note("unlink", path.name)
        super().unlink(path)

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.note("sync directory")


class ForgetfulFiles(Files):
    """A drive that loses power: what was written since the last sync of a file is zeros."""

    def __init__(self) -> None:
        super().__init__()
        self._guard = Lock()
        self._paths: dict[int, Path] = {}
        self._unsynced: dict[Path, list[tuple[int, int]]] = {}

    def open(self, path: Path, *, create: bool = False, read_only: bool = False) -> int:
        fd = super().open(path, create=create, read_only=read_only)
        self._paths[fd] = path
        return fd

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        written = super().pwritev(fd, buffers, offset)
        with self._guard:
            self._unsynced.setdefault(self._paths[fd], []).append((offset, written))
        return written

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        with self._guard:
            self._unsynced.pop(self._paths[fd], None)

    def lose_power(self) -> None:
        """Drop what is not synced."""
        for path, ranges in self._unsynced.items():
            with path.open("r+b") as file:
                for offset, length in ranges:
                    file.seek(offset)
                    file.write(bytes(length))


class HangingFiles(Files):
    """Blocks in the `at`-th call (from 0) of `call` after `arm`, until `release`.

    `entered` is set once it hangs there. `hang("commit")` is for calls that are not the files'.
    """

    def __init__(self, call: str, *, at: int = 0) -> None:
        super().__init__()
        self._call = call
        self._left = at
        self._armed = False
        self._guard = Lock()
        self._released = Event()
        self.entered = Event()

    def arm(self) -> None:
        self._armed = True

    def release(self) -> None:
        """Whatever hangs goes on, and nothing hangs any more."""
        self._armed = False
        self._released.set()

    def hang(self, call: str) -> None:
        """Called first in every call."""
        with self._guard:
            if not self._armed or call != self._call:
                return
            self._left -= 1
            if self._left >= 0:
                return
        self.entered.set()
        self._released.wait()

    def open(self, path: Path, *, create: bool = False, read_only: bool = False) -> int:
        self.hang("open")
        return super().open(path, create=create, read_only=read_only)

    def preadv(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        self.hang("preadv")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        self.hang("pwritev")
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self.hang("fdatasync")
        super().fdatasync(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self.hang("allocate")
        super().allocate(fd, offset, length)

    def punch(self, fd: int, offset: int, length: int) -> None:
        self.hang("punch")
        super().punch(fd, offset, length)

    def unlink(self, path: Path) -> None:
        self.hang("unlink")
        super().unlink(path)

    def sync_directory(self, path: Path) -> None:
        self.hang("sync_directory")
        super().sync_directory(path)
