"""The table of launch sizes: complete, chosen by model and machine, refusing what it lacks."""

import pytest
import torch

from kvtier.kernels.configs import ARCHITECTURES, HEAD_DIMS, TABLE, Launch, architecture, lookup

KERNELS = sorted({kernel for kernel, _, _ in TABLE})


def test_every_kernel_has_a_row_for_each_architecture_and_element_size() -> None:
    sizes = {kernel: {key[2] for key in TABLE if key[0] == kernel} for kernel in KERNELS}
    wanted = {(k, arch, size) for k in KERNELS for arch in ARCHITECTURES for size in sizes[k]}
    assert wanted == set(TABLE)
    assert len(TABLE) * len(HEAD_DIMS) >= 24


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_depends_on_nothing_but_model_and_machine(kernel: str) -> None:
    want = TABLE[kernel, 90, 2]
    for dtype in (torch.float16, torch.bfloat16):
        got = [lookup(kernel, 90, dtype, head_dim) for head_dim in (24, 64, 80, 128, 129, 256)]
        assert got == [want[0], want[0], want[1], want[1], want[2], want[2]]


def test_an_unknown_architecture_takes_the_nearest_below() -> None:
    for unknown, known in [(70, 80), (86, 80), (89, 80), (103, 100), (120, 100)]:
        got = lookup("paged_decode", unknown, torch.bfloat16, 128)
        assert got is TABLE["paged_decode", known, 2][1]
    assert architecture(torch.device("cpu")) == 80


def test_what_the_table_lacks_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="head_dim 257"):
        lookup("paged_decode", 90, torch.bfloat16, 257)
    with pytest.raises(ValueError, match="float64"):
        lookup("paged_prefill", 90, torch.float64, 64)


@pytest.mark.parametrize(
    ("field", "value"), [("tile", 48), ("tile", 8), ("rows", 24), ("split", 32), ("split", 96)]
)
def test_sizes_that_no_kernel_can_have_are_refused(field: str, value: int) -> None:
    sizes = {"tile": 64, "warps": 4, "stages": 2} | {field: value}
    with pytest.raises(ValueError, match=f"^{field}: want a power of two"):
        Launch(**sizes)
