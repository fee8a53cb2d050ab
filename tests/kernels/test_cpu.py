"""The CPU path against the float64 reference, with NaN wherever it must not read."""

from types import ModuleType

import pytest
import torch

from kvtier.kernels import cpu, reference
from tests.kernels.cases import FP8, SHAPES, Shape, assert_near, make_case

DTYPES = [torch.float32, torch.float64, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_cpu_decode_agrees_with_float64_around_block_and_split_borders(
    shape: Shape, dtype: torch.dtype
) -> None:
    case = make_case(shape, [0, 1, 15, 16, 17, 511, 512, 513, 1030], dtype=dtype)
    arguments = (case.block_tables, case.context_lens, shape.scale)
    got = cpu.paged_decode(case.query, case.key_pool, case.value_pool, *arguments)
    exact = case.doubled()
    want = reference.paged_decode(exact.query, exact.key_pool, exact.value_pool, *arguments)
    assert got.dtype == dtype
    assert_near(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_cpu_prefill_agrees_with_float64_on_ragged_chunks_over_cached_blocks(
    shape: Shape, dtype: torch.dtype
) -> None:
    contexts = [1, 17, 40, 514, 513, 1030, 700]
    queries = [1, 17, 0, 3, 4, 5, 33]
    case = make_case(shape, contexts, queries=queries, dtype=dtype)
    arguments = (case.block_tables, case.query_starts, case.query_lens, case.context_lens)
    got = cpu.paged_prefill(
        case.query, case.key_pool, case.value_pool, *arguments, scale=shape.scale
    )
    exact = case.doubled()
    want = reference.paged_prefill(
        exact.query, exact.key_pool, exact.value_pool, *arguments, scale=shape.scale
    )
    assert got.dtype == dtype
    assert_near(got, want)


@pytest.mark.parametrize("implementation", [cpu, reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_paths_of_fp8_pools_agree_with_float64(
    implementation: ModuleType, dtype: torch.dtype
) -> None:
    case = make_case(SHAPES[1], [33, 20], queries=[3, 20], dtype=dtype, kv_dtype=FP8)
    exact = case.doubled()
    arguments = (case.block_tables, case.query_starts, case.query_lens, case.context_lens)
    got = implementation.paged_prefill(
        case.query, case.key_pool, case.value_pool, *arguments, case.shape.scale, **case.scales
    )
    want = reference.paged_prefill(
        exact.query, exact.key_pool, exact.value_pool, *arguments, case.shape.scale
    )
    assert got.dtype == dtype
    assert_near(got, want)
    tables = (case.block_tables, case.context_lens, case.shape.scale)
    got = implementation.paged_decode(
        case.query[:2], case.key_pool, case.value_pool, *tables, **case.scales
    )
    want = reference.paged_decode(exact.query[:2], exact.key_pool, exact.value_pool, *tables)
    assert_near(got, want)


def test_cpu_decode_gives_a_sequence_the_same_bits_alone_and_in_a_batch() -> None:
    case = make_case(SHAPES[0], [3, 700, 1025])
    batch = cpu.paged_decode(
        case.query,
        case.key_pool,
        case.value_pool,
        case.block_tables,
        case.context_lens,
        case.shape.scale,
    )
    for seq in range(3):
        own = slice(seq, seq + 1)
        alone = cpu.paged_decode(
            case.query[own],
            case.key_pool,
            case.value_pool,
            case.block_tables[own],
            case.context_lens[own],
            case.shape.scale,
        )
        assert torch.equal(alone[0], batch[seq])
