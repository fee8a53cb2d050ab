"""Many small copies in one call: `cudaMemcpyBatchAsync`, from CUDA 12.8 on.

One `cudaMemcpyAsync` costs some 6 µs of a host thread (DualPath, arXiv 2602.21548, 5 to 7 µs), in
which a link of 50 GB/s carries 300 KB; an entry of a batch costs some 0.6 µs, 33 KB (LMCache's
copy-path design document: 0.6 µs, break-even near 34 KB on an H200). So runs of blocks below
`BATCHED_BELOW` go in one batch, larger ones by calls of their own. Below 33 KB a gather kernel
would do better still; blocks of a model are larger.

Order within a batch is undefined, so no entry may depend on another. The source is read in stream
order. Knows no pools, and nothing of torch.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

BATCHED_BELOW = 300_000
"""Bytes: 6 µs at 50 GB/s."""

_FIRST_VERSION = 12080  # has the call
_LEAN_VERSION = 13000  # has it without `failIdx`
_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_NOT_HERE = (36, 801)  # cudaErrorCallRequiresNewerDriver, cudaErrorNotSupported


class Span(NamedTuple):
    """`nbytes` from one address to another."""

    target: int
    source: int
    nbytes: int


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """`cudaMemcpyAttributes`. The hints are for managed and pageable memory only."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", _Location),
        ("dstLocHint", _Location),
        ("flags", ctypes.c_uint),
    )


class Library(Protocol):
    """The part of `libcudart` that is used."""

    cudaMemcpyBatchAsync: Callable[..., int]
    cudaRuntimeGetVersion: Callable[..., int]
    cudaDriverGetVersion: Callable[..., int]
    cudaGetLastError: Callable[..., int]


class BatchCopy:
    """Copies in batches. Call it with the device made current."""

    def __init__(self, library: Library, version: int) -> None:
        self._copy = library.cudaMemcpyBatchAsync
        self._copy.restype = ctypes.c_int  # type: ignore[attr-defined]
        self._clear = library.cudaGetLastError
        self._has_fail_index = version < _LEAN_VERSION

    @classmethod
    def probe(cls, name: str, load: Callable[[str], Any] = ctypes.CDLL) -> "BatchCopy | None":
        """The call in the runtime library `name`; None where there is no such library or call, or
        the driver is older than the call: a runtime runs on drivers of its whole major version."""
        try:
            library = load(name)
            runtime, driver = ctypes.c_int(0), ctypes.c_int(0)
            if (
                library.cudaRuntimeGetVersion(ctypes.byref(runtime))
                or library.cudaDriverGetVersion(ctypes.byref(driver))
                or min(runtime.value, driver.value) < _FIRST_VERSION
                or not hasattr(library, "cudaMemcpyBatchAsync")
            ):
                return None
        except (OSError, AttributeError):
            return None
        return cls(library, runtime.value)

    def __call__(self, spans: Sequence[Span], stream: int) -> bool:
        """Queue the copies of `spans` on a CUDA stream (its handle; not the legacy stream, 0).

        False, with nothing queued, where this machine turns out not to have the call. Raises
        `RuntimeError` with CUDA's number where it refuses; some may have been queued.
        """
        n = len(spans)
        if not n:
            return True
        pointers, sizes = ctypes.c_void_p * n, ctypes.c_size_t * n
        attributes, first = _Attributes(srcAccessOrder=_STREAM_ORDER), ctypes.c_size_t(0)
        fail_index = ctypes.c_size_t(0)
        code = self._copy(
            pointers(*(span.target for span in spans)),
            pointers(*(span.source for span in spans)),
            sizes(*(span.nbytes for span in spans)),
            ctypes.c_size_t(n),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            *((ctypes.byref(fail_index),) if self._has_fail_index else ()),
            ctypes.c_void_p(stream),
        )
        if code == 0:
            return True
        self._clear()  # or torch's next look at the thread's last error would blame a kernel
        if code not in _NOT_HERE:
            raise RuntimeError(f"cudaMemcpyBatchAsync: CUDA error {code} for {n} copies")
        return False
