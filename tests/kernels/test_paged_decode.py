"""The Triton decode kernel against the float64 reference, with NaN wherever it must not read."""

import pytest
import torch
from torch import Tensor

from kvtier.kernels import reference
from kvtier.kernels.configs import Launch
from kvtier.kernels.paged_decode import paged_decode
from tests.kernels.cases import SHAPES, SHAPES_AND_DTYPES, Case, Shape, assert_near, make_case

SPLIT = 32
LAUNCH = Launch(tile=32, warps=4, stages=3, split=SPLIT)


def run(case: Case, launch: Launch = LAUNCH) -> Tensor:
    return paged_decode(
        case.query,
        case.key_pool,
        case.value_pool,
        case.block_tables,
        case.context_lens,
        case.shape.scale,
        launch=launch,
    )


def expected(case: Case) -> Tensor:
    exact = case.doubled()
    return reference.paged_decode(
        exact.query,
        exact.key_pool,
        exact.value_pool,
        exact.block_tables,
        exact.context_lens,
        exact.shape.scale,
    )


@pytest.mark.parametrize(("shape", "dtype"), SHAPES_AND_DTYPES)
def test_decode_agrees_with_float64_and_reads_nothing_past_a_context(
    shape: Shape, dtype: torch.dtype, device: torch.device
) -> None:
    contexts = [0, 1, 15, 16, 17, SPLIT - 1, SPLIT, SPLIT + 1]
    case = make_case(shape, contexts, dtype=dtype, device=device)
    got = run(case)
    assert got.shape == case.query.shape and got.dtype == dtype
    assert_near(got, expected(case))


def test_a_context_of_more_splits_than_are_merged_at_once_agrees(device: torch.device) -> None:
    case = make_case(Shape(7, 1, 16, 16), [16 * 17 + 3], device=device)
    assert_near(run(case, Launch(tile=16, warps=4, stages=3, split=16)), expected(case))


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4]])
def test_decode_gives_a_sequence_the_same_bits_alone_and_in_a_batch(
    shape: Shape, device: torch.device
) -> None:
    contexts = [5, 2 * SPLIT + 9, 3 * SPLIT]
    case = make_case(shape, contexts, device=device, spare_columns=5)
    batch = run(case)
    for seq, context in enumerate(contexts):
        blocks = -(-context // shape.block_size)
        alone = paged_decode(
            case.query[seq : seq + 1],
            case.key_pool,
            case.value_pool,
            case.block_tables[seq : seq + 1, :blocks],
            case.context_lens[seq : seq + 1],
            shape.scale,
            launch=LAUNCH,
        )
        assert torch.equal(alone[0], batch[seq])


def test_decode_reaches_blocks_past_two_to_the_31_elements(device: torch.device) -> None:
    stride = 1 << 30
    shape = Shape(2, 1, 16, 16)
    storage = torch.empty(2 * stride + 2 * 16 * 16, dtype=torch.float16, device=device)
    pool = storage.as_strided((3, 2, 1, 16, 16), (stride, 16 * 16, 16 * 16, 16, 1))
    pool[2] = torch.randn((2, 1, 16, 16), generator=torch.Generator().manual_seed(3)).to(pool)
    query = torch.randn((1, 2, 16), generator=torch.Generator().manual_seed(4)).to(pool)
    tables = torch.tensor([[2]], dtype=torch.int32, device=device)
    lens = torch.tensor([16], dtype=torch.int32, device=device)
    got = paged_decode(query, pool[:, 0], pool[:, 1], tables, lens, shape.scale)
    near = pool[2].cpu().double()
    want = reference.attention(query.cpu().double(), near[0], near[1], 15, shape.scale)
    assert_near(got, want)


def test_decode_of_an_empty_batch_is_empty(device: torch.device) -> None:
    shape = Shape(3, 1, 16, 16)
    case = make_case(shape, [4], device=device)
    got = paged_decode(
        case.query[:0],
        case.key_pool,
        case.value_pool,
        case.block_tables[:0],
        case.context_lens[:0],
        shape.scale,
    )
    assert got.shape == (0, 3, 16)
