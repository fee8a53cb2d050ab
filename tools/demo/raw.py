"""What the drive and the memory can do without us: raw O_DIRECT reads, and one memcpy.

The measure a restore is held against. Reads the store's own segment files, so it is the same
drive, file system and bytes. Knows nothing of records.
"""

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.tools.errors import DemoFailed

Buffer = npt.NDArray[np.uint8]

PAGE = 4096
# (requests in flight, bytes each): deep and shallow, small and large; the best one counts.
SHAPES = ((1, 8 << 20), (2, 4 << 20), (4, 4 << 20), (4, 1 << 20), (8, 1 << 20))


@dataclass(frozen=True)
class RawSpeed:
    """Seconds for the same bytes, read raw from the drive and copied once in memory."""

    nbytes: int
    read_s: float
    memcpy_s: float


@dataclass(frozen=True)
class _Piece:
    fd: int
    offset: int
    start: int
    nbytes: int


def measure_raw(files: Sequence[Path], nbytes: int) -> RawSpeed:
    """Time reading `nbytes` of `files` past the page cache, best of `SHAPES`, and one memcpy.

    Both buffers are touched before, as the pools are. Where the file system has no O_DIRECT the
    reads are ordinary ones. Raises `DemoFailed` if the files hold less.
    """
    nbytes -= nbytes % PAGE
    with ExitStack() as stack:
        target, copy = _buffer(nbytes), _buffer(nbytes)
        extents = list(_extents([_open(path, stack) for path in files], nbytes))
        times = [_read(extents, target, *shape) for shape in SHAPES]
        started = time.perf_counter()
        np.copyto(copy, target)
        memcpy_s = time.perf_counter() - started
    return RawSpeed(nbytes, min(times), memcpy_s)


def cached_share(files: Sequence[Path]) -> float:
    """Share of the files' data pages that the page cache holds, by mincore: it reads nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    pages = cached = 0
    for path in files:
        size = path.stat().st_size
        if size == 0:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
            resident = np.zeros(-(-size // PAGE), np.uint8)
            view = np.frombuffer(mapped, np.uint8)
            if libc.mincore(view.ctypes.data, size, resident.ctypes.data) != 0:
                raise OSError(ctypes.get_errno(), "mincore", str(path))
            del view  # the mapping cannot be closed while something looks at it
            for offset, length in _data(file.fileno()):
                run = resident[offset // PAGE : (offset + length) // PAGE] & 1
                pages, cached = pages + len(run), cached + int(run.sum())
    return cached / pages if pages else 0.0


def _buffer(nbytes: int) -> Buffer:
    """Page-aligned memory, every page present. Unmapped when the last view of it goes."""
    buffer = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    buffer[::PAGE] = 1
    return buffer


def _open(path: Path, stack: ExitStack) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.open(path, flags)
    stack.callback(os.close, fd)
    return fd


def _data(fd: int) -> Iterator[tuple[int, int]]:
    """The runs of a file that hold data: `(offset, nbytes)`, whole pages."""
    end, at = os.fstat(fd).st_size, 0
    while at < end:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return
        at = min(os.lseek(fd, start, os.SEEK_HOLE), end)
        first = -(-start // PAGE) * PAGE
        if at - first >= PAGE:
            yield first, (at - first) // PAGE * PAGE


def _extents(fds: Sequence[int], nbytes: int) -> Iterator[tuple[int, int, int]]:
    """`(fd, offset, nbytes)` that together hold exactly `nbytes`."""
    left = nbytes
    for fd in fds:
        for offset, length in _data(fd):
            take = min(length, left)
            if take:
                yield fd, offset, take
                left -= take
    if left:
        raise DemoFailed(
            f"the store holds {nbytes - left} of {nbytes} bytes to read; prewarm again"
        )


def _read(
    extents: Sequence[tuple[int, int, int]], target: Buffer, depth: int, request: int
) -> float:
    pieces, start = [], 0
    for fd, offset, length in extents:
        for at in range(0, length, request):
            n = min(request, length - at)
            pieces.append(_Piece(fd, offset + at, start, n))
            start += n
    with ThreadPoolExecutor(depth) as workers:
        list(workers.map(abs, range(depth)))  # the threads are there before the clock starts
        started = time.perf_counter()
        for _ in workers.map(lambda piece: _read_piece(piece, target), pieces):
            pass
        return time.perf_counter() - started


def _read_piece(piece: _Piece, target: Buffer) -> None:
    view = target.data[piece.start : piece.start + piece.nbytes]
    got = os.preadv(piece.fd, [view], piece.offset)
    if got != piece.nbytes:
        raise DemoFailed(f"a raw read of {piece.nbytes} bytes returned {got}; prewarm again")
