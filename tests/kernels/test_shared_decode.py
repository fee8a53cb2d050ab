"""Decoding over shared prefixes: the reference, the CPU path and the Triton kernels."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvtier.kernels import cpu, reference
from kvtier.kernels.configs import ARCHITECTURES, Launch, lookup
from kvtier.kernels.paged_decode import paged_decode
from kvtier.kernels.prefixes import SharedPrefixes
from kvtier.kernels.shared_decode import shared_decode
from kvtier.kernels.workspace import DecodeWorkspace
from tests.kernels.cases import (
    FP8,
    OUT_OF_RANGE,
    SHAPES,
    STORED,
    Case,
    Shape,
    assert_near,
    make_case,
)
from tests.kernels.matrix import MATRIX

SPLIT = 32
LAUNCH = Launch(tile=16, warps=4, stages=3, split=SPLIT)
SMALL = Shape(6, 2, 24, 16)
"""The interpreter's time goes by programs, and so by KV heads."""

Groups = list[tuple[list[int], int]]


def share(case: Case, groups: Groups, *, hide: bool = True) -> tuple[Case, SharedPrefixes]:
    """The case with one prefix a group: the first member's blocks stand in every member's table.

    With `hide`, the other members' own entries for whole splits of it point nowhere: a kernel that
    reads them shows.
    """
    size = case.shape.block_size
    tables = case.block_tables.cpu().clone()
    for (leader, *others), length in groups:
        assert length % size == 0
        for member in others:
            tables[member, : length // size] = tables[leader, : length // size]
            if hide:
                tables[member, : length // SPLIT * SPLIT // size] = OUT_OF_RANGE
    device = case.query.device
    shared = SharedPrefixes.of(groups, len(case.context_lens), device)
    return replace(case, block_tables=tables.to(device)), shared


def run(
    case: Case,
    shared: SharedPrefixes,
    *,
    rows: int = 16,
    workspace: DecodeWorkspace | None = None,
) -> Tensor:
    return shared_decode(
        case.query,
        case.key_pool,
        case.value_pool,
        case.block_tables,
        case.context_lens,
        shared,
        case.shape.scale,
        key_scale=case.key_scale,
        value_scale=case.value_scale,
        workspace=workspace,
        launch=replace(LAUNCH, rows=rows),
        tail_launch=LAUNCH,
    )


def plain(case: Case) -> Tensor:
    return paged_decode(
        case.query,
        case.key_pool,
        case.value_pool,
        case.block_tables,
        case.context_lens,
        case.shape.scale,
        key_scale=case.key_scale,
        value_scale=case.value_scale,
        launch=LAUNCH,
    )


def expected(case: Case, groups: Groups) -> Tensor:
    """float64 attention over each member's own table, without any sharing."""
    exact, _ = share(case, groups, hide=False)
    exact = exact.doubled()
    return reference.paged_decode(
        exact.query,
        exact.key_pool,
        exact.value_pool,
        exact.block_tables,
        exact.context_lens,
        exact.shape.scale,
    )


CASES: list[tuple[list[int], Groups]] = [
    ([70], [([0], 64)]),  # a group of one
    ([100, 97], [([1, 0], 96)]),  # every split but the last is shared
    ([64, 65, 40], [([0, 1], 64)]),  # a context that is all shared, whole splits of it
    ([33, 90, 80, 17, 0], [([1, 2], 80)]),  # no multiple of the split; others, and an empty one
    ([100, 99, 98, 97, 70, 71], [([0, 3], 96), ([4, 1, 5], 64)]),  # two groups, two lengths
    ([40, 41], [([0, 1], 16)]),  # shorter than a split: nothing to share
    ([40, 41], []),
]


@pytest.mark.parametrize(("contexts", "groups"), CASES)
def test_shared_decode_agrees_with_float64_and_reads_a_prefix_through_one_table(
    contexts: list[int], groups: Groups, device: torch.device
) -> None:
    case = make_case(SMALL, contexts, device=device)
    shown, shared = share(case, groups)
    assert_near(run(shown, shared), expected(case, groups))


@pytest.mark.parametrize("rows", [16, 32])
def test_seventeen_members_share_whatever_the_rows_of_a_tile(
    rows: int, device: torch.device
) -> None:
    contexts = [33 + member % 5 for member in range(19)]
    groups: Groups = [([*range(1, 18)], 32)]
    case = make_case(SMALL, contexts, device=device)
    shown, shared = share(case, groups)
    assert_near(run(shown, shared, rows=rows), expected(case, groups))


@pytest.mark.parametrize(("dtype", "kv_dtype"), STORED[1:])
def test_shared_decode_of_narrow_elements_agrees_with_float64(
    dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> None:
    groups: Groups = [([0, 1], 32)]
    case = make_case(SHAPES[1], [50, 39], dtype=dtype, kv_dtype=kv_dtype, device=device)
    shown, shared = share(case, groups)
    assert_near(run(shown, shared), expected(case, groups))


@pytest.mark.stress
@pytest.mark.parametrize(("shape", "dtype", "kv_dtype"), MATRIX)
def test_shared_decode_agrees_with_float64_on_every_shape(
    shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> None:
    groups: Groups = [([2, 0, 1], 64)]
    case = make_case(shape, [65, 97, 70, 31], dtype=dtype, kv_dtype=kv_dtype, device=device)
    shown, shared = share(case, groups)
    assert_near(run(shown, shared, rows=64), expected(case, groups))


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_members_get_plain_decodes_bits_in_the_interpreter(
    rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    if device.type == "cuda":
        pytest.skip("a GPU may order a dot of more rows otherwise: no promise there")
    groups: Groups = [([0, 2, 1], 64)]
    case = make_case(SMALL, [70, 95, 64, 33], dtype=dtype, device=device)
    unshared, shared = share(case, groups, hide=False)
    assert torch.equal(run(unshared, shared, rows=rows), plain(unshared))


def test_a_members_bits_do_not_depend_on_how_many_share(device: torch.device) -> None:
    case = make_case(SMALL, [70, 71, 72, 73, 74, 75], device=device)
    everybody, all_shared = share(case, [([0, 1, 2, 3, 4, 5], 64)], hide=False)
    _, few_shared = share(case, [([0, 4], 64)], hide=False)
    many = run(everybody, all_shared)
    few = run(everybody, few_shared)
    assert torch.equal(few[[0, 4]], many[[0, 4]])


def test_a_workspace_is_left_as_it_was_found(device: torch.device) -> None:
    workspace = DecodeWorkspace(6, 6, 24, 5, device)
    for contexts, groups in CASES[1:4]:
        case = make_case(SMALL, contexts, device=device)
        shown, shared = share(case, groups)
        assert_near(run(shown, shared, workspace=workspace), expected(case, groups))
        assert not workspace.arrived.any()


@pytest.mark.parametrize(("contexts", "groups"), CASES)
def test_the_torch_paths_agree_with_float64_too(contexts: list[int], groups: Groups) -> None:
    case = make_case(SHAPES[2], contexts)
    blocks = [(m, n // 32 * 32) for m, n in groups]  # whole blocks of 32
    shown, shared = share(case, blocks)
    for implementation in (cpu.shared_decode, reference.shared_decode):
        got = implementation(
            shown.query,
            shown.key_pool,
            shown.value_pool,
            shown.block_tables,
            shown.context_lens,
            shared,
            shown.shape.scale,
        )
        assert_near(got, expected(case, blocks))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([([0, 0], 16)], "sequence 0 is given twice"),
        ([([0], 16), ([1, 0], 16)], "sequence 0 is given twice"),
        ([([2], 16)], "sequence 2 is given twice or not in 2"),
        ([([], 16)], "16 positions of 0 sequences"),
        ([([0, 1], -16)], "-16 positions of 2 sequences"),
    ],
)
def test_groups_that_contradict_each_other_are_refused(groups: Groups, message: str) -> None:
    with pytest.raises(ValueError, match=f"^groups: {message}"):
        SharedPrefixes.of(groups, 2)


@pytest.mark.parametrize("implementation", [shared_decode, cpu.shared_decode])
def test_prefixes_of_another_batch_are_refused(
    implementation: Callable[..., Tensor], device: torch.device
) -> None:
    case = make_case(SMALL, [40, 41], device=device)
    with pytest.raises(ValueError, match="^seq_lens: want shape"):
        implementation(
            case.query,
            case.key_pool,
            case.value_pool,
            case.block_tables,
            case.context_lens,
            SharedPrefixes.of([], 3, device),
            1.0,
        )


@pytest.mark.parametrize("implementation", [cpu.shared_decode, reference.shared_decode])
def test_more_shared_than_a_context_holds_is_refused_on_the_host(
    implementation: Callable[..., Tensor],
) -> None:
    case = make_case(SMALL, [40, 20])
    with pytest.raises(ValueError, match="^lens: 32 shared positions pass sequence 1's context"):
        implementation(
            case.query,
            case.key_pool,
            case.value_pool,
            case.block_tables,
            case.context_lens,
            SharedPrefixes.of([([0, 1], 32)], 2),
            1.0,
        )


def test_the_shipped_rows_of_both_kernels_split_and_tile_alike() -> None:
    for arch in ARCHITECTURES:
        for dtype in (torch.float32, torch.bfloat16, FP8):
            for head_dim in (64, 128, 256):
                shared = lookup("shared_decode", arch, dtype, head_dim)
                tail = lookup("paged_decode", arch, dtype, head_dim)
                assert (shared.split, shared.tile) == (tail.split, tail.tile)


def test_sizes_whose_splits_differ_are_refused(device: torch.device) -> None:
    case = make_case(SMALL, [40, 41], device=device)
    shown, shared = share(case, [])
    with pytest.raises(ValueError, match="^launch: want paged_decode's split 32, got 64"):
        shared_decode(
            shown.query,
            shown.key_pool,
            shown.value_pool,
            shown.block_tables,
            shown.context_lens,
            shared,
            1.0,
            launch=replace(LAUNCH, split=64),
            tail_launch=LAUNCH,
        )
