"""Shared memory at aligned addresses, and huge pages under it."""

import mmap
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.tiers.dram import DramSlab
from kvtier.tiers.memory import (
    HUGE_PAGE,
    PAGE,
    SharedMapping,
    collapse,
    huge_bytes,
    memlock_advice,
    populate,
)


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


SMAPS = """\
7f0000000000-7f0000400000 rw-s 00000000 00:01 5 /memfd:kvtier-dram (deleted)
Size:               4096 kB
AnonHugePages:         0 kB
ShmemPmdMapped:     2048 kB
FilePmdMapped:         0 kB
7f0000400000-7f0000600000 rw-p 00000000 00:00 0
AnonHugePages:      2048 kB
7f0000600000-7f0000800000 rw-p 00000000 00:00 0 [heap]
AnonHugePages:      2048 kB
"""


def test_huge_pages_are_counted_in_the_range_only(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(SMAPS)
    start = 0x7F0000000000
    assert huge_bytes(start, 4 << 20, smaps) == 2 << 20
    assert huge_bytes(start, 6 << 20, smaps) == 4 << 20
    assert huge_bytes(start + 1, 4 << 20, smaps) == 0
    assert huge_bytes(start, 4 << 20, tmp_path / "none") == 0


def test_what_was_collapsed_is_reported_as_huge() -> None:
    slab = DramSlab.create(2, 2 * HUGE_PAGE)
    collapsed = slab.huge_bytes()
    assert collapsed % HUGE_PAGE == 0 and collapsed <= slab.geometry.nbytes
    fd = os.memfd_create("kvtier-test")
    os.ftruncate(fd, 2 * HUGE_PAGE)
    if collapse(SharedMapping(fd, 2 * HUGE_PAGE), 0, 2 * HUGE_PAGE):
        assert collapsed >= 4 * HUGE_PAGE
    os.close(fd)
    slab.close()
    assert slab.huge_bytes() == 0


@pytest.mark.parametrize(
    ("limit", "said"), [(1000, "ulimit -l.*is 1,000 bytes, 1,001"), (1001, "")]
)
def test_a_low_memory_lock_limit_is_named_with_its_cures(
    limit: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    text = memlock_advice(1001)
    assert re.search(said or "is not the cause", text)
    assert all((cure in text) == bool(said) for cure in ("LimitMEMLOCK=", "--ulimit memlock=-1"))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert "is not the cause" in memlock_advice(1 << 60)
