"""Which node memory should lie on, on machines that we make up, and the real call on this one."""

import os
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtier.tiers import dram, numa
from kvtier.tiers.dram import DramSlab
from kvtier.tiers.memory import PAGE, anonymous

GPU = "0000:3b:00.0"
Machine = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A sysfs of nodes with these processors each, and a GPU on `gpu_node`."""

    def make(*processors: str, gpu_node: str | None = None) -> Path:
        node_root = tmp_path / "devices/system/node"
        node_root.mkdir(parents=True)
        last = len(processors) - 1
        (node_root / "has_memory").write_text(f"0-{last}\n" if last else "0\n")
        for number, cpulist in enumerate(processors):
            (node_root / f"node{number}").mkdir()
            (node_root / f"node{number}/cpulist").write_text(cpulist + "\n")
        if gpu_node is not None:
            device = tmp_path / "bus/pci/devices" / GPU
            device.mkdir(parents=True)
            (device / "numa_node").write_text(gpu_node + "\n")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0\n", [0]), ("0-2,5", [0, 1, 2, 5]), ("", []), ("\n", []), ("1,3-4\n", [1, 3, 4])],
)
def test_lists_of_the_kernel_are_read(text: str, numbers: list[int]) -> None:
    assert numa.parse_list(text) == numbers


def test_memory_lies_near_the_gpu_wherever_the_process_runs(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sysfs = machine("0-3,8-11", "4-7", gpu_node="1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert numa.nodes(sysfs) == [0, 1]
    assert numa.nearest(GPU, sysfs) == 1
    assert numa.nearest(GPU.upper(), sysfs) == 1
    assert numa.nearest(None, sysfs) == 0


@pytest.mark.parametrize(("processors", "node"), [({0, 9}, 0), ({5}, 1), ({3, 4}, None)])
def test_where_the_firmware_does_not_say_it_lies_near_the_process(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, processors: set[int], node: int | None
) -> None:
    sysfs = machine("0-3,8-11", "4-7", gpu_node="-1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: processors)
    assert numa.nearest(GPU, sysfs) == node
    assert numa.nearest("0000:00:00.0", sysfs) == node


def test_on_one_node_and_where_nothing_is_known_it_does_not_matter(
    machine: Machine, tmp_path: Path
) -> None:
    assert numa.nearest(GPU, machine("0-3", gpu_node="0")) is None
    assert numa.nearest(None, tmp_path / "nowhere") is None


def test_the_call_names_the_node_and_a_refusal_is_no_error() -> None:
    calls: list[tuple[int, ...]] = []

    def call(*arguments: int) -> int:
        calls.append(arguments)
        return len(calls) - 1

    assert numa.prefer(4096, 100, 5, call)
    assert not numa.prefer(4096, 100, 5, call)
    assert calls == [(4096, 100, numa.MPOL_PREFERRED, 1 << 5)] * 2
    assert not numa.prefer(4096, 100, None, call) and not numa.prefer(4096, 100, 63, call)
    assert len(calls) == 2


def test_a_slab_asks_before_its_pages_are_real(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int | None]] = []

    def slabs() -> set[str]:
        """Those of other tests may not have been collected yet."""
        return {each for each in os.listdir("/proc/self/fd") if is_slab(each)}

    def is_slab(fd: str) -> bool:
        try:
            return "kvtier-dram" in os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return False

    def prefer(address: int, nbytes: int, node: int | None) -> bool:
        (fd,) = slabs() - before
        asked.append((os.fstat(int(fd)).st_blocks, nbytes, node))
        assert address % PAGE == 0
        return True

    other = DramSlab.create(3, 5000)
    before = slabs()
    monkeypatch.setattr(dram, "prefer", prefer)
    slab = DramSlab.create(3, 5000, node=1)
    assert asked == [(0, slab.geometry.nbytes, 1)]
    slab.close()
    other.close()


def test_the_kernel_takes_the_real_call_and_the_memory_is_whole() -> None:
    """MPOL_PREFERRED with node 0, which every machine has."""
    mapping = anonymous(8 * PAGE)
    array = np.frombuffer(mapping, np.uint8)
    error = numa.mbind(array.ctypes.data, len(mapping), numa.MPOL_PREFERRED, 1)
    if platform.machine() not in ("x86_64", "aarch64") or error in (1, 38):
        pytest.skip(f"no mbind here: {os.strerror(error)}")
    assert error == 0
    assert numa.mbind(array.ctypes.data + 1, PAGE, numa.MPOL_PREFERRED, 1) == 22  # no page border
    array[:] = 7
    assert (array == 7).all()
    slab = DramSlab.create(2, 5000, node=0)
    assert (
        "prefer:0" in numa_maps(address_of_slab(slab)) or not Path("/proc/self/numa_maps").exists()
    )
    slab.close()


def address_of_slab(slab: DramSlab) -> int:
    return slab.array.ctypes.data - slab.geometry.data_offset


def numa_maps(address: int) -> str:
    path = Path("/proc/self/numa_maps")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line for line in lines if int(line.split()[0], 16) == address), "")
