"""Pins, expiry and deletion: what operators say about blocks, on any thread; and what is due.

`Custody` has the verbs. `Custodian` carries them out on the tier's loop, and removes what has
expired when its time has come. Neither knows a table: `orders.py` says what an order does.

A verb's `keys` are consecutive blocks of one branch. What holds blocks (`pin`) holds them and all
they hang off; what removes blocks (`expire`, `forget`) removes them and all that hangs off them.
Reads that have begun keep their bytes.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from kvtier.index.errors import KvtierError
from kvtier.index.words import BlockKey
from kvtier.tiers.contracts import Signal
from kvtier.tiers.errors import PinRefused, StoreBusy, StoreCorrupt
from kvtier.tiers.nvme.catalogue import SWEEP_STEPS, Catalogue, Change, Outcome
from kvtier.tiers.nvme.core import Core
from kvtier.tiers.nvme.edits import FORGOTTEN
from kvtier.tiers.nvme.health import Fault
from kvtier.tiers.nvme.orders import DeleteNamespace, Expire, Order, Pin, Unpin, UnpinLabel

Found = TypeVar("Found")

LABEL_BYTES = 64
"""The longest label of a pin, in UTF-8."""

DEADLINE_S = 30.0

_LATEST = 2**63
"""Later than any clock tells (microseconds), and still a number that a row holds."""

_LONGEST_WAIT_S = 600.0
_RETRY_S = 1.0


@dataclass(frozen=True)
class NamespaceUse:
    """What the store holds of one namespace. `nbytes` and `pinned_bytes` include headers."""

    namespace: bytes
    blocks: int
    nbytes: int
    pinned_bytes: int


@dataclass(frozen=True)
class PinInfo:
    """One pin: the block whose path it holds, until when (seconds; None: until lifted), and how
    many bytes that path takes, headers included and whoever else holds them too."""

    namespace: bytes
    leaf: BlockKey
    label: str
    expires_at: float | None
    nbytes: int


class Custody(ABC):
    """The verbs. Each blocks until it is durable, and may be called from any thread.

    All raise `StoreBusy` if that takes longer than `deadline_s` (the order stands nevertheless),
    `StoreUnsupported` on a tier that is closed or read-only, `StoreOut` while its drive is left
    alone, `ValueError` where `keys` are empty, and what the drive or the catalogue raised
    (`OSError`, `StoreCorrupt`). Nothing was changed then; but a `forget` or `delete_namespace` that
    fails behind its first transaction stands: nothing of it is served, and later transactions
    remove what is left.
    """

    @abstractmethod
    def _obey(self, order: Order, deadline_s: float) -> int:
        """Have an order carried out; returns its answer or raises."""

    @abstractmethod
    def _read(self, question: Callable[[Catalogue], Found]) -> Found:
        """Ask the catalogue. Raises `StoreUnsupported` after `close`."""

    @property
    @abstractmethod
    def pin_quota_bytes(self) -> int:
        """The most that all pins together may hold."""

    def pin(
        self,
        namespace: bytes,
        keys: Sequence[BlockKey],
        label: str,
        expires_at: float | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Hold `keys` and their ancestors against eviction until `expires_at` (tier's clock, s).

        A second pin of the same last block and label only takes the new time. Raises `PinRefused`
        if the last block is not there, or if pins would hold more than the quota.
        """
        if not _is_label(label):
            raise PinRefused(f"pin {label!r}: a label has 1 to {LABEL_BYTES} bytes; take another")
        until = 0 if expires_at is None else max(1, _microseconds(expires_at))
        leaf = _named("pin", keys)[-1]
        self._obey(Pin(namespace, leaf, label, until, self.pin_quota_bytes), deadline_s)

    def unpin(
        self,
        namespace: bytes,
        keys: Sequence[BlockKey],
        label: str,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> bool:
        """Lift the pin of the last of `keys` with that label; False if there is none."""
        leaf = _named("unpin", keys)[-1]
        return _is_label(label) and bool(self._obey(Unpin(namespace, leaf, label), deadline_s))

    def unpin_label(self, label: str, *, deadline_s: float = DEADLINE_S) -> int:
        """Lift every pin with that label, in all namespaces; returns how many there were."""
        return self._obey(UnpinLabel(label), deadline_s)

    def expire(
        self,
        namespace: bytes,
        keys: Sequence[BlockKey],
        at: float,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> bool:
        """From `at` (tier's clock, s) on serve neither `keys` nor what hangs off them; then remove.

        An expiry is never put off: the earliest that was said of a block counts. It overrides
        pins. False if the first of `keys` is not there.
        """
        first = _named("expire", keys)[0]
        order = Expire(namespace, first, max(FORGOTTEN, _microseconds(at)))
        return bool(self._obey(order, deadline_s))

    def forget(
        self, namespace: bytes, keys: Sequence[BlockKey], *, deadline_s: float = DEADLINE_S
    ) -> bool:
        """Remove `keys` and what hangs off them now; pins too. False if the first is not there."""
        first = _named("forget", keys)[0]
        return bool(self._obey(Expire(namespace, first, FORGOTTEN), deadline_s))

    def delete_namespace(self, namespace: bytes, *, deadline_s: float = DEADLINE_S) -> int:
        """Remove a namespace, pins included; returns how many blocks it had.

        It serves nothing from the first moment on. Its blocks leave in transactions of bounded
        size; after a crash or `close` in between, the next opening goes on.
        """
        return self._obey(DeleteNamespace(namespace), deadline_s)

    def pins(self) -> list[PinInfo]:
        """Every pin that has not been lifted."""
        return [
            PinInfo(
                digest,
                name.leaf,
                name.label,
                row.expires_at / 1e6 if row.expires_at else None,
                nbytes,
            )
            for digest, name, row, nbytes in self._read(Catalogue.pins)
        ]

    def namespaces(self) -> list[NamespaceUse]:
        """Every namespace that holds something and is not being deleted."""
        return [
            NamespaceUse(row.digest, row.blocks, row.nbytes, row.pinned_bytes)
            for _, row in self._read(Catalogue.namespace_rows)
            if row.blocks and not row.leaving
        ]


class Custodian:
    """Carries out orders on the tier's loop, and what is due. Everything runs on its thread."""

    def __init__(self, core: Core, signal: Signal) -> None:
        self._core = core
        self._signal = signal
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Look after what is due until `close`."""
        self._keep(asyncio.create_task(self._watch()))

    def begin(self, order: Order, answer: "Future[int]") -> None:
        """Carry out an order; `answer` is given when it is durable."""
        self._keep(asyncio.create_task(self._carry_out(order, answer)))

    async def close(self) -> None:
        """Finish orders; what is due and not done by then waits for the next opening."""
        self._closing = True
        self._core.due_changed.set()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, order: Order, answer: "Future[int]") -> None:
        try:
            outcome = await self._sweep(order)
            said = outcome.answers[0]
            if isinstance(said, KvtierError):
                raise said
            while _is_at_once(order) and self._is_overdue(outcome):
                if self._closing:
                    raise StoreBusy("NVMe store: closing; the next opening removes what is left")
                outcome = await self._sweep()
            answer.set_result(said)
        except Exception as error:  # noqa: BLE001 - goes to whoever gave the order
            if isinstance(error, OSError | StoreCorrupt):
                self._core.health.count(error, Fault.CATALOGUE)
            answer.set_exception(error)

    async def _watch(self) -> None:
        core, known = self._core, False
        while not self._closing:
            core.due_changed.clear()
            try:
                if not known:
                    core.next_due, known = core.catalogue.next_due(), True
                wait_s = _LONGEST_WAIT_S
                if core.next_due is not None:
                    wait_s = min(wait_s, max(0.0, core.next_due - core.now()) / 1e6)
                if wait_s == 0:
                    await self._sweep()
                    continue
            except (OSError, StoreCorrupt) as error:
                core.health.count(error, Fault.CATALOGUE)
                wait_s = _RETRY_S
            await _either(core.due_changed, wait_s)

    async def _sweep(self, *orders: Order) -> Outcome:
        outcome = await self._core.commit(Change(orders=orders, sweep=SWEEP_STEPS))
        await self._core.reclaim()
        self._signal.notify()
        return outcome

    def _is_overdue(self, outcome: Outcome) -> bool:
        return outcome.next_due is not None and outcome.next_due <= FORGOTTEN


def _is_at_once(order: Order) -> bool:
    """Whether the blocks are gone when the order has been carried out."""
    return isinstance(order, DeleteNamespace) or (
        isinstance(order, Expire) and order.at == FORGOTTEN
    )


async def _either(event: asyncio.Event, wait_s: float) -> None:
    """Return when the event is set, or after that long."""
    try:
        await asyncio.wait_for(event.wait(), wait_s)
    except TimeoutError:
        return


def _named(verb: str, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
    if not keys:
        raise ValueError(f"{verb}: keys are empty; name at least one block")
    return keys


def _microseconds(seconds: float) -> int:
    return int(max(0.0, min(seconds * 1e6, _LATEST)))


def _is_label(label: str) -> bool:
    try:
        return 0 < len(label.encode()) <= LABEL_BYTES
    except UnicodeEncodeError:  # half a character, from a command line that is not UTF-8
        return False
