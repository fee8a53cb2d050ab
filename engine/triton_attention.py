"""How rows attend on CUDA: the paged Triton kernels read the pool and nothing else.

Decoding rows come first in a batch, so each kind of row is one launch a layer. Knows no leases: the
launch guard has passed the slots before a launch begins.
"""

import torch
from torch import Tensor

from kvtier.engine.batch import Batch, Span
from kvtier.engine.common_prefixes import common_prefixes
from kvtier.kernels.configs import architecture, lookup
from kvtier.kernels.paged_decode import count_splits, paged_decode
from kvtier.kernels.paged_prefill import paged_prefill
from kvtier.kernels.prefixes import SharedPrefixes
from kvtier.kernels.rope_write import rope_write
from kvtier.kernels.shared_decode import shared_decode
from kvtier.kernels.workspace import DecodeWorkspace

LEAST_SAVED = 8
"""Splits that sharing must save: a launch more takes some 3 us a layer, and reading a split of 512
positions (8 KV heads of 128, bf16: 2 MB) 0.5 us on an H200. Arithmetic, not a measurement."""


class TritonAttention:
    """Keeps nothing of a sequence between launches: the pool is all there is."""

    def __init__(self, pool: Tensor, *, share_prefixes: bool = True) -> None:
        """pool `[num_blocks, layers, 2, kv_heads, block_size, head_dim]`.

        `share_prefixes`: read once what decoding sequences have in common. A sequence's bits may
        then depend on who else decodes; exact mode wants False.
        """
        self._pool = pool
        self._share_prefixes = share_prefixes
        self._decode = lookup("paged_decode", architecture(pool.device), pool.dtype, pool.shape[5])
        self._shared: SharedPrefixes | None = None
        self._workspace: DecodeWorkspace | None = None
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
        self._shared = self._prefixes(batch.spans[: batch.num_decode])

    def attend(self, layer: int, states: Tensor) -> Tensor:
        assert self._batch is not None
        keys, values = self._pool[:, layer, 0], self._pool[:, layer, 1]
        kv_heads, slots = self._pool.shape[3], self._batch.slot_mapping
        query, key, value = states.tensor_split((-2 * kv_heads, -kv_heads), dim=1)
        query = rope_write(query, key, value, self._cos, self._sin, keys, values, slots)
        first = self._batch.num_decode
        out = []
        if first:
            out.append(self._attend_decoding(query[:first], keys, values))
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
        else:
            out.append(torch.zeros_like(query[first:]))  # padding
        return torch.cat(out)

    def _attend_decoding(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        seqs, heads, head_dim = query.shape
        tables, contexts = self._tables[:seqs], self._contexts[:seqs]
        sizes = seqs, heads, head_dim, count_splits(tables, keys.shape[2], self._decode)
        if self._workspace is None or not self._workspace.fits(*sizes):
            self._workspace = DecodeWorkspace(*sizes, query.device)
        room = self._workspace
        if self._shared is None:
            return paged_decode(query, keys, values, tables, contexts, self._scale, workspace=room)
        return shared_decode(
            query, keys, values, tables, contexts, self._shared, self._scale, workspace=room
        )

    def _prefixes(self, decoding: tuple[Span, ...]) -> SharedPrefixes | None:
        """What these share, if it is worth a launch more."""
        if not self._share_prefixes:
            return None
        split = self._decode.split
        tables = [span.slots for span in decoding]
        groups = common_prefixes(tables, self._pool.shape[4], split)
        if sum((len(members) - 1) * units for members, units in groups) < LEAST_SAVED:
            return None
        lens = [(members, units * split) for members, units in groups]
        return SharedPrefixes.of(lens, len(decoding), self._pool.device)

    def finish(self) -> None:
        self._batch = None

    @torch.inference_mode()
    def forget(self, sequence: int) -> None:
        """Nothing is kept for a sequence."""
