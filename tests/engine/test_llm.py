"""The Python face over real tiers: the same answer from everywhere, and one-line refusals."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch

from kvtier.engine.assembly import CacheSettings
from kvtier.engine.errors import BadPrompt, BadSampling, BadSettings, ModelFileMissing
from kvtier.engine.llm import LLM, Prompt
from kvtier.engine.request import Completion
from kvtier.engine.sampling import SamplingParams
from kvtier.index.errors import KvtierError
from kvtier.index.words import TierId, Tokens
from kvtier.tiers.errors import CapacityTooSmall, StoreInUse
from kvtier.tiers.nvme.tier import NvmeTier
from tests.engine.variants import random_tokens, reference, reference_greedy

MIB = 1 << 20
ANSWER = SamplingParams(max_tokens=10, ignore_stop=True)


@pytest.fixture(autouse=True)
def _own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def settings(store: Path | None = None, hbm: int = 2 * MIB, dram: int = 4 * MIB) -> CacheSettings:
    return CacheSettings(hbm_bytes=hbm, dram_bytes=dram, store=store, nvme_bytes=64 * MIB)


def ask(llm: LLM, prompt: Sequence[int] | Tokens, salt: str = "") -> Completion:
    return llm.generate([prompt], ANSWER, salt=salt)[0]


def test_cold_hbm_dram_and_nvme_hits_give_transformers_answer(tiny: Path, tmp_path: Path) -> None:
    with LLM(tiny, cache=settings(tmp_path / "store")) as llm:
        prompt = random_tokens(llm.config, 211)
        want = tuple(reference_greedy(reference(tiny), prompt, 10))
        cold, hbm = ask(llm, prompt), ask(llm, prompt)
        llm.cache.shed(TierId.HBM)
        dram = ask(llm, prompt)
        assert llm.flush(prompt).blocks == 13
    with LLM(tiny, cache=settings(tmp_path / "store")) as llm:
        nvme = ask(llm, prompt)
        llm.cache.check()
    assert [each.token_ids for each in (cold, hbm, dram, nvme)] == [want] * 4
    assert cold.cached_tokens == 0
    assert hbm.hit_tokens == {TierId.HBM: 208}
    assert dram.hit_tokens == {TierId.DRAM: 208}
    assert nvme.hit_tokens == {TierId.NVME: 208}


@pytest.mark.parametrize(("budget", "blocks"), [(None, 13), (0, 0)])
def test_an_idle_engine_writes_back_within_its_budget(
    tiny: Path, tmp_path: Path, budget: int | None, blocks: int
) -> None:
    wanted = replace(settings(tmp_path / "store"), writeback_s=0.1, write_budget_bytes=budget)
    with LLM(tiny, cache=wanted) as llm:
        ask(llm, random_tokens(llm.config, 211))
        assert isinstance(llm.store, NvmeTier)
        for _ in range(600):
            ticks = llm.cache.signal.ticks
            held = llm.store.statistics()  # the engine is not asked for anything
            if held.blocks >= 13 or held.budget_refused_blocks:
                break
            llm.cache.signal.wait(ticks, 0.1)
        assert held.blocks == blocks


def test_small_pools_evict_down_and_bring_back_the_same_answers(tiny: Path, tmp_path: Path) -> None:
    block = 3 * 2 * 16 * 24 * 4  # layers, K and V, tokens, head_dim, float32; one KV head
    small = settings(tmp_path / "store", hbm=24 * block, dram=30 * block)
    with LLM(tiny, cache=small) as llm:
        prompts = [random_tokens(llm.config, 180 + n, seed=n) for n in range(7)]
        first = [ask(llm, prompt).token_ids for prompt in prompts]
        again = [ask(llm, prompt) for prompt in prompts]
        llm.cache.check()
    with LLM(tiny, cache=small) as llm:
        restarted = [ask(llm, prompt) for prompt in prompts]
    assert [each.token_ids for each in again] == first
    assert [each.token_ids for each in restarted] == first
    found = {tier for each in again for tier in each.hit_tokens}
    assert TierId.NVME in found, "nothing was pushed out of DRAM: the pools are not small"
    assert all(set(each.hit_tokens) <= {TierId.NVME} for each in restarted)
    assert sum(each.cached_tokens for each in restarted) > 0


def test_many_requests_at_once_share_and_agree(tiny: Path, tmp_path: Path) -> None:
    with LLM(tiny, cache=settings(tmp_path / "store")) as llm:
        document = random_tokens(llm.config, 160)
        asked = [np.concatenate([document, random_tokens(llm.config, n, seed=n)]) for n in range(9)]
        together = llm.generate(asked, ANSWER)
        llm.cache.check()
    with LLM(tiny, cache=settings()) as llm:
        alone = [ask(llm, prompt, salt=str(n)) for n, prompt in enumerate(asked)]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert sum(each.cached_tokens for each in together) >= 8 * 144
    assert sum(each.cached_tokens for each in alone) == 0


def test_a_fresh_salt_finds_nothing(tiny: Path) -> None:
    with LLM(tiny, cache=settings()) as llm:
        prompt = random_tokens(llm.config, 70)
        first, salted = ask(llm, prompt), ask(llm, prompt, salt="tenant")
        assert (first.token_ids, salted.cached_tokens) == (salted.token_ids, 0)
        assert ask(llm, prompt, salt="tenant").cached_tokens == 64
        assert llm.namespace("tenant").digest != llm.namespace().digest


def test_prefill_then_flush_makes_whole_blocks_durable_and_a_second_time_computes_nothing(
    tiny: Path, tmp_path: Path
) -> None:
    with LLM(tiny, cache=settings(tmp_path / "store")) as llm:
        tokens = random_tokens(llm.config, 100)
        done = llm.prefill(tokens)
        assert (done.prompt_tokens, done.cached_tokens, done.finish_reason) == (96, 0, "prefilled")
        assert done.token_ids == ()
        assert llm.flush(tokens).blocks == 6
    with LLM(tiny, cache=settings(tmp_path / "store")) as llm:
        again = llm.prefill(tokens)
        assert (again.cached_tokens, again.hit_tokens) == (96, {TierId.NVME: 96})
        flushed = llm.flush(tokens)
        assert (flushed.blocks, flushed.failed) == (6, 0)


def test_flush_without_a_store_says_that_nothing_is_durable(tiny: Path) -> None:
    with LLM(tiny, cache=settings()) as llm:
        tokens = random_tokens(llm.config, 40)
        llm.prefill(tokens)
        flushed = llm.flush(tokens)
        assert (flushed.blocks, flushed.failed) == (0, 2)


def test_text_in_gives_text_out_and_streams_the_same(tiny: Path) -> None:
    pieces: dict[int, str] = {}
    with LLM(tiny, cache=settings()) as llm:
        prompts: list[Prompt] = [
            "tell me the thing",
            llm.chat_prompt([{"role": "user", "content": "why?"}]),
        ]
        done = llm.generate(
            prompts,
            SamplingParams(max_tokens=30),
            on_text=lambda place, text: pieces.update({place: pieces.get(place, "") + text}),
        )
        for place, each in enumerate(done):
            assert each.text == llm.tokenizer.decode(each.token_ids) == pieces.get(place, "")
            assert each.ttft_s <= each.total_s


def test_generation_stops_at_an_end_id_which_is_not_part_of_the_output(tiny: Path) -> None:
    with LLM(tiny, cache=settings()) as llm:
        prompt = random_tokens(llm.config, 33)
        free = ask(llm, prompt).token_ids
        stop = free[4]
        done = llm.generate([prompt], SamplingParams(max_tokens=10, stop_ids=(stop,)))[0]
    assert done.finish_reason == "stop"
    assert done.token_ids == free[: free.index(stop)]


def test_generation_ends_where_the_model_does(tiny: Path) -> None:
    with LLM(tiny, cache=settings(hbm=16 * MIB)) as llm:
        longest = llm.config.max_positions
        done = ask(llm, random_tokens(llm.config, longest - 2))
        assert len(done.token_ids) == 3
        assert done.finish_reason == "length"
        assert len(ask(llm, random_tokens(llm.config, longest)).token_ids) == 1


def test_each_prompt_may_have_its_own_sampling(tiny: Path) -> None:
    with LLM(tiny, cache=settings()) as llm:
        prompt = random_tokens(llm.config, 20)
        each = [SamplingParams(max_tokens=n, ignore_stop=True) for n in (1, 3)]
        assert [len(done.token_ids) for done in llm.generate([prompt, prompt], each)] == [1, 3]
        with pytest.raises(BadPrompt, match="2 given for 1 prompts"):
            llm.generate([prompt], each)


def test_bad_prompts_are_refused_before_anything_runs(tiny: Path) -> None:
    with LLM(tiny, cache=settings(hbm=16 * MIB)) as llm:
        vocabulary = llm.config.vocab_size
        refused: list[tuple[list[object], str]] = [
            ([[5, 6], []], "prompt: empty"),
            ([[]], "prompt: empty"),
            ([[5] * 2049], "2049 tokens, the model allows 2048"),
            ([[5, vocabulary]], f"token id {vocabulary} is outside"),
            ([[5, -1]], "negative"),
        ]
        for prompts, words in refused:
            with pytest.raises(KvtierError, match=words) as caught:
                llm.generate(prompts, ANSWER)  # type: ignore[arg-type]
            assert "\n" not in str(caught.value)
        with pytest.raises(BadPrompt, match="single text"):
            llm.generate("hello", ANSWER)
        with pytest.raises(BadPrompt, match="do not fill one block of 16"):
            llm.prefill([5] * 15)
        with pytest.raises(BadSampling, match="max_tokens"):
            llm.generate([[5]], SamplingParams(max_tokens=0))
        assert llm.statistics().asked_tokens == 0


def test_a_prompt_that_no_pool_of_this_size_can_hold_is_refused_with_the_size_it_needs(
    tiny: Path,
) -> None:
    with LLM(tiny, cache=settings(hbm=100_000)) as llm:
        with pytest.raises(BadPrompt, match="need 14 blocks, the HBM pool has 10; raise hbm_bytes"):
            ask(llm, random_tokens(llm.config, 200))
        assert len(ask(llm, random_tokens(llm.config, 150)).token_ids) == 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error is for machines without CUDA")
def test_a_missing_gpu_is_one_line(tiny: Path) -> None:
    with pytest.raises(BadSettings, match="torch sees no CUDA; use cpu"):
        LLM(tiny, device="cuda:0")


def test_a_model_without_a_tokenizer_serves_token_ids(tiny: Path, tmp_path: Path) -> None:
    bare = copytree(tiny, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with LLM(bare, cache=settings()) as llm:
        done = ask(llm, [5, 6, 7])
        assert (len(done.token_ids), done.text) == (10, "")
        with pytest.raises(ModelFileMissing, match=r"tokenizer\.json"):
            llm.generate(["text"], ANSWER)


def test_settings_that_contradict_each_other_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="store and a socket"):
        CacheSettings(store=tmp_path, socket=tmp_path / "socket")
    with pytest.raises(BadSettings, match=r"cache\.writeback_s: -1 given"):
        CacheSettings(writeback_s=-1)
    with pytest.raises(BadSettings, match=r"cache\.nvme_admission: 'some' given"):
        CacheSettings(nvme_admission="some")
    with pytest.raises(BadSettings, match=r"cache\.write_budget_bytes: -5 given"):
        CacheSettings(write_budget_bytes=-5)
    with pytest.raises(BadSettings, match=r"cache\.dram_policy: 'mru' given, want lru, arc"):
        CacheSettings(dram_policy="mru")
    for wrong, words in (
        ({"dtype": "float64"}, "float64"),
        ({"device": "tpu"}, "'tpu' is not supported"),
        ({"threads": 0}, "threads: 0"),
    ):
        with pytest.raises(BadSettings, match=words):
            LLM(tiny, **wrong)
    with pytest.raises(CapacityTooSmall, match="hbm pool"):
        LLM(tiny, cache=settings(hbm=100))
    with pytest.raises(CapacityTooSmall, match="dram_bytes"):
        LLM(tiny, cache=settings(dram=100))
    with pytest.raises(CapacityTooSmall, match="nvme_bytes: 500 is less than one block"):
        LLM(tiny, cache=replace(settings(tmp_path / "store"), nvme_bytes=500))
    assert not (tmp_path / "store").exists()


def test_without_dram_hbm_alone_serves(tiny: Path) -> None:
    with LLM(tiny, cache=settings(dram=0)) as llm:
        prompt = random_tokens(llm.config, 50)
        assert ask(llm, prompt).token_ids == ask(llm, prompt).token_ids
        assert [pool.tier for pool in llm.statistics().pools] == [TierId.HBM]


def test_a_model_that_cannot_be_loaded_leaves_the_store_free(tiny: Path, tmp_path: Path) -> None:
    broken = copytree(tiny, tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    with pytest.raises(ModelFileMissing, match=r"model\.safetensors"):
        LLM(broken, cache=settings(tmp_path / "store"))
    with LLM(tiny, cache=settings(tmp_path / "store")) as llm:
        with pytest.raises(StoreInUse):
            LLM(tiny, cache=settings(tmp_path / "store"))
        assert ask(llm, [5, 6, 7]).prompt_tokens == 3
    llm.close()


def test_half_precision_runs_and_has_a_namespace_of_its_own(tiny: Path) -> None:
    with LLM(tiny, cache=settings()) as full, LLM(tiny, cache=settings(), dtype="bfloat16") as half:
        prompt = random_tokens(full.config, 40)
        assert full.namespace().digest != half.namespace().digest
        assert ask(half, prompt).token_ids == ask(half, prompt).token_ids


def test_an_engine_that_learns_what_to_write_says_so(tiny: Path, tmp_path: Path) -> None:
    choosy = replace(settings(tmp_path / "store"), nvme_admission="learned")
    with LLM(tiny, cache=choosy) as llm:
        prompt = random_tokens(llm.config, 50)
        assert ask(llm, prompt).token_ids == ask(llm, prompt).token_ids
        sieve = llm.statistics().sieve
        assert sieve is not None and sieve.refused == 0
    with LLM(tiny, cache=settings(tmp_path / "store")) as llm:
        assert llm.statistics().sieve is None


def test_a_hint_brings_a_documents_blocks_to_dram_before_it_is_asked(
    tiny: Path, tmp_path: Path
) -> None:
    with LLM(tiny, cache=settings(tmp_path / "store")) as llm:
        prompt = random_tokens(llm.config, 211)
        cold = ask(llm, prompt)
        assert llm.flush(prompt).blocks == 13
    with LLM(tiny, cache=settings(tmp_path / "store")) as llm:
        late = llm.prefetch(prompt, timeout_s=0.0)
        assert late.is_done and not late.sources
        hint = llm.prefetch(prompt[:160])
        assert hint.wait(llm.cache.clock() + 60)
        found = llm.cache.match(llm.namespace().digest, prompt).by_tier
        assert found[TierId.DRAM] == 160
        warm = ask(llm, prompt)
        assert warm.token_ids == cold.token_ids
        assert warm.hit_tokens == {TierId.DRAM: 160, TierId.NVME: 48}
        hint.close()
