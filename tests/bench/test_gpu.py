"""How the GPU benches time, on a CUDA that only keeps a log: the order of calls, and of what."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from bench import gpu
from bench.gpu import Cuda


class FakeCuda:
    """Stands for `torch.cuda`. Time passes by what launches say they take."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = 0.0
        self.capturing = False
        fake = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                fake.log.append("event")
                self.at = fake.now

            def elapsed_time(self, end: "Event") -> float:
                return 1e3 * (end.at - self.at)

        class Graph:
            content: Callable[[], None]

            def replay(self) -> None:
                self.content()

        self.Event = Event
        self.CUDAGraph = Graph

    @contextmanager
    def graph(self, graph: object) -> Iterator[None]:
        begun = len(self.log)
        self.capturing = True
        yield
        self.capturing = False
        (captured,) = self.log[begun:]
        graph.content = lambda: self.launch(captured.removeprefix("captured "))  # type: ignore[attr-defined]

    def launch(self, name: str) -> None:
        if self.capturing:
            self.log.append(f"captured {name}")
            return
        self.log.append(name)
        self.now += {"slow": 3.0, "fast": 1.0}[name]

    def synchronize(self) -> None:
        if self.capturing:
            raise RuntimeError("a capture waits for nobody")
        self.log.append("wait")

    def _sleep(self, cycles: int) -> None:
        self.log.append("idle")
        self.cycles = cycles

    def set_device(self, device: torch.device) -> None:
        self.device = device

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(L2_cache_size=1 << 20)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(gpu, "_WARM_S", 0.0)
    monkeypatch.setattr(Cuda, "_cool", lambda self: fake.log.append("flush"))
    return fake


def test_launches_are_timed_by_turns_each_from_a_flushed_cache_behind_an_idling_kernel(
    cuda: FakeCuda,
) -> None:
    device = Cuda(torch.device("cpu"))
    calls = [lambda: cuda.launch("slow"), lambda: cuda.launch("fast")]
    launches = device.prepare(calls)
    cuda.log.clear()
    slow, fast = device.measure(launches, 1e-9)
    assert set(slow.seconds) == {3.0} and set(fast.seconds) == {1.0}
    assert len(slow.seconds) == len(fast.seconds) == gpu._REPEATS[0]

    timed = cuda.log[cuda.log.index("idle") :]
    assert timed[0] == "idle" and timed[-1] == "wait" and timed.count("idle") == 1
    steps = [timed[i : i + 4] for i in range(1, len(timed) - 1, 4)]
    assert all(step[0] == "flush" and step[1] == step[3] == "event" for step in steps)
    names = [step[2] for step in steps]
    assert names[:8] == ["slow", "fast", "fast", "slow"] * 2
    assert cuda.cycles == int(20 * gpu.HOLD_S * gpu._CYCLES_S)


def test_a_call_is_warmed_up_before_it_is_captured_and_not_run_in_between(cuda: FakeCuda) -> None:
    Cuda(torch.device("cpu")).prepare([lambda: cuda.launch("fast")])
    assert cuda.log[-4:] == ["fast", "fast", "wait", "captured fast"]


def test_repeats_fill_the_time_within_bounds() -> None:
    assert [gpu._repeats(1.0, once) for once in (0.0, 1e-4, 0.02, 1.0)] == [100, 100, 50, 10]
