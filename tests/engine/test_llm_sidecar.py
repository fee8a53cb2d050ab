"""The engine beside a real sidecar process: its tiers serve, and its death is a miss."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.engine.assembly import CacheSettings
from kvtier.engine.llm import LLM
from kvtier.engine.request import Completion
from kvtier.engine.sampling import SamplingParams
from kvtier.index.words import TierId, Tokens
from kvtier.tiers.errors import SidecarUnavailable
from tests.engine.variants import random_tokens, reference, reference_greedy
from tests.sidecar.rig import Sidecar


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    server = Sidecar(tmp_path, num_slots=1000)
    server.start()
    yield server
    server.close()


def engine(directory: Path, sidecar: Sidecar) -> LLM:
    return LLM(directory, cache=CacheSettings(hbm_bytes=1 << 20, socket=sidecar.socket))


def ask(llm: LLM, prompt: Tokens) -> Completion:
    return llm.generate([prompt], SamplingParams(max_tokens=8, ignore_stop=True))[0]


def test_dram_outlives_the_engine_and_nvme_the_sidecar(tiny: Path, sidecar: Sidecar) -> None:
    with engine(tiny, sidecar) as llm:
        prompt = random_tokens(llm.config, 171)
        want = tuple(reference_greedy(reference(tiny), prompt, 8))
        cold, hbm = ask(llm, prompt), ask(llm, prompt)
        llm.cache.shed(TierId.HBM)
        dram = ask(llm, prompt)
        assert llm.flush(prompt).blocks == 10
    with engine(tiny, sidecar) as llm:
        engine_restarted = ask(llm, prompt)
    sidecar.end()
    sidecar.start()
    with engine(tiny, sidecar) as llm:
        sidecar_restarted = ask(llm, prompt)
    answers = [cold, hbm, dram, engine_restarted, sidecar_restarted]
    assert [each.token_ids for each in answers] == [want] * 5
    assert [dict(each.hit_tokens) for each in answers] == [
        {},
        {TierId.HBM: 160},
        {TierId.DRAM: 160},
        {TierId.DRAM: 160},
        {TierId.NVME: 160},
    ]


def test_the_engine_serves_on_when_the_sidecar_dies(tiny: Path, sidecar: Sidecar) -> None:
    with engine(tiny, sidecar) as llm:
        prompt = random_tokens(llm.config, 100)
        first = ask(llm, prompt)
        sidecar.close()
        llm.cache.shed(TierId.HBM)
        again = ask(llm, prompt)
        assert again.token_ids == first.token_ids
        assert again.cached_tokens == 0
        llm.cache.check()


def test_no_sidecar_at_the_socket_is_one_line(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(SidecarUnavailable, match=r"nobody\.sock") as caught:
        LLM(tiny, cache=CacheSettings(hbm_bytes=1 << 20, socket=tmp_path / "nobody.sock"))
    assert "\n" not in str(caught.value)
