"""The CPU attention bench: what it counts as copied, and its verdict."""

import torch

from bench.attention import (
    HEAD_DIM,
    JUDGED,
    KV_HEADS,
    Rig,
    copied_bytes,
    short_of,
    step_by_gathering,
    step_from_mirror,
)

TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 4


def test_a_step_from_the_mirror_copies_one_token_a_layer_and_a_gathering_one_the_context() -> None:
    rig = Rig(layers=3, context=80)
    few = copied_bytes(rig, step_from_mirror)
    many = copied_bytes(rig, step_by_gathering)
    queries = 3 * 9 * HEAD_DIM * 4 * 4  # attention's own copies of one row of queries or results
    assert 3 * TOKEN_BYTES <= few <= 3 * TOKEN_BYTES + queries
    # Blocks come out of the pool by one copy, and their heads are put in order by another.
    assert 3 * 80 * TOKEN_BYTES * 2 <= many <= 3 * 80 * TOKEN_BYTES * 2 + queries


def test_both_steps_compute_the_same() -> None:
    rig = Rig(layers=2, context=48)
    mirrored, gathered = step_from_mirror(rig), step_by_gathering(rig)
    torch.testing.assert_close(mirrored, gathered)
    assert mirrored.shape == (1, 9, HEAD_DIM)


def test_a_ratio_below_the_target_is_named() -> None:
    ratios = dict.fromkeys(JUDGED, 0.9)
    assert short_of(ratios) == []
    assert short_of(ratios | {"attend_48": 0.89, "gather": 0.1}) == ["attend_48"]
