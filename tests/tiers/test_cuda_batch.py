"""The arguments of CUDA's batched copy, against a library that writes them down."""

import ctypes
from typing import Any

import pytest
import torch

from kvtier.tiers.cuda_batch import BATCHED_BELOW, BatchCopy, Span
from kvtier.tiers.cuda_runtime import TorchRuntime
from tests.tiers.test_cuda import gpu

SPANS = (Span(1000, 5000, 64), Span(2000, 7000, 32), Span(3000, 6000, 96))


class Call:
    """A C function: counts its calls, keeps what it was given, answers `code`."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.given: list[tuple[Any, ...]] = []

    def __call__(self, *given: Any) -> int:
        self.given.append(given)
        return self.code


class FakeLibrary:
    def __init__(self, version: int, code: int = 0, driver: int = 13000) -> None:
        self.cudaMemcpyBatchAsync = Call(code)
        self.cudaGetLastError = Call(code)
        self.version = version
        self.driver = driver

    def cudaRuntimeGetVersion(self, out: Any) -> int:
        out._obj.value = self.version
        return 0

    def cudaDriverGetVersion(self, out: Any) -> int:
        out._obj.value = self.driver
        return 0


def probed(library: object) -> BatchCopy | None:
    return BatchCopy.probe("libcudart.so.X", lambda name: library)


@pytest.mark.parametrize(("version", "num_arguments"), [(12080, 9), (12090, 9), (13000, 8)])
def test_all_copies_go_in_one_call_each_with_its_addresses_and_size(
    version: int, num_arguments: int
) -> None:
    """CUDA 13 takes one argument less: the number of the copy that failed."""
    library = FakeLibrary(version)
    batch = probed(library)
    assert batch is not None
    batch(SPANS, 0xABC)
    (given,) = library.cudaMemcpyBatchAsync.given
    assert len(given) == num_arguments
    targets, sources, sizes, count, attributes, first, num_attributes = given[:7]
    assert [(t, s, n) for t, s, n in zip(targets, sources, sizes, strict=True)] == list(SPANS)
    assert (count.value, first._obj.value, num_attributes.value) == (3, 0, 1)
    assert attributes._obj.srcAccessOrder == 1  # a source is read when its stream comes to it
    assert attributes._obj.flags == 0 and ctypes.sizeof(attributes._obj) == 24
    assert given[-1].value == 0xABC


def test_nothing_to_copy_is_no_call() -> None:
    library = FakeLibrary(13000)
    batch = probed(library)
    assert batch is not None
    batch([], 1)
    assert library.cudaMemcpyBatchAsync.given == []


def test_a_refusal_is_an_error_with_its_number() -> None:
    library = FakeLibrary(12080, code=1)
    batch = probed(library)
    assert batch is not None
    with pytest.raises(RuntimeError, match="CUDA error 1 for 3 copies"):
        batch(SPANS, 1)
    assert len(library.cudaGetLastError.given) == 1, "nobody else is blamed for it"


@pytest.mark.parametrize("code", [36, 801])
def test_a_driver_that_has_no_such_call_says_so_and_leaves_no_error_behind(code: int) -> None:
    library = FakeLibrary(12080, code=code)
    batch = probed(library)
    assert batch is not None and not batch(SPANS, 1)
    assert len(library.cudaGetLastError.given) == 1


def test_without_the_call_there_is_none() -> None:
    assert probed(FakeLibrary(12070)) is None
    assert probed(FakeLibrary(12080, driver=12040)) is None, "a newer runtime on an older driver"
    assert probed(object()) is None
    assert BatchCopy.probe("libno_such_library.so.0") is None


@gpu
@pytest.mark.parametrize("nbytes", [BATCHED_BELOW // 4, 2 * BATCHED_BELOW])
def test_small_and_large_copies_bring_the_same_bytes(nbytes: int) -> None:
    runtime = TorchRuntime(0)
    source = torch.randint(0, 256, (7, nbytes), dtype=torch.uint8).pin_memory()
    target = torch.zeros(7, nbytes, dtype=torch.uint8, device="cuda:0")
    queue = runtime.stream(urgent=True)
    runtime.compute().synchronize()
    order = (3, 0, 6, 1, 5, 2, 4)
    runtime.copy(queue, [(target[to : to + 1], source[at : at + 1]) for at, to in enumerate(order)])
    queue.synchronize()
    assert torch.equal(target.cpu()[list(order)], source)
