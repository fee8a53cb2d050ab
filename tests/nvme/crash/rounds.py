"""Rounds of killing: a process works on a store, is killed, and the next one judges and goes on.

The parent forks and never opens a store itself, so no thread and no LMDB environment crosses a
fork. A store is carried from round to round and given up after `ROUNDS_A_STORE` kills.
"""

import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from tests.nvme.crash.victim import ROOMY, TIGHT, Fate, Orders, Twig, live

ROUNDS_A_STORE = 50

_WORKING = {
    "open": 2,
    "preadv": 8,
    "pwritev": 12,
    "fdatasync": 6,
    "allocate": 6,
    "sync_directory": 2,
    "commit": 8,
}
"""Calls a process at work may die at, and up to the how-manieth."""

_EVICTING = {"punch": 6, "unlink": 2}
_OPENING = {"open": 2, "fdatasync": 2, "truncate": 1, "unlink": 2, "punch": 2, "commit": 2}
_LONGEST_S = 0.2
_GIVE_UP_S = 60.0


@dataclass
class Totals:
    """Counts over all rounds. `blocks_read` were compared byte for byte. `published` blocks had
    landed before a kill in a store that never evicts, or were pinned; `lost` of them were not
    served later."""

    rounds: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    stores: int = 0
    blocks_read: int = 0
    wrong: int = 0
    published: int = 0
    lost: int = 0
    usage_mismatches: int = 0
    problems: int = 0
    slowest_open_s: float = 0.0
    seconds: float = 0.0

    @property
    def served(self) -> int:
        return self.published - self.lost

    @property
    def ok(self) -> bool:
        """Nothing wrong at all, and of what was published at least 99.9 % served."""
        faults = self.wrong + self.usage_mismatches + self.problems
        return not faults and self.served >= 0.999 * self.published

    def add(self, other: "Totals") -> None:
        """Count another run's rounds as well."""
        for name, value in vars(other).items():
            if name == "slowest_open_s":
                self.slowest_open_s = max(self.slowest_open_s, value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def encode(self) -> dict[str, Any]:
        return vars(self) | {"kills": dict(sorted(self.kills.items())), "served": self.served}


def decode_totals(line: dict[str, Any]) -> Totals:
    """What `encode` made."""
    fields = {name: line[name] for name in vars(Totals())}
    return Totals(**fields | {"kills": Counter(line["kills"])})


class Store:
    """One store's life under killing. Its `seed` says what is done to it, and when (roughly)."""

    def __init__(self, seed: int, places: list[Path]) -> None:
        self.seed = seed
        self.totals = Totals(stores=1)
        self.complaints: list[str] = []
        self._chance = random.Random(seed)
        self._capacity = TIGHT if seed % 2 else ROOMY
        self._place = places[seed // 2 % len(places)]
        self._promised: dict[Twig, int] = {}
        self._fresh: set[Twig] = set()
        self._pinned: set[Twig] = set()
        self._gone: dict[int, None] = {}
        self._trunk = 1

    def run(self, rounds: int) -> None:
        """Kill that often, then let one process live and judge everything."""
        directory = Path(mkdtemp(prefix=".crash-", dir=self._place))
        began = time.monotonic()
        try:
            for turn in range(rounds):
                self._round(directory / "s", turn, last=False)
            self._round(directory / "s", rounds, last=True)
        finally:
            rmtree(directory)
            self.totals.seconds += time.monotonic() - began

    def _round(self, store: Path, turn: int, *, last: bool) -> None:
        chance = self._chance
        kind = chance.choice(("time", "time", "opening", "call", "call", "call while opening"))
        calls = _OPENING if "opening" in kind else _WORKING
        if calls is _WORKING and self._capacity == TIGHT:
            calls = _WORKING | _EVICTING
        call = chance.choice(list(calls))
        fate = Fate(call, chance.random() < 0.5, chance.randint(1, calls[call]))
        orders = Orders(
            store,
            self._capacity,
            f"{self.seed}:{turn}",
            self._trunk,
            dict(self._promised),
            frozenset(self._fresh),
            frozenset(self._pinned),
            tuple(self._gone),
            fate if "call" in kind and not last else None,
            kind == "call while opening",
            last,
        )
        # from the fork on, or from when it begins to work; the short ones more often
        delay_s = _LONGEST_S ** chance.uniform(1.0, 4.0)
        if kind == "opening":
            delay_s = chance.uniform(0.0, 0.03)
        elif kind != "time":
            delay_s = _LONGEST_S  # should the call not come
        with _Forked(orders) as victim:
            told = victim.listen(delay_s, at_once=kind == "opening" and not last, last=last)
        for line in told:
            self._take(line)
        if last:
            self._expect(victim.status == 0, "the last process failed")
            return
        died = victim.status == -signal.SIGKILL
        self._expect(died, f"round {turn}: the process ended by itself, with {victim.status}")
        self.totals.rounds += 1
        where = "after" if fate.after else "before"
        by_itself = "call" in kind and not victim.was_shot
        self.totals.kills[f"{where} {fate.call}" if by_itself else "at an instant"] += 1

    def _take(self, line: list[Any]) -> None:
        word, *rest = line
        totals = self.totals
        if word == "planted":
            self._trunk = max(self._trunk, rest[0] + 1)
        elif word == "landed":
            if self._capacity == ROOMY:
                self._promise(Twig(*rest[0]), rest[1])
        elif word == "pinned":
            self._promise(Twig(*rest[0]), rest[1])
            self._pinned.add(Twig(*rest[0]))
        elif word == "unpinning":
            self._pinned.discard(Twig(*rest[0]))
            if self._capacity == TIGHT:
                self._forget({Twig(*rest[0])})
        elif word == "forgetting":
            self._forget({path for path in self._promised if path.seed == rest[0]})
        elif word == "deleting":
            self._forget(set(self._promised))
        elif word == "forgotten":
            self._gone.update(dict.fromkeys(rest[0]))
        elif word == "lost":
            path, blocks = Twig(*rest[0]), rest[1]
            totals.lost += blocks
            self._promised[path] -= blocks
            self._complain(f"{blocks} blocks of {path} were published and are not served")
        elif word == "judged":
            self._fresh.clear()
        elif word == "opened":
            totals.slowest_open_s = max(totals.slowest_open_s, rest[0])
        elif word == "read":
            totals.blocks_read += rest[0]
        elif word == "wrong":
            totals.wrong += 1
            self._complain(f"wrong bytes: {rest}")
        elif word == "usage":
            totals.usage_mismatches += 1
            self._complain(rest[0])
        else:
            totals.problems += 1
            self._complain(f"{word}: {rest[0]}")

    def _promise(self, path: Twig, blocks: int) -> None:
        before = self._promised.get(path, path.fork)
        self.totals.published += max(0, blocks - before)
        if blocks >= before:
            self._promised[path] = blocks
            self._fresh.add(path)

    def _forget(self, paths: Collection[Twig]) -> None:
        for path in paths:
            self._promised.pop(path, None)
        self._fresh.difference_update(paths)
        self._pinned.difference_update(paths)

    def _expect(self, truth: bool, otherwise: str) -> None:
        if not truth:
            self.totals.problems += 1
            self._complain(otherwise)

    def _complain(self, text: str) -> None:
        self.complaints.append(f"seed {self.seed}, round {self.totals.rounds}: {text}")


class _Forked:
    """A process that lives by its orders; dead when the block ends."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self.status = 0
        self.was_shot = False

    def __enter__(self) -> "_Forked":
        self._reader, writer = os.pipe()
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._reader)
            _obey(self._orders, writer)
        os.close(writer)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._reader)
        self._kill()
        self.status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def listen(self, delay_s: float, *, at_once: bool, last: bool) -> list[list[Any]]:
        """What it says until it is dead: shot after `delay_s` of work, or of life (`at_once`)."""
        heard, deadline = b"", time.monotonic() + (delay_s if at_once else _GIVE_UP_S)
        working = at_once
        while True:
            left = deadline - time.monotonic()
            ready = select.select([self._reader], [], [], max(0.0, left))[0] if left > 0 else []
            if not ready and not self.was_shot:
                self.was_shot = True
                self._kill()
                deadline = time.monotonic() + _GIVE_UP_S
                continue
            chunk = os.read(self._reader, 1 << 16)
            if not chunk:
                return [json.loads(line) for line in heard.split(b"\n")[:-1]]
            heard += chunk
            if not working and not last and b'["judged"]\n' in heard:
                working = True
                deadline = time.monotonic() + delay_s

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def _obey(orders: Orders, writer: int) -> None:
    """The child's whole life; never returns."""
    status = 1
    try:

        def tell(*words: object) -> None:
            os.write(writer, json.dumps(words).encode() + b"\n")

        try:
            live(orders, tell)
            status = 0
        except Exception:  # noqa: BLE001 - the parent reports it
            tell("broke", traceback.format_exc())
    finally:
        os._exit(status)


@dataclass(frozen=True)
class Report:
    """What came of one store."""

    seed: int
    totals: Totals
    complaints: tuple[str, ...]


def report_on(seed: int, rounds: int, places: list[Path]) -> Report:
    """Kill the processes of one store that often."""
    store = Store(seed, places)
    store.run(rounds)
    return Report(seed, store.totals, tuple(store.complaints))


def reports(
    seed: int, rounds: int, places: list[Path], *, jobs: int, seconds: float = float("inf")
) -> Iterator[Report]:
    """Store after store, `jobs` at a time, until that many rounds are done or time is up."""
    began = time.monotonic()
    sizes = [min(ROUNDS_A_STORE, rounds - done) for done in range(0, rounds, ROUNDS_A_STORE)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        running: deque[Future[Report]] = deque()
        for number, size in enumerate(sizes):
            if time.monotonic() - began > seconds:
                break
            running.append(pool.submit(report_on, seed + number, size, places))
            if len(running) == jobs:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
