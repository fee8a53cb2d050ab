"""How rows attend on the CPU: through one contiguous mirror a sequence.

Every row's K and V are written into the pool, which stays the truth: a sequence whose blocks came
from the cache is attended to exactly as one whose blocks were computed here. Knows no leases: the
launch guard has passed the slots before a launch begins.
"""

import torch
from torch import Tensor

from kvtier.engine.batch import Batch, Span
from kvtier.engine.rope import rotate_
from kvtier.kernels import cpu


class CpuAttention:
    """Keeps one `ContextMirror` a sequence, so that no step copies a whole context.

    A mirror takes as much memory as its sequence's blocks do in the pool. `spare` mirrors of ended
    sequences are kept for the next ones: their pages are populated, and faulting in a fresh one
    costs a 4k hit more than the copy does (85 against 31 ms of CPU time, 30 layers of 3 heads).
    """

    def __init__(self, pool: Tensor, *, spare: int = 1, ready_tokens: int = 0) -> None:
        """pool `[num_blocks, layers, 2, kv_heads, block_size, head_dim]`.

        With `ready_tokens` one spare mirror of that capacity is there, populated, from the start,
        so that the first request after a restart is as fast as the next.
        """
        self._pool = pool
        self._mirrors: dict[int, cpu.ContextMirror] = {}
        self._spare: list[cpu.ContextMirror] = []
        self._max_spare = spare
        self._batch: Batch | None = None
        self._fresh = pool.new_empty((0, *pool.shape[1:4], pool.shape[5]))
        if ready_tokens:
            mirror = self._new_mirror(ready_tokens)
            mirror.populate()
            self._spare.append(mirror)

    def begin(self, batch: Batch, cos: Tensor, sin: Tensor) -> None:
        self._batch = batch
        self._cos, self._sin = cos[:, None], sin[:, None]
        self._fresh = self._pool.new_empty((batch.rows, *self._fresh.shape[1:]))
        for span in batch.spans:
            self.preload(span)

    @torch.inference_mode()
    def preload(self, span: Span) -> None:
        """Bring the mirror up to `span.start` from the pool: one pass over what is missing."""
        mirror = self._mirrors.get(span.sequence)
        if mirror is None:
            mirror = self._mirrors[span.sequence] = self._take(span.reach)
        if mirror.tokens < span.start:
            block_size = self._pool.shape[4]
            start = mirror.tokens // block_size * block_size
            mirror.gather(self._pool, torch.from_numpy(span.slots), span.start, start)

    def attend(self, layer: int, states: Tensor) -> Tensor:
        assert self._batch is not None
        kv_heads = self._pool.shape[3]
        # In the model's own precision, as it was trained.
        cos, sin = self._cos.to(states.dtype), self._sin.to(states.dtype)
        rotate_(states[:, :-kv_heads], cos, sin)
        query, key, value = states.tensor_split((-2 * kv_heads, -kv_heads), dim=1)
        self._fresh[:, layer, 0] = key
        self._fresh[:, layer, 1] = value
        out = torch.empty_like(query)
        row = 0
        for span in self._batch.spans:
            rows = slice(row, row + span.count)
            mirror = self._mirrors[span.sequence]
            mirror.append(layer, key[rows], value[rows], span.start)
            out[rows] = mirror.attend(layer, query[rows], span.start)
            row += span.count
        out[row:] = 0  # padding
        return out

    def finish(self) -> None:
        """One scatter for all layers.

        To the kernel a token is `layers * 2 * kv_heads` heads; which of them it takes for keys and
        which for values is all the same.
        """
        assert self._batch is not None
        rows, pool = self._fresh.flatten(1, 3), self._pool.flatten(1, 3)
        half = rows.shape[1] // 2
        cpu.write_kv(
            rows[:, :half], rows[:, half:], pool[:, :half], pool[:, half:], self._batch.slot_mapping
        )
        self._batch = None

    @torch.inference_mode()
    def forget(self, sequence: int) -> None:
        mirror = self._mirrors.pop(sequence, None)
        if mirror is not None:
            mirror.gather(self._pool, [], 0)
            self._spare.append(mirror)
            self._spare.sort(key=lambda each: each.capacity)
            while len(self._spare) > self._max_spare:
                del self._spare[0]

    def _take(self, reach: int) -> cpu.ContextMirror:
        for number, mirror in enumerate(self._spare):
            if mirror.capacity >= reach:
                return self._spare.pop(number)
        self._spare.clear()
        return self._new_mirror(reach)

    def _new_mirror(self, tokens: int) -> cpu.ContextMirror:
        _, layers, _, kv_heads, _, head_dim = self._pool.shape
        return cpu.ContextMirror(layers, kv_heads, head_dim, self._pool.dtype, tokens)
