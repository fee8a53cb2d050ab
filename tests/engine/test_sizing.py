"""The HBM pool gets what the model leaves: arithmetic, by a meter that we play."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from kvtier.engine.assembly import CPU_HBM_BYTES, CacheSettings, open_cache
from kvtier.engine.batch import lay_out
from kvtier.engine.cpu_attention import CpuAttention
from kvtier.engine.errors import BadSettings
from kvtier.engine.llm import LLM
from kvtier.engine.model import LlamaModel
from kvtier.engine.model_config import read_config
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.scheduler import EngineSettings
from kvtier.engine.sizing import HbmBudget, largest_launch, measured
from kvtier.engine.weights import load_weights
from kvtier.index.namespace import BlockLayout
from kvtier.tiers.memory import NotEnoughMemory

LAYOUT = BlockLayout(2, 1, 16, 16, "float32")
ENGINE = EngineSettings(step_tokens=40, max_running=3)


@dataclass
class Played:
    """A device with so much memory, whose launches take so much."""

    free: int
    peak: int
    asked: list[str] = field(default_factory=list)

    def free_bytes(self) -> int:
        self.asked.append("free")
        return self.free

    def peak_bytes(self, work: Callable[[], object]) -> int:
        self.asked.append("peak")
        logits = work()
        assert isinstance(logits, torch.Tensor)
        self.logits = logits
        return self.peak


@pytest.mark.parametrize(
    ("free", "fraction", "launch", "pool"),
    [
        (1000, 0.9, 100, 800),
        (1001, 0.5, 0, 500),
        (10, 1.0, 30, -20),
        (80 << 30, 0.9, 1 << 30, None),
    ],
)
def test_the_pool_gets_a_share_of_what_is_free_less_one_launch(
    free: int, fraction: float, launch: int, pool: int | None
) -> None:
    found = HbmBudget(free, fraction, launch).pool_bytes
    assert found == (int((80 << 30) * 0.9) - (1 << 30) if pool is None else pool)


def test_what_does_not_hold_a_block_is_refused_with_the_numbers_and_the_cure() -> None:
    enough = HbmBudget(10_000 + LAYOUT.nbytes, 1.0, 10_000)
    assert enough.require(LAYOUT) == LAYOUT.nbytes
    with pytest.raises(
        NotEnoughMemory,
        match=r"46,000 bytes are free.*0\.5 of them, less 20,000.*leave 3,000.*4,096",
    ) as refusal:
        HbmBudget(46_000, 0.5, 20_000).require(LAYOUT)
    assert "lower engine.step_tokens or engine.max_running" in str(refusal.value)


@pytest.mark.parametrize(("positions", "prefills"), [(2048, [80]), (33, [33, 33, 14])])
def test_the_largest_launch_has_every_row_that_the_scheduler_may_plan(
    positions: int, prefills: list[int]
) -> None:
    spans = largest_launch(ENGINE, positions, 16)
    assert [span.count for span in spans] == [1, 1, 1, *prefills]
    assert all(span.context == positions for span in spans)
    assert len(spans[0].slots) == -(-positions // 16) and not spans[0].slots.any()
    batch = lay_out(spans, 16)
    assert (batch.rows, batch.num_decode, len(batch.wanted)) == (3 + 80, 3, 3)


def test_it_is_measured_by_running_the_model_once_before_the_pool_is_there(tiny: Path) -> None:
    config = read_config(tiny)
    model = LlamaModel(config, load_weights(tiny, config, torch.float32))
    layout = BlockLayout(config.layers, config.kv_heads, 16, config.head_dim, "float32")
    pools: list[torch.Tensor] = []

    def attention(pool: torch.Tensor) -> CpuAttention:
        pools.append(pool)
        return CpuAttention(pool)

    meter = Played(free=1_000_000, peak=300_000)
    found = measured(
        CacheSettings(hbm_fraction=0.8), ENGINE, layout, model, attention, 128, "cpu", meter
    )
    assert found.hbm_bytes == 500_000
    assert meter.asked == ["peak", "free"] and meter.logits.shape == (3, config.vocab_size)
    assert [len(pool) for pool in pools] == [1]
    given = CacheSettings(hbm_bytes=77)
    same = measured(given, ENGINE, layout, model, attention, 128, "cpu", meter)
    assert same is given and len(meter.asked) == 2


def test_on_the_cpu_the_default_is_fixed_and_on_cuda_it_has_to_be_measured() -> None:
    opened = open_cache(CacheSettings(dram_bytes=0), LAYOUT)
    assert opened.hbm.num_slots == CPU_HBM_BYTES // LAYOUT.nbytes
    opened.close()
    with pytest.raises(BadSettings, match=r"cache\.hbm_bytes: none given for cuda:0"):
        open_cache(CacheSettings(), LAYOUT, "cuda:0")


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with pytest.raises(BadSettings, match=r"cache\.hbm_fraction: "):
        CacheSettings(hbm_fraction=fraction)


@pytest.mark.parametrize(
    ("node", "said"), [("far", '"near", a number, or None'), (99, "99 given, this machine has")]
)
def test_a_node_that_is_not_there_is_refused(node: int | str, said: str) -> None:
    with pytest.raises(BadSettings, match=rf"cache\.dram_node: .*{said}"):
        open_cache(CacheSettings(hbm_bytes=1 << 20, dram_bytes=1 << 20, dram_node=node), LAYOUT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_pool_fills_what_the_model_leaves_and_the_largest_launch_still_fits(
    tiny: Path,
) -> None:
    free = torch.cuda.mem_get_info()[0]
    cache = CacheSettings(hbm_fraction=0.5, dram_bytes=0)
    with LLM(tiny, cache=cache, device="cuda:0", dtype="bfloat16") as llm:
        taken = llm.cache.statistics().pools[0].total * llm.layout.nbytes
        assert 0.3 * free < taken <= 0.5 * free
        (done,) = llm.generate([list(range(3, 60))], SamplingParams(max_tokens=3))
        assert len(done.token_ids) == 3
