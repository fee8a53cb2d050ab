"""What an operator says about blocks, as values, and what each does inside one transaction.

Knows no thread and no clock: times are microseconds. `custody.py` gives the orders.
"""

from dataclasses import dataclass

from kvtier.index.errors import KvtierError
from kvtier.index.words import BlockKey
from kvtier.tiers.errors import PinRefused
from kvtier.tiers.nvme.edits import Edit
from kvtier.tiers.nvme.pins import PinName, pin, pin_row, unpin, wanted_bytes
from kvtier.tiers.nvme.rows import Table, key_pin


@dataclass(frozen=True)
class Pin:
    """Hold the path to `leaf` until `expires_at` (0: until it is lifted)."""

    namespace: bytes
    leaf: BlockKey
    label: str
    expires_at: int
    quota_bytes: int


@dataclass(frozen=True)
class Unpin:
    """Lift the pin of one block."""

    namespace: bytes
    leaf: BlockKey
    label: str


@dataclass(frozen=True)
class UnpinLabel:
    """Lift every pin of a label, in every namespace."""

    label: str


@dataclass(frozen=True)
class Expire:
    """Serve `first` and what hangs off it until `at`, then remove it."""

    namespace: bytes
    first: BlockKey
    at: int


@dataclass(frozen=True)
class DeleteNamespace:
    """Serve nothing of a namespace from now on, and remove it."""

    namespace: bytes


Order = Pin | Unpin | UnpinLabel | Expire | DeleteNamespace


def obey(edit: Edit, order: Order, number: int | None, now: int) -> int | KvtierError:
    """Carry out one order; `number` is that of its namespace, if the store knows it.

    Returns how many pins, or blocks that were named or deleted, it found; or why it was refused,
    and then nothing was changed.
    """
    if isinstance(order, UnpinLabel):
        names = [PinName(*key_pin(key)) for key, _ in edit.scan(Table.PINS)]
        return sum(unpin(edit, name) for name in names if name.label == order.label)
    if isinstance(order, Pin):
        return _pin(edit, order, number, now)
    if number is None:
        return 0
    if isinstance(order, Unpin):
        return int(unpin(edit, PinName(number, order.leaf, order.label)))
    if isinstance(order, Expire):
        place = edit.place(number, order.first)
        if place is not None:
            edit.expire(place[0].id, place[1], order.at)
        return int(place is not None)
    edit.leave(number)
    return edit.namespace(number).blocks


def _pin(edit: Edit, order: Pin, number: int | None, now: int) -> int | KvtierError:
    if number is None or edit.span(number, order.leaf, 0, now) is None:
        return PinRefused(
            f"pin {order.label!r}: block {order.leaf.hex()} is not in the store; put it first"
        )
    name = PinName(number, order.leaf, order.label)
    wanted = 0 if pin_row(edit, name) else wanted_bytes(edit, name)
    if wanted and edit.totals.pinned_bytes + wanted > order.quota_bytes:
        return PinRefused(
            f"pin {order.label!r}: wants {wanted} bytes, {edit.totals.pinned_bytes} of the quota "
            f"of {order.quota_bytes} are taken; unpin something or raise the quota"
        )
    pin(edit, name, order.expires_at)
    return 1
