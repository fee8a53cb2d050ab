"""ContextMirror: a faithful copy, however it was filled, and attention that agrees with float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtier.kernels import reference
from kvtier.kernels.cpu import ContextMirror
from tests.kernels.cases import SHAPES, Shape, assert_near

LAYERS = 3


def make_pool(shape: Shape, blocks: int) -> Tensor:
    generator = torch.Generator().manual_seed(blocks)
    size = (blocks, LAYERS, 2, shape.kv_heads, shape.block_size, shape.head_dim)
    return torch.randn(size, generator=generator)


def make_mirror(shape: Shape, capacity: int = 1) -> ContextMirror:
    return ContextMirror(LAYERS, shape.kv_heads, shape.head_dim, torch.float32, capacity)


def make_query(shape: Shape, rows: int) -> Tensor:
    size = (rows, shape.heads, shape.head_dim)
    return torch.randn(size, generator=torch.Generator().manual_seed(rows))


def expected(
    shape: Shape, pool: Tensor, slots: Tensor, layer: int, query: Tensor, start: int
) -> Tensor:
    end = start + query.shape[0]
    key = reference.gather_context(pool[:, layer, 0], slots, end).double()
    value = reference.gather_context(pool[:, layer, 1], slots, end).double()
    return reference.attention(query.double(), key, value, start, shape.scale)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[4]])
@pytest.mark.parametrize("tokens", [1, 16, 17, 513])
def test_attention_over_gathered_blocks_agrees_with_float64(shape: Shape, tokens: int) -> None:
    pool = make_pool(shape, -(-tokens // shape.block_size) + 2)
    slots = torch.randperm(len(pool), generator=torch.Generator().manual_seed(1))
    pool[slots[-2:]] = torch.nan
    mirror = make_mirror(shape)
    mirror.gather(pool, slots.tolist(), tokens)
    assert mirror.tokens == tokens <= mirror.capacity
    for rows in {1, min(tokens, 7), tokens}:
        query = make_query(shape, rows)
        for layer in range(LAYERS):
            got = mirror.attend(layer, query, tokens - rows)
            assert_near(got, expected(shape, pool, slots, layer, query, tokens - rows))


@given(
    pieces=st.lists(st.sampled_from([1, 2, 5, 16, 33, 64, 250]), min_size=1, max_size=6),
    gathered=st.integers(0, 4),
    shape=st.sampled_from(SHAPES),
)
@settings(max_examples=12, deadline=None)
def test_any_cutting_into_gathered_blocks_and_chunks_changes_rounding_only(
    pieces: list[int], gathered: int, shape: Shape
) -> None:
    start = gathered * shape.block_size
    tokens = start + sum(pieces)
    pool = make_pool(shape, -(-tokens // shape.block_size))
    slots = torch.arange(len(pool) - 1, -1, -1)
    query = make_query(shape, tokens)
    mirror = make_mirror(shape)
    mirror.gather(pool, np.asarray(slots, np.int32), start)
    got = []
    for rows in pieces:
        for layer in range(LAYERS):
            key, value = (
                reference.gather_context(pool[:, layer, which], slots, start + rows)[:, start:]
                for which in (0, 1)
            )
            mirror.append(layer, key.transpose(0, 1), value.transpose(0, 1), start)
        got.append(mirror.attend(1, query[start : start + rows], start))
        start += rows
    first = tokens - sum(pieces)
    assert mirror.tokens == tokens
    assert_near(torch.cat(got), expected(shape, pool, slots, 1, query, 0)[first:])


def test_gathering_on_from_a_block_border_equals_gathering_at_once() -> None:
    shape = SHAPES[0]
    pool = make_pool(shape, 9)
    slots = torch.tensor([4, 2, 8, 0, 7, 1])
    once, stepwise = make_mirror(shape), make_mirror(shape)
    once.gather(pool, slots, 90)
    for start, tokens in [(0, 32), (32, 64), (64, 70), (64, 90)]:
        stepwise.gather(pool, slots, tokens, start=start)
    query = make_query(shape, 90)
    for layer in range(LAYERS):
        assert torch.equal(once.attend(layer, query, 0), stepwise.attend(layer, query, 0))


def test_growth_keeps_what_is_present_and_doubles() -> None:
    shape = Shape(3, 3, 24, 7)
    pool = make_pool(shape, 4)
    slots = torch.arange(4)
    mirror = make_mirror(shape, capacity=21)
    mirror.gather(pool, slots, 21)
    before = mirror.attend(2, make_query(shape, 1), 20)
    row = torch.ones((1, 3, 24))
    mirror.append(2, row, row, 21)
    assert mirror.capacity == 32
    mirror.append(2, row.expand(12, -1, -1), row.expand(12, -1, -1), 22)
    assert mirror.capacity == 64
    assert torch.equal(mirror.attend(2, make_query(shape, 1), 20), before)


def test_appending_earlier_forgets_what_came_after() -> None:
    shape = Shape(2, 1, 16, 16)
    mirror = make_mirror(shape)
    mirror.gather(make_pool(shape, 2), [1, 0], 32)
    row = torch.ones((1, 1, 16))
    for layer in range(LAYERS):
        mirror.append(layer, row, row, 9)
    assert mirror.tokens == 10
    with pytest.raises(ValueError, match="start: queries 10 to 11 pass the 10 tokens present"):
        mirror.attend(0, make_query(shape, 1), 10)


def test_a_hole_is_refused() -> None:
    shape = Shape(2, 1, 16, 16)
    mirror = make_mirror(shape)
    row = torch.ones((1, 1, 16))
    mirror.append(0, row, row, 0)
    with pytest.raises(ValueError, match="start: 2 leaves a hole after 1 tokens"):
        mirror.append(0, row, row, 2)
    assert repr(mirror).startswith("<ContextMirror 0/")


@pytest.mark.parametrize(
    ("slots", "tokens", "start", "message"),
    [
        ([0], 17, 0, "slots: .* do not hold 17 tokens"),
        ([0, 3], 17, 0, "slots: not all within the pool's 3 blocks"),
        ([-1, 0], 17, 0, "slots: not all within the pool's 3 blocks"),
        ([0, 1], 17, 8, "start: 8 is no multiple of 16"),
        ([0, 1], 17, 16, "start: 16 .* within the 5 tokens present"),
    ],
)
def test_a_refused_gather_leaves_the_mirror_as_it_was(
    slots: list[int], tokens: int, start: int, message: str
) -> None:
    shape = Shape(2, 1, 16, 16)
    pool = make_pool(shape, 3)
    mirror = make_mirror(shape)
    mirror.gather(pool, [2], 5)
    before = mirror.attend(1, make_query(shape, 5), 0)
    with pytest.raises(ValueError, match=message):
        mirror.gather(pool, slots, tokens, start=start)
    assert mirror.tokens == 5
    assert torch.equal(mirror.attend(1, make_query(shape, 5), 0), before)


def test_a_large_mirror_is_writable_to_its_last_position() -> None:
    mirror = ContextMirror(2, 2, 64, torch.float32, 8192)
    assert mirror.nbytes == 2 * 2 * 2 * 8192 * 64 * 4
    rows = torch.ones((8192, 2, 64))
    mirror.append(1, rows, 2 * rows, 0)
    got = mirror.attend(1, torch.ones((1, 2, 64)), 8191)
    assert_near(got, torch.full((1, 2, 64), 2.0))
