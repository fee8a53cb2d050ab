"""Opens an `LLM` as the command line describes it. The only module here that loads the engine."""

from pathlib import Path

from kvtier.engine.assembly import CacheSettings
from kvtier.engine.llm import LLM
from kvtier.engine.scheduler import EngineSettings
from kvtier.tools.options import Tiers


def open_llm(model: Path, tiers: Tiers, threads: int | None, *, exact: bool = False) -> LLM:
    """The model of a directory over these tiers; a context manager. `exact`: in exact mode.

    Raises what the engine and the tiers raise, all `KvtierError`.
    """
    settings = CacheSettings(
        hbm_bytes=tiers.hbm_bytes,
        dram_bytes=tiers.dram_bytes,
        store=tiers.store,
        nvme_bytes=tiers.nvme_bytes,
        socket=tiers.socket,
        codec=tiers.codec,
        writeback_s=tiers.writeback_s,
        write_budget_bytes=tiers.write_budget_bytes,
        hbm_policy=tiers.hbm_policy,
        dram_policy=tiers.dram_policy,
        nvme_admission=tiers.nvme_admission,
    )
    return LLM(model, cache=settings, engine=EngineSettings(exact=exact), threads=threads)
