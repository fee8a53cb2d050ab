"""Who runs when: batching, loading, deadlines, preemption, and what is left behind."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtier.engine.batch import Span
from kvtier.engine.cpu_attention import CpuAttention
from kvtier.engine.errors import BadSettings
from kvtier.engine.model import LlamaModel
from kvtier.engine.request import Request, State
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.scheduler import EngineSettings, Work
from kvtier.index.lookahead import Waiting
from kvtier.index.words import BlockKey, TierId, Tokens
from kvtier.tiers.contracts import Answer, Flight, Put
from kvtier.tiers.errors import TierFull
from kvtier.tiers.lease import Lease
from kvtier.tiers.simulated import SimDevice, SimStore
from kvtier.tiers.table import BlockTable
from tests.engine.rig import Rig, make_rig, prompts, stored
from tests.engine.variants import BLOCK, reference, reference_greedy


def alone(directory: Path, *texts: Tokens, max_tokens: int = 6) -> list[list[int]]:
    """What each prompt leads to in an engine of its own."""
    outputs = []
    for text in texts:
        rig = make_rig(directory)
        outputs += rig.run(rig.request(text, max_tokens))
    return outputs


def watch_plans(rig: Rig, seen: list[list[Work]]) -> None:
    plan = rig.core.scheduler.plan

    def watched() -> list[Work]:
        work = plan()
        seen.append(work)
        return work

    rig.core.scheduler.plan = watched  # type: ignore[method-assign]


def test_greedy_output_is_transformers_own(tiny: Path) -> None:
    rig = make_rig(tiny)
    (text,) = prompts(rig.config, 45)
    assert rig.run(rig.request(text, 12)) == [reference_greedy(reference(tiny), text, 12)]
    rig.expect_idle()


def test_requests_together_give_what_each_gives_alone(tiny: Path) -> None:
    rig = make_rig(tiny, settings=EngineSettings(step_tokens=48, max_running=4))
    texts = prompts(rig.config, 1, 15, 16, 17, 70, 131)
    assert rig.run(*(rig.request(text, 9) for text in texts)) == alone(tiny, *texts, max_tokens=9)
    rig.expect_idle()


def test_a_launch_stays_within_its_budget_and_decodes_first(tiny: Path) -> None:
    rig = make_rig(tiny, settings=EngineSettings(step_tokens=24, max_running=3))
    plans: list[list[Work]] = []
    watch_plans(rig, plans)
    rig.run(*(rig.request(text) for text in prompts(rig.config, 20, 90, 33)))
    for plan in plans:
        decodes = any(work.count == 1 for work in plan)
        assert sum(work.count for work in plan) <= (24 if decodes else 48)
    mixed = [plan for plan in plans if {work.count > 1 for work in plan} == {True, False}]
    assert mixed, "prompts and decoding never shared a launch"
    for plan in mixed:
        long = [work.count > 1 for work in plan]
        assert long == sorted(long)


def test_a_request_behind_one_with_the_same_document_finds_it_computed(tiny: Path) -> None:
    rig = make_rig(tiny, settings=EngineSettings(step_tokens=32, max_running=4))
    document, *questions = prompts(rig.config, 80, 5, 7)
    first, second = (rig.request(np.concatenate([document, question])) for question in questions)
    rig.run(first, second)
    assert first.cached_tokens == 0
    assert second.cached_tokens == 80
    rig.expect_idle()


def test_a_loading_request_does_not_hold_up_a_running_one(tiny: Path) -> None:
    device = SimDevice(1)
    (loading,) = prompts(make_rig(tiny).config, 100)
    store = stored(tiny, loading, device)
    rig = make_rig(tiny, dram=32, device=device, store=store)
    (short,) = prompts(rig.config, 10)
    slow, quick = rig.request(loading), rig.request(short, 8)
    rig.core.submit(slow)
    rig.core.submit(quick)
    # Simulated copies and lookups run only when the engine waits, and while one request can run
    # the engine does not wait.
    rig.core.step()
    while quick.state is not State.RUNNING:
        rig.core.step()
    assert slow.state is State.LOADING
    while quick.state is State.RUNNING:
        before = device.num_pending
        rig.core.step()
        assert device.num_pending >= min(before, 1)
        assert slow.state is State.LOADING
    rig.finish(slow)
    assert slow.cached_tokens == 96
    assert slow.hit_tokens == {TierId.NVME: 96}
    assert [slow.generated.tolist(), quick.generated.tolist()] == [
        *alone(tiny, loading),
        *alone(tiny, short, max_tokens=8),
    ]
    rig.expect_idle()


class SilentStore(SimStore):
    """Never answers a lookup."""

    def lookup(
        self,
        namespace: bytes,
        keys: Sequence[BlockKey],
        tokens: Tokens,
        *,
        asks: bool = False,
    ) -> Answer:
        return Answer(self.device.signal)

    @property
    def device(self) -> SimDevice:
        return self._device


def test_a_store_that_never_answers_costs_a_deadline_and_nothing_else(tiny: Path) -> None:
    device = SimDevice(0)
    rig = make_rig(
        tiny,
        dram=8,
        device=device,
        store=SilentStore(TierId.NVME, device),
        settings=EngineSettings(load_deadline_s=2.0),
    )
    (text,) = prompts(rig.config, 50)
    request = rig.request(text)
    assert rig.run(request) == alone(tiny, text)
    assert request.cached_tokens == 0
    assert request.first_token_at is not None
    assert 2.0 <= request.first_token_at - request.arrived < 2.5
    rig.expect_idle()


def test_what_has_arrived_is_made_ready_while_the_rest_is_on_its_way(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimDevice(3)
    (text,) = prompts(make_rig(tiny).config, 200)
    store = stored(tiny, text, device)
    rig = make_rig(tiny, dram=32, device=device, store=store)
    ready: list[int] = []
    preload = CpuAttention.preload

    def watched(attention: CpuAttention, span: Span) -> None:
        ready.append(span.start // BLOCK)
        preload(attention, span)

    monkeypatch.setattr(CpuAttention, "preload", watched)
    request = rig.request(text, 1)
    assert rig.run(request) == alone(tiny, text, max_tokens=1)
    arriving = ready[: ready.index(12)]
    assert len(arriving) > 1, "nothing was made ready before all had arrived"
    assert arriving == sorted(arriving)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_that_fail_to_arrive_are_computed(tiny: Path, seed: int) -> None:
    device = SimDevice(seed)
    (text,) = prompts(make_rig(tiny).config, 130)
    store = stored(tiny, text, device)
    device.faults = lambda name: name.startswith("copy") and device.choose(4) == 0
    rig = make_rig(tiny, dram=32, device=device, store=store)
    request = rig.request(text)
    assert rig.run(request) == alone(tiny, text)
    assert request.cached_tokens is not None
    assert request.cached_tokens == sum(request.hit_tokens.values())
    rig.expect_idle()


class HungStore(SimStore):
    """Takes what it is given and never says what became of it."""

    def put(self, request: Put) -> Flight:
        return Flight(len(request.keys), self._device.signal)


def test_a_store_that_hangs_while_slots_are_vacated_ends_in_an_error_not_in_silence(
    tiny: Path,
) -> None:
    device = SimDevice(0)
    store = HungStore(TierId.NVME, device)
    settings = EngineSettings(load_deadline_s=3.0)
    rig = make_rig(tiny, hbm=8, device=device, store=store, settings=settings)
    first, second = prompts(rig.config, 80, 100)
    rig.run(rig.request(first))
    request = rig.request(second)
    with pytest.raises(TierFull, match="no room"):
        rig.core.run([request])
    assert device.clock() <= 2 * 3.0 + 1.0
    assert request.finish_reason == "cancelled"
    assert rig.cache.statistics().leases == 0


@pytest.mark.parametrize(("hbm", "dram"), [(9, 0), (9, 32), (13, 4), (24, 64)])
def test_requests_that_outgrow_the_pool_take_turns_and_lose_nothing(
    tiny: Path, hbm: int, dram: int
) -> None:
    settings = EngineSettings(step_tokens=64, max_running=8)
    rig = make_rig(tiny, hbm=hbm, dram=dram, settings=settings)
    texts = prompts(rig.config, 40, 50, 30, 61)
    requests = [rig.request(text, 50) for text in texts]
    assert rig.run(*requests) == alone(tiny, *texts, max_tokens=50)
    rig.expect_idle()


def test_a_preempted_request_goes_back_to_waiting_and_keeps_its_whole_blocks(tiny: Path) -> None:
    rig = make_rig(tiny, hbm=8, dram=32, settings=EngineSettings(step_tokens=64, max_running=4))
    older, younger = (rig.request(text, 60) for text in prompts(rig.config, 40, 41))
    rig.core.submit(older)
    rig.core.submit(younger)
    rig.run_until(lambda: younger.state is State.RUNNING and len(younger.generated) > 8)
    rig.run_until(lambda: younger.state is State.WAITING)
    assert older.state is State.RUNNING
    done = len(younger.tokens)
    rig.run_until(lambda: younger.state is State.RUNNING)
    assert younger.lease is not None
    assert younger.lease.cached_tokens >= (done - 1) // BLOCK * BLOCK
    rig.finish(older, younger)
    assert younger.cached_tokens == 0, "the figure is that of the first admission"
    rig.expect_idle()
    statistics = rig.cache.statistics()
    assert statistics.asked_tokens == 40 + 41, "each is heard of once"
    assert not any(statistics.hit_tokens.values()), "what it computed itself is no hit"


def test_waiting_requests_have_their_blocks_brought_to_dram_meanwhile(tiny: Path) -> None:
    device = SimDevice(2)
    (text,) = prompts(make_rig(tiny).config, 90)
    store = stored(tiny, text, device)
    rig = make_rig(
        tiny, dram=32, device=device, store=store, settings=EngineSettings(max_running=1)
    )
    (other,) = prompts(rig.config, 12)
    running, waiting = rig.request(other, 4), rig.request(text)
    rig.core.submit(running)
    rig.core.submit(waiting)
    rig.run_until(lambda: waiting.prefetch is not None)
    for _ in range(4):  # it comes in pieces
        device.run_all()
        rig.cache.poll()
    assert waiting.state is State.WAITING
    resident = {pool.tier: pool.resident for pool in rig.cache.statistics().pools}
    assert resident[TierId.DRAM] >= 5
    rig.finish(running, waiting)
    assert waiting.hit_tokens == {TierId.NVME: 80}, "a prefetch hides where the blocks came from"
    rig.expect_idle()


def watch_queue(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """What the cache is told of the queue, each time: the tokens of those who wait."""
    told: list[list[list[int]]] = []
    expect = rig.cache.expect

    def watched(waiting: Sequence[Waiting]) -> None:
        told.append([each.tokens.tolist() for each in waiting])
        expect(waiting)

    monkeypatch.setattr(rig.cache, "expect", watched)
    return told


def test_the_cache_is_told_who_waits_in_order_and_when_nobody_does(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(tiny, settings=EngineSettings(max_running=1, lookahead=2))
    told = watch_queue(rig, monkeypatch)
    texts = prompts(rig.config, 20, 33, 47, 50)
    requests = [rig.request(text, 2) for text in texts]
    rig.core.run(requests)
    # The last token of a prompt is always computed: the cache is asked for whole blocks before it.
    first, second, third, fourth = [
        text[: (len(text) - 1) // BLOCK * BLOCK].tolist() for text in texts
    ]
    seen = [each for each, before in zip(told, [None, *told], strict=False) if each != before]
    assert seen == [
        [first],
        [first, second],
        [second, third],
        [third, fourth],
        [fourth],
        [],
    ]


def test_a_request_that_is_cancelled_while_it_waits_is_not_expected_any_more(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(tiny, settings=EngineSettings(max_running=1))
    told = watch_queue(rig, monkeypatch)
    running, waiting = (rig.request(text, 4) for text in prompts(rig.config, 20, 33))
    rig.core.submit(running)
    rig.core.submit(waiting)
    rig.core.step()
    assert len(told[-1]) == 1
    rig.core.scheduler.finish(waiting, "cancelled")
    assert told[-1] == []
    rig.finish(running)
    rig.expect_idle()


def test_blocks_that_a_waiting_request_will_find_outlive_what_others_compute(tiny: Path) -> None:
    settings = EngineSettings(step_tokens=64, max_running=1)
    rig = make_rig(tiny, hbm=12, settings=settings)
    document, younger, other = prompts(rig.config, 64, 48, 100)
    rig.run(rig.request(document, 1))
    rig.run(rig.request(younger, 1))
    between, waiting = rig.request(other, 30), rig.request(document, 1)
    rig.run(between, waiting)
    assert waiting.cached_tokens == 48
    rig.expect_idle()


def test_a_preempted_request_is_no_finished_turn(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(tiny, hbm=8, dram=32, settings=EngineSettings(step_tokens=64, max_running=4))
    ends: list[tuple[int, bool]] = []
    release = rig.cache.release

    def watched(lease: Lease, *, again: bool = False) -> None:
        ends.append((lease.id, again))
        release(lease, again=again)

    monkeypatch.setattr(rig.cache, "release", watched)
    rig.run(*(rig.request(text, 60) for text in prompts(rig.config, 40, 41)))
    assert {again for _, again in ends} == {True, False}
    assert ends[0][1], "the younger one makes room first"
    assert not ends[-1][1]
    rig.expect_idle()


def test_reuse_switched_off_computes_everything(tiny: Path) -> None:
    rig = make_rig(tiny, dram=16, settings=EngineSettings(reuse=False))
    (text,) = prompts(rig.config, 60)
    requests = [rig.request(text) for _ in range(2)]
    first = rig.run(requests[0])
    assert rig.run(requests[1]) == first
    assert [request.cached_tokens for request in requests] == [0, 0]
    assert rig.cache.statistics().blocks == 0
    rig.expect_idle()


def test_an_error_in_the_middle_leaves_nothing_held(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(tiny, dram=16, settings=EngineSettings(step_tokens=32))
    launches = 0
    run = rig.runner.run

    def failing(work: Sequence[Work]) -> object:
        nonlocal launches
        launches += 1
        if launches == 3:
            raise RuntimeError("a kernel failed")
        return run(work)

    monkeypatch.setattr(rig.runner, "run", failing)
    requests: list[Request] = [rig.request(text) for text in prompts(rig.config, 50, 60, 70)]
    with pytest.raises(RuntimeError, match="a kernel failed"):
        rig.core.run(requests)
    assert {request.finish_reason for request in requests} == {"cancelled"}
    rig.expect_idle()
    assert rig.run(rig.request(requests[0].prompt)) == alone(tiny, requests[0].prompt)


def test_who_reads_the_pool_is_told_of_a_launch_that_failed_half_way(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU its first kernels are queued: their slots must not be another's before they ran."""
    rig = make_rig(tiny, dram=16)
    told: list[list[int]] = []
    launched = rig.cache.guard.launched

    def watched(tables: Sequence[tuple[Lease, BlockTable]]) -> None:
        told.append([lease.id for lease, _ in tables])
        launched(tables)

    def failing(self: LlamaModel, batch: object, attention: object) -> None:
        raise RuntimeError("out of memory behind the first layer")

    monkeypatch.setattr(rig.cache.guard, "launched", watched)
    monkeypatch.setattr(LlamaModel, "forward", failing)
    with pytest.raises(RuntimeError, match="behind the first layer"):
        rig.run(rig.request(prompts(rig.config, 40)[0]))
    assert [len(leases) for leases in told] == [1]
    rig.expect_idle()


def test_a_seeded_draw_does_not_depend_on_what_runs_beside_it(tiny: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.3, seed=5, ignore_stop=True)
    rig = make_rig(tiny)
    text, *others = prompts(rig.config, 33, 8, 50)
    single = rig.run(rig.request(text, params=params))
    again = make_rig(tiny)
    together = again.run(
        again.request(others[0]), again.request(text, params=params), again.request(others[1])
    )
    assert together[1] == single[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_tokens", 0),
        ("max_running", 0),
        ("prefetch_depth", -1),
        ("lookahead", -1),
        ("step_tokens", 15),
        ("load_deadline_s", -1),
    ],
)
def test_settings_outside_their_range_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(BadSettings, match=rf"engine\.{name}: {value}"):
        EngineSettings(**{name: value})  # type: ignore[arg-type]
