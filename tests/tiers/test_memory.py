"""Shared memory at aligned addresses, and huge pages under it."""

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.tiers.memory import HUGE_PAGE, PAGE, SharedMapping, collapse, populate


@pytest.fixture
def fd() -> Iterator[int]:
    number = os.memfd_create("kvtier-test")
    yield number
    os.close(number)


@pytest.mark.parametrize("nbytes", [PAGE, HUGE_PAGE, 3 * HUGE_PAGE + 5 * PAGE])
def test_a_shared_mapping_is_aligned_and_is_the_file(fd: int, nbytes: int) -> None:
    os.ftruncate(fd, nbytes)
    mapping = SharedMapping(fd, nbytes)
    array = np.frombuffer(mapping.view, np.uint8)
    assert array.ctypes.data % HUGE_PAGE == 0
    assert len(mapping) == len(array) == nbytes
    array[-1] = 7
    assert os.pread(fd, 1, nbytes - 1) == b"\x07"
    os.pwrite(fd, b"\x09", 0)
    assert array[0] == 9


def test_two_mappings_of_one_file_see_each_other(fd: int) -> None:
    os.ftruncate(fd, HUGE_PAGE)
    first, second = SharedMapping(fd, HUGE_PAGE), SharedMapping(fd, HUGE_PAGE)
    first.view[100] = 3
    assert second.view[100] == 3


def test_memory_is_unmapped_with_the_last_view(fd: int) -> None:
    os.ftruncate(fd, 8 * HUGE_PAGE)
    before = len(_maps())
    mapping = SharedMapping(fd, 8 * HUGE_PAGE)
    array = np.frombuffer(mapping.view, np.uint8)
    del mapping
    array[-1] = 1  # still mapped
    during = [line for line in _maps() if "kvtier-test" in line]
    del array
    assert (len(during), len(_maps()) <= before + 1) == (1, True)
    assert not [line for line in _maps() if "kvtier-test" in line]


def test_a_descriptor_that_cannot_be_mapped_is_an_error(tmp_path: "os.PathLike[str]") -> None:
    number = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="."):
            SharedMapping(number, PAGE)
    finally:
        os.close(number)


def test_collapsing_keeps_memory_zeroed_and_whole(fd: int) -> None:
    nbytes = 2 * HUGE_PAGE + 3 * PAGE
    os.ftruncate(fd, nbytes)
    mapping = SharedMapping(fd, nbytes)
    collapse(mapping, 0, nbytes)  # whether the kernel grants it is its own business
    populate(mapping, 0, nbytes, fresh=True)
    array = np.frombuffer(mapping.view, np.uint8)
    assert not array.any()
    array[:] = 5
    assert os.pread(fd, nbytes, 0) == b"\x05" * nbytes


def test_advice_counts_from_the_first_byte_of_the_view(fd: int) -> None:
    os.ftruncate(fd, 2 * HUGE_PAGE)
    mapping = SharedMapping(fd, 2 * HUGE_PAGE)
    mapping.view[:] = b"\x01" * len(mapping)
    # Dropping shared pages from this mapping loses nothing: the file has them.
    mapping.madvise(mmap.MADV_DONTNEED, HUGE_PAGE, HUGE_PAGE)
    mapping.madvise(mmap.MADV_DONTNEED)
    assert bytes(mapping.view[: 2 * PAGE]) == b"\x01" * (2 * PAGE)


def _maps() -> list[str]:
    with open("/proc/self/maps") as file:
        return file.readlines()
