"""The DRAM tier's memory: a slab of slots in a `memfd` that other processes can map.

The process that creates a slab owns its slots; a process that was passed the descriptor attaches,
reads and writes the slots it was told of, and allocates nothing. Knows no sockets and no leases.

A slab, from its first byte on (little-endian):

| offset | size | field |
| --- | --- | --- |
| 0 | 8 | magic `KVTSLAB` and a zero byte |
| 8 | 4 | version, 1 |
| 12 | 4 | bytes of a table row, 64 |
| 16 | 8 | num_slots |
| 24 | 8 | block_bytes |
| 32 | 8 | stride: block_bytes rounded up to 4096 |
| 40 | 8 | data_offset: a multiple of 2 MiB behind the table |
| 4096 | 64 * num_slots | slot table, rows as in `kvtier.tiers.pool` |
| data_offset | stride * num_slots | slots |

Whoever attaches refuses another version, and a slab whose numbers do not follow from num_slots and
block_bytes, or that its owner could still shrink (a shrunk mapping kills its readers by SIGBUS).
The table is the owner's: others read it, and believe a row only while they hold the slot.
"""

import fcntl
import mmap
import os
import resource
from dataclasses import dataclass
from struct import Struct

import numpy as np

from kvtier.index.errors import KvtierError
from kvtier.index.words import Slots, TierId
from kvtier.tiers.errors import CapacityTooSmall
from kvtier.tiers.memory import (
    HUGE_PAGE,
    PAGE,
    NotEnoughMemory,
    SharedMapping,
    address_of,
    advise,
    collapse,
    huge_bytes,
    populate,
    require,
    round_up,
)
from kvtier.tiers.numa import prefer
from kvtier.tiers.pool import SLOT_ROW, ArrayPool

MAGIC = b"KVTSLAB\0"
VERSION = 1
_HEADER = Struct("<8sIIQQQQ")
_TABLE_OFFSET = 4096


@dataclass(frozen=True)
class SlabGeometry:
    """Where things lie in a slab. Everything follows from the first two."""

    num_slots: int
    block_bytes: int

    @property
    def stride(self) -> int:
        return round_up(self.block_bytes, PAGE)

    @property
    def table_bytes(self) -> int:
        return self.num_slots * SLOT_ROW.itemsize

    @property
    def data_offset(self) -> int:
        return round_up(_TABLE_OFFSET + self.table_bytes, HUGE_PAGE)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole slab."""
        return self.data_offset + self.num_slots * self.stride

    def header(self) -> bytes:
        return _HEADER.pack(
            MAGIC,
            VERSION,
            SLOT_ROW.itemsize,
            self.num_slots,
            self.block_bytes,
            self.stride,
            self.data_offset,
        )


class DramSlab(ArrayPool):
    """A `HostPool` in shared memory. Made by `create` or `attach`, never directly.

    `fd` may be passed to another process. `array`: uint8 `[num_slots, stride]`.
    """

    def __init__(
        self, fd: int, mapping: SharedMapping, geometry: SlabGeometry, *, owned: bool, debug: bool
    ) -> None:
        self.fd = fd
        self.geometry = geometry
        self.owned = owned
        data = np.frombuffer(
            mapping.view, np.uint8, geometry.num_slots * geometry.stride, geometry.data_offset
        )
        super().__init__(
            TierId.DRAM,
            geometry.num_slots,
            geometry.block_bytes,
            debug=debug,
            array=data.reshape(geometry.num_slots, geometry.stride),
            table=np.frombuffer(mapping.view, SLOT_ROW, geometry.num_slots, _TABLE_OFFSET),
        )

    @classmethod
    def create(
        cls,
        num_slots: int,
        block_bytes: int,
        *,
        populate: bool = True,
        node: int | None = None,
        debug: bool = False,
    ) -> "DramSlab":
        """A new slab, its pages real at once unless `populate` is false.

        `node`: where its memory should lie (`kvtier.tiers.numa`); None leaves it to the kernel.

        Raises `CapacityTooSmall` for less than one slot, `NotEnoughMemory` where the machine, a
        memory cgroup or a resource limit does not have the room; nothing is left behind.
        """
        if num_slots < 1 or block_bytes < 1:
            raise CapacityTooSmall(
                f"dram slab: {num_slots} slots of {block_bytes} bytes hold nothing; "
                "give the tier room for at least one block"
            )
        geometry = SlabGeometry(num_slots, block_bytes)
        what = f"dram slab of {num_slots} blocks"
        require(geometry.nbytes, what)
        file_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if file_limit != resource.RLIM_INFINITY and geometry.nbytes > file_limit:
            raise NotEnoughMemory(
                f"{what}: needs {geometry.nbytes:,} bytes, but the file size limit (ulimit -f) is "
                f"{file_limit:,}; raise it or make the slab smaller"
            )
        fd = os.memfd_create("kvtier-dram", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, geometry.nbytes)
            # No guest may add a seal of its own, such as one against writing.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            mapping = _map(fd, geometry, what)
            prefer(address_of(mapping), geometry.nbytes, node)
            if populate:
                _populate(mapping, geometry, fresh=True)
        except BaseException:
            os.close(fd)
            raise
        header = geometry.header()
        mapping.view[: len(header)] = header
        return cls(fd, mapping, geometry, owned=True, debug=debug)

    @classmethod
    def attach(cls, fd: int, *, populate: bool = False) -> "DramSlab":
        """Map a slab that another process made; takes over `fd`, which is closed on failure too.

        `populate` enters every page into this process's page tables, so that no copy faults.
        Raises `KvtierError` if `fd` is no slab of this version or may still shrink.
        """
        try:
            geometry = _read_geometry(fd)
            mapping = _map(fd, geometry, "dram slab")
            if populate:
                _populate(mapping, geometry, fresh=False)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, mapping, geometry, owned=False, debug=False)

    def alloc(self, n: int) -> Slots:
        """As `SlotPool.alloc`. The creator's alone: raises `PermissionError` when attached."""
        self._must_own()
        return super().alloc(n)

    def free(self, slots: Slots) -> None:
        """As `SlotPool.free`. The creator's alone: raises `PermissionError` when attached."""
        self._must_own()
        super().free(slots)

    def _must_own(self) -> None:
        if not self.owned:
            raise PermissionError("dram slab: only the process that made it gives out its slots")

    def huge_bytes(self) -> int:
        """How much of the slab this process has on huge pages. Takes long: for start-up."""
        if self.fd < 0:
            return 0
        start = self.array.ctypes.data - self.geometry.data_offset
        return huge_bytes(start, self.geometry.nbytes)

    def close(self) -> None:
        """Let go of the memory and the descriptor. Idempotent.

        The mapping goes with the last view of it, so a copy in flight never touches unmapped
        memory; the memory itself goes when no process maps it any more.
        """
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self.array = np.empty((0, self.geometry.stride), np.uint8)
        self._table = np.empty(0, SLOT_ROW)
        self._num_free = 0


def _map(fd: int, geometry: SlabGeometry, what: str) -> SharedMapping:
    try:
        mapping = SharedMapping(fd, geometry.nbytes)
    except OSError as error:
        raise NotEnoughMemory(
            f"{what}: {geometry.nbytes:,} bytes cannot be mapped ({error.strerror}); "
            "make the slab smaller or raise the limit"
        ) from error
    advise(mapping, mmap.MADV_HUGEPAGE)
    # A forked child has no business with the slots, and a registered page must not be copied.
    advise(mapping, mmap.MADV_DONTFORK)
    return mapping


def _populate(mapping: SharedMapping, geometry: SlabGeometry, *, fresh: bool) -> None:
    head = round_up(_TABLE_OFFSET + geometry.table_bytes, PAGE)
    populate(mapping, 0, head, fresh=fresh)
    nbytes = geometry.nbytes - geometry.data_offset
    if fresh:
        collapse(mapping, geometry.data_offset, nbytes)
    populate(mapping, geometry.data_offset, nbytes, fresh=fresh)


def _read_geometry(fd: int) -> SlabGeometry:
    """Raises `KvtierError` unless `fd` holds a whole, unshrinkable slab of this version."""
    header = os.pread(fd, _HEADER.size, 0)
    if len(header) < _HEADER.size or header[:8] != MAGIC:
        raise KvtierError("dram slab: the descriptor holds no slab; is the peer a kvtier sidecar?")
    _, version, _, num_slots, block_bytes, _, _ = _HEADER.unpack(header)
    if version != VERSION:
        raise KvtierError(
            f"dram slab: version {version}, this program reads {VERSION}; run the same kvtier "
            "on both sides"
        )
    geometry = SlabGeometry(num_slots, block_bytes)
    if min(num_slots, block_bytes) < 1 or header != geometry.header():
        raise KvtierError("dram slab: its header contradicts itself; restart the sidecar")
    if os.fstat(fd).st_size < geometry.nbytes:
        raise KvtierError(
            f"dram slab: {os.fstat(fd).st_size:,} bytes, its header speaks of {geometry.nbytes:,}; "
            "restart the sidecar"
        )
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise KvtierError(f"dram slab: not a memfd ({error.strerror})") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise KvtierError("dram slab: not sealed against shrinking; restart the sidecar")
    return geometry
