"""Exact mode on small models: logits bit by bit, whatever was cached and whoever ran beside."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from kvtier.engine.assembly import CacheSettings
from kvtier.engine.batch import Batch, Span
from kvtier.engine.cpu_attention import CpuAttention
from kvtier.engine.cuts import ChunkCuts
from kvtier.engine.errors import BadPrompt, BadSettings, NotExact
from kvtier.engine.exact import settle_exact
from kvtier.engine.llm import LLM
from kvtier.engine.model import Attention, LlamaModel
from kvtier.engine.proofs import prove_rows_independent
from kvtier.engine.request import Request, State
from kvtier.engine.scheduler import EngineSettings
from kvtier.index.words import TierId, Tokens
from kvtier.tiers.simulated import SimDevice, SimStore
from tests.engine.rig import NAMESPACE, Rig, make_rig, prompts
from tests.engine.trails import Trails, same_bits
from tests.engine.variants import BLOCK, VARIANTS, load, random_tokens

CHUNK = 32
EXACT = EngineSettings(exact=True, exact_chunk=CHUNK, max_running=4, step_tokens=100)
HITS = (16, 31, 32, 33, 48, 63, 64, 65, 80, 96)
"""Lengths of what was asked before: around each block and chunk of the prompt."""


@pytest.fixture
def trails(monkeypatch: pytest.MonkeyPatch) -> Trails:
    return Trails(monkeypatch)


def logits(rig: Rig, trails: Trails, *requests: Request) -> list[Tensor]:
    """What each led to, run together; nothing is held afterwards."""
    trails.take()
    rig.run(*requests)
    rig.expect_idle()
    return trails.take()


def cold(directory: Path, trails: Trails, text: Tokens, n: int = 5) -> list[Tensor]:
    rig = make_rig(directory, settings=EXACT)
    return logits(rig, trails, rig.request(text, n))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("length", [33, 64, 97])
def test_a_hit_of_any_length_in_hbm_or_dram_gives_the_bits_of_a_miss(
    variant: Callable[[str], Path], trails: Trails, name: str, length: int
) -> None:
    directory = variant(name)
    (text,) = prompts(load(directory)[0], length)
    want = cold(directory, trails, text)
    for hit in HITS:
        rig = make_rig(directory, dram=16, settings=EXACT)
        rig.run(rig.request(text[:hit], 3))
        request = rig.request(text, 5)
        assert same_bits(logits(rig, trails, request), want), hit
        usable = min(hit, length - 1) // CHUNK * CHUNK
        assert request.cached_tokens == usable
        rig.cache.shed(TierId.HBM)
        again = rig.request(text, 5)
        assert same_bits(logits(rig, trails, again), want), hit
        whole = (length - 1) // CHUNK * CHUNK
        assert again.hit_tokens == {TierId.DRAM: whole}


def stored_blocks(directory: Path, text: Tokens, device: SimDevice, blocks: int) -> SimStore:
    """A store that an exact engine has left, which held on to the first `blocks` of `text`."""
    store = SimStore(TierId.NVME, device)
    rig = make_rig(directory, dram=32, device=device, store=store, settings=EXACT)
    rig.run(rig.prefill(text))
    ticket = rig.cache.flush(NAMESPACE, text[: blocks * BLOCK])
    assert ticket.wait(None)
    ticket.close()
    return store


@pytest.mark.parametrize("blocks", range(1, 7))
def test_a_hit_that_ends_within_a_chunk_is_cut_to_whole_ones_and_keeps_its_sources(
    tiny: Path, trails: Trails, blocks: int
) -> None:
    device = SimDevice(blocks)
    (text,) = prompts(load(tiny)[0], 110)
    want = cold(tiny, trails, text)
    store = stored_blocks(tiny, text, device, blocks)
    rig = make_rig(tiny, dram=32, device=device, store=store, settings=EXACT)
    request = rig.request(text, 5)
    assert same_bits(logits(rig, trails, request), want)
    usable = blocks * BLOCK // CHUNK * CHUNK
    assert request.cached_tokens == usable
    assert request.hit_tokens == ({TierId.NVME: usable} if usable else {})


@pytest.mark.parametrize("seed", range(4))
def test_blocks_that_fail_to_arrive_change_no_bit(tiny: Path, trails: Trails, seed: int) -> None:
    device = SimDevice(seed)
    (text,) = prompts(load(tiny)[0], 130)
    want = cold(tiny, trails, text)
    store = stored_blocks(tiny, text, device, 8)
    device.faults = lambda name: name.startswith("copy") and device.choose(4) == 0
    rig = make_rig(tiny, dram=32, device=device, store=store, settings=EXACT)
    request = rig.request(text, 5)
    assert same_bits(logits(rig, trails, request), want)
    assert request.cached_tokens is not None and request.cached_tokens % CHUNK == 0


def test_without_exact_mode_bits_differ(tiny: Path, trails: Trails) -> None:
    """The control: the same comparisons, and they can fail."""
    plain = replace(EXACT, exact=False)
    (text,) = prompts(load(tiny)[0], 97)
    fresh = make_rig(tiny, settings=plain)
    want = logits(fresh, trails, fresh.request(text, 5))
    differ = []
    for hit in HITS:
        rig = make_rig(tiny, settings=plain)
        rig.run(rig.request(text[:hit], 3))
        differ.append(not same_bits(logits(rig, trails, rig.request(text, 5)), want))
    assert any(differ)


asked = st.tuples(
    st.integers(0, 1),  # which document
    st.sampled_from([0, 16, 31, 32, 33, 48, 64, 90]),  # how much of it
    st.integers(1, 40),  # tokens of its own
    st.integers(1, 9),  # tokens to generate
    st.integers(0, 6),  # launches that go before it
)


def prompt_of(document: int, length: int, own: int) -> Tokens:
    head = np.random.default_rng(document).integers(3, 200, 90)[:length]
    tail = np.random.default_rng(1000 + own).integers(3, 200, own)
    return np.concatenate([head, tail]).astype(np.int32)


@hypothesis_settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    plan=st.lists(asked, min_size=2, max_size=6),
    hbm=st.sampled_from([10, 14, 40]),
    dram=st.sampled_from([0, 24]),
    seed=st.integers(0, 1000),
    faulty=st.booleans(),
)
def test_bits_do_not_depend_on_company_order_room_or_faults(
    tiny: Path,
    trails: Trails,
    plan: Sequence[tuple[int, int, int, int, int]],
    hbm: int,
    dram: int,
    seed: int,
    faulty: bool,
) -> None:
    wanted = [cold(tiny, trails, prompt_of(*each[:3]), each[3])[0] for each in plan]
    device = SimDevice(seed)
    if faulty:
        device.faults = lambda name: device.choose(5) == 0
    store = SimStore(TierId.NVME, device, capacity=12)
    rig = make_rig(tiny, hbm=hbm, dram=dram, device=device, store=store, settings=EXACT)
    requests = [rig.request(prompt_of(*each[:3]), each[3]) for each in plan]
    for request, (*_, launches) in zip(requests, plan, strict=True):
        for _ in range(launches):
            rig.core.step()
        rig.core.submit(request)
    rig.finish(*requests)
    rig.expect_idle()
    assert same_bits(trails.take(), wanted)


def test_what_was_generated_before_a_preemption_is_generated_again_in_the_same_launches(
    tiny: Path, trails: Trails
) -> None:
    older, younger = prompts(load(tiny)[0], 40, 41)
    wanted = [cold(tiny, trails, text, 60)[0] for text in (older, younger)]
    rig = make_rig(tiny, hbm=8, dram=32, settings=EXACT)
    requests = [rig.request(older, 60), rig.request(younger, 60)]
    for request in requests:
        rig.core.submit(request)
    rig.run_until(lambda: len(requests[1].generated) > 8)
    rig.run_until(lambda: requests[1].state is State.WAITING)
    rig.finish(*requests)
    rig.expect_idle()
    assert same_bits(trails.take(), wanted)


def test_only_whole_chunks_of_prompts_are_shared(tiny: Path) -> None:
    rig = make_rig(tiny, settings=EXACT)
    (text,) = prompts(rig.config, 80)
    request = rig.request(text, 40)
    rig.run(request)
    assert len(request.tokens) == 120
    assert rig.cache.match(NAMESPACE, request.tokens).tokens == 64


def test_every_launch_has_one_of_two_row_counts_and_so_have_the_rows_with_logits(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: set[tuple[int, int]] = set()
    forward = LlamaModel.forward

    def watched(model: LlamaModel, batch: Batch, attention: Attention) -> Tensor:
        shapes.add((batch.rows, len(batch.wanted)))
        return forward(model, batch, attention)

    monkeypatch.setattr(LlamaModel, "forward", watched)
    rig = make_rig(tiny, settings=EXACT)
    rig.run(*(rig.request(text) for text in prompts(rig.config, 1, 33, 64, 70)))
    assert shapes == {(CHUNK, 0), (CHUNK, 4), (4, 4)}


def test_a_request_waits_for_one_that_computes_its_chunks_and_for_nothing_else(tiny: Path) -> None:
    rig = make_rig(tiny, settings=EXACT)
    document, *questions = prompts(rig.config, 80, 5, 7)
    first, second = (rig.request(np.concatenate([document, question])) for question in questions)
    rig.core.submit(first)
    rig.core.submit(second)
    rig.run_until(lambda: first.computed == 64)
    rig.core.step()
    assert second.cached_tokens == 64, "the rest of the document is not shared"
    rig.finish(first, second)
    rig.expect_idle()


@pytest.mark.parametrize(
    ("prompt", "computed", "budget", "want"),
    [
        (70, 0, 32, (32, 32)),
        (70, 32, 99, (32, 32)),
        (70, 64, 32, (6, 32)),
        (70, 64, 31, (0, 0)),  # never cut by the budget
        (70, 70, 1, (1, 1)),  # generated, and generated again: one at a time
        (70, 70, 0, (0, 0)),
        (70, 75, 99, (1, 1)),
        (70, 80, 99, (0, 0)),
    ],
)
def test_chunks_begin_at_multiples_and_what_is_past_the_prompt_goes_row_by_row(
    prompt: int, computed: int, budget: int, want: tuple[int, int]
) -> None:
    request = Request(0, NAMESPACE, np.zeros(prompt, np.int32), None, 10, 0.0)
    for _ in range(10):
        request.append(1)
    request.computed = computed
    assert ChunkCuts(CHUNK).next(request, budget) == want


# ---- what it is founded on -----------------------------------------------------------------------


def by_place(rows: Tensor) -> Tensor:
    return rows + torch.arange(len(rows))[:, None]


def by_others(rows: Tensor) -> Tensor:
    return rows + rows.sum(0)


def by_last(rows: Tensor) -> Tensor:
    """One place of many differs in one bit."""
    out = rows.clone()
    out[-1] = torch.nextafter(out[-1], torch.tensor(torch.inf))
    return out


@pytest.mark.parametrize("stage", [by_place, by_others, by_last])
def test_rows_that_show_their_place_or_their_neighbours_are_refused(stage: object) -> None:
    rows = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    with pytest.raises(NotExact, match=r"the stage of 9 rows gives a row other bits"):
        prove_rows_independent("the stage of 9 rows", stage, [rows])  # type: ignore[arg-type]
    assert torch.equal(prove_rows_independent("doubling", lambda each: each * 2, [rows]), rows * 2)


class Forgetful(CpuAttention):
    """Context from the pool is not quite what was computed."""

    def preload(self, span: Span) -> None:
        fresh = span.sequence not in self._mirrors
        super().preload(span)
        if fresh and span.start:
            self._mirrors[span.sequence]._data.mul_(1 + 2**-20)


def test_attention_that_shows_where_its_context_came_from_is_refused(tiny: Path) -> None:
    _, model = load(tiny)
    with pytest.raises(NotExact, match="over a context that was found"):
        settle_exact(model, Forgetful, BLOCK, CHUNK, 4)
    with pytest.raises(NotExact, match="over a context that was found"):
        settle_exact(model, Crowded, BLOCK, CHUNK, 4)


class Crowded(CpuAttention):
    """The bits of a decoding row show whether it is alone."""

    def attend(self, layer: int, states: Tensor) -> Tensor:
        out = super().attend(layer, states)
        assert self._batch is not None
        return out * (1 + 2**-20) if len(self._batch.spans) > 1 else out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_proof_passes_here_and_is_repeatable(
    tiny: Path, tmp_path: Path, dtype: str, batch: int
) -> None:
    names = set()
    for _ in range(2):
        engine = replace(EXACT, max_running=batch)
        with LLM(tiny, cache=small(), engine=engine, dtype=dtype) as llm:
            names.add(llm.namespace().exact)
    (name,) = names
    assert f"chunk={CHUNK};kernels=1;threads={torch.get_num_threads()};torch=" in name


def test_threads_that_change_under_the_engine_are_refused_and_nothing_is_held(tiny: Path) -> None:
    rig = make_rig(tiny, settings=EXACT)
    (text,) = prompts(rig.config, 50)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        with pytest.raises(NotExact, match=f"now runs {before + 1} threads, .* with {before};"):
            rig.run(rig.request(text))
    finally:
        torch.set_num_threads(before)
    rig.expect_idle()
    assert rig.cache.match(NAMESPACE, text).tokens == 0


def small(store: Path | None = None) -> CacheSettings:
    return CacheSettings(
        hbm_bytes=2 << 20, dram_bytes=4 << 20, store=store, nvme_bytes=64 << 20, writeback_s=None
    )


def test_what_the_bits_depend_on_is_part_of_the_namespace(tiny: Path) -> None:
    digests = {}
    for name, engine in {
        "plain": replace(EXACT, exact=False),
        "exact": EXACT,
        "batch": replace(EXACT, max_running=3),
        "chunk": replace(EXACT, exact_chunk=64),
    }.items():
        with LLM(tiny, cache=small(), engine=engine) as llm:
            digests[name] = llm.namespace().digest
            if not engine.exact:
                assert llm.namespace().exact == ""
    assert digests["exact"] == digests["batch"], "decoded blocks are not shared"
    assert len(set(digests.values())) == 3


def test_prefill_shares_whole_chunks(tiny: Path) -> None:
    with LLM(tiny, cache=small(), engine=EXACT) as llm:
        tokens = random_tokens(llm.config, 80)
        assert llm.prefill(tokens).prompt_tokens == 64
        assert llm.prefill(tokens).cached_tokens == 64
        with pytest.raises(BadPrompt, match="31 tokens do not fill one chunk of 32"):
            llm.prefill(tokens[:31])


def test_settings_that_exact_mode_cannot_run_with_are_refused(tiny: Path) -> None:
    with pytest.raises(BadSettings, match=r"engine\.step_tokens: 35 leaves no room .* to 36"):
        replace(EXACT, step_tokens=35)
    with pytest.raises(BadSettings, match=r"engine\.exact_chunk: 0 given"):
        replace(EXACT, exact_chunk=0)
    with pytest.raises(BadSettings, match=r"engine\.exact_chunk: 40 is no multiple .* of 16"):
        LLM(tiny, cache=small(), engine=replace(EXACT, exact_chunk=40))
