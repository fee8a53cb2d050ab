"""The reference against attention spelt out query by query in float64."""

import pytest
import torch
from torch import Tensor

from kvtier.kernels import reference
from tests.kernels.cases import SHAPES, Case, Shape, assert_near, make_case


def dense(case: Case, seq: int, row: int, position: int) -> Tensor:
    """One query's attention from the definition: position by position, head by head."""
    shape = case.shape
    out = torch.zeros((shape.heads, shape.head_dim), dtype=torch.float64)
    for head in range(shape.heads):
        kv_head = head * shape.kv_heads // shape.heads
        scores, values = [], []
        for past in range(position + 1):
            block = int(case.block_tables[seq, past // shape.block_size])
            offset = past % shape.block_size
            key = case.key_pool[block, kv_head, offset]
            scores.append(shape.scale * float(case.query[row, head].dot(key)))
            values.append(case.value_pool[block, kv_head, offset])
        weights = torch.tensor(scores, dtype=torch.float64).exp()
        out[head] = torch.einsum("t,td->d", weights / weights.sum(), torch.stack(values))
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_reference_is_attention_from_its_definition(shape: Shape) -> None:
    case = make_case(shape, [0, 1, 17, 33], dtype=torch.float64)
    got = reference.paged_decode(
        case.query,
        case.key_pool,
        case.value_pool,
        case.block_tables,
        case.context_lens,
        shape.scale,
    )
    assert not got[0].any()
    for seq, context in [(1, 1), (2, 17), (3, 33)]:
        assert_near(got[seq], dense(case, seq, seq, context - 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_reference_is_causal_attention_from_its_definition(shape: Shape) -> None:
    case = make_case(shape, [5, 17, 20], queries=[5, 0, 3], dtype=torch.float64)
    got = reference.paged_prefill(
        case.query,
        case.key_pool,
        case.value_pool,
        case.block_tables,
        case.query_starts,
        case.query_lens,
        case.context_lens,
        shape.scale,
    )
    owned = set()
    for seq, (count, context) in enumerate([(5, 5), (0, 17), (3, 20)]):
        for index in range(count):
            row = int(case.query_starts[seq]) + index
            owned.add(row)
            assert_near(got[row], dense(case, seq, row, context - count + index))
    unowned = [row for row in range(got.shape[0]) if row not in owned]
    assert unowned and not got[unowned].any()
