"""`rope_write` against float64 and, bit for bit, against the engine's rotation; NaN canaries."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier.engine.rope import rotate_
from kvtier.kernels import cpu, reference
from kvtier.kernels import rope_write as triton_rope
from tests.kernels.cases import Shape

FP8 = torch.float8_e4m3fn
RopeWrite = Callable[..., Tensor]

HEADS = [(1, 1), (9, 3), (32, 8), (64, 8)]
HEAD_DIMS = [64, 80, 96, 128, 256]
BLOCK_SIZES = [16, 32, 64]
SHAPES = [
    Shape(heads, kv_heads, head_dim, BLOCK_SIZES[(row + column) % 3])
    for row, (heads, kv_heads) in enumerate(HEADS)
    for column, head_dim in enumerate(HEAD_DIMS)
]
ODD = Shape(5, 1, 24, 7)

# Of values up to 6: rotation in float32 and one rounding. FP8 steps are 1/8 of a power of two,
# so half a step is at most 1/16 of the number. Triton's interpreter cuts bf16 off instead of
# rounding it: a whole step is 1/128.
TOLERANCE = {
    torch.float32: (2e-6, 2e-7),
    torch.float16: (4e-6, 6e-4),
    torch.bfloat16: (4e-6, 1 / 128),
    FP8: (2**-10, 1 / 16 + 1e-5),
}
"""Absolute and relative."""


@dataclass(frozen=True)
class Case:
    """Arguments of one call, query, key and value being views of one projection's rows."""

    states: Tensor
    shape: Shape
    cos: Tensor
    sin: Tensor
    pool: Tensor
    slots: Tensor
    scales: tuple[Tensor, Tensor] | tuple[None, None]

    def arguments(self) -> dict[str, Any]:
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        return {
            "query": self.states[:, 1 : 1 + heads],
            "key": self.states[:, 1 + heads : 1 + heads + kv_heads],
            "value": self.states[:, 1 + heads + kv_heads : -1],
            "cos": self.cos,
            "sin": self.sin,
            "key_pool": self.pool[:, 1, 0],
            "value_pool": self.pool[:, 1, 1],
            "slot_mapping": self.slots,
            "key_scale": self.scales[0],
            "value_scale": self.scales[1],
        }

    def like(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Case":
        """The same case on a device; with float64, what the reference is asked."""
        work = self.cos.dtype if dtype is None else dtype
        return Case(
            self.states.to(device, dtype or self.states.dtype, copy=True),
            self.shape,
            self.cos.to(device, work),
            self.sin.to(device, work),
            self.pool.to(device, dtype or self.pool.dtype, copy=True),
            self.slots.to(device),
            tuple(None if scale is None else scale.to(device) for scale in self.scales),  # type: ignore[arg-type]
        )


def make_case(
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    *,
    fp8: bool = False,
    scaled: bool = False,
    tokens: int = 3,
) -> Case:
    """Token 2 is skipped; the head before the queries and the one after the values are nobody's."""
    generator = torch.Generator().manual_seed(shape.head_dim)
    heads = shape.heads + 2 * shape.kv_heads + 2
    states = torch.randn((tokens, heads, shape.head_dim), generator=generator)
    states[:, 0] = states[:, -1] = 7.0  # seen where the pool is NaN
    angles = torch.rand((tokens, shape.head_dim // 2), generator=generator) * 1000
    blocks = 3
    pool = torch.full((blocks, 2, 2, shape.kv_heads, shape.block_size, shape.head_dim), torch.nan)
    slots = torch.randperm(blocks * shape.block_size, generator=generator)[:tokens]
    slots[2] = -1
    scales = torch.rand((2, shape.kv_heads), generator=generator) + 0.01 if scaled else None
    return Case(
        states.to(dtype),
        shape,
        angles.cos(),
        angles.sin(),
        pool.to(FP8 if fp8 else dtype),
        slots,
        (None, None) if scales is None else (scales[0], scales[1]),
    )


def called(case: Case, write: RopeWrite, **more: Any) -> tuple[Tensor, Case]:
    """What a call returns and the case after it, all on the CPU."""
    got = write(**(case.arguments() | more))
    return got.cpu(), case.like("cpu")


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    atol, rtol = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=rtol, equal_nan=True)


def assert_agrees_with_float64(case: Case, write: RopeWrite, device: torch.device | str) -> None:
    """The rotated query and the whole pool are right; what must not change keeps its bits."""
    got, after = called(case.like(device), write)
    exact = case.like("cpu", torch.float64)
    pool_dtype = case.pool.dtype
    arguments = exact.arguments() | {"key_scale": None, "value_scale": None}
    want = reference.rope_write(**arguments)
    expected = exact.pool[:, 1]
    if pool_dtype == FP8 and case.scales[0] is not None:
        expected /= torch.stack(case.scales)[None, :, :, None, None]
    if pool_dtype == FP8:
        expected.clamp_(-448, 448)
    assert_near(got, want, case.states.dtype)
    assert_near(after.pool, exact.pool, pool_dtype)
    untouched = torch.isnan(exact.pool)
    assert torch.equal(bits(after.pool[untouched]), bits(case.pool[untouched]))
    keep = case.states.clone()
    keep[:, 1 : 1 + case.shape.heads] = got  # rotated in place: all other heads are as before
    assert torch.equal(bits(after.states), bits(keep))


def kind(number: int) -> tuple[torch.dtype, bool, bool]:
    """A dtype of query, key and value, whether the pool is FP8, and whether it is scaled."""
    kinds = [
        (torch.float32, False, False),
        (torch.float16, False, False),
        (torch.bfloat16, False, False),
        (torch.bfloat16, True, True),
        (torch.float32, True, False),
    ]
    return kinds[number % len(kinds)]


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_triton_agrees_with_float64_and_touches_nothing_else(
    number: int, device: torch.device
) -> None:
    dtype, fp8, scaled = kind(number + number // len(HEAD_DIMS))
    case = make_case(SHAPES[number], dtype, fp8=fp8, scaled=scaled)
    assert_agrees_with_float64(case, triton_rope.rope_write, device)


@pytest.mark.stress
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS)
def test_triton_agrees_with_float64_in_every_combination(
    heads: tuple[int, int], head_dim: int, block_size: int, number: int, device: torch.device
) -> None:
    dtype, fp8, scaled = kind(number)
    case = make_case(Shape(*heads, head_dim, block_size), dtype, fp8=fp8, scaled=scaled)
    assert_agrees_with_float64(case, triton_rope.rope_write, device)


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("shape", [SHAPES[6], ODD])
@pytest.mark.parametrize("write", [cpu.rope_write, reference.rope_write])
def test_torch_agrees_with_float64_and_touches_nothing_else(
    write: RopeWrite, shape: Shape, number: int
) -> None:
    dtype, fp8, scaled = kind(number)
    case = make_case(shape, dtype, fp8=fp8, scaled=scaled)
    assert_agrees_with_float64(case, write, "cpu")


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("shape", [SHAPES[6], ODD])
def test_all_implementations_give_the_same_bits(
    shape: Shape, number: int, device: torch.device
) -> None:
    dtype, fp8, scaled = kind(number)
    case = make_case(shape, dtype, fp8=fp8, scaled=scaled)
    want, expected = called(case.like("cpu"), reference.rope_write)
    for write, where in ((triton_rope.rope_write, device), (cpu.rope_write, torch.device("cpu"))):
        got, after = called(case.like(where), write)
        cuts_bf16 = write is triton_rope.rope_write and where.type == "cpu"  # the interpreter
        if not (cuts_bf16 and got.dtype == torch.bfloat16):
            assert torch.equal(bits(got), bits(want))
        if not (cuts_bf16 and case.pool.dtype == torch.bfloat16):
            assert torch.equal(bits(after.pool), bits(expected.pool))


@pytest.mark.parametrize("shape", [SHAPES[6], SHAPES[13], ODD])
def test_in_float32_the_bits_are_those_of_the_engines_own_rotation(
    shape: Shape, device: torch.device
) -> None:
    case = make_case(shape, tokens=9)
    got, after = called(case.like(device), triton_rope.rope_write)
    own = case.like("cpu")
    rotate_(own.states[:, 1 : -1 - shape.kv_heads], own.cos[:, None], own.sin[:, None])
    assert torch.equal(got, own.arguments()["query"])
    cpu.write_kv(
        **{
            name: own.arguments()[name]
            for name in ("key", "value", "key_pool", "value_pool", "slot_mapping")
        }
    )
    assert torch.equal(bits(after.pool), bits(own.pool))


@pytest.mark.parametrize("write", [triton_rope.rope_write, cpu.rope_write, reference.rope_write])
def test_with_out_the_query_stays_as_it_is(write: RopeWrite, device: torch.device) -> None:
    if device.type == "cuda" and write is cpu.rope_write:
        pytest.skip("the CPU path has no CUDA case")
    case = make_case(ODD).like(device)
    wider = torch.full((3, 7, 24), torch.nan, device=device)
    before = case.states.clone()
    got = write(**case.arguments(), out=wider[:, 1:6])
    assert got.data_ptr() == wider[:, 1:6].data_ptr()
    assert torch.equal(bits(case.states), bits(before))
    assert torch.isnan(wider[:, [0, 6]]).all() and not torch.isnan(got).any()


@pytest.mark.parametrize("write", [triton_rope.rope_write, cpu.rope_write, reference.rope_write])
def test_every_16_bit_float_becomes_the_nearest_fp8(write: RopeWrite, device: torch.device) -> None:
    """All 65,536 of them, NaN, infinities and what is too large or too small included."""
    if device.type == "cuda" and write is cpu.rope_write:
        pytest.skip("the CPU path has no CUDA case")
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    value = every.view(4, 64, 256)
    pool = torch.zeros((1, 2, 64, 16, 256), dtype=FP8, device=device)
    nothing = torch.zeros((4, 64, 256), dtype=torch.float16, device=device)
    angles = torch.zeros((4, 128), device=device)
    slots = torch.arange(4, device=device)
    write(
        nothing,
        nothing,
        value.to(device),
        angles,
        angles,
        pool[:, 0],
        pool[:, 1],
        slots,
    )
    got = pool[0, 1, :, :4].transpose(0, 1).cpu().double()
    # Of the 127 numbers a byte can be, without a sign, the nearest; the even one of two as near.
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).double()
    size = value.double().abs().clamp(max=448.0)
    above = torch.searchsorted(numbers, size).clamp(max=126)
    below = (above - 1).clamp(min=0)
    up, down = numbers[above] - size, size - numbers[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    want = numbers[code].copysign(value.double())
    want[torch.isnan(value)] = torch.nan
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("write", [triton_rope.rope_write, cpu.rope_write, reference.rope_write])
def test_no_token_changes_nothing(write: RopeWrite, device: torch.device) -> None:
    if device.type == "cuda" and write is cpu.rope_write:
        pytest.skip("the CPU path has no CUDA case")
    pool = torch.zeros((2, 1, 16, 8), device=device)
    rows, angles = torch.ones((0, 1, 8), device=device), torch.ones((0, 4), device=device)
    slots = torch.zeros(0, dtype=torch.int64, device=device)
    assert write(rows, rows, rows, angles, angles, pool, pool, slots).shape == (0, 1, 8)
    assert not pool.any()
