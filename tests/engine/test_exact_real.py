"""Exact mode with the real small model: the same bits from nowhere, HBM, DRAM and NVMe."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from kvtier.engine.assembly import CacheSettings
from kvtier.engine.llm import LLM
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.scheduler import EngineSettings
from kvtier.index.words import TierId, Tokens
from tests.engine.trails import Trails, same_bits
from tests.engine.variants import random_tokens

CHUNK = 64
ANSWER = SamplingParams(max_tokens=5, ignore_stop=True)
ONE = SamplingParams(max_tokens=1, ignore_stop=True)
LENGTHS = (16, 48, 63, 64, 65, 80, 112, 127, 128, 129)
"""What was asked before, and prompts: one block, a chunk less one, a chunk, a chunk and one, ..."""


@pytest.fixture(autouse=True)
def _own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def open_llm(model: Path, store: Path, *, exact: bool = True) -> LLM:
    mib = 1 << 20
    cache = CacheSettings(hbm_bytes=64 * mib, dram_bytes=160 * mib, store=store, writeback_s=None)
    engine = EngineSettings(exact=exact, exact_chunk=CHUNK, max_running=4)
    return LLM(model, cache=cache, engine=engine)


def bits(llm: LLM, trails: Trails, prompts: Sequence[Tokens], salt: str) -> list[Tensor]:
    trails.take()
    llm.generate(prompts, ANSWER, salt=salt)
    return trails.take()


def hits(
    model: Path, store: Path, trails: Trails, text: Tokens, lengths: Sequence[int], exact: bool
) -> Iterator[tuple[str, list[Tensor]]]:
    """`text` cold, and after each of its beginnings was asked, from every tier."""
    with open_llm(model, store, exact=exact) as llm:
        yield "cold", bits(llm, trails, [text], "cold")
        for length in lengths:
            for tier in (TierId.HBM, TierId.DRAM, TierId.NVME):
                salt = f"{length} {tier}"
                llm.generate([text[:length]], ONE, salt=salt)
                if tier is TierId.DRAM:
                    llm.cache.shed(TierId.HBM)
                if tier is TierId.NVME:
                    llm.flush(text[:length], salt=salt)
                else:
                    yield salt, bits(llm, trails, [text], salt)
    with open_llm(model, store, exact=exact) as llm:
        for length in lengths:
            salt = f"{length} {TierId.NVME}"
            yield salt, bits(llm, trails, [text], salt)
            if exact:
                found = llm.statistics().hit_tokens.get(TierId.NVME, 0)
                assert (found > 0) == (min(length, len(text) - 1) >= CHUNK)


def test_hits_of_a_chunk_from_every_tier_and_a_batch_give_the_bits_of_a_miss(
    real_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trails = Trails(monkeypatch)
    with open_llm(real_model, tmp_path / "one") as llm:
        text = random_tokens(llm.config, 130)
    every = dict(hits(real_model, tmp_path / "two", trails, text, (CHUNK,), exact=True))
    want = every.pop("cold")
    assert len(every) == 3 and len(want[0]) == 5
    assert {salt: same_bits(got, want) for salt, got in every.items()} == dict.fromkeys(every, True)
    with open_llm(real_model, tmp_path / "two") as llm:
        others = [text[:70], random_tokens(llm.config, 33, seed=1)]
        assert same_bits(bits(llm, trails, [*others, text], "64 nvme")[2:], want)


@pytest.mark.stress
@pytest.mark.parametrize("length", LENGTHS)
def test_hits_around_every_boundary_give_the_bits_of_a_miss_and_without_exact_mode_some_do_not(
    real_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    trails = Trails(monkeypatch)
    with open_llm(real_model, tmp_path / "none") as llm:
        text = random_tokens(llm.config, length)
    shorter = [each for each in LENGTHS if each <= length]
    differ = {}
    for exact in (True, False):
        store = tmp_path / str(exact)
        every = dict(hits(real_model, store, trails, text, shorter, exact))
        want = every.pop("cold")
        differ[exact] = [salt for salt, got in every.items() if not same_bits(got, want)]
    assert differ[True] == []
    assert differ[False] or length < 32, "the control arm cannot tell"


@pytest.mark.stress
def test_a_batch_of_every_length_gives_each_the_bits_it_has_alone(
    real_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trails = Trails(monkeypatch)
    with open_llm(real_model, tmp_path / "store") as llm:
        text = random_tokens(llm.config, max(LENGTHS))
        texts = [text[:length] for length in LENGTHS]
        alone = [bits(llm, trails, [each], f"alone {len(each)}")[0] for each in texts]
        assert same_bits(bits(llm, trails, texts, "together"), alone)
        assert same_bits(bits(llm, trails, texts[::-1], "together")[::-1], alone)
