"""Host memory asked for up front: is it there, make it real, or say clearly why not.

Pools are large and live as long as the process. A page that is first touched during a copy costs
that copy a fault, and a page that cannot be had at all costs the process its life (the kernel's
OOM killer gives no reason). So pools ask here first and populate at once. Knows nothing of slots.
"""

import ctypes
import mmap
import os
import resource
from pathlib import Path

import numpy as np

from kvtier.index.errors import KvtierError

PAGE = 4096
"""The unit of direct I/O and of slot strides."""

HUGE_PAGE = 2 << 20
"""What the processor maps as one where memory is contiguous and aligned to it."""

MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no names for these yet
MADV_COLLAPSE = 25  # Linux 6.1
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000

# CPython holds the interpreter lock during madvise: populate in steps, so that others get a turn.
_STEP = 64 << 20
# What is left to everybody else on the machine.
_RESERVE = 128 << 20


class NotEnoughMemory(KvtierError):
    """A pool asked for more memory than the machine or a limit allows. Nothing was taken."""


def round_up(n: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `n`."""
    return -(-n // unit) * unit


def require(nbytes: int, what: str) -> None:
    """Raise `NotEnoughMemory` unless `nbytes` of memory can be populated now.

    `what` names the asker. Looks at MemAvailable, at the memory cgroups this process is in
    (versions 1 and 2) and at RLIMIT_AS.
    """
    limits = {"the machine's available memory": _meminfo_available()}
    limits |= cgroup_available()
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        limits["the address space limit (ulimit -v)"] = address_space - _mapped_now()
    for name, available in limits.items():
        if available is not None and nbytes + _RESERVE > available:
            raise NotEnoughMemory(
                f"{what}: needs {nbytes:,} bytes, but {name} leaves {max(available, 0):,}, and "
                f"{_RESERVE:,} of these stay free; make the pool smaller or raise the limit"
            )


def anonymous(nbytes: int) -> mmap.mmap:
    """Private zeroed memory, page-aligned, on huge pages where the kernel grants them."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, round_up(max(nbytes, 1), PAGE), flags=flags)
    advise(mapping, mmap.MADV_HUGEPAGE)
    return mapping


class SharedMapping:
    """A file descriptor's memory, mapped shared at an address that suits huge pages.

    The kernel aligns shared mappings only where huge pages for shared memory are switched on
    globally, and most machines leave them off. So address space is reserved with room to spare and
    the file is mapped over the aligned part. `view` is all of it; the memory is unmapped with the
    last reference to the view, or to anything made from it. Raises `OSError`.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._reserve = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=flags)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._reserve))
        self._base = -start % HUGE_PAGE
        _map_over(start + self._base, nbytes, fd)
        self.view = memoryview(self._reserve)[self._base : self._base + nbytes]

    def __len__(self) -> int:
        return len(self.view)

    def madvise(self, advice: int, start: int = 0, length: int | None = None) -> None:
        """As `mmap.madvise`, with `start` counted from the first byte of the view."""
        length = len(self) - start if length is None else length
        self._reserve.madvise(advice, self._base + start, length)


def _map_over(address: int, nbytes: int, fd: int) -> None:
    """Replace reserved address space by a shared mapping of `fd` from its first byte."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    found = libc.mmap(address, nbytes, protection, mmap.MAP_SHARED | MAP_FIXED, fd, 0)
    if found != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


Mapping = mmap.mmap | SharedMapping


def address_of(mapping: SharedMapping) -> int:
    """Of the first byte of its view."""
    return int(np.frombuffer(mapping.view, np.uint8, 1).ctypes.data)


def advise(mapping: Mapping, advice: int) -> bool:
    """Give the kernel a hint about the whole mapping; False where it knows no such hint."""
    try:
        mapping.madvise(advice)
    except OSError:
        return False
    return True


def collapse(mapping: SharedMapping, start: int, nbytes: int) -> bool:
    """Put fresh shared memory on huge pages, whatever the machine's default; False if it won't go.

    `start` is a multiple of `HUGE_PAGE`; a tail shorter than one stays as it is. One page of each
    huge page is made real first (a hole cannot be collapsed); the rest is zeroed by the kernel.
    Worth its time: what lay idle for seconds on scattered small pages was read at 0.3 GB/s the next
    time in a virtual machine, on huge pages at 5 (tens of thousands of cold translations).
    """
    nbytes -= nbytes % HUGE_PAGE
    np.frombuffer(mapping.view, np.uint8, nbytes, start)[::HUGE_PAGE] = 0
    try:
        for at in range(start, start + nbytes, _STEP):
            mapping.madvise(MADV_COLLAPSE, at, min(_STEP, start + nbytes - at))
    except OSError:
        return False
    return True


def populate(mapping: Mapping, start: int, nbytes: int, *, fresh: bool) -> None:
    """Make `nbytes` from `start` (a multiple of the page size) real in this process's page tables.

    `fresh`: the memory is new and nobody else has it mapped. Otherwise its content is kept even
    while another process writes it.
    """
    for at in range(start, start + nbytes, _STEP):
        length = min(_STEP, start + nbytes - at)
        try:
            mapping.madvise(MADV_POPULATE_WRITE, at, length)
        except OSError:
            _touch(mapping, at, length, fresh=fresh)


def huge_bytes(address: int, nbytes: int, smaps: Path = Path("/proc/self/smaps")) -> int:
    """How much of this process's mappings in `[address, address + nbytes)` is on huge pages.

    Walks the page tables of the whole process: for start-up, not for every look.
    """
    found, inside = 0, False
    for line in _lines(smaps):
        name, _, rest = line.partition(" ")
        if name.endswith(":"):
            if inside and name in ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"):
                found += int(rest.split()[0]) * 1024
        else:
            start, _, end = name.partition("-")
            inside = address <= int(start, 16) and int(end, 16) <= address + nbytes
    return found


def memlock_advice(nbytes: int) -> str:
    """What to do when `nbytes` could not be locked: the limit, if it is lower, and how to raise it.

    Whether a driver counts against RLIMIT_MEMLOCK is its own affair (NVIDIA's, on bare Linux, does
    not), so a low limit is no reason to refuse before it has.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    smaller = "make the DRAM tier smaller (dram_bytes, --dram)"
    if limit == resource.RLIM_INFINITY or limit >= nbytes:
        return f"the memory lock limit is not the cause; free memory, or {smaller}"
    return (
        f"the memory lock limit (ulimit -l) is {limit:,} bytes, {nbytes:,} are needed: raise it "
        "(`ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd unit, --ulimit memlock=-1 for "
        f"a container), or {smaller}"
    )


def _touch(mapping: Mapping, at: int, length: int, *, fresh: bool) -> None:
    """Fault pages in one by one, for kernels without MADV_POPULATE_WRITE."""
    memory = mapping.view if isinstance(mapping, SharedMapping) else mapping
    page_heads = np.frombuffer(memory, np.uint8, length, at)[::PAGE]
    if fresh:
        page_heads[:] = 0
    else:
        page_heads.sum()


def _meminfo_available() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _mapped_now() -> int:
    """Address space this process uses already."""
    statm = _lines(Path("/proc/self/statm"))
    return int(statm[0].split()[0]) * resource.getpagesize() if statm else 0


def cgroup_available(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> dict[str, int | None]:
    """What each memory cgroup around this process still grants, by the name of its limit."""
    found: dict[str, int | None] = {}
    for line in _lines(membership):
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":
            base, limit, usage, idle = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            idle = "total_inactive_file"
        else:
            continue
        group = base / path.strip().lstrip("/")
        for level in (group, *group.parents):
            if not level.is_relative_to(base):
                break
            most, used = _number(level / limit), _number(level / usage)
            if most is not None and used is not None:
                reclaimable = _stat(level / "memory.stat", idle)
                found[f"the cgroup limit {level / limit}"] = most - used + reclaimable
    return found


def _stat(path: Path, name: str) -> int:
    for line in _lines(path):
        word, _, value = line.partition(" ")
        if word == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    """The number a control file holds; None for "max" or no such file."""
    text = next(iter(_lines(path)), "")
    return int(text) if text.strip().isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
