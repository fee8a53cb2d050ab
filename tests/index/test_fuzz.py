"""A hundred thousand random steps over the index, every slot counted after each of them.

The test owns the free slots. For each pool, after each step:

    free + evictable + pinned + in flight == total

`evictable` (RESIDENT, unpinned) and `in flight` (FILLING, LEAVING) are the index's own counts,
`pinned` is counted anew, block by block. Every few thousand steps the index checks all of itself.
"""

from random import Random

import numpy as np
import pytest

from kvtier.index.policies import POLICIES, make_policy
from kvtier.index.radix import RadixIndex
from kvtier.index.words import BlockIds, Residency, TierId, Tokens
from tests.index.helpers import NVME

SIZE = 2
SLOTS = {0: 24, 1: 40}
NAMESPACES = (b"one", b"two")
STEPS = 100_000 // len(POLICIES) + 1


class Fuzz:
    """An index of two pools and a store; blocks in them by slot, and who is pinned."""

    def __init__(self, policy: str, seed: int) -> None:
        self.rng = Random(seed)
        self.index = RadixIndex(
            SIZE,
            [TierId.HBM, TierId.DRAM, TierId.NVME],
            stores=[TierId.NVME],
            max_hint_blocks=60,
            policy=lambda tier: make_policy(policy, SLOTS[tier is TierId.DRAM], SIZE),
        )
        self.free = {col: list(range(n)) for col, n in SLOTS.items()}
        self.blocks: dict[int, dict[int, int]] = {col: {} for col in SLOTS}  # block by slot
        self.pins: list[tuple[int, BlockIds]] = []
        self.num_splits = self.num_evicted = 0

    def prompt(self) -> tuple[bytes, Tokens]:
        """Few blocks to choose from, so that paths share, part and meet again."""
        blocks = [self.rng.randrange(3) for _ in range(1 + self.rng.randrange(7))]
        return NAMESPACES[self.rng.randrange(2)], np.repeat(np.array(blocks, np.int32), SIZE)

    def some(self, col: int, state: Residency) -> BlockIds:
        """Blocks of a column in this state, any subset, in any order."""
        ids = np.array(list(self.blocks[col].values()), np.int32)
        ids = ids[self.index.state(col, ids) == state]
        chosen = self.rng.sample(ids.tolist(), self.rng.randrange(len(ids) + 1))
        return np.array(chosen, np.int32)

    def give_back(self, col: int, slots: list[int]) -> None:
        for slot in slots:
            del self.blocks[col][slot]
        self.free[col] += slots

    def step(self) -> None:
        col, verb = self.rng.randrange(2), self.rng.randrange(14)
        index = self.index
        if verb < 4:  # a request: fill what it lacks, as far as there is room
            namespace, tokens = self.prompt()
            index.request(namespace, tokens)
            before = index.statistics().nodes
            ids = index.insert(namespace, tokens)
            self.num_splits += index.statistics().nodes > before + 1
            absent = ids[index.state(col, ids) == Residency.ABSENT][: len(self.free[col])]
            slots = [self.free[col].pop() for _ in absent]
            index.begin_fill(col, absent, np.array(slots, np.int32))
            self.blocks[col].update(zip(slots, absent.tolist(), strict=True))
            index.forget(ids)
        elif verb < 6:
            index.finish_fill(col, self.some(col, Residency.FILLING))
        elif verb == 6:
            self.give_back(col, index.abort_fill(col, self.some(col, Residency.FILLING)).tolist())
        elif verb == 7:
            victims = index.victims(col, self.rng.randrange(9))
            index.begin_leave(col, victims)
            self.num_evicted += len(victims)
        elif verb == 8:
            self.give_back(col, index.finish_leave(col, self.some(col, Residency.LEAVING)).tolist())
        elif verb == 9:
            index.cancel_leave(col, self.some(col, Residency.LEAVING))
        elif verb == 10:
            ids = index.match(*self.prompt())
            if len(ids):
                where = self.rng.randrange(3)
                index.pin(where, ids)
                self.pins.append((where, ids))
        elif verb == 11:
            while len(self.pins) > self.rng.randrange(8):
                index.unpin(*self.pins.pop(self.rng.randrange(len(self.pins))))
        elif verb == 12:
            ids = index.match(*self.prompt())
            index.touch(col, ids)
        elif self.rng.randrange(2):
            index.set_hint(NVME, index.match(*self.prompt()))
        else:
            index.clear_hint(NVME, index.match(*self.prompt())[-1:])

    def count(self) -> None:
        for col, total in SLOTS.items():
            free, index = len(self.free[col]), self.index
            ids = np.array(list(self.blocks[col].values()), np.int32)
            resident = index.state(col, ids) == Residency.RESIDENT
            pinned = int(np.count_nonzero(resident & index.is_pinned(col, ids)))
            in_flight = index.count(col, Residency.FILLING) + index.count(col, Residency.LEAVING)
            assert free + index.evictable(col) + pinned + in_flight == total
            assert len(ids) == index.count(col, Residency.RESIDENT) + in_flight


@pytest.mark.parametrize("policy", POLICIES)
def test_every_slot_is_accounted_for_after_each_of_a_hundred_thousand_steps(policy: str) -> None:
    fuzz = Fuzz(policy, seed=1)
    for number in range(STEPS):
        fuzz.step()
        fuzz.count()
        if number % 4000 == 0:
            fuzz.index.check()
    fuzz.index.check()
    assert fuzz.num_splits > 100 and fuzz.num_evicted > 5_000
