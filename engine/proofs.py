"""What exact mode rests on, tried out on this machine at start.

Two things: a row's result does not show where it stands among the others, nor what they hold; and
attention does not show how the context came to be where it is. Floating-point addition promises
neither, and BLAS libraries choose their kernels by machine: so the model's own operations are run
on rows made up for it, and compared bit by bit. Knows no requests and no cache.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvtier.engine.batch import Padding, Span, lay_out
from kvtier.engine.errors import NotExact
from kvtier.engine.model import Attention, LlamaModel
from kvtier.index.words import Slots

Stage = Callable[..., Tensor]
"""Maps tensors of n rows to a tensor of n rows."""

MakeAttention = Callable[[Tensor], Attention]
"""A backend over a pool `[num_blocks, layers, 2, kv_heads, block_size, head_dim]`."""


def prove_rows_independent(name: str, stage: Stage, inputs: Sequence[Tensor]) -> Tensor:
    """Returns the stage's result. Raises `NotExact` if a row's shows its place or its neighbours.

    The rows are run as they are, shuffled, and each of two rows alone in every place: every place
    for some of them, and other neighbours for all.
    """
    rows = len(inputs[0])
    plain = stage(*inputs)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)).to(plain.device)
    same = torch.equal(stage(*(each[order] for each in inputs)), plain[order])
    for row in (0, rows - 1):
        alike = stage(*(each[row : row + 1].repeat_interleave(rows, 0) for each in inputs))
        same &= torch.equal(alike, plain[row : row + 1].expand_as(alike))
    if not same:
        raise NotExact(
            f"exact mode: on this machine {name} gives a row other bits beside other rows; try "
            "another engine.exact_chunk or engine.max_running, or run without exact"
        )
    return plain


def stages(
    model: LlamaModel, rows: int, *, with_logits: bool
) -> list[tuple[str, Stage, tuple[Tensor, ...]]]:
    """All that is done to `rows` rows apart from attention, and rows to do it to.

    Every layer has the first one's shapes, so that the first one stands for all.
    """
    config, device = model.config, model.device
    numbers = np.random.default_rng(rows)
    positions = torch.from_numpy(numbers.integers(0, config.max_positions, rows)).to(device)
    hidden = _made_up(model, numbers, rows, config.hidden_size)
    mixed = _made_up(model, numbers, rows, config.heads * config.head_dim)

    def rotate(positions: Tensor) -> Tensor:
        return torch.cat(model.rotations(positions), dim=1)

    found: list[tuple[str, Stage, tuple[Tensor, ...]]] = [
        ("the angles' cosines and sines", rotate, (positions,)),
        ("the projection to query, key and value", model.project, (hidden,)),
        ("the feed-forward network", model.mix, (hidden, mixed)),
    ]
    if with_logits:
        found.append(("the head", model.logits, (hidden,)))
    return found


class AttentionProof:
    """Two chunks of a prompt and a row behind them, attended to in several ways.

    The second chunk is computed behind a first one that was computed just before, and behind one
    that was found in the pool; the row alone and beside another, over contexts of both kinds.
    """

    def __init__(
        self,
        model: LlamaModel,
        make_attention: MakeAttention,
        block_size: int,
        chunk: int,
        batch: int,
    ) -> None:
        config = model.config
        self._chunk, self._batch, self._block_size = chunk, batch, block_size
        blocks = chunk // block_size
        #   blocks of the first chunk | of the second one, twice | for the row, twice
        slots = np.arange(3 * blocks + 2, dtype=np.int32)
        first, copies = slots[:blocks], (slots[blocks : 2 * blocks], slots[2 * blocks : -2])
        self._tables = [
            np.concatenate([first, copy, slots[-2 + which :][:1]])
            for which, copy in enumerate(copies)
        ]
        shape = (len(slots), 1, 2, config.kv_heads, block_size, config.head_dim)
        self._attention = make_attention(torch.zeros(shape, dtype=model.dtype, device=model.device))
        self._device = str(model.device)
        rows = 2 * chunk + 1
        hidden = _made_up(model, np.random.default_rng(chunk), rows, config.hidden_size)
        self._states = model.project(hidden)
        self._model = model

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Returns what the rows led to. Raises `NotExact` if it was not the same every time."""
        self._prompt(0, 0)
        appended = self._prompt(0, self._chunk)
        gathered = self._prompt(1, self._chunk)
        together = self._decode([0, 1][: self._batch])
        for sequence in (0, 1):
            self._attention.forget(sequence)
        alone = self._decode([1])
        if not torch.equal(appended, gathered) or not torch.equal(
            together, alone.expand_as(together)
        ):
            raise NotExact(
                "exact mode: on this machine attention gives other bits over a context that was "
                "found than over one that was computed; run without exact"
            )
        return torch.cat([gathered, alone])

    def _prompt(self, sequence: int, start: int) -> Tensor:
        return self._attend([self._span(sequence, start, self._chunk)], self._chunk)

    def _decode(self, sequences: Sequence[int]) -> Tensor:
        return self._attend(
            [self._span(each, 2 * self._chunk, 1) for each in sequences], self._batch
        )

    def _span(self, sequence: int, start: int, count: int) -> Span:
        slots: Slots = self._tables[sequence][: -(-(start + count) // self._block_size)]
        reach = 2 * self._chunk + 1
        return Span(sequence, np.zeros(count, np.int32), start, slots, reach, False)

    def _attend(self, spans: Sequence[Span], rows: int) -> Tensor:
        batch = lay_out(spans, self._block_size, self._device, Padding(rows, 0))
        self._attention.begin(batch, *self._model.rotations(batch.positions))
        out = self._attention.attend(0, self._states[batch.positions])
        self._attention.finish()
        return out[: sum(span.count for span in spans)]


def _made_up(model: LlamaModel, numbers: np.random.Generator, rows: int, width: int) -> Tensor:
    values = numbers.standard_normal((rows, width), dtype=np.float32)
    return torch.from_numpy(values).to(model.device, model.dtype)
