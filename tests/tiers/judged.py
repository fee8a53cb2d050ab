"""Stand-ins that tell the simulated device what the host and other devices do. No tests here."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

from kvtier.index.words import Slots, TierId
from kvtier.tiers.contracts import Bytes
from kvtier.tiers.device import Event
from kvtier.tiers.pool import ArrayPool
from kvtier.tiers.simulated import SimDevice, places

T = TypeVar("T")


class JudgedPool(ArrayPool):
    """A pool whose freed slots are poisoned on the spot: nobody may have business with them."""

    def __init__(
        self,
        sim: SimDevice,
        tier: TierId,
        num_slots: int,
        block_bytes: int,
        *,
        array: Bytes | None = None,
    ) -> None:
        self._sim = sim
        super().__init__(tier, num_slots, block_bytes, debug=True, array=array)

    def _poison(self, slots: Slots) -> None:
        self._sim.touch("poison", writes=places(self, slots))
        super()._poison(slots)


class SimFuture(Future[T]):
    """A future that runs the simulation while it is waited for."""

    event: Event

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.event.wait(timeout)
        return super().exception(0.0)


class SimWorker(Executor):
    """A thread that is a stream of the simulation: one job after the other, when it is picked."""

    def __init__(self, sim: SimDevice, name: str) -> None:
        self._sim = sim
        self._name = f"worker {name}"

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> SimFuture[T]:
        future: SimFuture[T] = SimFuture()
        job = partial(_work, future, partial(fn, *args, **kwargs))
        future.event = self._sim.schedule("job", job, stream=self._name)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._sim.record(self._name).wait(None)


def _work(future: SimFuture[T], job: Callable[[], T]) -> None:
    try:
        result = job()
    except Exception as error:  # noqa: BLE001 - the future's owner asks for it
        future.set_exception(error)
    else:
        future.set_result(result)
