"""The replay decides as the live cache does: one sequence of requests through both, step by step.

The live arms have pools with bytes, blocks of several tokens, a device that copies and a store that
was written apart from the replay's; every byte is looked at. The replay has none of these. What is
still on its way when the cache decides is the hardware's business, so copies are over soon here.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.index.lookahead import Waiting
from kvtier.index.radix import RadixIndex
from kvtier.index.words import BlockIds, TierId, Tokens
from kvtier.tiers.cache import TieredCache
from kvtier.tools.replay.run import Replay
from kvtier.tools.replay.world import Setup
from tests.tiers.cache_rig import BLOCK_BYTES, BLOCK_SIZE, NAMESPACE, Rig, keys_of
from tests.tiers.nvme_rig import opened
from tests.tiers.sim_rig import SimRig

VERBS = (
    "begin_fill",
    "finish_fill",
    "abort_fill",
    "begin_leave",
    "cancel_leave",
    "finish_leave",
    "touch_cold",
    "set_hint",
    "clear_hint",
)
"""Of the index: every change of residency, and what becomes cold."""

Told = dict[tuple[str, str], list[int]]
"""What was done, in which tier, to which blocks, in order. Blocks by their chained ids."""


class Diary:
    """Notes what a cache decides: each change of residency, and what goes to and from the store."""

    def __init__(self, cache: TieredCache, number: Callable[[Any], list[int]]) -> None:
        self._told: Told = {}
        ledger = cache._ledger
        index = ledger.index

        def noting(verb: str) -> Callable[..., None]:
            return lambda col, ids, *_: self.note(verb, index.columns[col], names(index, ids))

        for verb in VERBS:
            listen(index, verb, noting(verb))
        if ledger.store is not None:
            listen(ledger.store, "put", lambda put: self.note("put", "nvme", number(put)))
            listen(ledger.store, "fetch", lambda fetch: self.note("fetch", "nvme", number(fetch)))

    def note(self, verb: str, tier: str, blocks: Sequence[int]) -> None:
        self._told.setdefault((verb, tier), []).extend(blocks)

    def page(self) -> Told:
        """What was decided since the last page."""
        told, self._told = self._told, {}
        return told


def names(index: RadixIndex, ids: BlockIds) -> list[int]:
    """The chained id of each block there still is: the first of its tokens."""
    ids = index._table.living(ids)
    return [int(index.tokens_of(ids[i : i + 1])[0]) for i in range(len(ids))]


def listen(thing: Any, name: str, hear: Callable[..., object]) -> None:
    """Call `hear` with the arguments of every call of a method, before it."""
    method = getattr(thing, name)

    def heard(*arguments: Any, **named: Any) -> Any:
        hear(*arguments, **named)
        return method(*arguments, **named)

    setattr(thing, name, heard)


class Live:
    """A live arm: a rig whose copies, puts and fetches are over before the cache goes on (`hurry`).

    `reach(seconds)` puts the rig's clock on.
    """

    def __init__(self, rig: Rig, reach: Callable[[float], None], *, hurry: bool = True) -> None:
        self.rig = rig
        self._reach = reach
        mover = rig.cache._ledger.mover
        assert mover is not None
        if hurry:
            self._hurry(mover.device, "submit")
            for store in rig.stores:
                for verb in ("put", "fetch", "lookup"):
                    self._hurry(store, verb)
        self.diary = Diary(rig.cache, lambda request: request.tokens[::BLOCK_SIZE].tolist())

    def _hurry(self, thing: Any, name: str) -> None:
        method, signal = getattr(thing, name), self.rig.cache.signal

        def over(*arguments: Any, **named: Any) -> Any:
            result = method(*arguments, **named)
            while not result.done:
                ticks = signal.ticks
                if not result.done:
                    signal.wait(ticks, 0.1)
            return result

        setattr(thing, name, over)

    def request(self, moment_s: float, blocks: Tokens, waiting: Sequence[Tokens]) -> list[TierId]:
        """What `Replay.request` does, with bytes."""
        cache, room = self.rig.cache, self.rig.pools[0].num_slots
        tokens = np.repeat(blocks, BLOCK_SIZE)
        while (due := cache.next_due()) is not None and due < moment_s:
            self._reach(due)
            cache.poll()
        self._reach(moment_s)
        cache.expect([Waiting(NAMESPACE, np.repeat(each, BLOCK_SIZE)) for each in waiting])
        lease = cache.acquire(NAMESPACE, tokens, limit=room * BLOCK_SIZE)
        assert lease.ticket.wait(cache.clock() + 60)
        self.rig.expect_bytes(lease, tokens)
        sources = lease.sources
        self.rig.compute(lease, tokens[: room * BLOCK_SIZE], cache.clock() + 60)
        cache.release(lease)
        assert cache.drain(cache.clock() + 60)
        return sources


class Dry(Replay):
    """The replay's arm."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.diary = Diary(self.world.cache, lambda request: request.tokens.tolist())


def requests(seed: int, n: int, longest: int) -> list[tuple[float, Tokens]]:
    """Paths in a random tree of chained ids, one behind the other in time."""
    rng = np.random.default_rng(seed)
    numbers: dict[tuple[int, ...], int] = {}
    made, moment_s = [], 0.0
    paths: list[tuple[int, ...]] = [()]
    for _ in range(n):
        path = paths[max(0, len(paths) - 1 - int(rng.exponential(6)))]
        path = path[: int(rng.integers(0, len(path) + 1))] if rng.random() < 0.3 else path
        path = (path + tuple(rng.integers(0, 1000, int(rng.integers(1, 5))).tolist()))[:longest]
        paths.append(path)
        ids = [numbers.setdefault(path[: i + 1], len(numbers)) for i in range(len(path))]
        moment_s += float(rng.exponential(10))
        made.append((moment_s, np.array(ids, np.int32)))
    return made


def expect_alike(
    live: Live, dry: Dry, steps: Sequence[tuple[float, Tokens]], lookahead: int = 0
) -> set[str]:
    """Send every request through both and compare; the verbs that occurred."""
    seen: set[str] = set()
    paths = [blocks for _, blocks in steps]
    for number, (moment_s, blocks) in enumerate(steps):
        where = f"request {number}: {blocks.tolist()}"
        waiting = paths[number + 1 : number + 1 + lookahead]
        found = dry.request(moment_s, blocks, waiting)
        assert live.request(moment_s, blocks, waiting) == found, where
        expected = live.diary.page()
        assert dry.diary.page() == expected, where
        seen |= {verb for verb, _ in expected}
    live.rig.cache.check()
    dry.world.cache.check()
    return seen


# Copying down at once and at eviction, with write-back, without DRAM, without a store, alone.
SETUPS = [
    Setup(8, 24, 64),
    Setup(16, 20, 48),
    Setup(12, 24, 40, writeback_s=30.0, write_budget_bytes=1 << 30),
    Setup(10, 0, 40),
    Setup(10, 30, 0),
    Setup(10, 0, 0),
]


def simulated(setup: Setup) -> SimRig:
    return SimRig.make(
        setup.hbm,
        setup.dram or None,
        setup.nvme,
        store=setup.nvme > 0,
        writeback_s=setup.writeback_s,
        policies=setup.policies,
    )


def reacher(rig: SimRig) -> Callable[[float], None]:
    return lambda moment_s: rig.device.advance(max(0.0, moment_s - rig.device.clock()))


@pytest.mark.parametrize("policy", ["lru", "arc", "adaptive"])
@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: f"{s.hbm}-{s.dram}-{s.nvme}")
def test_live_cache_and_replay_decide_alike(setup: Setup, policy: str) -> None:
    setup = replace(
        setup, block_bytes=BLOCK_BYTES, policies={TierId.HBM: policy, TierId.DRAM: policy}
    )
    rig = simulated(setup)
    dry, live = Dry(setup), Live(rig, reacher(rig))
    if dry.world.store is not None:
        numbers: dict[bytes, int] = {}
        steps = requests(5, 70, 14)
        for _, blocks in steps:
            numbers |= zip(keys_of(np.repeat(blocks, BLOCK_SIZE)), blocks.tolist(), strict=True)
        index = dry.world.store._index
        listen(
            rig.store, "_remove", lambda name: live.diary.note("evict", "nvme", [numbers[name[1]]])
        )
        listen(
            index,
            "finish_leave",
            lambda _, ids: dry.diary.note("evict", "nvme", names(index, ids)),
        )
    seen = expect_alike(live, dry, requests(5, 70, 14), lookahead=3 if setup.dram else 0)
    assert {"begin_fill", "finish_leave"} <= seen
    assert ({"put", "fetch", "evict"} <= seen) == (setup.nvme > 0)
    if dry.world.store is not None:
        rig.store.check()
        dry.world.store.check()


def test_a_cache_on_threads_and_the_nvme_tier_and_the_replay_decide_alike(tmp_path: Path) -> None:
    with opened(tmp_path / "store", hbm=8, dram=24, write_budget_bytes=1 << 30) as rig:
        clock = rig.clock

        def reach(moment_s: float) -> None:
            clock.now = max(clock.now, moment_s)

        setup = Setup(8, 24, 1000, BLOCK_BYTES, writeback_s=30.0, write_budget_bytes=1 << 30)
        dry = Dry(setup)
        seen = expect_alike(Live(rig, reach), dry, requests(6, 80, 14))
        assert {"put", "fetch", "finish_leave", "touch_cold"} <= seen
        assert dry.world.store is not None
        assert rig.store.statistics().blocks == len(dry.world.store) > 50


@pytest.mark.parametrize("setup", SETUPS[:4], ids=lambda s: f"{s.hbm}-{s.dram}-{s.nvme}")
def test_copies_that_take_their_time_change_few_hits(setup: Setup) -> None:
    setup = replace(setup, block_bytes=BLOCK_BYTES)
    rig = simulated(setup)
    dry, live = Dry(setup), Live(rig, reacher(rig), hurry=False)
    late, soon = Counter[TierId](), Counter[TierId]()
    steps = requests(7, 100, 14)
    for moment_s, blocks in steps:
        late.update(live.request(moment_s, blocks, ()))
        soon.update(dry.request(moment_s, blocks))
    asked = sum(len(blocks) for _, blocks in steps)
    for tier in soon | late:
        assert abs(soon[tier] - late[tier]) <= 0.02 * asked, (soon, late)
    assert abs(soon.total() - late.total()) <= 0.01 * asked, (soon, late)
    assert soon.total() > asked // 2
