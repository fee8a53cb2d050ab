"""What all clients of one sidecar share: the slab, the cache over it, the NVMe store.

All of it runs on the server's one thread; only filling the slab with pages, checksumming and
listing namespaces go to helper threads. Knows no connection and no frame. A *wait* is something
that a client is still owed; it is asked again whenever a tier has news, until it is finished.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import xxhash

from kvtier.index.admission import Admission, Allowance
from kvtier.index.errors import KvtierError
from kvtier.index.namespace import DTYPE_BYTES, BlockLayout
from kvtier.index.policies import DEFAULT_POLICY
from kvtier.index.words import Slots, TierId
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.contracts import Checksums, Signal, Store
from kvtier.tiers.dram import DramSlab
from kvtier.tiers.errors import CapacityTooSmall
from kvtier.tiers.memory import PAGE, round_up
from kvtier.tiers.numa import nearest
from kvtier.tiers.nvme.custody import NamespaceUse
from kvtier.tiers.nvme.health import State
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.tiers.sidecar.wire import WireLayout
from kvtier.tiers.sieve import unlimited
from kvtier.tiers.writeback import WRITEBACK_S

Wait = Callable[[], bool]
"""Answers if it can; True once it has and need not be asked again."""


class LayoutRefused(KvtierError):
    """The sidecar already serves blocks of another shape."""


@dataclass(frozen=True)
class Slab:
    """The memory of one layout and the cache that manages it."""

    layout: BlockLayout
    dram: DramSlab
    cache: TieredCache
    huge_bytes: int
    """How much of the memory was on huge pages when it was made."""


class Backend:
    """Opens the store at once (so that its errors stop the start), the slab at the first layout.

    Raises what `NvmeTier.open` raises. `after_news` is called at the end of every `poll`.
    """

    def __init__(
        self,
        store_path: Path | None,
        *,
        dram_bytes: int,
        nvme_bytes: int,
        codec: str = "raw",
        after_news: Callable[[], None],
        writeback_s: float | None = WRITEBACK_S,
        write_budget_bytes: int | None = None,
        dram_policy: str = DEFAULT_POLICY,
        nvme_admission: str = "all",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.signal = Signal()
        self.slab: Slab | None = None
        self.store: NvmeTier | None = None
        if store_path is not None:
            self.store = NvmeTier.open(
                store_path,
                capacity_bytes=nvme_bytes,
                write_budget_bytes=write_budget_bytes,
                signal=self.signal,
                codec=codec,
            )
        self._dram_bytes = dram_bytes
        self._writeback_s = writeback_s
        self._dram_policy = dram_policy
        self._nvme_bytes = nvme_bytes
        self._nvme_admission = nvme_admission
        self._after_news = after_news
        self._waits: dict[int, Wait] = {}
        self._next_wait = 0
        self._building = asyncio.Lock()
        self._helpers = ThreadPoolExecutor(2, thread_name_prefix="kvtier-sidecar")
        self._loop = asyncio.get_running_loop()
        self._poll_due = False
        self._closed = False
        self._jobs: set[asyncio.Future[int]] = set()
        self.mismatched = 0
        self.signal.listen(self._wake)

    # ---- the slab ---------------------------------------------------------------------------

    async def slab_for(self, wanted: WireLayout) -> Slab:
        """The slab of this layout, made now if there is none.

        Raises `LayoutRefused` if the layout is unknown or there is a slab of another one, and what
        `DramSlab.create` raises.
        """
        try:
            layout = wanted.layout()
        except KvtierError as error:
            raise LayoutRefused(str(error)) from error
        async with self._building:
            if self._closed:
                raise LayoutRefused("this sidecar is stopping; connect again once it is back")
            if self.slab is None:
                self.slab = await self._loop.run_in_executor(self._helpers, self._build, layout)
                self._tick()
            elif self.slab.layout != layout:
                raise LayoutRefused(
                    f"this sidecar serves blocks of {self.slab.layout}, not of {layout}; "
                    f"start a second one on another socket and store"
                )
            return self.slab

    def _build(self, layout: BlockLayout) -> Slab:
        stride = round_up(layout.nbytes, PAGE)
        num_slots = self._dram_bytes // stride
        if num_slots < 1:
            raise CapacityTooSmall(
                f"sidecar: {self._dram_bytes} bytes of DRAM hold no block of {stride} bytes; "
                f"give it more (--dram)"
            )
        dram = DramSlab.create(num_slots, layout.nbytes, node=nearest())
        stores: list[Store] = []
        admission: Admission | None = None
        allowance: Callable[[], Allowance | None] = unlimited
        if self.store is not None:
            if self._nvme_admission == "learned":
                admission = Admission(num_slots, max(1, self._nvme_bytes // layout.nbytes))
                allowance = self.store.allowance
            self.store.describe_elements(DTYPE_BYTES[layout.dtype])
            stores.append(self.store)
        cache = TieredCache(
            layout.block_size,
            [dram],
            stores,
            None,
            self.signal,
            clock=self.clock,
            writeback_s=self._writeback_s,
            policies={TierId.DRAM: self._dram_policy},
            admission=admission,
            allowance=allowance,
        )
        return Slab(layout, dram, cache, dram.huge_bytes())

    def verified(self, slots: Slots, checksums: Checksums) -> "asyncio.Future[int]":
        """How many leading slots hold bytes with these checksums (found on a helper thread)."""
        assert self.slab is not None
        dram = self.slab.dram

        def count() -> int:
            for position, slot in enumerate(slots.tolist()):
                if xxhash.xxh3_64_intdigest(dram.view(slot).data) != int(checksums[position]):
                    return position
            return len(slots)

        job = self._loop.run_in_executor(self._helpers, count)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    def namespaces(self) -> "asyncio.Future[list[NamespaceUse]]":
        """What the store holds of each namespace (read on a helper thread); of a store that is out
        or damaged, nothing."""
        store = self.store

        def read() -> list[NamespaceUse]:
            try:
                return [] if store is None else store.namespaces()
            except (OSError, KvtierError):
                return []

        return self._loop.run_in_executor(self._helpers, read)

    # ---- waiting ----------------------------------------------------------------------------

    def wait(self, wait: Wait) -> int:
        """Ask `wait` again at every news; returns a handle for `forget`."""
        self._next_wait += 1
        self._waits[self._next_wait] = wait
        return self._next_wait

    def forget(self, handle: int) -> None:
        self._waits.pop(handle, None)

    def poll_after(self, delay_s: float) -> None:
        """Poll once more when `delay_s` have passed, news or not (for a wait's deadline)."""
        self._loop.call_later(delay_s, self.poll)

    def freed(self) -> None:
        """Slots came free by a client's doing: whoever waits for room is asked again."""
        if self._waits:
            self._wake()

    def _wake(self) -> None:
        # Called from any thread. Reset before polling, so news during a poll schedules another.
        if not self._poll_due and not self._closed:
            self._poll_due = True
            self._loop.call_soon_threadsafe(self.poll)

    def poll(self) -> None:
        self._poll_due = False
        if self._closed or self.slab is None:
            return
        try:
            self.slab.cache.poll()
            for handle, wait in list(self._waits.items()):
                if handle in self._waits and wait():
                    self.forget(handle)
        finally:
            self._after_news()

    def _tick(self) -> None:
        """Poll as often as the cache asks for, whatever else happens: time may have made it due."""
        self.poll()
        due = None if self._closed or self.slab is None else self.slab.cache.next_due()
        if due is not None:
            self._loop.call_later(max(0.0, due - self.clock()), self._tick)

    # ---- end --------------------------------------------------------------------------------

    async def close(self, drain_s: float) -> None:
        """Write what only DRAM holds down to the store, for at most `drain_s`; close everything.

        No client may be connected any more.
        """
        self._waits.clear()
        await asyncio.gather(*self._jobs)
        async with self._building:
            self._closed = True
        if self.slab is not None:
            await self._loop.run_in_executor(self._helpers, self._write_down, drain_s)
            self.slab.cache.close()
        if self.store is not None:
            self.store.close()
        self._helpers.shutdown()
        if self.slab is not None:
            self.slab.dram.close()

    def _write_down(self, drain_s: float) -> None:
        assert self.slab is not None
        deadline = self.clock() + drain_s
        if self.store is not None:
            self.slab.cache.shed(self.slab.dram.tier, deadline)
        self.slab.cache.drain(deadline)


def flatten(prefix: str, value: object) -> dict[str, int | float]:
    """The numbers inside frozen statistics, named by dotted paths; text is left out.

    A store's state is a number for each state there is: 1 for the one it is in.
    """
    if isinstance(value, State):
        return {f"{prefix}.{state}": int(state is value) for state in State}
    if isinstance(value, int | float):
        return {prefix: int(value) if isinstance(value, bool) else value}
    if is_dataclass(value):
        parts = [(field.name, getattr(value, field.name)) for field in fields(value)]
    elif isinstance(value, dict):
        parts = [(str(key), part) for key, part in value.items()]
    else:
        return {}
    numbers: dict[str, int | float] = {}
    for name, part in parts:
        numbers |= flatten(f"{prefix}.{name}", part)
    return numbers
