"""The Triton prefill kernel against the float64 reference, with NaN wherever it must not read."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvtier.kernels import reference
from kvtier.kernels.paged_prefill import paged_prefill
from tests.kernels.cases import (
    SHAPES,
    SHAPES_AND_DTYPES,
    STORED,
    Case,
    Shape,
    assert_near,
    make_case,
)
from tests.kernels.matrix import MATRIX


def run(case: Case) -> Tensor:
    return paged_prefill(
        case.query,
        case.key_pool,
        case.value_pool,
        case.block_tables,
        case.query_starts,
        case.query_lens,
        case.context_lens,
        case.shape.scale,
        key_scale=case.key_scale,
        value_scale=case.value_scale,
    )


def expected(case: Case) -> Tensor:
    exact = case.doubled()
    return reference.paged_prefill(
        exact.query,
        exact.key_pool,
        exact.value_pool,
        exact.block_tables,
        exact.query_starts,
        exact.query_lens,
        exact.context_lens,
        exact.shape.scale,
    )


@pytest.mark.parametrize(("shape", "dtype"), SHAPES_AND_DTYPES)
def test_prefill_agrees_with_float64_on_ragged_chunks_over_cached_blocks(
    shape: Shape, dtype: torch.dtype, device: torch.device
) -> None:
    # 65 - 3 and 66 - 3: chunks that begin just before and on the last position of a tile of 64.
    contexts, queries = [1, 17, 16, 65, 66, 129, 40], [1, 17, 0, 3, 3, 15, 33]
    case = make_case(shape, contexts, queries=queries, dtype=dtype, device=device)
    got = run(case)
    assert got.shape == case.query.shape and got.dtype == dtype
    assert_near(got, expected(case))


@pytest.mark.parametrize(("dtype", "kv_dtype"), STORED[2:])
def test_prefill_of_narrow_elements_agrees_with_float64(
    dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> None:
    case = make_case(
        SHAPES[1], [17, 70], queries=[17, 3], dtype=dtype, kv_dtype=kv_dtype, device=device
    )
    assert_near(run(case), expected(case))


@pytest.mark.stress
@pytest.mark.parametrize(("shape", "dtype", "kv_dtype"), MATRIX)
def test_prefill_agrees_with_float64_on_every_shape(
    shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> None:
    contexts, queries = [1, 16, 17, 65, 129, 40], [1, 0, 17, 3, 15, 33]
    case = make_case(
        shape, contexts, queries=queries, dtype=dtype, kv_dtype=kv_dtype, device=device
    )
    assert_near(run(case), expected(case))


@pytest.mark.parametrize("pieces", [[70], [1, 69], [16, 16, 38], [64, 5, 1]])
def test_cutting_a_prompt_into_chunks_changes_rounding_only(
    pieces: list[int], device: torch.device
) -> None:
    shape = SHAPES[0]
    whole = make_case(shape, [70], queries=[70], device=device)
    rows, done = [], 0
    for piece in pieces:
        lens = torch.tensor([piece], dtype=torch.int32, device=device)
        rows.append(
            paged_prefill(
                whole.query[done : done + piece],
                whole.key_pool,
                whole.value_pool,
                whole.block_tables,
                torch.zeros_like(lens),
                lens,
                lens + done,
                shape.scale,
            )
        )
        done += piece
    want = expected(whole)[:70]
    assert_near(torch.cat(rows), want)


def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(device: torch.device) -> None:
    contexts, queries = [90, 17, 65], [31, 17, 2]
    case = make_case(SHAPES[1], contexts, queries=queries, device=device)
    batch = run(case)
    for seq, count in enumerate(queries):
        first = int(case.query_starts[seq])
        own = slice(seq, seq + 1)
        alone = paged_prefill(
            case.query[first : first + count],
            case.key_pool,
            case.value_pool,
            case.block_tables[own],
            torch.zeros_like(case.query_starts[own]),
            case.query_lens[own],
            case.context_lens[own],
            case.shape.scale,
        )
        assert torch.equal(alone, batch[first : first + count])


def test_a_querys_bits_do_not_depend_on_how_long_its_chunk_is(device: torch.device) -> None:
    whole = make_case(SHAPES[1], [70], queries=[54], device=device)
    want = run(whole)[:54]
    for count in (1, 17, 53):
        shorter = replace(
            whole,
            query=whole.query[:count],
            query_lens=torch.full_like(whole.query_lens, count),
            context_lens=whole.context_lens - 54 + count,
        )
        assert torch.equal(run(shorter), want[:count])


def test_a_chunk_of_one_query_agrees_with_decode(device: torch.device) -> None:
    case = make_case(Shape(7, 1, 24, 16), [50, 3], device=device)
    exact = case.doubled()
    want = reference.paged_decode(
        exact.query,
        exact.key_pool,
        exact.value_pool,
        exact.block_tables,
        exact.context_lens,
        exact.shape.scale,
    )
    assert_near(run(case), want)
