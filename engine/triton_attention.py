"""How rows attend on CUDA: the paged Triton kernels read the pool and nothing else.

Decoding rows come first in a batch, so each kind of row is one launch a layer. Knows no leases: the
launch guard has passed the slots before a launch begins.
"""

import torch
from torch import Tensor

from kvtier.engine.batch import Batch, Span
from kvtier.kernels.paged_decode import paged_decode
from kvtier.kernels.paged_prefill import paged_prefill
from kvtier.kernels.rope_write import rope_write


class TritonAttention:
    """Keeps nothing between launches: the pool is all there is."""

    def __init__(self, pool: Tensor) -> None:
        """pool `[num_blocks, layers, 2, kv_heads, block_size, head_dim]`."""
        self._pool = pool
        self._batch: Batch | None = None
        self._scale = pool.shape[5] ** -0.5

    def preload(self, span: Span) -> None:
        """The pool is where the kernels read: nothing to get ready."""

    def begin(self, batch: Batch, cos: Tensor, sin: Tensor) -> None:
        device = self._pool.device
        width = max(len(span.slots) for span in batch.spans)
        tables = torch.zeros((len(batch.spans), width), dtype=torch.int32)
        for row, span in enumerate(batch.spans):
            tables[row, : len(span.slots)] = torch.from_numpy(span.slots)
        counts = torch.tensor([span.count for span in batch.spans], dtype=torch.int32)
        contexts = torch.tensor([span.context for span in batch.spans], dtype=torch.int32)
        starts = counts.cumsum(0, dtype=torch.int32) - counts - batch.num_decode
        self._batch = batch
        self._cos, self._sin = cos, sin
        self._tables = tables.to(device)
        self._counts, self._contexts = counts.to(device), contexts.to(device)
        self._starts = starts.to(device)

    def attend(self, layer: int, states: Tensor) -> Tensor:
        assert self._batch is not None
        keys, values = self._pool[:, layer, 0], self._pool[:, layer, 1]
        kv_heads, slots = self._pool.shape[3], self._batch.slot_mapping
        query, key, value = states.tensor_split((-2 * kv_heads, -kv_heads), dim=1)
        query = rope_write(query, key, value, self._cos, self._sin, keys, values, slots)
        first = self._batch.num_decode
        out = []
        if first:
            out.append(
                paged_decode(
                    query[:first],
                    keys,
                    values,
                    self._tables[:first],
                    self._contexts[:first],
                    self._scale,
                )
            )
        if first < len(self._batch.spans):
            out.append(
                paged_prefill(
                    query[first:],
                    keys,
                    values,
                    self._tables[first:],
                    self._starts[first:],
                    self._counts[first:],
                    self._contexts[first:],
                    self._scale,
                )
            )
        return torch.cat(out)

    def finish(self) -> None:
        self._batch = None

    @torch.inference_mode()
    def forget(self, sequence: int) -> None:
        """Nothing is kept for a sequence."""
