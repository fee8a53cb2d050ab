"""Attention launches wait for nothing and can be captured: sizes come from shapes alone."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier.kernels.paged_decode import paged_decode
from kvtier.kernels.paged_prefill import paged_prefill
from kvtier.kernels.prefixes import SharedPrefixes
from kvtier.kernels.shared_decode import shared_decode
from kvtier.kernels.workspace import DecodeWorkspace
from tests.kernels.cases import Shape, make_case

KERNELS = {
    "paged_decode": "kvtier.kernels.paged_decode.paged_decode_kernel",
    "shared_decode": "kvtier.kernels.shared_decode.shared_decode_kernel",
    "paged_prefill": "kvtier.kernels.paged_prefill.paged_prefill_kernel",
}


class Recorder:
    """Stands for a kernel: notes the grid of each launch."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *arguments, **options: None


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Recorder]]:
    found = {name: Recorder() for name in KERNELS}
    for name, path in KERNELS.items():
        monkeypatch.setattr(path, found[name])
    yield found


def test_launches_read_no_value_of_any_tensor(recorders: dict[str, Recorder]) -> None:
    """Tensors on torch's meta device have shapes and no values: reading one raises."""

    def nowhere(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    half = torch.float16
    pool = nowhere(50, 2, 2, 16, 64, dtype=half)
    keys, values = pool[:, 0], pool[:, 1]
    query, tables, lens = nowhere(3, 8, 64, dtype=half), nowhere(3, 100), nowhere(3)
    shared = SharedPrefixes(nowhere(1, 3), nowhere(1), lens)
    workspace = DecodeWorkspace(3, 8, 64, 4, "meta")
    paged_decode(query, keys, values, tables, lens, 1.0, workspace=workspace)
    paged_decode(query, keys, values, tables, lens, 1.0)
    shared_decode(query, keys, values, tables, lens, shared, 1.0, workspace=workspace)
    paged_prefill(query, keys, values, tables, lens, lens, lens, 1.0)
    assert recorders["paged_decode"].grids == [(3, 2, 4)] * 3
    assert recorders["shared_decode"].grids == [(1, 2, 4)]
    assert recorders["paged_prefill"].grids == [(3, 2)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are captured on a GPU")
@pytest.mark.parametrize("sharing", [False, True])
def test_a_captured_decode_step_serves_other_lengths_tables_and_groups(sharing: bool) -> None:
    shape = Shape(32, 8, 128, 16)
    case = make_case(shape, [2000, 1, 1536, 600], dtype=torch.bfloat16, device="cuda")
    workspace = DecodeWorkspace(4, 32, 128, 4, "cuda")
    query, tables, lens = (
        each.clone() for each in (case.query, case.block_tables[:, :125], case.context_lens)
    )
    none = SharedPrefixes.of([([0, 1], 0)], 4, "cuda")

    def step(shared: SharedPrefixes) -> Tensor:
        arguments = (query, case.key_pool, case.value_pool, tables, lens)
        if sharing:
            return shared_decode(*arguments, shared, shape.scale, workspace=workspace)
        return paged_decode(*arguments, shape.scale, workspace=workspace)

    step(none)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(none)
    again = SharedPrefixes.of([([0, 2], 1024)], 4, "cuda")
    for order, others in [([0, 1, 2, 3], None), ([3, 2, 1, 0], None), ([2, 0, 2, 1], again)]:
        query.copy_(case.query[order].flip(1))
        tables.copy_(case.block_tables[order, :125])
        lens.copy_(case.context_lens[order])
        given = others or SharedPrefixes.of([([0, 1], 0)], 4, "cuda")
        for name in ("members", "lens", "seq_lens"):
            getattr(none, name).copy_(getattr(given, name))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, step(given))
        assert not workspace.arrived.any()
