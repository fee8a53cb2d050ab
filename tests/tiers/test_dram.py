import fcntl
import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtier.index.errors import KvtierError
from kvtier.index.words import BlockKey, TierId
from kvtier.tiers import memory
from kvtier.tiers.contracts import HostPool
from kvtier.tiers.dram import DramSlab, SlabGeometry
from kvtier.tiers.errors import CapacityTooSmall, TierFull
from kvtier.tiers.memory import NotEnoughMemory
from kvtier.tiers.pool import POISON, SlotState
from tests.prf import block_bytes

KEY = BlockKey(b"k" * 32)

CHILD = """
import sys
from kvtier.tiers.dram import DramSlab
slab = DramSlab.attach(int(sys.argv[1]), populate=True)
slot, other = int(sys.argv[2]), int(sys.argv[3])
slab.view(other)[:] = slab.view(slot)[::-1]
print(slab.geometry.num_slots, slab.key(slot).decode(), int(slab.checksums([slot])[0]))
print("torch" in sys.modules)
"""


@pytest.mark.parametrize("block_bytes_", [1, 100, 4096, 5000, 737_280])
def test_slots_are_whole_aligned_pages_and_do_not_overlap(block_bytes_: int) -> None:
    slab: HostPool = DramSlab.create(3, block_bytes_)
    for slot in slab.alloc(3).tolist():
        slab.view(slot)[:] = block_bytes(b"%d" % slot, block_bytes_)
    for slot in range(3):
        assert slab.view(slot).ctypes.data % 4096 == 0
        assert (slab.view(slot) == block_bytes(b"%d" % slot, block_bytes_)).all()
    assert isinstance(slab, DramSlab)
    assert slab.geometry.stride % 4096 == 0 and slab.geometry.data_offset % (2 << 20) == 0
    assert slab.padded_view(1).shape == (slab.geometry.stride,)
    slab.close()


def test_another_process_reads_and_writes_the_same_bytes() -> None:
    slab = DramSlab.create(5, 1000)
    slot, other = slab.alloc(2).tolist()
    slab.view(slot)[:] = block_bytes(KEY, 1000)
    slab.describe(np.array([slot], np.int32), [KEY], np.array([77], np.uint64))
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, str(slab.fd), str(slot), str(other)],
        pass_fds=[slab.fd],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.splitlines() == [f"5 {KEY.decode()} 77", "False"]
    assert (slab.view(other) == block_bytes(KEY, 1000)[::-1]).all()
    slab.close()


def test_who_attached_sees_slots_but_gives_none_out() -> None:
    slab = DramSlab.create(3, 50)
    slots = slab.alloc(1)
    guest = DramSlab.attach(os.dup(slab.fd))
    assert guest.state(int(slots[0])) is SlotState.HELD
    with pytest.raises(PermissionError, match="only the process that made it"):
        guest.alloc(1)
    with pytest.raises(PermissionError):
        guest.free(slots)
    slab.close()
    guest.view(0)[:] = 1  # the memory lives as long as somebody maps it
    guest.close()


def test_closing_twice_is_fine_and_a_view_outlives_it() -> None:
    slab = DramSlab.create(2, 50)
    view = slab.view(int(slab.alloc(1)[0]))
    slab.close()
    slab.close()
    view[:] = 3
    assert (view == 3).all() and slab.fd == -1
    with pytest.raises(TierFull):
        slab.alloc(1)


def test_a_slab_cannot_be_shrunk_under_its_readers() -> None:
    slab = DramSlab.create(2, 50)
    with pytest.raises(PermissionError):
        os.ftruncate(slab.fd, 4096)
    with pytest.raises(PermissionError):
        fcntl.fcntl(slab.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(slab.fd)
    slab.close()


def memfd(content: bytes, size: int, *, seal: bool = True) -> int:
    fd = os.memfd_create("t", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    os.ftruncate(fd, size)
    if seal:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


GEOMETRY = SlabGeometry(3, 50)
HEADER = GEOMETRY.header()


@pytest.mark.parametrize(
    ("content", "size", "seal", "message"),
    [
        (b"", 0, True, "holds no slab"),
        (b"x" * 4096, 4096, True, "holds no slab"),
        (HEADER[:8] + b"\2\0\0\0" + HEADER[12:], GEOMETRY.nbytes, True, "version 2"),
        (HEADER[:16] + b"\4" + HEADER[17:], 1 << 30, True, "contradicts itself|speaks of"),
        (HEADER[:32] + b"\1" + HEADER[33:], GEOMETRY.nbytes, True, "contradicts itself"),
        (HEADER, GEOMETRY.nbytes - 1, True, "speaks of"),
        (HEADER, GEOMETRY.nbytes, False, "not sealed"),
    ],
)
def test_what_is_no_sound_slab_is_refused_and_its_descriptor_closed(
    content: bytes, size: int, seal: bool, message: str
) -> None:
    if message.startswith("contradicts itself|"):
        content, size = HEADER[:16] + b"\0" + HEADER[17:], GEOMETRY.nbytes
    fd = memfd(content, size, seal=seal)
    with pytest.raises(KvtierError, match=message):
        DramSlab.attach(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_an_ordinary_file_is_no_slab(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(HEADER)
    os.truncate(path, GEOMETRY.nbytes)
    with pytest.raises(KvtierError, match="not a memfd"):
        DramSlab.attach(os.open(path, os.O_RDWR))


def test_the_header_is_laid_out_as_documented() -> None:
    numbers = [1 | 64 << 32, 3, 50, 4096, 2 << 20]
    assert HEADER == b"KVTSLAB\0" + np.array(numbers, "<u8").tobytes()


@pytest.mark.parametrize("populate", [True, False])
def test_populated_slabs_have_their_pages_before_the_first_touch(populate: bool) -> None:
    slab = DramSlab.create(3, 1 << 20, populate=populate)
    assert (os.fstat(slab.fd).st_blocks * 512 >= 3 << 20) == populate
    slab.close()


@pytest.mark.parametrize("fresh", [True, False])
def test_without_kernel_support_pages_are_touched_and_keep_their_content(
    fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MADV_POPULATE_WRITE", 9999)
    fd = os.memfd_create("t", os.MFD_CLOEXEC)
    os.ftruncate(fd, 5 * 4096)
    mapping = mmap.mmap(fd, 5 * 4096)
    if not fresh:
        mapping[:] = b"\7" * len(mapping)
    memory.populate(mapping, 0, len(mapping), fresh=fresh)
    assert os.fstat(fd).st_blocks * 512 == 5 * 4096
    assert set(mapping[:]) == ({0} if fresh else {7})
    os.close(fd)


def test_in_debug_mode_freed_slots_are_spoilt() -> None:
    slab = DramSlab.create(3, 50, debug=True)
    slots = slab.alloc(1)
    slab.view(int(slots[0]))[:] = 1
    slab.free(slots)
    assert (slab.view(int(slots[0])) == POISON).all()
    slab.close()


def test_a_slab_without_a_slot_is_refused() -> None:
    with pytest.raises(CapacityTooSmall, match="0 slots"):
        DramSlab.create(0, 50)


def test_more_than_the_machine_has_is_refused_with_the_numbers() -> None:
    with pytest.raises(NotEnoughMemory, match=r"dram slab of 1000000 blocks: needs 1,0.*available"):
        DramSlab.create(1_000_000, 1 << 30)


def test_more_than_a_resource_limit_is_refused_before_the_kernel_kills() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(NotEnoughMemory, match="ulimit -f"):
            DramSlab.create(3, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_is_mapped_already_counts_against_the_address_space_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = {resource.RLIMIT_AS: mapped + (512 << 20)}
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits.get(which, unlimited),) * 2)
    with pytest.raises(NotEnoughMemory, match="ulimit -v"):
        DramSlab.create(7, 200 << 20, populate=False)
    DramSlab.create(7, 1 << 20, populate=False).close()


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_that_cgroups_leave_is_counted_with_what_can_be_reclaimed(
    version: int, tmp_path: Path
) -> None:
    base = tmp_path / "memory" if version == 1 else tmp_path
    inner = base / "a" / "b"
    inner.mkdir(parents=True)
    limit, usage, idle = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else ("memory.max", "memory.current", "inactive_file")
    )
    (inner / limit).write_text("max\n")
    (inner.parent / limit).write_text("1000\n")
    (inner.parent / usage).write_text("900\n")
    (inner.parent / "memory.stat").write_text(f"file 5\n{idle} 300\n")
    membership = tmp_path / "self"
    membership.write_text(f"3:cpu:/\n4:{'memory' if version == 1 else 'x'}:/a/b\n0::/a/b\n")
    found = memory.cgroup_available(membership, tmp_path)
    assert list(found.values()) == [400]
    assert str(inner.parent / limit) in next(iter(found))


def test_slabs_are_for_the_dram_tier() -> None:
    slab = DramSlab.create(2, 50)
    assert slab.tier is TierId.DRAM and repr(slab) == "<DramSlab dram: 2 of 2 slots free>"
    slab.close()
