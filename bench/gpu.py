"""What the GPU benches need of a GPU: times by events, a flushed L2, graphs; and a stand-in.

Launches are queued some at a time behind an idling kernel, so that a host that is late between an
event and its launch (Python's lock, another thread) is not mistaken for a slow kernel.

The stand-in runs the same calls once on the CPU, so that a test executes a bench wherever there is
no GPU; its times mean nothing. Knows nothing of what is measured.

    python -m bench.gpu        says which card there is, as one JSON line
"""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
import triton
from torch import Tensor

from bench.harness import Sample, emit, measure

Call = Callable[[], object]

_QUERY = (
    "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit,"
    "temperature.gpu,utilization.gpu,memory.used"
)
_REPEATS = (10, 100)  # at least, at most
_WARM_S = 0.3
_QUEUED = 20
"""Launches that stand behind one idling kernel."""

_CYCLES_S = 2e9
"""Cycles a second, at most; a slower clock idles longer."""

HOLD_S = 1e-4


class NoGpu(Exception):
    """There is none that this Python can use; the message says why, and the cure if there is one.

    `is_broken`: a card is there all the same.
    """

    def __init__(self, message: str, *, is_broken: bool = False) -> None:
        super().__init__(message)
        self.is_broken = is_broken


class Gpu(Protocol):
    """Where a bench runs. `dry`: on the stand-in, so shapes must be tiny."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dry(self) -> bool: ...

    def free_bytes(self) -> int:
        """Device memory that can still be taken."""
        ...

    def prepare(self, calls: Sequence[Call]) -> list[Call]:
        """Each call's launches as one graph. No other thread may use the device meanwhile.

        What a call allocates must not depend on values, and it must not wait for the device.
        """
        ...

    def measure(
        self, launches: Sequence[Call], seconds: float, *, hold_s: float = HOLD_S
    ) -> list[Sample]:
        """Times of what `prepare` gave, in the order A B B A, each from a flushed L2.

        Repeats 10 to 100 times, for about `seconds` in all. `hold_s`: what the host may take to
        queue one launch.
        """
        ...

    def interleave(self, calls: Sequence[Call], seconds: float) -> list[Sample]:
        """`prepare` and `measure`."""
        ...

    def together(self, jobs: Sequence[Call]) -> None:
        """Start each job's work on a stream of its own; return once all of it is done."""
        ...


class Cuda:
    """A CUDA device, the only one this process uses."""

    dry = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.set_device(device)
        cache = int(getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0))
        # Read, not written: dirty lines would be written back on the measured kernel's time.
        self._flush = torch.zeros(max(2 * cache, 128 << 20) // 4, device=self.device)
        self._sink = torch.zeros((), device=self.device)
        self._streams: list[torch.cuda.Stream] = []
        begin = time.monotonic()
        while time.monotonic() < begin + _WARM_S:  # clocks are low on an idle card
            self._cool()
            torch.cuda.synchronize()

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def prepare(self, calls: Sequence[Call]) -> list[Call]:
        return [_capture(call).replay for call in calls]

    def measure(
        self, launches: Sequence[Call], seconds: float, *, hold_s: float = HOLD_S
    ) -> list[Sample]:
        repeats = _repeats(seconds, sum(self._once(launch) for launch in launches))
        spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in launches]
        forth = range(len(launches))
        order = [which for turn in range(repeats) for which in (forth, forth[::-1])[turn % 2]]
        for start in range(0, len(order), _QUEUED):
            queued = order[start : start + _QUEUED]
            torch.cuda._sleep(int(len(queued) * hold_s * _CYCLES_S))  # type: ignore[no-untyped-call]
            for which in queued:
                spans[which].append(self._launch(launches[which]))
            torch.cuda.synchronize()
        return [
            Sample(tuple(begin.elapsed_time(end) / 1e3 for begin, end in each)) for each in spans
        ]

    def interleave(self, calls: Sequence[Call], seconds: float) -> list[Sample]:
        return self.measure(self.prepare(calls), seconds)

    def together(self, jobs: Sequence[Call]) -> None:
        while len(self._streams) < len(jobs):
            self._streams.append(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
        for stream, job in zip(self._streams, jobs, strict=False):
            with torch.cuda.stream(stream):
                job()
        for stream in self._streams[: len(jobs)]:
            stream.synchronize()

    def _cool(self) -> None:
        torch.sum(self._flush, dim=0, out=self._sink)

    def _launch(self, launch: Call) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._cool()
        begin.record()
        launch()
        end.record()
        return begin, end

    def _once(self, launch: Call) -> float:
        """Seconds of a launch, the flush included."""
        begin = time.perf_counter()
        for _ in range(3):
            self._launch(launch)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / 3


def _repeats(seconds: float, once: float) -> int:
    least, most = _REPEATS
    return max(least, min(most, int(seconds / max(once, 1e-6))))


def _capture(call: Call) -> torch.cuda.CUDAGraph:
    for _ in range(2):  # compiles, and grows workspaces, outside the graph
        call()
    torch.cuda.synchronize()
    graph: torch.cuda.CUDAGraph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


class StandIn:
    """A CPU that runs what a GPU would, with Triton's kernels in the interpreter."""

    dry = True
    device = torch.device("cpu")

    def free_bytes(self) -> int:
        return 64 << 20

    def prepare(self, calls: Sequence[Call]) -> list[Call]:
        return list(calls)

    def measure(
        self, launches: Sequence[Call], seconds: float, *, hold_s: float = HOLD_S
    ) -> list[Sample]:
        return [measure(launch, 1, warmup=0) for launch in launches]

    def interleave(self, calls: Sequence[Call], seconds: float) -> list[Sample]:
        return self.measure(self.prepare(calls), seconds)

    def together(self, jobs: Sequence[Call]) -> None:
        for job in jobs:
            job()


def open_gpu(*, dry: bool) -> Gpu:
    """Raises `NoGpu`; with `dry` only if Triton would compile what the CPU is to run."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if dry:
        if not interpreted:
            raise NoGpu("a dry run needs TRITON_INTERPRET=1 in the environment", is_broken=True)
        return StandIn()
    if interpreted:
        raise NoGpu("TRITON_INTERPRET is set: kernels would not be compiled", is_broken=True)
    if torch.cuda.is_available():
        return Cuda(torch.device("cuda", torch.cuda.current_device()))
    if not Path("/dev/nvidiactl").exists():
        raise NoGpu("no GPU on this machine")
    if torch.version.cuda is None:
        raise NoGpu(
            f"a GPU is there, but torch {torch.__version__} is a CPU build: install the CUDA build "
            "of that version into this environment, or name a Python that has one (PYTHON=...)",
            is_broken=True,
        )
    raise NoGpu(
        f"a GPU is there, but torch {torch.__version__} cannot use it: its CUDA "
        f"{torch.version.cuda} may be newer than the driver",
        is_broken=True,
    )


def describe() -> dict[str, object]:
    """The card as found, and the versions. Changes none of its settings."""
    found: dict[str, object] = {"torch": torch.__version__, "triton": triton.__version__}
    found |= {"cuda": torch.version.cuda}
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "name": card.name,
            "memory_gib": round(card.total_memory / (1 << 30), 1),
            "sms": card.multi_processor_count,
            "capability": f"{card.major}.{card.minor}",
        }
    try:
        told = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return found
    named = zip(_QUERY.split(","), (each.strip() for each in told.split(",")), strict=False)
    return found | {name.replace(".", "_"): value for name, value in named}


def same_rows(got: Tensor, want: Tensor, tolerance: float) -> float:
    """Largest difference. Raises RuntimeError past `tolerance`: wrong results measure nothing."""
    error = float((got.double() - want.double()).abs().max())
    if not error <= tolerance:
        raise RuntimeError(f"off by {error}, {tolerance} allowed")
    return error


def main() -> None:
    try:
        open_gpu(dry=False)
    except NoGpu as error:
        emit({"usable": False, "broken": error.is_broken, "why": str(error), "card": describe()})
        return
    emit({"usable": True, "broken": False, "why": "", "card": describe()})


if __name__ == "__main__":
    main()
