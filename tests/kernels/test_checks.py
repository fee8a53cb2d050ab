"""Calls whose arguments do not fit are refused by every implementation, naming the argument."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier.kernels import block_copy as triton_copy
from kvtier.kernels import cpu, reference
from kvtier.kernels import paged_decode as triton_decode
from kvtier.kernels import paged_prefill as triton_prefill
from kvtier.kernels import rope_write as triton_rope
from kvtier.kernels import write_kv as triton_write

CALLS: dict[str, list[Callable[..., Any]]] = {
    "write_kv": [triton_write.write_kv, cpu.write_kv, reference.write_kv],
    "block_copy": [triton_copy.block_copy, cpu.block_copy, reference.block_copy],
    "rope_write": [triton_rope.rope_write, cpu.rope_write, reference.rope_write],
    "paged_decode": [triton_decode.paged_decode, cpu.paged_decode, reference.paged_decode],
    "paged_prefill": [triton_prefill.paged_prefill, cpu.paged_prefill, reference.paged_prefill],
}


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def good(name: str) -> dict[str, Any]:
    """Arguments that fit: two sequences, four heads on two KV heads of 24, blocks of 16."""
    pool = torch.zeros((3, 2, 2, 16, 24))
    if name == "block_copy":
        return {"source_pool": pool, "target_pool": pool, "pairs": torch.tensor([[0, 1]]).int()}
    arguments: dict[str, Any] = {"key_pool": pool[:, 0], "value_pool": pool[:, 1]}
    if name == "write_kv":
        arguments |= {"key": torch.zeros((2, 2, 24)), "value": torch.zeros((2, 2, 24))}
        return arguments | {"slot_mapping": ints(2, dtype=torch.int64)}
    if name == "rope_write":
        arguments |= {name: torch.zeros((2, 2, 24)) for name in ("key", "value")}
        arguments |= {"cos": torch.zeros((2, 12)), "sin": torch.zeros((2, 12))}
        arguments |= {"query": torch.zeros((2, 4, 24))}
        return arguments | {"slot_mapping": ints(2, dtype=torch.int64)}
    arguments |= {"query": torch.zeros((2, 4, 24)), "scale": 1.0}
    arguments |= {"block_tables": ints(2, 3), "context_lens": torch.tensor([1, 1]).int()}
    if name == "paged_prefill":
        arguments |= {"query_starts": ints(2), "query_lens": torch.tensor([1, 0]).int()}
    return arguments


def strided_pool() -> Tensor:
    return torch.zeros((3, 2, 2, 16, 48))[..., ::2]


def odd_pool() -> Tensor:
    return torch.zeros((3, 2, 16, 23))


def fp8(**scales: Tensor) -> dict[str, Tensor]:
    """Pools of FP8 with scales that fit, but for those given."""
    pools = {name: torch.zeros((3, 2, 16, 24)).to(torch.float8_e4m3fn) for name in POOLS}
    return {**pools, "key_scale": torch.ones(2), "value_scale": torch.ones(2), **scales}


POOLS = ("key_pool", "value_pool")

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("write_kv", {"key": torch.zeros((2, 3, 24))}, "key: want"),
    ("write_kv", {"key": torch.zeros((2, 2, 24)).half()}, "key: want the pool's"),
    ("write_kv", {"value": torch.zeros((3, 2, 24))}, "value: want key's shape"),
    ("write_kv", {"slot_mapping": ints(2)}, "slot_mapping: want int64"),
    ("write_kv", {"slot_mapping": ints(3, dtype=torch.int64)}, "slot_mapping: want shape"),
    ("write_kv", {"key": torch.zeros((2, 2, 48))[..., ::2]}, "key: head_dim must be"),
    ("rope_write", {"query": torch.zeros((2, 4, 12))}, "query: want"),
    ("rope_write", {"query": torch.zeros((2, 4, 48))[..., ::2]}, "query: head_dim must be"),
    ("rope_write", {"key": torch.zeros((2, 3, 24))}, "key: want"),
    ("rope_write", {"key": torch.zeros((3, 2, 24))}, "key: want"),
    ("rope_write", {"value": torch.zeros((2, 2, 24)).half()}, "value: want query's"),
    ("rope_write", {"value": torch.zeros((2, 2, 48))[..., ::2]}, "value: head_dim must be"),
    ("rope_write", {"key_pool": odd_pool(), "value_pool": odd_pool()}, "key_pool: want an even"),
    (
        "rope_write",
        {name: torch.zeros((2, 2, 24)).half() for name in ("query", "key", "value")},
        "query: want the pool's",
    ),
    ("rope_write", {"cos": torch.zeros((2, 24))}, "cos: want"),
    ("rope_write", {"sin": torch.zeros((2, 12)).half()}, "sin: want"),
    ("rope_write", {"sin": torch.zeros((12, 2)).t()}, "cos: want sin's strides"),
    ("rope_write", {"slot_mapping": ints(2)}, "slot_mapping: want int64"),
    ("rope_write", {"out": torch.zeros((2, 4, 24)).half()}, "out: want"),
    ("rope_write", {"out": torch.zeros((2, 3, 24))}, "out: want"),
    ("rope_write", {"out": torch.zeros((2, 4, 48))[..., ::2]}, "out: head_dim must be"),
    ("rope_write", {"key_scale": torch.ones(2)}, "key_scale: give both"),
    (
        "rope_write",
        {"key_scale": torch.ones(2), "value_scale": torch.ones(2)},
        "key_scale: only FP8",
    ),
    ("rope_write", fp8(key_scale=torch.ones(3)), "key_scale: want float32"),
    ("rope_write", fp8(value_scale=torch.ones(2).double()), "value_scale: want float32"),
    ("rope_write", fp8(value_scale=torch.ones(4)[::2]), "value_scale: must be contiguous"),
    ("block_copy", {"source_pool": torch.zeros((3, 16))}, "source_pool: want"),
    ("block_copy", {"source_pool": strided_pool()}, "source_pool: blocks must be contiguous"),
    ("block_copy", {"target_pool": strided_pool()}, "target_pool: blocks must be contiguous"),
    ("block_copy", {"target_pool": torch.zeros((3, 2, 16, 24))}, "target_pool: want"),
    ("block_copy", {"target_pool": torch.zeros((3, 2, 2, 16, 24)).half()}, "target_pool: want"),
    (
        "block_copy",
        {name: torch.zeros((3, 2, 16, 5)).half() for name in ("source_pool", "target_pool")},
        "source_pool: want heads of a multiple of 4 bytes",
    ),
    ("block_copy", {"pairs": ints(2)}, "pairs: want"),
    ("block_copy", {"pairs": ints(2, 3)}, "pairs: want shape"),
    ("block_copy", {"pairs": ints(1, 2, dtype=torch.int64)}, "pairs: want int32"),
    ("block_copy", {"pairs": ints(2, 3).t()[:, :2].t()[:, ::2]}, "pairs: must be contiguous"),
    ("block_copy", {"tokens": ints(2)}, "tokens: want shape"),
    ("block_copy", {"tokens": ints(1, dtype=torch.int64)}, "tokens: want int32"),
    (
        "block_copy",
        {"pairs": torch.tensor([[0, 1], [1, 2]]).int()[:0], "tokens": ints(3)},
        "tokens: want shape",
    ),
    ("paged_decode", {"key_pool": torch.zeros((3, 2, 16))}, "key_pool: want"),
    ("paged_decode", {"value_pool": torch.zeros((3, 2, 16, 24))}, "value_pool: want key_pool's"),
    ("paged_decode", {"query": torch.zeros((2, 5, 24))}, "query: want"),
    ("paged_decode", {"query": torch.zeros((2, 4, 24)).double()}, "query: want the pool's"),
    ("paged_decode", {"query": torch.zeros((2, 4, 48))[..., ::2]}, "query: head_dim must be"),
    ("paged_decode", {"block_tables": ints(3, 3)}, "block_tables: want"),
    ("paged_decode", {"block_tables": ints(2, 3, dtype=torch.int64)}, "block_tables: want int32"),
    ("paged_decode", {"context_lens": torch.zeros(2)}, "context_lens: want int32"),
    ("paged_decode", {"key_scale": torch.ones(2)}, "key_scale: give both"),
    *(
        (name, {"key_scale": torch.ones(2), "value_scale": torch.ones(2)}, "key_scale: only FP8")
        for name in ("paged_decode", "paged_prefill")
    ),
    ("paged_prefill", {"context_lens": ints(2, 1)}, "context_lens: want shape"),
    ("paged_prefill", {"query_starts": ints(1)}, "query_starts: want shape"),
    ("paged_prefill", {"query_lens": ints(2, dtype=torch.int64)}, "query_lens: want int32"),
    ("paged_prefill", {"block_tables": ints(1, 3)}, "block_tables: want"),
]


@pytest.mark.parametrize(("name", "change", "message"), BAD)
def test_arguments_that_do_not_fit_are_refused_by_name(
    name: str, change: dict[str, Any], message: str
) -> None:
    for call in CALLS[name]:
        with pytest.raises(ValueError, match=f"^{message}"):
            call(**(good(name) | change))


@pytest.mark.parametrize("name", ["paged_decode", "paged_prefill"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_scale": torch.ones(3)}, r"value_scale: want float32 \[2\]"),
        ({"key_scale": torch.ones(2).half()}, r"key_scale: want float32 \[2\]"),
        ({"query": torch.zeros((2, 4, 24)).double()}, "query: want a 16- or 32-bit float"),
    ],
)
def test_what_does_not_fit_an_fp8_pool_is_refused_by_name(
    name: str, change: dict[str, Any], message: str
) -> None:
    arguments = good(name) | {"key_scale": torch.ones(2), "value_scale": torch.ones(2)}
    for pool in ("key_pool", "value_pool"):
        arguments[pool] = arguments[pool].to(torch.float8_e4m3fn)
    for call in CALLS[name]:
        with pytest.raises(ValueError, match=f"^{message}"):
            call(**(arguments | change))


LENGTHS: list[tuple[str, dict[str, Any], str]] = [
    ("paged_decode", {"context_lens": torch.tensor([49, 1]).int()}, "49 tokens pass the table's"),
    ("paged_decode", {"context_lens": torch.tensor([1, -2]).int()}, "-2 tokens cannot end in 1"),
    ("paged_prefill", {"context_lens": torch.tensor([0, 1]).int()}, "0 tokens cannot end in 1"),
    ("paged_prefill", {"query_starts": torch.tensor([2, 0]).int()}, "rows 2 to 3 pass the 2"),
]


@pytest.mark.parametrize(("name", "change", "message"), LENGTHS)
@pytest.mark.parametrize("place", [1, 2])
def test_lengths_that_do_not_fit_are_refused_where_they_are_on_the_host(
    place: int, name: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CALLS[name][place](**(good(name) | change))
