"""Every system call that touches a segment, in one small class. Knows no record and no catalogue.

Tests put a subclass in its place that fails, shortens, forgets or records calls. All methods block
and may be called from any thread; each raises `OSError` as the kernel reports it.
"""

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from kvtier.tiers.contracts import Bytes
from kvtier.tiers.errors import StoreUnsupported
from kvtier.tiers.nvme.record import PAGE

_log = logging.getLogger(__name__)

_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02


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
        """A descriptor of one segment. `create` refuses a file that is there already.

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
        """Fill `buffers` from `offset`; returns bytes read (fewer: the file ends there)."""
        return os.preadv(fd, [buffer.data for buffer in buffers], offset)

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        """Write `buffers` at `offset`; returns bytes written."""
        return os.pwritev(fd, [buffer.data for buffer in buffers], offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Reserve disk space for a range, so that a full disk shows before bytes are written."""
        self._call_fallocate(fd, 0, offset, length)

    def punch(self, fd: int, offset: int, length: int) -> None:
        """Give a range back to the file system; it reads as zeros from now on."""
        self._call_fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length)

    def truncate(self, path: Path, length: int) -> None:
        """Cut a file to `length` if it is longer."""
        if path.stat().st_size > length:
            os.truncate(path, length)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

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


def _cure(directory: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{directory}: the disk is full; free some space or choose another directory"
    if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
        return f"{directory}: the file system cannot punch holes; use ext4, xfs, btrfs or tmpfs"
    return f"{directory}: cannot be written ({error.strerror}); mend that or choose another"
