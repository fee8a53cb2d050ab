"""Every system call that touches a segment, in one small class. Knows no record and no catalogue.

Tests put a subclass in its place that fails, shortens, forgets or records calls. All methods block
and may be called from any thread; each raises `OSError` as the kernel reports it.
"""

import ctypes
import errno
import logging
import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from kvtier.tiers.contracts import Bytes
from kvtier.tiers.errors import RecordRefused, StoreUnsupported
from kvtier.tiers.nvme.record import PAGE

_log = logging.getLogger(__name__)

MAX_CALL_BYTES = 1 << 30
"""Most bytes one call moves: the kernel stops short of 2 GiB, at no page boundary."""

_MAX_CALL_BUFFERS = 1024
_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02


class ShortRead(RecordRefused):
    """The file ends before the bytes that the catalogue promises."""


class ShortWrite(OSError):
    """The drive took fewer bytes than it was given; told like a full disk."""


class Files:
    """The file layer. `direct` says whether segments are opened past the page cache."""

    def __init__(self, *, direct: bool = True) -> None:
        self.direct = direct
        libc = ctypes.CDLL(None, use_errno=True)
        self._fallocate = libc.fallocate64 if hasattr(libc, "fallocate64") else libc.fallocate
        self._fallocate.argtypes = (
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_longlong,
            ctypes.c_longlong,
        )

    def open(self, path: Path, *, create: bool = False, read_only: bool = False) -> int:
        """A descriptor of one segment. `create` makes it; past the page cache it refuses
        one that is there already.

        Where the file system refuses O_DIRECT, opens buffered, warns once and clears `direct`.
        """
        flags = os.O_CLOEXEC | (os.O_RDONLY if read_only else os.O_RDWR)
        if self.direct:
            try:
                created = os.O_CREAT | os.O_EXCL if create else 0
                return os.open(path, flags | created | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            _log.warning("%s: no O_DIRECT here; I/O passes the page cache", path.parent)
            self.direct = False  # Linux leaves a file behind that it then refuses to open
        return os.open(path, flags | (os.O_CREAT if create else 0), 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        """Fill `buffers` from `offset`; returns bytes read. Callers want `read_whole`."""
        return os.preadv(fd, [buffer.data for buffer in buffers], offset)

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        """Write `buffers` at `offset`; returns bytes written. Callers want `write_whole`."""
        return os.pwritev(fd, [buffer.data for buffer in buffers], offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Reserve disk space for a range, so that a full disk shows before bytes are written."""
        self._call_fallocate(fd, 0, offset, length)

    def punch(self, fd: int, offset: int, length: int) -> None:
        """Give a range back to the file system; it reads as zeros from now on."""
        self._call_fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length)

    def next_data(self, fd: int, offset: int) -> tuple[int, int] | None:
        """Where data next stands at or after `offset`, and where it ends; None: no more follows.

        What is reserved and was never written is no data.
        """
        try:
            start = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            raise
        return start, os.lseek(fd, start, os.SEEK_HOLE)

    def truncate(self, path: Path, length: int) -> None:
        """Cut a file to `length` if it is longer."""
        if path.stat().st_size > length:
            os.truncate(path, length)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def rename(self, old: Path, new: Path) -> None:
        """Give a directory another name, which must be free."""
        old.rename(new)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory with all that is in it. One that is gone is fine."""
        if path.exists():
            shutil.rmtree(path)

    def make_directory(self, path: Path) -> None:
        """A directory and its parents, unless they are there."""
        path.mkdir(parents=True, exist_ok=True)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def probe(self, directory: Path) -> None:
        """Find out by doing: writing, hole punching, and whether O_DIRECT works (sets `direct`).

        Raises `StoreUnsupported` if the directory's file system cannot do the first two.
        """
        path = directory / "probe"
        self.unlink(path)
        try:
            fd = self.open(path, create=True)
            try:
                with mmap.mmap(-1, PAGE) as page:
                    if os.pwritev(fd, [page], 0) != PAGE:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.punch(fd, 0, PAGE)
            finally:
                os.close(fd)
        except OSError as error:
            raise StoreUnsupported(_cure(directory, error)) from error
        finally:
            self.unlink(path)

    def _call_fallocate(self, fd: int, mode: int, offset: int, length: int) -> None:
        while self._fallocate(fd, mode, offset, length) != 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))


def read_whole(files: Files, fd: int, buffers: Sequence[Bytes], offset: int) -> None:
    """Fill `buffers` from `offset`, in as many calls as it takes.

    `offset` and every buffer are whole pages. Raises `ShortRead` where a call brings no page more.
    """
    wanted, done = sum(buffer.nbytes for buffer in buffers), 0
    while done < wanted:
        part = _window(buffers, done)
        moved = files.preadv(fd, part, offset + done)
        if moved < PAGE:
            raise ShortRead(f"segment: ends before {offset + wanted}; the record is cut short")
        done += moved - moved % PAGE  # O_DIRECT goes on at a page boundary only


def write_whole(files: Files, fd: int, buffers: Sequence[Bytes], offset: int) -> None:
    """Write `buffers` at `offset`, in as many calls as it takes.

    `offset` and every buffer are whole pages. Raises `ShortWrite` where a call takes no page more.
    """
    wanted, done = sum(buffer.nbytes for buffer in buffers), 0
    while done < wanted:
        moved = files.pwritev(fd, _window(buffers, done), offset + done)
        if moved < PAGE:
            raise ShortWrite(errno.ENOSPC, f"short write: {done + moved} of {wanted} bytes")
        done += moved - moved % PAGE


def _window(buffers: Sequence[Bytes], done: int) -> Sequence[Bytes]:
    """What is left of `buffers` behind the first `done` bytes, as much as one call moves."""
    if done == 0 and len(buffers) <= _MAX_CALL_BUFFERS:
        if sum(buffer.nbytes for buffer in buffers) <= MAX_CALL_BYTES:
            return buffers
    part: list[Bytes] = []
    room = MAX_CALL_BYTES
    for buffer in buffers:
        left = buffer[min(done, buffer.nbytes) :][:room]
        done -= min(done, buffer.nbytes)
        if left.nbytes:
            part.append(left)
            room -= left.nbytes
        if not room or len(part) == _MAX_CALL_BUFFERS:
            break
    return part


def _cure(directory: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{directory}: the disk is full; free some space or choose another directory"
    if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
        return f"{directory}: the file system cannot punch holes; use ext4, xfs, btrfs or tmpfs"
    return f"{directory}: cannot be written ({error.strerror}); mend that or choose another"
