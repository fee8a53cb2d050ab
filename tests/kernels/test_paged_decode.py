"""The Triton decode kernel against the float64 reference, with NaN wherever it must not read."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from kvtier.kernels import reference
from kvtier.kernels.configs import Launch
from kvtier.kernels.paged_decode import paged_decode
from kvtier.kernels.workspace import DecodeWorkspace
from tests.kernels.cases import (
    FP8,
    SHAPES,
    SHAPES_AND_DTYPES,
    STORED,
    Case,
    Shape,
    assert_near,
    make_case,
)
from tests.kernels.matrix import MATRIX

SPLIT = 32
LAUNCH = Launch(tile=16, warps=4, stages=3, split=SPLIT)
BOUNDARIES = [0, 1, 15, 16, 17, SPLIT - 1, SPLIT, SPLIT + 1]


def run(case: Case, launch: Launch | None = LAUNCH, workspace: Any = None) -> Tensor:
    return paged_decode(
        case.query,
        case.key_pool,
        case.value_pool,
        case.block_tables,
        case.context_lens,
        case.shape.scale,
        key_scale=case.key_scale,
        value_scale=case.value_scale,
        workspace=workspace,
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
    case = make_case(shape, BOUNDARIES, dtype=dtype, device=device)
    got = run(case)
    assert got.shape == case.query.shape and got.dtype == dtype
    assert_near(got, expected(case))


@pytest.mark.parametrize(("dtype", "kv_dtype"), STORED[2:])
def test_decode_of_narrow_elements_agrees_with_float64(
    dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> None:
    case = make_case(SHAPES[1], BOUNDARIES, dtype=dtype, kv_dtype=kv_dtype, device=device)
    assert_near(run(case), expected(case))


@pytest.mark.stress
@pytest.mark.parametrize(("shape", "dtype", "kv_dtype"), MATRIX)
def test_decode_agrees_with_float64_on_every_shape(
    shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> None:
    case = make_case(shape, BOUNDARIES, dtype=dtype, kv_dtype=kv_dtype, device=device)
    assert_near(run(case), expected(case))


@pytest.mark.parametrize("shape", [Shape(9, 3, 64, 16), Shape(4, 2, 128, 64)])
def test_the_shipped_sizes_agree_around_their_split(shape: Shape, device: torch.device) -> None:
    case = make_case(shape, [511, 512, 513, 70], dtype=torch.float16, device=device)
    assert_near(run(case, launch=None), expected(case))


def test_e4m3_is_read_alike_with_and_without_hardware_for_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cuda":
        pytest.skip("a GPU reads it in one way; the cases against float64 cover that")
    # No NaN in the pool: the interpreter's own conversion takes NaN for 480.
    case = make_case(SHAPES[0], [48, 16], dtype=torch.float16, kv_dtype=FP8, spare_columns=0)
    case = replace(case, block_tables=case.block_tables.clamp(0, case.pool.shape[0] - 1))
    by_bits = run(case)
    monkeypatch.setattr("kvtier.kernels.paged_decode.readable", lambda pool: pool)
    assert torch.equal(run(case), by_bits)
    assert_near(by_bits, expected(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_e4m3_number_is_read_exactly(dtype: torch.dtype, device: torch.device) -> None:
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FP8)
    pool = torch.zeros((1, 2, 1, 16, 256), dtype=FP8)
    pool[0, 1, 0, 0] = numbers
    pool = pool.to(device)
    got = paged_decode(
        torch.zeros((1, 1, 256), dtype=dtype, device=device),
        pool[:, 0],
        pool[:, 1],
        torch.zeros((1, 1), dtype=torch.int32, device=device),
        torch.ones(1, dtype=torch.int32, device=device),
        1.0,
        key_scale=torch.ones(1, device=device),
        value_scale=torch.full((1,), 2.0, device=device),
    )
    torch.testing.assert_close(
        got[0, 0].cpu(), 2 * numbers.to(dtype), rtol=0, atol=0, equal_nan=True
    )


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


@pytest.fixture
def visit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[int], int]], None]]:
    """Lets the interpreter run splits in another order than theirs."""
    plain = type(interpreter_builder).set_grid_idx

    def reorder(order: Callable[[int], int]) -> None:
        def visited(self: Any, x: int, y: int, z: int) -> None:
            plain(self, x, y, order(z))

        monkeypatch.setattr(type(interpreter_builder), "set_grid_idx", visited)

    yield reorder


def test_the_order_in_which_splits_end_does_not_change_the_bits(
    visit: Callable[[Callable[[int], int]], None], device: torch.device
) -> None:
    if device.type == "cuda":
        pytest.skip("the order is the GPU's own there")
    case = make_case(SHAPES[3], [4 * SPLIT - 3, SPLIT + 1, SPLIT], spare_columns=0)
    workspace = DecodeWorkspace(3, 7, 64, 4, device)
    want = run(case, workspace=workspace)
    for order in (lambda z: 3 - z, lambda z: (z + 2) % 4, lambda z: z ^ 1):
        visit(order)
        assert torch.equal(run(case, workspace=workspace), want)
        assert not workspace.arrived.any()


def test_a_workspace_serves_launches_of_any_size_that_fits(device: torch.device) -> None:
    workspace = DecodeWorkspace(8, 7, 64, 5, device)
    workspace.partial.fill_(torch.nan)
    for contexts in ([100, 3, 64], [0, 33], [129]):
        case = make_case(SHAPES[3], contexts, device=device, spare_columns=0)
        assert_near(run(case, workspace=workspace), expected(case))
        assert not workspace.arrived.any()


def test_a_workspace_that_is_too_small_is_refused(device: torch.device) -> None:
    case = make_case(SHAPES[0], [100, 3], device=device)
    for sizes in [(1, 9, 64, 4), (2, 9, 64, 3), (2, 9, 32, 4), (2, 3, 64, 4)]:
        with pytest.raises(ValueError, match="^workspace: .* too few for 2 sequences of 9 heads"):
            run(case, workspace=DecodeWorkspace(*sizes, device))


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
