"""The file layer: calls that do less than they were asked, and calls that signals interrupt."""

import ctypes
import errno
import mmap
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvtier.tiers.contracts import Bytes
from kvtier.tiers.nvme import files as layer
from kvtier.tiers.nvme.files import Files, ShortRead, ShortWrite, read_whole, write_whole
from kvtier.tiers.nvme.record import PAGE


class Miserly(Files):
    """Moves at most `most` bytes a call, as the kernel may."""

    def __init__(self, most: int) -> None:
        super().__init__(direct=False)
        self.most = most
        self.calls: list[tuple[int, int]] = []

    def _cut(self, buffers: Sequence[Bytes], offset: int) -> list[Bytes]:
        self.calls.append((offset, sum(b.nbytes for b in buffers)))
        left, some = self.most, []
        for buffer in buffers:
            some.append(buffer[:left])
            left -= some[-1].nbytes
        return [buffer for buffer in some if buffer.nbytes]

    def preadv(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        return super().preadv(fd, self._cut(buffers, offset), offset)

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        return super().pwritev(fd, self._cut(buffers, offset), offset)


def pages(*counts: int) -> list[Bytes]:
    return [np.frombuffer(mmap.mmap(-1, n * PAGE), np.uint8) for n in counts]


def filled(*counts: int) -> list[Bytes]:
    data = pages(*counts)
    for seed, buffer in enumerate(data):
        buffer[:] = np.random.default_rng(seed).integers(0, 256, buffer.nbytes, np.uint8)
    return data


@contextmanager
def opened(files: Files, path: Path) -> Iterator[int]:
    fd = files.open(path, create=True)
    try:
        yield fd
    finally:
        files.close(fd)


@pytest.mark.parametrize("most", [PAGE, 5000, 3 * PAGE, 3 * PAGE + 1, 1 << 20])
def test_a_call_that_stops_short_is_followed_by_one_for_the_rest(tmp_path: Path, most: int) -> None:
    files, data, back = Miserly(most), filled(1, 3, 2), pages(1, 3, 2)
    with opened(files, tmp_path / "f") as fd:
        write_whole(files, fd, data, 2 * PAGE)
        read_whole(files, fd, back, 2 * PAGE)
    assert all(np.array_equal(a, b) for a, b in zip(data, back, strict=True))
    assert all(offset % PAGE == 0 for offset, _ in files.calls)  # O_DIRECT takes no others


@pytest.mark.parametrize("most", [0, PAGE - 1])
def test_a_call_that_gets_no_further_ends_it(tmp_path: Path, most: int) -> None:
    files = Miserly(1 << 20)
    with opened(files, tmp_path / "f") as fd:
        write_whole(files, fd, filled(3), 0)
        files.most = most
        with pytest.raises(ShortWrite) as caught:
            write_whole(files, fd, filled(3), 0)
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(ShortRead):
            read_whole(files, fd, pages(3), 0)


def test_a_read_past_the_end_of_a_file_is_short(tmp_path: Path) -> None:
    files = Files()
    with opened(files, tmp_path / "f") as fd:
        write_whole(files, fd, filled(3), 0)
        read_whole(files, fd, pages(1, 2), 0)
        with pytest.raises(ShortRead):
            read_whole(files, fd, pages(1, 3), 0)


def test_no_call_is_asked_for_more_than_the_kernel_moves_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "MAX_CALL_BYTES", 4 * PAGE)
    monkeypatch.setattr(layer, "_MAX_CALL_BUFFERS", 3)
    files, data = Miserly(1 << 30), filled(1, 9, 1, 1, 1, 1, 2)
    back = pages(1, 9, 1, 1, 1, 1, 2)
    with opened(files, tmp_path / "f") as fd:
        write_whole(files, fd, data, 0)
        read_whole(files, fd, back, 0)
    assert all(np.array_equal(a, b) for a, b in zip(data, back, strict=True))
    assert max(nbytes for _, nbytes in files.calls) == 4 * PAGE
    assert layer.MAX_CALL_BYTES < 0x7FFFF000


@pytest.mark.parametrize("call", ["allocate", "punch"])
def test_fallocate_is_called_again_when_a_signal_interrupts_it(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, answers = Files(), [errno.EINTR, errno.EINTR, 0]

    def interrupted(*_: int) -> int:
        number = answers.pop(0)
        ctypes.set_errno(number)
        return -1 if number else 0

    monkeypatch.setattr(files, "_fallocate", interrupted)
    getattr(files, call)(3, 0, PAGE)
    assert answers == []


def test_signals_in_the_middle_of_calls_lose_nothing(tmp_path: Path) -> None:
    files, data, back, seen = Files(), filled(1, 256), pages(1, 256), []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.siginterrupt(signal.SIGALRM, True)
    try:
        with opened(files, tmp_path / "f") as fd:
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            while len(seen) < 30:
                files.allocate(fd, 0, 257 * PAGE)
                write_whole(files, fd, data, 0)
                files.fdatasync(fd)
                for buffer in back:
                    buffer[:] = 0
                read_whole(files, fd, back, 0)
                assert all(np.array_equal(a, b) for a, b in zip(data, back, strict=True))
                files.punch(fd, 0, 257 * PAGE)
                files.sync_directory(tmp_path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert os.path.getsize(tmp_path / "f") == 257 * PAGE
