"""The process that is killed: it judges what its predecessor left, then works until it dies.

What it has to say it says at once, through `tell`; what was said before a kill counts.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvtier.tiers.contracts import Flight
from kvtier.tiers.errors import PinRefused
from kvtier.tiers.nvme.catalogue import Catalogue
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.files import Files
from tests.nvme.rig import NAMESPACE, Branch, Rig, branch, disk_takes, num_landed
from tests.prf import mixed_bytes

ROOMY = 1 << 30
"""Nothing is evicted: what has landed must be served."""

TIGHT = 300 << 10

_TRUNK = 7
_TWIG = 3
_TWIGS_FROM = 100_000
_REREAD = 12
"""So many of the older paths are read again, byte for byte; the others are looked up."""


class Twig(NamedTuple):
    """A path of blocks from the root: a trunk, or its first `fork` blocks and a twig."""

    seed: int
    fork: int


@dataclass(frozen=True)
class Fate:
    """The call at which a process kills itself: before or after the `count`-th of its name."""

    call: str
    after: bool
    count: int


@dataclass(frozen=True)
class Orders:
    """One process's life. `promised`: how many blocks of a path must be served; `fresh`: the paths
    told of since somebody last judged, all to be read; `pinned` ones must still be so; of `gone`
    trunks nothing may be served; `last`: judge everything and close."""

    store: Path
    capacity_bytes: int
    seed: str
    first_trunk: int
    promised: Mapping[Twig, int]
    fresh: frozenset[Twig]
    pinned: frozenset[Twig]
    gone: tuple[int, ...]
    fate: Fate | None
    early: bool
    last: bool


Tell = Callable[..., None]


def live(orders: Orders, tell: Tell) -> None:
    """Open the store, judge it, and work until killed."""
    chance = random.Random(orders.seed)
    armed = [orders.early]
    if orders.fate is not None:
        _arm(orders.fate, armed)
    whole_once = orders.first_trunk > 1  # a catalogue that was never whole is nothing to check
    if whole_once and (orders.last or chance.random() < 0.1):
        for problem in check_store(orders.store).problems:
            tell("problem", f"before opening: {problem}")
    began = time.monotonic()
    rig = _open(orders, chance)
    tell("opened", time.monotonic() - began)
    _judge(rig, orders, chance, tell)
    if orders.last:
        _close(rig, tell)
        return
    armed[0] = True
    _Work(rig, orders, chance, tell).run()


def whole(path: Twig) -> Branch:
    """All blocks of a path, from the root."""
    trunk = branch(_TRUNK, path.seed)
    if not path.fork:
        return trunk
    stem = trunk.part(0, path.fork)
    twig = branch(_TWIG, _TWIGS_FROM + path.seed, parent=stem.keys[-1])
    tokens = np.concatenate([stem.tokens, twig.tokens])
    return Branch(stem.parent, tokens, stem.keys + twig.keys, stem.block_tokens)


def _open(orders: Orders, chance: random.Random) -> Rig:
    return Rig(
        orders.store,
        capacity_bytes=orders.capacity_bytes,
        fill=mixed_bytes,
        clock=time.time,
        codec=chance.choice(("raw", "zstd", "auto")),
        element_bytes=chance.choice((1, 2, 4)),
    )


def _arm(fate: Fate, armed: list[bool]) -> None:
    owner: Any = Catalogue if fate.call == "commit" else Files
    plain = getattr(owner, fate.call)
    calls = count(1)

    def call(*arguments: Any, **options: Any) -> Any:
        fatal = armed[0] and next(calls) == fate.count
        if fatal and not fate.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = plain(*arguments, **options)
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, fate.call, call)


def _judge(rig: Rig, orders: Orders, chance: random.Random, tell: Tell) -> None:
    """Usage, and whether everything promised is served; of what is new, every byte."""
    used = rig.tier.statistics().used_bytes
    if used > orders.capacity_bytes or not disk_takes(orders.store, at_most=used):
        tell("usage", f"after opening: {used} bytes are counted, the disk has other figures")
    old = [path for path in orders.promised if path not in orders.fresh]
    reread = old if orders.last else chance.sample(old, min(_REREAD, len(old)))
    read = orders.fresh.union(reread)
    for path, promised in orders.promised.items():
        blocks = whole(path)
        served = rig.tier.holds(NAMESPACE, blocks.keys)
        if path in read:
            served = min(served, _read(rig, path, tell))
        if served < promised:
            tell("lost", path, promised - served)
    pins = {pin.leaf for pin in rig.tier.pins()}
    for path in orders.pinned:
        if whole(path).keys[orders.promised[path] - 1] not in pins:
            tell("problem", f"the pin of {path} is gone")
    for seed in orders.gone if orders.last else orders.gone[-_REREAD:]:
        if rig.tier.holds(NAMESPACE, branch(_TRUNK, seed).keys):
            tell("problem", f"trunk {seed} was forgotten and is served")
    tell("judged")


def _read(rig: Rig, path: Twig, tell: Tell) -> int:
    blocks = whole(path)
    try:
        landed = num_landed(rig.fetch(blocks))
    except AssertionError as error:  # the rig compares every byte
        tell("wrong", path, str(error))
        return 0
    tell("read", landed)
    return landed


def _close(rig: Rig, tell: Tell) -> None:
    used = rig.tier.statistics().used_bytes
    rig.tier.close()
    report = check_store(rig.path)
    for problem in report.problems:
        tell("problem", f"after closing: {problem}")
    if report.bytes != used or report.leftover_bytes:
        told = f"{used} bytes are counted, {report.bytes} found, {report.leftover_bytes} left over"
        tell("usage", f"after closing: {told}")


class _Work:
    """Random requests for ever; each tells what has landed."""

    def __init__(self, rig: Rig, orders: Orders, chance: random.Random, tell: Tell) -> None:
        self._rig = rig
        self._orders = orders
        self._chance = chance
        self._tell = tell
        self._trunks = count(orders.first_trunk)
        self._paths = list(orders.promised)[-50:]
        self._pins = list(orders.pinned)

    def run(self) -> None:
        kinds = {
            self._plant: 5.0,
            self._branch: 3.0,
            self._fetch: 4.0,
            self._pin: 1.0,
            self._unpin: 0.5,
            self._forget: 0.7,
            self._delete: 0.03,
            self._reopen: 0.3,
        }
        while True:
            self._chance.choices(list(kinds), list(kinds.values()))[0]()
            if self._orders.capacity_bytes == ROOMY and self._rig.tier.statistics().evicted_blocks:
                self._tell("problem", "a roomy store has evicted")

    def _plant(self) -> None:
        """Some trunks at once, each in two puts that overlap."""
        begun: list[tuple[Twig, Flight]] = []
        for _ in range(self._chance.randrange(1, 4)):
            path = Twig(next(self._trunks), 0)
            self._tell("planted", path.seed)
            half = whole(path).part(0, self._chance.randrange(1, _TRUNK))
            begun.append((path, self._rig.begin_put(half)))
            begun.append((path, self._rig.begin_put(whole(path))))
        for path, flight in begun:
            self._landed(path, 0, flight)

    def _branch(self) -> None:
        trunks = [path.seed for path in self._paths if not path.fork]
        if trunks:
            path = Twig(self._chance.choice(trunks), self._chance.randrange(1, _TRUNK))
            twig = whole(path).part(path.fork, path.fork + _TWIG)
            self._landed(path, path.fork, self._rig.begin_put(twig))

    def _landed(self, path: Twig, before: int, flight: Flight) -> None:
        self._rig.settle(flight)
        landed = num_landed(flight)
        if landed:
            self._tell("landed", path, before + landed)
            self._paths.append(path)

    def _fetch(self) -> None:
        if self._paths:
            _read(self._rig, self._chance.choice(self._paths), self._tell)

    def _pin(self) -> None:
        if self._paths:
            path = self._chance.choice(self._paths)
            held = self._rig.tier.holds(NAMESPACE, whole(path).keys)
            if held > path.fork and path not in self._pins:
                with suppress(PinRefused):
                    self._rig.tier.pin(NAMESPACE, whole(path).keys[:held], f"{path}")
                    self._tell("pinned", path, held)
                    self._pins.append(path)

    def _unpin(self) -> None:
        if self._pins:
            path = self._pins.pop(self._chance.randrange(len(self._pins)))
            self._tell("unpinning", path)
            self._rig.tier.unpin_label(f"{path}")

    def _forget(self) -> None:
        """A trunk and all its twigs, now or by an expiry that is due."""
        if self._paths:
            seed = self._chance.choice(self._paths).seed
            self._tell("forgetting", seed)
            self._drop({seed})
            keys = branch(_TRUNK, seed).keys
            if self._chance.random() < 0.5:
                self._rig.tier.forget(NAMESPACE, keys)
            else:
                self._rig.tier.expire(NAMESPACE, keys, time.time())
            self._tell("forgotten", [seed])

    def _delete(self) -> None:
        self._tell("deleting")
        seeds = {path.seed for path in self._paths}
        self._drop(seeds)
        self._rig.tier.delete_namespace(NAMESPACE)
        self._tell("forgotten", sorted(seeds))

    def _drop(self, seeds: Collection[int]) -> None:
        self._paths = [path for path in self._paths if path.seed not in seeds]
        self._pins = [path for path in self._pins if path.seed not in seeds]

    def _reopen(self) -> None:
        self._rig.tier.close()
        self._rig = _open(self._orders, self._chance)
