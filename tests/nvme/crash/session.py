"""One tier under a recorder, driven one operation at a time. Knows what its user was told.

A workload is a sequence of names out of `OPERATIONS`. An operation ends when the tier has nothing
left to do, so that the next one begins at rest.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.index.words import ROOT_KEY
from kvtier.tiers.contracts import LANDED, Flight
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.tier import Geometry
from tests.nvme.crash.disk import Mark, Model
from tests.nvme.crash.recorder import Recorder
from tests.nvme.rig import NAMESPACE, Branch, Rig, branch, segment_files

BLOCK_BYTES = 3000
CAPACITY = 12 * 4096
"""Four records of two blocks and a header each."""

SHRUNK = 7 * 4096
GEOMETRY = Geometry(extent_bytes=2 * 4096, group_bytes=64 << 10, segment_bytes=6 * 4096)
"""Two blocks a record, two records a segment."""


@dataclass(frozen=True)
class Stage:
    """One operation's events, from `first` on, and what was certain then.

    `held`: keys that were published before it and after it, so at every instant between;
    `told`: keys that landed in it and were still held after it, from their mark on.
    """

    name: str
    first: int
    held: frozenset[bytes]
    told: frozenset[bytes]


def open_rig(store: Path, files: Files, capacity_bytes: int) -> Rig:
    """A rig whose requests happen one after another."""
    return Rig(
        store,
        block_bytes=BLOCK_BYTES,
        capacity_bytes=capacity_bytes,
        files=files,
        geometry=GEOMETRY,
        io_threads=1,
    )


def rest(rig: Rig) -> None:
    """Wait until the tier has nothing left to do. Every flight is done already."""

    async def idle() -> None:
        mine = asyncio.current_task()
        while busy := [task for task in asyncio.all_tasks() if task is not mine and _ends(task)]:
            await asyncio.wait(busy)

    asyncio.run_coroutine_threadsafe(idle(), rig.tier._loop).result(timeout=30)


def _ends(task: "asyncio.Task[Any]") -> bool:
    return "_serve" not in repr(task.get_coro())


def joined(head: Branch, tail: Branch) -> Branch:
    """Both in a row."""
    tokens = np.concatenate([head.tokens, tail.tokens])
    return Branch(head.parent, tokens, head.keys + tail.keys, head.block_tokens)


class Session:
    """A store below `root`, which looks as `start` says, and the branches ever put into it.

    `promise`: what a store that is there already must serve.
    """

    def __init__(
        self,
        root: Path,
        start: Model,
        *,
        paths: Sequence[Branch] = (),
        promise: frozenset[bytes] = frozenset(),
        omitted: str | None = None,
        capacity_bytes: int = CAPACITY,
    ) -> None:
        self.recorder = Recorder(root, start, omitted)
        self.paths = list(paths)
        self.stages: list[Stage] = []
        self.capacity_bytes = capacity_bytes
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
        before = self._promise if self._rig is None else self.held()
        action()
        rest(self.rig)
        after = self.held()
        marks = (e.keys for e in self.recorder.events[first:] if isinstance(e, Mark))
        told = after & frozenset().union(*marks)
        self.stages.append(Stage(name, first, before & after, told))
        assert name in LOSING or before <= after, f"{name}: published blocks were lost"

    def promises(self) -> Iterator[frozenset[bytes]]:
        """After each number of events, what must be served."""
        events = self.recorder.events
        bounds = [*(stage.first for stage in self.stages[1:]), len(events) + 1]
        for stage, end in zip(self.stages, bounds, strict=True):
            promise = stage.held
            for done in range(stage.first, end):
                event = events[done - 1] if done > stage.first else None
                if isinstance(event, Mark):
                    promise |= event.keys & stage.told
                yield promise

    def held(self) -> frozenset[bytes]:
        """Keys the tier would serve."""
        keys = (path.keys[: self.rig.tier.holds(NAMESPACE, path.keys)] for path in self.paths)
        return frozenset(key for some in keys for key in some)

    def open(self) -> None:
        self._rig = open_rig(self.store, self.recorder, self.capacity_bytes)

    def close(self) -> None:
        rig, self._rig = self.rig, None
        rig.tier.close()

    def put(self, blocks: int, after: Branch | None = None, **options: Any) -> Flight:
        """A new branch, behind another or not."""
        parent = after.keys[-1] if after else ROOT_KEY
        new = branch(blocks, next(self._seeds), parent=parent)
        self.paths.append(joined(after, new) if after else new)
        flight = self.rig.put(new, **options)
        keys = zip(new.keys, flight.status, strict=True)
        self.recorder.mark([key for key, status in keys if status == LANDED])
        return flight

    def fetch(self) -> None:
        """Everything there is; the rig compares every byte."""
        for path in self.paths:
            self.rig.fetch(path)

    def extend(self) -> None:
        """Two more blocks behind a branch that is held, if one is."""
        held = self.held()
        whole = [path for path in self.paths if path.keys[-1] in held]
        self.put(2, after=whole[-1] if whole else None)

    def rot(self) -> None:
        """A bit of the oldest segment's last page but one flips; then everything is read."""
        for path in segment_files(self.store)[:1]:
            live = self.recorder.now().whole()
            inode = live.find(path.relative_to(self.store.parent).parts)
            pages = sorted(live.files[inode].pages) if inode is not None else []
            for page in pages[-2:-1]:
                self.recorder.rot(path, page * 4096 + 17)
        self.fetch()

    def reopen(self) -> None:
        self.close()
        self.open()

    def shrink(self) -> None:
        """Reopen with less room than what may be held."""
        self.close()
        self.capacity_bytes = SHRUNK
        self.open()


OPERATIONS: dict[str, Callable[[Session], object]] = {
    "put": lambda session: session.put(2),
    "extend": Session.extend,
    "put records": lambda session: session.put(3),
    "overflow": lambda session: session.put(7),
    "fetch": Session.fetch,
    "rot": Session.rot,
    "reopen": Session.reopen,
    "shrink": Session.shrink,
}
"""The alphabet of workloads."""

LOSING: Collection[str] = {"put", "extend", "put records", "overflow", "rot", "shrink"}
"""Operations that may evict or quarantine."""
