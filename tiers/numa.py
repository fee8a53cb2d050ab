"""Host memory on the right node of a machine that has several: near the GPU, or near the process.

A copy engine reads memory of another socket at the speed of the link between the sockets. So the
slab is asked for on the node that the GPU hangs on; where there is no GPU (a sidecar), on the node
whose processors this process may use, if they are all of one. It is a preference: a node that is
full lends from the others. Where there is one node, or the kernel does not know such things,
nothing happens. Knows no slots. libnuma is not needed: `mbind` is one system call (mbind(2)).
"""

import ctypes
import os
import platform
from collections.abc import Callable, Iterable
from pathlib import Path

SYSFS = Path("/sys")
MPOL_PREFERRED = 1

# Numbers of the system call by processor; there is no libc function for it.
_MBIND = {"x86_64": 237, "aarch64": 235}

Mbind = Callable[[int, int, int, int], int]
"""`(address, nbytes, mode, mask of nodes)`; 0, or the error number."""


def parse_list(text: str) -> list[int]:
    """The kernel's "0-2,5" as numbers."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def nodes(sysfs: Path = SYSFS) -> list[int]:
    """Nodes that have memory; empty where the kernel does not say."""
    return parse_list(_read(sysfs / "devices/system/node/has_memory"))


def node_of_gpu(pci_address: str, sysfs: Path = SYSFS) -> int | None:
    """The node that a PCI device ("0000:3b:00.0") hangs on; None if the firmware does not say."""
    text = _read(sysfs / "bus/pci/devices" / pci_address.lower() / "numa_node").strip()
    return int(text) if text.isdigit() else None


def node_of_processors(processors: Iterable[int], sysfs: Path = SYSFS) -> int | None:
    """The node that all of these processors belong to; None if there is no such one."""
    wanted = set(processors)
    for node in nodes(sysfs):
        if wanted <= set(parse_list(_read(sysfs / f"devices/system/node/node{node}/cpulist"))):
            return node
    return None


def nearest(pci_address: str | None = None, sysfs: Path = SYSFS) -> int | None:
    """Where memory should lie: near the GPU, or near this process; None if it does not matter."""
    if len(nodes(sysfs)) < 2:
        return None
    near = None if pci_address is None else node_of_gpu(pci_address, sysfs)
    return near if near is not None else node_of_processors(os.sched_getaffinity(0), sysfs)


def mbind(address: int, nbytes: int, mode: int, mask: int) -> int:
    """The system call, of nodes 0 to 62. Returns 0 or the error number; ENOSYS where unknown."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return 38
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    nodemask = ctypes.c_ulong(mask)
    arguments = (
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(mode),
        ctypes.byref(nodemask),
        ctypes.c_ulong(64),  # the kernel takes one less
        ctypes.c_ulong(0),
    )
    return 0 if libc.syscall(*arguments) == 0 else ctypes.get_errno()


def prefer(address: int, nbytes: int, node: int | None, call: Mbind = mbind) -> bool:
    """Ask for pages of `[address, address + nbytes)`, none of them real yet, on `node`.

    `address` is a multiple of the page size. False where the kernel does not do it (None and other
    machines included): memory then comes from where it is touched, as it always did.
    """
    if node is None or not 0 <= node < 63:
        return False
    return call(address, nbytes, MPOL_PREFERRED, 1 << node) == 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
