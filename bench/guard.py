"""What the launch guard costs a decode step, so that it can stay on.

A step of R requests asks for R block tables, checks them, and says afterwards what was launched.
Bound by nothing but Python's own calls, some a request: what has passed is not looked at again, so
the length of the context should not show. `table`, `check` and `launched` are one call each for the
whole batch, in the steps between two new blocks; `launched` is taken while compute is still going
on, as on a GPU (on a CPU it returns at once). `new block` is `check` in a step in which every
request has gained a block, which is every sixteenth; its share of a step counts in `sum`. `all
slots` is the check that a new epoch costs: every slot of every table, which a cache without bugs
hardly ever sees.

The shares are of 10 ms, a short decode step of a large model on a GPU, and of a decode step of a
model of the demo's size (random weights of SmolLM2-135M's shape, contexts of 128 tokens, which is
the shortest step) on this CPU in the same run. CPU time of one thread, medians. The last line is
JSON.

    python -m bench.guard [--quick]
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from bench.harness import emit, measure, note, table
from kvtier.engine.batch import Span, lay_out
from kvtier.engine.cpu_attention import CpuAttention
from kvtier.engine.model import LlamaModel
from kvtier.engine.model_config import ModelConfig, Rope
from kvtier.engine.weights import Layer, Linear, Weights
from kvtier.index.words import TierId
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.contracts import Signal
from kvtier.tiers.device import CpuDevice, Event
from kvtier.tiers.lease import Lease
from kvtier.tiers.mover import Mover
from kvtier.tiers.pool import SlotPool

BLOCK = 16
REQUESTS = (1, 8, 64)
CONTEXTS = (1024, 8192, 32768, 131072)
STEP_S = 0.010
SHORT = 128


class Pending:
    """The event of compute that has not ended."""

    done = False
    error = None

    def wait(self, timeout_s: float | None) -> bool:
        return False


class Computing(CpuDevice):
    """A device whose compute is always under way."""

    def record(self, stream: str) -> Event:
        return Pending()


@dataclass
class Batch:
    """Leases of `context` tokens each, the last block private and being written."""

    cache: TieredCache
    leases: list[Lease]

    @classmethod
    def make(cls, requests: int, context: int) -> "Batch":
        blocks = context // BLOCK
        signal = Signal()
        pool = SlotPool(TierId.HBM, requests * (blocks + 2), BLOCK)
        cache = TieredCache(BLOCK, [pool], [], Mover(Computing(signal)), signal)
        leases = []
        for number in range(requests):
            tokens = np.full(context, number, np.int32)
            lease = cache.acquire(bytes(32), tokens)
            cache.extend(lease, blocks)
            cache.commit(lease, tokens[: context - BLOCK])
            leases.append(lease)
        return cls(cache, leases)

    def tables(self) -> None:
        for lease in self.leases:
            lease.table.first(len(lease.table))

    def check(self) -> None:
        self.cache.guard.check([(lease, lease.table) for lease in self.leases])

    def launched(self) -> None:
        self.cache.guard.launched([(lease, lease.table) for lease in self.leases])

    def all_slots(self) -> None:
        for lease in self.leases:
            self.cache.guard.ended(lease)
        self.check()


def new_block_s(batch: Batch, repeats: int) -> float:
    """Seconds that a check takes in which each table has gained one block; the median."""
    seconds = []
    shorter = [(lease, lease.table.first(len(lease.table) - 1)) for lease in batch.leases]
    for _ in range(repeats):
        for lease in batch.leases:
            batch.cache.guard.ended(lease)
        batch.cache.guard.check(shorter)
        begin = time.thread_time()
        batch.check()
        seconds.append(time.thread_time() - begin)
    return float(np.median(seconds))


def decode_step(requests: int) -> Callable[[], object]:
    """One decode step of a model of SmolLM2-135M's shape, ready to be called again and again."""
    config = ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        norm_eps=1e-5,
        max_positions=2048,
        tied_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        rope=Rope(10000.0),
        stop_ids=(),
    )
    torch.manual_seed(0)

    def linear(out: int, given: int) -> Linear:
        return Linear(torch.randn(out, given) / given**0.5, None)

    hidden, inner = config.hidden_size, config.intermediate_size
    qkv = (config.heads + 2 * config.kv_heads) * config.head_dim
    layers = tuple(
        Layer(
            torch.ones(hidden),
            linear(qkv, hidden),
            linear(hidden, config.heads * config.head_dim),
            torch.ones(hidden),
            linear(2 * inner, hidden),
            linear(hidden, inner),
        )
        for _ in range(config.layers)
    )
    embedding = torch.randn(config.vocab_size, hidden)
    model = LlamaModel(config, Weights(embedding, layers, torch.ones(hidden), embedding))
    blocks = SHORT // BLOCK
    pool = torch.zeros(requests * blocks, config.layers, 2, config.kv_heads, BLOCK, config.head_dim)
    attention = CpuAttention(pool)
    slots = np.arange(requests * blocks, dtype=np.int32).reshape(requests, blocks)
    token = np.ones(1, np.int32)
    spans = [Span(n, token, SHORT - 1, slots[n], SHORT, True) for n in range(requests)]
    return lambda: model.forward(lay_out(spans, BLOCK), attention)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, no 128k contexts")
    quick = parser.parse_args().quick
    repeats, steps = (20, 3) if quick else (200, 15)
    contexts = CONTEXTS[:-1] if quick else CONTEXTS
    heads = ["requests", "context", "table us", "check us", "launched us", "new block us"]
    rows: list[list[object]] = [[*heads, "sum us", "of 10 ms", "of CPU step", "all slots us"]]
    cells: dict[str, dict[str, float]] = {}
    clock = time.thread_time
    for requests in REQUESTS:
        note(f"a decode step of {requests}")
        step_s = measure(decode_step(requests), steps).median
        for context in contexts:
            note(f"{requests} requests of {context} tokens")
            batch = Batch.make(requests, context)
            # As a launch: what is checked is launched. The table's own part is in both.
            tables = measure(batch.tables, repeats, clock=clock).median
            check = measure(batch.check, repeats, clock=clock).median
            launched = measure(batch.launched, repeats, clock=clock).median
            new = new_block_s(batch, max(5, repeats // 10))
            everything = measure(batch.all_slots, max(5, repeats // 10), clock=clock).median
            total = check + launched + max(0.0, new - check) / BLOCK
            parts = [value * 1e6 for value in (tables, check, launched, new, total)]
            shares = [total / STEP_S, total / step_s]
            rows.append(
                [requests, context, *parts, *(f"{s:.2%}" for s in shares), everything * 1e6]
            )
            names = ("table_us", "check_us", "launched_us", "new_block_us", "sum_us")
            cell = dict(zip(names, parts, strict=True))
            cell |= {"all_slots_us": everything * 1e6, "cpu_step_us": step_s * 1e6}
            cells[f"{requests}x{context}"] = {name: round(v, 2) for name, v in cell.items()}
    table(rows)
    worst = max(cell["sum_us"] for cell in cells.values()) / (STEP_S * 1e6)
    emit({"bench": "guard", "cells": cells, "worst_share_of_10_ms": round(worst, 4)})


if __name__ == "__main__":
    main()
