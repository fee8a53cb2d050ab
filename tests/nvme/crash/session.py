"""One tier under a recorder, driven one operation at a time. Knows what its user was told.

A workload is a sequence of names out of `OPERATIONS`. An operation ends when the tier has nothing
left to do, so that the next one begins at rest.

What is certain of a store is a set of *facts*, as bytes: a block's key (it is served), `PINNED` and
a key (it is pinned), `GONE` and a key (it was expired or deleted, and is not served).
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.index.words import ROOT_KEY
from kvtier.tiers.contracts import LANDED, Flight
from kvtier.tiers.errors import PinRefused
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.rebuild import rebuild_catalogue
from kvtier.tiers.nvme.settings import Geometry
from tests.nvme.crash.disk import Mark, Model
from tests.nvme.crash.recorder import Recorder
from tests.nvme.rig import NAMESPACE, Branch, Rig, branch, segment_files
from tests.prf import mixed_bytes

BLOCK_BYTES = 5000
CAPACITY = 20 * 4096
"""Four records of two blocks and a header each; more if they compress."""

SHRUNK = 11 * 4096
ROOMY = 64 * 4096
GEOMETRY = Geometry(extent_bytes=4 * 4096, group_bytes=4 * 4096, segment_bytes=10 * 4096)
"""Two blocks a record, one record a group, two records a segment; two groups a lot in `ROOMY`."""


PINNED = b"pinned "
GONE = b"gone "
_LABEL = "crash"


@dataclass
class World:
    """What stays as it is when a process dies: the branches ever put, the keys ever expired or
    deleted, the room a store has, and time in seconds."""

    paths: list[Branch] = field(default_factory=list)
    forgotten: set[bytes] = field(default_factory=set)
    capacity_bytes: int = CAPACITY
    now_s: float = 1.0

    def copy(self) -> "World":
        return replace(self, paths=list(self.paths), forgotten=set(self.forgotten))

    def open(self, store: Path, files: Files) -> Rig:
        """A rig whose requests happen one after another."""
        return Rig(
            store,
            block_bytes=BLOCK_BYTES,
            capacity_bytes=self.capacity_bytes,
            files=files,
            geometry=GEOMETRY,
            io_threads=1,
            fill=mixed_bytes,
            clock=lambda: self.now_s,
        )

    def facts(self, rig: Rig, served: Collection[bytes]) -> frozenset[bytes]:
        """What is so, if these keys are `served`."""
        pinned = (PINNED + pin.leaf for pin in rig.tier.pins())
        gone = (GONE + key for key in self.forgotten - set(served))
        return frozenset((*served, *pinned, *gone))


@dataclass(frozen=True)
class Stage:
    """One operation's events, from `first` on, and what was certain then.

    `held`: what was so before it and after it, and so at every instant between;
    `told`: what its user was told in it and was so after it; from its mark on.
    """

    name: str
    first: int
    held: frozenset[bytes]
    told: frozenset[bytes]


def rest(rig: Rig) -> None:
    """Wait until the tier has nothing left to do. Every flight is done already."""

    async def idle() -> None:
        mine, core = asyncio.current_task(), rig.tier._crew.core
        busy: list[asyncio.Task[Any]] = []

        def is_cleaning() -> bool:
            is_due = core.next_due is not None and core.next_due <= core.now()
            return bool(is_due or core.freeing or core._reclaims)  # files go after their last range

        while busy or is_cleaning():
            await (asyncio.wait(busy) if busy else asyncio.sleep(0))
            busy = [task for task in asyncio.all_tasks() if task is not mine and _ends(task)]

    asyncio.run_coroutine_threadsafe(idle(), rig.tier._crew._loop).result(timeout=30)


_ENDLESS = ("Crew._serve", "Custodian._watch", "_either", "Event.wait")


def _ends(task: "asyncio.Task[Any]") -> bool:
    return getattr(task.get_coro(), "__qualname__", "") not in _ENDLESS


def joined(head: Branch, tail: Branch) -> Branch:
    """Both in a row."""
    tokens = np.concatenate([head.tokens, tail.tokens])
    return Branch(head.parent, tokens, head.keys + tail.keys, head.block_tokens)


class Session:
    """A store below `root`, a directory that looks as `start` says. `promise`: what is certain of
    the store that is there already."""

    def __init__(
        self,
        root: Path,
        start: Model,
        *,
        world: World | None = None,
        promise: frozenset[bytes] = frozenset(),
        omitted: str | None = None,
    ) -> None:
        self.recorder = Recorder(root, start, omitted)
        self.world = world.copy() if world else World()
        self.stages: list[Stage] = []
        self.store = root / "store"
        self._promise = promise
        self._seeds = count(1)
        self._rig: Rig | None = None

    @property
    def rig(self) -> Rig:
        assert self._rig is not None
        return self._rig

    @contextmanager
    def running(self) -> Iterator["Session"]:
        """Open the store; close it in the end, which is no longer part of the history."""
        with self.recorder.recording():
            try:
                self.stage("open", self.open)
                yield self
            finally:
                length = len(self.recorder.events)
                if self._rig is not None:
                    self._rig.tier.close()
                del self.recorder.events[length:]

    def run(self, workload: Sequence[str]) -> None:
        """One operation after another."""
        for name in workload:
            self.stage(name, partial(OPERATIONS[name], self))

    def stage(self, name: str, action: Callable[[], object]) -> None:
        """Run one operation to its end, and note what was held all the while."""
        first = len(self.recorder.events)
        before = self._promise if self._rig is None else self.facts()
        self.world.now_s += 1.0
        action()
        rest(self.rig)
        doubtful = self.world.forgotten | {PINNED + key for key in self.world.forgotten}
        before -= doubtful
        after = self.facts() - doubtful
        marks = (e.keys for e in self.recorder.events[first:] if isinstance(e, Mark))
        told = after & frozenset().union(*marks)
        held = before & after
        if name in REBUILDING:  # a hole that was not yet synced, and that no row tells of now
            held = frozenset(fact for fact in held if not fact.startswith(GONE))
        self.stages.append(Stage(name, first, held, told))
        lost = {fact for fact in before - after if name not in FORGETTING or fact in self._keys}
        assert name in LOSING or not lost, f"{name}: what was published is lost"

    def promises(self) -> Iterator[frozenset[bytes]]:
        """After each number of events, what must be so."""
        events = self.recorder.events
        bounds = [*(stage.first for stage in self.stages[1:]), len(events) + 1]
        for stage, end in zip(self.stages, bounds, strict=True):
            promise = stage.held
            for done in range(stage.first, end):
                event = events[done - 1] if done > stage.first else None
                if isinstance(event, Mark):
                    promise |= event.keys & stage.told
                yield promise

    @property
    def _keys(self) -> set[bytes]:
        return {key for path in self.world.paths for key in path.keys}

    def facts(self) -> frozenset[bytes]:
        """What is so now."""
        rig = self.rig
        held = (path.keys[: rig.tier.holds(NAMESPACE, path.keys)] for path in self.world.paths)
        return self.world.facts(rig, {key for keys in held for key in keys})

    def open(self) -> None:
        self._rig = self.world.open(self.store, self.recorder)

    def close(self) -> None:
        rig, self._rig = self.rig, None
        rig.tier.close()

    def put(self, blocks: int, after: Branch | None = None, **options: Any) -> Flight:
        """A new branch, behind another or not."""
        parent = after.keys[-1] if after else ROOT_KEY
        new = branch(blocks, next(self._seeds), parent=parent)
        self.world.paths.append(joined(after, new) if after else new)
        flight = self.rig.put(new, **options)
        keys = zip(new.keys, flight.status, strict=True)
        self.recorder.mark([key for key, status in keys if status == LANDED])
        return flight

    def fetch(self) -> None:
        """Everything there is; the rig compares every byte."""
        for path in self.world.paths:
            self.rig.fetch(path)

    def whole(self) -> Branch | None:
        """The newest branch that is held to its end."""
        held = self.facts()
        return next((path for path in self.world.paths[::-1] if path.keys[-1] in held), None)

    def extend(self) -> None:
        """Two more blocks behind a branch that is held, if one is."""
        self.put(2, after=self.whole())

    def pin(self) -> None:
        """A branch that is held, if one is and the quota allows it."""
        path = self.whole()
        if path is not None:
            with suppress(PinRefused):
                self.rig.tier.pin(NAMESPACE, path.keys, _LABEL)
                self.recorder.mark([PINNED + path.keys[-1]])

    def expire(self) -> None:
        """A branch that is held is so no longer than this operation."""
        path = self.whole()
        if path is not None:
            self.rig.tier.expire(NAMESPACE, path.keys, self.world.now_s + 0.5)
            self.world.forgotten.update(path.keys)
            self.recorder.mark([GONE + key for key in path.keys])

    def delete(self) -> None:
        """The namespace, with all that was ever put."""
        self.rig.tier.delete_namespace(NAMESPACE)
        self.world.forgotten |= self._keys
        self.recorder.mark([GONE + key for key in self._keys])

    def rot(self) -> None:
        """A bit of the oldest segment's last page but one flips; then everything is read."""
        for path in segment_files(self.store)[:1]:
            live = self.recorder.now().whole()
            inode = live.find(path.relative_to(self.store.parent).parts)
            pages = sorted(live.files[inode].pages) if inode is not None else []
            for page in pages[-2:-1]:
                self.recorder.rot(path, page * 4096 + 17)
        self.fetch()

    def lose(self) -> None:
        """Reopen without a catalogue: it is made anew from the segments."""
        self.close()
        self.recorder.lose_catalogue(self.store / "catalog")
        self.open()

    def remake(self) -> None:
        """The catalogue is sound, and made anew all the same."""
        self.close()
        rebuild_catalogue(self.store, self.recorder)
        self.open()

    def reopen(self) -> None:
        self.close()
        self.open()

    def shrink(self) -> None:
        """Reopen with less room than what may be held."""
        self.close()
        self.world.capacity_bytes = SHRUNK
        self.open()


OPERATIONS: dict[str, Callable[[Session], object]] = {
    "put": lambda session: session.put(2),
    "extend": Session.extend,
    "put records": lambda session: session.put(3),
    "put zstd": lambda session: session.put(2, codec="zstd"),
    "overflow": lambda session: session.put(7),
    "fetch": Session.fetch,
    "pin": Session.pin,
    "expire": Session.expire,
    "delete": Session.delete,
    "rot": Session.rot,
    "reopen": Session.reopen,
    "shrink": Session.shrink,
    "lose": Session.lose,
    "remake": Session.remake,
}
"""The alphabet of workloads."""

LOSING = OPERATIONS.keys() - {"fetch", "pin", "expire", "delete", "reopen", "lose", "remake"}
"""Operations that may evict or quarantine."""

REBUILDING = {"lose", "remake"}
"""Operations that make the catalogue anew: they forget pins, and what was expired or deleted."""

FORGETTING = {"delete", *REBUILDING}
"""Operations that forget pins."""
