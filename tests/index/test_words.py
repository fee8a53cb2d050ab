"""Tokens and block keys: what is accepted, and golden vectors for the key chain."""

from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.index.errors import BadTokens
from kvtier.index.words import KEY_BYTES, ROOT_KEY, BlockKey, as_tokens, block_keys

NS = bytes(range(32))
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=50)

# Written down once; a change means that every store on disk misses.
GOLDEN = [
    "01e54fb2a265d035e4720108136753c01b827f5653af99567d0d22e1c9319c0a",
    "e6b2a1173aac960a431c466102915ac3055d71b555bfd3092589e1a66ccf9d6a",
]


def test_the_key_chain_has_not_changed() -> None:
    keys = block_keys(NS, ROOT_KEY, np.array([1, 2, 3, 4, 5, 6, 7], np.int32), 3)
    assert [key.hex() for key in keys] == GOLDEN


@given(IDS, st.sampled_from([1, 3, 16]))
def test_a_key_is_keyed_blake2b_of_the_parent_key_and_the_blocks_ids(
    ids: list[int], size: int
) -> None:
    keys = block_keys(NS, ROOT_KEY, np.array(ids, np.int32), size)
    assert len(keys) == len(ids) // size
    parent = bytes(ROOT_KEY)
    for i, key in enumerate(keys):
        words = b"".join(t.to_bytes(4, "little") for t in ids[i * size : (i + 1) * size])
        parent = blake2b(parent + words, key=NS, digest_size=32).digest()
        assert key == parent and len(key) == KEY_BYTES


@given(IDS, st.integers(0, 5))
def test_keys_may_be_chained_in_pieces(ids: list[int], cut: int) -> None:
    tokens = np.array(ids, np.int32)
    whole = block_keys(NS, ROOT_KEY, tokens, 3)
    cut = min(cut, len(whole))
    head = block_keys(NS, ROOT_KEY, tokens[: cut * 3], 3)
    rest = block_keys(NS, head[-1] if head else ROOT_KEY, tokens[cut * 3 :], 3)
    assert head + rest == whole


def test_a_key_depends_on_namespace_parent_and_every_token() -> None:
    tokens = np.array([5, 6, 7], np.int32)
    key = block_keys(NS, ROOT_KEY, tokens, 3)[0]
    others = [
        block_keys(NS[::-1], ROOT_KEY, tokens, 3)[0],
        block_keys(NS, BlockKey(bytes([1]) * KEY_BYTES), tokens, 3)[0],
    ]
    for i in range(3):
        changed = tokens.copy()
        changed[i] += 1
        others.append(block_keys(NS, ROOT_KEY, changed, 3)[0])
    assert len({key, *others}) == 6


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.uint64])
def test_integer_ids_become_contiguous_int32(dtype: type[np.integer]) -> None:
    spread: npt.NDArray[np.integer] = np.arange(10, dtype=dtype)[::3]
    tokens = as_tokens(spread)
    assert tokens.dtype == np.int32 and tokens.flags.c_contiguous
    assert tokens.tolist() == [0, 3, 6, 9]


def test_an_int32_array_is_not_copied_and_an_empty_list_is_no_tokens() -> None:
    ids = np.arange(5, dtype=np.int32)
    assert np.shares_memory(as_tokens(ids), ids)
    assert as_tokens([]).shape == (0,)


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros((2, 2), np.int32),
        np.zeros(3, np.float32),
        np.array([True]),
        np.array([0, -1], np.int32),
        np.array([2**31], np.int64),
        np.array([2**64 - 1], np.uint64),
    ],
    ids=["two dimensions", "floats", "truth values", "negative", "33 bits", "64 bits"],
)
def test_anything_else_is_refused_in_one_line(bad: "npt.NDArray[np.integer]") -> None:
    with pytest.raises(BadTokens) as refusal:
        as_tokens(bad)
    assert "tokens:" in str(refusal.value) and "\n" not in str(refusal.value)
