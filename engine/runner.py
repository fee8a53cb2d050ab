"""Turns planned work into launches of the model: block tables, the guard, the forward pass.

The last code before the kernels. Every launch passes the cache's guard first, so that no kernel
reads a slot that is not resident or not this lease's own. All work is one launch, but in exact mode
each chunk of a prompt is one of its own, padded to a fixed number of rows, and so are the rows that
decode. Decides nothing.
"""

from collections.abc import Sequence

from torch import Tensor

from kvtier.engine.batch import Padding, Span, lay_out
from kvtier.engine.exact import Exact
from kvtier.engine.model import Attention, LlamaModel
from kvtier.engine.request import Request
from kvtier.engine.scheduler import Work
from kvtier.tiers.guard import LaunchGuard


class Runner:
    def __init__(
        self,
        model: LlamaModel,
        attention: Attention,
        guard: LaunchGuard,
        block_size: int,
        device: str = "cpu",
        preload_blocks: int = 32,
        exact: Exact | None = None,
    ) -> None:
        """`preload_blocks`: so many arrived blocks are worth a pass of their own."""
        self._model = model
        self._attention = attention
        self._guard = guard
        self._block_size = block_size
        self._device = device
        self._preload_blocks = preload_blocks
        self._exact = exact
        self._ready: dict[int, int] = {}  # blocks preloaded, by request

    def run(self, work: Sequence[Work]) -> dict[int, Tensor]:
        """Launch; returns logits float32 `[vocab]` by request id, where they are wanted.

        Raises `LaunchRefused`, before the launch, if a block table names a slot that its lease may
        not read; `NotExact` if in exact mode torch's threads have changed.
        """
        if self._exact is None:
            return self._launch(work, None)
        self._exact.refuse_other_threads()
        decode = [each for each in work if each.is_past_prompt]
        logits = self._launch(decode, self._exact.decode_rows) if decode else {}
        for each in work:
            if not each.is_past_prompt:
                logits |= self._launch([each], self._exact.prompt_rows)
        return logits

    def _launch(self, work: Sequence[Work], padding: Padding | None) -> dict[int, Tensor]:
        tables = []
        for each in work:
            assert each.request.lease is not None
            used = -(-each.end // self._block_size)
            tables.append((each.request.lease, each.request.lease.table.first(used)))
        self._guard.check(tables)
        spans = [
            Span(
                each.request.id,
                each.request.tokens[each.start : each.end],
                each.start,
                table.slots,
                each.request.reach,
                each.wants_logits,
            )
            for each, (_, table) in zip(work, tables, strict=True)
        ]
        batch = lay_out(spans, self._block_size, self._device, padding)
        try:
            logits = self._model.forward(batch, self._attention)
        finally:
            # A forward pass that failed half-way has queued kernels too: they read and write these
            # slots, and nobody may have them before.
            self._guard.launched(tables)
        asked = [span.sequence for span in batch.spans if span.wants_logits]
        return dict(zip(asked, logits[: len(asked)], strict=True))

    def preload(self, request: Request) -> None:
        """Get ready what has arrived for a loading request, while the rest is on its way."""
        assert request.lease is not None
        landed = request.lease.landed_blocks
        if landed - self._ready.get(request.id, 0) < self._preload_blocks:
            return
        self._ready[request.id] = landed
        table = request.lease.table.first(landed)
        self._guard.check([(request.lease, table)])
        none, start = request.tokens[:0], landed * self._block_size
        self._attention.preload(Span(request.id, none, start, table.slots, request.reach, False))

    def forget(self, sequence: int) -> None:
        """This request holds its blocks no longer."""
        self._ready.pop(sequence, None)
        self._attention.forget(sequence)
