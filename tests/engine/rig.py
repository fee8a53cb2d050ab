"""An engine on the simulated device: copies and the store answer when the engine waits, or later.

Everything is deterministic in the seed, time is virtual, and waiting in vain makes it pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from kvtier.engine.core import EngineCore
from kvtier.engine.cpu_attention import CpuAttention
from kvtier.engine.exact import settle_exact
from kvtier.engine.model_config import ModelConfig
from kvtier.engine.request import Request, State
from kvtier.engine.runner import Runner
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.scheduler import EngineSettings
from kvtier.index.namespace import BlockLayout
from kvtier.index.words import TierId, Tokens
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.contracts import Pool, Store
from kvtier.tiers.hbm import HbmPool
from kvtier.tiers.mover import Mover
from kvtier.tiers.pool import ArrayPool
from kvtier.tiers.simulated import SimDevice, SimStore
from tests.engine.variants import BLOCK, load

NAMESPACE = bytes(range(32))


@dataclass
class Rig:
    config: ModelConfig
    device: SimDevice
    hbm: HbmPool
    cache: TieredCache
    runner: Runner
    core: EngineCore

    def __post_init__(self) -> None:
        self._ids = count()

    def request(
        self, prompt: Tokens, max_tokens: int = 6, *, params: SamplingParams | None = None
    ) -> Request:
        """A request that never ends early."""
        params = params or SamplingParams(max_tokens=max_tokens, ignore_stop=True)
        return Request(
            next(self._ids), NAMESPACE, prompt, params, params.max_tokens, self.cache.clock()
        )

    def prefill(self, prompt: Tokens) -> Request:
        return Request(next(self._ids), NAMESPACE, prompt, None, 0, self.cache.clock())

    def run(self, *requests: Request) -> list[list[int]]:
        """Run them together; their outputs."""
        self.core.run(requests)
        return [request.generated.tolist() for request in requests]

    def run_until(self, done: Callable[[], bool]) -> None:
        for _ in range(10_000):
            if done():
                return
            self.core.step()
        raise AssertionError("the engine does not get there")

    def finish(self, *requests: Request) -> None:
        self.run_until(lambda: all(each.state is State.FINISHED for each in requests))

    def expect_idle(self) -> None:
        """Nothing is held, nothing is lost, nothing flies."""
        assert self.core.scheduler.idle
        assert self.cache.drain(self.cache.clock() + 60)
        self.cache.check()
        statistics = self.cache.statistics()
        assert statistics.leases == 0
        assert all(pool.private == pool.filling == pool.pinned == 0 for pool in statistics.pools)


def make_rig(
    directory: Path,
    *,
    hbm: int = 64,
    dram: int = 0,
    settings: EngineSettings | None = None,
    device: SimDevice | None = None,
    store: Store | None = None,
) -> Rig:
    """`hbm` and `dram` in blocks; `dram` 0 leaves that tier out. Freed slots turn to NaN."""
    config, model = load(directory)
    layout = BlockLayout(config.layers, config.kv_heads, BLOCK, config.head_dim, "float32")
    device = device or SimDevice(0)
    top = HbmPool(layout, hbm, debug=True)
    pools: list[Pool] = [top]
    if dram:
        pools.append(ArrayPool(TierId.DRAM, dram, layout.nbytes, debug=True))
    stores: Sequence[Store] = [] if store is None else [store]
    cache = TieredCache(BLOCK, pools, stores, Mover(device), device.signal, clock=device.clock)
    settings = settings or EngineSettings()
    exact = None
    if settings.exact:
        chunk, batch = settings.exact_chunk, settings.max_running
        exact = settle_exact(model, CpuAttention, BLOCK, chunk, batch)
    runner = Runner(
        model, CpuAttention(top.tensor), cache.guard, BLOCK, preload_blocks=2, exact=exact
    )
    core = EngineCore(cache, runner, settings, config.stop_ids)
    return Rig(config, device, top, cache, runner, core)


def stored(directory: Path, prompt: Tokens, device: SimDevice) -> SimStore:
    """A store that holds the whole blocks of `prompt`, computed by an engine that is gone."""
    store = SimStore(TierId.NVME, device)
    rig = make_rig(directory, dram=32, device=device, store=store)
    rig.run(rig.prefill(prompt[: len(prompt) // BLOCK * BLOCK]))
    ticket = rig.cache.flush(NAMESPACE, prompt)
    assert ticket.wait(None)
    assert ticket.blocks == len(prompt) // BLOCK
    ticket.close()
    return store


def prompts(config: ModelConfig, *lengths: int) -> list[Tokens]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(3, config.vocab_size, n).astype(np.int32) for n in lengths]
