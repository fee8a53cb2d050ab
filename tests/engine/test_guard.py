"""No launch, prefill or decode, reaches a kernel with a slot that its lease may not read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.engine.request import Request, State
from kvtier.engine.scheduler import Work
from kvtier.tiers.errors import LaunchRefused
from kvtier.tiers.guard import Launches
from kvtier.tiers.simulated import SimDevice
from kvtier.tiers.table import BlockTable
from tests.engine.rig import NAMESPACE, Rig, make_rig, prompts, stored
from tests.tiers.cache_rig import stamped


@dataclass
class Tampered:
    """A lease whose block table names one other slot."""

    id: int
    table: BlockTable


def tamper(request: Request, slot: int, position: int) -> None:
    assert request.lease is not None
    slots = request.lease.block_table.copy()
    slots[position] = slot
    table = BlockTable(slots, request.lease.table.generations)
    request.lease = Tampered(request.lease.id, table)  # type: ignore[assignment]


def next_work(rig: Rig) -> Work:
    while not (plan := rig.core.scheduler.plan()):
        assert rig.device.run_one(), "nothing is under way, and nothing can run"
    (work,) = plan
    return work


def prefilling(rig: Rig) -> tuple[Request, Work]:
    """A request with a cached prefix and a private tail, about to prefill."""
    document, question = prompts(rig.config, 64, 30)
    rig.run(rig.prefill(document))
    request = rig.request(np.concatenate([document, question]))
    rig.core.submit(request)
    work = next_work(rig)
    assert work.count == 30
    return request, work


def decoding(rig: Rig) -> tuple[Request, Work]:
    """A request that has generated a few tokens and is about to decode one more."""
    (text,) = prompts(rig.config, 70)
    request = rig.request(text, 20)
    rig.core.submit(request)
    rig.run_until(lambda: len(request.generated) == 3)
    work = next_work(rig)
    assert work.count == 1
    return request, work


LAUNCHES = pytest.mark.parametrize("launch", [prefilling, decoding])
Launch = Callable[[Rig], tuple[Request, Work]]


def expect_refused(rig: Rig, work: Work, reason: str) -> None:
    before = rig.hbm.tensor.clone()
    with pytest.raises(LaunchRefused, match=reason):
        rig.runner.run([work])
    same = torch.equal(before.view(torch.int32), rig.hbm.tensor.view(torch.int32))
    assert same, "the launch ran although it was refused"


@LAUNCHES
def test_the_untouched_launch_runs(tiny: Path, launch: Launch) -> None:
    rig = make_rig(tiny)
    request, work = launch(rig)
    assert rig.runner.run([work])[request.id].shape == (rig.config.vocab_size,)


@LAUNCHES
@pytest.mark.parametrize("position", [0, -1])
def test_a_slot_that_holds_nothing_is_refused(tiny: Path, launch: Launch, position: int) -> None:
    rig = make_rig(tiny)
    request, work = launch(rig)
    free = int(rig.hbm.alloc(1)[0])
    tamper(request, free, position)
    expect_refused(rig, work, f"slot {free} is FREE")


@LAUNCHES
def test_another_requests_private_slot_is_refused(tiny: Path, launch: Launch) -> None:
    rig = make_rig(tiny)
    request, work = launch(rig)
    other = rig.cache.acquire(NAMESPACE, prompts(rig.config, 20)[0])
    rig.cache.extend(other, 2)
    foreign = int(other.block_table[1])
    tamper(request, foreign, -1)
    expect_refused(rig, work, f"slot {foreign} is PRIVATE by lease {other.id}")


@LAUNCHES
def test_a_slot_that_a_copy_is_filling_is_refused(tiny: Path, launch: Launch) -> None:
    device = SimDevice(0)
    (loading,) = prompts(make_rig(tiny).config, 96)
    store = stored(tiny, loading, device)
    rig = make_rig(tiny, device=device, store=store)
    request, work = launch(rig)
    lease = rig.cache.acquire(NAMESPACE, loading)
    while not rig.cache.statistics().pools[0].filling:
        assert device.run_one()
        rig.cache.poll()
    filling = next(slot for slot in range(rig.hbm.num_slots) if is_filling(rig, lease.id, slot))
    tamper(request, filling, 0)
    expect_refused(rig, work, f"slot {filling} is FILLING")


def is_filling(rig: Rig, lease: int, slot: int) -> bool:
    try:
        table = stamped(rig.cache, [slot])
        rig.cache.guard.check([(Tampered(lease, table), table)])
    except LaunchRefused as refusal:
        return "FILLING" in str(refusal)
    return False


@LAUNCHES
@pytest.mark.parametrize("slot", [-1, 64])
def test_a_slot_outside_the_pool_is_refused(tiny: Path, launch: Launch, slot: int) -> None:
    rig = make_rig(tiny)
    request, work = launch(rig)
    tamper(request, slot, 1)
    expect_refused(rig, work, f"slot {slot} is outside the pool")


def test_every_launch_of_a_run_passes_the_guard(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(tiny)
    checked: list[int] = []
    check = rig.cache.guard.check

    def counted(tables: Sequence[tuple[Launches, BlockTable]]) -> None:
        checked.append(len(tables))
        check(tables)

    monkeypatch.setattr(rig.cache.guard, "check", counted)
    requests = [rig.request(text, 5) for text in prompts(rig.config, 40, 20)]
    rig.run(*requests)
    assert all(request.state is State.FINISHED for request in requests)
    assert sum(checked) == 2 * 5  # a prefill and four decoding launches for each
