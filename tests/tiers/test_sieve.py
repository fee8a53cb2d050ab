"""What is not worth writing stays out of the store, and nothing else of the cache notices."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.index.admission import Admission, Allowance, Marks, Mask, marks_of
from kvtier.index.words import TierId, Tokens
from kvtier.tiers.contracts import Put
from kvtier.tiers.nvme.budget import DAY_S, WriteBudget
from kvtier.tiers.nvme.rows import DayWritten
from tests.nvme.rig import Rig as StoreRig
from tests.tiers.cache_rig import BLOCK_BYTES, NAMESPACE, doc, keys_of
from tests.tiers.sim_rig import SimRig


class Listed(Admission):
    """Wants the blocks it is told to want."""

    def __init__(self) -> None:
        super().__init__(8, 64)
        self.wanted: set[int] = set()
        self.asks: list[int] = []

    def want(self, tokens: Tokens, *blocks: int) -> None:
        marks = marks_of(keys_of(tokens)).tolist()
        self.wanted.update(marks[block] for block in blocks)

    def asked(self, marks: Marks) -> None:
        super().asked(marks)
        self.asks.append(len(marks))

    def worth(self, marks: Marks) -> Mask:
        return np.isin(marks, np.array(sorted(self.wanted), np.uint64))


class SieveRig(SimRig):
    admission: Listed

    @classmethod
    def sifting(cls, hbm: int = 4, dram: int = 8, **options: Any) -> "SieveRig":
        admission = Listed()
        rig = cls.make(hbm, dram, admission=admission, **options)
        rig.admission = admission
        return rig

    def pass_through(self, *seeds: int) -> None:
        """Fill DRAM with other documents, so that what was there has to leave."""
        for seed in seeds:
            self.visit(doc(seed, 4))
            self.settle()

    def stored(self, tokens: Tokens) -> list[bool]:
        return [self.store.holds(NAMESPACE, key) for key in keys_of(tokens)]


def test_what_is_not_wanted_leaves_without_being_written() -> None:
    rig = SieveRig.sifting()
    rig.pass_through(1, 2, 3, 4)
    assert len(rig.store) == 0
    statistics = rig.cache.statistics()
    assert statistics.sieve is not None
    assert (statistics.sieve.admitted, statistics.sieve.refused) == (0, statistics.dropped)
    assert statistics.dropped >= 8
    assert rig.visit(doc(1, 4)) == 0


def test_a_wanted_block_takes_its_ancestors_along_and_no_more() -> None:
    rig = SieveRig.sifting()
    rig.admission.want(doc(1, 4), 2)
    rig.pass_through(1, 2, 3, 4)
    assert rig.stored(doc(1, 4)) == [True, True, True, False]
    assert len(rig.store) == 3
    rig.store.check()
    assert rig.visit(doc(1, 4)) == 3


def test_only_as_much_is_dropped_as_has_to_leave() -> None:
    rig = SieveRig.sifting(hbm=8, dram=64)
    for seed in range(1, 9):
        rig.visit(doc(seed, 8))
        rig.settle()
    lease, _ = rig.serve(doc(9, 1))
    rig.settle()
    assert rig.cache.statistics().evicted[TierId.DRAM] == 1
    rig.cache.release(lease)


def test_a_flush_and_shedding_write_everything() -> None:
    rig = SieveRig.sifting()
    rig.visit(doc(1, 4))
    assert rig.cache.flush(NAMESPACE, doc(1, 4)).wait(rig.cache.clock() + 100)
    assert rig.stored(doc(1, 4)) == [True] * 4
    rig.visit(doc(2, 4))
    rig.settle()
    for tier in (TierId.HBM, TierId.DRAM):
        rig.cache.shed(tier, rig.cache.clock() + 100)
    assert rig.stored(doc(2, 4)) == [True] * 4


def test_write_back_writes_what_is_wanted_when_it_has_come_to_be() -> None:
    rig = SieveRig.sifting(dram=24, writeback_s=30.0)
    rig.admission.want(doc(1, 4), 1)
    rig.visit(doc(1, 4))
    rig.settle()
    for wanted in ([True, True, False, False], [True] * 4):
        rig.device.advance(31)
        for _ in range(4):
            rig.cache.poll()
            rig.device.run_all()
        assert rig.stored(doc(1, 4)) == wanted
        rig.admission.want(doc(1, 4), 3)
    rig.settle()


def test_each_request_is_told_of_once_with_its_whole_path() -> None:
    rig = SieveRig.sifting(dram=24)
    rig.visit(doc(1, 4))
    rig.settle()
    rig.visit(np.concatenate([doc(1, 2), doc(2, 1)]))
    rig.cache.prefetch(NAMESPACE, doc(1, 4)).close()
    ticket = rig.cache.lookup(NAMESPACE, doc(1, 4))
    ticket.close()
    rig.settle()
    assert rig.admission.asks == [4, 3]


def test_a_cache_learns_that_documents_do_not_come_back() -> None:
    device_rig = SimRig.make(4, 8, admission=Admission(8, 64))
    puts = 0
    plain = device_rig.store.put

    def put(request: Put) -> Any:
        nonlocal puts
        puts += len(request.keys)
        return plain(request)

    device_rig.store.put = put  # type: ignore[method-assign]
    for seed in range(1, 400):
        device_rig.visit(doc(seed, 4))
    device_rig.settle()
    early = puts
    for seed in range(400, 500):
        device_rig.visit(doc(seed, 4))
    device_rig.settle()
    assert early > 0
    assert puts - early < 40, "of 400 blocks that left"
    statistics = device_rig.cache.statistics().sieve
    assert statistics is not None and statistics.refused > 400


@pytest.mark.parametrize("left", [0, 1, 2])
def test_what_is_left_of_a_budget_binds_before_anything_is_learned(left: int) -> None:
    allowance = Allowance(left * BLOCK_BYTES + BLOCK_BYTES // 2, 100.0)
    rig = SimRig.make(4, 8, admission=Admission(8, 64), allowance=lambda: allowance)
    rig.visit(doc(1, 4))
    rig.settle()
    for seed in (2, 3):
        rig.visit(doc(seed, 4))
        rig.settle()
    stored = [rig.store.holds(NAMESPACE, key) for key in keys_of(doc(1, 4))]
    assert stored == [True] * left + [False] * (4 - left)


def test_the_days_allowance_is_what_is_left_of_the_budget_until_midnight() -> None:
    now = 20_000 * DAY_S + DAY_S / 4
    budget = WriteBudget(1000, DayWritten(20_000, 300), lambda: now)
    assert budget.allowance() == Allowance(700, DAY_S * 3 / 4)
    budget.charge(900)
    assert budget.allowance() == Allowance(0, DAY_S * 3 / 4)


def test_a_store_has_an_allowance_only_where_a_budget_was_given(tmp_path: Path) -> None:
    with StoreRig(tmp_path / "a") as rig:
        assert rig.tier.allowance() is None
    with StoreRig(tmp_path / "b", write_budget_bytes=0) as rig:
        assert rig.tier.allowance() is None
    with StoreRig(tmp_path / "c", write_budget_bytes=5000) as rig:
        allowance = rig.tier.allowance()
        assert allowance is not None and allowance.nbytes == 5000
